"""What ranks run in the tests of the reducer: the same steps by it and by torch's DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tierstore.train.reducer import GradientReducer

WIDTH = 24
CAP_BYTES = 4096
Bits = list[Any]


class Branches(nn.Module):
    """Layers of which a batch takes some; the last is never taken, the first twice."""

    def __init__(self, layers: int = 6, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: torch.Tensor, taken: tuple[int, ...]) -> torch.Tensor:
        for index in taken:
            x = torch.tanh(self.layers[index](x))
        return self.norm(x)


def made(seed: int, norm: bool = False) -> Branches:
    torch.manual_seed(seed)
    return Branches(norm=norm)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def hook_of(name: str) -> tuple[Any, Callable[..., Any]]:
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        return state, powerSGD_hook.powerSGD_hook
    return None, {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]


def waiting(state: Any, hook: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """The hook for DDP on gloo: PowerSGD's later collectives would start in any order, and hang (torch 2.13)."""

    def waits(state, bucket):  # no annotations, and a name of its own: DDP refuses the bf16 hook on gloo by name
        future = hook(state, bucket)
        future.wait()
        return future

    return state, waits


def ddp_layout(ddp: DistributedDataParallel, module: nn.Module) -> list[list[str]]:
    names = {p: n for n, p in module.named_parameters()}
    return [[names[p] for p in bucket.parameters()] for bucket in ddp.reducer._get_zeros_like_grad_buckets()]


def train(
    wrapped: Callable[..., torch.Tensor],
    module: nn.Module,
    rank: int,
    taken: Callable[[int, int], tuple[int, ...]],
    *,
    accumulate: int = 1,
    steps: int = 10,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> Bits:
    """Gradients of every step and the weights at the end. The first backward is only for the order of buckets."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    everything = tuple(range(len(module.layers)))
    backward(wrapped(batch_of(rank, 999), everything).square().mean())
    seen: Bits = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            x = batch_of(rank, accumulate * step + micro)
            with nullcontext() if micro == accumulate - 1 else wrapped.no_sync():
                backward(wrapped(x, taken(rank, step)).square().mean())
        seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
        optimizer.step()
    return [*seen, [p.detach().clone() for p in module.parameters()], [b.clone() for b in module.buffers()]]


def all_layers(rank: int, step: int) -> tuple[int, ...]:
    return (0, 1, 2, 3, 4, 5, 0)


def some_layers(rank: int, step: int) -> tuple[int, ...]:
    """Layer 5 is used by nobody, layer 3 by rank 0 only, others in turn; the order changes."""
    chosen = [0, 1, 2, 4] if step % 2 else [4, 2, 0]
    return (*chosen, 3) if rank == 0 else tuple(chosen)


def same_as_ddp(
    rank: int, ranks: int, case: str, accumulate: int = 1, hook: str | None = None, plain: bool = False
) -> tuple[bool, list[list[str]], list[list[str]]]:
    """Whether everything is bit-identical, and both layouts."""
    taken = some_layers if case == "unused" else all_layers
    norm = case == "norm"
    theirs, ours = made(rank, norm), made(rank, norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(
            theirs,
            bucket_cap_mb=CAP_BYTES / 2**20,
            find_unused_parameters=case == "unused",
            gradient_as_bucket_view=True,
        )
        if hook is not None:
            ddp.register_comm_hook(*waiting(*hook_of(hook)))
        expected = train(ddp, theirs, rank, taken, accumulate=accumulate)
        layout = ddp_layout(ddp, theirs)
    # With unused parameters DDP keeps the buckets that it has made first, in the order of registration.
    order = [name for bucket in layout for name in bucket] if case == "unused" else None
    with GradientReducer(ours, bucket=CAP_BYTES, first_bucket=None, order=order) as reducer:
        if hook is not None:
            reducer.register_comm_hook(*hook_of(hook))
        backward = torch.Tensor.backward if plain else reducer.backward
        got = train(reducer, ours, rank, taken, accumulate=accumulate, backward=backward)
        return same(got, expected), reducer.layout(), layout


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through lists."""
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
