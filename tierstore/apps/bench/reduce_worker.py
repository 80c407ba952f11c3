"""A backward whose gradients two gloo ranks reduce, as one contestant: rank 0, which starts and ends rank 1.

Scope: `contend`, and rank 1's loop. Not here: which ways of reducing there are (`reduce.py`).
Owner: rank 1 is a child of this process and ends with it, because then its wait for the next round fails.

A round is some steps, each once with its gradients reduced and once without (`no_sync`), in turns, and then once the
collectives of the same buckets with nothing beside them. So `hidden_share = 1 - (step - alone) / collectives` is
computed in the same way for all contestants, torch's DDP too. A share below 0 counts as 0: ranks that share cores
compute more slowly while they reduce.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from tierstore.apps.bench.serve import Round
from tierstore.train.data_parallel.collective_costs import fit_cost_model
from tierstore.train.data_parallel.reducer import GradientReducer

_RANKS = 2
_END = -1.0
_IDLE = timedelta(hours=6)  # between rounds rank 1 waits for as long as the others take
_WARM_UP = 3  # the reducer makes its buckets anew after the first one


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Options: `layers`, `width`, `batch` of the model; `bucket` in bytes; `delayed`; `steps` of a round; `scratch`."""
    with tempfile.TemporaryDirectory(dir=options["scratch"]) as directory:
        meeting = f"{directory}/meeting"
        command = [sys.executable, "-m", __name__, json.dumps(options | {"meeting": meeting})]
        other = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            with _joined(options, meeting, 0) as (facts, together):

                def run_round(number: int) -> tuple[float, dict[str, float]]:
                    distributed.broadcast(torch.tensor([float(number)]), 0)
                    return together()

                yield facts, run_round
                distributed.broadcast(torch.tensor([_END]), 0)
        finally:
            other.kill()
            other.wait()


def follow(options: dict[str, Any]) -> None:
    """Rank 1: takes part in every round until rank 0 says that there are no more."""
    with _joined(options, options["meeting"], 1) as (_, together):
        while True:
            number = torch.zeros(1)
            distributed.broadcast(number, 0)
            if number.item() == _END:
                return
            together()


Together = Callable[[], "tuple[float, dict[str, float]]"]


@contextlib.contextmanager
def _joined(options: dict[str, Any], meeting: str, rank: int) -> Iterator[tuple[dict[str, Any], Together]]:
    """Joins the ranks; gives the facts, and what a rank does in a round, which begins on all ranks at once."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    # Not by a file:// URL, which takes the first part of a relative path for a host. The store waits 5 minutes.
    store = distributed.FileStore(meeting, _RANKS)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=_IDLE)
    module = stack_of_layers(options["layers"], options["width"])
    data = torch.randn(options["batch"], options["width"])
    reducer = GradientReducer(
        module, bucket=options["bucket"], first_bucket=options["bucket"], delayed=options["delayed"]
    )
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    try:

        def step() -> float:
            distributed.barrier()
            begun_s = time.perf_counter()
            reducer.backward(reducer(data).sum())
            seconds = time.perf_counter() - begun_s
            module.zero_grad()
            return seconds

        def alone() -> float:
            with reducer.no_sync():
                return step()

        for _ in range(_WARM_UP):
            step()
            alone()
        buckets = [sum(sizes[name] for name in bucket) for bucket in reducer.layout()]

        def together() -> tuple[float, dict[str, float]]:
            runs = [(step(), alone()) for _ in range(options["steps"])]
            step_s, alone_s = (statistics.median(one) for one in zip(*runs))
            return step_s, shares(step_s, alone_s, collectives_s(buckets)) | {
                "buckets": float(len(buckets)), "extra_bytes": float(reducer.extra_bytes)
            }  # fmt: skip

        facts: dict[str, Any] = {"versions": {"torch": torch.__version__}}
        facts["gradients"] = _readiness(module, data, reducer)
        fit = fit_cost_model().model
        facts["model"] = [fit.alpha_s, fit.beta_bytes_per_s, fit.launch_s, fit.cores]
        yield facts, together
    finally:
        reducer.close()
        distributed.destroy_process_group()


def stack_of_layers(layers: int, width: int) -> nn.Sequential:
    """Linear layers with a ReLU behind each."""
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


def shares(step_s: float, alone_s: float, collectives: float) -> dict[str, float]:
    """The figures of a round."""
    hidden = 1 - (step_s - alone_s) / collectives
    return {"alone_s": alone_s, "collectives_s": collectives, "hidden_share": min(1.0, max(0.0, hidden))}


def collectives_s(buckets: Sequence[int]) -> float:
    """Seconds of all collectives, one after the other, with nothing beside them."""
    flat = torch.zeros(max(buckets) // 4)
    distributed.barrier()
    begun_s = time.perf_counter()
    for nbytes in buckets:
        distributed.all_reduce(flat[: nbytes // 4])
    return time.perf_counter() - begun_s


def _readiness(module: nn.Module, data: torch.Tensor, reducer: GradientReducer) -> list[tuple[int, float]]:
    """Bytes of the gradients in the order in which a step makes them, and when each is ready; nothing is reduced."""
    found: list[tuple[int, float]] = []
    begun_s = 0.0

    def seen(parameter: torch.Tensor) -> None:
        found.append((parameter.nbytes, time.perf_counter() - begun_s))

    hooks = [p.register_post_accumulate_grad_hook(seen) for p in module.parameters()]  # type: ignore[no-untyped-call]
    distributed.barrier()
    begun_s = time.perf_counter()
    with reducer.no_sync():
        reducer.backward(reducer(data).sum())
    module.zero_grad()
    for hook in hooks:
        hook.remove()
    return found


if __name__ == "__main__":
    follow(json.loads(sys.argv[1]))
