"""Models that `deferred` has built, and changes of them before they have an engine."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import (
    BudgetError,
    CheckpointWarning,
    ClosedError,
    ConfigError,
    FormatError,
    MachineWarning,
    StorageError,
)
from tierstore.train.engine import Engine
from tierstore.train.filling import Piece, Source
from tierstore.train.materialize import deferred

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")

MIB = 2**20
TIERS = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB")
INPUT = torch.linspace(-1, 1, 24).view(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.leave = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        result: torch.Tensor = self.leave(x)
        return result


def engine_of(model: nn.Module, source: Source | None, **budgets: object) -> Engine:
    tiers = TIERS.model_copy(update=budgets)
    return Engine(model, tiers, AdamWConfig(lr=0.1), max_grad_norm=None, initialize=source)


def losses(model: nn.Module, source: Source | None) -> list[float]:
    with engine_of(model, source) as engine:
        found = []
        for _ in range(3):
            loss = engine(INPUT).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        return found


# --- memory that is shared ------------------------------------------------------------------------------------------


class TiedByData(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight.data = self.enter.weight.data


class TiedByParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = nn.Parameter(self.enter.weight.t())


class Overlapping(Net):
    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(120)
        self.enter.weight = nn.Parameter(flat[:64].view(8, 8))
        self.blocks[2].weight = nn.Parameter(flat[56:].view(8, 8))


def _leaked() -> torch.Tensor:
    """A tensor of functorch, which has no storage."""
    seen: list[torch.Tensor] = []
    torch.vmap(lambda x: seen.append(x) or x)(torch.ones(2, 3))
    return seen[0]


class KeepsViews(Net):
    """Attributes hold views of weights (stale, or made anew), parameters themselves, or memory of no parameter."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        weight = self.enter.weight
        self.cells = nn.LSTM(4, 4)  # has a list of its parameters
        self.weights: object = {
            "same": [weight], "transposed": weight.t(), "rows": [weight.data[0], weight[1]],
            "deep": {"a": ({"b": weight.detach()},)}, "ordered": OrderedDict(a=weight.t()),
            "copy": weight.detach().clone(), "sparse": weight.data.to_sparse(), "neighbour": None,
            "anew": weight.t(), "by a hook": weight.t(),
            "leaked": _leaked(), "empty": [nn.UninitializedBuffer()],
        }[kept]  # fmt: skip
        self.kept = kept
        if kept == "neighbour":
            used, self.weights = torch.randn(2, 8, 8).unbind()
            self.enter.weight = nn.Parameter(used)
        if kept == "by a hook":
            self.register_forward_pre_hook(lambda *_: self.make_anew())

    def make_anew(self) -> None:
        self.weights = self.enter.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept == "anew":
            self.make_anew()
        return super().forward(x)


@pytest.mark.parametrize("kept", ["transposed", "rows", "deep", "ordered"])
def test_a_view_of_a_weight_that_an_attribute_holds_is_told_once(kept: str) -> None:
    with engine_of(KeepsViews(kept), None) as engine:
        others = r" \(and 1 more views\)" if kept == "rows" else ""
        told = rf"weights holds a view of parameter enter\.weight that was made before the engine{others}, and keeps"
        with pytest.warns(UserWarning, match=told):
            engine(torch.ones(2, 8))
        engine(torch.ones(2, 8))


def test_one_of_a_frozen_weight_is_told_where_its_values_came_from_a_store(tmp_path: Path) -> None:
    for resume in ("never", "must"):
        model = KeepsViews("transposed")
        model.enter.requires_grad_(False)
        with Engine(model, TIERS.model_copy(update={"nvme": [tmp_path]}), AdamWConfig(), resume=resume) as engine:
            is_told = resume == "must"
            with pytest.warns(UserWarning, match="weights holds a view") if is_told else contextlib.nullcontext():
                engine(torch.ones(2, 8))


@pytest.mark.parametrize("kept", ["same", "copy", "sparse", "neighbour", "anew", "by a hook", "leaked", "empty"])
def test_what_follows_or_holds_no_weight_is_not(kept: str) -> None:
    torch.manual_seed(0)
    model = KeepsViews(kept)
    model(torch.ones(2, 8))
    with engine_of(model, None) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().sum())
            engine.step()


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_views_that_old_hooks_make_anew_are_not() -> None:
    cells = nn.utils.spectral_norm(nn.LSTM(8, 8), "weight_hh_l0")
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), cells)
    model.never_called = nn.utils.spectral_norm(nn.Linear(8, 8))
    model.forward = lambda x: cells(model[0](x))  # type: ignore[method-assign]
    with engine_of(model, None) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8))[0].square().sum())
            engine.step()


