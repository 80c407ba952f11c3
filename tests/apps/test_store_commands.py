"""`inspect` and `verify` of a training store: its last generation, and damage by name."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import tensor_stores
import torch
from faults import EIO, HANG, FaultyBackend
from rich.console import Console
from runs import next_token_loss, tiny, tokens
from typer.testing import CliRunner

from tierstore.apps import verify
from tierstore.apps.verify import advised
from tierstore.archive import flow
from tierstore.cli import app
from tierstore.config import Codec, Tier, TierConfig
from tierstore.errors import ChecksumMismatch, StorageError, Timeout
from tierstore.io import files, watch
from tierstore.io.backend import Backend
from tierstore.store.manifest_files import Manifests
from tierstore.store.verification import CommittedChunk, committed_chunks
from tierstore.train.engine import Engine

WIDE = {"COLUMNS": "400"}
SHOWN = io.StringIO()
NOBODY = Console(file=SHOWN, force_terminal=False)
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def store(directories: list[Path], codec: Codec) -> None:
    """Makes a store with two committed steps."""
    tiers = TierConfig(gpu_memory="4MiB", cpu_memory="3MiB", nvme=directories, codec=codec, chunk_bytes="64KiB")
    with Engine(tiny(blocks=1), tiers) as engine:
        for batch in tokens(2):
            engine.backward(next_token_loss(engine, batch))
            engine.step()


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_BITSHUFFLE])
def test_the_last_generation_is_shown_and_verified(
    tmp_path: Path, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    directories = [tmp_path / "a", tmp_path / "b"]
    store(directories, codec)
    run = CliRunner()
    paths = [str(path) for path in directories]
    verifying = ["verify", "--memory", "1TiB"]
    result = run.invoke(app, [*verifying, *paths])
    assert (result.exit_code, "all as written" in result.output) == (0, True), result.output

    with monkeypatch.context() as patch:
        patch.setattr("tierstore.whole_file.open", full, raising=False)
        for command, told in ((verifying, "all as written"), (["inspect"], "blocks.0.up.weight")):
            result = run.invoke(app, [*command, *paths, "--json", str(tmp_path / "j")], env=WIDE)
            assert (result.exit_code, told in result.output) == (1, True), result.output
            assert "cannot write --json" in result.output

    result = run.invoke(app, ["inspect", *paths, "--json", str(tmp_path / "j")], env=WIDE)
    told = json.loads((tmp_path / "j").read_text())
    assert (result.exit_code, told["generation"], told["directories"]) == (0, 2, 2), result.output
    assert "blocks.0.up.weight" in result.output

    generation, chunks = committed_chunks(directories)
    assert len(chunks) == sum(record is not None for rows in generation.records.values() for record in rows)
    bad = chunks[len(chunks) // 2]
    data = bytearray(bad.path.read_bytes())
    data[bad.offset + bad.stored_bytes - 1] ^= 1
    bad.path.write_bytes(data)
    result = run.invoke(app, ["verify", *paths, "--memory", "1TiB", "--json", str(tmp_path / "j")], env=WIDE)
    assert result.exit_code == 1
    assert f"{bad.path} " in result.stdout
    assert "damaged places: 1; chunks: " in result.stdout
    assert "--resume previous goes back one generation" in result.stderr
    assert [one["tensors"] for one in json.loads((tmp_path / "j").read_text())["damages"]] == [list(bad.tensors)]
    assert bad.tensors
    assert set(bad.tensors) <= {name for group in generation.layout["groups"] for name, _ in group["parameters"]}

    data[4095] ^= 1  # a byte of the header, the last one if it is one page
    bad.path.write_bytes(data)
    result = run.invoke(app, ["verify", *paths, "--memory", "1TiB", "--json", str(tmp_path / "j")])
    damages = json.loads((tmp_path / "j").read_text())["damages"]
    assert [(one["path"], one["offset"], one["tensors"]) for one in damages] == [
        (str(bad.path), 0, []), (str(bad.path), bad.offset, list(bad.tensors)),
    ], result.output  # fmt: skip
    assert f"the header of {bad.path}" in damages[0]["message"]

    data[bad.offset + bad.stored_bytes - 1] ^= 1
    bad.path.write_bytes(data)
    result = run.invoke(app, ["verify", *paths, "--memory", "1TiB"], env=WIDE)
    assert (result.exit_code, "a run does not need these headers" in result.stderr) == (1, True), result.output

    result = run.invoke(app, ["verify", paths[0]])
    assert (result.exit_code, "is striped over 2 directories" in result.output) == (2, True)


def test_what_the_disk_cannot_read_is_damage_and_the_rest_is_read(tmp_path: Path) -> None:
    store([tmp_path], Codec.NONE)
    _, chunks = committed_chunks([tmp_path])
    backend, room = FaultyBackend(EIO, kinds=("pread",), at=1, times=2), flow.Room(1, verify._largest(chunks))
    damages = verify._damages(chunks, room, lambda nbytes: None, backend)
    assert [(one.offset, one.tensors) for one in damages] == [(one.offset, one.tensors) for one in chunks[1:3]]
    assert all("Input/output error" in one.message for one in damages)
    assert backend.calls.count("pread") == len(chunks)


def test_a_header_that_the_disk_cannot_read_is_damage_and_the_chunks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store([tmp_path], Codec.NONE)
    _, chunks = committed_chunks([tmp_path])
    disk = FaultyBackend(EIO, kinds=("pread",))
    monkeypatch.setattr(watch, "Backend", lambda: disk)
    verdict = verify.run_verify([tmp_path], 2**40, NOBODY)
    (damage,) = verdict.damages
    assert (disk.hit, damage.offset, verdict.chunks) == (("pread", damage.path), 0, len(chunks))
    assert damage.message.startswith(f"damaged: read of 4096 B at offset 0 of {damage.path} failed: Input/output error")
    assert "a run cannot open the store" in verdict.advice
    assert disk.calls.count("pread") == len({chunk.path for chunk in chunks}) + len(chunks)


@pytest.mark.parametrize(
    ("seen", "exit_code", "said"),
    [
        ([(1, 1), (0, 2)], 0, "all as written"),  # the first was overwritten while it was read
        ([(1, 2)], 1, "1 damaged"),
        ([(1, -2), (1, -1), (1, 0), (1, 1)], 1, "is written faster than it can be read: verify it when the run"),
    ],
)
def test_a_generation_that_is_overwritten_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, int]], exit_code: int, said: str
) -> None:
    """`seen`: damages and generation number, verification by verification; the store's last generation is 2."""
    store([tmp_path], Codec.NONE)
    damage = verify.Damage(tmp_path, 0, 1, "h", ("w",), "damaged")
    found = iter([(verify.Verdict("store", 1, 1, 1.0, (damage,) * count), number) for count, number in seen])
    monkeypatch.setattr(verify, "_verify_last", lambda *_: next(found))
    result = CliRunner().invoke(app, ["verify", str(tmp_path)], env=WIDE)
    assert (result.exit_code, said in " ".join(result.output.split())) == (exit_code, True), result.output


