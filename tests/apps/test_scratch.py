"""A run's own directory is removed with it, or when the next run begins; those of a person or another run stay."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tierstore.apps.scratch import clear_scratch, made, scratch

pytestmark = pytest.mark.usefixtures("no_leaks")

KILLED = """
import os, signal, sys
from pathlib import Path
from tierstore.apps.scratch import scratch

with scratch(Path(sys.argv[1]), "run-") as path:
    (path / "folder").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_private_and_goes_with_what_it_holds(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), scratch(tmp_path, "run-") as path:
        assert (os.listdir(tmp_path), path.stat().st_mode & 0o777) == ([path.name], 0o700)
        (path / "folder").mkdir()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_directory_that_was_made_for_it_goes_unless_it_is_in_use(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), made(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    with made(tmp_path / "a" / "b"):
        (tmp_path / "a" / "mine").touch()
    with made(tmp_path / "a"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "mine"]


def test_only_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode == -9
    (left,) = tmp_path.iterdir()
    kept = ["run-0123456789abcdef0", "run-results", "other-0123456789abcdef"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "run-00000000000000f0").touch()
    (tmp_path / "run-00000000000000f1").symlink_to(tmp_path / "run-results")
    with scratch(tmp_path, "run-") as path:
        assert clear_scratch(tmp_path, "run-") == [left]
        kept += [path.name, "run-00000000000000f0", "run-00000000000000f1"]
        assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_what_is_killed_while_it_cleans_up_is_found_by_the_next_run(tmp_path: Path) -> None:
    script = KILLED.replace('"folder").mkdir()', '"file").touch()')
    script = script.replace("    os.kill", "    Path.unlink = lambda *_, **__: os.kill")
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    (left,) = tmp_path.iterdir()
    assert sorted(os.listdir(left)) == [".lock", "file"]
    assert clear_scratch(tmp_path, "run-") == [left]


def test_where_directories_cannot_be_locked_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, lock: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refused)
    with scratch(tmp_path, "run-") as path:
        assert clear_scratch(tmp_path, "run-") == []
        assert path.is_dir()
