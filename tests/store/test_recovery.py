"""Opening a store: what it was, what is damaged, who uses it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from ranks import fork_server
from resuming import DISK, Run, State, Way, check_resumes, expected_states, hold, open_run, opened
from runs import next_token_loss, tiny, tokens

from tierstore.config import Tier
from tierstore.errors import (
    ChecksumMismatch,
    ClosedError,
    ConfigError,
    FormatError,
    StorageError,
    StoreLocked,
    TierstoreError,
)
from tierstore.io.backend import Backend
from tierstore.store.manifest import digest, read_generation, read_manifest
from tierstore.store.slots import SlotPack
from tierstore.store.verification import committed_chunks

STEPS = 4
WAY = Way("forward", cpu_memory=DISK, width=96)  # two chunks in a block
STRIPED = replace(WAY, cpu_memory="64MiB", directories=2)

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    return expected_states(WAY, tmp_path_factory.mktemp("expected"), STEPS)


@pytest.fixture(scope="module")
def closed_after_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    with opened(WAY, folder) as run:
        run.until(3)
    return folder


@pytest.fixture
def folder(closed_after_3: Path, tmp_path: Path) -> Path:
    """A store that was closed after step 3."""
    shutil.copytree(closed_after_3, tmp_path / "copy")
    return tmp_path / "copy"


def damage(path: Path, offset: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ bit]))


def refuse(way: Way, folder: Path, kind: type[TierstoreError], **changes: Any) -> str:
    """The message of the error that opening the engine raises; nothing changes on the disk."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(kind) as refusal, opened(way, folder, **changes):
        pass
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    print(refusal.value)  # for the reader of `pytest -s`
    return str(refusal.value)


@pytest.mark.parametrize(
    ("update", "way_of_setting"),
    [
        ("step", "gathered"), ("forward", "gathered"), ("speculative", "gathered"), ("delayed", "gathered"),
        ("forward", "load_state_dict"),
    ],
)  # fmt: skip
def test_what_is_set_after_a_step_whose_commit_an_error_prevented_is_what_is_committed(
    tmp_path: Path, update: str, way_of_setting: str
) -> None:
    """An update keeps digests of chunks in CPU memory for the commit, but here the chunks change before it writes."""
    errors: list[Exception] = []

    def told(report: Any) -> None:
        if errors:
            raise errors.pop()

    way = Way(update)
    with opened(way, tmp_path) as run:
        run.engine.on_step(told)
        run.until(3)
        errors.append(OSError("the disk of the log is full"))
        with pytest.raises(OSError, match="the log is full"):
            run.step()
        if way_of_setting == "gathered":
            for name, parameter in run.engine.model.named_parameters():
                with run.engine.gathered([name], modify=True), torch.no_grad():
                    parameter += 0.25
        else:
            run.engine.load_state_dict({name: value + 1 for name, value in run.engine.state_dict().items()})
        left = State.of(run)
    with opened(way, tmp_path, resume="must") as run:
        assert run.engine.step_count == 4
        left.check_equal(State.of(run))
        run.until(6)


@pytest.mark.parametrize("kind", [OSError, StopIteration, asyncio.CancelledError, concurrent.futures.CancelledError])
def test_what_fails_before_a_commit_leaves_the_generation_before_it(kind: type[BaseException], tmp_path: Path) -> None:
    """Also an error that a future cannot carry as it is: a bare `next()` of a log, or work that was cancelled."""
    way = Way("forward")
    calls: list[int] = []

    def sync() -> None:
        calls.append(run.engine.step_count)
        if len(calls) == 2:
            raise kind("the disk of the log is full")

    run = open_run(way, tmp_path, commit_every=2)
    run.engine.flush()
    run.engine.before_commit(sync)
    run.until(2)
    run.engine.flush()
    assert calls == [2]
    kept = State.of(run)
    run.until(4)
    with pytest.raises(OSError if kind is OSError else RuntimeError, match="the log is full") as caught:
        run.engine.close()
    assert kind in (type(caught.value), type(caught.value.__cause__))
    with opened(way, tmp_path, resume="must") as run:
        kept.check_equal(State.of(run))
        run.until(6)


def test_what_a_skipped_step_has_undone_in_memory_is_what_is_committed(tmp_path: Path) -> None:
    """A speculative update has left its digests, but the skipped step restores the state of the step before."""
    way = Way("speculative", dtype=torch.float16)
    with opened(way, tmp_path, max_grad_norm=1e9) as run:
        run.until(12)
        before = State.of(run)
        loss = next_token_loss(run.engine, run.position.next())
        assert run.engine._parts.driver.is_speculating
        run.engine.backward(loss * float("inf"))
        assert run.engine.step().skipped
        run.engine.flush()
        left = State.of(run)
        assert all(torch.equal(left.weights[name], weight) for name, weight in before.weights.items())
    with opened(way, tmp_path, resume="must", max_grad_norm=1e9) as run:
        left.check_equal(State.of(run))
        run.until(14)