def test_a_generation_that_is_removed_while_its_manifest_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store([tmp_path / "run"], Codec.NONE)
    manifests, really = Manifests(tmp_path / "run", Backend()), Manifests.manifest_here
    for path in (manifests.manifest_path(2), manifests.captured_path(2)):
        path.rename(tmp_path / path.name)

    def reads(self: Manifests, number: int) -> dict[str, Any]:
        body = really(self, number)
        if number == 1:  # the run goes on: it publishes a generation, and removes this one
            for path in (manifests.captured_path(2), manifests.manifest_path(2)):
                (tmp_path / path.name).rename(path)
            for path in (manifests.manifest_path(1), manifests.captured_path(1)):
                path.unlink()
        return body

    monkeypatch.setattr(Manifests, "manifest_here", reads)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "run"), "--memory", "1TiB"], env=WIDE)
    assert (result.exit_code, "generation 2: all as written" in result.output) == (0, True), result.output
    manifests.captured_path(2).unlink()
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "run"), "--memory", "1TiB"], env=WIDE)
    assert (result.exit_code, f"{manifests.captured_path(2)} is missing" in result.output) == (1, True), result.output


async def put(tmp_path: Path, **options: Any) -> None:
    """Puts an entry on each tier, the first of which spans chunks, and an empty one."""
    async with tensor_stores.opened(tmp_path, **options) as store:
        for number, tier in enumerate(tensor_stores.TIERS):
            size = {"elements": tensor_stores.CHUNK} if number == 0 else {}
            await store.put(f"h/{number}", tensor_stores.block(number, **size), tier=tier)
        await store.put("empty", {"none": torch.empty(0, 3)}, tier=Tier.CPU)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_BITSHUFFLE])
