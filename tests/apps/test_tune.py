"""`tierstore tune`: from files alone, with the real engine, and what cannot be asked."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tierstore.apps import tune as apps_tune
from tierstore.apps import tune_views
from tierstore.apps.options import Precision, Preset, TrainOptions, options_of_object
from tierstore.apps.probe import ProbeOptions
from tierstore.apps.trial import Measured, Recorded, Trial, WholeSteps
from tierstore.apps.tune import Outcome, TuneOptions, as_train_options, candidates, machine_of, run, save
from tierstore.cli import app
from tierstore.config import UpdateSchedule
from tierstore.errors import BudgetError, ConfigError, StorageError
from tierstore.plan import tuning as plan_tuning
from tierstore.plan.bandwidth import BandwidthTable, NamedRate, Rate
from tierstore.plan.placement import GroupNeed
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_record import StepRecord
from tierstore.train.report import StepReport

ROOT = Path(__file__).parents[2]
RATES = BandwidthTable(0.5e9, 0.7e9, 0.6e9, 1e12, 1e12, 1e12, 1e10)  # the disks bound
MIB = 2**20
TINY = {"model_type": "gpt2", "vocab_size": 256, "n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def record() -> StepRecord:
    groups = tuple(GroupNeed(f"h.{i}", 14 * 2**20, 2, 10, True) for i in range(4))
    forward = tuple((group, 0.02) for group in range(4))
    return StepRecord(groups, forward, tuple((g, 0.05) for g, _ in reversed(forward)), tuple(reversed(range(4))))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "rates.json").write_text(json.dumps(RATES.to_json()))
    (tmp_path / "step.json").write_text(json.dumps(record().to_json()))
    return ["--bandwidth", str(tmp_path / "rates.json"), "--record", str(tmp_path / "step.json"),
            "--gpu-memory", "128MiB", "--cpu-memory", "300MiB", "--nvme", str(tmp_path / "store")]  # fmt: skip


def tune(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_from_a_recorded_step_and_rates(files: list[str], tmp_path: Path) -> None:
    outputs = {name: tmp_path / f"{name}.json" for name in ("json", "write", "save-record")}
    options = [text for name, path in outputs.items() for text in (f"--{name}", str(path))]
    result = tune(*files, "--preset", "124m", "--checkpointing", *options)
    assert result.exit_code == 0, result.output
    rows = [line.strip("│").split("│") for line in result.output.splitlines() if line[:1] == "│"]
    assert [row[0].strip() for row in rows] == [str(depth) for depth in range(9)]
    words = " ".join(result.output.split())
    for part in ("no depth hides it; a second SSD would make it", "In CPU memory: weights", "Codec: none", "Not taken"):
        assert part in words
    found = json.loads(outputs["json"].read_text())
    assert found["regime"] == "bandwidth-bound"
    assert found["predicted"][found["depth"]]["seconds"] == pytest.approx(float(rows[found["depth"]][1]), abs=1e-3)
    written = json.loads(outputs["write"].read_text())
    assert written["prefetch_depth"] == found["depth"]
    assert (written["update"], written["preset"], written["cpu_memory"]) == (found["update"], "124m", 300 * MIB)
    options_given = TrainOptions(**options_of_object(written, "options.json"))  # as `train --options` reads them
    assert (options_given.prefetch_depth, options_given.update.value) == (found["depth"], found["update"])
    assert options_given.checkpointing
    assert StepRecord.from_json(json.loads(outputs["save-record"].read_text())) == record()
    assert not (tmp_path / "store").exists()


def test_a_guess_is_foretold_as_right_and_that_is_said(files: list[str], tmp_path: Path) -> None:
    def found(*given: str) -> tuple[Any, str]:
        result = tune(*files, "--preset", "124m", *given, "--json", str(tmp_path / "found.json"))
        assert result.exit_code == 0, result.output
        return json.loads((tmp_path / "found.json").read_text()), " ".join(result.output.split())

    (tmp_path / "rates.json").write_text(json.dumps(RATES.scaled(disk=4).to_json()))
    guessing, words = found()
    assert guessing["update"] == "speculative"
    assert "a step whose gradients are not clipped" in words
    for given, update in (("--clip=0", "backward"), ("--update=forward", "forward"), ("--commit-every=2", "forward")):
        other, words = found(given)
        assert other["update"] == update
        assert "not clipped" not in words
        assert guessing["predicted"][2]["seconds"] < 1.01 * other["predicted"][2]["seconds"]


def test_without_disks_nothing_is_said_to_be_on_them(files: list[str]) -> None:
    at = files.index("--nvme")
    words = " ".join(tune(*files[:at], *files[at + 2 :], "--cpu-memory", "2GiB").output.split())
    assert "state 100% of 560 MiB. One depth" in words


def test_rates_that_vary_are_named(files: list[str], tmp_path: Path) -> None:
    quartiles = {"read_bytes_per_s": (0.5e9, 1.5e9), "write_bytes_per_s": (0.9e9, 1e9)}
    spreads = tuple(NamedRate(name, Rate(1e9, *both)) for name, both in quartiles.items())
    (tmp_path / "rates.json").write_text(json.dumps(replace(RATES, spreads=spreads).to_json()))
    result = tune(*files, "--preset", "124m")
    assert "so measure again: disk, reads." in " ".join(result.output.split())


def test_the_plot_is_a_picture(files: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert tune(*files, "--plot", str(tmp_path / "depths.png")).exit_code == 0
    assert (tmp_path / "depths.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_first_candidate_is_what_train_would_do() -> None:
    train = TrainOptions(gpu_memory=128 * MIB, cpu_memory=300 * MIB, nvme=(Path("x"),))
    found = list(candidates(record(), train))
    assert found[0].schedule is UpdateSchedule.SPECULATIVE
    assert {one.schedule for one in found[1:]} == {UpdateSchedule.FORWARD, UpdateSchedule.STEP}
    rare = list(candidates(record(), replace(train, commit_every=2)))
    assert rare[0].schedule is UpdateSchedule.FORWARD
    unclipped = list(candidates(record(), TrainOptions(cpu_memory=300 * MIB, nvme=(Path("x"),), clip=0)))
    assert unclipped[0].schedule is UpdateSchedule.BACKWARD
    fixed = TrainOptions(cpu_memory=300 * MIB, nvme=(Path("x"),), update=UpdateSchedule.STEP, chunk=MIB)
    (only,) = candidates(record(), fixed)
    assert only.schedule is UpdateSchedule.STEP
    assert only.placement.chunk_elements < found[0].placement.chunk_elements


def test_fewer_threads_update_more_slowly_than_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))  # `probe` measured Adam on 8 threads
    table = replace(RATES, adam_elements_per_s=8e9, adam_fp32_elements_per_s=4e9, norm_elements_per_s=16e9)
    for threads, used, share in ((None, 8, 1.0), (2, 2, 0.25), (8, 8, 1.0), (32, 32, 1.0), (1000, 64, 1.0)):
        machine = machine_of(table, TrainOptions(threads=threads))
        assert machine.update_threads == used  # as the engine of this run
        assert machine.table.adam_elements_per_s == pytest.approx(share * 8e9)
        assert machine.table.adam_fp32_elements_per_s == pytest.approx(share * 4e9)
        assert machine.table.norm_elements_per_s == pytest.approx(share * 16e9)
    assert machine_of(RATES, TrainOptions(threads=2)).table.adam_fp32_elements_per_s is None  # not measured


def test_a_disk_that_was_measured_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(options: ProbeOptions, progress: object) -> Any:
        assert all(path.is_dir() for path in options.nvme)
        return SimpleNamespace(table=RATES)

    monkeypatch.setattr("tierstore.apps.probe.measure", measure)
    monkeypatch.setattr(apps_tune, "prepare_heap", lambda: None)
    machine = apps_tune.rates_for(TrainOptions(nvme=(tmp_path / "a" / "run", tmp_path / "b")))()
    assert machine.table.read_bytes_per_s == RATES.read_bytes_per_s
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_the_engine_would_refuse_is_refused() -> None:
    """A module of the model needs weights of several groups at once."""
    train = TrainOptions(gpu_memory=128 * MIB, cpu_memory=300 * MIB, nvme=(Path("x"),))
    together = replace(record(), acquired_bytes=120 * MIB)
    with pytest.raises(BudgetError, match="gpu_memory"):
        list(candidates(together, train))
    assert list(candidates(together, replace(train, gpu_memory=256 * MIB)))


def test_with_the_real_engine(disk_path: Path) -> None:
    (disk_path / "config.json").write_text(json.dumps(TINY))
    (disk_path / "text").write_bytes(b"to be or not to be, that is the question. " * 200)
    train = TrainOptions(
        config=disk_path / "config.json", data=disk_path / "text", nvme=(disk_path / "store",), batch=2, sequence=32,
        gpu_memory=2 * MIB, cpu_memory=6 * MIB, threads=1, dtype=Precision.FP32,
    )  # fmt: skip
    seen = []

    def rates() -> Machine:
        seen.append(Machine(RATES))
        return seen[-1]

    options = TuneOptions(train=train, measure=True, depths=(0, 3), rounds=1, steps=2)
    said: list[str] = []
    outcome = run(options, rates, said.append)
    told = [text.split()[0] for text in said if not text.startswith("note:")]  # these rates are of no machine
    assert told == ["recording", "measuring", "running", "measuring"]
    assert len(seen) == 2
    assert sorted(outcome.measured) == sorted({0, 3, outcome.tuning.choice.depth})
    assert all(0 < one.low <= one.seconds <= one.high for one in outcome.measured.values())
    placement = outcome.tuning.choice.candidate.placement
    assert outcome.record.groups == placement.groups
    visited = [group for group, _ in outcome.record.forward]
    assert visited[0] == visited[-1] == 0  # the embedding, and the head that is tied to it
    assert set(outcome.record.completed) == set(range(len(placement.groups)))
    assert outcome.record.backward_s > 0 < outcome.record.between_s
    assert "Measured at depth" in tune_views.as_words(outcome)
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(tune_views.as_table(outcome))
    assert "…" not in narrow.export_text()
    assert not (disk_path / "store").exists()  # the store of the trial is gone, and so is the directory made for it
    assert as_train_options(train, outcome)["config"] == str(disk_path / "config.json")


def test_what_is_recorded_has_no_update_inside_backward(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk_path / "config.json").write_text(json.dumps(TINY))
    train = TrainOptions(
        config=disk_path / "config.json", nvme=(disk_path / "store",), batch=2, sequence=32, clip=0,
        update=UpdateSchedule.BACKWARD, gpu_memory=2 * MIB, cpu_memory=6 * MIB, threads=1, dtype=Precision.FP32,
    )  # fmt: skip
    schedules: list[str] = []

    def watch(step: Callable[[Trial], tuple[float, StepReport]]) -> Callable[[Trial], tuple[float, StepReport]]:
        def seen(trial: Trial) -> tuple[float, StepReport]:
            taken = step(trial)
            schedules.append(taken[1].schedule)
            return taken

        return seen

    monkeypatch.setattr(Trial, "step", watch(Trial.step))
    monkeypatch.setattr(Trial, "whole_step", watch(Trial.whole_step))
    kept: list[StepRecord] = []
    monkeypatch.setattr(apps_tune, "calibrated_to", lambda recorded, *_: kept.append(recorded.step) or recorded.step)
    outcome = run(TuneOptions(train=train, measure=True, depths=(1,), rounds=1, steps=2), lambda: Machine(RATES),
                  lambda said: None)  # fmt: skip
    assert schedules[:8] == ["forward"] * 8  # recorded
    assert set(schedules[8:]) == {"backward"}  # measured
    assert outcome.record == kept[0]  # no step of `backward` took its place


def test_a_record_of_something_else_is_refused(tmp_path: Path, disk_path: Path) -> None:
    (disk_path / "config.json").write_text(json.dumps(TINY))
    train = TrainOptions(
        config=disk_path / "config.json", nvme=(disk_path / "store",), batch=2, sequence=32, clip=0, threads=1,
        gpu_memory=2 * MIB, cpu_memory=6 * MIB, dtype=Precision.FP32,
    )  # fmt: skip
    options = TuneOptions(train=train, save_record=tmp_path / "record.json")
    save(options, run(options, lambda: Machine(RATES), lambda said: None))
    again = TuneOptions(train=train, record=tmp_path / "record.json")
    assert run(again, lambda: Machine(RATES), lambda said: None).record.forward_s > 0
    for change, told in (
        ({"batch": 4}, "one of batch 2, not 4"), ({"config": None, "preset": Preset.P25M}, "one of config config.json"),
        ({"dtype": Precision.BF16}, "one of dtype fp32, not bf16"),
        ({"sequence": None}, r"one of sequence 32, not \(not given\)"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            run(replace(again, train=replace(train, **change)), lambda: Machine(RATES), lambda said: None)
    old = {name: value for name, value in json.loads((tmp_path / "record.json").read_text()).items() if name != "of"}
    (tmp_path / "record.json").write_text(json.dumps(old))
    run(replace(again, train=replace(train, batch=4)), lambda: Machine(RATES), lambda said: None)  # nobody can tell


def test_all_that_is_told_beside_a_measurement_is_of_its_own_time(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Measuring:
        def measure(
            self, depths: list[int], rounds: int, steps: int, between: Callable[[], None]
        ) -> tuple[dict[int, Measured], StepRecord]:
            for _ in range(rounds):
                between()
            return {depth: Measured(1.0, 1.0, 1.0, 0.0) for depth in depths}, record().scaled(0.5)

    monkeypatch.setattr("tierstore.apps.trial.trial", lambda train: contextlib.nullcontext(Measuring()))
    machines = iter([Machine(RATES), *[Machine(RATES.scaled(disk=3))] * 3])
    train = TrainOptions(nvme=(tmp_path / "store",), gpu_memory=128 * MIB, cpu_memory=300 * MIB)
    options = TuneOptions(train=train, record=tmp_path / "step.json", measure=True)
    outcome = run(options, lambda: next(machines), lambda said: None)
    choice = outcome.tuning.choice
    now = plan_tuning.tune(outcome.record, list(candidates(outcome.record, train)), outcome.machine,
                           taken=(choice.candidate, choice.depth))  # fmt: skip
    assert now == outcome.tuning
    another = "the machine was another one than before"
    assert another not in tune_views.as_words(outcome)
    faster = ((now.others[0][0], replace(now.others[0][1], seconds=0.9 * choice.best.seconds)),)
    assert another in tune_views.as_words(replace(outcome, tuning=replace(now, others=faster)))


def test_a_depth_that_was_clearly_faster_is_what_is_written(disk_path: Path) -> None:
    train = TrainOptions(nvme=(disk_path / "store",), gpu_memory=64 * MIB, cpu_memory=64 * MIB)
    record = StepRecord((GroupNeed("a", 1000, 2, 10, True),), ((0, 1.0),), ((0, 1.0),), (0,))
    tuning = plan_tuning.tune(record, list(candidates(record, train)), Machine(RATES))
    chosen = tuning.choice.depth
    other = chosen + 1
    for seconds, depth in ((0.6, other), (0.97, chosen)):
        measured = {chosen: Measured(1.0, 0.99, 1.01, 0.0), other: Measured(seconds, seconds, seconds + 0.01, 0.0)}
        outcome = Outcome(record, Machine(RATES), tuning, measured)
        assert outcome.depth == as_train_options(train, outcome)["prefetch_depth"] == depth
        assert tune_views.as_json(outcome)["depth"] == depth
        assert (f"--write takes depth {other}" in tune_views.as_words(outcome)) is (depth == other)
    spread = {chosen: Measured(1.0, 0.5, 1.5, 0.0), other: Measured(0.6, 0.4, 0.9, 0.0)}
    assert Outcome(record, Machine(RATES), tuning, spread).depth == chosen


def test_one_budget_for_both_tiers_stays_one() -> None:
    record = StepRecord((GroupNeed("a", 1000, 2, 10, True),), ((0, 1.0),), ((0, 1.0),), (0,))
    for gpu_memory in (None, MIB):
        train = TrainOptions(nvme=(Path("x"),), gpu_memory=gpu_memory, cpu_memory=64 * MIB)
        tuning = plan_tuning.tune(record, list(candidates(record, train)), Machine(RATES))
        written = as_train_options(train, Outcome(record, Machine(RATES), tuning, {}))
        assert written.get("gpu_memory") == gpu_memory
        assert TrainOptions(**options_of_object(written, "written")).gpu_memory == gpu_memory


def test_it_is_said_if_no_drag_makes_the_forecast_match_the_steps_that_were_run() -> None:
    record = StepRecord((GroupNeed("a", 1000, 2, 10, True),), ((0, 1.0),), ((0, 1.0),), (0,))
    train = TrainOptions(nvme=(Path("x"),), cpu_memory=64 * MIB)
    said: list[str] = []
    for step_s in (2.0, 3.0):
        whole = WholeSteps(2.0, step_s, 1, UpdateSchedule.FORWARD)
        apps_tune.calibrated_to(Recorded(record, whole), train, Machine(RATES), said.append)
    assert said == ["note: steps took 3 s, and on paper 2 s: forecasts may be as far off"]


@pytest.mark.parametrize("update", [UpdateSchedule.AUTO, UpdateSchedule.SPECULATIVE])
def test_steps_beside_an_update_are_those_that_will_be(
    update: UpdateSchedule, disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that speculates in whole steps does so in a trial, even if a real run's first steps were clipped."""
    (disk_path / "config.json").write_text(json.dumps(TINY))
    train = TrainOptions(
        config=disk_path / "config.json", nvme=(disk_path / "store",), batch=2, sequence=32, clip=1e-6,
        update=update, gpu_memory=2 * MIB, cpu_memory=2 * MIB, threads=1, dtype=Precision.FP32,
    )  # fmt: skip
    kept: list[Recorded] = []
    calibrated_to = apps_tune.calibrated_to

    def seen(recorded: Recorded, *given: Any) -> StepRecord:
        kept.append(recorded)
        return calibrated_to(recorded, *given)

    monkeypatch.setattr(apps_tune, "calibrated_to", seen)
    run(TuneOptions(train=train), lambda: Machine(RATES), lambda said: None)
    assert [one.whole.schedule for one in kept] == [UpdateSchedule.SPECULATIVE]
    assert kept[0].whole.step_s > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_one_sentence_and_leaves_no_store(
    number: signal.Signals, disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk_path / "config.json").write_text(json.dumps(TINY))
    (disk_path / "rates.json").write_text(json.dumps(RATES.to_json()))
    store, seen = disk_path / "store", []

    def interrupted(trial: Trial) -> StepRecord:
        seen.extend(path.name for path in store.iterdir())
        signal.raise_signal(number)
        raise AssertionError("the signal raises")

    monkeypatch.setattr(Trial, "record", interrupted)
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # a shell that starts tests in the background has SIGINT ignored
    result = tune("--config", str(disk_path / "config.json"), "--bandwidth", str(disk_path / "rates.json"),
                  "--nvme", str(store), "--batch", "2", "--sequence", "32", "--gpu-memory", "2MiB",
                  "--cpu-memory", "6MiB", "--threads", "1", "--dtype", "fp32")  # fmt: skip
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        128 + number, "tierstore: interrupted; its files in --nvme are gone"
    )  # fmt: skip
    assert seen[0].startswith("tune-")
    assert not store.exists()
    assert signal.signal(number, before) is usual


