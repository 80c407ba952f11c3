"""What ranks run in the tests of ZeRO: a tiny model in a ZeRO stage, each rank with its own part of a batch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from runs import TinyModel, default_dtype, next_token_loss, tiny, tokens
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from tierstore.config import AdamWConfig, TierConfig
from tierstore.device.transfers import CpuDevice
from tierstore.errors import BudgetError, GraphError, RankLost, StorageFull, TierstoreError
from tierstore.garbage import no_garbage_collection
from tierstore.io import machine
from tierstore.train import capture, filling, partition
from tierstore.train import ranks as train_ranks
from tierstore.train.engine import Engine
from tierstore.train.gathering import Gathers
from tierstore.train.ranks import Ranks

GLOBAL_BATCH = 12  # rows; 1, 2, 3 and 4 ranks have equal parts


class Backwards(TinyModel):
    """Its blocks run in the reverse of the order in which they are registered."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


def batches(steps: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """This rank's rows of each step's batch."""
    rows = GLOBAL_BATCH // ranks
    return [batch[rank * rows : (rank + 1) * rows] for batch in tokens(steps, shape=(GLOBAL_BATCH, 16))]


def train(
    rank: int,
    ranks: int,
    directory: str | None,
    steps: int = 3,
    model: dict[str, Any] | None = None,
    looks: bool = False,
    kept_at: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return the losses, the norms, the first step's gradients and the final weights.

    Args:
        looks: also return the weights that the run begins with.
        kept_at: make a snapshot after this step, and return its place and the weights.
        options: of the engine; also `memory` (budgets), `nodes`, `seed`, and `start`, the number of earlier steps, or
            `until`, the number of the last step.
    """
    options = {"zero": 3, "update": "forward", "max_grad_norm": 1.0} | options
    memory = options.pop("memory", {"gpu_memory": "4MiB", "cpu_memory": "24MiB"})
    if nodes := options.pop("nodes", 0):
        mesh = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("replicate", "shard"))
        options |= {"device_mesh": mesh}
        directory = f"{directory}/{rank // (ranks // nodes)}"
    tiers = TierConfig(nvme=[directory] if directory else [], timeout_s=20.0, **memory)
    start, until = options.pop("start", 0), options.pop("until", None)
    built = tiny(seed=options.pop("seed", 0), **(model or {}))
    told: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    with Engine(built, tiers, AdamWConfig(lr=1e-2), **options) as engine:
        told["begun_at"] = engine.step_count
        if looks:
            told["found"] = {name: value.numpy() for name, value in engine.state_dict().items()}
        first = engine.step_count if until is not None else start
        for batch in batches(until or start + steps, rank, ranks)[first:]:
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            if not told["gradients"] and options["update"] != "backward":
                told["gradients"] = {name: engine.gradient(name).numpy() for name in ("embedding.weight", "norm.bias")}
            told["norms"].append(engine.step().grad_norm)
            told["losses"].append(loss.item())
            if engine.step_count == kept_at:
                told["kept"] = str(engine.snapshot("kept")[0])
                told["kept weights"] = {name: value.numpy() for name, value in engine.state_dict().items()}
        engine.apply_pending()  # of a delayed update
        told |= {name: engine.statistics()[name] for name in ("bytes", "peak_bytes")}
        told["weights"] = {name: value.numpy() for name, value in engine.state_dict().items()}
    return told


def objects_told(rank: int, ranks: int) -> tuple[list[int], dict[str, Any]]:
    """The size of every object that this rank exchanged while an engine was made, and the engine's weights.

    The weights are those of rank 0, which sends them in pieces of 1000 elements.
    """
    told: list[int] = []
    exchange = Ranks.exchange

    def noted(self: Ranks, what: str, mine: Any, group: Any = None) -> Any:
        told.append(len(pickle.dumps(mine)))
        return exchange(self, what, mine, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "exchange", noted)
        patch.setattr(filling, "PIECE_ELEMENTS", 1000)
        tiers = TierConfig(gpu_memory="4MiB", cpu_memory="24MiB", timeout_s=20.0)
        with Engine(tiny(seed=rank), tiers, zero=3) as engine:
            so_far = told.copy()
            return so_far, {name: value.numpy() for name, value in engine.state_dict().items()}


def look(rank: int, ranks: int, directory: str, memory: dict[str, str]) -> dict[str, Any]:
    """The weights of a store, opened and left as it is."""
    tiers = TierConfig(nvme=[directory], timeout_s=20.0, **memory)
    with Engine(tiny(seed=1), tiers, zero=3, resume="must", update="forward", max_grad_norm=1.0) as engine:
        return {name: value.numpy() for name, value in engine.state_dict().items()}


def view(rank: int, ranks: int, gpu_memory: str, holds_view: bool, **options: Any) -> tuple[list[float], bool]:
    """The losses after other weights were loaded, perhaps with a view of some held; whether it shows the last ones."""
    name, seen, losses = "blocks.5.up.weight", torch.empty(0), []
    tiers = TierConfig(gpu_memory=gpu_memory, cpu_memory="24MiB", timeout_s=20.0)
    with Engine(tiny(blocks=6), tiers, AdamWConfig(lr=1e-2), **options) as engine:
        with engine.gathered(name):
            seen = engine.model.get_parameter(name).detach() if holds_view else seen
        engine.load_state_dict({key: value * 0.5 for key, value in engine.state_dict().items()})
        for batch in batches(2, rank, ranks):
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            seen.sum()  # a view can be read at any time
            losses.append(loss.item())
        with torch.no_grad():
            next_token_loss(engine, batch)  # which needs the present weights of all groups
        return losses, torch.equal(seen, engine.state_dict()[name])


class Littering(nn.Module):
    """Its blocks leave views of their weights in reference cycles."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index in (0, 3):
                cycle: list[Any] = [block.weight.t()]
                cycle.append(cycle)
        return x


def litter(rank: int, ranks: int, gpu_memory: str, *, is_tidy: bool) -> list[float]:
    """The losses of a model that litters; if tidy, every rank collects garbage at a time of its own, else none does."""
    torch.manual_seed(0)
    tiers, losses = TierConfig(gpu_memory=gpu_memory, cpu_memory="24MiB", timeout_s=5.0), []
    with contextlib.ExitStack() as entered:
        entered.enter_context(no_garbage_collection())
        entered.callback(gc.unfreeze)
        gc.freeze()  # else each collection looks through all of torch
        engine = entered.enter_context(Engine(Littering(), tiers, AdamWConfig(lr=1e-2), zero=3))
        for step in range(4):
            loss = engine(torch.ones(2, 256)).square().mean()
            if is_tidy and step % ranks == rank:
                gc.collect()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def divide(rank: int, ranks: int, directory: str, memory: Sequence[str], **options: Any) -> int:
    """The bytes of the GPU tier where both tiers share one memory, whose size differs by rank."""
    tiers = TierConfig(nvme=[directory], cpu_memory=memory[rank], timeout_s=20.0, **options)
    with Engine(tiny(blocks=5), tiers, zero=3) as engine:
        return engine.placement.gpu_bytes


def step_inside(rank: int, ranks: int) -> list[float]:
    """The losses of steps inside of gathered(), where rank 1 learns later than rank 0 that a group is ready again."""
    complete = Gathers.complete

    async def late(self: Gathers, *given: Any) -> None:
        await complete(self, *given)
        task = asyncio.current_task()
        if rank == 1 and task is not None and task.get_name().startswith("refresh"):
            await asyncio.sleep(0.1)

    tiers, losses = TierConfig(gpu_memory="3MiB", cpu_memory="24MiB", timeout_s=20.0), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gathers, "complete", late)
        with Engine(tiny(blocks=6), tiers, AdamWConfig(lr=1e-2), zero=3) as engine:
            for batch in batches(2, rank, ranks):
                with engine.gathered("blocks.5.up.weight"):
                    loss = next_token_loss(engine, batch)
                    engine.backward(loss)
                    engine.step()
                    if rank == 0:
                        engine._parts.runtime.call(engine._parts.access._moves.loaded, 6)  # the group of blocks.5
                losses.append(loss.item())
    return losses


def lose(
    rank: int,
    ranks: int,
    directory: str,
    steps: int,
    moment: int,
    how: int,
    timeout_s: float,
    victim: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train, but one rank sends itself a signal when it waits for the others for the `moment`-th time.

    Returns:
        How many times this rank has waited, until the engine was made and in all, and its error; the seconds until a
        step raised that error, and until the engine was closed.
    """
    waits = 0
    waiting = Ranks.waiting

    def counted(self: Ranks, what: str) -> Any:
        nonlocal waits
        waits += 1
        if rank == victim and waits == moment:
            os.kill(os.getpid(), how)
        return waiting(self, what)

    tiers = TierConfig(nvme=[directory], timeout_s=timeout_s, gpu_memory="10MiB", cpu_memory="4MiB")
    options = {"zero": 3, "update": "forward", "max_grad_norm": 1.0} | options
    begin, told, raised_s, made = time.monotonic(), "", 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "waiting", counted)
        try:
            with Engine(tiny(), tiers, AdamWConfig(lr=1e-2), **options) as engine:
                made = waits
                for batch in batches(steps, rank, ranks):
                    begin = time.monotonic()
                    try:
                        engine.backward(next_token_loss(engine, batch))
                        engine.step()
                    except TierstoreError:
                        raised_s = time.monotonic() - begin
                        raise
                begin = time.monotonic()
        except TierstoreError as error:
            told = f"{type(error).__name__}: {error}"
    closed_s = time.monotonic() - begin
    return {"made": made, "waits": waits, "told": told, "raised_s": raised_s or closed_s, "closed_s": closed_s}


def peaks(
    rank: int, ranks: int, stage: int, gpu_memory: int | str = "64MiB", model: type[TinyModel] = TinyModel
) -> dict[str, Any]:
    """The most bytes that two steps in memory have held, by purpose."""

    tiers = TierConfig(gpu_memory=gpu_memory, cpu_memory="64MiB", timeout_s=20.0)
    with Engine(model(tied=False), tiers, zero=stage, update="step") as engine:
        for batch in batches(2, rank, ranks):
            engine.backward(next_token_loss(engine, batch))
            engine.step()
        parts = engine._parts
        pools = parts.store._pools
        return {
            "device_weights": parts.store.gpu_budget.peak_bytes,
            "device_gradients": parts.collector.peak_bytes,
            "resident": pools["resident"].peak_bytes,
            "gradients": pools["gradients"].peak_bytes,
        }


def meet_once(rank: int, ranks: int, timeout_s: float) -> str:
    """The error of a rank that waits for the second meeting, to which the last rank does not come."""
    alive = Ranks(timeout_s=timeout_s)
    alive.subgroup()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as lost:
        alive.subgroup()
    return str(lost.value)


def meet_late(rank: int, ranks: int, timeout_s: float) -> list[str]:
    """The errors of this rank: where the last rank comes too late, and where it makes another call."""
    told = []
    for is_late in (True, False):
        alive = Ranks(timeout_s=timeout_s)
        groups = [alive.subgroup(backend="gloo") for _ in range(2)]
        is_odd = rank == ranks - 1
        if is_odd and is_late:
            distributed.barrier()
        what = ["the first", "the second"][is_odd and not is_late]
        with pytest.raises(RankLost) as lost:
            alive.exchange(what, 0, groups[what == "the second"])
        if is_late and not is_odd:
            distributed.barrier()
        told.append(str(lost.value))
    return told


def begin_late(rank: int, ranks: int) -> str:
    """The error of a rank while the last one has not begun, as if it were still building its model."""
    store = distributed.distributed_c10d._get_default_store()
    if rank == ranks - 1:
        store.wait(["told"], timedelta(seconds=20.0))
        return ""
    with pytest.raises(RankLost) as lost:
        Ranks()
    store.set("told", "")
    return str(lost.value)


def begin_beside_a_stopped_one(rank: int, ranks: int, timeout_s: float) -> str:
    """The error of the last rank when the first one, which keeps the store, is stopped before it begins."""
    port = [0]
    if rank == 0:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    distributed.broadcast_object_list(port, 0)
    if rank == 0:
        store.wait(["has begun"])
        os.kill(os.getpid(), signal.SIGSTOP)
    store = distributed.TCPStore("127.0.0.1", port[0], is_master=False)
    broadcast = distributed.broadcast_object_list

    def say_and_wait(*arguments: Any, **options: Any) -> None:
        store.set("has begun", "")  # the store has answered all earlier requests
        broadcast(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_ranks, "_get_default_store", lambda: store)
        patch.setattr(distributed, "broadcast_object_list", say_and_wait)
        with pytest.raises(RankLost) as lost:
            Ranks(timeout_s=timeout_s)
    return str(lost.value)


def lose_the_store(rank: int, ranks: int, how: int, timeout_s: float) -> tuple[str, bool]:
    """The first rank's error after the last one, which keeps the store, got a signal; whether its heart still beats.

    The first rank waits for the last one, and gets an error, only if that one is stopped.
    """
    is_keeper = rank == ranks - 1
    port = [0]
    if is_keeper:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    distributed.broadcast_object_list(port, ranks - 1)
    if not is_keeper:
        store = distributed.TCPStore("127.0.0.1", port[0], is_master=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_ranks, "_get_default_store", lambda: store)
        alive = Ranks(timeout_s=timeout_s)
        group = alive.subgroup(backend="gloo")
        alive.exchange("all", 0, group)
        if is_keeper:
            os.kill(os.getpid(), how)
        if how != signal.SIGSTOP:
            alive._heart.join(5 * timeout_s)
            return "", alive._heart.is_alive()
        with pytest.raises(RankLost) as lost:
            alive.exchange("the keeper", 0, group)
        alive.close()
        return str(lost.value), alive._heart.is_alive()


def norm_of_wide(rank: int, ranks: int, options: dict[str, Any]) -> float | None:
    """A step's gradient norm of a model whose groups have several blocks of partial sums; all ranks see one batch."""
    if nodes := options.pop("nodes", 0):
        options["device_mesh"] = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 300))
    tiers = TierConfig(gpu_memory="64MiB", cpu_memory="64MiB", timeout_s=20.0)
    with Engine(model, tiers, update="step", **options) as engine:
        engine.backward(engine(torch.ones(2, 600)).square().mean())
        return engine.step().grad_norm


