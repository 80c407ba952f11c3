"""The delayed update equals a plain loop that is one step stale, wherever the state lives, resumed or not."""

from __future__ import annotations

import asyncio
import shutil
import threading
import traceback
from pathlib import Path

import pytest
import runs
import torch
from faults import EIO, FaultyBackend, each_fault

from tierstore.config import AdamWConfig, TierConfig
from tierstore.device.streams import Reached
from tierstore.errors import ConfigError, GraphError, StorageError
from tierstore.io.backend import Backend
from tierstore.store.gradients import Arrival
from tierstore.store.manifest import Captured, Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.pieces import Piece
from tierstore.store.weights import Weights
from tierstore.train.engine import Engine

STEPS = 5
CLIP = 0.5
SMALL = "1600KiB"  # for a model of one block, whose state and gradients are then on the disk


def stale_loop() -> list[float]:
    """Plain torch: each step applies the gradients of the step before, clipped by their own norm."""
    model = runs.tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, pending = [], None
    for batch in runs.tokens(STEPS):
        loss = runs.next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        arrived = [parameter.grad for parameter in model.parameters()]
        if pending is not None:
            for parameter, gradient in zip(model.parameters(), pending):
                parameter.grad = gradient
            optimizer.step()
        pending = arrived
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def delayed(
    directory: Path | None, cpu_memory: str, cuts: list[int], backend: Backend | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the engine, closed and resumed at the steps in `cuts`."""
    losses: list[float] = []
    batches = runs.tokens(STEPS)
    state: dict[str, torch.Tensor] = {}
    for stop in [*cuts, STEPS]:
        tiers = TierConfig(gpu_memory="2MiB", cpu_memory=cpu_memory, nvme=[directory] if directory else [])
        config = AdamWConfig(lr=1e-2, weight_decay=0.1)
        with Engine(
            runs.tiny(), tiers, config, update="delayed", max_grad_norm=CLIP, resume="auto", backend=backend
        ) as engine:
            for batch in batches[engine.step_count : stop]:
                loss = runs.next_token_loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            state = engine.state_dict()
    return losses, state


def test_delayed_is_one_step_stale(tmp_path: Path) -> None:
    expected = stale_loop()
    losses, _ = delayed(tmp_path / "store", "64MiB", [])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[2]


@pytest.fixture(scope="module")
def in_memory() -> tuple[list[float], dict[str, torch.Tensor]]:
    return delayed(None, "64MiB", [])


@pytest.mark.parametrize("cpu_memory", ["64MiB", "4MiB"])
@pytest.mark.parametrize("cuts", [[], [1, 4]])
def test_delayed_is_the_same_on_disk_and_after_a_resume(
    in_memory: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path, cpu_memory: str, cuts: list[int]
) -> None:
    losses, weights = in_memory
    again, stored = delayed(tmp_path / "store", cpu_memory, cuts)
    assert again == losses
    assert all(torch.equal(weights[name], stored[name]) for name in weights)


class SlowSync(Backend):
    """Weights become durable late: a spilled gradient that does not wait for them is written before."""

    def __init__(self) -> None:
        super().__init__()
        self.spilled = threading.Event()

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        if path.name.startswith("gradients"):
            self.spilled.set()
        return super()._call_pwrite(descriptor, view, offset, path)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        if path.name.startswith("weights.a"):
            self.spilled.clear()
            self.spilled.wait(0.2)
        super()._call_fdatasync(descriptor, path)


def test_a_generation_keeps_its_pending_gradients_until_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spilled gradients of the step after the next go to the same pack, while the commit may still be under way."""
    expected, _ = delayed(tmp_path / "whole", "5900KiB", [])
    copies: dict[int, Path] = {}
    publish = Manifests.publish

    async def publish_and_copy(self: Manifests, generation: Generation, noted: Captured | None = None) -> None:
        await publish(self, generation, noted)
        copies[generation.number] = tmp_path / f"killed{generation.number}"  # what SIGKILL would leave now
        shutil.copytree(self.directory, copies[generation.number], ignore=shutil.ignore_patterns("lock"))

    with monkeypatch.context() as patch:
        patch.setattr(Manifests, "publish", publish_and_copy)
        delayed(tmp_path / "slow", "5900KiB", [], SlowSync())
    assert len(copies) == STEPS + 1
    for number, copy in copies.items():
        assert delayed(copy, "5900KiB", [])[0] == expected[number:]


def test_only_pending_gradients_come_back(tmp_path: Path) -> None:
    """A group without a gradient in the step after a resume counts nothing in its norm."""

    def norms(name: str, cuts: list[int]) -> list[float | None]:
        found = []
        for stop in [*cuts, 6]:
            tiers = TierConfig(gpu_memory="2MiB", cpu_memory="64MiB", nvme=[tmp_path / name])
            with Engine(SkipsBlock(), tiers, update="delayed", max_grad_norm=CLIP, resume="auto") as engine:
                while engine.step_count < stop:
                    engine.backward(engine(torch.ones(2, 8), skips=engine.step_count in (2, 3)).pow(2).mean())
                    found.append(engine.step().grad_norm)
        return found

    assert norms("resumed", [3]) == norms("whole", [])


class SkipsBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for position, block in enumerate(self.blocks):
            if position != 1 or not skips:
                x = block(x)
        return x


def test_pending_gradients_are_not_lost_to_another_schedule(tmp_path: Path) -> None:
    tiers = TierConfig(gpu_memory="2MiB", cpu_memory="64MiB", nvme=[tmp_path / "store"])
    batch = runs.tokens(1)[0]

    def step(update: str, resume: str) -> int:
        with Engine(runs.tiny(), tiers, update=update, resume=resume) as engine:
            engine.backward(runs.next_token_loss(engine, batch))
            engine.step()
            return engine.step_count

    assert step("forward", "never") == 1
    assert step("delayed", "must") == 2  # its packs are made
    with pytest.raises(ConfigError, match=r"resume it with update='delayed', and call apply_pending\(\)"):
        step("forward", "must")
    assert step("delayed", "must") == 3


def engine_of(
    store: Path, update: str, cpu_memory: str = "64MiB", backend: Backend | None = None, resume: str = "auto"
) -> Engine:
    # Not all groups stay on the device: updates of those that have left it may still be on their way.
    tiers = TierConfig(gpu_memory="1200KiB", cpu_memory=cpu_memory, nvme=[store])
    model = runs.tiny(blocks=1 if cpu_memory == SMALL else 3)
    return Engine(
        model, tiers, AdamWConfig(lr=1e-2, weight_decay=0.1), update=update, max_grad_norm=CLIP, resume=resume,
        commit_every=2, backend=backend,
    )  # fmt: skip


def step_once(engine: Engine) -> None:
    engine.backward(runs.next_token_loss(engine, runs.tokens(5)[engine.step_count]))
    engine.step()


def three_steps(store: Path, cpu_memory: str) -> dict[str, torch.Tensor]:
    """Make a store that holds the gradients of its third step. Returns the weights after those are applied."""
    with engine_of(store, "delayed", cpu_memory) as engine:
        engine.apply_pending()  # there are none
        for _ in range(3):
            step_once(engine)
    ahead = store.with_name("ahead")
    shutil.copytree(store, ahead, ignore=shutil.ignore_patterns("lock"))
    with engine_of(ahead, "delayed", cpu_memory) as engine:
        step_once(engine)
        return engine.state_dict()


@pytest.mark.parametrize("cpu_memory", ["64MiB", "4MiB"])
def test_pending_gradients_are_applied_without_a_step(tmp_path: Path, cpu_memory: str) -> None:
    """As the next step would apply them; then the store opens with any schedule, and delayed can also go on."""
    store = tmp_path / "store"
    expected = three_steps(store, cpu_memory)
    with engine_of(store, "delayed", cpu_memory) as engine:
        engine.apply_pending()
        assert engine.step_count == 3
        applied = engine.state_dict()
        step_once(engine)
        runs.next_token_loss(engine, runs.tokens(1)[0])
        with pytest.raises(ConfigError, match=r"apply_pending\(\) would change weights in the middle of a step"):
            engine.apply_pending()
        engine.backward(runs.next_token_loss(engine, runs.tokens(5)[4]))
        engine.step()
        engine.apply_pending()
        after = engine.state_dict()
    assert all(torch.equal(applied[name], expected[name]) for name in expected)
    with engine_of(store, "forward", cpu_memory) as engine:
        assert engine.step_count == 5
        resumed = engine.state_dict()
        engine.backward(runs.next_token_loss(engine, runs.tokens(1)[0]))
        engine.step()
    assert all(torch.equal(resumed[name], after[name]) for name in after)


def test_pending_gradients_are_not_lost_while_they_are_applied(tmp_path: Path) -> None:
    store, broken = tmp_path / "store", tmp_path / "broken"
    expected = three_steps(store, SMALL)
    failed = 0

    def apply(backend: Backend | None) -> dict[str, torch.Tensor]:
        with engine_of(broken, "delayed", SMALL, backend) as engine:
            engine.apply_pending()
            return engine.state_dict()

    def scenario(backend: FaultyBackend) -> None:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(store, broken, ignore=shutil.ignore_patterns("lock"))
        apply(backend)

    for backend in each_fault(EIO, scenario, kinds=("pwrite", "fdatasync", "fsync", "replace")):
        try:
            scenario(backend)
        except StorageError:
            failed += 1
        applied = apply(None)
        assert all(torch.equal(applied[name], expected[name]) for name in expected)
    assert failed


class CountsManifests(Backend):
    """Notes how many generations there are whenever something is written."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self.store, self.seen = store, list[int]()

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        self.seen.append(len(list(self.store.glob("manifest-*.json"))))
        return super()._call_pwrite(descriptor, view, offset, path)


def test_going_back_to_pending_gradients_and_from_what_holds_none(tmp_path: Path) -> None:
    store = tmp_path / "store"
    expected = three_steps(store, "64MiB")
    with engine_of(store, "delayed") as engine:
        engine.apply_pending()
    backend = CountsManifests(store)
    with engine_of(store, "delayed", resume="previous", backend=backend) as engine:  # it still holds them
        engine.apply_pending()
        applied = engine.state_dict()
    assert backend.seen[0] == 1, "written while the newer generation was there"
    assert all(torch.equal(applied[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="call apply_pending"):
        engine_of(store, "forward", resume="previous")
    with engine_of(store, "delayed") as engine:
        assert (engine.step_count, len(list(store.glob("gradients*")))) == (3, 4)
        engine.load_state_dict(engine.state_dict())  # another generation without pending gradients
    with engine_of(store, "forward", resume="previous") as engine:
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
        assert len(list(store.glob("gradients*"))) == 4  # the newer generation might need them
        for _ in range(2):
            engine.load_state_dict(engine.state_dict())
    assert not list(store.glob("gradients*"))  # both remaining generations are of this run


def test_gradients_that_another_schedule_spills_are_not_those_of_the_generation_before(tmp_path: Path) -> None:
    store = tmp_path / "store"
    expected = three_steps(store, "2MiB")
    with engine_of(store, "delayed", "2MiB") as engine:
        engine.apply_pending()
    with engine_of(store, "forward", "2MiB") as engine:
        assert any(engine._parts.store.gradients[0].is_spilled(index) for index in range(3))
        assert list(store.glob("spilled*"))
    assert not list(store.glob("spilled*"))
    with engine_of(store, "delayed", "2MiB", resume="previous") as engine:
        engine.apply_pending()
        assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())


def is_for_device() -> bool:
    """Whether this is called by the job that copies a chunk to the device."""
    copying = f"{Weights._copy_in.__qualname__}."
    return any(frame.f_code.co_qualname.startswith(copying) for frame, _ in traceback.walk_stack(None))


class SlowLoad(Backend):
    """One read of weights for the device returns late: after the next write of its chunk, unless that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_armed = False
        self.held: int | None = None
        self.written = threading.Event()

    def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        moved = super()._call_pread(descriptor, view, offset, path)
        if self.is_armed and path.name.startswith("weights") and is_for_device():
            self.is_armed, self.held = False, offset
            self.written.wait(0.2)
        return moved

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        moved = super()._call_pwrite(descriptor, view, offset, path)
        if offset == self.held and path.name.startswith("weights"):
            self.written.set()
        return moved


def test_weights_on_their_way_are_not_those_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "VOCABULARY", 512)  # so that the embedding is a group as large as others
    gpu, cpu = runs.smallest_budgets(runs.tiny(tied=False), nvme=["unused"], update="delayed")
    tiers = TierConfig(gpu_memory=gpu + 760_000, cpu_memory=cpu + 500_000, nvme=[tmp_path / "store"])
    backend, plain = SlowLoad(), runs.tiny(tied=False)
    first, second = runs.tokens(2)
    with Engine(runs.tiny(tied=False), tiers, AdamWConfig(lr=1e-2), update="delayed", backend=backend) as engine:
        engine.fix_prefetch_depth(2)
        engine.backward(runs.next_token_loss(engine, first))
        engine.step()
        for name in ("norm", "blocks.2"):
            with engine.gathered(name):
                pass
        backend.is_armed = True
        with engine.gathered("embedding"):  # what a forward needs next is fetched, too
            pass
        engine.apply_pending()
        with torch.no_grad():
            found = runs.next_token_loss(engine, second).item()
        plain.load_state_dict(engine.state_dict())
    assert backend.held is not None
    assert found == pytest.approx(runs.next_token_loss(plain, second).item(), rel=1e-5)


