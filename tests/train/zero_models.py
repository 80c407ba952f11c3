"""What ranks run in the tests of ZeRO with all kinds of models and loops."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import test_must_work as must
import torch
from faults import EIO, ENOSPC, FaultyBackend
from late_device import LateDevice, queueing
from torch import distributed, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import BudgetError, RankLost, TierstoreError
from tierstore.io.backend import Backend
from tierstore.train import assembly
from tierstore.train.engine import Engine
from tierstore.train.ranks import Ranks

WIDTH = must.WIDTH = 192
"""Layers have more than two blocks of 65536 elements, so that every rank keeps a part of them."""


TIMEOUT_S = 20.0


class Short(must.Stack):
    def __init__(self) -> None:
        super().__init__(layers=2)


class Growing(must.Stack):
    """Every step but the first uses more of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(must.Layer() for _ in range(2)) for _ in range(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for block in self.layers:
            for part in block[: 1 + self.calls // self.calls_per_step]:
                x = part(x)
        self.calls += 1
        return self.head(x)

    calls_per_step = 1


class SkippingTogether(must.Stack):
    """Every step leaves out another layer, the same at all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        for position, layer in enumerate(self.layers):
            if position != self.calls // self.calls_per_step % 4:
                x = checkpoint(layer, x, use_reentrant=True) if self.recomputes else layer(x)
        self.calls += 1
        return self.head(x)

    calls_per_step = 1
    recomputes = False


class SkippingRecomputed(SkippingTogether):
    recomputes = True


class EitherWay(must.Stack):
    """Each batch goes through the layers from one end or from the other."""

    def forward(self, x: torch.Tensor) -> Any:
        is_turned = bool(x.detach()[0, 0] > 0)
        x = self.enter(x)
        for layer in self.layers[::-1] if is_turned else self.layers:
            x = layer(x)
        return self.head(x)


class Unused(must.Stack):
    """One layer is used only in part, which part depends on the batch; one is read by backward and gets no gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.enter(x)
        layers: Sequence[nn.Module] = self.layers
        first, second = layers[0], layers[1]
        x = first(x)
        x = x + 0.1 * functional.linear(x, layers[3].up.weight.detach()[:WIDTH])
        part = second.up(x) if x.detach().sum() > 0 else functional.linear(x, second.down.weight.t())
        return self.head(layers[2](x + part[..., :WIDTH]))


class Experts(nn.Module):
    """Experts in one block; which of them runs depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(must.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.detach().abs().sum() * 1000) % 2](x)  # the third never


class Routed(must.Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))


class Small(nn.Sequential):
    """Groups so small that the first rank keeps all of each."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


KINDS: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in must.MODELS}
OWN = (Short, Growing, SkippingTogether, SkippingRecomputed, EitherWay, Unused, Routed, Small)
KINDS |= {kind.__name__: kind for kind in OWN}


def make(kind: str, dropout: float = 0.0, dtype: str = "float32", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = KINDS[kind]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    if dtype != "float32":
        model.to(getattr(torch, dtype))
    return model


def parts(batch: Any, ranks: int) -> list[Any]:
    """The rows of each rank."""
    inputs, labels = batch
    rows = len(labels) // ranks
    return [(inputs[r * rows : (r + 1) * rows], labels[r * rows : (r + 1) * rows]) for r in range(ranks)]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    inner = getattr(model, "model", model)
    dtype = next(iter(inner.parameters())).dtype
    return functional.cross_entropy(model(inputs.to(dtype).clone().requires_grad_()).float(), labels)


class Slow(Backend):
    """A disk whose reads and writes take random times at one rank."""

    def __init__(self, seed: int, longest_s: float) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._longest_s = longest_s

    def _call_pread(self, *arguments: Any) -> int:
        time.sleep(self._random.random() * self._longest_s)
        return super()._call_pread(*arguments)

    def _call_pwrite(self, *arguments: Any) -> int:
        time.sleep(self._random.random() * self._longest_s)
        return super()._call_pwrite(*arguments)


def least_budgets(kind: str, directories: Sequence[str], update: str, zero: int, **options: Any) -> tuple[int, int]:
    """The smallest budgets with which every rank starts."""
    dtype = options.pop("dtype", "float32")
    tiers = {"codec": options["codec"]} if "codec" in options else {}
    with pytest.raises(BudgetError) as refusal:
        Engine(
            make(kind, dtype=dtype),
            TierConfig(nvme=list(directories), gpu_memory=1, cpu_memory=1, **tiers),
            update=update, zero=zero,
        )  # fmt: skip
    text = str(refusal.value)
    told = [_bytes(re.search(rf"{name}.*?the smallest that fits is (\d+) B", text)) for name in ("gpu", "cpu")]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, told)
    return max(gpu for gpu, _ in found), max(cpu for _, cpu in found)


def _bytes(found: re.Match[str] | None) -> int:
    return int(found[1]) if found else 4096


def train(
    rank: int, ranks: int, kind: str, directory: str | None = None, steps: int = 5, **options: Any
) -> dict[str, Any]:
    """Train, and tell all there is to compare.

    Args:
        memory: budgets; None: the smallest.
        slow_s: the longest that reads and writes of the last rank take.
        has_gradients: the gradients of the first step are told.
        evaluates: the model is called between backward and the step, too.
    """
    evaluates = options.pop("evaluates", False)
    options = {"zero": 3, "update": "forward"} | options
    model_options = {key: options.pop(key) for key in ("dropout", "dtype") if key in options}
    tier_options = {key: options.pop(key) for key in ("codec", "prefetch_depth") if key in options}
    directories = [f"{directory}/{i}" for i in range(options.pop("directories", 1))] if directory else []
    memory, overflow_at = options.pop("memory", None), options.pop("overflow_at", -1)
    slow_s, has_gradients = options.pop("slow_s", 0.0), options.pop("has_gradients", False)
    if memory is None:
        memory = least_budgets(kind, directories, options["update"], options["zero"], **model_options, **tier_options)
    tiers = TierConfig(
        nvme=directories, timeout_s=TIMEOUT_S, gpu_memory=memory[0], cpu_memory=memory[1], **tier_options
    )
    if slow_s and rank == ranks - 1:
        options["backend"] = Slow(1, slow_s)
    told: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "gradients": {}, "budgets": memory}
    batches = [parts(batch, ranks)[rank] for batch in must.batches(steps)]
    with Engine(make(kind, **model_options), tiers, AdamWConfig(lr=1e-3), **options) as engine:
        torch.manual_seed(7 + rank)
        for step, batch in enumerate(batches):
            loss = loss_of(engine, batch)
            is_too_large = step == overflow_at and rank == ranks - 1
            engine.backward(loss * float("inf") if is_too_large else loss)
            told["losses"].append(loss.item())
            if evaluates:
                with torch.no_grad():
                    assert torch.equal(loss_of(engine, batch), loss)
            if has_gradients and not step:
                trained = [name for name, p in engine.model.named_parameters() if p.requires_grad]
                told["gradients"] = {name: engine.gradient(name).numpy() for name in trained}
            report = engine.step()
            engine.record().check_gradients()  # each group once, also those whose gradient came late
            told["norms"].append(report.grad_norm)
            told["skipped"].append(report.skipped)
            told["peak"] = report.peak_bytes
        told["weights"] = {name: value.numpy() for name, value in engine.state_dict().items()}
        told["bytes"] = engine.statistics()["bytes"]
        reductions = engine._parts.reductions
        told["order"] = None if reductions is None else list(reductions.order)
    return told


