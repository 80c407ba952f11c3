"""bench step: what a step's time is, the rows and their bars, and both sides of the protocol with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierstore.apps.bench import rates, step, step_worker
from tierstore.apps.bench.case import Answer, BenchOptions, Contestant, Result
from tierstore.apps.options import TrainOptions
from tierstore.plan.bandwidth import BandwidthTable
from tierstore.plan.step_machine import Machine

FIELDS = {"vocab_size": 512, "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "bos_token_id": 0,
          "eos_token_id": 0}  # fmt: skip
DRIVERS = Path(__file__).parents[3] / "tools" / "peers"


def result(name: str, seconds: float, rss: int = 1000, **figures: float) -> Result:
    return Result(Contestant(name, (), False), answers=[Answer(seconds, figures, rss)])


@pytest.fixture
def options(tmp_path: Path) -> BenchOptions:
    return BenchOptions(nvme=tmp_path)


def results_of(options: BenchOptions, tmp_path: Path, **found: Result) -> dict[str, Result]:
    contestants = [one for heat in step.heats(options, tmp_path) for one in heat]
    all_of_them = {one.name: Result(one, trouble="missing: not here") for one in contestants}
    return all_of_them | {one.contestant.name: one for one in found.values()}


def test_a_step_lasts_from_one_durable_commit_to_the_next() -> None:
    train = TrainOptions(nvme=(Path("store"),))
    # Step 1 gets going, 2 and 3 are timed, 4 follows; commits are durable one step later.
    starts_s, ends_s = [0.0, 5.0, 7.0, 9.0, 11.0], [6.0, 8.5, 10.0, 13.0]
    assert step_worker._step_s(train, 2, starts_s, 13.5, ends_s) == pytest.approx((10.0 - 6.0) / 2)


def test_a_step_without_its_commit_is_an_error() -> None:
    train = TrainOptions(nvme=(Path("store"),))
    with pytest.raises(RuntimeError, match="4 steps made 3 commits"):
        step_worker._step_s(train, 2, [0.0, 5.0, 7.0, 9.0, 11.0], 13.5, [6.0, 8.5, 10.0])


def test_a_rare_commit_is_shared_by_the_steps_between_two_of_them() -> None:
    train = TrainOptions(nvme=(Path("store"),), commit_every=50)
    starts_s = [0.0, 5.0, 7.0, 9.0, 11.0]
    assert step_worker._step_s(train, 2, starts_s, 61.0, [61.0]) == pytest.approx(2.0 + 50.0 / 50)


def test_without_a_store_a_step_lasts_until_the_next_one() -> None:
    assert step_worker._step_s(TrainOptions(), 2, [0.0, 5.0, 7.0, 9.0, 11.0], 61.0, []) == pytest.approx(2.0)


def test_every_contestant_has_a_name_of_its_own_and_each_heat_its_rates(options: BenchOptions, tmp_path: Path) -> None:
    heats = step.heats(options, tmp_path)
    names = [one.name for heat in heats for one in heat]
    assert len(set(names)) == len(names)
    for own in step._OWN:
        (heat,) = [heat for heat in heats if own.name in [one.name for one in heat]]
        assert step._rates(own.heat) in [one.name for one in heat]


def test_a_peer_that_is_not_wanted_does_not_start(tmp_path: Path) -> None:
    names = [one.name for heat in step.heats(BenchOptions(nvme=tmp_path, peer=("torch",)), tmp_path) for one in heat]
    assert not [name for name in names if "DeepSpeed" in name]
    assert [name for name in names if "torch" in name]


def test_bars_compare_with_deepspeed_and_with_the_floor(options: BenchOptions, tmp_path: Path) -> None:
    own, counted = step._OWN[0], next(one for one in step._OWN if one.disk_bytes is not None)
    ours = result(own.name, 2.0, rss=300, read_bytes=1e9, written_bytes=1e9, bytes_per_parameter=30.0)
    spilling = result(counted.name, 2.0, read_bytes=1e9, written_bytes=1e9, bytes_per_parameter=30.0)
    spilling.facts = {"spilled_share": 1.0}
    table = {"read_bytes_per_s": 2e9, "write_bytes_per_s": 2e9, "shared_bytes_per_s": 2e9, "h2d_bytes_per_s": 1e9,
             "d2h_bytes_per_s": 1e9, "memory_bytes_per_s": 1e9, "adam_elements_per_s": 1e9}  # fmt: skip
    found = results_of(
        options, tmp_path, ours=ours, spilling=spilling, theirs=result(step._ALL, 6.0, rss=1000),
        memory=result(step._torch("disk"), 0.5),
        rates=result(step._rates("disk"), 1.0, **table, io_threads=4, update_threads=2),
    )  # fmt: skip
    steps = [row for row in step._step_rows(options, found) if row.contestant == own.name]
    assert steps[0].floor == pytest.approx(1.0)  # 2 GB at 2 GB/s, longer than the step in memory
    assert {bar.of: bar.is_met for bar in steps[0].bars} == {
        f"x {step._ALL}": True, "of its peak memory": False, "x the floor": False
    }  # fmt: skip
    (moved,) = [row for row in step._bytes_rows(options, found) if row.contestant == counted.name]
    assert moved.bars[0].measured == pytest.approx(26.0)  # the gradients that are spilled are not held against it


def test_what_is_missing_is_a_row(options: BenchOptions, tmp_path: Path) -> None:
    table = step.rows(options, results_of(options, tmp_path))
    assert {row.trouble for row in table} == {"missing: not here"}
    assert step._ALL in {row.contestant for row in table}


def converse(command: list[str], given: dict[str, Any], rounds: int = 2) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"round": number}) + "\n" for number in range(rounds))
    ended = subprocess.run([*command, json.dumps(given)], input=lines, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_our_own_steps_are_measured_and_predicted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "gpt2"}))
    train = {"config": str(tmp_path / "config.json"), "batch": 1, "sequence": 16, "gpu_memory": "1MiB",
             "cpu_memory": "4MiB", "nvme": [str(tmp_path / "store")], "evaluate": 0}  # fmt: skip
    command = [sys.executable, "-m", "tierstore.apps.bench.worker", "step_worker"]
    ready, *answers = converse(command, {"train": train, "steps": 2})
    assert not (tmp_path / "store").exists()
    assert [answer["seconds"] > 0 for answer in answers] == [True, True]
    figures = answers[-1]["figures"]
    # State fits in CPU memory and is written for the commit of each step: 12 B for a parameter, and padding.
    assert 12 <= figures["bytes_per_parameter"] < 12.5
    own = Result(Contestant("own", (), False), ready["ready"], [Answer(answers[-1]["seconds"], figures, 1)])
    machine = Machine(BandwidthTable(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9))
    options = TrainOptions(**step_worker.options_of_object(train, "test"))
    assert step.predicted_s(own, machine, options) > figures["computing_s"] / 2


def test_plain_torch_takes_steps() -> None:
    given = {"device": "cpu", "steps": 2, "fields": FIELDS, "batch": 1, "sequence": 16}
    ready, *answers = converse([sys.executable, str(DRIVERS / "step_torch.py")], given)
    assert "torch" in ready["ready"]["versions"]
    assert [answer["seconds"] > 0 for answer in answers] == [True, True]


def test_rates_of_no_round_are_no_machine() -> None:
    assert rates.machine_of(Result(Contestant("rates", (), False))) is None