def train_apart(rank: int, ranks: int, directory: str, *, has_hosts: bool = False, **options: Any) -> dict[str, Any]:
    """A step of ranks that name directories of their own, perhaps on hosts of their own."""
    with pytest.MonkeyPatch.context() as patch:
        if has_hosts:
            patch.setattr(partition, "boot_id", lambda: f"host {rank}")
        return train(rank, ranks, f"{directory}/{rank}", 1, **options)


def drawn(rank: int, ranks: int, directory: str, nodes: int, tells_rank: bool = True) -> float:
    """The first random number of a run on so many nodes, whose ranks were seeded differently before it began.

    Args:
        tells_rank: the generation says whose random states it holds; older releases did not.
    """
    mesh = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("replicate", "shard"))
    tiers = TierConfig(gpu_memory="4MiB", cpu_memory="24MiB", nvme=[f"{directory}/{mesh.get_coordinate()[0]}"])
    model, told = tiny(blocks=1), capture.random_states
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as patch:
        if not tells_rank:
            patch.setattr(capture, "random_states", lambda *_: {k: v for k, v in told().items() if k != "rank"})
        with Engine(model, tiers, device_mesh=mesh, resume="auto"):
            return torch.rand(()).item()


def placed(rank: int, ranks: int, directory: str) -> list[int]:
    """The ranks that write the store of this one: each of two nodes is a container with a volume of its own."""
    tiers = TierConfig(nvme=[directory], timeout_s=20.0)
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_identity", lambda path: mesh.get_coordinate()[0])
        made = partition.partition_of(3, None, mesh, tiers)
        try:
            return [*made.team(tiers, is_durable=True).members]
        finally:
            made.close(1.0)