@pytest.mark.parametrize("build", [TiedByData, TiedByParameter, Overlapping])
def test_parameters_in_the_same_memory_are_refused_as_in_an_ordinary_model(build: Callable[[], nn.Module]) -> None:
    said = r"parameter (enter|blocks.2).weight and parameter (blocks.2|enter).weight lie in the same memory"
    with pytest.raises(ConfigError, match=said):
        deferred(build)
    with pytest.raises(ConfigError, match=said):
        engine_of(build(), None)


def test_neighbours_in_one_memory_are_fine() -> None:
    def build() -> nn.Module:
        model, flat = Net(), torch.randn(128)
        model.enter.weight = nn.Parameter(flat[:64].view(8, 8))
        model.blocks[2].weight = nn.Parameter(flat[64:].view(8, 8))
        return model

    torch.manual_seed(3)
    expected = losses(build(), None)
    torch.manual_seed(3)
    assert losses(*deferred(build)) == expected


def test_memory_that_is_kept_past_the_parameter_is_told() -> None:
    class Keeps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.at_first = self.leave.weight.detach()

    with pytest.warns(UserWarning, match=r"holds memory of parameter 'leave.weight' .*: there it is zero") as told:
        deferred(Keeps)
    assert [warning.filename for warning in told] == [__file__]


class HeldElsewhere(Net):
    """Its parameters are also held outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = (self.enter.weight, self.blocks[1].bias)
        self.project: Callable[..., torch.Tensor] = lambda x, weight=self.leave.weight: x @ weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(super().forward(x) @ self.leave.weight + x @ self.pair[0] + self.pair[1])


def test_who_holds_a_parameter_elsewhere_trains_it() -> None:
    torch.manual_seed(3)
    expected = losses(HeldElsewhere(), None)
    torch.manual_seed(3)
    assert losses(*deferred(HeldElsewhere)) == expected


# --- what is changed before there is an engine ----------------------------------------------------------------------


def assigned(model: nn.Module) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)


def zeroed(model: nn.Module) -> None:
    nn.init.zeros_(model.enter.weight)


def replaced(model: nn.Module) -> None:
    model.leave = nn.Linear(4, 8, bias=False)


def reordered(model: nn.Module) -> None:
    model.blocks = nn.ModuleList([model.blocks[0], model.blocks[2]])


LATE = {
    assigned: "enter.weight holds values",
    zeroed: "enter.weight was changed after deferred",
    replaced: "leave.weight holds values",
    reordered: "blocks.1.weight was blocks.2.weight when deferred",
}


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("change", LATE)
def test_a_change_that_the_source_would_undo_is_refused(
    change: Callable[[nn.Module], None], has_checkpoint: bool, tmp_path: Path
) -> None:
    if has_checkpoint:
        save_file(Net().state_dict(), tmp_path / "model.safetensors")
    model, source = deferred(Net, checkpoint=tmp_path if has_checkpoint else None)
    change(model)
    with pytest.raises(ConfigError, match=f"parameter {LATE[change]}.* in the function that deferred"):
        engine_of(model, source)


def test_what_loses_nothing_is_allowed() -> None:
    model, source = deferred(Net)
    model.requires_grad_(False).to(torch.bfloat16).to(torch.float32)
    del model.blocks[2]
    model.leave.requires_grad_(True)
    assert losses(model, source)[0] > 0


def test_an_engine_that_could_not_be_made_leaves_the_model_to_another_one() -> None:
    torch.manual_seed(3)
    expected = losses(Net(), None)
    torch.manual_seed(3)
    model, source = deferred(Net)
    with pytest.raises(BudgetError):
        engine_of(model, source, cpu_memory=1)
    assert losses(model, source) == expected


def test_a_model_of_which_no_engine_could_be_made_has_no_values_to_train() -> None:
    """Also where a parameter has one element."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    torch.manual_seed(3)
    expected = losses(build(), None)
    torch.manual_seed(3)
    model, source = deferred(build)
    for _ in range(2):
        with pytest.raises(BudgetError):
            engine_of(model, source, cpu_memory=1)
    assert losses(model, source) == expected


def halves(model: nn.Module) -> None:
    model.bfloat16().float()


