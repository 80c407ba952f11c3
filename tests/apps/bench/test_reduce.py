"""bench reduce: two ranks of a tiny model, ours and DDP's, and where the optimum lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_program

from tierstore.apps.bench import reduce
from tierstore.apps.bench.case import Answer, BenchOptions, Result
from tierstore.apps.bench.reduce_worker import shares

DRIVERS = Path(__file__).parents[3] / "tools" / "peers"
TINY = {"layers": 4, "width": 64, "batch": 4, "steps": 1, "bucket": 20_000, "delayed": False}


def converse(program: list[str], given: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The program's answers; its scratch directory is relative, as `bench` makes it without --nvme."""
    (folder / "scratch").mkdir()
    arguments = [*program, json.dumps(given | {"scratch": "scratch"})]
    ended = run_program(arguments, folder, '{"round": 0}\n{"round": 1}\n')
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_two_ranks_of_ours_answer_and_end(tmp_path: Path) -> None:
    ready, *answers = converse(["-m", "tierstore.apps.bench.worker", "reduce_worker"], TINY, tmp_path)
    assert sum(nbytes for nbytes, _ in ready["ready"]["gradients"]) == 4 * 4 * (64 * 64 + 64)
    assert [answer["figures"]["buckets"] for answer in answers] == [2, 2]  # two layers of 16,640 B reach 20,000 B
    assert answers[-1]["figures"]["extra_bytes"] == 0


def test_two_ranks_of_ddp_answer_and_end(tmp_path: Path) -> None:
    _, *answers = converse([str(DRIVERS / "reduce_ddp.py")], TINY, tmp_path)
    assert [0 <= answer["figures"]["hidden_share"] <= 1 for answer in answers] == [True, True]


@pytest.mark.parametrize(
    ("step_s", "share"), [(1.0, 1.0), (1.25, 0.5), (1.5, 0.0), (2.0, 0.0), (0.9, 1.0)]
)  # fmt: skip
def test_what_a_step_takes_beyond_its_computing_is_not_hidden(step_s: float, share: float) -> None:
    assert shares(step_s, alone_s=1.0, collectives=0.5)["hidden_share"] == pytest.approx(share)


def test_the_optimum_is_told_beside_25_mib_and_the_model(tmp_path: Path) -> None:
    options = BenchOptions(nvme=tmp_path)
    found = {one.name: Result(one, trouble="missing: not here") for (heat,) in [reduce.heats(options, tmp_path)]
             for one in heat}  # fmt: skip
    for cap, seconds in (("5 MiB", 0.8), ("25 MiB", 1.0), ("one bucket", 1.5)):
        one = found[reduce._called(cap)]
        one.trouble, one.answers = None, [Answer(seconds, {"alone_s": 0.5}, 1)]
    gradients = [(4 * 2**20, 0.1 * layer) for layer in range(1, 6)]
    found[reduce._called("25 MiB")].facts = {"gradients": gradients, "model": [1e-4, 1e8, 0.0]}
    table = reduce.rows(options, found)
    (best,) = [row for row in table if row.work == "optimum, measured"]
    assert (best.contestant, best.floor) == ("5 MiB", 1.0)
    predicted = {row.contestant: row.bars[0].is_met for row in table if row.work == "step as the model predicts it"}
    # The model: 21 MB at 0.1 GB/s, during and after 0.5 s of computing (`alone_s` of the rounds).
    assert predicted == {"5 MiB": False, "25 MiB": False, "one bucket": False}
    assert [row for row in table if row.trouble == "missing: not here" and row.contestant == "torch DDP, 25 MiB"]
