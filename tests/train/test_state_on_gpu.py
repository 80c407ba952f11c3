"""State that lives and is updated on the GPU tier: bit for bit as with everything in CPU memory, also over a store."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_must_work as must
import torch
from runs import Run, disk, tiny, tokens, train, train_plain, worst_difference
from test_exact import CLIP, batches, loss_of, model_of, reference, wrong_guesses
from torch import nn

from tierstore.config import AdamWConfig, Tier, TierConfig
from tierstore.device.arithmetic import HostArithmetic
from tierstore.device.transfers import CpuDevice
from tierstore.errors import BudgetError, ConfigError, GraphError, StorageError
from tierstore.plan.placement import Kind, Placement
from tierstore.train.engine import Engine
from tierstore.train.rounds import Speculation

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")

LONG_S, SHORT_S = 20.0, 0.1
ALL, SOME = 2**23, 2_600_000
"""Budgets with which all groups of the model in bf16 are updated on the GPU tier, and only some of them."""


def on_gpu(directory: Path | None, gpu_memory: int = ALL, **options: Any) -> TierConfig:
    options = {"gpu_memory": gpu_memory, "cpu_memory": "8MiB", "state_on_gpu": True, **options}
    return TierConfig(timeout_s=60.0, **options) if directory is None else disk(directory, **options)


def check_homes(placement: Placement, gpu_memory: int) -> None:
    homes = list(placement.gradient_home)
    assert homes.count(Tier.GPU) > 0
    assert (homes.count(Tier.GPU) == len(homes)) == (gpu_memory == ALL)


WAYS = [
    ("step", False, ALL), ("step", True, SOME), ("forward", True, ALL), ("forward", False, SOME),
    ("backward", False, ALL), ("backward", True, SOME), ("speculative", True, ALL), ("speculative", True, SOME),
]  # fmt: skip


@pytest.mark.parametrize(("update", "has_store", "gpu_memory"), WAYS)
def test_no_bit_changes(update: str, has_store: bool, gpu_memory: int, tmp_path: Path) -> None:
    clip = None if update == "backward" else CLIP
    seen: list[Placement] = []
    run = train(
        model_of("bf16"), batches(), on_gpu(tmp_path if has_store else None, gpu_memory), loss_of, update=update,
        max_grad_norm=clip, after=lambda engine, step: seen.append(engine.placement),
    )  # fmt: skip
    check_homes(seen[0], gpu_memory)
    run.check_equal(reference("bf16", clip))


@pytest.mark.parametrize(("dtype", "codec"), [("fp32", "none"), ("bf16", "lz4-bitshuffle")])
def test_nor_with_several_micro_batches(dtype: str, codec: str, tmp_path: Path) -> None:
    tiers = on_gpu(tmp_path, 2 * ALL, codec=codec)
    run = train(model_of(dtype), batches(4), tiers, loss_of, max_grad_norm=CLIP, accumulate=4)
    run.check_equal(reference(dtype, CLIP, 4))


@pytest.mark.parametrize("gpu_memory", [ALL, SOME])
def test_guesses_that_are_wrong_are_made_good_where_they_were_made(
    gpu_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that the GPU updates have waited for the norm; the updates of all others are redone."""
    redone = wrong_guesses(monkeypatch)
    monkeypatch.setattr(Speculation, "least", 0)
    tiers = on_gpu(tmp_path, gpu_memory)
    run = train(model_of("bf16"), batches(), tiers, loss_of, update="speculative", max_grad_norm=CLIP)
    run.check_equal(reference("bf16", CLIP))
    assert len(redone) == 1


def test_half_precision_and_skipped_steps(tmp_path: Path) -> None:
    """The loss scale is too large at first: steps are skipped, and the gradients collected in them are dropped."""
    runs = [
        train(tiny(torch.float16), tokens(5), tiers, loss_scale="dynamic", max_grad_norm=CLIP)
        for tiers in (on_gpu(tmp_path / "gpu"), disk(tmp_path / "cpu", gpu_memory="8MiB", cpu_memory="64MiB"))
    ]
    assert [report.skipped for report in runs[0].reports].count(True) > 0
    runs[0].check_equal(runs[1])


