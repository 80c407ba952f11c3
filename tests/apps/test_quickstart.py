"""The quick start script, and the one of the tests: which arguments they pass on, and what becomes of the environment.

Their Python is a stand-in that writes its arguments down.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Quickstart = Callable[..., tuple[subprocess.CompletedProcess[str], list[str]]]
ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
cd "$(dirname "$0")/.."
case $1 in
  -m)
    printf '%s\\n' "$@" >arguments
    exit "$(cat status)"
    ;;
  -) ! cat trouble >&2 2>/dev/null ;;  # the check of the environment
esac
"""


@pytest.fixture
def quickstart(tmp_path: Path) -> Quickstart:
    """A function that runs a script; it returns the result and the arguments of `train`, or of pytest."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    stamps = f'for extra in transformers dev; do stamp_text $extra >"{tmp_path}/.tierstore-$extra"; done'
    subprocess.run(["bash", "-c", f'root={ROOT}; . "$root/tools/environment.sh"; {stamps}'], check=True)

    def run(
        *arguments: str, status: int = 0, environment: Path = tmp_path, folder: Path = tmp_path.parent,
        script: str = f"{ROOT}/tools/quickstart.sh", **variables: str,
    ) -> tuple[subprocess.CompletedProcess[str], list[str]]:  # fmt: skip
        (tmp_path / "status").write_text(str(status))
        result = subprocess.run(
            ["bash", script, *arguments], capture_output=True, text=True, timeout=60, cwd=folder,
            env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "TIERSTORE_VENV": str(environment), **variables},
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


def test_an_environment_that_does_not_work_now_stays_as_it_is(quickstart: Quickstart, tmp_path: Path) -> None:
    (tmp_path / "trouble").write_text("MemoryError\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result, given = quickstart("--store", "kept")
    assert (result.returncode, given) == (1, [])
    assert result.stderr == (
        f"MemoryError\nquickstart.sh: what is installed in {tmp_path} does not work, see the message above; if that "
        "stays so, remove it: it is then made anew\n"
    )
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("what_install_makes", "is_kept"), [("works", False), ("trouble", True)])
def test_an_environment_of_the_repository_that_does_not_work_is_made_anew_if_that_works(
    what_install_makes: str, is_kept: bool, tmp_path: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "before").touch()
    (tmp_path / "pyproject.toml").touch()
    script = (
        f'set -euo pipefail; root={tmp_path}; . "{ROOT}/tools/environment.sh"; is_current() {{ false; }}; '
        f'install() {{ mkdir -p "$venv"; [ -e "$venv/before" ] || touch "$venv/{what_install_makes}"; }}; '
        'check_installation() { [ -e "$venv/works" ]; }; make_environment dev'
    )
    result = subprocess.run(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert (result.returncode != 0, (tmp_path / ".venv" / "before").exists()) == (is_kept, is_kept), result.stderr
    assert ("could not be made anew" in result.stderr) == is_kept
    assert [path.name for path in tmp_path.glob(".venv*")] == [".venv"]


def test_nothing_is_written_to_an_environment_that_is_current(quickstart: Quickstart, tmp_path: Path) -> None:
    stamp = tmp_path / ".tierstore-transformers"
    os.utime(stamp, (1, 1))
    assert quickstart("--store", "kept")[0].returncode == 0
    assert stamp.stat().st_mtime == 1


def test_an_environment_of_another_release_is_renewed(quickstart: Quickstart, tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    stamp = tmp_path / ".tierstore-transformers"
    current = stamp.read_text()
    stamp.write_text("of another release\n")
    result, given = quickstart("--store", "kept")
    assert (result.returncode, values(given, "--nvme"), stamp.read_text()) == (0, ["kept"], current)
    assert "installing" in result.stdout


def test_the_exported_search_path_of_cd_changes_nothing(quickstart: Quickstart) -> None:
    result, given = quickstart("--store", "kept", script="tools/quickstart.sh", folder=ROOT, CDPATH=".")
    assert (result.returncode, values(given, "--nvme")) == (0, ["kept"]), result.stderr


def test_tests_run_where_no_memory_can_be_written_to(quickstart: Quickstart, tmp_path: Path) -> None:
    df = tmp_path / "bin" / "df"
    df.write_text("#!/bin/sh\nexit 1\n")
    df.chmod(0o755)
    result, given = quickstart("-x", script="tools/run_tests.sh", folder=ROOT, CDPATH=".")
    assert (given[:2], given[-1]) == (["-m", "pytest"], "-x"), result.stdout


def test_the_script_becomes_the_run_whose_state_is_kept_and_so_gets_its_signals(
    quickstart: Quickstart, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    python.write_text(PYTHON.replace('exit "$(cat status)"', "kill -TERM $$"))
    assert quickstart("--store", "kept")[0].returncode == -signal.SIGTERM