def copies(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("build", [Net, lambda: nn.LSTM(4, 3)])
@pytest.mark.parametrize("change", [None, halves, copies])
def test_a_model_of_which_no_engine_could_be_made_is_as_it_was(
    change: Callable[[nn.Module], None] | None, build: Callable[[], nn.Module]
) -> None:
    """Whether the options were wrong or the model."""
    model, source = deferred(build)
    before, name = dict(model.named_parameters()), next(iter(dict(model.named_parameters())))
    handle = list(before.values())[-1].register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match="has a hook, and no values yet"):
        engine_of(model, source)
    handle.remove()
    with pytest.raises(BudgetError):
        engine_of(model, source, cpu_memory=1)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter and parameter.is_meta for name, parameter in before.items())
    if change is not None:
        change(model)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"parameter {re.escape(name)} holds no values"):
            engine_of(model, None)


def test_weak_references_change_nothing_but_those_that_are_made_meanwhile() -> None:
    """Where torch cannot swap a parameter, modules get a new one and back. A swap that cannot be undone is told."""
    torch.manual_seed(3)
    expected = losses(Net(), None)
    torch.manual_seed(3)
    model, source = deferred(Net)
    before = list(model.parameters())
    kept = [weakref.ref(parameter) for parameter in before]

    def refused(optimizer: torch.optim.Optimizer) -> object:
        kept.extend(weakref.ref(parameter) for group in optimizer.param_groups for parameter in group["params"])
        return 3

    def make() -> None:
        with pytest.raises(ConfigError, match="lr_scheduler"):
            Engine(model, TIERS, initialize=source, lr_scheduler=refused)

    make()
    assert all(one is other and one.is_meta for one, other in zip(model.parameters(), before, strict=True))
    assert losses(model, source) == expected
    model, source = deferred(Net)
    make()
    with pytest.raises(ConfigError, match="belongs to another engine"):
        engine_of(model, source)


def test_a_parameter_without_elements_needs_no_source() -> None:
    class All:
        def names(self) -> set[str]:
            return {"weight"}

        def stream(self) -> Iterator[Piece]:
            yield Piece("weight", 0, torch.ones(6))

    model = nn.Linear(2, 3, bias=False, device="meta")
    model.none = nn.Parameter(torch.empty(0, 4, device="meta"))
    with engine_of(model, All()) as engine:
        assert engine.state_dict()["weight"].sum() == 6


def test_a_change_after_an_engine_that_could_not_be_made_is_refused() -> None:
    model, source = deferred(Net)
    with pytest.raises(BudgetError):
        engine_of(model, source, cpu_memory=1)
    nn.init.zeros_(model.leave.weight)
    with pytest.raises(ConfigError, match=r"parameter leave.weight was changed after deferred\(\)"):
        engine_of(model, source)


def test_a_hook_without_values_is_refused() -> None:
    model, source = deferred(Net)
    model.leave.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ConfigError, match=r"parameter leave.weight has a hook, and no values yet"):
        engine_of(model, source)


def test_attributes_of_parameters_stay() -> None:
    def build() -> nn.Module:
        model = Net()
        model.leave.weight.no_decay = True
        return model

    model, source = deferred(build)
    with engine_of(model, source):
        assert model.leave.weight.no_decay