def test_gradients_stay_and_weights_come_back_once_a_step() -> None:
    moved: list[dict[str, int]] = []
    train(
        model_of("bf16"), batches(), on_gpu(None), loss_of, update="step",
        after=lambda engine, step: moved.append(dict(engine.statistics()["bytes"])),
    )  # fmt: skip
    weights = sum(parameter.nbytes for parameter in model_of("bf16").parameters())
    for before, after in itertools.pairwise(moved):
        assert after["h2d"] == before["h2d"]
        assert after["d2h"] - before["d2h"] == weights


def test_memory_is_that_of_the_placement() -> None:
    with Engine(model_of("bf16"), on_gpu(None)) as engine:
        rows = {(row.kind, row.tier): row.bytes for row in engine.placement.usage()}
        store = engine._parts.store
        all_gradients = sum(need.device_bytes for need in engine.placement.groups)
        passing = min(engine.placement.gpu_gradient_bytes, all_gradients)
        in_store = rows[Kind.STATE, Tier.GPU] + rows[Kind.GRADIENTS, Tier.GPU] - passing
        kept = store.on_gpu.nbytes - store.on_gpu.apart.nbytes()
        assert in_store - 2 * 4096 * len(engine.placement.groups) < kept <= in_store
        assert rows[Kind.WEIGHTS, Tier.GPU] == all_gradients + store.on_gpu.apart.nbytes()
        assert set(rows) == {(Kind.WEIGHTS, Tier.GPU), (Kind.WEIGHTS, Tier.CPU), (Kind.GRADIENTS, Tier.GPU),
                             (Kind.STATE, Tier.GPU)}  # fmt: skip
        assert engine.statistics()["peak_bytes"]["gpu"] >= store.on_gpu.nbytes


HOMES = {
    "gpu": {"state_on_gpu": True, "gpu_memory": ALL},
    "some": {"state_on_gpu": True, "gpu_memory": SOME},
    "cpu": {"gpu_memory": ALL},
}


def train_in_two_parts(first: TierConfig, second: TierConfig, update: str) -> Run:
    """Two engines after each other, over one store."""
    losses: list[float] = []
    for tiers, part, resume in ((first, slice(0, 3), "never"), (second, slice(3, None), "must")):
        run = train(model_of("bf16"), batches()[part], tiers, loss_of, max_grad_norm=CLIP, update=update,
                    resume=resume, seed=7 + len(losses))  # fmt: skip
        losses += run.losses
    return Run(losses, weights=run.weights)


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Run:
    tiers = disk(tmp_path_factory.mktemp("in_memory"), gpu_memory="8MiB", cpu_memory="64MiB")
    return train_in_two_parts(tiers, tiers, "step")


@pytest.mark.parametrize(("first", "second"), [("gpu", "cpu"), ("cpu", "gpu"), ("some", "gpu")])
def test_a_store_goes_on_with_state_at_another_home(first: str, second: str, in_memory: Run, tmp_path: Path) -> None:
    homes = [disk(tmp_path, cpu_memory="8MiB", **HOMES[home]) for home in (first, second)]
    train_in_two_parts(*homes, "forward").check_equal(in_memory)


