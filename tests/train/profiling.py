"""What ranks run in tests of costs and profiles."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
import torch
from runs import default_dtype
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tierstore.errors import ConfigError
from tierstore.train.data_parallel.collective_costs import fit_cost_model
from tierstore.train.data_parallel.overlap import OverlapProfiler
from tierstore.train.data_parallel.overlap_steps import Summary
from tierstore.train.data_parallel.reducer import GradientReducer

WIDTH, LAYERS = 192, 6


def fitted(rank: int, ranks: int, reduce: str) -> dict[str, Any]:
    torch.set_num_threads(rank + 1)  # another number on each rank
    fit = fit_cost_model(reduce=reduce, sizes_bytes=(1 << 12, 1 << 16, 1 << 20), repeats=3)  # type: ignore[arg-type]
    return asdict(fit)


def sent_in_a_fit(rank: int, ranks: int) -> set[int]:
    """The bytes of the collectives whose time is taken, where torch's default dtype is not fp32."""
    sent, all_reduce = set(), distributed.all_reduce

    def noted(tensor: torch.Tensor, **options: Any) -> Any:
        sent.update({tensor.nbytes} if options.get("async_op") else ())
        return all_reduce(tensor, **options)

    with default_dtype(torch.float64), pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", noted)
        fit_cost_model(sizes_bytes=(1 << 12, 1 << 16), repeats=1)
    return sent


def refused(rank: int, ranks: int) -> None:
    for options in ({"sizes_bytes": (4096,)}, {"sizes_bytes": (4, 4096)}, {"repeats": 0}):
        with pytest.raises(ConfigError, match="a fit needs two sizes"):
            fit_cost_model(**options)  # type: ignore[arg-type]


def fitted_by_ticks(rank: int, ranks: int) -> tuple[float, list[float]]:
    ticks = itertools.count(step=rank + 1)
    fit = fit_cost_model(sizes_bytes=("4KiB", 1 << 16), repeats=1, clock=lambda: float(next(ticks)))
    return fit.model.launch_s, [one.seconds for one in fit.timings]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def traced(rank: int, ranks: int, path: str, kind: str, shapes: bool) -> None:
    """Three steps of DDP or FSDP under torch's profiler; rank 0 writes the trace."""
    module: nn.Module = layers()
    if kind == "ddp":
        # 148,224 B a layer: two of them reach 0.25 MiB.
        module = DistributedDataParallel(module, bucket_cap_mb=0.25, find_unused_parameters=True)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in module.children():
            fully_shard(layer)
        fully_shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.randn(32, WIDTH)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as profiler:
        for _ in range(3):
            module(data).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        profiler.export_chrome_trace(path)


def profiled(rank: int, ranks: int, steps: int) -> tuple[Summary, list[tuple[tuple[str, ...], ...]], str]:
    """Steps of a reducer: their medians, the names in their buckets, and the report."""
    module = layers()
    data = torch.randn(32, WIDTH)
    with (
        GradientReducer(module, bucket=300_000, first_bucket=None, timed=True) as reducer,
        OverlapProfiler(reducer, skip=2) as profiler,
    ):
        for _ in range(steps + 2):
            with profiler.step():
                reducer.backward(reducer(data).sum())
        names = [step.names for step in profiler.steps]
        assert [list(bucket) for bucket in names[-1]] == reducer.layout()
        return profiler.summary(), names, profiler.report()
