"""Training processes that are killed at any moment, also in the middle of a system call, never lose a step.

The kills and the comparisons are in `tests/crash/`; `tools/crash_loop.py` runs as many of them as one likes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import run_program

KILLS = 1
TOOL = Path(__file__).parents[2] / "tools" / "crash_loop.py"
VARIANTS = ("forward-workers", "forward-3", "backward", "speculative-lz4")  # of eight; the tool has all


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any]:
    """Exit code of the tool, and its findings or, if it has none, its output; run once, because it starts slowly."""
    folder = tmp_path_factory.mktemp("crashes")
    command = [str(TOOL), "--directory", str(folder), "--json", str(folder / "json")]
    command += ["--kills", str(KILLS * len(VARIANTS)), "--cuts", "2", "--soak", "8"]
    command += [word for variant in VARIANTS for word in ("--variant", variant)]
    ended = run_program(command, tmp_path_factory.mktemp("said"), wait_s=300.0)
    assert [path.name for path in folder.iterdir()] in (["json"], []), "a store is left"
    found = json.loads((folder / "json").read_text()) if ended.returncode <= 1 else ended.stdout + ended.stderr
    return ended.returncode, found


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_run_leaves_is_that_of_an_uninterrupted_one(variant: str, told: tuple[int, Any]) -> None:
    """Losses, norms, data positions, random states, weights, files, descriptors."""
    kills = told[1][0]
    assert all(claim["holds"] for claim in kills["claims"]), kills
    text = dict(kills["rows"])[variant]
    assert sum(map(int, re.findall(r"(\d+) (?:kills|stops)", text))) >= KILLS, text


def test_what_a_power_cut_leaves_goes_on(told: tuple[int, Any]) -> None:
    assert all(claim["holds"] for claim in told[1][2]["claims"]), told[1][2]


def test_a_disk_that_fails_changes_nothing(told: tuple[int, Any]) -> None:
    """Only the final weights are compared here; what steps cost shows only over many more of them."""
    soak = told[1][1]
    assert soak["claims"][0]["holds"], soak
    assert soak["figures"]["resumed"] >= 3
    assert sum(soak["figures"]["faults"].values()) > 3, soak
