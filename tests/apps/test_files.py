"""Files that commands write: whole, or as they were."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierstore.apps.files import write_text
from tierstore.errors import StorageError
from tierstore.plots import new_figure, save_figure
from tierstore.trace import Tracer


def as_text(path: Path) -> None:
    write_text(path, "four rounds", "--json")


def as_picture(path: Path) -> None:
    save_figure(new_figure(1, 1), path)


def as_trace(path: Path) -> None:
    Tracer(time.perf_counter).to_chrome(path)


@pytest.mark.parametrize("write", [as_text, as_picture, as_trace])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_ends_the_writing_leaves_the_file_that_was_there(
    error: BaseException, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rounds.png"
    path.write_bytes(b"three rounds")

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:4])
            raise error

    monkeypatch.setattr("tierstore.whole_file.open", Full, raising=False)
    with pytest.raises(StorageError if isinstance(error, OSError) else type(error)):
        write(path)
    assert path.read_bytes() == b"three rounds"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write(path)
    assert path.read_bytes() != b"three rounds"
    assert list(tmp_path.iterdir()) == [path]


def test_who_may_read_a_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    write_text(path, "three rounds", "--json")
    path.chmod(0o640)
    write_text(path, "four rounds", "--json")
    assert (path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777) == ("four rounds", 0o640)


def test_a_name_that_is_not_utf_8_can_be_a_part_of_the_text(tmp_path: Path) -> None:
    write_text(tmp_path / "rounds.md", os.fsdecode(b"bench --nvme disk-\xff"), "--markdown")
    assert (tmp_path / "rounds.md").read_text(encoding="utf-8") == "bench --nvme disk-\\udcff"


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    write_text(link, "text", "--json")
    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "text"
    pipe = tmp_path / "pipe"  # not /dev/null, which a mistake here would replace for all
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text", "--json")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    code = "from pathlib import Path; from tierstore.apps.files import write_text; " \
           "write_text(Path('/dev/stdout'), 'text', '--json')"  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("text", "")
