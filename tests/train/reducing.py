"""What ranks run in the tests of the reducer: the same steps by the reducer and by torch's DDP."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tierstore.errors import ConfigError, GraphError, RankLost
from tierstore.plan.cost_model import CostModel
from tierstore.train.data_parallel import options
from tierstore.train.data_parallel.reducer import GradientReducer
from tierstore.train.ranks import all_gather_flat

WIDTH = 24
CAP_BYTES = 4096
Bits = list[Any]


class Branches(nn.Module):
    """Layers, of which each call takes those that it is told, in that order."""

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
    steps: int = 6,
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
    """Layer 5 is never used, layer 3 by rank 0 only, layer 1 in every other step; the order changes."""
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
    # With unused parameters DDP keeps its first buckets, which follow the order of registration.
    order = [name for bucket in layout for name in bucket] if case == "unused" else None
    with GradientReducer(ours, bucket=CAP_BYTES, first_bucket=None, order=order) as reducer:
        if hook is not None:
            reducer.register_comm_hook(*hook_of(hook))
        backward = torch.Tensor.backward if plain else reducer.backward
        got = train(reducer, ours, rank, taken, accumulate=accumulate, backward=backward)
        return same(got, expected), reducer.layout(), layout


def looked_at_between(rank: int, ranks: int) -> bool:
    """Whether two forwards of one loss, and one that is only looked at before backward, give what DDP gives."""
    theirs, ours = made(0, norm=True), made(0, norm=True)
    ddp, reducer = DistributedDataParallel(theirs), GradientReducer(ours)
    for wrapped in (ddp, reducer):
        loss = sum(wrapped(batch_of(rank, step), (0, 1, 2, 3, 4, 5)).square().mean() for step in (0, 1))
        with torch.no_grad():
            wrapped(batch_of(rank, 2), (0,))
        loss.backward()
    return same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through lists."""
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


# --- one step stale ---------------------------------------------------------------------------------------------


def stale_pair(rank: int, ranks: int, accumulate: int, case: str) -> tuple[bool, int, int]:
    """`delayed` against a plain loop that keeps the averages of a step for the next one."""
    taken = some_layers if case == "unused" else all_layers
    ours, theirs = made(rank), made(0)
    with GradientReducer(ours, bucket=CAP_BYTES, delayed=True) as late:
        optimizer, seen = torch.optim.Adam(ours.parameters(), lr=1e-2), []
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(accumulate):
                with nullcontext() if micro == accumulate - 1 else late.no_sync():
                    x = batch_of(rank, accumulate * step + micro)
                    late.backward(late(x, taken(rank, step)).square().mean())
            seen.append([None if p.grad is None else p.grad.clone() for p in ours.parameters()])
            optimizer.step()
        late.flush()
        seen.append([None if p.grad is None else p.grad.clone() for p in ours.parameters()])
        extra_bytes = late.extra_bytes
    with GradientReducer(theirs, bucket=CAP_BYTES) as now:
        optimizer, expected = torch.optim.Adam(theirs.parameters(), lr=1e-2), []
        before: list[Any] = [None for _ in theirs.parameters()]
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(accumulate):
                with nullcontext() if micro == accumulate - 1 else now.no_sync():
                    x = batch_of(rank, accumulate * step + micro)
                    now.backward(now(x, taken(rank, step)).square().mean())
            fresh = [None if p.grad is None else p.grad.clone() for p in theirs.parameters()]
            for parameter, gradient in zip(theirs.parameters(), before, strict=True):
                parameter.grad = gradient
            expected.append([None if p.grad is None else p.grad.clone() for p in theirs.parameters()])
            optimizer.step()
            before = fresh
        expected.append(before)
    weights = [list(ours.parameters()), list(theirs.parameters())]
    return same(seen, expected) and same(*weights), extra_bytes, sum(p.nbytes for p in ours.parameters())


# --- early, in place, hidden ------------------------------------------------------------------------------------


def early(rank: int, ranks: int) -> dict[str, Any]:
    """The record of a step, timed by a clock that counts its calls; and whether gradients are views of the buckets."""
    module = made(rank)
    ticks = itertools.count()
    with GradientReducer(module, bucket=CAP_BYTES, first_bucket=None, clock=lambda: next(ticks)) as reducer:
        for step in range(2):
            module.zero_grad()
            reducer.backward(reducer(batch_of(rank, step), all_layers(0, 0)).square().mean())
        record = reducer.last_step()
        flats = {b.flat.untyped_storage().data_ptr() for b in reducer._places.current.buckets}
        inside = all(p.grad.untyped_storage().data_ptr() in flats for p in module.parameters())
        return {"record": record, "inside": inside}


