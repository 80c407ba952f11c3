"""Weights and names that a user changes or reads between steps."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import ENOSPC, FaultyBackend
from resuming import DISK, Way, opened
from runs import disk, tokens
from safetensors.torch import load_file
from torch import nn

from tierstore.errors import ClosedError, ConfigError, FormatError, GraphError, StorageError
from tierstore.train.engine import Engine

WAY = Way()
NAME, BIAS = "blocks.0.up.weight", "blocks.0.up.bias"

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def test_a_parameter_that_is_given_new_data_keeps_it_and_is_still_trained(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        parameter = run.engine.model.get_parameter(NAME)
        run.step()
        with run.engine.gathered([NAME], modify=True):
            parameter.data = torch.full_like(parameter, 0.5)
        assert run.engine.state_dict()[NAME].eq(0.5).all()
        run.step()
        after = run.engine.state_dict()[NAME]
        assert not after.eq(0.5).all()
        with run.engine.gathered([NAME]):
            assert torch.equal(parameter, after)


def test_a_parameter_that_is_swapped_keeps_the_way_to_its_weights(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
        parameter = run.engine.model.get_parameter(NAME)
        with run.engine.gathered([NAME], modify=True):
            torch.utils.swap_tensors(parameter, nn.Parameter(torch.full_like(parameter, 0.5)))
        assert run.engine.state_dict()[NAME].eq(0.5).all()
        run.step()
        assert not run.engine.state_dict()[NAME].eq(0.5).any()  # it is trained
        with pytest.raises(GraphError, match=f"{re.escape(NAME)} was read while it is not on the device"):
            parameter.sum()


def test_data_from_elsewhere_is_not_copied_before_it_is_taken_over(tmp_path: Path) -> None:
    """Else all of a model's new weights would lie in memory twice."""
    with opened(WAY, tmp_path) as run:
        groups = run.engine._parts.groups
        with run.engine.gathered([NAME], modify=True):
            parameter = run.engine.model.get_parameter(NAME)
            new = torch.full_like(parameter, 0.5)
            parameter.data = new
            (group,) = [one for one in groups.groups if any(own is parameter for own in one.parameters)]
            (found,) = group.displaced(groups.storages()).values()
            assert found.data_ptr() == new.data_ptr()


def _swap_in_a_block(layers: nn.Sequential) -> None:
    one, other = layers[0][0].weight, layers[0][2].weight
    one.data, other.data = other.data, one.data


def _swap_blocks(layers: nn.Sequential) -> None:
    one, other = layers[0][0].weight, layers[1][2].weight
    one.data, other.data = other.data, one.data


def _swap_through_numpy(layers: nn.Sequential) -> None:
    one, other = layers[0][0].weight, layers[1][2].weight
    arrays = one.detach().numpy(), other.detach().numpy()
    one.data, other.data = torch.from_numpy(arrays[1]), torch.from_numpy(arrays[0])


def _tie_values(layers: nn.Sequential) -> None:
    layers[0][0].weight.data = layers[0][2].weight.data


def _transpose(layers: nn.Sequential) -> None:
    layers[0][0].weight.data = layers[0][0].weight.data.t()


