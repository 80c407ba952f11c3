"""Parameter groups of the engine's optimizer: allowed parameters and options; their members may not change later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import Way, opened
from torch import nn

from tierstore.config import AdamWConfig
from tierstore.errors import ConfigError
from tierstore.store.layout import shard
from tierstore.train.groups import find_groups
from tierstore.train.optimizer import AdamStepper, TieredOptimizer, check_scheduler

WAY = Way()

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr: must be greater than or equal to 0"),
        ({"eps": -1.0}, "eps: must be greater than or equal to 0"),
        ({"betas": (1.0, 0.9)}, "betas.0: must be less than 1"),
        ({"betas": 0.9}, "betas: must be a"),
        ({"weight_decay": None}, "weight_decay: must be a valid number"),
        ({"decoupled": "no"}, "decoupled: must be a valid boolean"),
        ({"momentum": 0.9}, "momentum: there is no such option"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused(options: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    model = WAY.model()
    groups = [{"params": list(model.parameters()), **options}]
    with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path, model=model, parameter_groups=groups):
        pass
    assert not any(path for path in tmp_path.rglob("*") if path.is_file())


def test_a_name_is_kept(tmp_path: Path) -> None:
    model = WAY.model()
    groups = [{"params": list(model.parameters()), "name": "all", "lr": torch.tensor(0.1)}]
    with opened(WAY, tmp_path, model=model, parameter_groups=groups, lr_scheduler=None) as run:
        run.until(1)
        assert run.engine.optimizer.param_groups[0]["name"] == "all"
    with opened(WAY, tmp_path, lr_scheduler=None) as run:
        assert run.engine.optimizer.param_groups[0]["name"] == "all"


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda first, *others: [{"params": [first, *others]}, {"params": [first]}],
         r"parameter_groups\[1\]: some parameters appear in more than one parameter group"),
        (lambda first, *others: [{"params": others}, {"params": [first * 2]}],
         r"parameter_groups\[1\]: can't optimize a non-leaf Tensor"),
    ],
    ids=["twice", "computed"],
)  # fmt: skip
def test_what_torch_refuses_is_a_bad_option(groups: Callable[..., Any], said: str, tmp_path: Path) -> None:
    model = WAY.model()
    given = groups(*model.parameters())
    with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path, model=model, parameter_groups=given):
        pass


def test_a_parameter_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    model, head = WAY.model(), nn.Linear(5, 7)
    parameters = [*model.parameters(), *head.parameters()]
    said = r"parameter_groups\[0\] holds a parameter of shape \(7, 5\) that the model does not have"
    with pytest.raises(ConfigError, match=said), opened(WAY, tmp_path, model=model, parameter_groups=parameters):
        pass


def test_a_group_cannot_be_added_later(tmp_path: Path) -> None:
    model = WAY.model()
    head = model.get_parameter("norm.weight")
    others = [parameter for parameter in model.parameters() if parameter is not head]
    with opened(WAY, tmp_path, model=model, parameter_groups=others) as run:
        with pytest.raises(ConfigError, match="give parameter_groups to the engine"):
            run.engine.optimizer.add_param_group({"params": [head]})
        run.until(1)
        assert len(run.engine.optimizer.param_groups) == 1


def test_another_optimizer_that_would_train_nothing_is_refused(tmp_path: Path) -> None:
    model, head = WAY.model(), nn.Linear(5, 7)
    usual = torch.optim.SGD(model.parameters(), lr=0.1)
    with_head = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    of_nothing = torch.optim.SGD([{"params": []}], lr=0.1)
    nn.functional.mse_loss(head(torch.ones(1, 5)), torch.zeros(1, 7)).backward()
    before = head.weight.detach().clone()
    with opened(WAY, tmp_path, model=model) as run:
        run.until(1)
        with pytest.raises(ConfigError, match=r"SGD.step would change nothing: .* call engine.step\(\)"):
            usual.step()
        of_nothing.step()
        with_head.step()
        assert not torch.equal(head.weight, before)
        run.until(2)


def two_groups(model: nn.Module, moved: str | None = None) -> list[dict[str, Any]]:
    """A group of weights and one of biases, with the parameter `moved` in the wrong one."""
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        found[name.endswith("bias") is not (name == moved)].append(parameter)
    return [{"params": found[False]}, {"params": found[True], "weight_decay": 0.0}]


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = WAY.model()
    other = torch.optim.AdamW(model.parameters())
    made_no_step = other.state_dict()
    model.get_parameter("norm.weight").grad = torch.ones(model.get_parameter("norm.weight").shape)
    other.step()
    with opened(WAY, tmp_path, model=WAY.model()) as run:
        own = run.engine.optimizer.state_dict()
        for state, said in (
            (made_no_step, "it has no decoupled; set options in param_groups"),
            (own | {"state": other.state_dict()["state"]}, "it has moments, which are in the store here"),
        ):
            with pytest.raises(ConfigError, match=f"the state is that of another optimizer: {said}"):
                run.engine.optimizer.load_state_dict(state)
        assert run.engine.optimizer.state_dict() == own
        run.until(1)


class TestMembers:
    """Groups that are loaded must have the same members as the groups of now."""

    def load(self, optimizer: TieredOptimizer, state: dict[str, Any], way: str) -> None:
        if way == "load_state_dict":
            optimizer.load_state_dict(state)
        else:  # what a generation holds
            groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
            optimizer.restore(groups)

    @pytest.mark.parametrize("way", ["load_state_dict", "restore"])
    def test_others_are_refused(self, way: str, tmp_path: Path) -> None:
        model = WAY.model()
        with opened(WAY, tmp_path / "1", model=model, parameter_groups=two_groups(model)) as run:
            run.engine.optimizer.param_groups[1]["lr"] = 0.125
            state = run.engine.optimizer.state_dict()
            assert "norm.bias" in state["param_groups"][1]["param_names"]
        model = WAY.model()
        with opened(WAY, tmp_path / "2", model=model, parameter_groups=two_groups(model)) as run:
            self.load(run.engine.optimizer, state, way)
            assert run.engine.optimizer.param_groups[1]["lr"] == 0.125
            run.until(1)
        for moved, said in (
            ("norm.bias", r"parameter_groups\[0\] had no parameter norm.bias"),
            ("norm.weight", r"parameter_groups\[0\] had a parameter norm.weight"),
            ("all", "made with parameters in 2 groups, and here they are in 1"),
        ):
            model = WAY.model()
            groups = None if moved == "all" else two_groups(model, moved)
            with opened(WAY, tmp_path / moved, model=model, parameter_groups=groups) as run:
                with pytest.raises(ConfigError, match=said):
                    self.load(run.engine.optimizer, state, way)
                assert run.engine.optimizer.param_groups[-1]["lr"] == 0.01

    def test_groups_of_before_have_no_names(self) -> None:
        optimizer = TieredOptimizer([nn.Parameter(torch.zeros(2))], AdamWConfig(), lambda: None)
        optimizer.restore([{"lr": 0.5}])
        assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_waits_for_a_metric_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau.step: missing .* 'metrics', .* step it in a callback"):
        check_scheduler(plateau)
    check_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    with pytest.raises(ConfigError, match="lr_scheduler must make an object with step and state_dict, not a NoneType"):
        check_scheduler(None)


class TestUpdatesOfAGroup:
    """A block of two layers: its ranges of elements `[start, stop)`, and the coefficients that each gets."""

    names = ("0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias")  # of 12, 4, 20 and 5 elements

    def stepper(self, *, is_split: bool = False) -> AdamStepper:
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
        groups = find_groups(model)
        options: Any = two_groups(model) if is_split else list(model.parameters())
        self.group = groups.groups[0]
        return AdamStepper(groups, TieredOptimizer(options, AdamWConfig(), lambda: None))

    def parts(self, stepper: AdamStepper, touched: Iterable[str] = names) -> list[tuple[int, int, float, int]]:
        updates = stepper.updates(0, set(touched), 1.0)
        return [(u.start, u.stop, u.coefficients.weight_decay, u.coefficients.step) for u in updates]

    def test_neighbours_that_get_the_same_are_one(self) -> None:
        decay = AdamWConfig().weight_decay
        assert self.parts(self.stepper()) == [(0, 41, decay, 1)]

    def test_options_part_them(self) -> None:
        decay = AdamWConfig().weight_decay
        expected = [(0, 12, decay, 1), (12, 16, 0.0, 1), (16, 36, decay, 1), (36, 41, 0.0, 1)]
        assert self.parts(self.stepper(is_split=True)) == expected

    def test_one_without_a_gradient_parts_them(self) -> None:
        decay = AdamWConfig().weight_decay
        assert self.parts(self.stepper(), [self.names[0], *self.names[2:]]) == [(0, 12, decay, 1), (16, 41, decay, 1)]

    def test_a_step_that_one_has_missed_parts_them(self) -> None:
        stepper, decay = self.stepper(), AdamWConfig().weight_decay
        stepper.count(self.names[2:])
        assert self.parts(stepper) == [(0, 16, decay, 1), (16, 41, decay, 2)]

    def test_a_rank_gets_its_part(self) -> None:
        """A group is divided among ranks after the optimizer is made."""
        stepper, decay = self.stepper(is_split=True), AdamWConfig().weight_decay
        self.group.spec = shard(self.group.spec, 1, 2, 10)
        assert self.parts(stepper) == [(0, 6, decay, 1), (6, 11, 0.0, 1)]  # from element 30 on
