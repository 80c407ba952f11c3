from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierstore.apps.metrics import StepLog, peak_resident_bytes
from tierstore.errors import ConfigError, StorageError


def test_lines_are_there_when_append_returns(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "log")
    log.open()
    log.begin(resumed=False)
    log.append({"step": 1, "loss": 0.1, "nested": {"values": [float("nan"), float("inf"), 2.5]}})
    line = json.loads((tmp_path / "log").read_text())
    assert line == {"step": 1, "loss": 0.1, "nested": {"values": [None, None, 2.5]}}
    log.close()
    log.close()


@pytest.mark.parametrize(
    ("before", "resumed", "kept"),
    [("a\nb\nhalf", True, "a\nb\n"), ("half", True, ""), ("a\n", True, "a\n"), ("", True, ""), ("a\nb\n", False, "")],
)
def test_a_resumed_log_keeps_its_whole_lines(tmp_path: Path, before: str, resumed: bool, kept: str) -> None:
    path = tmp_path / "log"
    path.write_text(before)
    log = StepLog(path)
    log.open()
    assert path.read_text() == before  # opening alone changes nothing
    log.begin(resumed=resumed)
    log.append({"step": 3})
    log.close()
    assert path.read_text() == kept + '{"step": 3}\n'


def test_a_long_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("first\n" + "x" * 200_000)
    log = StepLog(path)
    log.open()
    log.begin(resumed=True)
    log.close()
    assert path.read_text() == "first\n"


def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write --json .*/missing/log: No such file or directory"):
        StepLog(tmp_path / "missing" / "log").open()


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    log = StepLog(Path("/dev/full"))
    try:
        log.open()
    except ConfigError:
        pytest.skip("no /dev/full here")
    with pytest.raises(StorageError, match="cannot write a line of /dev/full: No space left on device"):
        log.append({"step": 1})
    log.close()


def test_a_closed_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not open"):
        StepLog(tmp_path / "log").append({})


def test_peak_memory_is_at_least_what_stands_here() -> None:
    assert peak_resident_bytes() > 10 * 2**20
