"""`tierstore bench`: small real runs without peers, its files, and what cannot be asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import forked
from typer.testing import CliRunner

import tierstore
from tierstore.apps import preset_sizes
from tierstore.apps.bench import adam, cuda, disk
from tierstore.apps.bench import run as bench_run
from tierstore.apps.bench.case import Answer, Bar, BenchOptions, Case, Contestant, Result, ratio, row_of
from tierstore.apps.bench.report import context_of, markdown
from tierstore.apps.bench.run import Outcome, cases_of, run_case
from tierstore.apps.options import Preset
from tierstore.cli import app
from tierstore.errors import ConfigError, StorageError

ROOT = Path(tierstore.__file__).parent.parent


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120"})


def result(name: str, trouble: str | None = None, seconds: float = 1.0, **figures: float) -> Result:
    answers = [Answer(seconds, figures, 2**20)] if figures else []
    return Result(Contestant(name, (), False), {"versions": {name: "1"}}, answers, trouble)


def test_disk_in_small(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_OUR_SETTINGS", disk._OUR_SETTINGS[:1])
    files = disk_path / "out.json", disk_path / "out.md"
    done = bench("disk", "--peer", "deepspeed", "--size", "64MiB", "--rounds", "1", "--nvme", str(disk_path),
                 "--json", str(files[0]), "--markdown", str(files[1]))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert sorted(os.listdir(disk_path)) == ["out.json", "out.md"]
    found = json.loads(files[0].read_text())
    assert found["command"].startswith("tierstore bench disk --peer deepspeed --nvme ")
    assert "--size 64MiB --rounds" not in found["command"]  # in the order of the fields of `BenchOptions`
    (case,) = found["cases"]
    assert {row["work"] for row in case["rows"]} == {"read 64 MiB", "write 64 MiB"}
    own = [row for row in case["rows"] if row["contestant"].startswith("tierstore")]
    assert own
    assert all(row["value"]["median"] > 0 and row["trouble"] is None for row in own)
    assert "bar 0.95 of fio's best: not measured" in files[1].read_text()
    assert "tierstore 32 MiB x 4" in done.output


def test_load_in_small(disk_path: Path, tmp_path: Path) -> None:
    """In a process of its own: earlier tests have left more memory in this one than packing may take."""
    asked = ["--peer", "safetensors", "--size", "64MiB", "--rounds", "1", "--nvme", str(disk_path)]
    output, errors = tmp_path / "output", tmp_path / "errors"
    with forked(["bench", "load", *asked], output, errors, {"COLUMNS": "120"}) as process:
        process.join(60)
    assert process.exitcode == 0, errors.read_text()
    said = output.read_text()
    assert re.search(r"x safetensors\.torch\.load_file: [\d.]+, (met|short)", said), said
    assert os.listdir(disk_path) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["memory"], "bench knows disk, adam, step, load, reduce and all, not 'memory'"),
        (["adam", "--peer", "horovod"], "--peer knows deepspeed, fio, torch, safetensors, not 'horovod'"),
        (["adam", "--peer-python", "/no/python"], "--peer-python /no/python is not there"),
        (["adam", "--rounds", "0"], "--rounds must be at least 1 and at most 1000, not 0"),
        (["adam", "--params", "5"], "--params must be at least 65536"),
        (["disk", "--size", "100MB"], "--size must be a multiple of 64 MiB"),
        (["disk", "--nvme", "/no/disk"], "--nvme /no/disk is not a directory"),
        (["disk", "--json", "/no/file"], "cannot write --json /no/file"),
        (["all", "--device", "cuda"], "device 'cuda' needs CUDA, which torch"),
        (["adam", "--device", "tpu"], "--device must be cpu or cuda, not 'tpu'"),
        (["reduce", "--size", "1GiB"], "--size is used only by disk and load, which would not run"),
        (["all", "--device", "cuda", "--heat", "disk"], "--heat is used only by step, which would not run"),
        (["disk", "--device", "cuda"], "--device is used only by step, which would not run"),
        (["adam", "--peer", "fio"], "--peer fio: nothing that would run compares with it"),
        (["load", "--peer", "torch", "--peer", "deepspeed"], "--peer deepspeed: nothing that would run compares"),
        (["step", "--heat", "cost", "--peer", "torch"], "--peer torch: nothing that would run compares with it"),
        (["step", "--large", "--peer", "deepspeed"], "--peer deepspeed: nothing that would run compares with it"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = bench(*arguments)
    assert (done.exit_code, sentence in done.output) == (2, True), done.output


def test_room_is_asked_before_anything_is_written(tmp_path: Path) -> None:
    done = bench("load", "--size", "16TiB", "--nvme", str(tmp_path))
    assert done.exit_code == 1
    assert f"bench load writes 48 TiB ({3 * 2**44 + 2**26} B)" in done.output
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_has_left_goes_before_room_is_asked(tmp_path: Path) -> None:
    (tmp_path / ".tierstore-bench-0123456789abcdef").mkdir()
    (tmp_path / ".tierstore-bench-0123456789abcdef" / ".lock").touch()
    assert bench("disk", "--size", "16TiB", "--nvme", str(tmp_path)).exit_code == 1
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_of_a_case_that_fails(tmp_path: Path) -> None:
    def prepare(options: BenchOptions, scratch: Path) -> None:
        (scratch / "half").write_text("a file")
        raise OSError(28, "No space left on device")

    case = Case("toy", lambda options, scratch: [], lambda options, results: [], prepare=prepare)
    with pytest.raises(StorageError, match=r"bench toy cannot make its files in .*: .*No space left"):
        run_case(case, BenchOptions(nvme=tmp_path), lambda what, done: None, lambda outcome: None)
    assert os.listdir(tmp_path) == []


def test_what_was_measured_outlives_an_interrupt_as_far_as_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (Contestant(name, (), False) for name in ("first", "second", "third"))

    def contest(results: dict[str, Result], rounds: int, tell: object) -> None:
        results[min(results)].answers.append(Answer(1.0, {}, 2**20))
        if "second" in results:
            raise KeyboardInterrupt

    case = Case("toy", lambda options, scratch: [[first], [second], [third]], lambda options, results: [
        row_of(one, "seconds", "toy", "s") for one in results.values()
    ])  # fmt: skip
    monkeypatch.setattr(bench_run, "contest", contest)
    monkeypatch.setattr(bench_run, "cases_of", lambda *_: [case])
    files = tmp_path / "out.json", tmp_path / "out.md"
    done = bench("all", "--nvme", str(tmp_path), "--json", str(files[0]), "--markdown", str(files[1]))
    assert done.exit_code == 130, done.output
    (kept,) = json.loads(files[0].read_text())["cases"]
    assert [(row["contestant"], row["trouble"]) for row in kept["rows"]] == [
        ("first", None), ("second", "interrupted after 1 of 5 rounds"), ("third", "missing: its turn has not come")
    ]  # fmt: skip
    assert "| toy | first | 1 s (1, 1) |" in files[1].read_text()
    assert "| toy | second | 1 s (1, 1) |" in files[1].read_text()


def test_a_file_that_cannot_be_written_any_more_loses_no_table_and_no_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, files = tmp_path / "gone", {"json": tmp_path / "gone" / "out.json", "markdown": tmp_path / "out.md"}
    gone.mkdir()

    def contest(results: dict[str, Result], rounds: int, tell: object) -> None:
        results[min(results)].answers.append(Answer(1.0, {}, 2**20))
        if gone.exists():
            gone.rmdir()

    def case(name: str) -> Case:
        return Case(name, lambda options, scratch: [[Contestant(name, (), False)]], lambda options, results: [
            row_of(one, "seconds", "toy", "s") for one in results.values()
        ])  # fmt: skip

    monkeypatch.setattr(bench_run, "contest", contest)
    monkeypatch.setattr(bench_run, "cases_of", lambda *_: [case("first"), case("second")])
    given = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    done = bench("all", "--nvme", str(tmp_path), *given)
    assert done.exit_code == 1
    assert done.output.count("note: cannot write --json") == 1
    for name in ("first", "second"):
        assert f"│ {name}" in done.output
        assert f"| toy | {name} | 1 s (1, 1) |" in files["markdown"].read_text()
    assert done.output.rstrip().endswith("No such file or directory")  # and at the end, where it is seen


@pytest.mark.parametrize(
    ("asked", "timeout_s"), [({}, 600), ({"size": 2**36}, 9600), ({"steps": 20}, 6000), ({"params": 2**16}, 600)]
)
def test_a_round_with_more_to_do_may_take_longer(
    asked: dict[str, int], timeout_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def contest(results: dict[str, Result], rounds: int, tell: object) -> None:
        seen.extend(one.contestant.round_timeout_s for one in results.values())

    monkeypatch.setattr(bench_run, "contest", contest)
    case = Case("toy", lambda options, scratch: [[Contestant("one", (), False)]], lambda options, results: [])
    run_case(case, BenchOptions(nvme=tmp_path, **asked), lambda what, done: None, lambda outcome: None)  # type: ignore[arg-type]
    assert seen == [timeout_s]


@pytest.mark.parametrize("name", [*bench_run.CASES, "cuda"])
def test_the_table_of_a_case_stands_while_its_heats_have_yet_to_come(name: str, tmp_path: Path) -> None:
    (case,) = cases_of("all", "cuda") if name == "cuda" else cases_of(name)
    options = BenchOptions(nvme=tmp_path)
    results = {one.name: result(one.name, "missing: not yet") for heat in case.heats(options, tmp_path) for one in heat}
    assert {row.trouble for row in case.rows(options, results)} == {"missing: not yet"}


@pytest.mark.parametrize(("rounds", "spread"), [(3, "smallest, largest"), (4, "quartiles")])
def test_a_column_says_what_stands_beside_the_median(rounds: int, spread: str) -> None:
    one = result("one")
    one.answers = [Answer(float(number), {}, 2**20) for number in range(rounds)]
    outcome = Outcome("toy", [row_of(one, "seconds", "toy", "s")], {"one": one})
    said = markdown([outcome], context_of("adam", BenchOptions(), [outcome]))
    assert f"| median ({spread}) |" in said


def test_bars_and_floors_of_adam() -> None:
    (case,) = cases_of("adam")
    results = {
        one.contestant.name: one
        for one in (
            result("tierstore, bf16", bf16=1.5), result("tierstore, fp32", fp32=1.5),
            result("memory", triad=30.0, **{"in place": 42.0}),
            result("torch fused AdamW", bf16=0.8, fp32=1.6), result("DeepSpeedCPUAdam", "missing: no compiler"),
        )
    }  # fmt: skip
    outcome = Outcome("adam", case.rows(BenchOptions(), results), results)
    assert [(row.work[:10], row.contestant) for row in outcome.rows if row.contestant.startswith("tierstore")] == [
        ("Adam, bf16", "tierstore, bf16"), ("Adam, fp32", "tierstore, fp32"),
    ]  # fmt: skip
    said = markdown([outcome], context_of("adam", BenchOptions(peer=("torch", "deepspeed"), rounds=3), [outcome]))
    assert "    tierstore bench adam --peer torch --peer deepspeed --rounds 3\n" in said
    # 42 GB/s over 26 B: gradient 2, weight 2 + 2, state 10 + 10. In fp32 28 B: 4, 4 + 4, 8 + 8.
    assert "| 1.5 Gparam/s (1.5, 1.5) | 1.00 x 1.5 | 1 MiB |  |" in said
    assert "| 1.5 Gparam/s (1.5, 1.5) | 0.93 x 1.62 | 1 MiB | bar 1.8 x DeepSpeedCPUAdam with casts: not measured; "\
           "bar 1 x torch's fused AdamW on fp32 alone: 0.938, short |" in said  # fmt: skip
    assert "| DeepSpeedCPUAdam |  |  |  | missing: no compiler |" in said
    assert "| memory, triad | memory | 30 GB/s (30, 30) |" in said
    assert "The host of this machine" not in said
    results["memory"].answers[0] = replace(results["memory"].answers[0], stolen=0.134)
    said = markdown([Outcome("adam", outcome.rows, results)], context_of("adam", BenchOptions(), [outcome]))
    assert said.endswith("The host of this machine took a part of the cores' time: 13% in the rounds of memory.\n")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_contestant_of_adam_updates_one_dtype(dtype: str) -> None:
    with adam.contend({"dtype": dtype, "params": 1000, "passes": 2}) as (_, run_round):
        assert run_round(0)[1].keys() == {dtype}


def test_the_bars_of_disk_stand_at_our_best_setting() -> None:
    (case,) = cases_of("disk")
    results = {
        one.contestant.name: one
        for one in (
            result("tierstore a", read=1.9, write=2.0), result("tierstore b", read=1.8, write=2.1),
            result("fio c", read=2.0, write=2.0), result("fio d", read=1.0, write=1.0),
            result("DeepSpeed aio", read=1.9),
        )
    }  # fmt: skip
    rows = case.rows(BenchOptions(), results)
    found = {(row.work, row.contestant): [str(bar) for bar in row.bars] for row in rows if row.bars}
    assert found == {
        ("read 4 GiB", "tierstore a"): ["bar 0.95 of fio's best: 0.95, met",
                                        "bar 1 of DeepSpeed's aio with locked buffers: 1, met"],
        ("write 4 GiB", "tierstore b"): ["bar 0.95 of fio's best: 1.05, met",
                                         "bar 1 of DeepSpeed's aio with locked buffers: not measured"],
    }  # fmt: skip


def test_what_went_through_the_page_cache_says_so_and_meets_no_bar() -> None:
    (case,) = cases_of("disk")
    cached = result("tierstore a", read=9.0, write=9.0)
    cached.facts = {"is_direct": False}
    rows = case.rows(BenchOptions(), {"tierstore a": cached, "fio b": result("fio b", read=2.0, write=2.0)})
    assert [bar.is_met for row in rows for bar in row.bars] == [None] * 4
    assert [(row.trouble or "").startswith("the file system refuses O_DIRECT") for row in rows] == [True, False] * 2


def test_a_bar() -> None:
    assert str(Bar(1.1, "x memory", 1.2, at_most=True)) == "bar at most 1.1 x memory: 1.2, short"
    assert (ratio(1.0, None), ratio(None, 1.0), ratio(3.0, 2.0)) == (None, None, 1.5)


@pytest.mark.parametrize("driver", sorted(path.name for path in (ROOT / "tools/peers").glob("*_*.py")))
def test_a_driver_without_its_peer_says_so(driver: str, tmp_path: Path) -> None:
    # An interpreter without site-packages has no peer; fio is not on an empty PATH.
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "tools/peers" / driver, "{}"], capture_output=True, text=True, timeout=60,
        env={"PATH": str(tmp_path)}, input="",
    )  # fmt: skip
    assert json.loads(done.stdout)["missing"], done.stderr


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 'tape'"):
        bench_run.cases_of("tape")


def test_a_step_on_a_gpu_is_beside_what_plain_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model on the CPU twin; the rest of the case needs a GPU."""
    small = {"model_type": "gpt2", "vocab_size": 64, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}
    monkeypatch.setitem(preset_sizes.PRESET_FIELDS, Preset.P25M, small)  # type: ignore[arg-type]
    given = {"preset": "25m", "gpu_memory": "16MiB", "cpu_memory": "16MiB", "batch": 1, "micro_batches": 2}
    with cuda._step(given | {"state_on_gpu": False}, "cpu", 16) as run_round:
        seconds, figures = run_round(0)
    assert figures.keys() == {"compute", "step"}
    assert 0 < figures["step"] * cuda._STEPS <= seconds
    assert figures["compute"] > 0


def test_all_on_cuda_is_what_a_gpu_shows() -> None:
    (case,) = cases_of("all", "cuda")
    results = {
        one.contestant.name: one
        for one in (
            result("pytest -m gpu", "missing: no CUDA device here"),
            result("link", h2d=23.0, d2h=20.0, **{"h2d pinned": 25.0, "d2h pinned": 25.0}),
            result("tierstore 124m", compute=0.95, step=1.0), result("tierstore 1.5b", compute=0.8, step=1.0),
            result("tierstore 124m, all on the GPU", step=1.04), result("torch", peak=1.0),
            result("torch, state in fp32", seconds=1.02, peak=1.0),
        )
    }  # fmt: skip
    heats = case.heats(BenchOptions(), Path())
    assert {one.name for heat in heats for one in heat} == set(results)
    assert [bar.is_met for row in case.rows(BenchOptions(), results) for bar in row.bars] == [
        True, False, True, False, False, True,
    ]  # fmt: skip
