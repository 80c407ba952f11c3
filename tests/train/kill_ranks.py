"""Kills one of several ranks at many moments, and resumes: `python tests/train/kill_ranks.py --kills 20 --seed 1`.

A moment is when a rank begins to wait for the others: between two of them it does what no other rank can see.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import outcomes_of, run_ranks
from sharing import lose, train

STEPS = 4
TIMEOUT_S = 4.0


def waits_of(directory: Path) -> tuple[int, int]:
    """How often a rank waits for the others until the engine is made, and until it is closed."""
    told = run_ranks(2, lose, str(directory), STEPS, 0, signal.SIGKILL, TIMEOUT_S)[0]
    return told["made"], told["waits"]


def moments(waits: tuple[int, int], count: int, seed: int) -> list[int]:
    """Some of them in order, one of eight in the making of the engine and the others in its steps."""
    made, last = waits
    early, late = range(1, made), range(made, last + 1)
    chosen = random.Random(seed)
    return sorted(chosen.sample(early, count // 8)) + sorted(chosen.sample(late, count - count // 8))


@cache
def whole_run(ranks: int) -> list[dict[str, Any]]:
    """In memory, and nobody is killed."""
    return run_ranks(ranks, train, None, STEPS, memory={"gpu_memory": "32MiB", "cpu_memory": "64MiB"})


def lose_and_resume(directory: Path, moment: int, ranks: int = 2, victim: int = 1) -> str:
    """Kill a rank at a moment; check what the others say and that all go on as if nothing had happened."""
    outcomes = outcomes_of(ranks, lose, str(directory), STEPS, moment, signal.SIGKILL, TIMEOUT_S, victim, grace_s=10.0)
    assert not outcomes.pop(victim).is_finished, "the rank was not killed"
    for outcome in outcomes:
        assert outcome.is_finished, outcome.error
        assert outcome.value["told"].startswith("RankLost"), (moment, outcome.value)
        assert f"rank {victim} does not answer" in outcome.value["told"]
        assert outcome.value["raised_s"] < TIMEOUT_S
    memory = {"gpu_memory": "10MiB", "cpu_memory": "4MiB"}
    resumed = run_ranks(ranks, train, str(directory), until=STEPS, resume="auto", memory=memory)
    begun = resumed[0]["begun_at"]
    for rank, expected in zip(resumed, whole_run(ranks)):
        assert (rank["begun_at"], rank["losses"]) == (begun, expected["losses"][begun:]), moment
        assert all((rank["weights"][name] == value).all() for name, value in expected["weights"].items())
    return f"resumed at step {begun}; {outcomes[0].value['told']}"


def main() -> None:
    """Kill as often as asked."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        waits = waits_of(Path(directory) / "whole")
        for moment in moments(waits, asked.kills, asked.seed):
            told = lose_and_resume(Path(directory) / str(moment), moment, victim=moment % 2)
            print(f"wait {moment} of {waits[1]}: {told}", flush=True)
    print(f"{asked.kills} kills, all equal")


if __name__ == "__main__":
    main()
