"""Threads without work sleep soon: what OpenMP itself says of it when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_ASKING = "from tierstore.apps.spinning import ask_for_short_spins; ask_for_short_spins(); import torch"
_OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def spins(arguments: Sequence[str], **wishes: str) -> set[str]:
    """What the process says of its spinning; nothing without GNU's OpenMP."""
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **wishes}
    told = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)
    return {line.split("=")[1].strip(" '") for line in told.stderr.splitlines() if "GOMP_SPINCOUNT" in line}


@pytest.fixture(scope="module", autouse=True)
def _only_with_gnus() -> None:
    if not spins(["-c", "import torch"]):
        pytest.skip("torch has another OpenMP than GNU's")


def test_it_is_short() -> None:
    assert spins(["-c", _ASKING]) == {"10000"}


@pytest.mark.parametrize("wish", [{"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "ACTIVE"}], ids=str)
def test_a_wish_of_the_environment_is_kept(wish: dict[str, str]) -> None:
    assert spins(["-c", _ASKING], **wish) == spins(["-c", "import torch"], **wish)


@pytest.mark.parametrize("command", ["train", "tune", "probe"])
def test_commands_ask_before_torch_is_there(command: str, tmp_path: Path) -> None:
    small = ["--preset", "25m", "--sequence", "8", "--steps", "2", "--dtype", "fp32"]
    arguments = {
        "train": [*small, "--durability", "none", "--evaluate", "0"],
        "tune": [*small, "--nvme", str(tmp_path), "--depth", "1"],
        "probe": ["--nvme", str(tmp_path), "--quick", "--size", "32MiB", "--seconds", "0.1"],
    }
    assert spins(["-m", "tierstore.cli", command, *arguments[command]]) == {"10000"}