def test_a_store_of_named_tensors_is_shown_and_verified(codec: Codec, tmp_path: Path) -> None:
    directories = [tmp_path / "store", tmp_path / "second"]
    tensor_stores.run(put(tmp_path, nvme=directories, codec=codec))
    run, paths = CliRunner(), [str(path) for path in directories]
    verify = ["verify", "--memory", "1TiB"]  # it counts the whole process, which other tests have filled
    result = run.invoke(app, [*verify, *paths])
    assert (result.exit_code, "all as written" in result.output) == (0, True), result.output
    result = run.invoke(app, ["inspect", *paths, "--json", str(tmp_path / "j")], env=WIDE)
    told = json.loads((tmp_path / "j").read_text())
    assert (told["what"], told["groups"], told["directories"]) == ("store of named tensors", 4, 2), result.output
    assert {group["name"]: group["tensors"] for file in told["files"] for group in file["groups"]} == {
        f"h/{number}": [["w", "float32", [tensor_stores.CHUNK if number == 0 else tensor_stores.CHUNK // 4]]]
        for number in range(3)
    }

    generation, chunks = committed_chunks(directories)
    assert len(chunks) == sum(map(len, generation.records.values()))
    assert {chunk.path.parent for chunk in chunks} == set(directories)
    for bad in chunks:
        flip(bad)
        result = run.invoke(app, [*verify, *paths, "--json", str(tmp_path / "j")])
        (damage,) = json.loads((tmp_path / "j").read_text())["damages"]
        assert (result.exit_code, damage["group"], damage["tensors"]) == (1, bad.group, ["w"])
        flip(bad)
    assert "over several directories the first comes first" in run.invoke(app, [*verify, paths[1]]).stderr
    result = run.invoke(app, [*verify, paths[0]])
    assert (result.exit_code, "is striped over 2 directories" in result.output) == (2, True)
    chunks[0].path.unlink()
    result = run.invoke(app, [*verify, *paths])
    assert (result.exit_code, f"{chunks[0].path} is missing" in " ".join(result.output.split())) == (1, True)


def test_a_store_of_more_files_than_may_be_open_is_verified(tmp_path: Path) -> None:
    async def put_many() -> None:
        async with tensor_stores.opened(tmp_path) as store:
            for number in range(60):
                await store.put(f"h/{number}", tensor_stores.block(number, 10), tier=Tier.NVME)

    tensor_stores.run(put_many())
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, usual[1]))
    try:
        result = CliRunner().invoke(app, ["verify", "--memory", "1TiB", str(tmp_path / "store")], env=WIDE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert (result.exit_code, "all as written; 60 chunks" in result.output) == (0, True), result.output


def test_a_directory_that_cannot_be_read_is_not_called_a_store(tmp_path: Path) -> None:
    class Closed(Backend):
        def _call_list(self, path: Path) -> list[str]:
            raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(StorageError, match=rf"listing of {tmp_path} failed: Permission denied"):
        verify.is_store(tmp_path, Closed())


def test_codecs_are_compared_on_training_state(tmp_path: Path) -> None:
    tensor_stores.run(put(tmp_path))
    result = CliRunner().invoke(app, ["codecs", str(tmp_path / "store")])
    assert (result.exit_code, "tensors, not" in result.output) == (2, True), result.output


def flip(chunk: CommittedChunk) -> None:
    data = bytearray(chunk.path.read_bytes())
    data[chunk.offset + chunk.stored_bytes - 1] ^= 1
    chunk.path.write_bytes(data)


def go_on(directory: Path, console: Console = NOBODY) -> None:
    tiers = TierConfig(gpu_memory="4MiB", cpu_memory="3MiB", nvme=[directory], chunk_bytes="64KiB")
    with advised([directory], console), Engine(tiny(blocks=1), tiers, resume="auto") as engine:
        engine.backward(next_token_loss(engine, tokens(1)[0]))
        engine.step()


def test_the_generation_that_is_whole_is_offered_and_no_other(tmp_path: Path) -> None:
    store([tmp_path], Codec.NONE)
    _, newest = committed_chunks([tmp_path])
    _, before = committed_chunks([tmp_path], 1)
    (bad,) = [chunk for chunk in newest if chunk.name == "blocks.0/state/0"]
    flip(bad)
    with pytest.raises(ChecksumMismatch) as refusal:
        go_on(tmp_path)
    message = str(refusal.value)
    assert f"damaged: chunk {bad.name} at offset {bad.offset} of {bad.path}: {bad.stored_bytes} B" in message
    assert f"; of '{bad.tensors[0]}'" in message
    assert message.endswith("; generation 1 is whole, every chunk of it was read: go on with resume='previous'")
    (older,) = [chunk for chunk in before if chunk.name == "blocks.0/weights/0"]
    flip(older)
    shown = io.StringIO()
    with pytest.raises(ChecksumMismatch) as refusal:
        go_on(tmp_path, Console(file=shown, force_terminal=True, width=160))
    assert [f"reading generation {number} " in shown.getvalue() for number in (0, 1, 2)] == [False, True, True]
    assert str(refusal.value).endswith("; no generation of the store is whole (2 were read): restore it from a copy")
    assert not SHOWN.getvalue()
    flip(bad)
    with pytest.raises(ChecksumMismatch, match=r"generation 2 is whole, .*resume='auto'"), advised([tmp_path], NOBODY):
        raise ChecksumMismatch(f"damaged: what was written in {tmp_path} since the last commit; some advice")
    flip(older)
    go_on(tmp_path)


def test_what_is_not_of_the_store_is_told_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ChecksumMismatch, match=r"^another file; pack again$"), advised([tmp_path / "store"], NOBODY):
        raise ChecksumMismatch("another file; pack again")


@pytest.mark.parametrize("place", ["list 0", "list 1", "list 2", "read"])
def test_a_manifest_that_the_disk_does_not_give_is_named_and_nothing_is_read_after_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store([tmp_path], Codec.NONE)
    kind, _, at = place.partition(" ")
    disk = FaultyBackend(HANG if kind == "list" else None, at=int(at or 0), kinds=("list",))
    opened, before, really = list[str](), set(threading.enumerate()), files._open_itself

    def opens(path: str, flags: int) -> int:
        opened.append(Path(path).name)
        if kind == "read":
            disk.is_hung.set()
            assert disk.goes_on.wait(60)
        return really(path, flags)

    monkeypatch.setattr(files, "_open_itself", opens)
    monkeypatch.setattr(watch, "Backend", lambda: disk)
    monkeypatch.setattr(watch.Watch, "begin", lambda self: disk.is_hung.is_set)
    with pytest.raises(Timeout) as caught:
        verify.run_verify([tmp_path], 2**40, NOBODY, timeout_s=0.1)
    count = len(opened)
    disk.goes_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    stuck = "manifest-000000000002.json" if kind == "read" else ""
    assert re.search(rf"\n  {kind}\w* of {tmp_path}/?{stuck}, for \d", str(caught.value)), caught.value
    assert len(opened) == count


def test_damage_is_told_without_advice_where_the_disk_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store([tmp_path], Codec.NONE)
    disk, before = FaultyBackend(HANG, kinds=("pread",)), set(threading.enumerate())
    monkeypatch.setattr(watch, "Backend", lambda: disk)
    monkeypatch.setattr(watch.Watch, "begin", lambda self: disk.is_hung.is_set)
    damage, shown = f"damaged: what was written in {tmp_path}; some advice", io.StringIO()
    terminal = Console(file=shown, force_terminal=True)
    with pytest.raises(ChecksumMismatch, match=f"^{re.escape(damage)}$"), advised([tmp_path], terminal, timeout_s=0.1):
        raise ChecksumMismatch(damage)
    assert re.findall(r"\x1b\[\?25[hl]", shown.getvalue()) == [HIDE_CURSOR, SHOW_CURSOR]
    disk.goes_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
