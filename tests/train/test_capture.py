"""What a generation holds beside weights and moments."""

from __future__ import annotations

import copy
import operator
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import resuming
import torch
from resuming import State, Way, open_run, opened
from runs import next_token_loss
from torch import nn

from tierstore.errors import ConfigError, FormatError
from tierstore.pack import tree
from tierstore.train import capture
from tierstore.train.capture import load_module_state, module_state, plain, with_tensors

WAY = Way()

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


class Holder:
    """A state that is changed in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"array": np.zeros(3), "tensor": torch.zeros(3), "list": [0], "pair": (1, 2.5)}

    def count(self) -> None:
        self.state["array"] += 1
        self.state["tensor"] += 1
        self.state["list"][0] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def test_what_is_captured_is_a_copy() -> None:
    holder = Holder()
    captured = plain(holder.state_dict())
    holder.count()
    found = with_tensors(captured)
    assert not found["array"].any()
    assert not found["tensor"].any()
    assert found["list"] == [0]
    assert found["pair"] == (1, 2.5)


def test_dictionaries_come_back_as_what_they_were() -> None:
    state = {"seen": Counter(a=2), "order": OrderedDict(b=torch.ones(2), a=1), "made": defaultdict(list, a=[1])}
    found = with_tensors(tree.decode(*tree.encode(plain(state))))
    assert {name: type(value) for name, value in found.items()} == {"seen": Counter, "order": OrderedDict, "made": dict}
    assert found["seen"]["b"] == 0
    assert list(found["order"]) == ["b", "a"]
    assert torch.equal(found["order"]["b"], torch.ones(2))


def nested(depth: int) -> dict[Any, Any]:
    state: dict[Any, Any] = {}
    for _ in range(depth):
        state = {0: state}
    return state


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Path("a"), "cannot store PosixPath"),
        (Point(1), "cannot store Point"),
        (torch.eye(2).to_sparse(), "cannot store a tensor of torch.float32, torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "cannot store an array of complex128"),
    ],
    ids=["path", "namedtuple", "sparse", "complex"],
)
def test_what_cannot_be_stored_is_said_by_the_step_that_meets_it(value: Any, said: str, tmp_path: Path) -> None:
    holder = Holder()
    with opened(WAY, tmp_path, registered={"mine": holder}) as run:
        run.step()
        holder.state["list"] = [1, {"deep": value}]
        with pytest.raises(ConfigError, match=rf"state\.registered\.mine\.list\[1\]\.deep(\.data)?: {said}"):
            run.step()
        holder.state["list"] = [2]
        run.step()
    with opened(WAY, tmp_path, registered={"mine": holder}) as run:
        assert run.engine.step_count == 3


def test_another_global_generator_of_numpy_is_refused_before_anything_changes(tmp_path: Path) -> None:
    usual, said = np.random.get_bit_generator(), "numpy's global random generator is PCG64, whose state a store does"
    with opened(WAY, tmp_path) as run:
        run.until(1)
        run.engine.backward(next_token_loss(run.engine, run.position.next()))
        np.random.set_bit_generator(np.random.PCG64(1))
        try:
            with pytest.raises(ConfigError, match=said):
                run.engine.step()
            with pytest.raises(ConfigError, match=said):
                open_run(WAY, tmp_path / "new")
            assert not (tmp_path / "new").exists()
        finally:
            np.random.set_bit_generator(usual)
        run.engine.step()
        expected = State.of(run)
    with opened(WAY, tmp_path) as run:
        expected.check_equal(State.of(run))


def test_what_cannot_be_stored_is_not_registered(tmp_path: Path) -> None:
    holder = Holder()
    holder.state["list"] = [1, {"deep": Path("a")}]
    with opened(WAY, tmp_path) as run:
        with pytest.raises(ConfigError, match=r"registered\.mine\.list\[1\]\.deep: cannot store PosixPath"):
            run.engine.register("mine", holder)
        run.step()
        run.engine.register("mine", Holder())
        run.step()
    with opened(WAY, tmp_path / "other", durability="none") as run:  # where nothing is stored any state will do
        run.engine.register("mine", holder)
        run.step()


def test_a_schedule_that_cannot_be_stored_costs_no_weights(tmp_path: Path) -> None:
    class WarmUp(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.factor = lambda step: min(1.0, (step + 1) / 10)
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            return [rate * self.factor(self.last_epoch) for rate in self.base_lrs]

    model = WAY.model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"scheduler\.factor: cannot store function"):
        open_run(WAY, tmp_path, model=model, lr_scheduler=WarmUp)
    assert not (tmp_path / "store0").exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with opened(WAY, tmp_path, model=model, lr_scheduler=WarmUp, durability="none") as run:
        run.step()


def test_a_state_as_deep_as_can_be_comes_back_and_a_deeper_one_is_refused(tmp_path: Path) -> None:
    holder = Holder()
    with opened(WAY, tmp_path, registered={"mine": holder}) as run:
        holder.state = nested(61)
        with pytest.raises(ConfigError, match="nested deeper than 64"):
            run.step()
        holder.state = {}
        holder.state["itself"] = holder.state
        with pytest.raises(ConfigError, match="does it contain itself"):
            run.step()
        holder.state = nested(60)
        run.step()
    again = Holder()
    with opened(WAY, tmp_path, registered={"mine": again}):
        assert again.state == nested(60)


def test_a_set_is_copied() -> None:
    state = {"seen": {1, 2}}
    captured = plain(state)
    state["seen"].add(3)
    assert captured == {"seen": {1, 2}}


class Growing(nn.Module):
    """A buffer that changes its size, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 2, dtype=torch.bfloat16))
        self.calls: list[str] = []

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        self.calls = list(state["calls"])