def train_late(rank: int, ranks: int, kind: str, directory: str | None, **options: Any) -> dict[str, Any]:
    """`train` on a device whose kernels are late: nothing would race on GPUs, either (`tests/late_device.py`)."""
    device = LateDevice()
    with pytest.MonkeyPatch.context() as patch, queueing(device):
        patch.setattr(assembly, "open_device", lambda *_: device)
        told = train(rank, ranks, kind, directory, **options)
    assert not device.hazards, (kind, device.hazards)
    assert device.kernels > 100, (kind, device.kernels)
    return told


def plain(kind: str, ranks: int, steps: int = 5, clip: float | None = None) -> dict[str, Any]:
    """The same as `train` in plain torch, with the ranks' parts one after the other."""
    model = make(kind)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-3, weight_decay=1e-2)
    if hasattr(model, "calls_per_step"):
        model.calls_per_step = ranks
    told: dict[str, Any] = {"losses": [], "gradients": {}, "unused": set()}
    before = {name: p.detach().clone() for name, p in trainable.items()}
    for batch in must.batches(steps):
        for part in parts(batch, ranks):
            loss = loss_of(model, part)
            (loss / ranks).backward()
            told["losses"].append(loss.item())
        if not told["gradients"]:
            told["gradients"] = {name: p.grad.numpy().copy() for name, p in trainable.items() if p.grad is not None}
        if clip is not None:
            nn.utils.clip_grad_norm_(trainable.values(), clip)
        optimizer.step()
        optimizer.zero_grad()
    told["unused"] = {name for name, p in trainable.items() if torch.equal(p, before[name])}
    told["weights"] = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    return told


