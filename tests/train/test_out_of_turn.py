"""Calls that a loop makes out of turn give right results or an error with a name: no crash, no silent wrong weights."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Ways, disk, next_token_loss, smallest_budgets, tiny, tokens
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tierstore.config import AdamWConfig, TierConfig
from tierstore.device.arithmetic import Piece
from tierstore.device.streams import Reached
from tierstore.device.transfers import CpuDevice
from tierstore.errors import BudgetError, ClosedError, ConfigError, GraphError, StorageError, TierstoreError, Timeout
from tierstore.io.memory import Lease
from tierstore.store.gradients import Arrival
from tierstore.store.rounds import Round, Trip
from tierstore.store.trip_leases import TripLeases
from tierstore.train.access import _InUse
from tierstore.train.call_order import CallOrder
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

STREAMING = ["backward", "speculative"]
LATER = ["step", "forward"]

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
        self.fails: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        if self.fails is not None:
            raise self.fails
        return x


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(count)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


class Failing:
    """`loss_of` that fails at its call number `at`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("out of memory")
        return loss_of(output)


def tight_engine(folder: Path, update: str = "forward", model: nn.Module | None = None, **options: Any) -> Engine:
    """With the smallest budgets: only what is in use stays on the device."""
    model = Net() if model is None else model
    gpu, cpu = smallest_budgets(model, nvme=["unused"], update=update, **options)
    tiers = disk(folder, gpu_memory=gpu, cpu_memory=cpu)
    return Engine(model, tiers, AdamWConfig(lr=1e-2), update=update, **options)