def test_modules_come_back_as_they_were() -> None:
    model, other = nn.Sequential(Growing(), nn.BatchNorm1d(2)), nn.Sequential(Growing(), nn.BatchNorm1d(2))
    model[0].queue, model[0].calls = torch.ones(3, 2, dtype=torch.bfloat16), ["a"]
    model[1].num_batches_tracked += 5
    queue = other[0].queue
    load_module_state(other, plain(module_state(model)))
    assert other[0].queue is queue
    assert torch.equal(queue, model[0].queue)
    assert other[0].calls == ["a"]
    assert other[1].num_batches_tracked == 5
    values = plain(module_state(model))
    del values["0._extra_state"]  # as in an older store
    load_module_state(other, values)
    with pytest.raises(FormatError, match=r"'0\.queue' is only in the store; a buffer that was added or removed"):
        load_module_state(other[1:], values)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    ],
)  # fmt: skip
def test_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.5], [-2.0, float("inf")]]).to(dtype)
    found = with_tensors(plain({"nested": [tensor]}))["nested"][0]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))  # the infinity may be a NaN of 8 bits


def test_tensors_that_are_lazily_conjugate_or_negative_are_kept_as_they_read() -> None:
    mirror = torch.tensor([1 + 2j, -3j]).conj()
    assert (mirror.is_conj(), mirror.imag.is_neg()) == (True, True)
    found = with_tensors(plain({"mirror": mirror, "part": mirror.imag}))
    assert torch.equal(found["mirror"], torch.tensor([1 - 2j, 3j]))
    assert torch.equal(found["part"], torch.tensor([-2.0, 3.0]))


def test_registered_before_and_after_the_engine_was_made(tmp_path: Path) -> None:
    early, late = Holder(), Holder()
    with opened(WAY, tmp_path, registered={"early": early}) as run:
        run.engine.register("late", late)
        for _ in range(2):
            run.step()
            early.count()
            late.count()
    again, later = Holder(), Holder()
    with opened(WAY, tmp_path, registered={"early": again}) as run:
        assert again.state["list"] == [1]
        assert later.state["list"] == [0]
        run.engine.register("late", later)
        assert later.state["list"] == [1]
        assert later.state["tensor"].tolist() == [1, 1, 1]


def test_one_that_refuses_its_state_leaves_it_to_the_right_one(tmp_path: Path) -> None:
    class Other(Holder):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            raise ConfigError("this is the state of another one")

    first, late = Holder(), Holder()
    with opened(WAY, tmp_path, registered={"late": first}) as run:
        first.count()
        run.step()
    with opened(WAY, tmp_path, registered={}) as run:
        with pytest.raises(ConfigError, match="of another one"):
            run.engine.register("late", Other())
        run.engine.register("late", late)
        assert late.state["list"] == [1]


