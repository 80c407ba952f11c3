"""Step times of torch's DDP and of GradientReducer on gloo ranks of this machine, interleaved.

    PYTHONPATH=tests python tests/train/ddp_race.py [--ranks 2] [--steps 40] [--blocks 8] [--width 256]

Prints for each way of use the median seconds of a step of both, and the median ratio of neighbouring steps, which is
claimed to be at most 1.05. Not in the suite: it is a measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks
from runs import VOCABULARY, TinyModel
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tierstore.train.data_parallel.reducer import GradientReducer

Step = Callable[[torch.Tensor], None]


def stepper(call: Any, model: nn.Module, backward: Callable[[torch.Tensor], None]) -> Step:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        scores = call(tokens)
        backward(functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()

    return step


def contestants(kind: str, blocks: int, width: int) -> tuple[Step, Step, GradientReducer]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(TinyModel(blocks, width))
    unused, static = kind == "unused", kind == "static"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(
            models[0], gradient_as_bucket_view=True, find_unused_parameters=unused, static_graph=static
        )
    reducer = GradientReducer(models[1], find_unused=kind != "all used", static_graph=static)
    backward = torch.Tensor.backward if kind == "loss.backward()" else reducer.backward
    return stepper(ddp, models[0], torch.Tensor.backward), stepper(reducer, models[1], backward), reducer


def race(rank: int, ranks: int, kind: str, steps: int, blocks: int, width: int) -> list[list[float]]:
    theirs, ours, reducer = contestants(kind, blocks, width)
    tokens = torch.randint(VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(rank))
    seconds: list[list[float]] = [[], []]
    for turn in range(steps + 3):
        order = [(0, theirs), (1, ours)]
        for side, step in order if turn % 2 else reversed(order):
            distributed.barrier()
            begin = time.perf_counter()
            step(tokens)
            distributed.barrier()
            if turn >= 3:
                seconds[side].append(time.perf_counter() - begin)
    reducer.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"ranks": 2, "steps": 40, "blocks": 8, "width": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = {}
    for kind in ("loss.backward()", "reducer.backward(loss)", "unused", "static", "all used"):
        ddp, ours = run_ranks(asked.ranks, race, kind, asked.steps, asked.blocks, asked.width, wait_s=300.0)[0]
        ratio = statistics.median(b / a for a, b in zip(ddp, ours, strict=True))
        found[kind] = {"ddp_s": statistics.median(ddp), "reducer_s": statistics.median(ours), "ratio": ratio}
        print(
            f"{kind:24} DDP {statistics.median(ddp):.4f} s  reducer {statistics.median(ours):.4f} s  ratio {ratio:.3f}"
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
