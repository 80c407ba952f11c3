"""Kills one of several ranks at many moments, and resumes: `python tests/train/kill_ranks.py --kills 20 --seed 1`.

A moment is when a rank begins to wait for the others. What it does between two moments, no other rank can see.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from ranks import call, outcomes_of, run_in_turn, run_ranks
from sharing import lose, train

STEPS = 4
TIMEOUT_S = 4.0


def waits_of(directory: Path) -> tuple[int, int]:
    """How often a rank waits for the others until the engine is made, and until it is closed."""
    told = run_ranks(2, lose, str(directory), STEPS, 0, signal.SIGKILL, TIMEOUT_S)[0]
    return told["made"], told["waits"]


def moments(waits: tuple[int, int], count: int, seed: int) -> list[int]:
    """`count` random moments in order: one in eight while the engine is made, the others in its steps."""
    made, last = waits
    early, late = range(1, made), range(made, last + 1)
    chosen = random.Random(seed)
    return sorted(chosen.sample(early, count // 8)) + sorted(chosen.sample(late, count - count // 8))


def lose_one(directory: Path, moment: int, ranks: int = 2, victim: int = 1) -> str:
    """Kill a rank at a moment; check the errors of the other ranks, and return that of the first of them."""
    outcomes = outcomes_of(ranks, lose, str(directory), STEPS, moment, signal.SIGKILL, TIMEOUT_S, victim, grace_s=10.0)
    assert not outcomes.pop(victim).is_finished, "the rank was not killed"
    for outcome in outcomes:
        assert outcome.is_finished, outcome.error
        assert outcome.value["told"].startswith("RankLost"), (moment, outcome.value)
        assert f"rank {victim} does not answer" in outcome.value["told"]
        assert outcome.value["raised_s"] < TIMEOUT_S
    return outcomes[0].value["told"]


def go_on(stores: Sequence[Path], ranks: int = 2) -> list[int]:
    """Check that runs over all stores go on as if nothing had happened, and return the steps at which they resume."""
    whole = call(None, STEPS, memory={"gpu_memory": "32MiB", "cpu_memory": "64MiB"})
    memory = {"gpu_memory": "10MiB", "cpu_memory": "4MiB"}
    calls = [call(str(store), until=STEPS, resume="auto", memory=memory) for store in stores]
    expected, *others = run_in_turn(ranks, train, [whole, *calls], wait_s=60.0 + 10 * len(calls))
    for store, resumed in zip(stores, others):
        begun = resumed[0]["begun_at"]
        for rank, undisturbed in zip(resumed, expected):
            assert (rank["begun_at"], rank["losses"]) == (begun, undisturbed["losses"][begun:]), store
            assert all((rank["weights"][name] == value).all() for name, value in undisturbed["weights"].items()), store
    return [resumed[0]["begun_at"] for resumed in others]


def main() -> None:
    """Kill as often as asked."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        waits = waits_of(Path(directory) / "whole")
        stores = {moment: Path(directory) / str(moment) for moment in moments(waits, asked.kills, asked.seed)}
        for moment, store in stores.items():
            print(f"wait {moment} of {waits[1]}: {lose_one(store, moment, victim=moment % 2)}", flush=True)
        begun = go_on(list(stores.values()))
    print(f"{asked.kills} kills, all equal; resumed at steps {begun}")


if __name__ == "__main__":
    main()
