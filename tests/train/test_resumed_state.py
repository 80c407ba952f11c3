"""What a resumed run gets back beside weights: options of parameter groups, buffers that grew, extra states."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resuming
import torch
from resuming import Way, opened
from runs import disk
from torch import nn

from tierstore.config import AdamWConfig
from tierstore.errors import ConfigError, FormatError, UnusedOptionWarning
from tierstore.train import capture
from tierstore.train.capture import plain
from tierstore.train.engine import Engine

WAY = Way()
NAME = "blocks.0.up.weight"

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def test_resuming_with_other_members_of_a_group_is_refused(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(1)
    model = WAY.model()
    some = [parameter for name, parameter in model.named_parameters() if name != NAME]
    with (
        pytest.raises(ConfigError, match=rf"parameter_groups\[0\] had a parameter {NAME}"),
        opened(WAY, tmp_path, model=model, parameter_groups=some),
    ):
        pass
    with opened(WAY, tmp_path) as run:
        run.until(2)


def partly_frozen(is_frozen: bool) -> Any:
    model: Any = WAY.model()
    model.blocks[0].requires_grad_(not is_frozen)
    return model


def test_what_was_frozen_is_not_trained_by_a_resumed_run_and_told(tmp_path: Path) -> None:
    with opened(WAY, tmp_path, model=partly_frozen(True)) as run:
        run.until(1)
    with (
        pytest.raises(ConfigError, match=r"store0: parameter blocks.0.norm_in.weight \(and 10 more\) was frozen "
                      r"when this store was made, and has no moments there; .*export"),
        opened(WAY, tmp_path, model=partly_frozen(False)),
    ):  # fmt: skip
        pass
    with opened(WAY, tmp_path, model=partly_frozen(True)) as run:
        run.until(2)


def test_what_was_trained_can_be_frozen_as_the_error_says(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(1)
    with (
        pytest.raises(ConfigError, match=r"\(and 10 more\) was trained in this store, and is frozen here; .* after"),
        opened(WAY, tmp_path, model=partly_frozen(True)),
    ):
        pass
    with opened(WAY, tmp_path) as run:
        run.engine.model.get_submodule("blocks.0").requires_grad_(False)
        before = run.engine.state_dict()
        run.until(3)
        changed = {name for name, value in run.engine.state_dict().items() if not torch.equal(value, before[name])}
    assert "norm.weight" in changed
    assert not [name for name in changed if name.startswith("blocks.")]


def test_a_learning_rate_that_is_a_tensor_resumes(tmp_path: Path) -> None:
    for _ in range(2):
        model = WAY.model()
        groups = [{"params": list(model.parameters()), "lr": torch.tensor(0.125)}]
        with opened(WAY, tmp_path, model=model, parameter_groups=groups, lr_scheduler=None) as run:
            run.step()
            assert float(run.engine.optimizer.param_groups[0]["lr"]) == 0.125


def test_a_schedule_that_begins_with_a_resumed_run_goes_on_from_its_rates(tmp_path: Path) -> None:
    """As in torch, where the optimizer's state is loaded before the schedule is made."""
    with opened(WAY, tmp_path, lr_scheduler=None) as run:
        run.engine.optimizer.param_groups[0]["lr"] = 0.25
        run.until(2)

    def warm_up(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    rates = []
    for end in (4, 7):  # the second goes on with the schedule
        with opened(WAY, tmp_path, lr_scheduler=warm_up) as run:
            run.engine.on_step(lambda report: rates.extend(report.lr))
            run.until(end)
    assert rates == [0.0625, 0.125, 0.1875, 0.25, 0.25]


def test_other_hyper_parameters_are_not_used_and_that_is_told(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
    other = AdamWConfig(lr=0.5, eps=1e-6)
    for _ in range(2):  # the second time, too, the store knows the options that it was made with
        with opened(WAY, tmp_path, optimizer=other) as run:
            rate = run.engine.optimizer.param_groups[0]["lr"]
            said = rf"not used: lr=0.5 \(here it is {rate}\) in parameter_groups\[0\]; eps=1e-06 \(here it is 1e-08\) "
            with pytest.warns(UnusedOptionWarning, match=said) as warned:
                run.step()
            assert warned[0].filename == resuming.__file__
            run.step()
            assert run.engine.optimizer.param_groups[0]["eps"] == 1e-8
    with opened(WAY, tmp_path, optimizer=other) as run:
        run.engine.optimizer.param_groups[0].update(lr=0.5, eps=1e-6)
        run.step()  # no warning: the options are those asked for
    only_the_rate = r"not used: lr=0.5 \(here it is \S+\) in parameter_groups\[0\]\. "
    with opened(WAY, tmp_path, optimizer=other) as run, pytest.warns(UnusedOptionWarning, match=only_the_rate):
        run.step()
    with opened(WAY, tmp_path) as run:
        run.step()  # no warning: a rate that was set, or that a schedule has changed, is meant to go on


def without_what_is_new(state: Any, name: str = "state") -> Any:
    """A state as earlier versions wrote it."""
    return plain({key: value for key, value in state.items() if key not in ("made_with", "scheduler_kind")}, name)


def test_a_store_of_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say which options it was made with, so none are warned of, then or later; its schedule goes on."""
    warm_up = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (step + 1))
    with monkeypatch.context() as patch, opened(WAY, tmp_path, lr_scheduler=warm_up) as run:
        patch.setattr(capture, "plain", without_what_is_new)
        run.until(2)
        run.engine.flush()
    for optimizer in (AdamWConfig(lr=0.5), AdamWConfig(lr=0.5), AdamWConfig(lr=1e-2)):
        with opened(WAY, tmp_path, lr_scheduler=warm_up, optimizer=optimizer) as run:
            run.step()
            count, rate = run.engine.step_count, run.engine.optimizer.param_groups[0]["lr"]
            assert rate == pytest.approx(0.01 / (count + 1))


def test_options_of_several_groups_that_are_not_used_are_named_once(tmp_path: Path) -> None:
    def groups(model: nn.Module, *rates: float) -> list[dict[str, Any]]:
        return [{"params": [p], "lr": rate} for p, rate in zip(model.parameters(), (*rates, *[0.01] * 99))]

    def again(*rates: float, **options: Any) -> Any:
        model = WAY.model()
        return opened(WAY, tmp_path, model=model, parameter_groups=groups(model, *rates), lr_scheduler=None, **options)

    with again(0.01, 0.02) as run:
        run.step()
    with again(0.01, torch.tensor(0.02)) as run:  # which is the same rate, in fp32
        run.step()
    here = r"\(here it is 0.0[12]\) in parameter_groups"
    said = rf"not used: lr=0.5 {here}\[0, 2\]; lr=0.7 {here}\[1\]\. What"
    with again(0.5, 0.7, 0.5) as run, pytest.warns(UnusedOptionWarning, match=said):
        run.step()


def test_another_schedule_begins_and_that_is_told(tmp_path: Path) -> None:
    """The new schedule does not get the state of the old one, which is of another kind."""
    with opened(WAY, tmp_path) as run:
        run.until(2)
    base = 0.01 * 0.9**2
    halves = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
    with opened(WAY, tmp_path, lr_scheduler=halves) as run:
        with pytest.warns(UserWarning, match="the ExponentialLR that has set .* is replaced by the LambdaLR"):
            run.step()
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(base * 0.5)
    with opened(WAY, tmp_path, lr_scheduler=halves) as run:
        run.step()
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(base * 0.25)
    with opened(WAY, tmp_path, lr_scheduler=None) as run, pytest.warns(UserWarning, match="stays as it was"):
        run.step()
    with opened(WAY, tmp_path, lr_scheduler=halves) as run:  # its state has stayed in the store, and its kind
        run.step()
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(base * 0.125)
    with opened(WAY, tmp_path, lr_scheduler=None) as run, pytest.warns(UserWarning, match="stays as it was"):
        run.step()
    with opened(WAY, tmp_path) as run, pytest.warns(UserWarning, match="the LambdaLR that has set .* is replaced by"):
        run.step()


def test_a_schedule_that_ends_is_told_before_its_state_goes(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(1)
    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    said = "to keep the former, make the engine with it"  # warnings are errors in tests
    with opened(WAY, tmp_path, lr_scheduler=steps) as run, pytest.raises(UserWarning, match=said):
        run.engine.load_state_dict(run.engine.state_dict())
    with opened(WAY, tmp_path) as run:
        run.step()
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**2)


class FromInitialRate:
    """A schedule whose state lacks the rates that it began with; torch's optimizers hold them as `initial_lr`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.base = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]

    def step(self) -> None:
        self.count += 1
        for group, base in zip(self.optimizer.param_groups, self.base):
            group["lr"] = base * 0.5**self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_schedule_finds_the_rates_that_it_began_with(tmp_path: Path) -> None:
    for end in (2, 4):
        with opened(WAY, tmp_path, lr_scheduler=FromInitialRate) as run:
            run.until(end)
    assert run.engine.optimizer.param_groups[0]["lr"] == 0.01 * 0.5**4


def test_a_state_that_a_schedule_does_not_take_is_refused_by_name(tmp_path: Path) -> None:
    chain, kinds = torch.optim.lr_scheduler.SequentialLR, torch.optim.lr_scheduler
    halves = partial(kinds.LambdaLR, lr_lambda=lambda step: 0.5)
    with opened(WAY, tmp_path, lr_scheduler=lambda o: chain(o, [kinds.ConstantLR(o), kinds.LinearLR(o)], [2])) as run:
        run.step()
    with (
        pytest.raises(ConfigError, match=r"the SequentialLR does not take .* \(KeyError: .*\); give the"),
        opened(WAY, tmp_path, lr_scheduler=lambda o: chain(o, [kinds.ConstantLR(o), halves(o)], [2])),
    ):
        pass


def test_a_fixed_loss_scale_is_the_one_that_is_given(tmp_path: Path) -> None:
    """And a dynamic one after it goes on where the last dynamic one was, not at a scale that nobody chose for it."""
    with opened(WAY, tmp_path) as run:
        run.step()
    with opened(WAY, tmp_path, loss_scale="dynamic") as run:
        run.engine._generations._loss_scale.update(is_finite=False)
        run.step()
    with opened(WAY, tmp_path, loss_scale=8.0) as run:
        run.step()
        assert run.engine._generations._loss_scale.scale == 8.0
    with opened(WAY, tmp_path, loss_scale="dynamic") as run:
        found = run.engine._generations._loss_scale
        assert (found.scale, found.good_steps) == (2.0**15, 1)


def test_nothing_is_told_twice_nor_lost_where_warnings_are_errors(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
    with opened(WAY, tmp_path, optimizer=AdamWConfig(lr=0.5), lr_scheduler=None) as run:
        run.engine.backward(run.engine(run.position.next()).sum())
        with pytest.raises(UnusedOptionWarning):
            run.engine.step()
        with pytest.raises(UserWarning, match="stays as it was"):
            run.engine.step()
        assert run.engine.step().step == 2


class Holding:
    """Something to register that holds a scheduler."""

    def __init__(self, scheduler: Any, held: Any) -> None:
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict
        self.held = held


HOLDERS: Mapping[str, Callable[[Any], Any]] = {
    "itself": lambda scheduler: scheduler,
    "an attribute": lambda scheduler: Holding(scheduler, scheduler),
    "in a list": lambda scheduler: Holding(scheduler, [None, scheduler]),
    "in a mapping": lambda scheduler: Holding(scheduler, {"warm-up": scheduler}),
}


@pytest.mark.parametrize(("kind", "holder"), [("OneCycleLR", "an attribute"), *(("LinearLR", how) for how in HOLDERS)])
def test_a_registered_scheduler_that_the_loop_steps_goes_on(kind: str, holder: str, tmp_path: Path) -> None:
    """The construction of a scheduler sets the rates of a first step."""
    options = {"total_steps": 10, "max_lr": 0.1} if kind == "OneCycleLR" else {}

    def rates_of(folder: str, ends: Sequence[int]) -> list[float]:
        rates: list[float] = []
        for end in ends:
            with opened(WAY, tmp_path / folder, lr_scheduler=None) as run:
                scheduler = getattr(torch.optim.lr_scheduler, kind)(run.engine.optimizer, **options)
                run.engine.register("scheduler", HOLDERS[holder](scheduler))
                run.engine.on_step(lambda report, scheduler=scheduler: scheduler.step())
                run.engine.on_step(lambda report: rates.extend(report.lr))
                run.until(end)
        return rates

    assert rates_of("resumed", [2, 3, 5]) == rates_of("whole", [5])


def test_what_a_schedule_does_not_set_stays_when_one_is_registered(tmp_path: Path) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    for _ in range(2):
        with opened(WAY, tmp_path, lr_scheduler=None) as run:
            run.engine.optimizer.param_groups[0]["weight_decay"] = 0.5
            run.engine.register("plateau", plateau(run.engine.optimizer))
            assert run.engine.optimizer.param_groups[0]["weight_decay"] == 0.5
            run.step()
            run.engine.optimizer.param_groups[0]["weight_decay"] = 0.25


class Trainer:
    """Something with an optimizer that schedules nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_rate_stays_when_something_else_is_registered(is_scheduled: bool, tmp_path: Path) -> None:
    with opened(WAY, tmp_path, lr_scheduler=None) as run:
        run.engine.register("trainer", Trainer(run.engine.optimizer))
        run.step()
    warm_up = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=4)
    with opened(WAY, tmp_path, lr_scheduler=warm_up if is_scheduled else None) as run:
        if not is_scheduled:
            run.engine.optimizer.param_groups[0]["lr"] = 0.001
        run.engine.register("trainer", Trainer(run.engine.optimizer))
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_a_new_schedule_begins_from_the_rates_of_now(tmp_path: Path) -> None:
    """Not from the initial rates of an earlier schedule that the loop stepped."""
    with opened(WAY, tmp_path, lr_scheduler=None) as run:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.engine.optimizer, 0.1)
        run.engine.on_step(lambda report: scheduler.step())
        run.until(2)
    with opened(WAY, tmp_path, lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda _: 1.0)) as run:
        run.step()
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.0001)


def test_a_store_whose_schedule_ended_below_0_can_be_opened(tmp_path: Path) -> None:
    """As OneCycleLR does when it anneals linearly; only an update needs a rate that makes sense."""
    falling = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 - step)
    with opened(WAY, tmp_path, lr_scheduler=falling) as run:
        run.until(2)
        state = run.engine.state_dict()
    with opened(WAY, tmp_path, lr_scheduler=None) as run:
        assert all(torch.equal(value, state[name]) for name, value in run.engine.state_dict().items())
        with pytest.raises(ConfigError, match=r"lr: must be greater than or equal to 0 \(got -0.01\)"):
            run.step()
        run.engine.optimizer.param_groups[0]["lr"] = 0.001
        with pytest.warns(UserWarning, match="goes on without the learning-rate schedule"):
            run.step()


def test_where_a_schedule_began_does_not_move_with_a_rate_that_is_a_tensor(tmp_path: Path) -> None:
    def again(schedule: Any) -> Any:
        model = WAY.model()
        groups = [{"params": list(model.parameters()), "lr": torch.tensor(0.01)}]
        return opened(WAY, tmp_path, model=model, parameter_groups=groups, lr_scheduler=schedule)

    with again(partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)) as run:
        run.step()
    with again(partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)) as run:
        with pytest.warns(UserWarning, match="the ExponentialLR that has set"):
            run.step()
        [group] = run.engine.optimizer.param_groups
        assert [float(group["initial_lr"]), float(group["lr"])] == pytest.approx([0.005, 0.0005])


def test_a_scheduler_that_waits_for_a_metric_is_refused_at_construction(tmp_path: Path) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"), opened(WAY, tmp_path, lr_scheduler=plateau):
        pass


class Growing(nn.Linear):
    """Every forward extends a buffer, and raises a count that only `get_extra_state` tells."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("queue", torch.zeros(0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, torch.ones(1)])
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def growing() -> Any:
    model: Any = WAY.model()
    model.norm = nn.Sequential(model.norm, Growing())
    return model


def test_buffers_that_have_grown_and_extra_states_are_resumed(tmp_path: Path) -> None:
    with opened(WAY, tmp_path, model=growing()) as run:
        run.until(3)
    model = growing()
    with opened(WAY, tmp_path, model=model) as run:
        assert model.norm[1].queue.shape == (3,)
        assert model.norm[1].calls == 3
        run.until(4)


class Other(nn.Module):
    """Its buffer changes its dtype in forward, or begins as a tensor that `copy_` cannot write."""

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen * 0.5 + torch.arange(4.0)
        return x


@pytest.mark.parametrize(
    "start", [torch.zeros(4, dtype=torch.int64), torch.zeros(1).expand(4)], ids=["dtype", "expanded"]
)
def test_buffers_of_another_kind_are_resumed(start: torch.Tensor, tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        model: Any = WAY.model()
        model.norm = nn.Sequential(model.norm, Other(start))
        with opened(WAY, tmp_path, model=model) as run:
            seen.append(model.norm[1].seen.clone())
            run.step()
            seen.append(model.norm[1].seen.clone())
    assert torch.equal(seen[1], seen[2])
    assert seen[1].dtype == seen[2].dtype


def test_a_buffer_that_came_while_training_is_resumed_where_it_is_made_first(tmp_path: Path) -> None:
    def model(mean: torch.Tensor | None) -> Any:
        made = WAY.model()
        made.register_buffer("mean", mean)
        return made

    with opened(WAY, tmp_path, model=model(None)) as run:
        run.engine.model.mean = torch.ones(2)
        run.step()
    with pytest.raises(FormatError, match="'mean' is only in the store"), opened(WAY, tmp_path, model=model(None)):
        pass
    with opened(WAY, tmp_path, model=model(torch.zeros(3))) as run:
        assert run.engine.model.mean.eq(torch.ones(2)).all()


def test_buffers_that_are_views_of_one_another_stay_so(tmp_path: Path) -> None:
    for expected in (0.0, 1.0):
        model: Any = WAY.model()
        table = torch.zeros(3, 2)
        model.register_buffer("table", table)
        model.register_buffer("column", table[:, 0])
        with opened(WAY, tmp_path, model=model) as run:
            assert model.column.eq(expected).all()
            model.table += 1
            assert model.column.eq(expected + 1).all()
            run.step()


def test_a_module_may_have_any_name(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"a\nb": nn.Linear(3, 3), "__metadata__": nn.Linear(3, 3)})

    weights = []
    for resume in ("never", "must"):
        with Engine(model(), disk(tmp_path), resume=resume) as engine:
            weights.append(engine.state_dict())
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_arrays_that_come_back_can_be_changed(tmp_path: Path) -> None:
    class Counting:
        def __init__(self, count: int) -> None:
            self.counts = np.full(3, count)

        def state_dict(self) -> dict[str, np.ndarray]:
            return {"counts": self.counts}

        def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
            self.counts = state["counts"]

    for resume, count in (("never", 5), ("must", 9)):
        counting = Counting(count)
        with Engine(nn.Linear(3, 3), disk(tmp_path), resume=resume, registered={"counting": counting}):
            counting.counts += 1
        assert counting.counts.tolist() == [6, 6, 6]


def test_what_was_restored_is_held_no_longer(tmp_path: Path) -> None:
    """It may be large: an average of the weights, for instance, and with several ranks those of all of them."""
    seen: list[weakref.ref[np.ndarray]] = []

    class Averages:
        def state_dict(self) -> dict[str, np.ndarray]:
            return {"average": np.ones(3)}

        def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
            seen.append(weakref.ref(state["average"]))

    for resume in ("never", "must"):
        with Engine(nn.Linear(3, 3), disk(tmp_path), resume=resume, registered={"averages": Averages()}):
            gc.collect()
            assert [array() is None for array in seen] == ([True] if resume == "must" else [])