def test_registered_too_late(tmp_path: Path) -> None:
    """The object is not silently set back to an earlier step."""
    with opened(WAY, tmp_path, registered={"late": Holder()}) as run:
        run.until(2)
    late = Holder()
    with opened(WAY, tmp_path, registered={}) as run:
        with pytest.raises(UserWarning, match="'late'"):  # an error here (pyproject.toml), before anything is done
            run.step()
        run.engine.step()  # warned once: a run that turns warnings into errors can go on
        with pytest.raises(ConfigError, match=r"'late' is registered after step 3, .* state after step 2, from"):
            run.engine.register("late", late)
        run.engine.register("new", late)
    assert late.state["list"] == [0]


def test_what_one_run_does_not_register_the_next_one_still_finds(tmp_path: Path) -> None:
    first = Holder()
    with opened(WAY, tmp_path, registered={"data": first}) as run:
        first.count()
        run.step()
    with opened(WAY, tmp_path, registered={}, lr_scheduler=None) as run:
        rate = run.engine.optimizer.param_groups[0]["lr"]
        said = "without what was registered as 'data' and the learning-rate schedule .* stays as it was"
        with pytest.warns(UserWarning, match=said) as warned:
            run.step()
        assert warned[0].filename == resuming.__file__  # where the loop is
        run.step()  # once is enough
        assert run.engine.optimizer.param_groups[0]["lr"] == rate
    holder = Holder()
    with opened(WAY, tmp_path, registered={"data": holder}) as run:
        assert run.engine.step_count == 3
        assert holder.state["list"] == [1]
        run.step()
        assert run.engine.optimizer.param_groups[0]["lr"] == pytest.approx(rate * 0.9)  # not 0.9 of the first one's


def test_a_name_that_another_object_has(tmp_path: Path) -> None:
    first = Holder()
    with opened(WAY, tmp_path, registered={"data": first}) as run:
        with pytest.raises(ConfigError, match="another object is registered as 'data'"):
            run.engine.register("data", Holder())
        run.engine.register("data", first)
        first.count()
        run.step()
    holder = Holder()
    with opened(WAY, tmp_path, registered={"data": holder}):
        assert holder.state["list"] == [1]


@pytest.mark.parametrize("call", ["step", "train_step", "optimizer.step"])
def test_the_warning_names_the_line_that_calls_the_engine(call: str, tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.step()
    with opened(WAY, tmp_path, lr_scheduler=None) as run:
        arguments: list[Any] = [[run.position.next()], torch.sum] if call == "train_step" else []
        if not arguments:
            run.engine.backward(run.engine(run.position.next()).sum())
        with pytest.warns(UserWarning, match="stays as it was") as warned:
            operator.attrgetter(call)(run.engine)(*arguments)
    assert warned[0].filename == __file__


def test_a_resumed_run_on_another_gpu_draws_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on one that is beyond those that there were."""
    states, put_back = [torch.full((16,), number, dtype=torch.uint8) for number in range(2)], dict[int, int]()
    with opened(WAY, tmp_path) as run, monkeypatch.context() as patch:
        generations, device = run.engine._generations, run.engine._parts.device
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
        patch.setattr(torch.cuda, "set_rng_state_all", lambda _: None)
        patch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: put_back.update({gpu: int(state[0])}))
        patch.setattr(device, "torch_device", torch.device("cuda", 1))
        captured = generations._captured()
        for gpu in (0, 3):
            patch.setattr(device, "torch_device", torch.device("cuda", gpu))
            generations._restore(captured)
        del captured["random"]["gpu"]  # as a store of an older release
        patch.setattr(device, "torch_device", torch.device("cuda", 2))
        generations._restore(captured)
    assert put_back == {0: 1, 3: 1}


def test_states_of_more_gpus_than_there_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    states = capture.random_states() | {"cuda": [np.full(16, number, np.uint8) for number in range(3)]}
    put_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda all_: put_back.extend(int(one[0]) for one in all_))
    capture.restore_random_states(states)
    assert put_back == [0, 1]