class Waits(torch.autograd.Function):
    """Takes some time in backward, and no CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowGroup(distributed.ProcessGroup):
    """A group whose all-reduces of buckets pass one by one through a channel that takes time, and no CPU."""

    def __init__(self, group: Any, seconds: float) -> None:
        super().__init__(group.rank(), group.size())
        self._real, self._seconds, self._free_s = group, seconds, 0.0
        world = distributed.distributed_c10d._world
        world.pg_map[self] = world.pg_map[group]
        world.pg_group_ranks[self] = world.pg_group_ranks[group]
        world.pg_names[self] = "slow"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        work, future = self._real.allreduce(tensors, options), torch.futures.Future()
        if tensors[0].dtype != torch.float32:  # flags of used parameters, not a bucket
            return work
        now_s = time.perf_counter()
        self._free_s = max(now_s, self._free_s) + self._seconds

        def end() -> None:
            work.wait()
            future.set_result(tensors)

        threading.Timer(self._free_s - now_s, end).start()
        return torch._C._distributed_c10d._create_work_from_future(future)

    def allgather(self, *args: Any) -> Any:
        return self._real.allgather(*args)

    def broadcast(self, *args: Any) -> Any:
        return self._real.broadcast(*args)


class Slow(nn.Module):
    """Layers of which each takes some time in backward."""

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Waits.apply(layer(x), self.seconds)
        return x


def hidden(rank: int, ranks: int, layers: int, seconds: float, delayed: bool = False) -> dict[str, Any]:
    """Seconds of backward alone, and with as much communication, one bucket a layer; and the record of the last step.

    The times are the least of eight, because other work on the machine only adds to them.
    """
    module = Slow(layers, seconds)
    alone_s, both_s = [], []
    group = SlowGroup(distributed.group.WORLD, seconds)
    with GradientReducer(module, group, bucket=1, first_bucket=None, timed=True, delayed=delayed) as reducer:
        for step in range(8):
            for found, context in ((alone_s, reducer.no_sync()), (both_s, nullcontext())):
                module.zero_grad()
                with context:
                    loss = reducer(batch_of(rank, step)).square().mean()
                    distributed.barrier()
                    begin_s = time.perf_counter()
                    reducer.backward(loss)
                found.append(time.perf_counter() - begin_s)
        reducer.flush()
        record, extra_bytes = reducer.last_step(), reducer.extra_bytes
    return {
        "alone_s": min(alone_s),
        "both_s": min(both_s),
        "record": record,
        "extra_bytes": extra_bytes,
    }


# --- honest counts ----------------------------------------------------------------------------------------------


class Ordered(nn.Module):
    """Two parameters in one bucket, whose gradients come in the order that is asked for; one comes late, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(4))
        self.left = nn.Parameter(torch.full((4,), 2.0))
        self.right = nn.Parameter(torch.full((4,), 3.0))
        self.never = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, first: str) -> torch.Tensor:
        inner, outer = (self.left, self.right) if first == "right" else (self.right, self.left)
        # `late` is used again at the end, so its gradient is complete only with that of its first use.
        return ((x * self.late * inner) * outer) * self.late


def honest(rank: int, ranks: int, firsts: Sequence[str]) -> dict[str, Any]:
    """Gradients of two parameters in one bucket; `firsts` names, by rank, the one whose gradient comes first."""
    torch.manual_seed(0)
    module, plain = Ordered(), Ordered()
    order = ["left", "right", "late", "never"]
    with GradientReducer(module, bucket=32, first_bucket=None, order=order) as reducer:
        total = [torch.zeros(4) for _ in module.parameters()]
        for other in range(ranks):
            plain.zero_grad()
            x = torch.full((4,), 1.0 + other)
            plain(x, firsts[other]).sum().backward()
            for sum_, parameter in zip(total, plain.parameters(), strict=True):
                if parameter.grad is not None:
                    sum_ += parameter.grad / ranks
        reducer.backward(module(torch.full((4,), 1.0 + rank), firsts[rank]).sum())
        found = {name: p.grad for name, p in module.named_parameters()}
        expected = dict(zip(dict(module.named_parameters()), total, strict=True))
        return {
            "same": all(torch.equal(found[name], expected[name]) for name in ("late", "left", "right")),
            "never": found["never"],
            "unused": reducer.unused(),
            "record": reducer.last_step(),
        }


