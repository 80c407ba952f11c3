#!/usr/bin/env python3
"""A backward whose gradients torch's DDP reduces between two gloo ranks; this is rank 0, which starts rank 1.

A round is as in tierstore's own contestant: steps with and without reduction in turns, and the collectives of the same
buckets with nothing beside them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from serve import Round, serve

_END = -1.0
_FIRST_BYTES = 2**20  # of DDP's first bucket


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    import torch
    from torch import distributed

    with tempfile.TemporaryDirectory(dir=options["scratch"]) as directory:
        meeting = f"{directory}/meeting"
        command = [sys.executable, __file__, "--rank-1", json.dumps(options | {"meeting": meeting})]
        other = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            together = _join(options, meeting, 0)

            def run_round(number: int) -> tuple[float, dict[str, float]]:
                distributed.broadcast(torch.tensor([float(number)]), 0)
                return together()

            yield {"versions": {"torch": torch.__version__}}, run_round
            distributed.broadcast(torch.tensor([_END]), 0)
        finally:
            other.kill()
            other.wait()


def follow(options: dict[str, Any]) -> None:
    import torch
    from torch import distributed

    together = _join(options, options["meeting"], 1)
    while True:
        number = torch.zeros(1)
        distributed.broadcast(number, 0)
        if number.item() == _END:
            return
        together()


def _join(options: dict[str, Any], meeting: str, rank: int) -> Callable[[], tuple[float, dict[str, float]]]:
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = distributed.FileStore(meeting, 2)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(hours=6))
    width = options["width"]
    parts = [part for _ in range(options["layers"]) for part in (nn.Linear(width, width), nn.ReLU())]
    module = DistributedDataParallel(nn.Sequential(*parts), gradient_as_bucket_view=True)
    data = torch.randn(options["batch"], width)
    buckets = _buckets([parameter.nbytes for parameter in reversed(list(module.parameters()))], 25 * 2**20)

    def step() -> float:
        distributed.barrier()
        begun_s = time.perf_counter()
        module(data).sum().backward()
        seconds = time.perf_counter() - begun_s
        module.zero_grad()
        return seconds

    def alone() -> float:
        with module.no_sync():
            return step()

    def collectives_s() -> float:
        flat = torch.zeros(max(buckets) // 4)
        distributed.barrier()
        begun_s = time.perf_counter()
        for nbytes in buckets:
            distributed.all_reduce(flat[: nbytes // 4])
        return time.perf_counter() - begun_s

    def together() -> tuple[float, dict[str, float]]:
        runs = [(step(), alone()) for _ in range(options["steps"])]
        step_s, alone_s = (statistics.median(one) for one in zip(*runs))
        all_s = collectives_s()
        hidden = min(1.0, max(0.0, 1 - (step_s - alone_s) / all_s))
        return step_s, {"alone_s": alone_s, "collectives_s": all_s, "hidden_share": hidden,
                        "buckets": float(len(buckets))}  # fmt: skip

    for _ in range(3):
        step()
        alone()
    return together


def _buckets(sizes: list[int], cap_bytes: int) -> list[int]:
    """DDP's rule: a bucket is closed by the gradient that brings it to its cap; the first one is small."""
    found = [0]
    for size in sizes:
        found[-1] += size
        if found[-1] >= (cap_bytes if len(found) > 1 else _FIRST_BYTES):
            found.append(0)
    return [nbytes for nbytes in found if nbytes]


if __name__ == "__main__":
    if sys.argv[1] == "--rank-1":
        follow(json.loads(sys.argv[2]))
    else:
        serve(contend)
