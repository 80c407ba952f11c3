"""Adam on the CPU: our one-pass kernel, torch's fused AdamW, DeepSpeedCPUAdam; fp32, and bf16 in and out.

Scope: contestants and rows; `contend` is our own side. Not here: the peers' (`tools/peers/adam_*.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierstore.apps.bench.case import (
    Bar,
    BenchOptions,
    Case,
    Contestant,
    Results,
    Row,
    best_median,
    ours,
    peer,
    ratio,
    row_of,
)
from tierstore.apps.bench.serve import Round

_WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
_OURS = {dtype: f"tierstore, {dtype}" for dtype in _WEIGHT_BYTES}
"""Each in a process of its own, whose peak is that of one dtype."""
_TORCH, _DEEPSPEED, _MEMORY = "torch fused AdamW", "DeepSpeedCPUAdam", "memory"
_PASSES = 5


def heats(options: BenchOptions, scratch: Path) -> list[list[Contestant]]:
    """All in one heat: 64M parameters take 1 to 2 GiB in each contestant."""
    given = {"params": options.params, "passes": _PASSES}
    contestants = [ours(name, "adam", dtype=dtype, **given) for dtype, name in _OURS.items()]
    contestants.append(ours(_MEMORY, "floors"))
    if options.wants("torch"):
        contestants.append(peer(_TORCH, "adam_torch", options.peer_python, **given))
    if options.wants("deepspeed"):
        contestants.append(peer(_DEEPSPEED, "adam_deepspeed", options.peer_python, **given))
    return [contestants]


def rows(options: BenchOptions, results: Results) -> Sequence[Row]:
    """Parameters per second."""
    memory = max(results[_MEMORY].median(kind) or 0.0 for kind in ("triad", "in place"))
    own = results[_OURS["bf16"]].median("bf16")
    bars = [
        Bar(1.8, "x DeepSpeedCPUAdam with casts", ratio(own, best_median(results, _DEEPSPEED, "bf16"))),
        Bar(1.0, "x torch's fused AdamW on fp32 alone", ratio(own, best_median(results, _TORCH, "fp32"))),
    ]
    table: list[Row] = []
    for figure, what in (("bf16", "bf16 in and out"), ("fp32", "fp32")):
        count = f"{options.params:,}" if options.params % 2**20 else f"{options.params >> 20}M"
        work, moved = f"Adam, {what}, {count} parameters", bytes_per_parameter(figure)
        others = {_MEMORY, *_OURS.values()} - {_OURS[figure]}
        for name, result in results.items():
            if name not in others:
                table.append(row_of(
                    result, figure, work, "Gparam/s", floor=memory / moved or None,
                    floor_of=f"{moved} B per parameter, of which the gradient is only read, over the faster of the two "
                    "rates of memory",
                    bars=bars if name == _OURS["bf16"] else (),
                ))  # fmt: skip
    return table + [row_of(results[_MEMORY], kind, f"memory, {kind}", "GB/s") for kind in ("triad", "in place")]


def bytes_per_parameter(dtype: str) -> int:
    """Bytes that our kernel moves, the fewest with an fp32 master: weight and state both ways, the gradient once."""
    from tierstore.kernels.adam import state_bytes_per_element

    return 3 * _WEIGHT_BYTES[dtype] + 2 * state_bytes_per_element(dtype)


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Our own optimizer on one large parameter. Options: `dtype`, `params`, and `passes` of a round."""
    import torch

    from tierstore.device.spans import TORCH_DTYPES
    from tierstore.train.cpu_adam import CPUAdam

    parameter = torch.nn.Parameter(torch.randn(options["params"]).to(TORCH_DTYPES[options["dtype"]]))
    parameter.grad = torch.full_like(parameter, 1e-2)
    with contextlib.closing(CPUAdam([parameter], lr=1e-3, weight_decay=0.01)) as optimizer:

        def run_round(number: int) -> tuple[float, dict[str, float]]:
            start_s = time.perf_counter()
            for _ in range(options["passes"]):
                optimizer.step()
            seconds = time.perf_counter() - start_s
            return seconds, {options["dtype"]: options["params"] * options["passes"] / seconds / 1e9}

        yield {"versions": {"torch": torch.__version__}}, run_round


CASE = Case("adam", heats, rows, reads=("params",))
