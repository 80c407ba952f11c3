"""What must work with several ranks: models, loops, schedules, wrong use."""

from __future__ import annotations

from pathlib import Path

import pytest
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


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("model", "ConfigError: rank 0 trains another model: parameter enter.bias"),
        ("options", "ConfigError: commit_every is 3 at rank 1"),
        ("budget", "BudgetError: cpu_memory of 1 B is too small"),
        ("directory", "StorageError: cannot use"),
        ("full", "StorageFull: write of 69632 B"),
        ("resume must", "ConfigError: resume='must': there is no generation"),
        ("resume previous", "ConfigError: resume='previous': there is no generation"),
    ],
)
def test_what_is_wrong_at_one_rank_ends_the_making_at_all(what: str, expected: str, tmp_path: Path) -> None:
    first, last = run_ranks(2, zero_models.wrong, what, str(tmp_path))
    assert last["error"].startswith(expected)
    assert expected[: expected.index(":")] in first["error"]
    assert first["seconds"] < zero_models.TIMEOUT_S / 2
    assert not any(name.startswith("manifest") for name in first["files"] + last["files"])


@pytest.mark.parametrize(
    ("what", "told", "own"),
    [
        ("loader", "RankLost: rank 0 of 2 waited for the weights of", "ArithmeticError: a bad file"),
        ("forward", "RankLost: rank 0 of 2 waited for the", "ArithmeticError: a bad layer"),
        ("full later", "", "StorageFull: write of"),
        ("unsynced", "StorageError: rank 1: fdatasync of", ""),
    ],
)
def test_an_error_at_one_rank_reaches_all(what: str, told: str, own: str, tmp_path: Path) -> None:
    """At once, not when the others have waited long enough; and all go on from one whole generation."""
    first, last = run_ranks(2, zero_models.wrong, what, str(tmp_path))
    assert first["error"].startswith(told)
    assert last["error"].startswith(own)
    # Of a write that failed the others learn by the commit, or by what the rank does then.
    assert "Storage" in first["error"] or "rank 1 has closed its engine" in first["error"]
    assert max(first["seconds"], last["seconds"]) < zero_models.TIMEOUT_S / 2
    resumed = run_ranks(2, zero_models.wrong, "resume auto", str(tmp_path))
    assert resumed[0]["begun_at"] <= first["steps"]
    assert [rank["error"] for rank in resumed] == ["", ""]
    assert resumed[0]["norm"] == resumed[1]["norm"]


def test_weights_come_from_the_first_rank(tmp_path: Path) -> None:
    same, other = (run_ranks(2, zero_models.wrong, what, str(tmp_path / what)) for what in ("nothing", "seed"))
    assert same[0]["norm"] == same[1]["norm"] == other[0]["norm"] == other[1]["norm"]


def test_replicas_have_no_store(tmp_path: Path) -> None:
    for told in run_ranks(2, zero_models.wrong, "replicas", str(tmp_path)):
        assert told["error"].startswith("ConfigError: zero=0 keeps everything at every rank")
