"""Calls of an engine in any order, with any schedule and budgets: bit for bit as the serial one, nearly as torch.

Every rule does the same to three: the engine under test, whose options are drawn; the serial engine, with all state in
memory, which waits for everything inside `step()` (unless updates are delayed); and plain torch. The two engines are
closed, killed, and resumed together.

`pytest --hypothesis-profile=long tests/train/test_any_order.py` takes 200,000 calls.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runs import smallest_budgets
from torch import nn

from tierstore.config import AdamWConfig, TierConfig
from tierstore.device.transfers import CpuDevice
from tierstore.errors import BudgetError, ClosedError, ConfigError, TierstoreError
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

T = TypeVar("T")
WIDTH, LAYERS, CLIP = 16, 4, 0.05
STREAMING = ("backward", "speculative")
DTYPES = {"fp32": [torch.float32], "bf16": [torch.bfloat16], "mixed": [torch.float32, torch.bfloat16]}

WAYS = st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**16)
MICRO_BATCHES = st.lists(st.tuples(SEEDS, WAYS), min_size=1, max_size=3)
NAMES = st.sampled_from(["layers.0.weight", "layers.1.bias", "layers.2", "scale", "head.weight", "wide", ""])


class Broken(Exception):
    """Raised by a model that is told to break."""


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, *_: Any) -> Any:
        raise Broken


class Net(nn.Module):
    """Layers that a call takes in any order and number, one of two chunks, a tied head, a scale, a counting buffer."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH).to(dtypes[index % len(dtypes)]) for index in range(LAYERS)
        )
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2100), nn.Tanh(), nn.Linear(2100, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False).to(dtypes[0])
        self.head.weight = self.layers[0].weight  # type: ignore[assignment]
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor, way: list[int], breaks: str | None = None) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        x = x * self.scale
        for index in way:
            layer = self.layers[index]
            x = x + layer(x.to(layer.weight.dtype)).float().tanh()
        if len(way) % 2:
            x = x + self.wide(x)
        if breaks == "forward":
            raise Broken
        if breaks == "backward":
            x = _Breaks.apply(x)
        return self.head(x.to(self.head.weight.dtype)).float()


@dataclass(frozen=True)
class Options:
    """How an engine is made; `room` is the memory that it has beyond the smallest budgets that fit."""

    update: str
    room: str
    commit_every: int = 1
    overlap: bool = True
    codec: str = "none"
    state_on_gpu: bool = False


ROOMS = {"least": (0, 0), "some": (2**16, 2**20), "all": (2**22, 2**26)}
SERIAL = Options("step", "all", overlap=False)
BUDGETS_ROOM = st.sampled_from(list(ROOMS))


@functools.cache
def least(dtype: str, update: str, clip: float | None, codec: str, state_on_gpu: bool) -> tuple[int, int]:
    options: dict[str, Any] = {"codec": codec, "state_on_gpu": state_on_gpu, "update": update, "max_grad_norm": clip}
    return smallest_budgets(Net(DTYPES[dtype]), nvme=["unused"], **options)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


Gradients = list[torch.Tensor | None]


class Plain:
    """The same training in torch alone; `pending` are the gradients that a delayed step keeps for the next one."""

    def __init__(self, dtype: str, clip: float | None, *, is_delayed: bool) -> None:
        self.made_with: dict[str, Any] = {"dtype": dtype, "clip": clip, "is_delayed": is_delayed}
        self.model, self.clip, self.is_delayed = Net(DTYPES[dtype]), clip, is_delayed
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.scheduler = scheduler_of(self.optimizer)
        self.pending: Gradients | None = None

    def copy(self) -> Plain:
        """Another one that goes on from here, without the gradients of a step in progress."""
        other = Plain(**self.made_with)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.scheduler.load_state_dict(self.scheduler.state_dict())
        other.pending = self.pending
        return other

    def step(self) -> None:
        parameters = list(self.model.parameters())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)
        arrived = [parameter.grad for parameter in parameters]
        self.apply(self.pending if self.is_delayed else arrived)
        self.pending = arrived if self.is_delayed else None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for the scheduler
        self.scheduler.step()

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def apply(self, gradients: Gradients | None) -> None:
        if gradients is not None:
            for parameter, gradient in zip(self.model.parameters(), gradients):
                parameter.grad = gradient
            self.optimizer.step()
        self.optimizer.zero_grad()


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 0.3).pow(2).mean()


