"""`tierstore delete` removes a store and nothing else; what is no store, or in use, is refused and stays as it is."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from runs import next_token_loss, tiny, tokens
from typer.testing import CliRunner

from tierstore.cli import app
from tierstore.config import TierConfig
from tierstore.errors import ConfigError, StorageError
from tierstore.io.backend import Backend
from tierstore.store.removal import remove
from tierstore.train.engine import Engine

pytestmark = pytest.mark.usefixtures("no_leaks")


def engine(*directories: Path, resume: str = "never") -> Engine:
    tiers = TierConfig(gpu_memory="4MiB", cpu_memory="3MiB", nvme=directories)
    return Engine(tiny(blocks=1), tiers, resume=resume)


def trained(*directories: Path) -> None:
    with engine(*directories) as running:
        running.backward(next_token_loss(running, tokens(1)[0]))
        running.step()


def delete(*arguments: str | Path, **options: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["delete", *map(str, arguments)], **options)
    return result.exit_code, result.output


def names(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def test_a_store_over_two_directories_goes_and_nothing_else(tmp_path: Path) -> None:
    first, second, beside = tmp_path / "a", tmp_path / "b", tmp_path / "beside"
    trained(first, second)
    beside.write_text("mine")
    (second / "notes.txt").write_text("mine")
    (second / "weights.c.safetensors").write_text("mine")
    (second / "state.a.safetensors.link").symlink_to(beside)
    stored = sum(path.stat().st_size for path in first.iterdir())
    code, output = delete(first, second, "--yes", "--json", tmp_path / "j")
    assert code == 0, output
    assert f"{second}: no store made 'notes.txt', 'state.a.safetensors.link', 'weights.c.safetensors'" in output
    left = {"notes.txt", "weights.c.safetensors", "state.a.safetensors.link"}
    assert names(tmp_path) == {"b", "beside", "j", *(f"b/{name}" for name in left)}
    told = json.loads((tmp_path / "j").read_text())["directories"]
    assert told[0]["file_bytes"] == stored
    assert beside.read_text() == "mine"


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "weights.a.safetensors").touch()
    (tmp_path / "project" / "thesis.txt").touch()
    (tmp_path / "empty").mkdir()
    trained(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = names(tmp_path)
    for name, message in (
        ("project", "is not a store: it holds 'weights.a.safetensors', 'thesis.txt'; nothing was removed"),
        ("empty", "is not a store: it is empty"),
        ("absent", "is not a directory"),
        ("link", f"is a link to {tmp_path / 'run'}; give that directory"),
    ):
        code, output = delete(tmp_path / name, "--yes")
        assert (code, message in output) == (2, True), output
    code, output = delete(tmp_path / "run", tmp_path / "project", "--yes")
    assert (code, "has 1 of the 2 directories; give those of one store only" in output) == (2, True), output
    assert names(tmp_path) == before


def test_one_of_two_directories_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "b")
    code, output = delete(tmp_path / "a", "--yes")
    assert (code, "is striped over 2 directories; give all of them" in output) == (2, True), output


def test_the_second_of_two_directories_alone_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "b")
    before = names(tmp_path)
    code, output = delete(tmp_path / "b", "--yes")
    assert (code, "is striped over 2 directories; give all of them" in output) == (2, True), output
    assert names(tmp_path) == before
    with engine(tmp_path / "a", tmp_path / "b", resume="must") as running:
        assert running.step_count == 1


def test_halves_of_two_stores_are_refused(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    trained(a, b)
    trained(c, d)  # the same model and steps: packs of the same names, sizes and bytes
    before = names(tmp_path)
    for wrong in ((a, d), (c, b), (d, a), (b, d)):
        code, output = delete(*wrong, "--yes")
        assert (code, f"{wrong[0]} and {wrong[1]} belong to different stores" in output) == (2, True), output
    for twice in ((a, a), (a, b, b), (a, b, tmp_path / "c" / ".." / "b")):
        code, output = delete(*twice, "--yes")
        assert (code, "a directory is listed twice; nothing was removed" in output) == (2, True), output
    said = {name: (tmp_path / name / "identity").read_bytes() for name in "abcd"}
    with pytest.raises(ConfigError, match="belong to different stores: give all"), engine(a, d, resume="must"):
        pass
    for command in ("verify", "inspect"):
        result = CliRunner().invoke(app, [command, str(a), str(d)])
        assert (result.exit_code, "different stores" in " ".join(result.output.split())) == (2, True), result.output
    assert {name: (tmp_path / name / "identity").read_bytes() for name in "abcd"} == said
    assert names(tmp_path) == before
    assert delete(d, c, "--yes")[0] == 0, "in any order"
    with engine(a, b, resume="must") as running:
        assert running.step_count == 1


def test_two_stores_at_once_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "a")
    trained(tmp_path / "b")
    before = names(tmp_path)
    code, output = delete(tmp_path / "a", tmp_path / "b", "--yes")
    assert (code, "has 1 of the 2 directories" in output) == (2, True), output
    assert names(tmp_path) == before


def test_damage_does_not_make_a_striped_store_stay(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "b")
    for path in (*tmp_path.glob("a/manifest-*"), *tmp_path.glob("b/*.safetensors")):
        path.write_bytes(b"damaged")
    assert delete(tmp_path / "a", tmp_path / "b", "--yes")[0] == 0
    assert not names(tmp_path)


@pytest.mark.parametrize("silent", ["a b", "a", "b"])
def test_a_striped_store_of_an_older_release_is_deleted_when_it_was_resumed(silent: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    trained(a, b)
    for name in silent.split():
        (tmp_path / name / "identity").unlink()
    code, output = delete(a, b, "--yes")
    assert (code, "has no readable file 'identity'" in output) == (2, True), output
    with engine(a, b, resume="must") as running:
        assert running.step_count == 1
    assert delete(b, a, "--yes")[0] == 0
    assert not names(tmp_path)


def test_what_a_kill_leaves_beside_files_of_others_goes_later(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Killing(Backend):
        def remove(self, path: Path) -> None:
            if path.suffix == ".safetensors":  # after the manifests
                raise Killed
            super().remove(path)

    trained(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(Killed):
        remove([tmp_path / "a"], Killing())
    assert delete(tmp_path / "a", "--yes")[0] == 0
    assert names(tmp_path / "a") == {"notes.txt"}


def test_one_in_use_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path / "run") as running:
        running.flush()
        code, output = delete(tmp_path / "run", "--yes")
        assert (code, f"is in use by process {os.getpid()}" in output) == (1, True), output
        running.backward(next_token_loss(running, tokens(1)[0]))
        running.step()
    with engine(tmp_path / "run", resume="must") as running:
        assert running.step_count == 1


def test_a_directory_that_the_system_keeps_stays_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    trained(a, b)
    monkeypatch.chdir(a)
    code, output = delete(".", b, "--yes", "--json", "../removed.json")
    assert code == 0, output
    assert names(tmp_path) == {"a", "removed.json"}


def test_without_an_answer_nothing_goes(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    before = names(tmp_path)
    code, output = delete(tmp_path / "run")
    assert (code, "give --yes" in output) == (2, True), output
    assert names(tmp_path) == before


class Interrupted(io.BytesIO):
    """A terminal on which Ctrl-C answers."""

    def isatty(self) -> bool:
        return True

    def read1(self, size: int | None = -1) -> bytes:
        signal.raise_signal(signal.SIGINT)
        return b""


def test_an_interrupt_at_the_question_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.testing.make_input_stream", lambda *_: Interrupted())
    trained(tmp_path / "run")
    before = names(tmp_path)
    code, output = delete(tmp_path / "run")
    assert (code, "for ever?" in output, "tierstore: nothing was removed" in output) == (130, True, True), output
    assert names(tmp_path) == before


def test_a_damaged_store_goes_too(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    for path in (tmp_path / "run").glob("manifest-*"):
        path.write_bytes(b"damaged")
    assert delete(tmp_path / "run", "--yes")[0] == 0
    assert not names(tmp_path)


class Killed(Backend):
    """Removes `after` files, then fails."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def _call_unlink(self, path: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error")
        super()._call_unlink(path)


def test_one_that_was_not_finished_leaves_no_generation_and_can_be_finished(tmp_path: Path) -> None:
    for after in range(3):
        trained(tmp_path / "run")
        with pytest.raises(StorageError):
            remove([tmp_path / "run"], Killed(after))
        manifests = {name for name in names(tmp_path) if "manifest" in name}
        assert len(manifests) == max(0, 2 - after), "first of all what makes a generation"
        remove([tmp_path / "run"])
        assert not names(tmp_path)


def test_a_striped_store_that_was_not_finished_can_be_finished(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for after in itertools.count():
        trained(a, b)
        with contextlib.suppress(StorageError):
            remove([a, b], Killed(after))
            break
        remove([path for path in (a, b) if any(path.iterdir())])
        for path in (a, b):
            if path.exists():
                path.rmdir()
    assert after > 10
    assert not names(tmp_path)
