"""Threads without work sleep soon, by the settings that OpenMP itself prints when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_ASKING = "from tierstore.apps.spinning import ask_for_short_spins; ask_for_short_spins()"
_LOADING = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_UNTIL_TORCH = """
import os, sys

class EndsAtTorch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            loaded = "libgomp" in open("/proc/self/maps").read()
            print("GOMP_SPINCOUNT is", os.environ.get("GOMP_SPINCOUNT"), "and it is read" if loaded else "", flush=True)
            os._exit(0)

sys.meta_path.insert(0, EndsAtTorch)
from tierstore.cli import main
main()
"""


def run(*arguments: str, **wishes: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **wishes}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment)


def spins(program: str, *arguments: str, **wishes: str) -> set[str]:
    """The spin counts that OpenMP prints when the program loads it."""
    told = run("-c", program, *arguments, **wishes).stderr
    return {line.split("=")[1].strip(" '") for line in told.splitlines() if "GOMP_SPINCOUNT" in line}


@pytest.fixture(scope="module")
def openmp() -> str:
    """Path of GNU's OpenMP, which comes with torch."""
    found = find_spec("torch")
    assert found is not None
    libraries = list(Path(str(found.origin)).parent.glob("lib/libgomp*"))
    if not libraries:
        pytest.skip("torch has another OpenMP than GNU's")
    return str(libraries[0])


@pytest.mark.parametrize("wish", [{}, {"GOMP_SPINCOUNT": "77"}, {"OMP_WAIT_POLICY": "ACTIVE"}], ids=str)
def test_it_is_short_but_for_a_wish_of_the_environment(wish: dict[str, str], openmp: str) -> None:
    asked = spins(f"{_ASKING}; {_LOADING}", openmp, **wish)
    assert asked == (spins(_LOADING, openmp, **wish) if wish else {"10000"})


@pytest.mark.parametrize("command", ["train", "tune", "probe"])
def test_commands_ask_before_torch_is_there(command: str, tmp_path: Path) -> None:
    arguments = {
        "train": ["--preset", "25m", "--durability", "none"],
        "tune": ["--preset", "25m", "--nvme", str(tmp_path)],
        "probe": ["--nvme", str(tmp_path), "--quick"],
    }
    assert run("-c", _UNTIL_TORCH, command, *arguments[command]).stdout.strip() == "GOMP_SPINCOUNT is 10000"
