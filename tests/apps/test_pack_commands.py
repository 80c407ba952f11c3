"""The commands of packs: what they write, say and return."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import packed, read_safetensors, small_checkpoint, write_safetensors
from commands import run_program
from typer.testing import CliRunner

import tierstore
from tierstore.apps.outputs import copy_companions
from tierstore.archive.sources import INDEX, PARTIAL
from tierstore.cli import app
from tierstore.errors import ConfigError, StorageError
from tierstore.io.backend import BlockFile
from tierstore.pack.layout import TensorEntry
from tierstore.pack.validate import Header

ENDLESS = """
import os, signal, sys, time
import torch
from tierstore.apps import pack
from tierstore.cli import main

def endless(*arguments, **options):
    torch.set_num_threads(1)
    end, some = time.monotonic() + 100, torch.ones(200, 200)
    os.kill(os.getpid(), int(number))
    while time.monotonic() < end:
        some @ some  # back in the interpreter every now and then

number, phase, *sys.argv[1:] = sys.argv[1:]
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.default_int_handler)  # a shell that starts tests in the background has one ignored
setattr(pack, phase, endless)
main()
"""


def run(*arguments: object, code: int = 0) -> Any:
    # A budget above what other tests have left in this process; tests of the budget give one of their own.
    takes_memory = arguments[0] in ("pack", "unpack", "verify") and "--memory" not in arguments
    memory = ["--memory", "8GiB"] if takes_memory else []
    result = CliRunner().invoke(app, [str(one) for one in arguments] + memory, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("codec", ["none", "auto"])
def test_pack_inspect_verify_unpack(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    tensors = small_checkpoint(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    memory = ("--memory", "1TiB")
    destination = ("--json", tmp_path / "j", tmp_path / "model", tmp_path / "p")
    shown = run("pack", "--codec", codec, *destination, *memory).output
    assert "order from config.json: gpt2, 3 layers" in shown
    told = json.loads((tmp_path / "j").read_text())
    assert (told["dtypes"]["BF16"]["codec"] == "none") == (codec == "none")
    assert (told["tensors"], told["groups"]) == (8, 5)

    assert "all as written" in run("verify", tmp_path / "p", *memory).output
    tree = run("inspect", tmp_path / "p", "--json", tmp_path / "i", "--plot", tmp_path / "map.png").output
    assert "h.1: tensors 2" in tree
    assert "'h.1.zeros' BF16 [60, 700]" in tree
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("tierstore.apps.inspect.FIRST_TENSORS", 3)
    options: list[list[str]] = [[], ["--tensors"], ["--no-tensors"]]
    first, every, none = (run("inspect", tmp_path / "p", *given).output for given in options)
    assert [len(re.findall(r"' [BF]\w+ \[", shown)) for shown in (first, every, none)] == [3, 8, 0]
    assert "h.2: tensors" in first
    assert "5 more lines of tensors: --tensors shows all" in first
    assert "more lines" not in every + none
    groups = json.loads((tmp_path / "i").read_text())["files"][0]["groups"]
    assert [group["name"] for group in groups] == ["embeddings", "h.0", "h.1", "h.2", "norm"]

    out = tmp_path / "llama-3.1"  # a directory, though its name has a suffix
    run("unpack", tmp_path / "p", out, *memory)
    assert read_safetensors(out / "model.safetensors") == tensors
    assert (out / "config.json").is_file()


def test_what_stands_beside_a_single_file_is_not_copied(tmp_path: Path) -> None:
    """It may belong to another model."""
    small_checkpoint(tmp_path / "a.safetensors", blocks=1)
    (tmp_path / "config.json").write_text("{}")
    packed(tmp_path / "a.safetensors", tmp_path / "p.safetensors", memory_bytes=2**40)
    for command, source, out in (("pack", "a.safetensors", "p"), ("unpack", "p.safetensors", "out")):
        run(command, tmp_path / source, tmp_path / out)
        assert not (tmp_path / out / "config.json").exists()


def model_with(folder: Path, **files: str) -> Path:
    """A checkpoint and files beside it, whose dots are written as two underscores."""
    folder.mkdir()
    small_checkpoint(folder / "model.safetensors", blocks=1)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def beside(folder: Path) -> dict[str, str]:
    left = (path for path in folder.iterdir() if ".safetensors" not in path.name)
    return {path.name: path.read_text() for path in left}


def test_a_pack_that_replaces_another_one_has_nothing_of_its_model_beside_it(tmp_path: Path) -> None:
    """Else the weights are read as a model of another configuration, or the text by another tokenizer."""
    old = {"config__json": "[1]", "generation_config__json": "[1]", "tokenizer__json": "[1]", "vocab__json": "[1]"}
    a = model_with(tmp_path / "a", **old)
    b = model_with(tmp_path / "b", config__json="[2]", tokenizer__model="2")
    run("pack", a, tmp_path / "p")
    (tmp_path / "p" / "README.md").write_text("mine")
    run("pack", b, tmp_path / "p", "--overwrite")
    assert beside(tmp_path / "p") == {"config.json": "[2]", "tokenizer.model": "2", "README.md": "mine"}


def test_a_tokenizer_that_the_user_has_put_beside_a_pack_stays(tmp_path: Path) -> None:
    a = model_with(tmp_path / "a", config__json="[1]")
    run("pack", a, tmp_path / "p")
    (tmp_path / "p" / "tokenizer.json").write_text("[3]")
    run("pack", a, tmp_path / "p", "--overwrite")
    assert beside(tmp_path / "p") == {"config.json": "[1]", "tokenizer.json": "[3]"}
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("[4]")
    run("unpack", tmp_path / "p", out)
    assert beside(out) == {"config.json": "[4]", "tokenizer.json": "[3]"}


@pytest.mark.parametrize("name", ["spm.model", "source.spm", "target.spm", "bpe.codes", "tekken.json"])
def test_files_of_all_tokenizers_are_copied(name: str, tmp_path: Path) -> None:
    a = model_with(tmp_path / "a", config__json="[1]")
    (a / name).write_text("it")
    (a / "notes.txt").write_text("not it")
    (tmp_path / "p").mkdir()
    copy_companions(a, tmp_path / "p")
    assert beside(tmp_path / "p") == {"config.json": "[1]", name: "it"}


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_without_room_for_what_stands_beside_the_weights_these_are_told_to_be_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model_with(tmp_path / "a", config__json="[1]", tokenizer__json="[1]")
    if command == "unpack":
        source = tmp_path / "p"
        run("pack", tmp_path / "a", source)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    out = tmp_path / "out"
    told = " ".join(run(command, source, out, code=1).stderr.split())
    assert f"the weights in {out} are whole, but " in told
    assert told.endswith(f"; copy config.json and the tokenizer's files from {source} yourself")
    assert beside(out) == {}
    monkeypatch.undo()
    assert tierstore.load_pack(out) if command == "pack" else read_safetensors(out / "model.safetensors")


def test_a_part_of_a_checkpoint_is_packed_under_its_own_names(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": {"w": torch.zeros(3)}, "epoch": 3}, tmp_path / "a.pt")
    told = run("pack", tmp_path / "a.pt", tmp_path / "all.safetensors").output
    assert "left out, because they are not tensors: 'epoch'" in told
    assert "names begin with 'model', 'optimizer': --below model packs what is there, under its own names" in told
    told = run("pack", "--below", "model", tmp_path / "a.pt", tmp_path / "model.safetensors").output
    assert "left out" not in told
    assert "names begin" not in told
    assert list(tierstore.load_pack(tmp_path / "model.safetensors")) == ["w"]
    said = run("pack", "--below", "ema", tmp_path / "a.pt", tmp_path / "no.safetensors", code=2).stderr
    assert "lies below 'ema'; some do below 'model' (1), 'optimizer' (1)" in said


@pytest.mark.parametrize("text", ['{"n_layer": Infinity}', '{"n_layer": 3} // three', "[3]", "{}"])
def test_a_configuration_that_cannot_be_read_costs_only_its_hint(tmp_path: Path, text: str) -> None:
    tensors = small_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    shown = run("pack", tmp_path / "model.safetensors", tmp_path / "p", "--memory", "1TiB").output
    assert "order from the names of the tensors: config.json says nothing, or is not valid JSON" in shown
    run("unpack", tmp_path / "p", tmp_path / "out", "--memory", "1TiB")
    assert read_safetensors(tmp_path / "out" / "model.safetensors") == tensors


def test_two_packs_into_one_directory_copy_what_is_beside_them_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, waits = tmp_path / "model", tmp_path / "p", threading.Event()
    for folder in (source, out):
        folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text("{}")
    copy, nap = shutil.copyfile, time.sleep

    def copy_too() -> None:
        copy_companions(source, out)
        waits.set()

    def copy_while_another_one_begins(*names: Path) -> None:
        if not other.ident:
            other.start()
            assert waits.wait(30)
        copy(*names)

    def wait_for_the_turn(seconds: float) -> None:
        waits.set()
        nap(seconds)

    other = threading.Thread(target=copy_too)
    monkeypatch.setattr(shutil, "copyfile", copy_while_another_one_begins)
    monkeypatch.setattr(time, "sleep", wait_for_the_turn)
    copy_companions(source, out)
    other.join()
    assert {path.name: path.read_text() for path in out.iterdir()} == {"config.json": "{}", "tokenizer.json": "{}"}


@pytest.mark.parametrize(
    ("command", "number"),
    [("pack", signal.SIGTERM), ("pack", signal.SIGINT), ("unpack", signal.SIGHUP), ("unpack", signal.SIGINT)],
)
def test_a_signal_is_one_sentence_and_leaves_nothing(
    command: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint(tmp_path / "a")
    run("pack", tmp_path / "a", tmp_path / "p.safetensors", "--memory", "1TiB")
    seen: list[str] = []
    once = threading.Lock()  # a second Ctrl-C would say so, a third end the process

    def interrupted(file: BlockFile, *_: object) -> None:
        seen.append(file.path.name)
        if once.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            time.sleep(0.1)  # as a real write takes: else all may be done before the main thread looks for signals

    monkeypatch.setattr(BlockFile, "write_from", interrupted)
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # a shell that starts tests in the background has SIGINT ignored
    source = tmp_path / {"pack": "a", "unpack": "p.safetensors"}[command]
    result = run(command, source, tmp_path / "out", "--memory", "1TiB", code=128 + number)
    assert result.stderr == "tierstore: interrupted; what was not finished is removed\n"
    assert seen
    assert all(name.endswith(PARTIAL) for name in seen)
    assert not (tmp_path / "out").exists()
    assert signal.signal(number, before) is usual


@pytest.mark.parametrize("command", ["pack", "unpack", "verify", "inspect"])
def test_a_file_that_was_not_finished_is_told_as_one(command: str, tmp_path: Path) -> None:
    left = tmp_path / f"model.safetensors{PARTIAL}"
    left.write_bytes(bytes(4096))
    arguments = [command, left, *([tmp_path / "out"] if command in ("pack", "unpack") else [])]
    result = run(*arguments, code=1)
    assert f"{left.name} is not finished; if nobody writes it now" in " ".join(result.stderr.split())


def test_a_directory_may_be_called_as_one(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    run("pack", tmp_path / "a", tmp_path / f"p{PARTIAL}", "--shards", 2, "--memory", "1TiB")
    run("verify", tmp_path / f"p{PARTIAL}")


def test_names_are_no_markup(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"[/x].0.w": ("U8", (5000,), bytes(5000))})
    pack = tmp_path / "q[" / "z].safetensors"
    assert "z].safetensors" in run("pack", tmp_path / "a", pack, "--memory", "1TiB").output
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    assert "[/x].0" in run("verify", pack, "--memory", "1TiB", code=1).output


def test_damage_is_shown_and_is_an_exit_code(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    run("pack", tmp_path / "a", tmp_path / "p.safetensors", "--memory", "1TiB")
    data = bytearray((tmp_path / "p.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "p.safetensors").write_bytes(data)
    result = run("verify", tmp_path / "p.safetensors", "--memory", "1TiB", "--json", tmp_path / "j", code=1)
    assert "ln_f" in result.output
    assert "1 damaged; 5 chunks" in result.stderr
    assert "; pack again, or restore the files from a copy" in result.stderr
    assert [one["tensors"] for one in json.loads((tmp_path / "j").read_text())["damages"]] == [["ln_f"]]


@pytest.mark.parametrize(
    ("phase", "number", "command"),
    [
        ("open_source", signal.SIGINT, "pack"), ("measure", signal.SIGTERM, "pack"),
        ("open_archive", signal.SIGTERM, "unpack"),
    ],
)  # fmt: skip
def test_a_signal_does_not_wait_for_what_only_computes(
    phase: str, number: signal.Signals, command: str, tmp_path: Path
) -> None:
    program, work = tmp_path / "endless.py", tmp_path / "work"
    program.write_text(ENDLESS)
    work.mkdir()
    small_checkpoint(work / "a")
    arguments = [program, int(number), phase, command, work / "a", work / "out"]
    result = run_program([str(one) for one in arguments], tmp_path)
    said = "tierstore: interrupted; what was not finished is removed\n"
    assert (result.returncode, result.stderr) == (128 + number, said)
    assert [path.name for path in work.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pack", "nothing", "out"], 1, "there is no nothing"),
        (["pack", "a", "out", "--codec", "zip"], 2, "'zip' is not one of 'none', 'lz4', 'lz4-bitshuffle'"),
        (["pack", "a", "out", "--memory", "1MiB"], 2, "--memory 1 MiB is too small"),
        (["pack", "a", "out", "--memory", "lots"], 2, "not a size"),
        (["pack", "a", "out", "--chunk", "5000"], 2, "a chunk of 5000 B is not a multiple of 4096"),
        (["pack", "a", "out", "--codec", "auto", "--read-rate", "0/s"], 2, "--read-rate 0 reads nothing"),
        (["pack", "a", "out", "--read-rate", "2GB"], 2, "--read-rate needs --codec auto"),
        (["unpack", "a", "out", "--shard-size", "0"], 2, "--shard-size must be at least 64KiB, not 0 B"),
        (["unpack", "a", "b.pt", "--shard-size", "5GB"], 2, "--shard-size needs a directory, and b.pt is"),
        (["pack", "a", "out", "--json", "nowhere/x"], 2, "its directory is missing or not writable"),
        (["verify", "a", "--json", "."], 2, "it is a directory; give the name of a file"),
        (["pack", "a", "away"], 2, "/away is a link to no directory"),
        (["pack", "a", "away/below"], 2, "cannot write to away/below: "),
        (["pack", "a", "empty/below"], 2, "/empty is not a directory"),
        (["pack", "empty", "out"], 1, "shorter than the 8 B"),
        (["unpack", "a"], 2, "give a pack and a destination"),
        (["unpack", "a", "out"], 1, "is an ordinary safetensors file, not a pack"),
        (["verify", "a"], 1, "is an ordinary safetensors file, not a pack"),
        (["verify", "empty"], 1, "shorter than the 8 B"),
        (["inspect", "nothing"], 1, "there is no nothing"),
        (["inspect", "."], 1, "tierstore: . holds neither a pack (model.safetensors or "
         "model.safetensors.index.json) nor a generation of a store\n"),
        (["verify", "."], 1, "tierstore: . holds neither a pack (model.safetensors or "
         "model.safetensors.index.json) nor a generation of a store\n"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    small_checkpoint(tmp_path / "a")
    (tmp_path / "empty").touch()
    (tmp_path / "away").symlink_to("gone")
    before = sorted(tmp_path.rglob("*"))
    result = run(*arguments, code=code)
    assert message in result.output
    assert "Traceback" not in result.output
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written"


def test_a_terminal_of_few_letters_shows_the_others_as_question_marks(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    run("pack", tmp_path / "a", tmp_path / "p.safetensors", "--memory", "1TiB")
    command = [sys.executable, "-m", "tierstore.cli", "inspect", str(tmp_path / "p.safetensors")]
    few = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    shown = subprocess.run(command, env=few, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "? " in shown.stdout


def test_what_is_no_pack_is_told_what_it_is(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    run("pack", tmp_path / "a", tmp_path / "x", tmp_path / "y", "--memory", "1TiB")
    said = run("verify", tmp_path / "y", tmp_path / "x", code=1).stderr
    assert "of a striped pack the directory that holds the index comes first" in said
    run("unpack", tmp_path / "x", tmp_path / "y", tmp_path / "sharded", "--shard-size", "100KB", "--memory", "1TiB")
    assert "is the index of an ordinary checkpoint; make a" in run("verify", tmp_path / "sharded", code=1).stderr
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    assert "is a zip file, as torch.save makes them" in run("verify", tmp_path / "w.pt", code=1).stderr
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / INDEX).write_text('{"weight_map": {}}')
    assert "names no tensors" in run("pack", tmp_path / "none", tmp_path / "p.safetensors", code=1).stderr
    torch.save({"a": {"b": torch.ones(3)}, "a.b": torch.ones(3)}, tmp_path / "twice.pt")
    said = run("pack", tmp_path / "twice.pt", tmp_path / "p.safetensors", code=1).stderr
    assert "keys of dictionaries inside dictionaries are joined by dots" in said
    assert "give the directory that holds it" in run("verify", tmp_path / "x" / INDEX, code=1).stderr
    with pytest.raises(ConfigError, match="no pack is named"):
        tierstore.load_pack([])


def _some_packs(folder: Path) -> None:
    small_checkpoint(folder / "a", blocks=1)
    for places in ("one.safetensors", "two.safetensors", "d/model.safetensors", "x y"):
        packed(folder / "a", *(folder / place for place in places.split()), memory_bytes=2**40)
    for link, place in (("link", "d"), ("link-x", "x")):
        (folder / link).symlink_to(place)


@pytest.mark.parametrize("command", ["verify", "inspect", "unpack"])
def test_a_path_that_is_no_part_of_a_pack_is_refused(command: str, tmp_path: Path) -> None:
    """Otherwise it would look as if it had been read, too."""
    _some_packs(tmp_path)
    options = [tmp_path / "out"] if command == "unpack" else []
    for paths, idle in (
        ("one.safetensors two.safetensors", "two.safetensors"), ("one.safetensors nothing", "nothing"),
        ("d two.safetensors", "two.safetensors"), ("d x", "x"), ("x y d", "d"), ("x x/../d y", "x/../d"),
        *([("a one.safetensors", "one.safetensors")] if command == "inspect" else []),
    ):  # fmt: skip
        said = run(command, *(f"{tmp_path}/{name}" for name in paths.split()), *options, code=2).stderr
        told = f"nothing would be read from {tmp_path}/{idle}: give one pack, or"
        assert told in said
        assert not (tmp_path / "out").exists()


def test_a_part_of_a_pack_may_be_given_twice_and_by_another_name(tmp_path: Path) -> None:
    _some_packs(tmp_path)
    for paths in (
        "d d/", "d link", "x y x", "link-x y", "one.safetensors ./one.safetensors", "d d/model.safetensors",
    ):  # fmt: skip
        assert "all as written" in run("verify", *(f"{tmp_path}/{name}" for name in paths.split())).output
    files = sorted((tmp_path / "x").glob("*.safetensors")) + sorted((tmp_path / "y").glob("*.safetensors"))
    assert "all as written" in run("verify", tmp_path / "x", tmp_path / "y", *files).output
    assert "is one of 2 files; give the directory" in run("verify", *files, code=1).stderr


@pytest.mark.parametrize("command", ["verify", "inspect", "unpack", "pack", "codecs"])
def test_a_path_that_the_system_refuses_is_one_sentence(command: str, tmp_path: Path) -> None:
    said = run(command, tmp_path / ("x" * 300), *([tmp_path / "out"] if command in ("unpack", "pack") else []), code=1)
    assert "File name too long" in said.stderr
    assert "Traceback" not in said.stderr
    with pytest.raises(StorageError, match="File name too long"):
        tierstore.load_pack("x" * 300)


def test_a_pack_of_many_tensors_is_read_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts how often the tensors are computed: a time would depend on the machine, too."""
    write_safetensors(tmp_path / "a", {f"h.{i // 20}.{i % 20}": ("U8", (3,), bytes(3)) for i in range(400)})
    run("pack", tmp_path / "a", tmp_path / "p.safetensors", "--memory", "1TiB")
    asked = 0
    found = Header.__dict__["tensors"]
    tensors = found.func

    def counted(header: Header) -> dict[str, TensorEntry]:
        nonlocal asked
        asked += 1
        result: dict[str, TensorEntry] = tensors(header)
        return result

    monkeypatch.setattr(found, "func", counted)
    assert len(tierstore.load_pack(tmp_path / "p.safetensors")) == 400
    assert asked <= 4