def seen(report: StepReport) -> tuple[Any, ...]:
    return report.lr, report.step, report.grad_norm, report.skipped, report.loss


class AnyOrder(RuleBasedStateMachine):
    """The same calls on two engines and on plain torch."""

    @initialize(
        data=st.data(), dtype=st.sampled_from(list(DTYPES)), clips=st.booleans(), is_delayed=st.booleans(),
        codec=st.sampled_from(["none", "lz4"]), disks=st.integers(1, 2), is_apart=st.booleans(),
    )  # fmt: skip
    def begin(
        self, data: st.DataObject, dtype: str, clips: bool, is_delayed: bool, codec: str, disks: int, is_apart: bool
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="any-order-"))
        self.patch = pytest.MonkeyPatch()
        if is_apart:  # gradients and weights are copied, as from and to a GPU
            self.patch.setattr(CpuDevice, "in_place", lambda *_: None)
            self.patch.setattr(CpuDevice, "address_of", lambda *_: None)
        self.codec, self.disks = codec, disks
        self.dtype, self.clip, self.is_delayed = dtype, CLIP if clips else None, is_delayed
        self.plain = Plain(dtype, self.clip, is_delayed=is_delayed)
        self.marks: list[Plain] = []
        self.is_previous = False
        self.saved: list[Any] = []
        self.open(data, "never")
        self.mark()

    # --- making and resuming ------------------------------------------------------------------------------------

    def open(self, data: st.DataObject, resume: str) -> None:
        updates = ["step", "forward", "speculative", "auto"] + ["backward"] * (self.clip is None)
        update = "delayed" if self.is_delayed else data.draw(st.sampled_from(updates), "update")
        every = 1 if update == "speculative" else data.draw(st.sampled_from([1, 1, 3]), "commit_every")
        room = data.draw(BUDGETS_ROOM, "room")
        on_gpu = room == "all" and not self.is_delayed and data.draw(st.booleans(), "state_on_gpu")
        self.options = Options(update, room, every, codec=self.codec, state_on_gpu=on_gpu)
        serial = Options("delayed", "all") if self.is_delayed else SERIAL
        self.engine = self.made(self.options, "looked at", resume)
        self.serial = self.made(serial, "serial", resume)
        self.has_begun = self.has_backward = self.is_final = False
        self.planned: list[tuple[str, float]] = []  # each fits on the device

    def made(self, options: Options, name: str, resume: str) -> Engine:
        gpu, cpu = least(self.dtype, options.update, self.clip, options.codec, options.state_on_gpu)
        more_gpu, more_cpu = ROOMS[options.room]
        tiers = TierConfig(
            gpu_memory=gpu + more_gpu, cpu_memory=cpu + more_cpu, timeout_s=20.0,
            nvme=[self.folder / name / f"store{n}" for n in range(self.disks)], codec=options.codec,
            state_on_gpu=options.state_on_gpu,
        )  # fmt: skip
        engine = Engine(
            Net(DTYPES[self.dtype]), tiers, AdamWConfig(lr=1e-2, weight_decay=0.1), update=options.update,
            max_grad_norm=self.clip, commit_every=options.commit_every, overlap=options.overlap,
            lr_scheduler=scheduler_of, resume=resume,
        )  # fmt: skip
        engine.on_step(lambda report: self.change_in_step(engine))
        return engine

    def mark(self) -> None:
        """Note the present state: a generation holds it, or will when the engines are closed."""
        self.begin_step()
        self.has_begun = False
        if self.options.commit_every > 1:  # which of them the generation before holds is not known here
            self.marks.clear()
        self.marks.append(self.plain.copy())

    def begin_step(self) -> None:
        """A step or a change begins: a run that went back to the generation before now gives up the newer one."""
        self.has_begun = True
        if self.is_previous:
            self.is_previous = False
            self.marks.pop()

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (getattr(self, "engine", None), getattr(self, "serial", None)) if engine]

    def both(self, act: Callable[[Engine], T]) -> T:
        """Both engines do it, with the same result."""
        found, expected = act(self.engine), act(self.serial)
        assert repr(found) == repr(expected)
        return found

    @property
    def streams(self) -> bool:
        """Whether updates have run in backward, so that looks are refused until the step."""
        is_auto = self.options.update == "auto" and self.clip is None  # with clipping, updates wait for step()
        return self.is_final and (is_auto or self.options.update in STREAMING)

    @property
    def keeps_last(self) -> bool:
        """Whether the last step is or will be committed, even if the one in progress never ends."""
        return self.options.commit_every == 1 or not self.has_begun

    # --- steps --------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.is_final)
    @rule(seed=SEEDS, way=WAYS)
    def accumulate(self, seed: int, way: list[int]) -> None:
        def act(engine: Engine) -> float:
            with engine.no_sync():
                loss = loss_of(engine(inputs(seed), way))
                engine.backward(loss)
            return loss.item()

        self.take(self.both(act), seed, way)

    @precondition(lambda self: not self.is_final)
    @rule(seed=SEEDS, way=WAYS)
    def backward(self, seed: int, way: list[int]) -> None:
        def act(engine: Engine) -> float:
            loss = loss_of(engine(inputs(seed), way))
            engine.backward(loss)
            return loss.item()

        self.take(self.both(act), seed, way)
        self.is_final = True

    def take(self, found: float, seed: int, way: list[int]) -> None:
        loss = loss_of(self.plain.model(inputs(seed), way))
        loss.backward()
        self.check_close(found, loss.item())
        self.begin_step()
        self.has_backward = True

    @precondition(lambda self: self.is_final)
    @rule()
    def step(self) -> None:
        self.stepped(self.both(lambda engine: seen(engine.step())))

    @precondition(lambda self: not self.has_begun)
    @rule(micro=MICRO_BATCHES, schedule=st.sampled_from(["horizontal", "vertical"]))
    def train_step(self, micro: list[tuple[int, list[int]]], schedule: str) -> None:
        batches = [{"x": inputs(seed), "way": way} for seed, way in micro]
        found = self.both(lambda engine: seen(engine.train_step(batches, loss_of, schedule)))
        total = 0.0
        for batch in batches:
            loss = loss_of(self.plain.model(**batch)) / len(batches)
            loss.backward()
            total += loss.item()
        self.check_close(found[-1], total)
        self.stepped(found)

    def stepped(self, found: tuple[Any, ...]) -> None:
        assert found[0] == self.plain.rates
        self.plain.step()
        for name, factor in self.planned:
            self.multiply(self.plain.model, name, factor)
        self.planned.clear()
        self.has_backward = self.is_final = False
        self.mark()

    @precondition(lambda self: self.is_delayed and not self.has_begun)
    @rule()
    def apply_pending(self) -> None:
        self.both(lambda engine: engine.apply_pending())
        if self.plain.pending is not None:
            self.plain.apply(self.plain.pending)
            self.plain.pending = None
            self.mark()

    @rule()
    def zero_grad(self) -> None:
        if self.streams:
            with pytest.raises(ConfigError, match="is changing meanwhile"):
                self.engine.zero_grad()
            return
        self.both(lambda engine: engine.zero_grad())
        self.plain.optimizer.zero_grad()
        self.is_final = False

    # --- looking ------------------------------------------------------------------------------------------------

    @rule(seed=SEEDS, way=WAYS)
    def evaluate(self, seed: int, way: list[int]) -> None:
        with torch.no_grad():
            if self.refused(lambda: self.engine(inputs(seed), way)):
                return
            found = self.both(lambda engine: loss_of(engine(inputs(seed), way)).item())
            self.check_close(found, loss_of(self.plain.model(inputs(seed), way)).item())

    @rule(name=NAMES)
    def read(self, name: str) -> None:
        def act(engine: Engine) -> list[Any]:
            with engine.gathered([name]):
                return self.values_of(engine.model, name)

        if not self.refused(lambda: act(self.engine)) and self.fits(name):
            self.both(act)

    @precondition(lambda self: self.has_backward)
    @rule(name=st.sampled_from(["layers.0.weight", "layers.1.bias", "scale", "wide.0.weight"]))
    def gradient(self, name: str) -> None:
        try:
            found = self.engine.gradient(name)
        except ConfigError:
            assert self.streams
            return
        assert torch.equal(found, self.serial.gradient(name))
        expected = self.plain.model.get_parameter(name).grad
        if self.dtype == "fp32":
            torch.testing.assert_close(found, torch.zeros_like(found) if expected is None else expected)

    @precondition(lambda self: not self.is_final)
    @rule(seed=SEEDS, way=WAYS)
    def lose_forward(self, seed: int, way: list[int]) -> None:
        """A forward without a backward."""
        for call in (*self.engines, self.plain.model):
            call(inputs(seed), way)
        self.begin_step()

    @rule()
    def look(self) -> None:
        if self.refused(self.engine.state_dict):
            return
        found, expected = (engine.state_dict() for engine in self.engines)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
        if self.dtype == "fp32":
            for name, value in self.plain.model.state_dict().items():
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)

    # --- changes between steps ----------------------------------------------------------------------------------

    @precondition(lambda self: not self.has_begun)
    @rule(name=NAMES, factor=st.sampled_from([0.5, 2.0]))
    def change(self, name: str, factor: float) -> None:
        if not self.fits(name):
            return
        for engine in self.engines:
            self.change_one(engine, name, factor)
        self.multiply(self.plain.model, name, factor)
        self.mark()

    @precondition(lambda self: not self.has_begun)
    @rule(name=NAMES, factor=st.sampled_from([0.5, 2.0]))
    def plan_change(self, name: str, factor: float) -> None:
        """A callback makes the change in the next step, whose generation holds it."""
        if self.fits(name):
            self.planned.append((name, factor))

    def change_in_step(self, engine: Engine) -> None:
        for name, factor in self.planned:
            self.change_one(engine, name, factor)

    def change_one(self, engine: Engine, name: str, factor: float) -> None:
        with engine.gathered([name], modify=True):
            self.multiply(engine.model, name, factor)

    @precondition(lambda self: not self.has_begun)
    @rule()
    def keep_weights(self) -> None:
        self.kept = self.both_states()

    def both_states(self) -> Any:
        return [engine.state_dict() for engine in self.engines], copy.deepcopy(self.plain.model.state_dict())

    @precondition(lambda self: not self.has_begun and hasattr(self, "kept"))
    @rule()
    def load_weights(self) -> None:
        of_engines, of_plain = self.kept
        for engine, state in zip(self.engines, of_engines):
            engine.load_state_dict(state)
        self.plain.model.load_state_dict(of_plain)
        self.mark()

    @precondition(lambda self: self.has_begun and not self.streams)
    @rule(name=NAMES)
    def refuse_changes(self, name: str) -> None:
        for engine in self.engines:
            with pytest.raises(ConfigError, match="in the middle of a step"), engine.gathered([name], modify=True):
                pass
            with pytest.raises(ConfigError, match="in the middle of a step"):
                engine.load_state_dict({})

    @precondition(lambda self: not self.streams)
    @rule(rate=st.sampled_from([1e-2, 3e-3]), decay=st.sampled_from([0.0, 0.1]))
    def set_options(self, rate: float, decay: float) -> None:
        for optimizer in (self.engine.optimizer, self.serial.optimizer, self.plain.optimizer):
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = rate, decay

    @precondition(lambda self: not self.streams)
    @rule(name=st.sampled_from(["layers.1.weight", "layers.2.bias", "scale"]), is_trained=st.booleans())
    def freeze(self, name: str, is_trained: bool) -> None:
        for model in (self.engine.model, self.serial.model, self.plain.model):
            model.get_parameter(name).requires_grad_(is_trained)

    @rule()
    def flush(self) -> None:
        if not self.streams:
            self.both(lambda engine: engine.flush())

    # --- the ends of runs ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.keeps_last)
    @rule(data=st.data())
    def close_and_resume(self, data: st.DataObject) -> None:
        for engine in self.engines:
            engine.close()
        self.resume(data)

    @precondition(lambda self: not self.has_begun)
    @rule()
    def copy_stores(self) -> None:
        """Copy what a kill would leave now: the run may come back to it later."""
        for engine in self.engines:
            engine.flush()
        kept = self.folder / f"kept {len(self.saved)}"
        for name in ("looked at", "serial"):
            shutil.copytree(self.folder / name, kept / name)
        self.saved.append((kept, list(self.marks), self.is_previous))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        for engine in self.engines:
            engine.close()
        self.has_begun = False
        kept, marks, self.is_previous = self.saved[data.draw(st.integers(0, len(self.saved) - 1), "store")]
        self.marks = list(marks)
        for name in ("looked at", "serial"):
            shutil.rmtree(self.folder / name)
            shutil.copytree(kept / name, self.folder / name)
        self.resume(data)

    @precondition(lambda self: len(self.marks) > 1 and not self.has_begun)
    @rule(data=st.data())
    def go_back_by_one(self, data: st.DataObject) -> None:
        for engine in self.engines:
            engine.close()
        self.resume(data, "previous")

    def resume(self, data: st.DataObject, which: str = "must") -> None:
        if self.has_begun:  # the generation before may be half overwritten
            del self.marks[:-1]
        self.open(data, which)
        self.is_previous = which == "previous"
        self.plain = self.marks[-2 if self.is_previous else -1].copy()

    # --- failures -----------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.is_final)
    @rule(seed=SEEDS, way=WAYS)
    def break_forward(self, seed: int, way: list[int]) -> None:
        """The loop goes on after an error in forward."""
        for call in (*self.engines, self.plain.model):
            with pytest.raises(Broken):
                call(inputs(seed), way, breaks="forward")
        self.begin_step()

    @precondition(lambda self: not self.has_begun)
    @rule(micro=MICRO_BATCHES)
    def break_train_step(self, micro: list[tuple[int, list[int]]]) -> None:
        """The last micro-batch fails in forward: the step may be made again."""
        batches = [{"x": inputs(seed), "way": way} for seed, way in micro]
        batches[-1]["breaks"] = "forward"
        for engine in self.engines:
            with pytest.raises(Broken):
                engine.train_step(batches, loss_of)
        for batch in batches:
            with contextlib.suppress(Broken):
                self.plain.model(**batch)  # whose buffer counts these calls, too
        self.begin_step()

    @precondition(lambda self: self.keeps_last and not self.is_final)
    @rule(seed=SEEDS, way=WAYS, data=st.data())
    def break_backward(self, seed: int, way: list[int], data: st.DataObject) -> None:
        """The engine is lost, and the store goes on from its last generation."""
        self.begin_step()
        for engine in self.engines:
            engine.flush()
            with pytest.raises(Broken):
                engine.backward(loss_of(engine(inputs(seed), way, breaks="backward")))
            with pytest.raises(ClosedError):
                engine.step()
            with contextlib.suppress(TierstoreError):
                engine.close()
        self.resume(data)

    # ------------------------------------------------------------------------------------------------------------

    def refused(self, act: Callable[[], object]) -> bool:
        """Whether weights are changing, so that the engine refuses the call; checks that it does."""
        if self.streams:
            with pytest.raises(ConfigError, match="is changing meanwhile"):
                act()
        return self.streams

    def fits(self, name: str) -> bool:
        """Whether these weights fit on the device together; where all weights have room, they must."""
        try:
            with self.engine.gathered([name]):
                return True
        except BudgetError:
            assert self.options.room != "all"
            return False

    def check_close(self, found: float | None, expected: float) -> None:
        if self.dtype == "fp32":
            assert found == pytest.approx(expected, rel=1e-3)

    @staticmethod
    def parameters_of(model: nn.Module, name: str) -> list[torch.Tensor]:
        named = dict(model.named_parameters(remove_duplicate=False))
        return [named[name]] if name in named else list(model.get_submodule(name).parameters())

    def values_of(self, model: nn.Module, name: str) -> list[Any]:
        return [parameter.float().tolist() for parameter in self.parameters_of(model, name)]

    def multiply(self, model: nn.Module, name: str, factor: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters_of(model, name):
                parameter.mul_(factor)

    @invariant()
    def has_no_gradients(self) -> None:
        for engine in self.engines:
            assert all(parameter.grad is None for parameter in engine.model.parameters())

    def teardown(self) -> None:
        for engine in self.engines:
            with contextlib.suppress(TierstoreError):
                engine.close()
        if hasattr(self, "patch"):
            self.patch.undo()
        shutil.rmtree(getattr(self, "folder", "nothing"), ignore_errors=True)


TestAnyOrder = pytest.mark.usefixtures("no_leaks", "one_thread")(AnyOrder.TestCase)
if settings.get_current_profile_name() != "long":
    # Shrinking a failing example takes minutes: only the long profile does that.
    found = (Phase.explicit, Phase.generate)
    TestAnyOrder.settings = settings(max_examples=10, stateful_step_count=25, derandomize=True, phases=found)
