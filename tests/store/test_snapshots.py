"""Named snapshots: stores of their own, whole whatever happens meanwhile, and no harm to the store they come from."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import EIO, ENOSPC, FaultyBackend
from resuming import DISK, Run, State, Way, expected_states, opened
from runs import next_token_loss

from tierstore.errors import ConfigError, FormatError, StorageError, StorageFull
from tierstore.io.backend import Backend
from tierstore.io.watch import Watch
from tierstore.store import snapshots
from tierstore.store.lock import StoreLock
from tierstore.store.removal import look as look_at
from tierstore.store.removal import remove
from tierstore.train.report import StepReport

WAY = Way("forward", cpu_memory=DISK)
WAYS = {
    "disk": WAY,
    "memory": Way("speculative"),
    "striped": Way("step", directories=2),
    "codec": Way("forward", cpu_memory=DISK, codec="lz4"),
    "delayed": Way("delayed", cpu_memory=DISK),
    "backward": Way("backward", cpu_memory=DISK),
    "rarely committed": Way("forward", commit_every=2),
}

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread", "no_reflinks")
really_clone = Backend._call_clone


@pytest.fixture
def no_reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever these tests run, files are copied."""
    monkeypatch.setattr(Backend, "_call_clone", lambda *_: False)


class Sharing(Backend):
    """A file system with reflinks; here a clone is a copy at once."""

    def _call_clone(self, source: int, target: int, path: Path) -> bool:
        with open(source, "rb", closefd=False) as file:
            os.write(target, file.read())
        return True


class Holding(Backend):
    """Copies wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.may_copy = threading.Event()

    def _call_copy_range(self, source: int, target: int, nbytes: int, offset: int, path: Path) -> int:
        assert self.may_copy.wait(60)
        return super()._call_copy_range(source, target, nbytes, offset, path)


class Measuring(Backend):
    """Notes which files are made, and how large."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[tuple[Path, int]] = []

    def create(self, path: Path, size_bytes: int, holes: Any = ()) -> Any:
        self.created.append((path, size_bytes))
        return super().create(path, size_bytes, holes)


class Large:
    """State of the user's own that takes more than a chunk."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"large": torch.ones(2**18 + 1)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert state


def interrupt(run: Run, function: str, patch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C comes while the training thread waits for this function of the loop."""
    runtime = run.engine._parts.runtime
    ends = runtime._ends_within

    def waits(watch: Watch, call: Any) -> bool:
        if call.function.__name__ == function:
            raise KeyboardInterrupt
        return ends(watch, call)

    patch.setattr(runtime, "_ends_within", waits)


def state_in(way: Way, directories: Any, folder: Path, until: int | None = None) -> State:
    """The state that a run resumes from these directories, after more steps if `until` is given."""
    with opened(way, folder, resume="must", nvme=directories) as run:
        if until is not None:
            run.until(until)
        return State.of(run)


@pytest.mark.parametrize("name", WAYS)
def test_it_is_a_store_that_goes_on_from_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_COPIED_AT_ONCE", 1000)
    way = WAYS[name]
    expected = expected_states(way, tmp_path / "expected", 6)
    with opened(way, tmp_path) as run:
        run.until(3)
        directories = run.engine.snapshot("third")
        run.until(6)
        expected[6].check_equal(State.of(run))
        told = run.engine.statistics()["snapshots"]["third"]
    assert told["copied_bytes"] > 0
    assert told["seconds"] > 0
    expected[3].check_equal(state_in(way, directories, tmp_path))
    expected[6].check_equal(state_in(way, directories, tmp_path, until=6))
    expected[6].check_equal(state_in(way, way.tiers(tmp_path).nvme, tmp_path))  # the store of the run


def test_where_blocks_are_shared_nothing_is_copied(tmp_path: Path) -> None:
    with opened(WAY, tmp_path, backend=Sharing()) as run:
        run.until(2)
        expected = State.of(run)
        directories = run.engine.snapshot("second")
        run.until(4)
        told = run.engine.statistics()["snapshots"]["second"]
    assert (told["is_reflink"], told["copied_bytes"]) == (True, 0)
    expected.check_equal(state_in(WAY, directories, tmp_path))


