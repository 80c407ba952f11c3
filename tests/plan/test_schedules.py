"""Which update schedule `auto` selects."""

from __future__ import annotations

import pytest

from tierstore.config import UpdateSchedule
from tierstore.plan.schedules import settled, usual


@pytest.mark.parametrize(
    ("schedule", "in_memory", "shares_cores", "expected"),
    [
        ("speculative", False, True, "speculative"),
        ("speculative", False, False, "speculative"),
        ("speculative", True, True, "step"),
        ("speculative", True, False, "forward"),
        ("forward", True, True, "step"),
        ("forward", False, True, "forward"),
        ("backward", True, True, "backward"),
        ("step", True, False, "step"),
    ],
)
def test_an_update_in_memory_is_not_guessed(schedule: str, in_memory: bool, shares_cores: bool, expected: str) -> None:
    found = settled(UpdateSchedule(schedule), shares_cores=shares_cores, in_memory=in_memory)
    assert found is UpdateSchedule(expected)


def test_without_a_norm_to_wait_for_there_is_nothing_to_guess() -> None:
    assert usual(needs_norm=False, can_go_back=True) is UpdateSchedule.BACKWARD
    assert usual(needs_norm=True, can_go_back=False) is UpdateSchedule.FORWARD