def in_every_order(rank: int, ranks: int, capacity: int) -> bool:
    """Whether averages are right for every order in which four gradients may come, whatever the buckets."""
    right = True
    for orders in itertools.permutations(range(4)):
        module = nn.ParameterList(nn.Parameter(torch.full((3,), float(i))) for i in range(4))
        with GradientReducer(module, bucket=12 * capacity, first_bucket=None) as reducer:
            for step in range(3):
                module.zero_grad()
                x = torch.tensor(0.0)
                # The last one used gets its gradient first; rank 1 leaves one out, another one each step.
                used = [i for i in orders if not (rank == 1 and i == (orders[0] + step) % 4)]
                for index in used:
                    x = x * 1.0 + (module[index] * (rank + index + 1)).sum()
                reducer.backward(x)
                for index, parameter in enumerate(module):
                    shares = [r + index + 1 for r in range(ranks) if not (r == 1 and index == (orders[0] + step) % 4)]
                    right &= torch.allclose(parameter.grad, torch.full((3,), sum(shares) / ranks))
    return right


class Odd(nn.Module):
    """Parameters of every kind of dtype and layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3).bfloat16())
        self.empty = nn.Parameter(torch.empty(0))
        self.number = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.image = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.whole = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, scale: int) -> torch.Tensor:
        parts = (self.complex * scale).abs(), self.wide * scale, self.narrow * scale, self.empty, self.number * scale
        plane = self.turned * torch.arange(24.0).view(6, 4) * scale
        image = self.image(torch.full((1, 3, 5, 5), float(scale)).to(memory_format=torch.channels_last)).square()
        return sum((part.sum() for part in (*parts, plane, image)), torch.tensor(0.0))


def odd(rank: int, ranks: int) -> list[str]:
    """Parameters whose averages are not those of plain torch."""
    module, plain = Odd(), Odd()
    for other in range(ranks):
        (plain(other + 1) / ranks).backward()
    with GradientReducer(module) as reducer, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the gradient of a transposed parameter stands in the bucket untransposed
        for step in range(3):
            module.zero_grad(set_to_none=step != 1)
            reducer.backward(reducer(rank + 1))
        expected = dict(plain.named_parameters())
        return [
            name for name, p in module.named_parameters()
            if p.requires_grad and not torch.allclose(p.grad, expected[name].grad)
        ]  # fmt: skip


# --- errors -----------------------------------------------------------------------------------------------------


def refused(rank: int, ranks: int, case: str) -> str:
    """The message of the error that this case must raise, on every rank."""
    module = made(0)
    options: dict[str, Any] = {}
    if case == "shape":
        module.layers[1] = nn.Linear(WIDTH, WIDTH + rank, bias=False)
    elif case == "missing" and rank == 1:
        module.extra = nn.Parameter(torch.zeros(2))
    elif case == "dtype" and rank == 1:
        module.layers[2].double()
    elif case == "order":
        order = torch.channels_last if rank == 1 else torch.contiguous_format
        module.image = nn.Conv2d(3, 4, 3, bias=False).to(memory_format=order)
    elif case == "buffers":
        options["broadcast_buffers"] = rank == 0
        module.register_buffer("buffer", torch.ones(2))
    elif case == "option":
        options["bucket"] = 1024 * (1 + rank)
    with GradientReducer(made(0) if case != "option" else module) as first:
        try:
            GradientReducer(module, **options).close()
        except ConfigError as error:
            first.backward(first(torch.ones(1, WIDTH), (0, 1)).sum())  # the failed one has closed no other reducer
            return str(error)
    return "nothing was raised"


def misused(rank: int, ranks: int, case: str) -> str:
    """The message of the GraphError that this case must raise."""
    module = made(0)
    options: dict[str, Any] = {"static_graph": case.startswith("static"), "find_unused": case != "all used"}
    with GradientReducer(module, bucket=CAP_BYTES, delayed=case == "delayed", **options) as reducer:
        try:
            for step in range(3):
                if case != "delayed":
                    module.zero_grad()
                taken = all_layers(rank, step)
                if step == 1 and case == "static, fewer":
                    taken = (0, 1, 3, 4, 5, 0)
                if step == 1 and case == "all used":
                    taken = (0, 1, 3, 4, 5)
                loss = reducer(batch_of(rank, step), taken).square().mean()
                if step == 1 and case == "static, more":
                    loss = (
                        loss
                        + checkpoint(module.layers[2], batch_of(rank, 0).requires_grad_(), use_reentrant=True).sum()
                    )
                if case == "twice":
                    loss = (
                        loss
                        + checkpoint(module.layers[2], batch_of(rank, 0).requires_grad_(), use_reentrant=True).sum()
                    )
                if step == 1 and case == "higher":
                    reducer.backward(loss, create_graph=True)
                reducer.backward(loss)
        except GraphError as error:
            return str(error)
    return "nothing was raised"


class Fails(torch.autograd.Function):
    """Fails in backward, if `on`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, on: bool) -> torch.Tensor:
        ctx.on = on
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.on:
            raise ZeroDivisionError
        return gradient, None