def leave_by_an_error(rank: int, ranks: int, directory: str, timeout_s: float, has_snapshot: bool) -> str:
    """The error of a rank, where the last one fails between steps while a commit waits, or a snapshot is copied."""
    tiers = TierConfig(gpu_memory="4MiB", cpu_memory="24MiB", nvme=[directory], timeout_s=timeout_s)
    with pytest.raises((ValueError, RankLost)) as told, Engine(tiny(), tiers, commit_every=10) as engine:  # noqa: PT012
        for batch in batches(3, rank, ranks):
            engine.backward(next_token_loss(engine, batch))
            engine.step()
            if has_snapshot and engine.step_count == 1:
                engine.snapshot("kept")
            if rank == ranks - 1:
                raise ValueError("a broken sample")
    return str(told.value)


def train_replicas(rank: int, ranks: int, directory: str, shards: int, **options: Any) -> dict[str, Any]:
    """A step of replicas of so many ranks, all of which name one directory."""
    options["device_mesh"] = init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    return train(rank, ranks, directory, 1, **options)


def find_no_room(rank: int, ranks: int, timeout_s: float) -> str:
    """The error of a rank in the second step, in which the last rank finds no memory for weights."""
    allocate, full = CpuDevice.allocate, [False]

    def allocate_if_not_full(*given: Any) -> None:
        if full[0]:
            raise BudgetError("the GPU has no room")
        allocate(*given)

    tiers = TierConfig(gpu_memory="3MiB", cpu_memory="24MiB", timeout_s=timeout_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "allocate", allocate_if_not_full)
        engine = Engine(tiny(blocks=6), tiers, AdamWConfig(lr=1e-2), zero=3)
        with pytest.raises(TierstoreError) as told, engine:  # noqa: PT012
            for batch in batches(2, rank, ranks):
                engine.backward(next_token_loss(engine, batch))
                engine.step()
                full[0] = rank == ranks - 1
    return f"{type(told.value).__name__}: {told.value}"


