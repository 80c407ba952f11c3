"""What must work with several ranks: models, loops, schedules, wrong use."""

from __future__ import annotations

from pathlib import Path

import zero_models
from ranks import run_ranks


def test_engines_one_after_another(tmp_path: Path) -> None:
    for told in run_ranks(2, zero_models.one_after_another, 9, str(tmp_path)):
        assert set(told["groups"]) == {1}
        for left in (told["threads"], told["descriptors"]):
            assert left[-1] <= left[2]  # what is made once for all was made by the first


def test_engines_of_some_ranks() -> None:
    """Groups of other ranks change nothing."""
    first, second, third = run_ranks(3, zero_models.of_some)
    assert second[:2] == third[:2]
    assert first[:2] == second[2:4]
    assert first[2:] == second[4:] == third[2:]
