"""The reducer does what DDP does, bit for bit."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from reducing import same_as_ddp


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("case", "accumulate", "hook", "plain"),
    [
        ("all", 1, None, False),
        ("all", 1, None, True),
        ("all", 3, None, False),
        ("unused", 1, None, False),
        ("unused", 1, None, True),
        ("unused", 2, None, False),
        ("norm", 2, None, True),
        ("all", 1, "fp16", False),
        ("all", 2, "bf16", False),
        ("all", 1, "powersgd", False),
    ],
)
def test_same_as_ddp(ranks: int, case: str, accumulate: int, hook: str | None, plain: bool) -> None:
    for is_same, ours, theirs in run_ranks(ranks, same_as_ddp, case, accumulate, hook, plain):
        assert ours == theirs
        assert is_same