def as_of_version_1(store: Path) -> int:
    """Turn the manifests of a store into those of a release that knew no leaves; the number of their checksums."""
    changed = 0
    for path in store.glob("manifest-*.json"):
        body = json.loads(path.read_bytes().rpartition(b"\n")[0])
        _, chunks = committed_chunks([store], body["generation"])
        rows = [row for kind in body["records"] for row in body["records"][kind] if row is not None]
        assert len(rows) == len(chunks)
        for row, chunk in zip(rows, chunks):
            with chunk.path.open("rb") as file:
                file.seek(chunk.offset)
                row[2:] = [f"{xxhash.xxh3_64_intdigest(file.read(chunk.stored_bytes)):016x}"]
        text = json.dumps(body | {"version": 1}).encode()
        path.write_bytes(text + b"\n" + digest(text).encode())
        changed += len(rows)
    return changed


class TestPrevious:
    def test_goes_back_one_and_goes_on_exactly(self, folder: Path, expected: list[State]) -> None:
        with opened(WAY, folder, resume="previous") as run:
            assert run.engine.step_count == 2
            expected[2].check_equal(State.of(run))
            run.until(STEPS)
            expected[STEPS].check_equal(State.of(run))
        assert check_resumes(WAY, folder, expected) == STEPS

    def test_looking_at_it_costs_nothing(self, folder: Path, expected: list[State]) -> None:
        for _ in range(2):
            with opened(WAY, folder, resume="previous") as run:
                expected[2].check_equal(State.of(run))
        assert check_resumes(WAY, folder, expected) == 3

    def test_looking_at_it_does_not_take_pending_gradients_from_the_newer_one(
        self, folder: Path, expected: list[State]
    ) -> None:
        delayed = replace(WAY, update="delayed")
        with opened(delayed, folder) as run:
            run.until(STEPS)
        for way in (WAY, delayed):
            assert "generation 4 of" in refuse(way, folder, ConfigError, resume="previous")
        with opened(delayed, folder) as run:
            assert run.engine.step_count == STEPS
            run.step()

    def test_is_tried_again_if_going_back_has_failed(
        self, folder: Path, expected: list[State], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else training would write over the chunks of a newer generation that is still there."""

        async def fails() -> None:
            raise StorageError("the disk is away for a moment")

        with opened(WAY, folder, resume="previous") as run:
            with monkeypatch.context() as patch:
                patch.setattr(run.engine._parts.store, "go_back", fails)
                with pytest.raises(StorageError, match="for a moment"):
                    next_token_loss(run.engine, tokens(1)[0])
            next_token_loss(run.engine, tokens(1)[0])
        assert check_resumes(WAY, folder, expected) == 2

    def test_is_the_last_one_when_training_goes_on(self, folder: Path, expected: list[State]) -> None:
        with opened(WAY, folder, resume="previous") as run:
            next_token_loss(run.engine, tokens(1)[0])
        assert check_resumes(WAY, folder, expected) == 2

    def test_what_cannot_be_made_leaves_the_newer_one(self, folder: Path, expected: list[State]) -> None:
        def fails(optimizer: torch.optim.Optimizer) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), opened(WAY, folder, resume="previous", lr_scheduler=fails):
            pass
        assert check_resumes(WAY, folder, expected) == 3

    def test_heals_a_damaged_last_one(self, folder: Path, expected: list[State]) -> None:
        damage(folder / "store0" / "captured-000000000003.safetensors", 4000)
        message = refuse(WAY, folder, ChecksumMismatch)
        assert "captured-000000000003" in message
        assert "resume='previous'" in message
        with opened(WAY, folder, resume="previous") as run:
            run.until(STEPS)
            expected[STEPS].check_equal(State.of(run))

    def test_heals_a_last_one_that_cannot_be_read(self, folder: Path, expected: list[State]) -> None:
        class BadSector(Backend):
            @contextmanager
            def calling(self, action: str, path: Path, **options: Any) -> Iterator[None]:
                with super().calling(action, path, **options):
                    if (action, path.name) == ("read", "manifest-000000000003.json"):
                        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                    yield

        with pytest.raises(StorageError, match="manifest-000000000003"), opened(WAY, folder, BadSector()):
            pass
        with opened(WAY, folder, BadSector(), resume="previous") as run:
            run.until(STEPS)
            expected[STEPS].check_equal(State.of(run))

    def test_verifies_all_of_it(self, folder: Path) -> None:
        # The chunks of generation 2 lie in the slots that generation 3 does not name: step 3 wrote the other ones.
        for name in ("weights", "state"):
            copy = folder.parent / name
            shutil.copytree(folder, copy)
            newest = {path: path.stat().st_mtime_ns for path in (copy / "store0").glob(f"{name}.*")}
            path = min(newest, key=lambda path: newest[path])
            damage(path, path.stat().st_size - 5000)
            message = refuse(WAY, copy, ChecksumMismatch, resume="previous")
            assert message.startswith("generation 2 is not whole any more: damaged: chunk ")
            assert f" chunk blocks.0/{name}/1 at offset " in message
            assert message.endswith("; resume='auto' opens the newest, if that is whole; else take a copy of the store")

    def test_needs_two(self, tmp_path: Path) -> None:
        with opened(WAY, tmp_path):
            pass
        assert "generation 0" in refuse(WAY, tmp_path, ConfigError, resume="previous")


class TestDamage:
    @pytest.mark.parametrize("kind", ["weights", "state"])
    def test_a_damaged_chunk_is_named(self, kind: str, folder: Path) -> None:
        paths = list((folder / "store0").glob(f"{kind}.*"))
        offset = 4096 + {"weights": 24576, "state": 49152}[kind]  # after the header and the embedding
        for path in paths:
            damage(path, offset + 100)
        with pytest.raises(ChecksumMismatch) as refusal, opened(WAY, folder) as run:
            run.until(STEPS)
        message = str(refusal.value)
        assert message.startswith(f"damaged: chunk blocks.0/{kind}/0 at offset {offset} of ")
        assert any(f" of {path}: " in message for path in paths)
        assert "; of 'blocks.0." in message
        assert message.endswith("resume='previous'")

    @pytest.mark.parametrize("kind", ["weights", "state"])
    @pytest.mark.parametrize("update", ["forward", "step"])
    def test_what_an_update_reads_is_checked(
        self, update: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked: set[tuple[str, bool]] = set()
        read = SlotPack.read

        async def watched(pack: SlotPack, *given: Any, **options: Any) -> bool:
            is_checked = await read(pack, *given, **options)
            checked.add((pack.kind, is_checked))
            return is_checked

        way = Way(update, cpu_memory=DISK, dtype=torch.bfloat16, width=96, blocks=2)
        run = open_run(way, tmp_path, gpu_memory="600KiB")  # not all groups fit the device
        assert set(run.engine.placement.weights_home) == {Tier.NVME}
        assert not run.engine.placement.weights_stay
        run.until(2)
        run.engine.flush()
        monkeypatch.setattr(SlotPack, "read", watched)
        run.step()
        run.engine.flush()
        assert checked - {("spilled", True)} == {("weights", False), ("state", False)}, "to the pass of Adam"
        for path in (tmp_path / "store0").glob(f"{kind}.*"):
            damage(path, path.stat().st_size - 5000)
        with pytest.raises(ChecksumMismatch, match=rf"damaged: chunk .*/{kind}/\d+ at offset \d+ of "):
            run.until(STEPS + 1)
        with pytest.raises(ChecksumMismatch):
            run.engine.close()
        assert max((tmp_path / "store0").glob("manifest-*")).name == "manifest-000000000003.json"

    def test_weights_in_memory_that_a_damaged_state_has_changed_are_given_to_nobody(self, tmp_path: Path) -> None:
        """The pass of Adam finds the damage only at its end."""
        run = open_run(Way("forward", dtype=torch.bfloat16, width=96, cpu_memory="1300KiB"), tmp_path)
        placement = run.engine.placement
        assert set(placement.weights_home) == {Tier.CPU}
        assert not placement.is_state_resident(1, 0)
        run.until(2)
        run.engine.flush()
        for path in (tmp_path / "store0").glob("state.*"):
            damage(path, 4096 + placement.state_bytes(0, 0) + 100)
        with pytest.raises(ChecksumMismatch, match=r"damaged: chunk .*/state/0 at offset ") as refusal:
            run.until(STEPS)
        name, *_ = re.findall(r"'(blocks\.0\.[^']*)'", str(refusal.value))
        for _ in range(2):
            with pytest.raises(ChecksumMismatch), run.engine.gathered([name]):
                pass
            with pytest.raises(ChecksumMismatch):
                run.engine.flush()
            with pytest.raises(ChecksumMismatch):
                run.engine.state_dict()
        with pytest.raises(ChecksumMismatch):
            run.engine.close()
        assert max((tmp_path / "store0").glob("manifest-*")).name == "manifest-000000000002.json"

    @pytest.mark.parametrize("update", ["backward", "speculative"])
    def test_weights_on_the_device_that_a_damaged_state_has_changed_are_given_to_nobody(
        self, update: str, tmp_path: Path
    ) -> None:
        """Within backward the group is on the device already, so no load finds the damage."""
        way = Way(update, cpu_memory=DISK, dtype=torch.bfloat16, width=96, blocks=2)
        run = open_run(way, tmp_path, max_grad_norm=None if update == "backward" else 1e9)
        run.until(3)
        run.engine.flush()
        for path in (tmp_path / "store0").glob("state.*"):
            damage(path, path.stat().st_size - 9000 | 3, bit=64)
        with pytest.raises(ChecksumMismatch, match=r"damaged: chunk .*/state/\d+ at offset ") as refusal:
            run.until(6)
        name, *_ = re.findall(r"; of '(blocks\.1\.[^']*)'", str(refusal.value))
        block = run.engine.model.get_submodule("blocks.1")
        refused = (ChecksumMismatch, ClosedError)  # ClosedError if backward raised the first error
        for _ in range(2):
            with pytest.raises(refused), run.engine.gathered([name]):
                pass
            with pytest.raises(refused), torch.no_grad():
                block(torch.ones(1, 8, 96, dtype=torch.bfloat16))
        with pytest.raises(refused):
            run.engine.state_dict()
        with pytest.raises(ChecksumMismatch):
            run.engine.close()

    def test_a_damaged_manifest_is_named(self, folder: Path) -> None:
        damage(folder / "store0" / "manifest-000000000003.json", 300)
        message = refuse(WAY, folder, ChecksumMismatch)
        assert "manifest-000000000003.json" in message
        assert "resume='previous'" in message

    def test_an_empty_manifest(self, folder: Path) -> None:
        (folder / "store0" / "manifest-000000000003.json").write_bytes(b"")
        assert "manifest-000000000003.json" in refuse(WAY, folder, ChecksumMismatch)

    def test_a_captured_state_of_holes(self, folder: Path) -> None:
        os.truncate(folder / "store0" / "captured-000000000003.safetensors", 2**22)
        assert "is damaged: it has 4194304 B, and at most" in refuse(WAY, folder, FormatError)

    def test_a_missing_captured_state(self, folder: Path) -> None:
        (folder / "store0" / "captured-000000000003.safetensors").unlink()
        message = refuse(WAY, folder, FormatError)
        assert "captured-000000000003.safetensors is missing; go back one with resume='previous'" in message

    def test_a_truncated_pack(self, folder: Path) -> None:
        path = folder / "store0" / "state.b.safetensors"
        os.truncate(path, path.stat().st_size - 4096)
        message = refuse(WAY, folder, FormatError)
        assert f"{path} has {path.stat().st_size} B, expected {path.stat().st_size + 4096} B" in message

    def test_a_missing_pack(self, folder: Path) -> None:
        (folder / "store0" / "weights.b.safetensors").unlink()
        assert "weights.b.safetensors is missing" in refuse(WAY, folder, FormatError)

    @pytest.mark.parametrize("name", ["state.a", "state.b"])
    def test_a_header_is_made_anew_by_a_commit(self, name: str, folder: Path, expected: list[State]) -> None:
        path = folder / "store0" / f"{name}.safetensors"
        before = path.read_bytes()[:4096]
        damage(path, 40)
        assert check_resumes(WAY, folder, expected) == 3
        with opened(WAY, folder) as run:
            run.until(STEPS)
        assert path.read_bytes()[:4096] == before

    def test_a_missing_pack_that_the_generation_does_not_need(self, folder: Path, expected: list[State]) -> None:
        (folder / "store0" / "state.a.safetensors").unlink()
        with opened(WAY, folder) as run:
            run.until(STEPS)
        assert check_resumes(WAY, folder, expected) == STEPS

    def test_a_truncated_pack_that_the_generation_does_not_need(self, folder: Path, expected: list[State]) -> None:
        path = folder / "store0" / "state.a.safetensors"
        os.truncate(path, 100)
        assert "remove that file: nothing needs it" in refuse(WAY, folder, FormatError)
        path.unlink()
        assert check_resumes(WAY, folder, expected) == 3


class TestStrangers:
    """A store that somebody else has prepared."""

    @pytest.mark.parametrize("name", ["state.a.safetensors", "weights.b.safetensors"])
    def test_a_pack_that_is_a_link_is_refused(self, name: str, folder: Path, tmp_path: Path) -> None:
        path, precious = folder / "store0" / name, tmp_path / "precious"
        path.rename(precious)
        path.symlink_to(precious)
        assert f"{path} is a link, which no store makes: it leads to {precious}" in refuse(WAY, folder, FormatError)

    @pytest.mark.parametrize("name", ["manifest-000000000003.json", "captured-000000000003.safetensors", "lock"])
    def test_a_small_file_that_is_a_link_is_refused(self, name: str, folder: Path, tmp_path: Path) -> None:
        path, precious = folder / "store0" / name, tmp_path / "precious"
        precious.write_bytes(path.read_bytes() if path.exists() else b"precious")
        path.unlink(missing_ok=True)
        path.symlink_to(precious)
        message = refuse(WAY, folder, StorageError)
        assert str(path) in message
        assert "ELOOP" in message

    def test_a_manifest_cut_at_every_byte(self, folder: Path) -> None:
        path = folder / "store0" / "manifest-000000000003.json"
        text = path.read_bytes()
        body = read_manifest(text, 3, "m")
        for length in range(len(text)):
            with pytest.raises(ChecksumMismatch, match="the manifest m is damaged"):
                read_manifest(text[:length], 3, "m")
        captured = path.with_name("captured-000000000003.safetensors").read_bytes()
        for length in range(0, len(captured), 101):
            with pytest.raises(ChecksumMismatch, match="c is damaged"):
                read_generation(body, captured[:length], "c")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"generation": 2}, "generation is 2, not a number of 3 to 3"),
            ({"more": 1}, "is not an object of format, version"),
            ({"records": {}, "layout": {}}, "directories is None"),
            ({"layout/chunk_elements": 0}, "chunk_elements is 0"),
            ({"layout/shares": [1, 1]}, "layout: shares"),
            ({"layout/shares": [0]}, "layout: a share is 0"),
            ({"layout/chunk_elements": 1}, "the number of records of 'weights' is"),
            ({"layout/codec": "zip"}, "does not know the codec 'zip'"),
            ({"layout/groups/0/parameters/0/1": [2**40, 2**40]}, "more than 2\\*\\*63 elements"),
            ({"layout/groups/0/parameters/0/1": [-1]}, "a shape is -1"),
            ({"layout/groups/0/dtype": "fp7"}, "has the dtype 'fp7'"),
            ({"records/weights": []}, "the number of records of 'weights' is 0"),
            ({"records/weights/0": [2, 4096, "0" * 16, True]}, "a slot is 2, not a number of 0 to 1"),
            ({"records/weights/0": [0, 2**40, "0" * 16, True]}, "a length is 1099511627776"),
            ({"records/weights/0": [0, 4096, "0" * 16, 1]}, "a checksum is one of leaves is 1, not true or false"),
            ({"records/weights/0": [0, 4096, "0" * 16]}, "is 3 values, not 4"),
            ({"records/weights/0": [0, 2**20, "0" * 16, True]}, "1048576 B of chunk .* in slot 0, where 2 slots"),
            ({"captured": {}}, "lacks buffers, loss_scale, optimizer"),
            ({"captured/step": "3"}, "holds a str as step"),
            ({"captured/pending": {"$dict": [[1, 2], ["set", 0]]}}, "the pending gradients is not an object of set"),
            ({"captured/random/numpy/$tuple/2": 10**6}, "the position of numpy's random state is 1000000"),
            ({"captured/random/torch": {"$array": ["x", "|u1", [5]]}}, "the array 'x' is missing"),
        ],
    )  # fmt: skip
    def test_a_manifest_with_a_right_checksum(self, change: dict[str, Any], message: str, folder: Path) -> None:
        path = folder / "store0" / "manifest-000000000003.json"
        body = json.loads(path.read_bytes().rpartition(b"\n")[0])
        for place, value in change.items():
            *keys, last = [int(key) if key.isdecimal() else key for key in place.split("/")]
            at = body
            for key in keys:
                at = at[key]
            at[last] = value
        text = json.dumps(body).encode()
        path.write_bytes(text + b"\n" + digest(text).encode())
        with pytest.raises(FormatError, match=message), opened(WAY, folder):
            pass


class TestAnotherStore:
    def test_directories_of_two_stores_are_refused_and_left_alone(self, tmp_path: Path) -> None:
        one, two = Way(directories=2), Way(directories=2, width=96)
        for way, name, steps in ((one, "one", 1), (two, "two", 2)):
            with opened(way, tmp_path / name) as run:
                run.until(steps)
        mixed = [tmp_path / "one" / "store0", tmp_path / "two" / "store1"]
        before = {path: path.read_bytes() for directory in mixed for path in directory.iterdir()}
        assert "belong to different stores: give all" in refuse(one, tmp_path, ConfigError, nvme=mixed)
        assert {path: path.read_bytes() for directory in mixed for path in directory.iterdir()} == before
        with opened(two, tmp_path / "two") as run:
            assert run.engine.step_count == 2
            run.until(3)

    def test_of_another_model(self, folder: Path) -> None:
        message = refuse(WAY, folder, ConfigError, model=tiny(blocks=1, width=32))
        assert "parameter blocks.0.attention.weight is fp32 (288, 96) " in message
        assert "fp32 (96, 32) " in message

    def test_of_a_model_with_another_dtype(self, folder: Path) -> None:
        assert "bf16" in refuse(replace(WAY, dtype=torch.bfloat16), folder, ConfigError)

    def test_of_a_model_with_more_blocks(self, folder: Path) -> None:
        assert "missing there" in refuse(WAY, folder, ConfigError, model=tiny(blocks=2, width=96))

    def test_another_chunk_size_keeps_the_one_of_the_store(self, folder: Path, expected: list[State]) -> None:
        assert check_resumes(WAY, folder, expected, chunk_bytes="2MiB", cpu_memory="64MiB") == 3

    def test_another_codec(self, folder: Path) -> None:
        message = refuse(replace(WAY, codec="lz4", cpu_memory="64MiB"), folder, ConfigError)
        assert "'none'" in message
        assert "'lz4'" in message

    def test_more_directories(self, folder: Path) -> None:
        assert "1 directories, 2 are given" in refuse(replace(WAY, directories=2), folder, ConfigError)

    def test_fewer_directories_in_another_order_and_one_missing(self, tmp_path: Path) -> None:
        way = replace(WAY, directories=2)
        with opened(way, tmp_path) as run:
            run.until(1)
        first, second = tmp_path / "store0", tmp_path / "store1"
        assert "2 directories, 1 are given" in refuse(way, tmp_path, ConfigError, nvme=[first])
        for nvme in ([second, first], [second]):
            assert "in their order" in refuse(way, tmp_path, ConfigError, nvme=nvme)
        second.rename(tmp_path / "elsewhere")
        for _ in range(2):
            assert f"{second} is not there, or holds nothing of the store" in refuse(way, tmp_path, ConfigError)
            second.mkdir(exist_ok=True)  # where its disk would be mounted
        with opened(way, tmp_path, nvme=[first, tmp_path / "elsewhere"]) as run:
            assert run.engine.step_count == 1

    def test_without_durability(self, folder: Path) -> None:
        assert "would overwrite" in refuse(WAY, folder, ConfigError, durability="none")

    def test_of_a_newer_release(self, folder: Path) -> None:
        from tierstore.pack.codecs import checksum_bytes

        path = folder / "store0" / "manifest-000000000003.json"
        data = path.read_bytes().rpartition(b"\n")[0].replace(b'"version":2', b'"version":4')
        path.write_bytes(data + f"\n{checksum_bytes(data):016x}".encode())
        assert "version 4; this release reads tierstore versions 1 to 3" in refuse(WAY, folder, FormatError)

    def test_of_an_older_release_whose_checksums_are_of_whole_chunks(self, folder: Path, expected: list[State]) -> None:
        assert as_of_version_1(folder / "store0") > 4
        assert check_resumes(WAY, folder, expected) == 3
        assert b'"version":2' in (folder / "store0" / "manifest-000000000004.json").read_bytes()

    def test_of_an_older_release_and_damaged(self, folder: Path) -> None:
        as_of_version_1(folder / "store0")
        chunk = next(c for c in committed_chunks([folder / "store0"])[1] if c.path.name.startswith("weights"))
        damage(chunk.path, chunk.offset)
        assert "have checksum" in refuse(WAY, folder, ChecksumMismatch, resume="must", cpu_memory="64MiB")

    def test_never_must_and_previous(self, folder: Path, tmp_path: Path) -> None:
        assert "already holds generation 3" in refuse(WAY, folder, ConfigError, resume="never")
        for resume in ("must", "previous"):
            message = refuse(WAY, tmp_path / "empty", ConfigError, resume=resume)
            assert f"resume='{resume}': there is no generation in {tmp_path / 'empty'}" in message
        assert not (tmp_path / "empty").exists()

    def test_of_other_parameter_groups(self, folder: Path) -> None:
        model = WAY.model()
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others}]
        message = refuse(WAY, folder, ConfigError, model=model, parameter_groups=groups)
        assert "made with parameters in 1 groups, and here they are in 2; give parameter_groups= as then" in message

    def test_of_directories_that_do_not_belong_together(self, tmp_path: Path) -> None:
        way = replace(WAY, directories=2)
        with opened(way, tmp_path) as run:
            run.until(1)
        shutil.copytree(tmp_path / "store1", tmp_path / "before")
        with opened(way, tmp_path) as run:
            run.until(3)
        message = refuse(way, tmp_path / "store1", ConfigError, resume="must", nvme=[tmp_path / "store1"])
        assert "there is no generation in" in message
        told = f"but {tmp_path / 'store1'} holds state.a.safetensors of a store: give all directories of that store in"
        assert told in message
        message = refuse(way, tmp_path, ConfigError, resume="must", nvme=[tmp_path / "new", tmp_path / "store1"])
        assert f"no generation in {tmp_path / 'new'}, {told}" in message
        shutil.rmtree(tmp_path / "store1")
        (tmp_path / "before").rename(tmp_path / "store1")
        of_times = r"\(or the directories were copied at different times\); of .*; restore the store from a copy"
        with pytest.raises(ChecksumMismatch, match=of_times), opened(way, tmp_path, cpu_memory="64MiB") as run:
            run.until(4)
        message = refuse(way, tmp_path, ChecksumMismatch, resume="previous", cpu_memory="64MiB")
        assert "(or the directories were copied at different times); of " in message
        assert "resume='previous'" not in message

    def test_whose_making_was_broken_off(self, tmp_path: Path) -> None:
        (tmp_path / "store0").mkdir()
        for name in ("state.a.safetensors", "unfinished"):
            (tmp_path / "store0" / name).touch()
        assert refuse(WAY, tmp_path, ConfigError, resume="must").endswith(f"no generation in {tmp_path / 'store0'}")


class Replaced(Backend):
    """Right after a manifest (or `after`) is renamed into place, moves its directory away and puts a copy there."""

    moved: Path | None = None
    after = "manifest"

    def _call_replace(self, source: Path, destination: Path) -> None:
        super()._call_replace(source, destination)
        if self.moved is not None and destination.name.startswith(self.after):
            destination.parent.rename(self.moved)
            shutil.copytree(self.moved, destination.parent)


class Moved(Backend):
    """Moves the directory away before a rename, removal or listing there; may leave a file in its place."""

    moved: Path | None = None
    before = ""
    leaves_file = False

    def _move(self, directory: Path) -> None:
        if self.moved is not None and not self.moved.exists():
            directory.rename(self.moved)
            if self.leaves_file:
                directory.touch()

    def _call_replace(self, source: Path, destination: Path) -> None:
        if destination.name.startswith(self.before):
            self._move(destination.parent)
        super()._call_replace(source, destination)

    def _call_unlink(self, path: Path) -> None:
        if self.before == "removal":
            self._move(path.parent)
        super()._call_unlink(path)

    def _call_list(self, path: Path) -> list[str]:
        if self.before == "listing":
            self._move(path)
        return super()._call_list(path)


class TestMovedAway:
    """A store whose directory is moved while it is in use: its open packs move with it, but new manifests would not."""

    @staticmethod
    def commit(run: Run) -> None:
        run.step()
        run.engine.flush()

    @pytest.mark.parametrize(("way", "which"), [(WAY, 0), (STRIPED, 0), (STRIPED, 1)], ids=["disk", "first", "second"])
    @pytest.mark.parametrize("is_replaced", [False, True])
    def test_nothing_is_committed_elsewhere(
        self, way: Way, which: int, is_replaced: bool, tmp_path: Path, expected: list[State]
    ) -> None:
        run = open_run(way, tmp_path)
        run.until(1)
        run.engine.flush()
        there = Path(run.engine._parts.store.files.directories[which])
        there.rename(tmp_path / "moved")
        if is_replaced:
            there.mkdir()
        with pytest.raises(StorageError, match=f"{there} .*moved, replaced or removed.*resume"):
            self.commit(run)
        with pytest.raises(StorageError, match="moved, replaced or removed"):  # still
            self.commit(run)
        with suppress(TierstoreError):
            run.engine.close()
        assert is_replaced == there.is_dir()
        if is_replaced:
            assert not list(there.iterdir())
            there.rmdir()
        (tmp_path / "moved").rename(there)
        assert check_resumes(way, tmp_path, expected) == 1

    @pytest.mark.parametrize("after", ["captured", "manifest"])
    def test_nor_if_it_is_moved_in_the_middle_of_it(self, after: str, tmp_path: Path, expected: list[State]) -> None:
        backend, there = Replaced(), tmp_path / "store0"
        backend.after = after
        run = open_run(WAY, tmp_path, backend)
        run.until(1)
        run.engine.flush()
        backend.moved = tmp_path / "moved"
        with pytest.raises(StorageError, match="moved, replaced or removed"):
            self.commit(run)
        backend.moved = None
        with pytest.raises(TierstoreError):
            run.engine.close()
        whole = 2 if after == "manifest" else 1  # what was there when it was moved
        assert len(list(there.glob("manifest-*2.json"))) == whole - 1
        shutil.rmtree(there)
        (tmp_path / "moved").rename(there)
        assert check_resumes(WAY, tmp_path, expected) == whole

    @pytest.mark.parametrize("leaves_file", [False, True])
    @pytest.mark.parametrize("before", ["captured", "manifest", "listing", "removal"])
    def test_nor_is_it_told_that_a_file_is_missing(
        self, before: str, leaves_file: bool, tmp_path: Path, expected: list[State]
    ) -> None:
        backend, there = Moved(), tmp_path / "store0"
        run = open_run(WAY, tmp_path, backend)
        run.until(1)
        run.engine.flush()
        backend.before, backend.moved, backend.leaves_file = before, tmp_path / "moved", leaves_file
        with pytest.raises(StorageError, match=r"moved, replaced or removed.*resume='auto'"):
            self.commit(run)
        with pytest.raises(TierstoreError):
            run.engine.close()
        if leaves_file:
            there.unlink()
        (tmp_path / "moved").rename(there)
        assert check_resumes(WAY, tmp_path, expected) == (1 if before in ("captured", "manifest") else 2)

    def test_another_fault_is_told_as_it_is(self, tmp_path: Path) -> None:
        class Broken(Moved):
            def _call_replace(self, source: Path, destination: Path) -> None:
                if self.moved is not None:
                    self._move(destination.parent)
                    raise OSError(errno.EIO, "broken")
                super()._call_replace(source, destination)

        backend = Broken()
        run = open_run(WAY, tmp_path, backend)
        run.until(1)
        run.engine.flush()
        backend.moved = tmp_path / "moved"
        with pytest.raises(StorageError, match="EIO"):
            self.commit(run)
        with pytest.raises(TierstoreError):
            run.engine.close()

    def test_one_that_is_away_for_a_moment_when_it_is_closed_keeps_its_files(
        self, tmp_path: Path, expected: list[State]
    ) -> None:
        class Blinking(Moved):
            def _call_list(self, path: Path) -> list[str]:
                self._move(path)
                try:
                    return super()._call_list(path)
                finally:
                    if self.moved is not None:
                        self.moved.rename(path)
                        self.moved = None

        backend = Blinking()
        run = open_run(WAY, tmp_path, backend)
        run.until(1)
        run.engine.flush()
        backend.moved = tmp_path / "moved"
        with pytest.raises(StorageError, match="No such file"):
            run.engine.close()
        assert check_resumes(WAY, tmp_path, expected) == 1

    def test_a_new_store_in_its_place_is_left_alone(self, tmp_path: Path, expected: list[State]) -> None:
        run = open_run(WAY, tmp_path)
        run.engine.flush()
        (tmp_path / "store0").rename(tmp_path / "moved")
        with opened(WAY, tmp_path) as other:
            with pytest.raises(StorageError, match="moved, replaced or removed"):
                self.commit(run)
            with pytest.raises(TierstoreError):
                run.engine.close()
            with pytest.raises(StoreLocked), opened(WAY, tmp_path):
                pass
            other.until(2)
        assert check_resumes(WAY, tmp_path, expected) == 2

    def test_nor_what_a_copy_of_it_has_committed_meanwhile(self, tmp_path: Path, expected: list[State]) -> None:
        """The generations of the copy have the numbers that this run gives its own."""
        run, there = open_run(WAY, tmp_path), tmp_path / "store0"
        run.until(1)
        run.engine.flush()
        there.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", there)
        with opened(WAY, tmp_path) as other:
            other.until(2)
            other.engine.flush()
            before = {path.name: path.read_bytes() for path in there.glob("*-*2.*")}
            assert {name.partition("-")[0] for name in before} == {"manifest", "captured"}
            with pytest.raises(StorageError, match="moved, replaced or removed"):
                self.commit(run)
            with pytest.raises(TierstoreError):
                run.engine.close()
            assert {path.name: path.read_bytes() for path in there.glob("*-*2.*")} == before
        assert check_resumes(WAY, tmp_path, expected) == 2


class Slow(Backend):
    """Publishes nothing before `may_go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = threading.Event()

    def _call_replace(self, source: Path, destination: Path) -> None:
        assert self.may_go.wait(30)
        super()._call_replace(source, destination)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Makes processes that have imported everything. It begins before a test, because it keeps descriptors open."""
    return fork_server()


class TestLock:
    def test_two_engines_in_one_process(self, folder: Path) -> None:
        with opened(WAY, folder):
            for resume in ("auto", "never", "must", "previous"):
                told = refuse(WAY, folder, StoreLocked, resume=resume)
                assert f"in use by process {os.getpid()}, which is this one: close" in told

    def test_one_that_is_being_made(self, tmp_path: Path) -> None:
        backend = Slow()
        with opened(WAY, tmp_path, backend):
            with pytest.raises(StoreLocked, match=f"in use by process {os.getpid()}"), opened(WAY, tmp_path):
                pass
            assert not list((tmp_path / "store0").glob("manifest-*.json"))
            backend.may_go.set()

    def test_another_process_that_is_killed(
        self, folder: Path, expected: list[State], processes: ForkServerContext
    ) -> None:
        ours, theirs = processes.Pipe(duplex=False)
        holder = processes.Process(target=hold, args=(WAY, folder, theirs), daemon=True)
        holder.start()
        theirs.close()
        with ours:
            assert ours.recv() == "open"
            assert f"in use by process {holder.pid}; stop it" in refuse(WAY, folder, StoreLocked)
            holder.kill()
        holder.join()
        holder.close()
        assert check_resumes(WAY, folder, expected) == 3

    def test_is_not_held_by_a_forked_child(self, folder: Path, expected: list[State]) -> None:
        reader, writer = os.pipe()
        with opened(WAY, folder):
            child = os.fork()
            if child == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
        os.close(reader)
        assert check_resumes(WAY, folder, expected) == 3
        os.close(writer)
        os.waitpid(child, 0)


def test_what_is_frozen_has_one_slot_until_it_is_written(tmp_path: Path) -> None:
    """From then on, frozen weights are committed as all others are."""

    def model() -> torch.nn.Module:
        made = way.model()
        for name in ("embedding", "blocks.0", "blocks.1"):
            made.get_submodule(name).requires_grad_(False)
        return made

    def taken_bytes(slot: str) -> int:
        return (tmp_path / "store0" / f"weights.{slot}.safetensors").stat().st_blocks * 512

    way = Way("forward", cpu_memory=DISK, blocks=3, width=64)
    frozen_bytes = 4 * sum(p.numel() for p in model().parameters() if not p.requires_grad)
    with opened(way, tmp_path, model=model()) as run:
        run.until(2)
        assert taken_bytes("a") - taken_bytes("b") >= frozen_bytes
        changed = {name: value + 1 for name, value in run.engine.state_dict().items()}
        run.engine.load_state_dict(changed)
        run.engine.flush()
        assert taken_bytes("a") == taken_bytes("b")
    with opened(way, tmp_path, model=model(), resume="must") as run:
        found = run.engine.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in changed.items())