def test_weights_changed_from_outside_are_updated_from_there(tmp_path: Path) -> None:
    """By gathered() and load_state_dict(); weights are also read within a step, which takes a group off the device."""

    def change(engine: Engine, step: int) -> None:
        with engine.gathered("blocks.0", modify=True), torch.no_grad():
            engine.model.get_parameter("blocks.0.up.weight").mul_(0.5)
        if step == 2:
            engine.load_state_dict({name: value * 0.75 for name, value in engine.state_dict().items()})

    def run(tiers: TierConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
        losses = []
        with Engine(model_of("bf16"), tiers, AdamWConfig(lr=1e-3), update="forward", max_grad_norm=CLIP) as engine:
            torch.manual_seed(7)
            for step, batch in enumerate(batches(), 1):
                loss = loss_of(engine, batch)
                engine.backward(loss)
                losses.append(loss.item())
                with engine.gathered("blocks.1"):
                    assert engine.model.get_parameter("blocks.1.up.weight").isfinite().all()
                gradient = engine.gradient("blocks.1.up.weight")
                assert gradient.isfinite().all()
                losses.append(gradient.double().square().sum().item())
                engine.step()
                change(engine, step)
            return losses, engine.state_dict()

    here, there = (run(tiers) for tiers in (on_gpu(tmp_path / "gpu"), disk(tmp_path / "cpu", gpu_memory="8MiB",
                                                                          cpu_memory="64MiB")))  # fmt: skip
    assert here[0] == there[0]
    assert all(torch.equal(here[1][name], there[1][name]) for name in here[1])


def test_an_update_that_fails_leaves_the_generation_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some chunks were updated in place by then: nobody may read them, and the store keeps its last generation."""
    calls: list[int] = []

    class Failing(HostArithmetic):
        def adam(self, *given: Any) -> None:
            calls.append(1)
            if len(calls) == 6:
                raise StorageError("the device is gone")
            super().adam(*given)

    with monkeypatch.context() as patch:
        patch.setattr("tierstore.device.transfers.HostArithmetic", Failing)
        with pytest.raises(StorageError, match="the device is gone"):
            train(model_of("bf16"), batches(), on_gpu(tmp_path), loss_of, update="step")
    with Engine(model_of("bf16"), on_gpu(tmp_path), resume="must") as engine:
        steps, weights = engine.step_count, engine.state_dict()
    assert 0 < steps < len(batches())
    expected = train(model_of("bf16"), batches()[:steps], on_gpu(None), loss_of, update="step").weights
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_what_a_device_cannot_do_is_refused_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    monkeypatch.setattr("tierstore.train.assembly.open_device", lambda *_: device)
    monkeypatch.setattr(HostArithmetic, "why_not", lambda *_: "Triton is not installed")
    with pytest.raises(ConfigError, match="state_on_gpu: state cannot be updated on cpu: Triton is not installed"):
        Engine(model_of("bf16"), on_gpu(None))
    # As on a GPU, when the user has not asked for state on it.
    for asked, told in ((None, "Triton is not installed"), (False, None)):
        tiers = TierConfig(device="cuda", gpu_memory="8MiB", cpu_memory="64MiB", state_on_gpu=asked)
        with Engine(model_of("bf16"), tiers) as engine:
            assert Tier.GPU not in engine.placement.gradient_home
            assert engine.statistics()["not_on_gpu"] == told
    tiers = TierConfig(device="cuda", gpu_memory="8MiB", cpu_memory="1500KiB")
    with pytest.raises(BudgetError, match=r"cpu_memory of .*; state cannot be updated on cuda: Triton is not"):
        Engine(model_of("bf16"), tiers)


def test_no_room_is_told_and_refused_to_who_asks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_memory has no room for the state of any group beside all weights"):
        Engine(model_of("bf16"), on_gpu(None, 800_000, cpu_memory="64MiB"))
    with pytest.raises(BudgetError, match="cpu_memory") as least:
        Engine(model_of("bf16"), on_gpu(tmp_path, cpu_memory=1))
    (smallest,) = re.findall(r"the smallest that fits is (\d+) B", str(least.value))
    with pytest.raises(ConfigError, match="cpu_memory has no room for the buffers of its transfers"):
        Engine(model_of("bf16"), on_gpu(tmp_path, cpu_memory=int(smallest)))


def test_who_asks_for_it_under_a_delayed_update_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be updated on cpu: update='delayed' keeps the gradients of two"):
        Engine(model_of("bf16"), on_gpu(None, cpu_memory="64MiB"), update="delayed")


class InParts(nn.Module):
    """Some parameters have no gradient in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor, used: bool) -> torch.Tensor:
        outputs = torch.tanh(self.always(inputs))
        return inputs + (outputs + self.sometimes(inputs) if used else outputs)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InParts() for _ in range(3))

    def forward(self, inputs: torch.Tensor, used: bool, depth: int = 3) -> torch.Tensor:
        for block in self.blocks[:depth]:
            inputs = block(inputs, used)
        return inputs