@pytest.mark.parametrize("change", [_swap_in_a_block, _swap_blocks, _swap_through_numpy, _tie_values, _transpose])
def test_a_parameter_may_be_given_data_of_the_model(change: Callable[[nn.Sequential], None], tmp_path: Path) -> None:
    """It lies in the memory of the weights already, at another place."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
        return nn.Sequential(*blocks)

    def steps(engine: Engine) -> list[float]:
        losses = []
        for _ in range(3):
            loss = engine(torch.ones(2, 8)).pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    changed = layers()
    with torch.no_grad():
        change(changed)
        expected_weights = {name: value.clone() for name, value in changed.state_dict().items()}
    model = layers()
    model.load_state_dict(expected_weights)
    with Engine(model, disk(tmp_path / "expected")) as engine:
        expected = steps(engine)
    with Engine(layers(), disk(tmp_path / "changed")) as engine:
        with pytest.raises(GraphError, match=r"was changed inside gathered\(\)"), engine.gathered(""):
            change(engine.model)
        with engine.gathered("", modify=True):
            change(engine.model)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, expected_weights[name]), name
        assert steps(engine) == expected


def test_data_of_the_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        parameter = run.engine.model.get_parameter(NAME)
        before, told = run.engine.state_dict()[NAME], rf"{re.escape(NAME)} was given data"
        with pytest.raises(ConfigError, match=told), run.engine.gathered("", modify=True):
            parameter.data = parameter.data[:4]
        with run.engine.gathered([NAME]):
            assert torch.equal(parameter, before)
        run.step()


def test_what_has_begun_a_step_is_told(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        state = run.engine.state_dict()
        with torch.no_grad():
            run.engine(tokens(1)[0])
        run.engine.load_state_dict(state)
        run.engine(tokens(1)[0])
        with pytest.raises(ConfigError, match=r"a step that a forward has begun \(one under .* or close the engine"):
            run.engine.load_state_dict(state)
        run.step()
        run.engine.load_state_dict(state)


def test_a_buffer_whose_elements_share_memory_can_be_loaded(tmp_path: Path) -> None:
    model = WAY.model()
    model.register_buffer("scale", torch.ones(1).expand(2))
    with opened(WAY, tmp_path, model=model) as run:
        state = run.engine.state_dict() | {"scale": torch.tensor([2.0, 3.0])}
        run.engine.load_state_dict(state)
        assert run.engine.state_dict()["scale"].tolist() == [2.0, 3.0]
        run.step()


@pytest.mark.parametrize("odd", [lambda t: t.to("meta"), lambda t: t.to_sparse(), lambda t: t.numpy()])
def test_what_cannot_be_loaded_changes_nothing(odd: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
        before = run.engine.state_dict()
        last = [name for name in before if name.startswith("blocks.") and before[name].dim() == 2][-1]
        with pytest.raises(FormatError, match=f"1 tensors do not fit the model: {re.escape(last)} "):
            run.engine.load_state_dict({name: value + 1 for name, value in before.items()} | {last: odd(before[last])})
        assert all(torch.equal(value, before[name]) for name, value in run.engine.state_dict().items())


@pytest.mark.parametrize("how", ["gathered", "load_state_dict"])
def test_weights_that_were_set_by_half_are_not_trained(how: str, tmp_path: Path) -> None:
    backend = FaultyBackend(ENOSPC, at=10**9, kinds=("pwrite",))
    with opened(Way(cpu_memory=DISK, blocks=4), tmp_path, backend) as run:
        run.until(1)
        run.engine.flush()
        before = run.engine.state_dict()
        backend.at = backend.counted + 1

        def change() -> None:
            if how == "load_state_dict":
                run.engine.load_state_dict({name: value + 1 for name, value in before.items()})
                return
            with run.engine.gathered("blocks.0", modify=True), torch.no_grad():
                for parameter in run.engine.model.get_submodule("blocks.0").parameters():
                    parameter.add_(1)

        with pytest.raises(StorageError):
            change()
        with pytest.raises(ClosedError, match="broken off"):
            run.step()
        with pytest.raises(ClosedError, match="broken off"):
            run.engine.load_state_dict(before)
        with pytest.raises(ClosedError, match="broken off"), run.engine.gathered("norm", modify=True):
            raise AssertionError("it was refused")
    with opened(Way(cpu_memory=DISK, blocks=4), tmp_path) as run:
        assert all(torch.equal(value, before[name]) for name, value in run.engine.state_dict().items())


def test_a_change_by_half_is_not_committed_by_the_block_around_it(tmp_path: Path) -> None:
    backend = FaultyBackend(ENOSPC, at=10**9, kinds=("pwrite",))
    with opened(Way(cpu_memory=DISK, blocks=4), tmp_path, backend) as run:
        run.until(1)
        run.engine.flush()
        before = run.engine.state_dict()

        def change() -> None:
            for parameter in run.engine.model.get_submodule("blocks.0").parameters():
                parameter.data.add_(1)
            backend.at = backend.counted + 1

        with (
            pytest.raises(ClosedError, match="broken off"),
            run.engine.gathered("norm", modify=True),
            contextlib.suppress(StorageError),
            run.engine.gathered("blocks.0", modify=True),
        ):
            change()
    with opened(Way(cpu_memory=DISK, blocks=4), tmp_path) as run:
        assert all(torch.equal(value, before[name]) for name, value in run.engine.state_dict().items())


@pytest.mark.parametrize("how", ["gathered", "load_state_dict"])
def test_a_change_is_committed_with_the_step_before_it(how: str, tmp_path: Path) -> None:
    with opened(Way(commit_every=5), tmp_path) as run:
        run.until(2)
        if how == "gathered":
            with run.engine.gathered([NAME], modify=True), torch.no_grad():
                run.engine.model.get_parameter(NAME).fill_(0.5)
        else:
            state = run.engine.state_dict()
            run.engine.load_state_dict(state | {NAME: torch.full_like(state[NAME], 0.5)})
        run.engine._parts.runtime.call(run.engine._parts.store.flush)  # publishes what is committed, and nothing more
        shutil.copytree(tmp_path, tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))
    with opened(WAY, tmp_path / "killed") as run:
        assert run.engine.step_count == 2
        assert run.engine.state_dict()[NAME].eq(0.5).all()


@pytest.mark.parametrize("new", [torch.zeros(3), torch.zeros(128, 32, dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_new_data_that_does_not_fit_is_refused(new: torch.Tensor, tmp_path: Path) -> None:
    """Nothing has changed, nor has the other parameter of the block, although a view is held."""
    with opened(WAY, tmp_path) as run:
        model = run.engine.model
        before, parameter, other = run.engine.state_dict(), model.get_parameter(NAME), model.get_parameter(BIAS)
        views = []

        def change() -> None:
            with run.engine.gathered([NAME], modify=True):
                views.append(parameter[0])
                other.data = torch.ones_like(other)
                parameter.data = new

        with pytest.raises(ConfigError, match=f"{NAME} was given data of {new.dtype} .* it is torch.float32 .128, 32."):
            change()
        with run.engine.gathered([NAME]):
            assert torch.equal(parameter, before[NAME])
            assert torch.equal(other, before[BIAS])
            assert torch.equal(views[0], before[NAME][0])
        assert all(torch.equal(weight, before[name]) for name, weight in run.engine.state_dict().items())
        run.until(2)
        assert not torch.equal(run.engine.state_dict()[NAME], before[NAME])


class Counted(nn.Linear):
    """A layer with a parameter that has no elements, and a state that no tensor holds."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.BatchNorm1d(4)
        self.calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def counted() -> nn.Sequential:
    """A model with one layer under two names."""
    layer = Counted()
    return nn.Sequential(layer, nn.Linear(4, 4), layer)


