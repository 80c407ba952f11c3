from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tierstore.apps.metrics import StepLog, peak_resident_bytes
from tierstore.errors import ConfigError, StorageError, StorageFull


def test_lines_are_there_when_append_returns(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log")
    log.open(resumed=False)
    log.begin()
    log.append({"step": 1, "loss": 0.1, "nested": {"values": [float("nan"), float("inf"), 2.5]}})
    line = json.loads((tmp_path / "log").read_text())
    assert line == {"step": 1, "loss": 0.1, "nested": {"values": [None, None, 2.5]}}
    log.close()
    log.close()


@pytest.mark.parametrize(("before", "kept"), [("a\nb\nhalf", "a\nb\n"), ("half", ""), ("a\n", "a\n"), ("", "")])
def test_a_resumed_log_keeps_its_whole_lines(tmp_path: Path, before: str, kept: str) -> None:
    path = tmp_path / "log"
    path.write_text(before)
    log = StepLog(path)
    log.open(resumed=True)
    assert path.read_text() == before  # opening alone changes nothing
    log.begin()
    log.append({"step": 3})
    log.close()
    assert path.read_text() == kept + '{"step": 3}\n'


@pytest.mark.parametrize("call", ["fstat", "pread", "ftruncate"])
def test_half_a_line_that_cannot_be_cut_off_is_told(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "log").write_text("half")
    log = StepLog(tmp_path / "log")
    log.open(resumed=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StorageError, match=r"cannot cut half a line off .*/log: Input/output error"):
            log.begin()
    log.close()


def test_a_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n" + "x" * 200_000)
    log = StepLog(path)
    log.open(resumed=True)
    log.begin()
    log.close()
    assert path.read_text() == "first\n"


def test_lines_of_another_run_are_refused_and_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("line\n")
    with pytest.raises(ConfigError, match=r"--json .*/log holds the lines of another run.*remove it"):
        StepLog(path).open(resumed=False)
    assert path.read_text() == "line\n"


def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write --json .*/missing/log: No such file or directory"):
        StepLog(tmp_path / "missing" / "log").open(resumed=False)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(ConfigError, match=r"/log: it is not a regular file"):
        StepLog(tmp_path / "log").open(resumed=False)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_said(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = StepLog(tmp_path / "log")
    log.open(resumed=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageFull, match=r"cannot write a line of .*/log: No space left on device"):
            log.append({"step": 1}) if call == "write" else log.sync()
    log.close()


def test_a_line_without_room_is_written_when_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, really = 5, os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        written = really(descriptor, data[:room])
        room -= written
        return written

    log = StepLog(tmp_path / "log")
    log.open(resumed=False)
    monkeypatch.setattr(os, "write", write)
    for step in (1, 2):
        with pytest.raises(StorageFull, match=r"cannot write a line of .*/log: Disk quota exceeded"):
            log.append({"step": step})
    assert (tmp_path / "log").read_text() == '{"ste'
    room = 1000
    log.append({"step": 3})
    log.write_rest()
    log.close()
    assert (tmp_path / "log").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_closed_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not open"):
        StepLog(tmp_path / "log").append({})
    with pytest.raises(StorageError, match="is not open"):
        StepLog(tmp_path / "log").sync()


def test_peak_memory_is_at_least_what_stands_here() -> None:
    assert peak_resident_bytes() > 10 * 2**20