def test_what_was_found_is_shown_before_it_is_written(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(apps_tune, "write_object", refused)
    result = tune(*files, "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 1
    assert "Not taken: update" in " ".join(result.output.split())
    assert "tierstore: the disk is full" in result.stderr


def test_where_nothing_can_be_written_no_work_begins(tmp_path: Path) -> None:
    def begun() -> Machine:
        raise AssertionError("too late")

    options = TuneOptions(train=TrainOptions(nvme=(tmp_path / "store",)), write=tmp_path / "none" / "w.json")
    with pytest.raises(ConfigError, match="cannot write --write"):
        run(options, begun, lambda said: None)
    assert list(tmp_path.iterdir()) == []
    for path, reason in (("/dev/null", "not a directory"), ("/dev/null/below", "/dev/null is not a directory")):
        with pytest.raises(ConfigError, match=f"cannot use --nvme {path}: .*{reason}"):
            run(TuneOptions(train=TrainOptions(nvme=(Path(path),))), begun, pytest.fail)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give --bandwidth the file of `tierstore probe --json`, or --nvme"),
        (["--bandwidth", "/nowhere/rates.json"], "cannot read the bandwidth table /nowhere/rates.json: No such file"),
        (["--record", "/nowhere/step.json"], "cannot read the recorded step /nowhere/step.json: No such file"),
        (["--measure", "--steps", "1"], "--steps at least 2"),
        (["--measure", "--rounds", "0"], "--rounds is at least 1"),
        (["--update", "backward"], "--update backward applies gradients too early for clipping or fp16 loss scaling"),
        (["--update", "speculative", "--commit-every", "2"], "the last committed step: it needs --commit-every 1\n"),
        (["--measure", "--depth", "9"], "--depth is 0 to 8, the depths that are predicted, not 9"),
        (["--rounds", "2"], "--rounds needs --measure"),
        (["--update", "delayed"], "--update delayed, a step late, is not predicted"),
        (["--chunk", "1KiB"], "--chunk must be between 64KiB and 32MiB, not 1 KiB"),
        (["--cpu-memory", "1MiB"], "is too small for this model: the smallest that fits"),
        (["--write", "/nowhere/options.json"], "cannot write --write /nowhere/options.json: its directory is missing"),
        (["--save-record", "/"], "cannot write --save-record /: it is a directory"),
        (["--json", "/tmp/same", "--plot", "/tmp/same"], "--plot and --json would both write /tmp/same"),
        (["--measure", "--depth", "-1", "--depth", "2"], "not -1"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], sentence: str, files: list[str]) -> None:
    result = tune(*(files if arguments else []), *arguments)
    assert result.exit_code in (1, 2)
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_ranks_do_not_tune_side_by_side(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    result = tune(*files)
    assert (result.exit_code, result.stderr) == (2, "tierstore: tune runs on one rank: start it without torchrun\n")


def test_a_file_that_is_something_else(files: list[str], tmp_path: Path) -> None:
    for name, text, sentence in (
        ("rates.json", "[1]", "bandwidth table"),
        ("step.json", "[1]", "must be a JSON object"),
        ("step.json", "{}", "step.json: not a recorded step: it has no 'version'"),
    ):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        result = tune(*files)
        assert result.exit_code == 2
        assert sentence in result.stderr
        (tmp_path / name).write_text(before)


def test_the_script_is_the_command_and_files_need_no_torch(files: list[str]) -> None:
    heavy = "{'torch', 'numpy', 'numba', 'transformers', 'matplotlib'}"
    code = (
        f"import runpy, sys\nsys.argv[1:] = {files!r}\n"
        "try: runpy.run_path('tools/tune_prefetch.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"sys.exit(' '.join({heavy} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
