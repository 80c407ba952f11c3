"""Fits the interconnect of two gloo ranks, and compares the bucket timeline with real steps.

    python tests/train/cost_model_check.py [--ranks N] [--layers N] [--width N] [--steps N]

Predicts each step twice: from the times at which gradients are ready in steps without communication, and from those
times in the measured steps themselves, in which compute and collectives share the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "train")]

from tierstore.plan.buckets import Gradient, Timeline, timeline  # noqa: E402
from tierstore.plan.cost_model import CostModel  # noqa: E402

CAPS = ("1MiB", "4MiB", "16MiB", "1GiB")
WARM_UP = 3


class Readiness:
    """When each gradient is ready, in seconds from the start of the step."""

    def __init__(self, module: nn.Module) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self.sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
        self.ready_s: dict[str, float] = {}
        self.begun_s = 0.0
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def hook(_: torch.Tensor) -> None:
            self.ready_s[name] = time.perf_counter() - self.begun_s

        return hook

    def begin(self) -> None:
        self.ready_s = {}
        self.begun_s = time.perf_counter()


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(step[name] for step in steps) for name in steps[0]}


def predicted(ready_s: dict[str, float], sizes: dict[str, int], layout: list[list[str]], model: CostModel) -> Timeline:
    names = list(ready_s)
    gradients = [Gradient(sizes[name], ready_s[name]) for name in names]
    buckets = [[names.index(name) for name in bucket] for bucket in layout]
    return timeline(gradients, buckets, model, max_in_flight=1)


def check(rank: int, ranks: int, layers: int, width: int, batch: int, steps: int) -> list[dict[str, Any]]:
    from torch import distributed

    from tierstore.train.data_parallel.collective_costs import fit_cost_model
    from tierstore.train.data_parallel.reducer import GradientReducer

    torch.manual_seed(rank)
    module = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())])
    data = torch.randn(batch, width)
    readiness = Readiness(module)

    def step(reducer: GradientReducer, *, reduce: bool) -> tuple[float, dict[str, float]]:
        distributed.barrier()
        readiness.begin()
        with contextlib.nullcontext() if reduce else reducer.no_sync():
            reducer.backward(module(data).sum())
        seconds = time.perf_counter() - readiness.begun_s
        module.zero_grad()
        return seconds, readiness.ready_s

    rows: list[dict[str, Any]] = []
    for cap in CAPS:
        fit = fit_cost_model()  # again for each cap, because other work on the machine changes it
        with GradientReducer(module, bucket=cap, first_bucket=None, timed=True) as reducer:
            alone, reduced = [], []
            for _ in range(steps + WARM_UP):  # in turn, so that other work slows both kinds
                alone.append(step(reducer, reduce=False))
                reduced.append(step(reducer, reduce=True))
            layout = reducer.layout()
        ready_alone = medians([ready for _, ready in alone[WARM_UP:]])
        ready = medians([ready for _, ready in reduced[WARM_UP:]])
        rows.append(
            {
                "cap": cap, "buckets": len(layout), "measured_s": median(seconds for seconds, _ in reduced[WARM_UP:]),
                "compute_alone_s": max(ready_alone.values()), "compute_s": max(ready.values()),
                "before_s": predicted(ready_alone, readiness.sizes, layout, fit.model).seconds,
                "within_s": predicted(ready, readiness.sizes, layout, replace(fit.model, launch_s=0)).seconds,
                "fit": fit,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    from ranks import run_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("ranks", 2), ("layers", 12), ("width", 1024), ("batch", 256), ("steps", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    import cost_model_check as this  # ranks import it by name

    results = run_ranks(given.ranks, this.check, given.layers, given.width, given.batch, given.steps,
                        wait_s=150.0)  # fmt: skip
    rows = results[0]
    print(f"load of the machine: {os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores")
    for one in rows[0]["fit"].timings:
        model = rows[0]["fit"].model
        print(f"  {one.nbytes:>10} B {one.seconds * 1e3:9.3f} ms, fitted {model.seconds(one.nbytes) * 1e3:9.3f} ms")
    print("bucket  alpha   beta  residual  count  measured  alone -> predicted  error   overlapped -> predicted  error")
    for row in rows:
        errors = [row[name] / row["measured_s"] - 1 for name in ("before_s", "within_s")]
        alpha_us, beta = row["fit"].model.alpha_s * 1e6, row["fit"].model.beta_bytes_per_s / 1e9
        print(f"{row['cap']:>6} {alpha_us:4.0f} us {beta:.2f} GB/s {row['fit'].residual:5.0%}"
              f" {row['buckets']:>6} {row['measured_s'] * 1e3:7.1f} ms"
              f" {row['compute_alone_s'] * 1e3:6.1f} ->{row['before_s'] * 1e3:7.1f} ms {errors[0]:+7.0%}"
              f" {row['compute_s'] * 1e3:17.1f} ->{row['within_s'] * 1e3:7.1f} ms {errors[1]:+9.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