def one_after_another(rank: int, ranks: int, count: int, directory: str | None) -> dict[str, Any]:
    """What engines leave behind: threads, descriptors, process groups. A third are refused, a third end by an error."""
    told: dict[str, Any] = {"threads": [], "descriptors": [], "groups": []}
    for number in range(count):
        nvme = [f"{directory}/{number}"] if directory else []
        tiers = TierConfig(
            nvme=nvme, timeout_s=TIMEOUT_S, gpu_memory="8MiB", cpu_memory=1 if number % 3 == 1 else "24MiB"
        )
        try:
            with Engine(make("Stack"), tiers, zero=3 if nvme or number % 2 else 0) as engine:
                for batch in must.batches(2):
                    engine.backward(loss_of(engine, parts(batch, ranks)[rank]))
                    if number % 3 == 2:
                        raise ArithmeticError
                    engine.step()
        except (BudgetError, ArithmeticError):
            pass
        gc.collect()
        told["threads"].append(_threads(min(told["threads"][2:], default=10**6)))
        told["descriptors"].append(len(os.listdir("/proc/self/fd")))
        told["groups"].append(len(_world.pg_names))
    return told


def _threads(at_most: int, wait_s: float = 2.0) -> int:
    """The number of threads, once it is at most `at_most` or after `wait_s`: a joined thread ends a moment later."""
    until_s = time.monotonic() + wait_s
    while (count := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < until_s:
        time.sleep(0.01)
    return count


def refused_at_once(rank: int, ranks: int) -> list[tuple[str, list[str]]]:
    """The errors of engines that are refused before all their process groups are made, and the threads left by each."""
    told = []

    def lose(ranks: Ranks, **options: Any) -> None:
        if ranks._subgroups == 2:
            raise RankLost("a rank did not come")
        return subgroup(ranks, **options)

    subgroup = Ranks.subgroup
    for device, meets in (("cuda:99", subgroup), ("cpu", lose)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "subgroup", meets)
            with pytest.raises(TierstoreError) as refusal:
                Engine(make("Stack"), TierConfig(device=device, timeout_s=TIMEOUT_S), zero=3)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("tierstore")]
        told.append((str(refusal.value), names))
    return told