def test_a_state_dict_is_that_of_the_model(tmp_path: Path) -> None:
    model, other = counted(), counted()
    model[0].calls = 3
    with Engine(model, disk(tmp_path)) as engine:
        state = engine.state_dict()
        assert state.keys() == model.state_dict(keep_vars=True).keys()
        other.load_state_dict(state)
        assert other[0].calls == 3
        other[0].calls = 5
        engine.load_state_dict(other.state_dict())
        assert model[0].calls == 5
        with pytest.raises(FormatError, match=r"1 tensors do not fit the model: 0\.wieght is not in the model"):
            engine.load_state_dict({**state, "0.wieght": torch.zeros(4, 4)})
        engine.export(tmp_path)
    left_out = {name for name in state if name.startswith("2.") or name.endswith("_extra_state")}
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys() - left_out


@pytest.mark.parametrize("is_given", [True, False])
def test_a_change_of_what_is_only_read_is_told_and_lost_but_not_the_parameter(tmp_path: Path, is_given: bool) -> None:
    with opened(WAY, tmp_path) as run:
        parameter = run.engine.model.get_parameter(NAME)
        before = run.engine.state_dict()[NAME]

        def change() -> None:
            with run.engine.gathered([NAME]):
                if is_given:
                    parameter.data = torch.full_like(parameter, 0.5)
                else:
                    nn.init.zeros_(parameter)

        with pytest.raises(GraphError, match=rf"{re.escape(NAME)} was changed inside gathered\(\).*modify=True"):
            change()
        with run.engine.gathered([NAME]):
            assert torch.equal(parameter, before)
        run.step()
        with run.engine.gathered([NAME]):
            assert torch.equal(parameter, run.engine.state_dict()[NAME])