def plain(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def check_weights(engine: Engine, model: nn.Module) -> None:
    found = engine.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


def train_both(
    engine: Engine, model: nn.Module, data: list[torch.Tensor], before: Callable[[torch.Tensor], None] = lambda x: None
) -> None:
    """Train by the engine and by plain torch, to the same weights; `before` is called before each step."""
    optimizer = plain(model)
    for x in data:
        before(x)
        engine.backward(loss_of(engine(x)))
        engine.step()
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    check_weights(engine, model)


@pytest.mark.parametrize("update", LATER)
def test_two_backwards_of_a_step_add_up(update: str, tmp_path: Path) -> None:
    model, data = Net(), batches(4)
    optimizer = plain(model)
    with tight_engine(tmp_path, update) as engine:
        for position in range(0, 4, 2):
            for x in data[position : position + 2]:
                engine.backward(loss_of(engine(x)))
                loss_of(model(x)).backward()
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(engine, model)


@pytest.mark.parametrize("update", STREAMING)
def test_what_would_meet_an_update_in_backward_is_refused(update: str, tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, update) as engine:
        for _ in range(3):
            loss, other = loss_of(engine(x)), loss_of(engine(x))
            with engine.no_sync():
                engine.backward(other)
            engine.backward(loss)
            for act in (partial(engine.backward, loss), partial(engine, x), engine.state_dict, engine.zero_grad):
                with pytest.raises(ConfigError, match=f"update='{update}' .* is changing .* update='forward'"):
                    act()
            engine.step()
        loss_of(engine(x))


@pytest.mark.parametrize("update", [*STREAMING, *LATER])
def test_weights_that_a_broken_backward_has_half_changed_are_not_given_away(update: str, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    x = batches(1)[0]
    engine = tight_engine(tmp_path / "store", update)
    for _ in range(3):
        engine.backward(loss_of(engine(x)))
        engine.step()
    before = engine.state_dict()
    engine.model.get_submodule("blocks.1").register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(loss_of(engine(x)))
    if update in LATER:  # nothing was changed
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    else:
        for act in (engine.state_dict, partial(engine.export, tmp_path / "out"), engine.gathered("").__enter__):
            with pytest.raises(ClosedError, match="broken off by KeyboardInterrupt"):
                act()
    with contextlib.suppress(TierstoreError):
        engine.close()
    with tight_engine(tmp_path / "store", update, resume="auto") as engine:
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_two_threads_in_one_engine_are_told_and_harm_nothing(where: str, tmp_path: Path) -> None:
    """A thread that reads while the other one steps would get weights of two steps."""
    x, is_inside, may_go = batches(1)[0], threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        is_inside.set()
        assert may_go.wait(30)

    def calls(engine: Engine) -> dict[str, Any]:
        return {
            "the engine": lambda: engine(x), "backward": lambda: engine.backward(torch.ones(())), "step": engine.step,
            "train_step": lambda: engine.train_step([x], loss_of), "zero_grad": engine.optimizer.zero_grad,
            "state_dict": engine.state_dict, "load_state_dict": lambda: engine.load_state_dict({}),
            "gathered": lambda: engine.gathered("blocks.0").__enter__(), "apply_pending": engine.apply_pending,
            "gradient": lambda: engine.gradient("blocks.0.0.weight"), "export": lambda: engine.export(tmp_path / "out"),
            "register": lambda: engine.register("model", engine.model), "flush": engine.flush,
            "optimizer.step": engine.optimizer.step, "close": engine.close,
        }  # fmt: skip

    def steps(engine: Engine) -> None:
        for _ in range(2):
            engine.backward(loss_of(engine(x)))
            engine.step()

    states = []
    for is_disturbed in (False, True):
        with Engine(Net(), TierConfig(), AdamWConfig(), update="forward") as engine:
            thread = threading.Thread(target=steps, args=(engine,))
            if is_disturbed:
                block: Any = engine.model.get_submodule("blocks.1")
                if where == "step":
                    engine.on_step(wait)
                elif where == "forward":
                    block.register_forward_hook(wait)
                else:
                    block.register_full_backward_hook(wait)
            thread.start()
            if is_disturbed:
                assert is_inside.wait(30)
                told = {}
                for name, call in calls(engine).items():
                    try:
                        told[name] = str(call())
                    except ConfigError as error:
                        told[name] = str(error)
                may_go.set()
                assert all("while another thread is in a call" in sentence for sentence in told.values()), told
            thread.join()
            steps(engine)  # another thread, but not at the same time
            states.append(engine.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_hooks_of_backward_may_look_in_also_where_autograd_runs_them_in_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd does so on a GPU, and on a CPU when backwards are nested more than 60 deep."""
    backward, names, seen = torch.Tensor.backward, [], []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:  # type: ignore[override]
            ctx.then = then
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.then()
            return gradient, None

    def backward_deep(loss: torch.Tensor, depth: int = 64) -> None:
        if depth == 0:
            backward(loss)
            return
        with torch.enable_grad():
            nested = Nested.apply(torch.ones((), requires_grad=True), lambda: backward_deep(loss, depth - 1))
        torch.autograd.backward(nested)

    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:

        def look(*_: object) -> None:
            names.append(threading.current_thread().name)
            with engine.gathered("blocks.0"):
                seen.append(engine.model.get_parameter("blocks.0.0.weight").isfinite().all())
            seen.append(engine.gradient("blocks.3.0.weight").isfinite().all())

        with engine.no_sync():
            engine.backward(loss_of(engine(x)))
        loss = loss_of(engine(x))
        loss.register_hook(look)
        monkeypatch.setattr(torch.Tensor, "backward", backward_deep)
        engine.backward(loss)
        engine.step()
    assert names != [threading.current_thread().name]
    assert [bool(one) for one in seen] == [True, True]


def test_nobody_reads_weights_that_another_thread_is_changing() -> None:
    told = []

    def read(engine: Engine) -> None:
        try:
            engine.state_dict()
        except ConfigError as error:
            told.append(str(error))

    with Engine(Net(), TierConfig(), AdamWConfig()) as engine:
        with engine.gathered("", modify=True):
            thread = threading.Thread(target=read, args=(engine,))
            thread.start()
            thread.join()
        assert ["while another thread is in a call" in sentence for sentence in told] == [True]
        read(engine)
    assert len(told) == 1


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_a_loss_may_call_the_engine(schedule: str) -> None:
    data = batches(2)
    with Engine(Net(), TierConfig(), AdamWConfig()) as engine:

        def beside_a_teacher(output: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher = engine(data[0])
            return (output - 0.5 * teacher).pow(2).mean()

        first = engine.train_step(data[:1] * 2, beside_a_teacher, schedule).loss
        engine.train_step(data, beside_a_teacher, schedule)
    with torch.no_grad():
        assert first == pytest.approx(0.25 * loss_of(Net()(data[0])).item())


class Scaled(Net):
    """Has a parameter of its own, which it reads when its blocks have taken their turns, also in a recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: super(Scaled, self).forward(x) * self.scale, x, use_reentrant=False)


@pytest.mark.parametrize("update", ["forward", "backward"])
@pytest.mark.parametrize("where", ["horizontal", "vertical", "a hook of backward"])
def test_a_forward_in_a_pass_leaves_that_pass_as_it_is(where: str, update: str, tmp_path: Path) -> None:
    data, model, seen = batches(2), Scaled(), []
    optimizer = plain(model)

    def loss_by(call: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        if where == "a hook of backward":
            output.register_hook(lambda gradient: seen.append(teach(call)))
            return loss_of(output)
        return (output - 0.5 * teach(call)).pow(2).mean()

    def teach(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return call(data[0])

    with tight_engine(tmp_path, update, Scaled()) as engine:
        schedule = "vertical" if where == "vertical" else "horizontal"
        for _ in range(2):
            engine.train_step(data, partial(loss_by, engine), schedule)
            for x in data:
                (loss_by(model, model(x)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(engine, model)
    assert len(seen) == (8 if where == "a hook of backward" else 0)
    for found, expected in zip(seen[:2] + seen[4:6], seen[2:4] + seen[6:]):
        torch.testing.assert_close(found, expected)


def test_train_step_makes_the_calls_of_a_subclass() -> None:
    class Heard(Engine):
        clock = "a subclass may have such an attribute"

        def step(self) -> StepReport:
            self.clock = "stepped"
            return super().step()

    with Heard(Net(), TierConfig(), AdamWConfig()) as engine:
        engine.train_step(batches(2), loss_of)
        assert (engine.clock, engine.step_count) == ("stepped", 1)


def test_where_they_are_all_that_is_left_it_is_told(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    x = batches(1)[0]
    with Engine(Net(), TierConfig(), AdamWConfig(), update="backward") as engine:
        engine.backward(loss_of(engine(x)))
        engine.step()
        engine.model.get_submodule("blocks.1").register_full_backward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss_of(engine(x)))
        with pytest.warns(UserWarning, match="some weights are new, others those of before") as warned:
            engine.export(tmp_path / "out")
        with pytest.warns(UserWarning, match="some weights are new, others those of before") as warned_inside, \
                engine.gathered("blocks.0"):  # fmt: skip
            pass
        assert [warned[0].filename, warned_inside[0].filename] == [__file__] * 2


@pytest.mark.parametrize(
    ("options", "schedule"),
    [({}, "vertical"), ({"max_grad_norm": 0.1}, "horizontal"), ({"update": "forward"}, "vertical")],
)
def test_a_train_step_that_failed_is_given_again(options: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    data = batches(6)

    def run(name: str, fails: bool) -> tuple[list[float | None], dict[str, torch.Tensor]]:
        norms: list[float | None] = []
        with Engine(Net(), disk(tmp_path / name), AdamWConfig(lr=1e-2), **options) as engine:
            for first in (0, 3):
                if fails:
                    with pytest.raises(ValueError, match="out of memory"):
                        engine.train_step(data[first : first + 3], Failing(at=2), schedule)
                norms.append(engine.train_step(data[first : first + 3], loss_of, schedule).grad_norm)
            return norms, engine.state_dict()

    (norms, found), (right_norms, right) = run("failing", True), run("right", False)
    assert norms == right_norms
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("update", [*STREAMING, *LATER])
def test_weights_that_found_no_room_on_the_device_are_asked_for_again(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU memory that a large batch took is free again when a smaller batch is tried."""
    full, allocate = threading.Event(), CpuDevice.allocate

    def allocate_if_not_full(*given: Any) -> None:
        if full.is_set():
            raise BudgetError("the GPU has no room")
        allocate(*given)

    def fail_twice(x: torch.Tensor) -> None:
        full.set()
        for _ in range(2):
            with pytest.raises(BudgetError, match="the GPU has no room"):
                engine(x)
        full.clear()

    data = batches(4)
    engine = tight_engine(tmp_path, update)
    engine.fix_prefetch_depth(1)
    monkeypatch.setattr(CpuDevice, "allocate", allocate_if_not_full)
    train_both(engine, Net(), data, before=fail_twice)
    full.set()
    with pytest.raises(BudgetError, match="the GPU has no room"):
        engine(data[0])
    engine.close()


@pytest.mark.parametrize("update", LATER)
def test_also_one_that_failed_after_its_last_backward(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    data = batches(6)

    def run(name: str, fails: bool) -> dict[str, torch.Tensor]:
        with tight_engine(tmp_path / name, update) as engine:
            for first in (0, 3):
                if fails:
                    with monkeypatch.context() as patched:
                        patched.setattr(engine, "step", interrupt)
                        with pytest.raises(KeyboardInterrupt):
                            engine.train_step(data[first : first + 3], loss_of)
                engine.train_step(data[first : first + 3], loss_of)
            return engine.state_dict()

    found, right = run("failing", True), run("right", False)
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("update", [*STREAMING, *LATER])
def test_gradients_of_before_a_train_step_that_fails_are_not_forgotten_in_silence(update: str, tmp_path: Path) -> None:
    data = batches(3)
    engine = tight_engine(tmp_path, update)
    before = engine.state_dict()
    with engine.no_sync():
        engine.backward(loss_of(engine(data[0])))
    with pytest.raises(ValueError, match="out of memory"):
        engine.train_step(data[1:], Failing(at=1))  # before it has gradients of its own
    with pytest.raises(ValueError, match="out of memory"):
        engine.train_step(data[1:], Failing(at=2))
    with pytest.raises(ClosedError, match="broken off by ValueError"):
        engine.train_step(data[1:], loss_of)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.close()


def test_gradients_of_before_the_engine_are_not_part_of_its_first_step(tmp_path: Path) -> None:
    def run(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
        with tight_engine(tmp_path / name, model=model) as engine:
            engine.backward(loss_of(engine(batches(1)[0])))
            engine.step()
            return engine.state_dict()

    used, fresh = Net(), Net()
    loss_of(used(batches(2)[1])).backward()
    for model in (used, fresh):
        model.blocks[2].requires_grad_(False)
    found, right = run("used", used), run("fresh", fresh)
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_weights_are_whole_where_a_scheduler_has_failed(tmp_path: Path) -> None:
    def failing(step: int) -> float:
        if step == 2:
            raise ArithmeticError("no rate")
        return 1.0

    x = batches(1)[0]
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=failing)
    with Engine(Net(), disk(tmp_path), AdamWConfig(), commit_every=5, lr_scheduler=schedule) as engine:
        engine.train_step([x], loss_of)
        before = engine.state_dict()
        with pytest.raises(ArithmeticError):
            engine.train_step([x], loss_of)
        assert not any(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        with pytest.raises(ClosedError, match="broken off by ArithmeticError"):
            engine(x)


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_a_train_step_reports_its_loss_also_to_callbacks(schedule: str, tmp_path: Path) -> None:
    data, seen = batches(3), []
    with torch.no_grad():
        expected = sum(loss_of(Net()(x)).item() for x in data) / 3
    with Engine(Net(), disk(tmp_path), AdamWConfig()) as engine:
        engine.on_step(lambda report: seen.append(report.loss))
        assert engine.train_step(data, loss_of, schedule).loss == seen[0] == pytest.approx(expected)
        engine.backward(loss_of(engine(data[0])))
        assert engine.step().loss is None


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_a_step_that_a_callback_makes_reports_its_own_loss(schedule: str) -> None:
    data, seen = batches(2), []

    def go_on(report: StepReport) -> None:
        seen.append(report.loss)
        if report.step == 1:
            engine.train_step([10 * x for x in data], loss_of, schedule)
        if report.step == 2:
            engine.backward(loss_of(engine(data[0])))
            engine.step()

    with Engine(Net(), TierConfig(), AdamWConfig(lr=0.0)) as engine:
        engine.on_step(go_on)
        engine.train_step(data, loss_of, schedule)
    with torch.no_grad():
        expected = [sum(loss_of(Net()(scale * x)).item() for x in data) / 2 for scale in (1, 10)]
    assert seen == [pytest.approx(expected[0]), pytest.approx(expected[1]), None]


def test_gradients_of_before_a_train_step_are_used_up_when_a_callback_fails() -> None:
    def fail(report: StepReport) -> None:
        raise ArithmeticError("no more")

    x = batches(1)[0]
    with Engine(Net(), TierConfig(), AdamWConfig()) as engine:
        engine.on_step(fail)
        with engine.no_sync():
            engine.backward(loss_of(engine(x)))
        with pytest.raises(ArithmeticError):
            engine.train_step([x], loss_of)
        engine._steps.callbacks.clear()
        assert engine.train_step([x], loss_of).step == 2


def test_who_hears_of_a_step_may_close_the_engine_and_the_step_is_committed(tmp_path: Path) -> None:
    x, heard = batches(1)[0], []

    def until_two(report: StepReport) -> None:
        if report.step == 2:
            engine.close()
            engine.close()

    with Engine(Net(), disk(tmp_path), AdamWConfig()) as engine:
        engine.on_step(until_two)
        engine.on_step(lambda report: heard.append(report.step))
        engine.train_step([x], loss_of)
        engine.backward(loss_of(engine(x)))
        assert engine.step().step == 2
        with pytest.raises(ClosedError, match="the engine is closed"):
            engine(x)
    with Engine(Net(), disk(tmp_path), AdamWConfig(), resume="must") as engine:
        assert (heard, engine.step_count) == ([1, 2], 2)


def test_who_closes_in_a_hook_of_backward_keeps_the_steps_that_are_done(tmp_path: Path) -> None:
    """Autograd's threads run hooks on a GPU; they lack the context of the thread that calls the engine."""
    x = batches(1)[0]
    with Engine(Net(), disk(tmp_path), AdamWConfig(), update="forward", commit_every=10) as engine:
        engine.train_step([x], loss_of)
        loss = loss_of(engine(x))
        loss.register_hook(lambda _: contextvars.Context().run(engine.close))
        with pytest.raises(ClosedError):
            engine.backward(loss)
    with Engine(Net(), disk(tmp_path), AdamWConfig(), update="forward", commit_every=10, resume="must") as engine:
        assert engine.step_count == 1


@pytest.mark.parametrize("change", ["gathered", "load_state_dict"])
def test_a_change_that_a_callback_makes_is_committed_with_its_step_and_not_before(
    change: str, tmp_path: Path
) -> None:
    """Otherwise the generation of the step would lack what later callbacks do."""
    x = batches(1)[0]

    def halve(report: StepReport) -> None:
        if change == "load_state_dict":
            engine.load_state_dict({name: value / 2 for name, value in engine.state_dict().items()})
            return
        with engine.gathered("", modify=True), torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(0.5)

    def fail_at_two(report: StepReport) -> None:
        if report.step == 2:
            raise ArithmeticError("killed here")

    with Engine(Net(), disk(tmp_path), AdamWConfig()) as engine:
        engine.on_step(halve)
        engine.on_step(fail_at_two)
        engine.train_step([x], loss_of)
        engine.flush()
        first = engine.state_dict()
        with pytest.raises(ArithmeticError):
            engine.train_step([x], loss_of)
    with Engine(Net(), disk(tmp_path), AdamWConfig(), resume="must") as engine:
        assert engine.step_count == 1
        assert all(torch.equal(value, first[name]) for name, value in engine.state_dict().items())


def test_two_losses_of_one_forward_are_to_be_added(tmp_path: Path) -> None:
    with Engine(Net(), disk(tmp_path), AdamWConfig()) as engine:
        output = engine(batches(1)[0])
        with engine.no_sync():
            engine.backward(loss_of(output))
        with pytest.raises(GraphError, match=r"several losses of one forward are added, .*backward\(a \+ b\)"):
            engine.backward(loss_of(output))


@pytest.mark.parametrize("closes_first", [False, True])
def test_a_callback_may_make_a_step_and_close(closes_first: bool, tmp_path: Path) -> None:
    x, heard = batches(1)[0], []

    def go_on(report: StepReport) -> None:
        if report.step == 1:
            if closes_first:
                engine.close()
            engine.train_step([x], loss_of)
            if not closes_first:
                engine.close()
        heard.append(report.step)

    with Engine(Net(), disk(tmp_path), AdamWConfig()) as engine:
        engine.on_step(go_on)
        engine.train_step([x], loss_of)
        with pytest.raises(ClosedError, match="the engine is closed"):
            engine(x)
    with Engine(Net(), disk(tmp_path), AdamWConfig(), resume="must") as engine:
        assert (heard, engine.step_count) == ([2, 1], 2)


def test_pending_gradients_are_not_applied_while_callbacks_hear_of_a_step(tmp_path: Path) -> None:
    x = batches(1)[0]
    with Engine(Net(), disk(tmp_path), AdamWConfig(), update="delayed") as engine:
        engine.on_step(lambda report: engine.apply_pending())
        with pytest.raises(ConfigError, match="would commit a step whose callbacks are not done"):
            engine.train_step([x], loss_of)


def test_an_interrupt_before_callbacks_hear_of_a_step_leaves_the_engine_to_be_closed() -> None:
    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "telling" and event == "line":
            left.pop()  # IndexError at the line that is to be interrupted
        return trace

    interrupted = 0
    for lines in range(20):
        order, left, before = CallOrder(None, None, can_resume=True), [None] * lines, sys.gettrace()  # type: ignore[arg-type]
        sys.settrace(trace)
        try:
            with order.telling():
                sys.settrace(before)
        except IndexError:
            interrupted += 1
        finally:
            sys.settrace(before)
        assert not order.is_telling
    assert interrupted > 3


def test_a_callback_that_fails_closes_nothing(tmp_path: Path) -> None:
    x = batches(1)[0]

    def close_and_fail(report: StepReport) -> None:
        engine.close()
        raise ArithmeticError("no more")

    with Engine(Net(), disk(tmp_path), AdamWConfig()) as engine:
        engine.on_step(close_and_fail)
        with pytest.raises(ArithmeticError):
            engine.train_step([x], loss_of)
        engine._steps.callbacks.clear()
        assert engine.train_step([x], loss_of).step == 2
        assert engine.train_step([x], loss_of).step == 3


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, "dynamic"), (torch.bfloat16, "dynamic"), (torch.float32, 2.0), (torch.float16, 1.0)],
)
def test_what_is_scaled_or_in_fp16_skips_a_step_that_overflows(
    dtype: torch.dtype, scale: float | str, tmp_path: Path
) -> None:
    x = batches(1)[0].to(dtype)
    with pytest.raises(ConfigError, match="applies gradients too early for fp16 or loss scaling"):
        Engine(Net().to(dtype), disk(tmp_path), AdamWConfig(), update="backward", loss_scale=scale)
    with Engine(Net().to(dtype), disk(tmp_path), AdamWConfig(lr=1e-2), loss_scale=scale) as engine:
        for step in range(5):
            before = engine.state_dict()
            engine.backward(loss_of(engine(x)).float() * (float("inf") if step == 3 else 1.0))
            report = engine.step()
            assert report.skipped == (step == 3)
            assert scale in ("dynamic", report.loss_scale)
            same = [torch.equal(value, before[name]) for name, value in engine.state_dict().items()]
            assert all(same) == (step == 3)


def test_a_scaled_loss_takes_its_backward_where_gradients_are_disabled() -> None:
    with Engine(Net(), TierConfig(), loss_scale=2.0) as engine:
        loss = loss_of(engine(batches(1)[0]))
        with torch.no_grad():
            engine.backward(loss)
        assert engine.step().grad_norm


@pytest.mark.parametrize("update", [*STREAMING, *LATER, "auto"])
def test_a_gradient_that_is_set_after_backward_is_refused_and_not_used_a_step_later(
    update: str, tmp_path: Path
) -> None:
    data = batches(3)

    def run(name: str, sets: bool) -> dict[str, torch.Tensor]:
        with tight_engine(tmp_path / name, update) as engine:
            parameter = engine.model.get_parameter("blocks.1.0.weight")
            for x in data:
                engine.backward(loss_of(engine(x)))
                if sets:
                    parameter.grad = torch.full((16, 16), 100.0)
                    with pytest.raises(ConfigError, match=r"the \.grad of blocks\.1\.0\.weight is set"):
                        engine.step()
                    parameter.grad = None
                engine.step()
            return engine.state_dict()

    found, expected = run("set", True), run("plain", False)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_gradient_that_is_used_up_is_not_zero(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, "backward") as engine:
        for _ in range(2):
            engine.backward(loss_of(engine(x)))
            with pytest.raises(ConfigError, match=r"gradient\(\) between"):
                engine.gradient("blocks.0.0.weight")
            engine.step()


@pytest.mark.parametrize("update", [*LATER, "delayed"])
def test_zero_grad_forgets_a_backward(update: str, tmp_path: Path) -> None:
    data = batches(3)

    def run(name: str, bad: bool) -> dict[str, torch.Tensor]:
        with tight_engine(tmp_path / name, update, max_grad_norm=0.1) as engine:
            for x in data:
                if bad:
                    engine.backward(loss_of(engine(1000 * x)))
                    engine.optimizer.zero_grad()
                engine.optimizer.zero_grad()
                loss = loss_of(engine(x))
                engine.optimizer.zero_grad()
                engine.backward(loss)
                engine.step()
            return engine.state_dict()

    found, expected = run("bad", True), run("good", False)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_zero_grad_that_fails_breaks_the_step_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some gradients are gone, and others are not."""
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        engine.backward(loss_of(engine(x)))
        engine._parts.runtime.keep_failure(OSError("of something else"))
        with pytest.raises(OSError, match="of something else"):  # after it a step may follow
            engine.zero_grad()
        monkeypatch.setattr(engine._generations.gradients, "discard", _raises_timeout)
        with pytest.raises(Timeout):
            engine.zero_grad()
        with pytest.raises(ClosedError, match="a step was broken off by Timeout"):
            engine.step()
        assert engine.state_dict()


def test_an_error_leaves_an_engine_that_another_thread_uses_open_and_says_so() -> None:
    is_inside, may_go, engine = threading.Event(), threading.Event(), Engine(Net(), TierConfig())

    def wait(*_: object) -> None:
        is_inside.set()
        assert may_go.wait(30)

    handle = engine.model.register_forward_pre_hook(wait)
    thread = threading.Thread(target=engine, args=(batches(1)[0],))
    thread.start()
    assert is_inside.wait(30)
    with pytest.raises(ZeroDivisionError) as caught, engine:
        _fail(ZeroDivisionError)
    may_go.set()
    thread.join()
    handle.remove()
    assert "the engine stays open: close() was called while another thread" in caught.value.__notes__[0]
    engine(batches(1)[0])
    engine.close()


async def _raises_timeout(*_: object) -> None:
    raise Timeout("the disk does not answer")


def test_a_second_interrupt_while_train_step_gives_up_breaks_the_step_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of the first micro-batch may be left, and the caller gives all micro-batches again."""
    with tight_engine(tmp_path) as engine:
        monkeypatch.setattr(engine, "zero_grad", partial(_fail, KeyboardInterrupt))
        losses = iter([loss_of, lambda output: _fail(KeyboardInterrupt)])
        with pytest.raises(KeyboardInterrupt):
            engine.train_step(batches(2), lambda output: next(losses)(output))
        with pytest.raises(ClosedError, match="a step was broken off by KeyboardInterrupt"):
            engine.train_step(batches(2), loss_of)


def test_weights_are_not_read_while_a_backward_updates_them(tmp_path: Path) -> None:
    """Not by a hook or a signal handler, either: some are new, others those of before."""
    told = []

    def read(_: object) -> None:
        with pytest.raises(ConfigError, match=r"would meet weights that update='backward'") as caught:
            engine.state_dict()
        told.append(caught)

    with tight_engine(tmp_path, "backward") as engine:
        engine.model.get_parameter("blocks.0.0.weight").register_post_accumulate_grad_hook(read)
        engine.backward(loss_of(engine(batches(1)[0])))
        assert len(told) == 1


@pytest.mark.parametrize("update", [*LATER, "delayed"])
def test_zero_grad_forgets_what_the_next_backward_does_not_reach(update: str, tmp_path: Path) -> None:
    class Chosen(Net):
        first = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[self.first :]:
                x = x + block(x)
            return x

    def run(name: str, bad: bool) -> dict[str, torch.Tensor]:
        model = Chosen()
        with tight_engine(tmp_path / name, update, model, max_grad_norm=0.1) as engine:
            for x in batches(4):
                if bad:
                    model.first = 0
                    engine.backward(loss_of(engine(100 * x)))
                    engine.zero_grad()
                model.first = 2
                engine.backward(loss_of(engine(x)))
                engine.step()
            return engine.state_dict()

    found, expected = run("bad", True), run("good", False)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_loss_of_weights_that_were_gathered(tmp_path: Path) -> None:
    model, data = Net(), batches(3)
    optimizer = plain(model)
    with tight_engine(tmp_path) as engine:
        inner = engine.model
        for x in data:
            loss = loss_of(engine(x))
            with engine.gathered(["blocks.2.0.weight"]):
                loss = loss + inner.blocks[2][0].weight.pow(2).sum()
            engine.backward(loss)
            engine.step()
            (loss_of(model(x)) + model.blocks[2][0].weight.pow(2).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(engine, model)


class Shuffled(nn.Module):
    """Calls the blocks that `order` names, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.order = list(range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + self.blocks[index](x).tanh()
        return x


class Threaded(Net):
    """Calls its blocks in a thread of its own: there the engine's hooks would not see what is saved for backward."""

    is_threaded = True

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_threaded:
            return super().forward(x)
        is_enabled = torch.is_grad_enabled()

        def call() -> Any:
            with torch.set_grad_enabled(is_enabled):
                return super(Threaded, self).forward(x)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()


def test_a_module_called_in_a_thread_of_the_model_is_refused_with_gradients(tmp_path: Path) -> None:
    x = torch.ones(2, 16)
    with tight_engine(tmp_path, "forward", Threaded()) as engine:
        with pytest.raises(GraphError, match=r"Linear was called in a thread of the model's own"):
            engine(x)
        with torch.no_grad():
            seen = engine(x)
        engine.model.is_threaded = False
        assert torch.equal(engine(x), seen)


def test_weights_of_a_block_that_the_last_step_left_out_can_be_read() -> None:
    model, plain = Shuffled(), Shuffled()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    tiers = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB")
    with Engine(model, tiers, AdamWConfig(lr=1e-3), update="step") as engine:
        for count in (12, 6):  # the second step calls fewer blocks than the first
            model.order = plain.order = list(range(count))
            engine.backward(loss_of(engine(torch.ones(4, 64))))
            engine.step()
            loss_of(plain(torch.ones(4, 64))).backward()
            optimizer.step()
            optimizer.zero_grad()
        with engine.gathered("blocks.11"):
            torch.testing.assert_close(model.blocks[11].weight, plain.blocks[11].weight)
        assert not torch.equal(plain.blocks[11].weight, Shuffled().blocks[11].weight)


def test_what_backward_leaves_is_left_in_the_order_of_the_next_forward(tmp_path: Path) -> None:
    with tight_engine(tmp_path, "speculative", Shuffled(), max_grad_norm=1e3) as engine:
        for _ in range(6):
            engine.backward(loss_of(engine(torch.ones(4, 64))))
            engine.step()
        round_ = engine._parts.driver.last_round
        assert round_ is not None
        assert list(round_.then) == list(range(12))
        assert list(round_.order) == list(reversed(range(12)))


@pytest.mark.parametrize(("accumulate", "way"), [(1, 1), (1, -1), (2, 1)])
def test_places_of_gradients_come_back_in_whatever_order_they_are_needed(
    accumulate: int, way: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that read ahead have borrowed these places, and wait for gradients that may never come."""
    borrowed, recalled = Counter[int](), Counter[int]()
    place_for, recall, step = TripLeases._place_for, Trip.recall, 0

    def noted_place(leases: TripLeases, round_: Round, trip: Trip, nbytes: int) -> Lease | None:
        lease = place_for(leases, round_, trip, nbytes)
        borrowed[step] += lease is not None
        return lease

    def noted_recall(trip: Trip) -> None:
        recalled[step] += 1
        recall(trip)

    monkeypatch.setattr(TripLeases, "_place_for", noted_place)
    monkeypatch.setattr(Trip, "recall", noted_recall)
    model, ours = Shuffled(), Shuffled()
    model.order = ours.order = ours.order[::way]  # -1: the block registered first gets its gradient first
    optimizer, draw = plain(model), random.Random(1)
    generator = torch.Generator().manual_seed(1)
    gradient_bytes = 12 * 20480
    _, cpu = smallest_budgets(ours, nvme=["unused"], update="speculative", max_grad_norm=1e3)
    tiers = disk(tmp_path, gpu_memory=gradient_bytes + 2 * 20480, cpu_memory=cpu + gradient_bytes)
    with Engine(ours, tiers, AdamWConfig(lr=1e-2), update="speculative", max_grad_norm=1e3) as engine:
        for step in range(12):
            # Three steps in one order, one in the reverse order, then nine blocks in random order.
            model.order = ours.order = {3: ours.order[::-1]}.get(step, ours.order)
            if step > 3:
                model.order = ours.order = draw.sample(range(12), 9)
            for position in range(accumulate):
                x = torch.randn(4, 64, generator=generator)
                with engine.no_sync() if position + 1 < accumulate else contextlib.nullcontext():
                    engine.backward(loss_of(engine(x)))
                loss_of(model(x)).backward()
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(engine, model)
    if accumulate == 1:
        assert borrowed[1] + borrowed[2] > 2  # how far ahead updates get depends on the timing of threads
        assert not recalled[1] + recalled[2]
        assert recalled[3] > 0
    else:
        assert not borrowed.total()  # the first micro-batch's gradients would need their places back


SKIPPING = [
    [[0, 2, 1, 4, 3], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]], [[1]], [[0, 3]], [[1, 4, 0, 3]],
    [[4, 3, 2, 1, 0], [0, 4, 1, 2, 3], [3, 1]], [[2, 0, 3, 1, 4], [4, 3, 2, 1, 0]], [[0, 1, 2, 3, 4], [3]],
]  # fmt: skip


def test_a_step_without_a_block_is_no_short_way_to_the_next(tmp_path: Path) -> None:
    """In such a step nobody waits for the block's last update: the next step must wait for that and for this step's."""
    weights = []
    for update, memory in (("step", ("64MiB", "64MiB")), *[("speculative", (290560, 201984))] * 3):
        generator = torch.Generator().manual_seed(1)
        tiers = disk(tmp_path / str(len(weights)), gpu_memory=memory[0], cpu_memory=memory[1])
        with Engine(Ways(5, 64), tiers, AdamWConfig(lr=1e-2), update=update, max_grad_norm=0.05) as engine:
            for ways in SKIPPING:
                batches = [{"x": torch.randn(4, 64, generator=generator), "way": way} for way in ways]
                engine.train_step(batches, lambda output: output.pow(2).mean())
            weights.append(engine.state_dict())
    for others in weights[1:]:
        assert all(torch.equal(others[name], weight) for name, weight in weights[0].items())


class Named(nn.Parameter):
    """A subclass as a library may bring."""


def test_a_subclass_of_parameter_is_guarded_too(tmp_path: Path) -> None:
    model = Net()
    model.blocks[0][0].weight = Named(model.blocks[0][0].weight.data)
    with tight_engine(tmp_path, model=model) as engine:
        engine.backward(loss_of(engine(batches(1)[0])))
        engine.step()
        with pytest.raises(GraphError, match=r"engine\.gathered"):
            model.blocks[0][0].weight.sum()
        with engine.gathered(["blocks.0.0.weight"]):
            assert type(model.blocks[0][0].weight) is Named


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_nothing_behind(kind: type[BaseException], tmp_path: Path) -> None:
    model, data = Net(), batches(2)
    optimizer = plain(model)
    with tight_engine(tmp_path) as engine:
        for x in data:
            for module in (engine.model, engine.model.blocks[1][1]):
                handle = module.register_forward_pre_hook(lambda module, args: _fail(kind))
                with pytest.raises(kind):
                    engine(x)
                handle.remove()
            with pytest.raises(GraphError, match=r"outside of engine\(...\)"):
                engine.model(x)
            engine.backward(loss_of(engine(x)))
            engine.step()
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(engine, model)


def _fail(kind: type[BaseException]) -> None:
    raise kind


class Clamped(Net):
    writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.blocks[0][0].weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("update", [*LATER, *STREAMING])
def test_weights_changed_in_forward_are_refused_by_name(update: str, tmp_path: Path) -> None:
    refusal = pytest.raises(GraphError, match=r"blocks\.0\.0\.weight was changed in forward")
    with tight_engine(tmp_path, update, Clamped()) as engine, refusal:
        engine(batches(1)[0])


def test_weights_changed_between_steps_are_not(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        for _ in range(2):
            engine.backward(loss_of(engine(x)))
            engine.step()
            with engine.gathered(["blocks.0.0.weight"], modify=True), torch.no_grad():
                engine.model.blocks[0][0].weight.clamp_(-0.1, 0.1)
            assert engine.state_dict()["blocks.0.0.weight"].abs().max() <= 0.1


def test_unfreezing_is_refused(tmp_path: Path) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    with tight_engine(tmp_path, model=model) as engine:
        engine.backward(loss_of(engine(batches(1)[0])))
        engine.step()
        model.blocks[0].requires_grad_(True)
        loss = loss_of(engine(batches(1)[0]))
        with pytest.raises(GraphError, match=r"blocks\.0\.0\.weight was frozen when the engine was made"):
            engine.backward(loss)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_backward_past_the_engine_is_refused(is_first: bool, tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        if not is_first:
            engine.backward(loss_of(engine(x)))
            engine.step()
        loss = loss_of(engine(x))
        with pytest.raises(GraphError, match=r"call engine\.backward"):
            loss.backward()
        engine.backward(loss_of(engine(x)))
        engine.step()


def test_a_gradient_of_an_input_leaves_the_weights_guarded(tmp_path: Path) -> None:
    model, x = Net(), batches(1)[0].requires_grad_()
    (expected,) = torch.autograd.grad(loss_of(model(x)), x)
    with tight_engine(tmp_path) as engine:
        (found,) = torch.autograd.grad(loss_of(engine(x)), x)
        assert torch.equal(found, expected)
        for parameter in engine.model.parameters():
            with pytest.raises(GraphError, match="while it is not on the device"):
                parameter.data.clamp_(-0.01, 0.01)
        with engine.gathered("blocks.3"):
            torch.autograd.grad(loss_of(engine(x)), x)
            assert torch.equal(engine.model.blocks[3][0].weight, model.blocks[3][0].weight)


@pytest.mark.parametrize("schedule", [None, "horizontal", "vertical"])
def test_hooks_on_saved_tensors_get_all_but_weights(schedule: str | None, tmp_path: Path) -> None:
    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        packed.append(tensor.shape)
        return (tensor.clone(),)

    def unpack(given: tuple[torch.Tensor]) -> torch.Tensor:
        unpacked.append(given[0].shape)
        return given[0]

    packed: list[torch.Size] = []
    unpacked: list[torch.Size] = []
    model, x = Net(), batches(1)[0]
    loss_of(model(x)).backward()
    plain(model).step()
    with tight_engine(tmp_path) as engine:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            if schedule is None:
                loss = loss_of(engine(x))
                engine.backward(loss)
                engine.step()
            else:
                engine.train_step([x, x], loss_of, schedule)
        check_weights(engine, model)
    assert set(packed) == {x.shape}
    assert len(unpacked) == len(packed) == (2 if schedule else 1) * 9


class KeepsWeights(nn.Module):
    """Its hooks on saved tensors keep the weights of convolutions as themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            for block in self.blocks:
                x = block(x.unsqueeze(-1)).tanh().squeeze(-1)
        return x


def test_weights_that_are_saved_past_the_engine_are_named_as_the_cause(tmp_path: Path) -> None:
    with tight_engine(tmp_path, model=KeepsWeights()) as engine:
        loss = loss_of(engine(batches(1)[0]))
        with pytest.raises(GraphError, match=r"saved as itself: .* must return tensor\.detach\(\)"):
            engine.backward(loss)


class Checkpointed(nn.Module):
    """Frozen convolutions, whose weights autograd saves as themselves, in checkpoints over two of them."""

    def __init__(self, is_reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.adapter, self.is_reentrant = nn.Linear(16, 16), is_reentrant
        self.blocks = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(6)).requires_grad_(False)

    def two(self, first: int, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[first + 1](self.blocks[first](x).tanh()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.adapter(x).unsqueeze(-1)
        for first in (0, 2, 4):
            x = x + checkpoint(self.two, first, x, use_reentrant=self.is_reentrant)
        return x.squeeze(-1)


def room_for_two(folder: Path, model: nn.Module) -> TierConfig:
    gpu, cpu = smallest_budgets(model, nvme=["unused"])
    return disk(folder, gpu_memory=gpu + 4 * 16 * 17, cpu_memory=cpu)


def test_frozen_weights_stay_for_a_recomputation_of_several_blocks(tmp_path: Path) -> None:
    with Engine(Checkpointed(), room_for_two(tmp_path, Checkpointed()), AdamWConfig(lr=1e-2)) as engine:
        train_both(engine, Checkpointed(), batches(3))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_backward_of_somebody_else_may_recompute(is_reentrant: bool, tmp_path: Path) -> None:
    def critic() -> nn.Module:
        return Checkpointed(is_reentrant).requires_grad_(False)

    with (
        Engine(critic(), room_for_two(tmp_path / "critic", critic())) as judge,
        tight_engine(tmp_path / "net") as engine,
    ):
        model, judging = Net(), critic()
        optimizer = plain(model)
        for x in batches(3):
            engine.backward(loss_of(judge(engine(x))))
            engine.step()
            loss_of(judging(model(x))).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_weights(engine, model)
        x.requires_grad_()
        loss = loss_of(judge(x))
        if is_reentrant:  # nobody looks at what that saves
            with pytest.raises(GraphError, match=r"Conv1d was called outside of .* inside `with engine\.gathered"):
                loss.backward()
        else:
            assert torch.equal(*torch.autograd.grad(loss, x), *torch.autograd.grad(loss_of(judging(x)), x))


def test_sparse_gradients_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 8, sparse=True), nn.Linear(8, 8))
    with (
        Engine(model, disk(tmp_path)) as engine,
        pytest.raises(GraphError, match=r"gradient of 0\.weight is sparse"),
    ):
        engine.backward(engine(torch.tensor([1])).sum())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch gives gradients no dtype of their own")
@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.half)]
)
def test_gradients_of_another_dtype_are_refused_by_name(dtype: torch.dtype, other: torch.dtype, tmp_path: Path) -> None:
    model = Net().to(dtype)
    model.blocks[2][0].bias.grad_dtype = other
    with (
        Engine(model, disk(tmp_path), loss_scale=1.0) as engine,
        pytest.raises(GraphError, match=rf"blocks\.2\.0\.bias is {other}, and the parameter {dtype}"),
    ):
        engine.backward(loss_of(engine(batches(1)[0].to(dtype))).float())


class Penalized(Net):
    """Adds gradients of parameters to its output; what they need is recomputed from weights that no module shows."""

    takes = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(lambda x, own: functional.linear(x, own.weight).tanh(), x, block[0], use_reentrant=False)
        weights = [block[0].weight for block in self.blocks][: self.takes]
        return x + sum(one.sum() for one in torch.autograd.grad(loss_of(x), weights, create_graph=True))


def not_reached(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Any:
    reached = functional.linear(x, weights[0]).square().sum()
    return torch.autograd.grad(reached, weights, create_graph=True, materialize_grads=True)


def several_losses(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Any:
    return torch.autograd.grad([loss_of(x), x.sum()], weights, create_graph=True)


@pytest.mark.parametrize("take", [not_reached, several_losses])
def test_gradients_of_hidden_weights_in_forward(take: Callable[..., Any], tmp_path: Path) -> None:
    def taking(net: nn.Module, args: tuple[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        weights = [block[0].weight for block in net.blocks]  # type: ignore[union-attr, index]
        return x + sum(one.sum() for one in take(x, weights))

    model, trained = Net(), Net()
    for one in (model, trained):
        one.register_forward_hook(taking)
    with tight_engine(tmp_path, model=trained) as engine:
        train_both(engine, model, batches(3))


@pytest.mark.parametrize("takes", [1, 4])
def test_gradients_of_weights_that_are_not_on_the_device(takes: int, tmp_path: Path) -> None:
    model, trained = Penalized(), Penalized()
    model.takes = trained.takes = takes
    with tight_engine(tmp_path, model=trained) as engine:
        train_both(engine, model, batches(3))


class TakesItsJacobian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacrev(self.inner)(x)


def test_gradients_by_torch_func_are_refused_with_another_way(tmp_path: Path) -> None:
    with (
        Engine(TakesItsJacobian(), disk(tmp_path)) as engine,
        pytest.raises(GraphError, match=r"torch\.func\.grad.*use torch\.autograd\.grad"),
    ):
        engine(torch.ones(8))


class ShowsAWeight(Net):
    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        repr(next(self.blocks[0].parameters()))  # its group has left the device for the groups after it
        return super().forward(x)


def test_a_failure_that_was_kept_is_not_lost_by_showing_a_weight(tmp_path: Path) -> None:
    kept: list[BaseException] = []

    def keep() -> None:
        for error in kept:
            engine._parts.runtime.keep_failure(error)

    engine = tight_engine(tmp_path, model=ShowsAWeight(keep))
    with engine:
        engine(batches(1)[0])
        kept.append(StorageError("a write behind has failed"))
        with pytest.raises(StorageError, match="a write behind has failed"):
            engine(batches(1)[0])
        kept.clear()


def test_what_is_no_loss_breaks_nothing(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        for wrong in (engine(x), loss_of(engine(x)).detach(), torch.complex(loss_of(engine(x)), torch.zeros(()))):
            with pytest.raises(ConfigError, match="a loss is one real number"):
                engine.backward(wrong)
        engine.backward(loss_of(engine(x)))
        engine.step()


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("wrong", [lambda y: None, lambda y: (y.mean(),), lambda y: {"loss": y.mean()}, lambda y: 0.5])
def test_what_is_no_loss_of_a_micro_batch_breaks_nothing(
    wrong: Callable[[torch.Tensor], Any], schedule: str, tmp_path: Path
) -> None:
    data = batches(2)
    left = [loss_of, wrong]
    with tight_engine(tmp_path) as engine:
        with pytest.raises(ConfigError, match="a loss is a tensor that depends on the weights, not"):
            engine.train_step(data, lambda output: left.pop(0)(output), schedule)
        norm = engine.train_step(data, loss_of, schedule).grad_norm
    with tight_engine(tmp_path / "again") as engine:
        assert engine.train_step(data, loss_of, schedule).grad_norm == norm


def test_no_sync_may_be_nested(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, "backward") as engine:
        engine.backward(loss_of(engine(x)))
        norm = engine.step().grad_norm
    with tight_engine(tmp_path / "nested", "backward") as engine:
        with engine.no_sync():
            with engine.no_sync():
                engine.backward(loss_of(engine(x)))
            engine.backward(loss_of(engine(x)))
        engine.backward(loss_of(engine(x)))
        assert engine.step().grad_norm == pytest.approx(3 * norm)
        engine.backward(loss_of(engine(x)))
        engine.step()


class Experts(nn.Module):
    """Blocks of two experts each; a call asks the same ones of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(256, 256) for _ in range(2)) for _ in range(3))

    def forward(self, x: torch.Tensor, asked: list[int]) -> torch.Tensor:
        for block in self.blocks:
            x = sum((block[expert](x) for expert in asked), x).tanh()
        return x


@pytest.mark.parametrize("update", STREAMING)
def test_what_only_an_earlier_micro_batch_has_brought_counts_in_the_norm(tmp_path: Path, update: str) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    norms: dict[str, list[float | None]] = {update: [], "step": []}
    for schedule, found in norms.items():
        gpu, cpu = smallest_budgets(Experts(), nvme=["unused"], update=schedule, chunk_bytes=2**16)
        tiers = disk(tmp_path / schedule, gpu_memory=gpu, cpu_memory=cpu, chunk_bytes=2**16)
        with Engine(Experts(), tiers, AdamWConfig(lr=1e-2), update=schedule) as engine:
            for _ in range(3):
                with engine.no_sync():
                    engine.backward(loss_of(engine(x, [1])))
                engine.backward(loss_of(engine(x, [0])))
                found.append(engine.step().grad_norm)
    assert norms[update] == norms["step"]


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    with tight_engine(tmp_path) as engine:
        model = engine.model
    with pytest.raises(TierstoreError, match="engine of this model is closed"), torch.no_grad():
        model(batches(1)[0])


@pytest.mark.parametrize("update", [*LATER, *STREAMING])
def test_a_backward_without_a_forward_is_refused_and_harms_nothing(update: str, tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, update) as engine:
        old = loss_of(engine(x))
        engine.backward(loss_of(engine(x)))
        engine.step()
        with pytest.raises(ConfigError, match="needs a forward through the engine before it"):
            engine.backward(old)
        engine.backward(loss_of(engine(x)))
        engine.step()


def test_a_gradient_that_waits_for_memory_says_so(tmp_path: Path) -> None:
    """An update that read ahead may wait for that gradient and hold memory that another update needs."""
    with tight_engine(tmp_path, "backward") as engine:
        parts = engine._parts
        gradients = parts.store.gradients[0]

        async def two_where_one_fits() -> bool:
            heard: list[bool] = []
            gradients.on_change = lambda: heard.append(gradients.memory.is_short)
            pieces = [Piece(0, torch.ones(parts.store.groups[0].elements), True)]
            await gradients.accept([Arrival(0, pieces.copy(), Reached(), is_final=True, is_streaming=True)])
            heard.clear()
            second = asyncio.ensure_future(
                gradients.accept([Arrival(1, pieces, Reached(), is_final=True, is_streaming=True)])
            )
            for _ in range(5):  # turns of the event loop: `second` begins, asks, waits
                await asyncio.sleep(0)
            was_told = list(heard)
            gradients.drop(0, 0)
            await second
            gradients.drop(1, 0)
            return was_told == [True]

        assert parts.runtime.call(two_where_one_fits)


@pytest.mark.parametrize("update", LATER)
def test_a_graph_from_before_the_step_is_refused(update: str, tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, update) as engine:
        old = loss_of(engine(x))
        engine.backward(loss_of(engine(x)))
        engine.step()
        engine(x)
        with pytest.raises(GraphError, match=r"as they were before engine\.step"):
            engine.backward(old)


@pytest.mark.parametrize("update", LATER)
@pytest.mark.parametrize("change", ["in place", "new data", "load_state_dict"])
def test_a_graph_from_before_a_change_of_weights_is_refused(change: str, update: str, tmp_path: Path) -> None:
    with tight_engine(tmp_path, update) as engine:
        weight = engine.model.get_parameter("blocks.2.0.weight")
        with engine.gathered("blocks.2"):
            penalty = weight.pow(2).sum()
        if change == "load_state_dict":
            engine.load_state_dict({name: 3 * value for name, value in engine.state_dict().items()})
        else:
            with engine.gathered("blocks.2", modify=True), torch.no_grad():
                if change == "in place":
                    weight.mul_(3)
                else:
                    weight.data = 3 * weight
        loss = loss_of(engine(batches(1)[0])) + penalty
        with pytest.raises(GraphError, match=r"as they were before engine\.step\(\) or a change of weights"):
            engine.backward(loss)


def test_a_graph_of_weights_that_did_not_change_after_it_is_not(tmp_path: Path) -> None:
    model, x = Net(), batches(1)[0]
    with tight_engine(tmp_path) as engine:
        other, changed = (engine.model.get_parameter(f"blocks.{index}.0.weight") for index in (1, 2))
        with engine.gathered("blocks.1"):
            penalty = other.pow(2).sum()
        with engine.gathered("blocks.2", modify=True):
            with torch.no_grad():
                changed.mul_(3)
            penalty = penalty + changed.pow(2).sum()
        engine.backward(loss_of(engine(x)) + penalty)
        engine.step()
        with torch.no_grad():
            model.blocks[2][0].weight.mul_(3)
        (loss_of(model(x)) + model.blocks[1][0].weight.pow(2).sum() + model.blocks[2][0].weight.pow(2).sum()).backward()
        plain(model).step()
        check_weights(engine, model)


def test_training_while_weights_are_modified_is_refused(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        with engine.gathered(["blocks.0.0.weight"], modify=True), pytest.raises(ConfigError, match="train after it"):
            engine(x)
        engine.backward(loss_of(engine(x)))
        engine.step()


@pytest.mark.parametrize("update", STREAMING)
def test_a_call_of_the_model_that_would_meet_an_update_is_refused(update: str, tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, update) as engine, torch.no_grad():
        with torch.enable_grad():
            engine.backward(loss_of(engine(x)))
        with pytest.raises(ConfigError, match="a call of the model between"):
            engine.model(x)
        engine.step()
        engine.model(x)


class Replaced(Net):
    writes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.writes:
            self.blocks[0][0].weight.data = self.blocks[0][0].weight.data.clamp(-0.1, 0.1)
        return output


def test_data_given_in_forward_is_refused_by_name(tmp_path: Path) -> None:
    with tight_engine(tmp_path, model=Replaced()) as engine:
        with pytest.raises(GraphError, match=r"blocks\.0\.0\.weight was changed in forward"):
            engine(batches(1)[0])
        with engine.gathered(["blocks.0.0.weight"]):
            pass


@pytest.mark.parametrize("is_tight", [True, False])
@pytest.mark.parametrize("kind", [Clamped, Replaced])
def test_a_forward_that_changes_weights_is_refused_alone(
    kind: type[Clamped | Replaced], is_tight: bool, tmp_path: Path
) -> None:
    """Its changes are undone, so the steps around it are those of a run without it."""
    weights = []
    for is_disturbed in (False, True):
        model = kind()
        folder = tmp_path / str(is_disturbed)
        with tight_engine(folder, model=model) if is_tight else Engine(model, TierConfig()) as engine:
            for x in batches(2):
                model.writes = is_disturbed
                for trains in (False, True) if is_disturbed else ():
                    with pytest.raises(GraphError, match="changed in forward"), torch.set_grad_enabled(trains):
                        engine(x)
                model.writes = False
                engine.backward(loss_of(engine(x)))
                engine.step()
            weights.append(engine.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_an_evaluation_inside_of_a_change_of_weights_leaves_that_alone(tmp_path: Path) -> None:
    x, model = batches(1)[0], Clamped()
    with tight_engine(tmp_path) as engine, torch.no_grad():
        with engine.gathered("blocks.0", modify=True):
            engine.model.blocks[0][0].weight.clamp_(-0.1, 0.1)
            assert torch.equal(engine(x), model(x))
        check_weights(engine, model)


class Unstorable(Net):
    def get_extra_state(self) -> Any:
        return object()


def test_what_is_refused_does_not_cost_the_weights(tmp_path: Path) -> None:
    for model, options in (
        (Net(), {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}),
        (Net(), {"parameter_groups": [{"params": [nn.Parameter(torch.ones(1))]}]}),
        (Unstorable(), {}),
    ):
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with pytest.raises(ConfigError):
            Engine(model, disk(tmp_path, gpu_memory="64MiB", cpu_memory="64MiB"), **options)
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_an_exploring_forward_costs_no_step(tmp_path: Path) -> None:
    x = batches(1)[0]
    tiers = disk(tmp_path, gpu_memory="64MiB", cpu_memory="64MiB")
    with Engine(Net(), tiers, update="backward", commit_every=5) as engine:
        for _ in range(7):
            engine.backward(loss_of(engine(x)))
            engine.step()
        engine(x)
    with Engine(Net(), tiers, update="backward", commit_every=5, resume="must") as engine:
        assert engine.step_count == 7


def test_a_group_is_in_use_or_not_for_a_whole_decision() -> None:
    answers = iter([True, False])
    in_use = _InUse(lambda group: next(answers))
    assert [0 in in_use, 0 in in_use] == [True, True]  # what is evicted and what fits must not disagree


def test_the_memory_of_a_gradient_is_given_back_in_a_thread(tmp_path: Path) -> None:
    """Not on the event loop, where other tasks would wait meanwhile."""
    ended: list[str] = []

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            ended.append(threading.current_thread().name)

    with tight_engine(tmp_path, "backward", nn.Sequential(nn.Linear(200, 200))) as engine:
        parts = engine._parts
        assert parts.store.groups[0].elements * 4 > parts.device.at_once_bytes

        async def accept() -> None:
            pieces = [Piece(0, torch.ones(parts.store.groups[0].elements).as_subclass(Watched), True)]
            await parts.store.gradients[0].accept([Arrival(0, pieces, Reached(), is_final=True, is_streaming=True)])
            assert not pieces
            parts.store.gradients[0].drop_all()

        parts.runtime.call(accept)
        assert len(ended) == 1
        assert ended[0].startswith("tierstore-update")


def test_a_view_that_somebody_keeps_is_named_where_it_leaves_too_little_room(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        engine.backward(loss_of(engine(x)))
        engine.step()
        kept: list[torch.Tensor] = []

        def keep_all() -> None:
            for block in range(4):
                with engine.gathered(f"blocks.{block}"):
                    kept.append(engine.model.get_parameter(f"blocks.{block}.0.weight").detach())

        with pytest.raises(BudgetError, match=r"blocks\.0 stays there because somebody.* \(keep a clone\(\)\)"):
            keep_all()
        kept.clear()
        engine.zero_grad()
        engine.backward(loss_of(engine(x)))
        engine.step()


def test_a_step_without_a_backward_is_refused(tmp_path: Path) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path) as engine:
        for _ in range(2):
            loss = loss_of(engine(x))
            with pytest.raises(ConfigError, match=r"step\(\) needs a forward .* and engine.backward\(loss\)"):
                engine.step()
            engine.backward(loss)
            engine.step()
        assert engine.step_count == 2


@pytest.mark.parametrize(
    ("update", "name", "value"),
    [("step", "lr", "fast"), ("forward", "lr", -1.0), ("backward", "lr", None), ("backward", "eps", float("nan"))],
)
def test_an_option_that_was_set_to_nonsense_costs_no_step(tmp_path: Path, update: str, name: str, value: Any) -> None:
    x = batches(1)[0]
    with tight_engine(tmp_path, update) as engine:
        (group,) = engine.optimizer.param_groups
        good = group[name]
        engine.backward(loss_of(engine(x)))
        engine.step()
        for is_early in (True, False):
            loss = loss_of(engine(x))
            if not is_early:
                engine.backward(loss)
            group[name] = value
            with pytest.raises(ConfigError, match=name):
                engine.backward(loss) if is_early else engine.step()
            group[name] = good
            if is_early:
                engine.backward(loss)
            engine.step()
        assert engine.step_count == 3
        assert all(weight.isfinite().all() for weight in engine.state_dict().values())


def test_the_model_cannot_be_registered_beside_itself(tmp_path: Path) -> None:
    with tight_engine(tmp_path) as engine:
        with pytest.raises(ConfigError, match="cannot register 'model': it holds weights of the model"):
            engine.register("model", engine.model)
        engine.backward(loss_of(engine(batches(1)[0])))
        engine.step()


def test_an_evaluation_takes_no_time_of_the_step_that_follows() -> None:
    now, model = [0.0], tiny()
    model.embedding.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 1.0))
    with Engine(model, TierConfig(gpu_memory="4MiB", cpu_memory="24MiB"), clock=lambda: now[0]) as engine:
        reports = []
        for evaluations, batch in enumerate(tokens(3)):
            with torch.no_grad():
                for _ in range(evaluations):
                    engine(batch)
            engine.backward(next_token_loss(engine, batch))
            reports.append(engine.step())
    assert [(r.seconds["forward"], r.seconds["total"]) for r in reports] == [(1.0, 1.0)] * 3


class Tapped(nn.Module):
    """Reads its weights once more in backward, in a hook and not through tensors that autograd saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient + 0.1 * gradient @ self.layer.weight)
        return self.layer(x).tanh()


@pytest.mark.parametrize(
    ("update", "room"),
    [("backward", 0), ("speculative", 2**24), ("step", 0), ("forward", 0), ("forward", 2**24), ("auto", 2**24)],
)
def test_weights_that_backward_reads_are_those_of_forward(update: str, room: int, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Tapped() for _ in range(3)))

    model, data = make(), batches(4)
    gpu, cpu = smallest_budgets(make(), nvme=["unused"], update=update)
    tiers = disk(tmp_path, gpu_memory=gpu + room, cpu_memory=cpu + room)
    with Engine(make(), tiers, AdamWConfig(lr=1e-2), update=update) as engine:
        if update in STREAMING:
            engine.backward(loss_of(engine(data[0])))  # the first step of a run updates nothing in backward
            engine.step()
            loss = loss_of(engine(data[1]))
            with pytest.raises(GraphError, match=r"weights of 2 are read in backward .* make .* update='forward'"):
                engine.backward(loss)
            return
        train_both(engine, model, data)


@pytest.mark.parametrize(
    ("update", "is_gathered"), [("backward", True), ("speculative", False), ("step", False), ("forward", True)]
)
def test_a_hook_on_accumulated_gradients_that_comes_later_sees_them_all_the_same(
    update: str, is_gathered: bool, tmp_path: Path
) -> None:
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model, data = Net(), batches(4)
    with tight_engine(tmp_path, update) as engine:
        with engine.gathered("blocks.1") if is_gathered else contextlib.nullcontext():
            for one in (model, engine.model):
                one.get_parameter("blocks.1.0.weight").register_post_accumulate_grad_hook(halve)
        train_both(engine, model, data)