def test_on_the_file_system_of_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reflinks, if the file system has them."""
    monkeypatch.setattr(Backend, "_call_clone", really_clone)
    with opened(WAY, tmp_path) as run:
        run.until(2)
        expected = State.of(run)
        directories = run.engine.snapshot("second")
        run.until(5)
        told = run.engine.statistics()["snapshots"]["second"]
    assert told["is_reflink"] == (told["copied_bytes"] == 0)
    expected.check_equal(state_in(WAY, directories, tmp_path))


@pytest.mark.parametrize("interrupts", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_a_generation_is_not_overwritten_while_it_is_copied(
    name: str, interrupts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step does not wait; the step after that waits for the copy, also if an earlier wait was interrupted."""
    way, backend = WAYS[name], Holding()
    end = 2 + way.commit_every
    with opened(way, tmp_path, backend=backend) as run:
        run.until(2)
        expected = State.of(run)
        directories = run.engine.snapshot("second")
        commits, waits = run.engine._parts.store.commits, []
        moves = commits.snapshot_moves

        async def noted() -> bool:
            waits.append(run.engine.step_count)
            backend.may_copy.set()
            return await moves()

        if interrupts:
            with monkeypatch.context() as patch:
                interrupt(run, "snapshot_moves", patch)
                with pytest.raises(KeyboardInterrupt):
                    run.engine.flush()
        monkeypatch.setattr(commits, "snapshot_moves", noted)
        run.until(end)
        assert waits == []
        run.until(end + 3)
        assert waits[0] == end
        told = run.engine.statistics()["snapshots"]["second"]
        assert told["waited_s"] > 0
        assert told["failure"] is None
    expected.check_equal(state_in(way, directories, tmp_path))


