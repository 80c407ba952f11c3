"""Alpha and beta of the real interconnect, from timed collectives.

Scope: timing collectives of several sizes over a process group, agreed between its ranks.
Not here: the fit (`plan/cost_model.py`), what follows from it (`plan/buckets.py`).
Owner: the calling thread; all ranks call together, while nothing else uses the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from tierstore.config import parse_size
from tierstore.errors import ConfigError
from tierstore.plan.cost_model import Fit, Timing, fit_timings
from tierstore.train.data_parallel.options import check_reduce
from tierstore.train.ranks import Ranks, reduce_scatter_flat

SIZES_BYTES = tuple(4**exponent for exponent in range(6, 13))  # 4 KiB to 16 MiB
_WARM_UP = 2
_ELEMENT_BYTES = 4


class Collective(Protocol):
    """Something to time."""

    def launch(self, nbytes: int) -> Callable[[], None]:
        """Starts a collective of `nbytes` on a free channel; what it returns waits for its end."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Medians of one rank, by size.

    Attributes:
        launch_s: until a launch returns.
        cores: CPU time of the process while collectives run, as a share of that of the threads that compute.
    """

    by_size: tuple[Timing, ...]
    launch_s: float
    cores: float


def time_collectives(
    collective: Collective,
    sizes_bytes: Sequence[int],
    repeats: int,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float] = time.process_time,
) -> Timings:
    """Times every size in turn, `repeats` rounds of it, so that a slow moment does not fall on one size alone."""
    launches: list[float] = []
    cpu_s = 0.0
    seconds: dict[int, list[float]] = {size: [] for size in sizes_bytes}
    for round_number in range(-_WARM_UP, repeats):
        for size in sizes_bytes:
            begun_s, cpu_begun_s = clock(), cpu_clock()
            wait = collective.launch(size)
            launched_s = clock()
            wait()
            if round_number >= 0:
                launches.append(launched_s - begun_s)
                seconds[size].append(clock() - begun_s)
                cpu_s += cpu_clock() - cpu_begun_s
    taken_s = sum(map(sum, seconds.values()))
    by_size = tuple(Timing(size, median(times)) for size, times in seconds.items())
    busy_cores = cpu_s / taken_s if taken_s > 0 else 0.0
    return Timings(by_size, median(launches), min(1.0, busy_cores / torch.get_num_threads()))


def fit_cost_model(
    process_group: ProcessGroup | Ranks | None = None,
    *,
    device: torch.device | str = "cpu",
    reduce: Literal["all_reduce", "reduce_scatter"] = "all_reduce",
    sizes_bytes: Sequence[int | str] = SIZES_BYTES,
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> Fit:
    """The cost of a collective on this group while nothing else runs: the same result on all ranks.

    Takes about `(repeats + 2) * sum(sizes_bytes)` of traffic, and memory for the largest size. The time of a size is
    the median over rounds, and of these the largest over ranks: a collective is done when the last rank has its result.

    Args:
        process_group: None is the default group; a `Ranks` is used and not closed.
        sizes_bytes: sizes of the tensors, at least two different ones, also as text ("1MiB"); bytes on the wire depend
            on the algorithm.

    Raises:
        ConfigError: fewer than two sizes, one below 4 B per rank, or an unknown word for `reduce`.
        RankLost: a rank did not come.
    """
    check_reduce(reduce)
    where, wanted = torch.device(device), sorted(map(parse_size, sizes_bytes))
    ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group, device=where)
    try:
        sizes = sorted({size - size % (_ELEMENT_BYTES * ranks.count) for size in wanted})
        if len(sizes) < 2 or sizes[0] <= 0 or repeats < 1:
            raise ConfigError(
                f"a fit needs two sizes that differ, of at least {_ELEMENT_BYTES * ranks.count} B, and a repeat, "
                f"not {wanted} and {repeats}"
            )
        group = _Group(ranks, where, max(sizes), scatter=reduce == "reduce_scatter")
        with ranks.waiting("timed collectives"):
            timings = group.agreed(time_collectives(group, sizes, repeats, clock))
    finally:
        if ranks is not process_group:
            ranks.close()
    fit = fit_timings(timings.by_size)
    # A GPU's collectives take no cores from computing, though a CPU thread may wait for them busily.
    cores = timings.cores if where.type == "cpu" else 0.0
    return replace(fit, model=replace(fit.model, launch_s=timings.launch_s, cores=cores))


class _Group:
    """Collectives of a real group."""

    def __init__(self, ranks: Ranks, device: torch.device, most_bytes: int, *, scatter: bool) -> None:
        self._ranks = ranks
        self._group: Any = ranks.group
        self._device = device
        self._flat = torch.zeros(most_bytes // _ELEMENT_BYTES, dtype=torch.float32, device=device)
        self._shard = self._flat.new_zeros(self._flat.numel() // ranks.count) if scatter else None

    def launch(self, nbytes: int) -> Callable[[], None]:
        elements = nbytes // _ELEMENT_BYTES
        flat = self._flat[:elements]
        if self._shard is None:
            work = distributed.all_reduce(flat, group=self._group, async_op=True)
        else:
            part = self._shard[: elements // self._ranks.count]
            work = reduce_scatter_flat(part, flat, self._group, async_op=True)

        def wait() -> None:
            if work is not None:
                work.wait()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return wait

    def agreed(self, timings: Timings) -> Timings:
        """For each figure, the largest of all ranks."""
        figures = [*(one.seconds for one in timings.by_size), timings.launch_s, timings.cores]
        seconds = torch.tensor(figures, dtype=torch.float64, device=self._device)
        distributed.all_reduce(seconds, op=distributed.ReduceOp.MAX, group=self._group)
        *by_size, launch_s, cores = seconds.tolist()
        found = tuple(Timing(one.nbytes, s) for one, s in zip(timings.by_size, by_size, strict=True))
        return Timings(found, launch_s, cores)