class OwnWay(nn.Module):
    """Each rank leaves out another layer."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.left_out = left_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.left_out:
                x = x + torch.tanh(layer(x))
        return x


def looks_in(rank: int, ranks: int, zero: int) -> list[float]:
    """Ranks that go different ways look at weights, and set them, between steps: the sums that they see, and losses."""
    torch.manual_seed(0)
    seen = []
    tiers = TierConfig(gpu_memory="64MiB", cpu_memory="64MiB", timeout_s=30, prefetch_depth=2)
    with Engine(OwnWay(rank + 1), tiers, AdamWConfig(lr=1e-2), zero=zero) as engine:

        def steps() -> None:
            for _ in range(2):
                loss = engine(torch.ones(4, 16)).square().mean()
                engine.backward(loss)
                engine.step()
                seen.append(float(loss.detach()))

        def look(index: int) -> None:
            with engine.gathered(f"layers.{index}"):
                seen.append(float(engine.model.layers[index].weight.detach().sum()))

        steps()
        for index in (0, 1, 2, 3, 0):
            look(index)
        steps()
        engine.load_state_dict(engine.state_dict())
        look(0)
        steps()
    return seen


COUNTS = [(2, 2), (2, 3), (2, 1)]
"""Micro-batches of each rank, by step."""


def uneven(rank: int, ranks: int, zero: int) -> list[float | None]:
    """The norms of steps in which ranks have more or fewer micro-batches than before, side by side."""
    tiers = TierConfig(gpu_memory="64MiB", cpu_memory="64MiB", timeout_s=TIMEOUT_S)
    with Engine(make("Stack"), tiers, AdamWConfig(lr=1e-3), zero=zero) as engine:
        return [
            engine.train_step(batches, lambda output: output.square().mean(), "vertical").grad_norm
            for batches in (step[rank] for step in uneven_batches())
        ]


def uneven_batches() -> list[list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    return [[[torch.randn(4, WIDTH, generator=generator) for _ in range(n)] for n in step] for step in COUNTS]


def of_some(rank: int, ranks: int) -> list[float]:
    """Engines of the last two of three ranks, of the first two, and of all: the norms that this rank gets."""
    first, last = distributed.new_group([0, 1]), distributed.new_group([1, 2])
    told: list[float] = []
    for group, members in ((last, [1, 2]), (first, [0, 1]), (None, [0, 1, 2])):
        if rank in members:
            tiers = TierConfig(timeout_s=TIMEOUT_S, gpu_memory="8MiB", cpu_memory="24MiB")
            with Engine(make("Stack"), tiers, zero=3, process_group=group) as engine:
                for batch in must.batches(2):
                    engine.backward(loss_of(engine, parts(batch, ranks)[members.index(rank)]))
                    told.append(engine.step().grad_norm or 0.0)
    return told


def of_bound(rank: int, ranks: int) -> tuple[list[Any], str]:
    """Of which groups torch asked whether to split them when the default group was bound to a GPU and another group was
    made; and the GPU to which the default group is bound then."""
    asked: list[Any] = []
    alive, world = Ranks(timeout_s=TIMEOUT_S), distributed.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_get_split_source", asked.append)
        patch.setattr(world, "bound_device_id", torch.device("cuda:7"))
        alive.exchange("a test", 0, alive.subgroup())
        bound = str(world.bound_device_id)
    alive.close()
    return [str(group) for group in asked], bound


def begins_with(rank: int, ranks: int, directory: str, *, width: int = 2) -> tuple[list[list[float]], str]:
    """The buffers of a run whose ranks have built them with other values, and another width at the last one: those that
    a store does not keep, and those that it keeps, which each rank then sets to its number. Or the error."""
    model = Short()
    last = width if rank == ranks - 1 else 2
    model.register_buffer("table", torch.full((last,), 10.0 + rank), persistent=False)
    model.register_buffer("mean", torch.full((2,), 20.0 + rank))
    tiers = TierConfig(nvme=[directory], timeout_s=TIMEOUT_S, gpu_memory="8MiB", cpu_memory="24MiB")
    try:
        with Engine(model, tiers, resume="auto") as engine:
            found = [buffer.tolist() for buffer in model.buffers()]
            model.mean.fill_(rank)
            engine.backward(loss_of(engine, parts(must.batches(1)[0], ranks)[rank]))
            engine.step()
    except TierstoreError as error:
        return [], str(error)
    return found, ""


def wrong(rank: int, ranks: int, what: str, directory: str | None, kind: str = "Stack") -> dict[str, Any]:
    """Something is wrong at the last rank, or at all: what each rank says of it, after how many seconds, its files."""
    is_odd = rank == ranks - 1
    options: dict[str, Any] = {"zero": 3, "update": "forward"}
    memory: dict[str, Any] = {"gpu_memory": "8MiB", "cpu_memory": "4MiB"}
    nvme = [f"{directory}/store"] if directory else []
    seed, told = 0, {"error": "", "steps": 0}
    if what == "other blocks":
        kind, memory["gpu_memory"] = "Skipping", "4MiB"
    elif what == "model" and is_odd:
        kind = "Adapted"
    elif what == "seed":
        seed = rank
    elif what == "options" and is_odd:
        options["commit_every"] = 3
    elif what == "scale" and is_odd:
        options["loss_scale"] = 2.0
    elif what == "schedule" and is_odd:
        options["update"] = "step"
    elif what in ("rate after backward", "all rates"):
        options["update"] = "backward"
    elif what == "no store" and is_odd:
        nvme = []
    elif what == "replicas":
        options["zero"] = 0
    elif what == "budget" and is_odd:
        memory["cpu_memory"] = 1
    elif what == "directory":
        Path(nvme[0]).parent.mkdir(parents=True, exist_ok=True)
        nvme = [f"{directory}/{rank}"]
        options["device_mesh"] = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
        if is_odd:
            Path(nvme[0]).write_text("a file")
    elif what in FAULTS and is_odd:
        options["backend"] = FAULTS[what]()
        if what == "broken read":
            memory["cpu_memory"] = "1MiB"  # little enough that state is read back
    elif what.startswith("resume"):
        options["resume"] = what.partition(" ")[2]
    model = make(kind, seed=seed)
    if what == "groups":
        options["parameter_groups"] = [{"params": list(model.parameters()), "lr": 0.25 if is_odd else 0.5}]
    elif what == "buffers":
        model.register_buffer("table", torch.zeros(3 if is_odd else 1))
    elif what == "rate of replicas":
        options["zero"], memory, nvme = 0, {"gpu_memory": "64MiB", "cpu_memory": "64MiB"}, []
    elif what == "seed":
        model.register_buffer("shared", torch.full((1,), float(rank)).expand(2))
    begin = time.monotonic()
    try:
        with Engine(model, TierConfig(nvme=nvme, timeout_s=TIMEOUT_S, **memory), **options) as engine:
            told["begun_at"] = engine.step_count
            # Things go wrong from the second step on; a callback that fails there shows in the step after it.
            for step, batch in enumerate(must.batches({"callback": 3, "resume auto": 1}.get(what, 2))):
                begin = time.monotonic()
                if what == "loader" and is_odd and step == 1:
                    raise ArithmeticError("a bad file")
                if what == "forward" and is_odd and step == 1:
                    engine.model.layers[0].register_forward_hook(_raise)
                engine.backward(loss_of(engine, parts(batch, ranks)[rank]))
                if step == 1:
                    _be_odd(engine, what, is_odd=is_odd)
                with suppress(ArithmeticError):
                    engine.step()
                told["steps"] += 1
            told["norm"] = engine.state_dict()["enter.weight"].norm().item()
            told["buffers"] = [buffer.tolist() for buffer in model.buffers()]
    except (TierstoreError, ArithmeticError, OSError) as error:
        told["error"] = f"{type(error).__name__}: {error}"
    told["seconds"] = time.monotonic() - begin
    told["files"] = sorted(os.listdir(nvme[0])) if nvme and os.path.isdir(nvme[0]) else []
    return told


def _be_odd(engine: Engine, what: str, *, is_odd: bool) -> None:
    """Do what is wrong between backward and step."""
    names = ["enter.weight", "head.weight"]
    if what == "all rates" or (what.startswith("rate") and is_odd):
        engine.optimizer.param_groups[0]["lr"] = 0.5
    elif what == "gradients":
        for name in reversed(names) if is_odd else names:
            engine.gradient(name)
    elif what == "gradient" and not is_odd:
        engine.gradient(names[0])
    elif what == "callback" and is_odd:
        engine.on_step(lambda report: _raise() if report.step == 2 else None)
    elif what == "freezes" and is_odd:
        engine.model.get_parameter(names[0]).requires_grad_(False)
    elif what == "forgets":
        if is_odd:
            engine.zero_grad()
        engine.backward(loss_of(engine, must.batches(1)[0]))


def _raise(*_: Any) -> None:
    raise ArithmeticError("a bad layer")


FAULTS: dict[str, Callable[[], Backend]] = {
    "full": lambda: FaultyBackend(ENOSPC, at=2, times=10**9, kinds=("pwrite",)),
    "full later": lambda: FaultyBackend(ENOSPC, at=12, times=10**9, kinds=("pwrite",)),
    "broken read": lambda: FaultyBackend(EIO, at=8, times=10**9, kinds=("pread",)),
    "unsynced": lambda: FaultyBackend(EIO, at=3, times=10**9, kinds=("fdatasync",)),
}


class Counter:
    """Something with a state of its own at every rank."""

    def __init__(self, rank: int) -> None:
        self.value = rank

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def loop(
    rank: int, ranks: int, directory: str, parts_of_run: list[int], zero: int = 3, **options: Any
) -> dict[str, Any]:
    """All that a loop may do, in one or several engines that resume each other: dropout, a scheduler, parameter groups,
    buffers, looking at weights and changing them between steps, evaluation, a step that is given up."""
    told: dict[str, Any] = {"losses": [], "masks": [], "seen": [], "rates": []}
    counter, begun = Counter(100 * rank), 0
    batches = must.batches(2 * sum(parts_of_run))
    for steps in parts_of_run:
        model = make("Buffers", dropout=0.3)
        decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
        others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        with Engine(
            model,
            TierConfig(nvme=[f"{directory}/store"], timeout_s=TIMEOUT_S, gpu_memory="12MiB", cpu_memory="3MiB"),
            AdamWConfig(lr=1e-3),
            zero=zero,
            resume="auto",
            parameter_groups=[{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 5e-3}],
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
            registered={"counter": counter},
            **options,
        ) as engine:
            engine.on_step(lambda report: told["rates"].append(report.lr))
            if not begun:
                torch.manual_seed(7 + rank)
            for step in range(begun, begun + steps):
                mine = [parts(batch, ranks)[rank] for batch in batches[2 * step : 2 * step + 2]]
                if step == 1:  # a step that is given up
                    with engine.no_sync():
                        engine.backward(loss_of(engine, mine[0]))
                    engine.zero_grad()
                with engine.no_sync():
                    engine.backward(loss_of(engine, mine[0]) / 2)
                told["seen"].append(engine.gradient("layers.1.up.weight").norm().item())
                loss = loss_of(engine, mine[1])
                engine.backward(loss / 2)
                told["losses"].append(loss.item())
                told["masks"].append(torch.rand(()).item())
                counter.value += 1
                engine.step()
                with torch.no_grad():
                    engine.model.eval()
                    told["seen"].append(loss_of_eval(engine, batches[0]))
                    engine.model.train()
                with engine.gathered(["layers.0.up.weight", "head.bias"]):
                    told["seen"].append(model.layers[0].up.weight.norm().item())
                if step == 1:
                    with engine.gathered(["layers.2.down.weight"], modify=True), torch.no_grad():
                        model.layers[2].down.weight.mul_(0.5)
                    state = engine.state_dict()
                    state["enter.bias"] = torch.full_like(state["enter.bias"], 0.25)
                    engine.load_state_dict(state)
            begun += steps
            told["weights"] = {name: value.numpy() for name, value in engine.state_dict().items()}
            engine.export(f"{directory}/out")
    told["counter"] = counter.value
    return told


@torch.no_grad()
def loss_of_eval(engine: Engine, batch: Any) -> float:
    return functional.cross_entropy(engine(batch[0]), batch[1]).item()
