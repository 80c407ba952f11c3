"""The quick start script: which arguments it passes on. Its Python is a stand-in that writes them down."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Quickstart = Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]
ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
if [ "$1" = "-m" ]; then
  printf '%s\\n' "$@" >"$(dirname "$0")/../arguments"
  exit "$(cat "$(dirname "$0")/../status")"
fi
"""


@pytest.fixture
def quickstart(tmp_path: Path) -> Quickstart:
    """A function that runs the script; it returns the result and the arguments of `train`."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    stamp = f'root={ROOT}; . "$root/tools/environment.sh"; stamp_text transformers >{tmp_path}/.tierstore-transformers'
    subprocess.run(["bash", "-c", stamp], check=True)

    def run(
        *arguments: str, status: int = 0, environment: Path = tmp_path
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        (tmp_path / "status").write_text(str(status))
        result = subprocess.run(
            ["bash", str(ROOT / "tools/quickstart.sh"), *arguments], capture_output=True, text=True, timeout=60,
            cwd=tmp_path.parent, env={"PATH": "/usr/bin:/bin", "TIERSTORE_VENV": str(environment)},
        )  # fmt: skip
        given = tmp_path / "arguments"
        return result, given.read_text().splitlines() if given.exists() else []

    return run


def values(arguments: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]


def test_alone_it_trains_its_preset_and_removes_the_state(quickstart: Quickstart) -> None:
    result, given = quickstart()
    assert (values(given, "--preset"), values(given, "--steps")) == (["25m"], ["45"])
    (store,) = values(given, "--nvme")
    assert not Path(store).exists()
    assert "the state was temporary and is removed" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--store", "kept", "--steps", "3"], ["--steps", "3", "--store", "kept"], ["--store=kept", "--steps=3"],
     ["--nvme", "kept"], ["--steps", "3", "--nvme=kept"]],
)  # fmt: skip
def test_a_store_is_the_only_one_wherever_it_stands(quickstart: Quickstart, arguments: list[str]) -> None:
    result, given = quickstart(*arguments)
    assert values(given, "--nvme") == ["kept"]
    assert "--store" not in given
    assert "removed" not in result.stdout


def test_the_environment_may_be_named_from_the_current_directory(quickstart: Quickstart, tmp_path: Path) -> None:
    result, given = quickstart("--store", "kept", environment=Path(tmp_path.name))
    assert (result.returncode, result.stderr, values(given, "--nvme")) == (0, "", ["kept"])


def test_several_disks_stay_several(quickstart: Quickstart) -> None:
    assert values(quickstart("--nvme", "a", "--nvme", "b")[1], "--nvme") == ["a", "b"]


@pytest.mark.parametrize("option", ["--preset", "--config", "--checkpoint"])
def test_a_model_that_is_given_replaces_the_preset(quickstart: Quickstart, option: str) -> None:
    _, given = quickstart(option, "mine")
    assert {name: values(given, name) for name in ("--preset", option)} == {"--preset": [], option: ["mine"]}
    assert "--preset" not in quickstart(f"{option}=mine")[1]


@pytest.mark.parametrize("arguments", [["--store"], ["--store", "--steps", "3"], ["--store="], ["--nvme", ""]])
def test_a_missing_directory_is_one_sentence(quickstart: Quickstart, arguments: list[str]) -> None:
    result, given = quickstart(*arguments)
    name = arguments[0].rstrip("=")
    assert (result.returncode, result.stderr, given) == (1, f"quickstart.sh: {name} needs a directory\n", [])


@pytest.mark.parametrize("arguments", [["--options", "mine.json"], ["--steps", "3", "--options=mine.json"]])
def test_a_file_whose_options_would_be_overridden_is_refused(quickstart: Quickstart, arguments: list[str]) -> None:
    result, given = quickstart(*arguments)
    assert (result.returncode, given) == (1, [])
    assert result.stderr.startswith("quickstart.sh: options of this script would override those of the file")


@pytest.mark.parametrize(("status", "is_said"), [(0, True), (1, False), (2, False), (130, True), (143, True)])
def test_what_became_of_the_state_is_said_of_a_run_that_was_one(
    quickstart: Quickstart, status: int, is_said: bool
) -> None:
    result, _ = quickstart(status=status)
    assert (result.returncode, "removed" in result.stdout) == (status, is_said)
