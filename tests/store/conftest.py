"""A store to go on from, for tests of what happens when its disk fails: one step of a small model, all on disk.

Scope: `begun`, and `expected`, the states that a run without faults goes through.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from resuming import DISK, State, Way, expected_states, opened

_WAY, _BEGUN, _STEPS = Way("forward", cpu_memory=DISK), 1, 3


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """Before the first step, after it, and after two more."""
    return expected_states(_WAY, tmp_path_factory.mktemp("expected"), _STEPS)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed after its first step."""
    folder = tmp_path_factory.mktemp("begun")
    with opened(_WAY, folder) as run:
        run.until(_BEGUN)
    return folder