def test_blocks_that_change_weights_do_not_overwrite_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner block commits into the other slot; the outer block would write the first slot again."""
    backend = Holding()
    with opened(WAY, tmp_path, backend=backend) as run:
        run.until(2)
        expected, commits = State.of(run), run.engine._parts.store.commits
        moves = commits.snapshot_moves

        async def noted() -> bool:
            backend.may_copy.set()
            return await moves()

        monkeypatch.setattr(commits, "snapshot_moves", noted)
        weight = run.engine.model.get_parameter("embedding.weight")
        with run.engine.gathered("embedding.weight", modify=True):
            with run.engine.gathered("embedding.weight", modify=True), torch.no_grad():
                directories = run.engine.snapshot("second")
                weight += 1
            with torch.no_grad():
                weight += 1
    expected.check_equal(state_in(WAY, directories, tmp_path))
    with opened(WAY, tmp_path, resume="previous") as run:  # what the inner block has committed
        found = run.engine.state_dict()["embedding.weight"]
        assert torch.equal(found, expected.weights["embedding.weight"] + 1)


def test_how_long_a_step_waited_is_in_its_report(tmp_path: Path) -> None:
    reports: list[StepReport] = []
    with opened(WAY, tmp_path) as run:
        run.engine.on_step(reports.append)
        run.until(2)
        run.engine.snapshot("second")
        run.until(5)
    assert ["snapshot" in report.seconds for report in reports] == [False, False, False, True, False]
    assert 0 < reports[3].seconds["snapshot"] < reports[3].seconds["total"]


def test_one_that_cannot_be_copied_ends_no_training(tmp_path: Path) -> None:
    backend = FaultyBackend(ENOSPC, kinds=("copy",))
    with opened(WAY, tmp_path, backend=backend) as run:
        run.until(2)
        run.engine.snapshot("second")
        run.until(3)
        with pytest.raises(StorageFull, match=r"copy of .* at offset 0 of .*safetensors"):
            run.step()
        assert not (tmp_path / "store0" / "snapshots").exists()
        told = run.engine.statistics()["snapshots"]["second"]
        assert "No space left" in told["failure"]
        run.until(5)
        directories, expected = run.engine.snapshot("second"), State.of(run)
    expected.check_equal(state_in(WAY, directories, tmp_path))


def test_where_nothing_overlaps_it_is_there_or_has_failed_when_the_call_returns(tmp_path: Path) -> None:
    with opened(WAY, tmp_path, backend=FaultyBackend(ENOSPC, kinds=("copy",)), overlap=False) as run:
        run.until(2)
        with pytest.raises(StorageFull, match=r"copy of .* at offset 0 of .*safetensors"):
            run.engine.snapshot("second")
        directories, expected = run.engine.snapshot("second"), State.of(run)
        state_in(WAY, directories, tmp_path / "now")
        run.until(5)
    expected.check_equal(state_in(WAY, directories, tmp_path / "later"))


def test_one_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(2)
        with monkeypatch.context() as patch:
            interrupt(run, "snapshot", patch)
            with pytest.raises(KeyboardInterrupt):
                run.engine.snapshot("second")
        run.until(3)
        directories, expected = run.engine.snapshot("second"), State.of(run)
    expected.check_equal(state_in(WAY, directories, tmp_path))


def test_only_what_is_committed_is_kept(tmp_path: Path) -> None:
    """Otherwise it would be of an earlier step than the caller thinks."""
    told: list[str] = []

    def keep(report: StepReport) -> None:
        with pytest.raises(ConfigError, match=r"snapshot\(\) would be of step \d, which is committed") as refusal:
            run.engine.snapshot("inside")
        told.append(str(refusal.value))

    with opened(WAYS["rarely committed"], tmp_path) as run:
        run.until(2)
        run.engine.snapshot("second")
        run.engine.on_step(keep)
        run.until(4)
    assert told
    with opened(Way("backward", commit_every=2), tmp_path / "backward") as run:
        run.until(3)
        run.engine.backward(next_token_loss(run.engine, run.position.next()))
        with pytest.raises(ConfigError, match="would be of step 2, which is committed, and not of step 3"):
            run.engine.snapshot("third")


def test_it_takes_the_room_of_one_generation(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(2)
        (kept,) = run.engine.snapshot("second")
        run.engine.flush()
        own, whole = (sum(p.stat().st_blocks for p in where.glob("*.[ab].*")) for where in (kept, kept.parents[1]))
    assert own < 0.6 * whole


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        directories = run.engine.snapshot("first")
        run.engine.flush()
        run.until(1)
        with pytest.raises(ConfigError, match=r"there is a snapshot 'first' already, in .*/store0/snapshots/first; "):
            run.engine.snapshot("first")
        for name in ("", "..", "a/b", ".hidden", "x" * 101, None):
            with pytest.raises(ConfigError, match="a snapshot is named by up to 100 letters"):
                run.engine.snapshot(name)  # type: ignore[arg-type]
        assert sorted(os.listdir(tmp_path / "store0" / "snapshots")) == ["first"]
        assert remove(directories)
        assert not (tmp_path / "store0" / "snapshots").exists()
        run.engine.snapshot("first")


def test_one_of_a_store_that_had_its_directories_in_another_order_stays(tmp_path: Path) -> None:
    """All directories of the snapshot are there, but none has the place in the order that it had."""
    directories = [tmp_path / "store0", tmp_path / "store1"]
    with opened(WAY, tmp_path, nvme=directories) as run:
        run.until(2)
        expected = State.of(run)
        kept = run.engine.snapshot("second")
    remove(directories)
    with opened(WAY, tmp_path, nvme=directories[::-1], resume="never", backend=(backend := FaultyBackend(None))) as run:
        run.until(1)
        run.engine.flush()
        before = backend.counted
        with pytest.raises(ConfigError, match="of a store, but it, the first directory given, holds none"):
            run.engine.snapshot("second")
        for at in range(backend.counted - before):
            backend.fault, backend.at, backend.counted = EIO, at, 0
            with pytest.raises((ConfigError, StorageError)):
                run.engine.snapshot("second")
        backend.fault = None
    expected.check_equal(state_in(WAY, kept, tmp_path))


def test_it_leaves_room_for_the_next_commit(tmp_path: Path) -> None:
    """The next commit writes the captured state and the manifest as new files."""
    backend = Measuring()
    with opened(WAY, tmp_path, backend=backend, registered={"large": Large()}) as run:
        run.until(1)
        run.engine.flush()
        captured = (tmp_path / "store0" / "captured-000000000001.safetensors").stat().st_size
        backend.created = []
        [kept] = run.engine.snapshot("first")
        run.engine.flush()
    sizes = {path.name: size for path, size in backend.created if path.parent == kept}
    assert sizes["captured-000000000001.safetensors"] == captured > 2**20
    assert sizes["manifest-000000000001.json.tmp"] > captured


def test_a_run_in_one_has_all_its_room_when_it_is_opened(tmp_path: Path) -> None:
    """A generation's chunks are in two slots: the file of each slot has holes where the other one has the chunk."""

    def model() -> torch.nn.Module:
        made = WAY.model()
        made.get_submodule("embedding").requires_grad_(False)
        return made

    def lacking() -> int:
        return max(path.stat().st_size - path.stat().st_blocks * 512 for path in kept[0].glob("*.[ab].*"))

    with opened(WAY, tmp_path, model=model()) as run:
        run.until(1)
        kept = run.engine.snapshot("first")
    frozen_bytes = 2 * 4096  # which need no second slot
    assert lacking() > frozen_bytes
    with opened(WAY, tmp_path, model=model(), nvme=kept, resume="must"):
        assert lacking() == frozen_bytes