def test_pending_gradients_and_what_is_in_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes in progress are not overwritten, older graphs are refused, and a failed commit is told again."""
    with engine_of(tmp_path / "store", "delayed") as engine:
        step_once(engine)
        for modify in (False, True):
            with (
                engine.gathered("norm", modify=modify),
                pytest.raises(ConfigError, match=r"in use by gathered\(\); call apply_pending\(\) after it"),
            ):
                engine.apply_pending()
        with engine.gathered("norm"):
            loss = engine.model.get_parameter("norm.weight").square().sum()
        engine.apply_pending()
        with engine.gathered("norm"), pytest.raises(GraphError):
            loss.backward()
        step_once(engine)
        engine.flush()  # its own commit does not fail
        with monkeypatch.context() as patch:
            patch.setattr(Manifests, "publish", failing_publish)
            for _ in range(2):
                with pytest.raises(StorageError, match="not today"):
                    engine.apply_pending()
        with pytest.raises(StorageError, match="not today"):
            engine.close()


async def failing_publish(self: Manifests, generation: Generation, noted: Captured | None = None) -> None:
    raise StorageError("not today")


def test_pending_gradients_stay_until_the_commit_that_names_them_is_published(tmp_path: Path) -> None:
    tiers = TierConfig(gpu_memory="2MiB", cpu_memory="5900KiB", nvme=[tmp_path / "store"])
    with Engine(runs.tiny(), tiers, AdamWConfig(), update="delayed") as engine:
        parts = engine._parts
        gradients = parts.store.gradients[0]
        group = next(index for index, _ in enumerate(parts.store.groups) if gradients.is_spilled(index))

        async def spilled_meanwhile() -> int:
            published = asyncio.Event()

            async def commit() -> None:
                await published.wait()

            gradients.kept_by = asyncio.create_task(commit())
            pieces = [Piece(0, torch.ones(parts.store.groups[group].elements), True)]
            accepting = asyncio.ensure_future(gradients.accept([Arrival(group, pieces, Reached(), is_final=True)]))
            for _ in range(5):  # turns of the loop, in which it begins and waits
                await asyncio.sleep(0)
            taken_bytes = gradients.memory.staging.used_bytes
            published.set()
            await accepting
            gradients.drop_all()
            return taken_bytes

        assert parts.runtime.call(spilled_meanwhile) == 0