class MayFail(nn.Module):
    """Its backward fails before the first gradient or after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, fails: str) -> torch.Tensor:
        x = self.outer(Fails.apply(self.inner(x), fails == "late"))
        return Fails.apply(x, fails == "early")


def failed(rank: int, ranks: int, by_reducer: bool) -> tuple[list[bool], list[str]]:
    """Whether averages are right after a backward that failed early; the messages after one that failed late."""
    torch.manual_seed(0)
    module, plain = MayFail(), MayFail()
    plain.load_state_dict(module.state_dict())
    right, said = [], []
    with GradientReducer(module, bucket=CAP_BYTES, first_bucket=None) as reducer:

        def step(number: int, fails: str, by_reducer: bool = by_reducer) -> None:
            module.zero_grad()
            loss = reducer(batch_of(rank, number), fails).square().mean()
            # `backward` meets the other ranks before its first gradient, so it cannot go on after an early failure.
            if by_reducer and fails != "early":
                reducer.backward(loss)
            else:
                loss.backward()

        for number in range(2):
            try:
                step(number, "early")
            except ZeroDivisionError:
                step(number, "")
            plain.zero_grad()
            for other in range(ranks):
                (plain(batch_of(other, number), "").square().mean() / ranks).backward()
            pairs = zip(module.parameters(), plain.parameters(), strict=True)
            right.append(all(torch.allclose(one.grad, other.grad, atol=1e-7) for one, other in pairs))
        for number, fails in enumerate(("late", "", "")):
            try:
                step(number, fails, by_reducer == (number < 2))
                said.append("nothing")
            except ZeroDivisionError:
                pass
            except GraphError as error:
                said.append(str(error))
    return right, said


def with_wrong_hook(rank: int, ranks: int) -> str:
    """The message about an error in a comm hook."""

    def hook(state: object, bucket: object) -> torch.futures.Future[torch.Tensor]:
        raise RuntimeError("what a hook says")

    module = nn.Linear(2, 2)
    with GradientReducer(module) as reducer:
        reducer.register_comm_hook(None, hook)
        with pytest.raises(RankLost) as lost:
            reducer.backward(reducer(torch.ones(1, 2)).sum())
    return str(lost.value)


def recomputed(rank: int, ranks: int) -> bool:
    """A static graph with reentrant checkpoints that share a layer: averages as those of one rank with both batches."""
    module, plain = made(0), made(0)
    with GradientReducer(module, bucket=CAP_BYTES, static_graph=True) as reducer:
        for step in range(3):
            module.zero_grad()
            plain.zero_grad()
            for r in range(ranks):
                (plain(batch_of(r, step), (0, 1, 0, 2)).square().mean() / ranks).backward()
            x = batch_of(rank, step).requires_grad_()
            for index in (0, 1, 0, 2):
                x = checkpoint(lambda y, layer: torch.tanh(layer(y)), x, module.layers[index], use_reentrant=True)
            reducer.backward(x.square().mean())
            for one, other in zip(module.parameters(), plain.parameters(), strict=True):
                if (one.grad is None) != (other.grad is None):
                    return False
                if one.grad is not None and not torch.allclose(one.grad, other.grad, atol=1e-7):
                    return False
    return True


def lost(rank: int, ranks: int, victim: int, sign: int, kind: str) -> None:
    """Raises a rank's message, and after how long it came, when `victim` gets a signal in the second backward."""
    module = made(0)
    options: dict[str, Any] = {"delayed": True} if kind == "delayed" else {}
    with GradientReducer(module, bucket=CAP_BYTES, **options) as reducer:
        if kind == "hook":
            reducer.register_comm_hook(*hook_of("fp16"))
        begin_s = time.monotonic()
        try:
            for step in range(4):
                module.zero_grad()
                loss = reducer(batch_of(rank, step), all_layers(rank, step)).square().mean()
                if step == 1 and rank == victim:
                    module.layers[2].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), sign))
                begin_s = time.monotonic()
                reducer.backward(loss)
        except RankLost as error:
            after_s = time.monotonic() - begin_s
            try:
                reducer.backward(loss)
                raise AssertionError("a reducer that has lost a rank went on")
            except RankLost:
                pass
            raise RuntimeError(f"after {after_s:.2f} s: {error}") from None  # the test reads the rank's error