def test_a_change_inside_a_modifying_block_is_kept_whatever_is_read_inside_of_that(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        with run.engine.gathered([NAME], modify=True):
            nn.init.zeros_(run.engine.model.get_parameter(NAME))
            other = next(name for name, _ in run.engine.model.named_parameters() if not name.startswith("blocks.0"))
            with run.engine.gathered(other):
                run.engine.model.get_parameter(other).sum()
        assert run.engine.state_dict()[NAME].eq(0).all()


@pytest.mark.parametrize("is_outer", [True, False])
def test_in_blocks_inside_each_other_what_one_of_them_modifies_is_kept_and_nothing_else(
    tmp_path: Path, is_outer: bool
) -> None:
    with opened(WAY, tmp_path) as run:
        engine, weight = run.engine, run.engine.model.get_parameter(NAME)
        other = next(name for name, _ in engine.model.named_parameters() if not name.startswith("blocks.0"))
        with engine.gathered(NAME, modify=is_outer), engine.gathered(NAME, modify=not is_outer):
            nn.init.ones_(weight)
        assert engine.state_dict()[NAME].eq(1).all()
        with engine.gathered(NAME, modify=True):
            nn.init.zeros_(weight)

            def change() -> None:
                with engine.gathered(other):
                    nn.init.zeros_(engine.model.get_parameter(other))

            with pytest.raises(GraphError, match=f"{re.escape(other)} was changed inside gathered"):
                change()
        assert engine.state_dict()[NAME].eq(0).all()
        run.step()


def test_a_block_that_raises_changes_nothing_whatever_is_read_inside_of_it(tmp_path: Path) -> None:
    """Also where a view is held, so that the weights stay on the device."""
    with opened(WAY, tmp_path) as run:
        weight, view = run.engine.model.get_parameter(NAME), None
        before = run.engine.state_dict()[NAME]
        with contextlib.suppress(KeyError), run.engine.gathered(NAME, modify=True):
            view = weight.detach()
            nn.init.ones_(weight)
            with run.engine.gathered(NAME):
                weight.sum()
            raise KeyError
        assert view is not None
        assert torch.equal(view, before)


def test_a_block_inside_another_one_that_raises_undoes_nothing(tmp_path: Path) -> None:
    """The outer block keeps what it has changed."""
    with opened(WAY, tmp_path) as run:
        weight = run.engine.model.get_parameter(NAME)
        for modify in (False, True):
            with run.engine.gathered(NAME, modify=True):
                nn.init.constant_(weight, 3 + modify)
                with contextlib.suppress(KeyError), run.engine.gathered(NAME, modify=modify):
                    raise KeyError
            assert run.engine.state_dict()[NAME].eq(3 + modify).all()


def newcomer(model: nn.Module) -> None:
    up = model.get_submodule("blocks.0.up")
    up.weight = nn.Parameter(torch.zeros(up.weight.shape))  # type: ignore


def assigned(model: nn.Module) -> None:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict({name: torch.zeros(shape) for name, shape in shapes.items()}, assign=True, strict=False)


@pytest.mark.parametrize("change", [newcomer, assigned])
def test_what_came_into_the_model_later_is_refused_and_not_left_untrained(tmp_path: Path, change: object) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
        whole = run.engine.state_dict()
        parameters = dict(run.engine.model.named_parameters())
        change(run.engine.model)  # type: ignore[operator]
        with pytest.raises(GraphError, match=r"parameter \S+ came into the model after the engine was made"):
            run.step()
        with pytest.raises(GraphError, match="came into the model"), run.engine.gathered("", modify=True):
            pass
        with pytest.raises(GraphError, match="came into the model"), torch.no_grad():
            run.step()
        with pytest.raises(GraphError, match="came into the model"):
            run.engine.load_state_dict(whole)
        with pytest.raises(GraphError, match="came into the model"):  # it is not known which values are meant
            run.engine.state_dict()
        with pytest.raises(GraphError, match="came into the model"):
            run.engine.export(tmp_path / "exported")
        for name, parameter in parameters.items():
            owner, _, own = name.rpartition(".")
            run.engine.model.get_submodule(owner)._parameters[own] = parameter
        assert torch.equal(run.engine.state_dict()[NAME], whole[NAME])
        run.step()
        assert not torch.equal(run.engine.state_dict()[NAME], whole[NAME])


def test_a_module_that_is_kept_under_another_name_is_known_by_its_parameters(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
        before = run.engine.state_dict()[NAME]
        model = run.engine.model
        model.moved = model.blocks
        del model.blocks
        assert torch.equal(run.engine.state_dict()[NAME.replace("blocks", "moved")], before)


def test_nor_does_anything_come_between_micro_batches(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        batch = torch.zeros(1, 8, dtype=torch.int64)
        with run.engine.no_sync():
            run.engine.backward(run.engine(batch).mean())
        newcomer(run.engine.model)
        with pytest.raises(GraphError, match="came into the model"):
            run.engine(batch)


def test_a_write_out_of_place_is_told_how_it_is_kept(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        parameter = run.engine.model.get_parameter(NAME)
        told = rf"{re.escape(NAME)} was written .* `with engine.gathered\(\['{re.escape(NAME)}'\], modify=True\):`"
        with torch.no_grad():
            for write in (
                parameter.zero_, lambda: parameter.__setitem__(0, 1.0), lambda: parameter.__iadd__(1),
                lambda: setattr(parameter, "data", torch.zeros(2)),
            ):  # fmt: skip
                with pytest.raises(GraphError, match=told):
                    write()
        with pytest.raises(GraphError, match=rf"{re.escape(NAME)} was read .* engine.state_dict\(\)"):
            copy.deepcopy(parameter)
        with pytest.raises(GraphError, match=r"was read .* \(to write to its \.data, with modify=True\)"):
            parameter.data.zero_()


class Recurrent(nn.Module):
    """Flattens its weights in forward, as cuDNN's warning advises."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 4, 2), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cells.flatten_parameters()
        return self.head(self.cells(x)[0])  # type: ignore[no-any-return]


def test_recurrent_weights_stay_with_their_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.no_grad()
    def flatten(cells: nn.LSTM) -> None:
        """What it does on a GPU."""
        sizes = [weight.numel() for weight in cells._flat_weights]
        for weight, part in zip(cells._flat_weights, torch.empty(sum(sizes)).split(sizes)):
            weight.set_(part.view_as(weight).copy_(weight))

    model, x = Recurrent(), torch.ones(2, 3, 4)
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", flatten)
    with Engine(model, disk(tmp_path)) as engine:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        with engine.gathered(""):
            mine = copy.deepcopy(model)
        expected = engine.state_dict()
    mine.double()(x.double())
    assert all(torch.equal(value, expected[name]) for name, value in mine.float().state_dict().items())
    assert "flatten_parameters" not in vars(model.cells)


def test_a_method_of_the_model_may_read_what_is_gathered(tmp_path: Path) -> None:
    batch = torch.zeros(1, 4, dtype=torch.long)
    with opened(WAY, tmp_path) as run, torch.no_grad():
        model = run.engine.model.eval()

        def generate() -> torch.Tensor:
            return model(batch) + model.get_parameter(NAME).sum()

        for _ in range(2):
            with pytest.raises(GraphError, match=rf"was read .* `with engine.gathered\(\['{re.escape(NAME)}'\]\):`"):
                generate()
            with run.engine.gathered([NAME]):
                found = generate()
            assert torch.equal(found, run.engine(batch) + run.engine.state_dict()[NAME].sum())
            with torch.enable_grad():
                run.step()


def test_a_copy_of_the_model_is_a_model_of_its_own(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
        with run.engine.gathered(""):
            mine = copy.deepcopy(run.engine.model)
        weight = mine.get_parameter(NAME)
        mine(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight, run.engine.state_dict()[NAME])
        run.step()