class Adapted(nn.Module):
    """LoRA, added to an existing layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


def with_adapters(model: nn.Module) -> nn.Module:
    """Adapters are added beside the layers of the blocks, so that existing names stay."""
    model.requires_grad_(False)
    torch.manual_seed(7)
    for block in model.blocks:
        block.adapter = Adapted(nn.Linear(8, 8, bias=False))
        block.register_forward_hook(lambda block, given, output: output + block.adapter(given[0]))
    return model


def test_what_is_added_later_keeps_its_own_values(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = losses(with_adapters(Net()), None)
    torch.manual_seed(3)
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    model, source = deferred(Net, checkpoint=tmp_path)
    assert losses(with_adapters(model), source) == expected
    assert expected[2] < expected[0]


# --- what a checkpoint lacks ----------------------------------------------------------------------------------------


class WithHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(super().forward(x)) * self.scale
        return result


def test_what_a_checkpoint_lacks_is_as_the_model_is_built_if_that_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(1)
    stored = Net().state_dict()
    save_file(stored, tmp_path / "model.safetensors")
    torch.manual_seed(3)
    ordinary = WithHead()
    ordinary.load_state_dict(stored, strict=False)
    after = torch.get_rng_state()
    expected = losses(ordinary, None)
    torch.manual_seed(3)
    with pytest.warns(CheckpointWarning, match="lacks 'head.weight', 'head.bias', 'scale': as the model is built"):
        assert losses(*deferred(WithHead, checkpoint=tmp_path, missing="build")) == expected
    assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(FormatError, match=r"3 tensors: head.weight: missing, \[2, 4\] in the model; head.bias"):
        engine_of(*deferred(WithHead, checkpoint=tmp_path))
    with pytest.raises(FormatError, match="does not fit the model"):
        engine_of(*deferred(lambda: nn.Linear(3, 3), checkpoint=tmp_path, missing="build"))
    with pytest.raises(ConfigError, match="missing must be one of refuse, build, not 'some'"):
        deferred(WithHead, checkpoint=tmp_path, missing="some")  # type: ignore[arg-type]


# --- the generator --------------------------------------------------------------------------------------------------


@pytest.fixture
def state_of_before() -> Iterator[torch.Tensor]:
    before = torch.get_rng_state()
    yield before
    torch.set_rng_state(before)


@pytest.mark.usefixtures("state_of_before")
def test_a_seed_that_is_set_meanwhile_stays_and_is_told() -> None:
    torch.manual_seed(3)
    expected = losses(Net(), None)
    torch.manual_seed(3)
    model, source = deferred(Net)
    torch.manual_seed(4)
    seeded = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"default generator was used or seeded between deferred\(\)") as told:
        assert losses(model, source) == expected
    assert [warning.filename for warning in told] == [__file__]
    assert torch.equal(torch.get_rng_state(), seeded)
    torch.manual_seed(5)
    seeded = torch.get_rng_state()
    list(source.stream())  # once more, as for another engine
    assert torch.equal(torch.get_rng_state(), seeded)


def test_a_model_of_which_no_engine_could_be_made_says_so() -> None:
    class Gone:
        def names(self) -> set[str]:
            return {name for name, _ in Net().named_parameters()}

        def stream(self) -> Iterator[Piece]:
            yield Piece("leave.weight", 0, torch.zeros(3))
            raise StorageError("the disk is gone")

    model = Net()
    with pytest.raises(StorageError, match="the disk is gone"):
        engine_of(model, Gone())
    with pytest.raises(ClosedError, match="given its weights to an engine that could not be made: build it anew"):
        model.leave.weight.sum()
    built, source = deferred(Net)
    with pytest.raises(StorageError, match="the disk is gone"):
        engine_of(built, Gone())
    for taken in (model, built):
        for given in (None, source):
            with pytest.raises(ConfigError, match="belongs to another engine"):
                engine_of(taken, given)


def test_a_function_that_returns_no_module_is_told() -> None:
    with pytest.raises(ConfigError, match=r"a function that returns a torch.nn.Module, not None"):
        deferred(lambda: None)  # type: ignore[arg-type, return-value]


def test_a_model_without_values_gives_no_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning counts what a run takes beyond the memory that its model gives back."""

    def build() -> nn.Module:
        return nn.Linear(1024, 4096, bias=False)

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40, available=0))
    wanted = []
    halves = nn.Linear(1024, 2048, bias=False)
    halves.weight, halves.other = (nn.Parameter(half) for half in torch.zeros(4096, 1024).chunk(2))
    for model, source in ((build(), None), deferred(build), (halves, None)):
        budgets = {"cpu_memory": 256 * MIB, "gpu_memory": 64 * MIB}
        with pytest.warns(MachineWarning, match="will be taken") as told, engine_of(model, source, **budgets):
            wanted.append(int(str(told[0].message).partition(" MiB")[0]))
    assert [number - wanted[0] for number in wanted] == [0, 16, 0]


def test_a_model_that_a_store_fills_gives_no_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its weights until the store is open: those in it may be damaged."""
    tiers = TierConfig(cpu_memory=256 * MIB, gpu_memory=64 * MIB, nvme=[tmp_path / "store"])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**40, available=0))
    wanted = []
    for resume in ("never", "must"):
        with (
            pytest.warns(MachineWarning, match="will be taken") as told,
            Engine(nn.Linear(1024, 4096, bias=False), tiers, resume=resume),
        ):
            wanted.append(int(str(told[0].message).partition(" MiB")[0]))
    assert wanted[1] - wanted[0] == 16