def flat_shards(rank: int, ranks: int) -> dict[str, Any]:
    """Averages by reduce-scatter, gathered from all ranks, against those by all-reduce."""
    one, other = made(0), made(0)
    with (
        GradientReducer(one, bucket=CAP_BYTES) as whole,
        GradientReducer(other, bucket=CAP_BYTES, reduce="reduce_scatter") as parts,
    ):
        for step in range(3):
            for module, reducer in ((one, whole), (other, parts)):
                module.zero_grad()
                for micro in range(2):
                    with reducer.no_sync() if micro == 0 else nullcontext():
                        reducer.backward(reducer(batch_of(rank, 2 * step + micro), all_layers(0, 0)).square().mean())
        gradients = {name: p.grad for name, p in one.named_parameters()}
        right = parts.layout() == whole.layout()
        for names, shard in zip(parts.layout(), parts.shards(), strict=True):
            full = shard.new_empty(shard.numel() * ranks)
            all_gather_flat(full, shard, distributed.group.WORLD)
            expected = torch.cat([gradients[name].reshape(-1) for name in names])
            right &= torch.allclose(full[: expected.numel()], expected, atol=1e-7)
        return {"right": bool(right), "left": [p.grad for p in other.parameters()]}


def in_flight(rank: int, ranks: int, most: int) -> int:
    """The largest number of all-reduces of buckets that were in progress at once."""
    group, module = SlowGroup(distributed.group.WORLD, 0.005), made(0)
    running, highest = [], 0
    plain = group.allreduce

    def counted(tensors: Any, options: Any = None) -> Any:
        nonlocal highest
        work = plain(tensors, options)
        if tensors[0].dtype == torch.float32:
            running.append(work)
            highest = max(highest, sum(not w.done() if hasattr(w, "done") else not w.is_completed() for w in running))
        return work

    group.allreduce = counted
    with GradientReducer(module, group, bucket=1, first_bucket=None, max_in_flight=most) as reducer:
        for step in range(2):
            module.zero_grad()
            reducer.backward(reducer(batch_of(rank, step), all_layers(0, 0)).square().mean())
    return highest


def suited(rank: int, ranks: int) -> list[list[list[str]]]:
    """Layouts by "auto" where a message has no fixed cost, a prohibitive one, or one like several layers' compute.

    The default bucket size bounds buckets only until the times are known.
    """
    found = []
    for cost in (CostModel(0.0, 100.0), CostModel(1e6, 1e18), CostModel(10.0, 2304.0)):
        module = made(0)
        ticks = itertools.count()
        given: dict[str, Any] = {"first_bucket": None, "cost": cost, "clock": lambda ticks=ticks: float(next(ticks))}
        with patch.object(options, "_DEFAULT_BUCKET", 1), GradientReducer(module, bucket="auto", **given) as reducer:
            for step in range(2):
                module.zero_grad()
                reducer.backward(reducer(batch_of(rank, step), all_layers(0, 0)).square().mean())
            found.append(reducer.layout())
    return found


def called_directly(rank: int, ranks: int) -> bool:
    """Calls the module, not the reducer, and `loss.backward()`; layers 4 and 5 are left out, layer 3 by rank 0 only."""
    module, plain = made(0), made(0)
    right = True
    with GradientReducer(module, bucket=CAP_BYTES) as reducer:
        for step in range(3):
            module.zero_grad()
            plain.zero_grad()
            for r in range(ranks):
                (plain(batch_of(r, step), (0, 1, 2, 3) if r else (0, 1, 2)).square().mean() / ranks).backward()
            module(batch_of(rank, step), (0, 1, 2, 3) if rank else (0, 1, 2)).square().mean().backward()
            for one, other in zip(module.parameters(), plain.parameters(), strict=True):
                right &= (one.grad is None) == (other.grad is None)
                right &= other.grad is None or torch.allclose(one.grad, other.grad, atol=1e-7)
            right &= reducer.unused() == ["layers.4.weight", "layers.5.weight"]
    return right