def change(
    rank: int, ranks: int, how: str, *, nodes: int = 0, default: torch.dtype = torch.float32, **options: Any
) -> list[list[float]]:
    """The distinct values of this rank's weights, on the device and at rest, after ranks set all weights to their own
    number + 1: all ranks ("loaded", "gathered"), or only the rank that `how` names.

    Args:
        default: torch's default dtype once the model is built.
    """
    if nodes:
        mesh = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("replicate", "shard"))
        options |= {"device_mesh": mesh}
    model = nn.Sequential(nn.Embedding(20011, 13), nn.Linear(13, 3))  # more than one rank's part
    for parameter in model.parameters():
        nn.init.constant_(parameter, 9)
    tiers = TierConfig(gpu_memory="64MiB", cpu_memory="64MiB", timeout_s=20.0)
    with default_dtype(default), Engine(model, tiers, **options) as engine:
        if how == "loaded":
            engine.load_state_dict({name: torch.full_like(w, rank + 1) for name, w in engine.state_dict().items()})
        else:
            with engine.gathered("", modify=True):
                for parameter in model.parameters() if how == "gathered" or rank == int(how) else ():
                    nn.init.constant_(parameter, rank + 1)
        with engine.gathered(""):
            on_device = torch.cat([parameter.reshape(-1).detach() for parameter in model.parameters()])
        at_rest = torch.cat([weight.reshape(-1) for weight in engine.state_dict().values()])
        return [on_device.unique().tolist(), at_rest.unique().tolist()]


