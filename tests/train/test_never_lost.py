"""A training process is killed five times by SIGKILL in the middle of its system calls, and never loses a step.

The kills, and what is compared, are in `kill_loop.py`, which also runs alone, with as many kills as one likes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 3
LOOP = Path(__file__).with_name("kill_loop.py")
VARIANTS = (
    "forward", "forward-workers", "forward-3", "backward", "backward-3", "speculative", "speculative-lz4",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the loop says of each variant. All run in one process, which imports everything once."""
    folder = tmp_path_factory.mktemp("kills")
    command = [sys.executable, str(LOOP), "--kills", str(KILLS), "--directory", str(folder)]
    command += [part for name in VARIANTS for part in ("--variant", name)]
    # To files: workers of a data loader, whose parent was killed, keep a pipe open for some seconds.
    with (folder / "out").open("w") as out, (folder / "errors").open("w") as errors:
        status = subprocess.run(command, stdout=out, stderr=errors, timeout=300, check=False).returncode
    lines = (folder / "out").read_text().splitlines()
    found = dict(line.split(": ", 1) for line in lines)
    if status:
        failed = next((name for name in VARIANTS if name not in found), VARIANTS[-1])
        found[failed] = (folder / "errors").read_text()[-4000:]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_weights_position_and_random_states_are_those_of_an_uninterrupted_run(
    variant: str, outcomes: dict[str, str]
) -> None:
    outcome = outcomes.get(variant, "an earlier variant failed")
    assert outcome.startswith(f"{KILLS} kills"), outcome
    assert outcome.endswith("all equal"), outcome