@contextlib.contextmanager
def engine_of_blocks(**options: Any) -> Iterator[tuple[Engine, Callable[[bool], float]]]:
    """An engine, and a function that makes a forward and a backward pass and returns the loss."""
    torch.manual_seed(0)
    tiers, inputs = on_gpu(None, cpu_memory="16MiB", update_threads=8, **options), torch.randn(4, 64)
    with Engine(Blocks(), tiers, AdamWConfig(lr=1e-2), update="forward", max_grad_norm=0.5) as engine:

        def one_pass(used: bool) -> float:
            loss = engine(inputs, used).square().mean() * 50
            engine.backward(loss)
            return loss.item()

        yield engine, one_pass


def test_the_next_gradient_may_come_before_new_weights_are_in_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never joins the gradients of the step before, whether it is the first of its step or added to others."""
    copy_out, may_go = CpuDevice.copy_out_ranges, threading.Event()

    def late(*given: Any) -> None:
        assert may_go.wait(LONG_S)
        copy_out(*given)

    def run(state_on_gpu: bool) -> list[float | None]:
        found: list[float | None] = []
        with engine_of_blocks(state_on_gpu=state_on_gpu) as (engine, one_pass):
            for _ in range(3):
                with engine.no_sync():
                    found.append(one_pass(used=False))
                may_go.set()
                found.append(one_pass(used=True))
                found.append(engine.gradient("blocks.1.always.weight").abs().sum().item())
                may_go.clear()
                found.append(engine.step().grad_norm)
            may_go.set()
        return found

    in_cpu_memory = run(False)
    monkeypatch.setattr(CpuDevice, "copy_out_ranges", late)
    assert run(True) == in_cpu_memory


def test_a_load_that_began_before_the_update_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups leave the device between backward and step(), and a forward that ends early fetches some of them again."""
    copy_in, copy_out, adam = CpuDevice.copy_in, CpuDevice.copy_out_ranges, HostArithmetic.adam
    is_updated, is_loaded = threading.Event(), threading.Event()
    loads = itertools.count()

    def late(*given: Any) -> None:
        if threading.current_thread().name.startswith("tierstore-io") and next(loads) > 0:  # a prefetch
            is_updated.wait(SHORT_S)  # in vain if the update waits for this load
        copy_in(*given)
        is_loaded.set()

    def noted(*given: Any) -> None:
        adam(*given)
        is_loaded.clear()
        is_updated.set()

    def after_loads(*given: Any) -> None:
        is_loaded.wait(SHORT_S)
        copy_out(*given)

    def run(state_on_gpu: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        nonlocal loads
        losses = []
        with engine_of_blocks(state_on_gpu=state_on_gpu, prefetch_depth=2) as (engine, one_pass):
            for _ in range(2):
                losses.append(one_pass(used=True))
                with engine.gathered(""):
                    pass
                is_updated.clear()
                loads = itertools.count()
                with torch.no_grad():
                    engine(torch.ones(4, 64), True, depth=1)
                engine.step()
                engine.flush()
            return losses, engine.state_dict()

    losses, weights = run(False)
    is_updated.set()
    monkeypatch.setattr(CpuDevice, "at_once_bytes", 0)  # by a worker, as on a GPU
    monkeypatch.setattr(CpuDevice, "copy_in", late)
    monkeypatch.setattr(CpuDevice, "copy_out_ranges", after_loads)
    monkeypatch.setattr(HostArithmetic, "adam", noted)
    found = run(True)
    assert found[0] == losses
    assert all(torch.equal(found[1][name], weights[name]) for name in weights)


def test_weights_that_somebody_has_a_view_of_are_set_where_they_are(tmp_path: Path) -> None:
    """The group cannot leave the device: loaded weights, and weights whose change is undone, appear there as well."""
    found = []
    for tiers in (on_gpu(None), TierConfig(gpu_memory="8MiB", cpu_memory="64MiB")):
        with Engine(model_of("bf16"), tiers, AdamWConfig(lr=1e-2), update="forward") as engine:
            name, losses = "blocks.0.up.weight", []
            with engine.gathered(name):
                view = engine.model.get_parameter(name).detach()
            engine.load_state_dict({key: value * 0.5 for key, value in engine.state_dict().items()})
            assert torch.equal(view.float(), engine.state_dict()[name].bfloat16().float())
            changing = engine.gathered(name)
            with pytest.raises(GraphError, match="was changed inside gathered"), changing, torch.no_grad():
                engine.model.get_parameter(name).zero_()
            assert torch.equal(view.float(), engine.state_dict()[name].bfloat16().float())
            with contextlib.suppress(KeyError), engine.gathered(name, modify=True), torch.no_grad():
                engine.model.get_parameter(name).zero_()
                raise KeyError
            assert torch.equal(view.float(), engine.state_dict()[name].bfloat16().float())
            for batch in batches()[:3]:
                loss = loss_of(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            del view
            found.append(losses)
    assert found[0] == found[1]


def test_what_is_taken_back_does_not_undo_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step inside of gathered(), whose new weights are on their way to CPU memory when the change is refused."""
    copy_out, name = CpuDevice.copy_out_ranges, "blocks.1.always.weight"

    def late(*given: Any) -> None:
        threading.Event().wait(SHORT_S)
        copy_out(*given)

    def run(state_on_gpu: bool) -> torch.Tensor:
        with engine_of_blocks(state_on_gpu=state_on_gpu) as (engine, one_pass):
            parts = engine._parts
            group = next(g for g in parts.groups.groups if name in [one.name for one in g.spec.parameters])
            with contextlib.suppress(GraphError), engine.gathered(name):
                one_pass(used=True)
                engine.step()
                parts.runtime.call(parts.store.updates.applied, group.index)
                engine.model.get_parameter(name).detach().mul_(1.0)
            return engine.state_dict()[name]

    in_cpu_memory = run(False)
    monkeypatch.setattr(CpuDevice, "copy_out_ranges", late)
    assert torch.equal(run(True), in_cpu_memory)


def test_close_gives_the_memory_back() -> None:
    engine = Engine(model_of("bf16"), on_gpu(None))
    assert engine._parts.store.on_gpu.nbytes > 0
    engine.close()
    assert engine._parts.store.on_gpu.nbytes == 0


class _Full(CpuDevice):
    """A GPU with room for `most` storages; `pinned` is the memory that is pinned now."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.room = most
        self.pinned: set[tuple[int, int]] = set()

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned.add((address, nbytes))

    def unpin(self, address: int, nbytes: int) -> None:
        self.pinned.remove((address, nbytes))

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.room -= 1
        if self.room < 0:
            raise BudgetError("the GPU has no room")
        super().allocate(storage, nbytes)


def test_memory_that_the_gpu_has_not_leaves_none_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Full(1)
    monkeypatch.setattr("tierstore.train.assembly.open_device", lambda *_: device)
    with pytest.raises(BudgetError, match="the GPU has no room"):
        Engine(model_of("bf16"), on_gpu(None))
    assert not device.pinned


@pytest.mark.parametrize(("kind", "way"), [one for one in must.LATE if one[0] not in must.IN_ONE_PIECE])
def test_models(kind: Any, way: tuple[str, float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that come twice, late, in part or not at all: the losses of plain torch."""
    monkeypatch.setattr(must, "WIDTH", 16)  # `zero_models.py` makes it larger
    update, clip = way
    expected = train_plain(must.make(kind), must.batches(must.STEPS), must.loss_of, max_grad_norm=clip)
    tiers = on_gpu(tmp_path)
    found = train(must.make(kind), must.batches(must.STEPS), tiers, must.loss_of, update=update, max_grad_norm=clip)
    assert worst_difference(found.losses, expected.losses) < 1e-5
    assert found.reports[-1].peak_bytes["gpu"] <= tiers.gpu_memory
    assert found.reports[-1].peak_bytes["cpu"] <= tiers.cpu_memory