def test_directories_of_that_name_are_told_apart(tmp_path: Path) -> None:
    """A file of that name is no part of a store, and a user's directory of that name is not removed with a store."""
    (tmp_path / "store0").mkdir()
    (tmp_path / "store0" / "snapshots").write_bytes(b"")
    with pytest.raises(ConfigError, match="it holds 'snapshots'"), opened(WAY, tmp_path):
        pass
    (tmp_path / "store0" / "snapshots").unlink()
    own = tmp_path / "snapshots" / "run"
    with opened(WAY, tmp_path, nvme=[own]) as run:
        run.until(1)
    remove([own])
    assert list((tmp_path / "snapshots").iterdir()) == []
    with opened(WAY, tmp_path) as run:
        run.engine.snapshot("first")
    (look,) = look_at([tmp_path / "store0"])
    assert look.others == ("snapshots",)
    remove([tmp_path / "store0" / "snapshots" / "first"])
    remove([tmp_path / "store0"])
    assert not (tmp_path / "store0").exists()


@pytest.mark.parametrize("changes", [{"nvme": ()}, {"durability": "none"}], ids=str)
def test_there_must_be_generations(changes: dict[str, Any], tmp_path: Path) -> None:
    with opened(Way(), tmp_path, resume="never", **changes) as run:
        run.until(1)
        with pytest.raises(ConfigError, match=r"snapshot\(\) needs a store that keeps generations"):
            run.engine.snapshot("first")


def test_a_full_disk_is_told_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    class Full(Backend):
        def _call_allocate(self, descriptor: int, offset: int, size_bytes: int, path: Path) -> None:
            if "snapshots" in path.parts:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super()._call_allocate(descriptor, offset, size_bytes, path)

    with opened(WAY, tmp_path, backend=Full()) as run:
        run.until(2)
        with pytest.raises(StorageFull, match="snapshots/second/"):
            run.engine.snapshot("second")
        assert not (tmp_path / "store0" / "snapshots").exists()
        run.until(4)


def test_a_fault_at_any_call_harms_neither_the_run_nor_the_next_attempt(tmp_path: Path) -> None:
    backend = FaultyBackend()
    failed = 0
    with opened(WAY, tmp_path, backend=backend) as run:
        run.until(2)
        for call in range(1000):
            run.engine.flush()
            expected = State.of(run)
            backend.fault, backend.at = EIO, backend.counted + call
            try:
                directories = run.engine.snapshot("this")
                run.engine.flush()
            except StorageError:
                failed += 1
            else:
                if backend.counted <= backend.at:
                    break
            finally:
                backend.fault = None
            folder = tmp_path / "store0" / "snapshots" / "this"
            if list(folder.glob("manifest-*.json")):  # it failed after that
                expected.check_equal(state_in(WAY, [folder], tmp_path))
                remove([folder])
            else:
                with pytest.raises((ConfigError, FormatError)):
                    state_in(WAY, [folder], tmp_path)
            run.step()
    assert failed > 30
    expected.check_equal(state_in(WAY, directories, tmp_path))


def test_what_a_kill_has_left_goes_with_the_next_one(tmp_path: Path) -> None:
    names = ("first", "earlier", "in-use", "whole")
    first, earlier, in_use, whole = left = [tmp_path / "store0" / "snapshots" / name for name in names]
    with opened(WAY, tmp_path) as run:
        for folder in left:
            folder.mkdir(parents=True)
            for name in ("unfinished", "lock", "weights.a.safetensors", "state.b.safetensors"):
                (folder / name).write_bytes(b"half")
        (whole / "manifest-000000000001.json").touch()
        (whole.parent / "notes.txt").touch()
        run.until(1)
        expected = State.of(run)
        lock = StoreLock([in_use])
        assert run.engine.snapshot("first") == (first,)
        lock.release()
    expected.check_equal(state_in(WAY, [first], tmp_path))
    assert not earlier.exists()
    assert all((folder / "state.b.safetensors").exists() for folder in (in_use, whole))


def test_whole_ones_are_not_looked_at_when_another_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at them would take longer with each snapshot."""
    looked: list[Any] = []
    monkeypatch.setattr(snapshots, "remove", lambda directories, *_, **__: looked.append(directories))
    with opened(WAY, tmp_path) as run:
        for name in ("first", "second", "third"):
            run.step()
            run.engine.snapshot(name)
    assert not looked


def test_a_store_may_begin_anew_beside_the_snapshots_of_one_that_was_removed(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(2)
        expected = State.of(run)
        directories = run.engine.snapshot("second")
    remove([tmp_path / "store0"])
    with opened(WAY, tmp_path, resume="never") as run:
        run.until(1)
    expected.check_equal(state_in(WAY, directories, tmp_path))