def change_wrongly(rank: int, ranks: int, **options: Any) -> dict[str, str]:
    """For each thing that rank 1 does differently: this rank's error, and which of its weights have changed after it,
    on the device, where views of them are held, or at rest."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    told, is_first = {}, rank == 0
    with Engine(model, TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=20.0), **options) as engine:
        before = engine.state_dict()
        views: list[torch.Tensor] = []

        def load(state: Any) -> None:
            engine.load_state_dict(state)

        def gather(names: str, *, modify: bool = True, shape: tuple[int, ...] = (4, 3)) -> None:
            with engine.gathered(names, modify=modify):
                views.append(model[0].weight[0])
                nn.init.constant_(model[1].weight, rank + 1)
                model[0].bias.data = torch.full((4,), 7.0)
                model[0].weight.data = torch.zeros(shape)

        def grow() -> None:
            with engine.gathered("", modify=True):
                views.append(model[1].weight[0])
                nn.init.zeros_(model[1].weight)
                if not is_first:
                    model.extra = nn.Linear(2, 2)
            del model.extra

        cases: dict[str, Callable[[], None]] = {
            "shapes of a state": lambda: load(before if is_first else before | {"0.weight": torch.zeros(3, 4)}),
            "no state": lambda: load(before if is_first else None),
            "data": lambda: gather("", shape=(4, 3) if is_first else (3, 4)),
            "a name": lambda: gather("" if is_first else "none"),
            "others": lambda: gather("0" if is_first else "1"),
            "newcomers": grow,
        }
        if not engine._parts.partition.keeps_all:  # else one rank may read alone, without the others
            cases["for reading"] = lambda: gather("", modify=is_first)
        for what, work in cases.items():
            with pytest.raises(TierstoreError) as refusal:
                work()
            model._modules.pop("extra", None)
            with engine.gathered(""):
                on_device = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            at_rest = engine.state_dict()
            changed = [n for n in before for now in (on_device, at_rest) if not torch.equal(before[n], now[n])]
            told[what] = f"{type(refusal.value).__name__}: {refusal.value}; {changed}"
    return told


def break_a_change_off(rank: int, ranks: int, where: str, **options: Any) -> list[str]:
    """The loss or the error of a step after a change on all ranks that was broken off, or was refused: without a view
    of the changed weights, and with one.

    Args:
        where: weights are changed in "gathered" or in "forward".
    """
    model, told = nn.Sequential(nn.Linear(3, 1, bias=False)), []
    nn.init.ones_(model[0].weight)
    x, views = torch.ones(2, 3), list[torch.Tensor]()
    with Engine(model, TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=20.0), **options) as engine:

        def change(*_: Any) -> None:
            views.extend([model[0].weight[0]] if told else [])
            nn.init.zeros_(model[0].weight)
            if where == "gathered":
                raise KeyError

        def change_and_fail() -> None:
            if where == "gathered":
                with pytest.raises(KeyError), engine.gathered("", modify=True):
                    change()
            else:
                with model.register_forward_pre_hook(change), pytest.raises(GraphError, match="changed in forward"):
                    engine(x)

        for _ in range(2):
            change_and_fail()
            try:
                loss = engine(x).sum()
                told.append(f"loss {loss.item():.2f}")
                engine.backward(loss)
                engine.step()
            except TierstoreError as error:
                told.append(str(error))
    return told


def ask_for_memory(rank: int, ranks: int) -> list[str]:
    """Checks that the memory that all ranks take is enough, on one machine and on one each; returns errors for less."""
    machine_bytes, has_hosts = 2**40, False

    def ask() -> int:
        memory = SimpleNamespace(total=machine_bytes, available=machine_bytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(psutil, "virtual_memory", lambda: memory)
            patch.setattr(machine, "boot_id", lambda: f"host {rank if has_hosts else 0}")
            with Engine(tiny(blocks=6), TierConfig(gpu_memory="8MiB", cpu_memory="64MiB"), zero=0) as engine:
                return engine._parts.store.arena.capacity_bytes + engine.placement.gpu_filled_bytes

    own_bytes, told = ask(), []
    for has_hosts in (False, True):
        machine_bytes = own_bytes * (1 if has_hosts else ranks)
        assert ask() == own_bytes
        machine_bytes -= 1
        with pytest.raises(BudgetError) as refusal:
            ask()
        told.append(str(refusal.value))
    return told


def fill_without_room(rank: int, ranks: int) -> tuple[str, int]:
    """A rank's error, and how many pieces of weights it has made, when the last rank cannot keep the first piece."""
    model, made = tiny(blocks=6), []
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def put(*_: Any) -> None:
        raise StorageFull("the disk is full")

    class Source:
        def names(self) -> set[str]:
            return set(sizes)

        def stream(self) -> Iterator[filling.Piece]:
            for name, elements in sizes.items():
                made.append(name)
                yield filling.Piece(name, 0, torch.zeros(elements))

    with pytest.MonkeyPatch.context() as patch:
        for module in (filling, partition):
            patch.setattr(module, "PIECE_ELEMENTS", 1000)
        if rank == ranks - 1:
            patch.setattr(filling._Filler, "put", put)
        with pytest.raises(StorageFull) as told:
            Engine(model, TierConfig(), AdamWConfig(), zero=3, initialize=Source())
    return str(told.value), len(made)
