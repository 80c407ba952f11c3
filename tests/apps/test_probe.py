"""`tierstore probe`: a small run, its table, file and plot, and what cannot be asked."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tierstore
import tierstore.apps.probe
from tierstore.apps import heap
from tierstore.apps.launch import Launch
from tierstore.apps.probe import Outcome, ProbeOptions, _sizes, probe
from tierstore.apps.probe_report import _directories, sentences
from tierstore.cli import app
from tierstore.device.streams import ComputeDevice
from tierstore.io.machine import memory_limits
from tierstore.io.table_file import read_table
from tierstore.measure import compute, layers, links, survey
from tierstore.plan.bandwidth import BandwidthTable, DirectoryRates, NamedRate, Rate
from tierstore.plan.cost_model import CostModel
from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer

MIB = 2**20
PNG = b"\x89PNG\r\n\x1a\n"
TABLE = BandwidthTable(1.10e9, 1.38e9, 1.22e9, 25e9, 24e9, 10e9, 1.3e9)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything small, and measured as briefly as possible."""
    from tierstore.measure import machine

    effort = replace(survey.QUICK, size_bytes=32 * MIB, blocks=(2**19, 2**20), threads=(1, 2), grid_rounds=1, rounds=2)
    monkeypatch.setattr(survey, "QUICK", effort)
    monkeypatch.setattr(machine, "MEMORY_BYTES", 16 * MIB)
    monkeypatch.setattr(compute, "_ADAM_ELEMENTS", 2**12)
    monkeypatch.setattr(compute, "_CODEC_BYTES", 2**16)
    monkeypatch.setattr(links, "_SIDE", {"cpu": 64})
    monkeypatch.setattr(layers, "_SHAPES", ((64, 4),))
    monkeypatch.setattr(layers, "_HEAD_SHAPES", ((64, 4),))
    monkeypatch.setattr(layers, "_VOCABULARY", 32)
    monkeypatch.setattr(tierstore.apps.probe, "_QUICK_RUN_S", 0.001)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["probe", *arguments], env={"COLUMNS": "120"})


@pytest.mark.usefixtures("small", "one_thread")
def test_a_run_in_small(disk_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table, plot, disk = disk_path / "rates.json", disk_path / "rates.png", disk_path / "disk"
    disk.mkdir()
    result = run("--nvme", str(disk), "--quick", "--seconds", "0.1", "--json", str(table), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert os.listdir(disk) == []
    found = read_table(table)
    assert {(layer.kind, layer.dtype) for layer in found.layers} == set(itertools.product(LayerKind, ("bf16", "fp32")))
    (one,) = found.directories
    assert (one.path, one.is_direct) == (str(disk), True)
    assert found.read_bytes_per_s == one.read.per_s
    assert found.sizes is not None
    assert (found.sizes.cpu_bytes, found.sizes.gpu_bytes) == (min(memory_limits().values()), None)
    assert found.sizes.nvme_bytes <= shutil.disk_usage(disk).total
    names = {entry.name for entry in found.spreads}
    assert names >= {"read_bytes_per_s", "sync_bytes_per_s", "h2d_bytes_per_s", "matmul_flop_per_s"}
    report = json.loads(table.read_text())["report"]
    assert len(report["directories"][0]["cells"]) == 4
    assert f"disk, reads             │ {one.read.per_s / 1e9:6.2f}"[:34] in result.output
    assert "Reads and writes" in result.output
    assert plot.read_bytes().startswith(PNG)


def test_what_is_free_on_a_file_system_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(total=3 * 10**9, free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    twins = [tmp_path / "a", tmp_path / "b"]
    for path in twins:
        path.mkdir()
    assert _sizes(twins, cast(ComputeDevice, SimpleNamespace(kind="cpu"))).nvme_bytes == 10**9


def test_directories_are_shown_by_their_names() -> None:
    rate = Rate(1e9, 1e9, 1e9)
    table = _directories([DirectoryRates(path, rate, rate, rate, MIB, 1, MIB, 1) for path in ("/mnt/[nvme0]", "a[/b]")])
    console = Console(width=120, file=io.StringIO())
    console.print(table)
    shown = cast(io.StringIO, console.file).getvalue()
    assert "/mnt/[nvme0]" in shown
    assert "a[/b]" in shown


def test_layers_are_timed_in_memory_that_earlier_steps_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_set", lambda *values: settings.extend(values))
    seen: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(layers, "time_layers", lambda *_: seen.append(settings.copy()))
    tierstore.apps.probe._time_layers(ProbeOptions(nvme=(Path("disk"),)), 1, lambda *_: None)
    assert dict(seen[0])[heap._TRIM_THRESHOLD] == heap._NEVER
    assert dict(settings)[heap._TRIM_THRESHOLD] == heap._SMALL_BYTES


def test_what_bounds_is_said() -> None:
    said = sentences(TABLE)
    assert "Reads and writes share one budget: both at once move 1.22 GB/s, the faster one alone 1.38." in said[0]
    assert "bounded by the disk: 17.85 s of disk and 0.77 s of Adam" in said[1]
    caching = sentences(replace(TABLE, sync_bytes_per_s=1e9))
    assert "Writes wait in a cache until they are synced: with that they take 1.72 s per GB" in caching[1]
    assert "bounded by the disk: 29.85 s of disk" in caching[2]
    spreads = tuple(NamedRate(f"{name}_bytes_per_s", Rate(1e12, 0.5e12, 1.5e12)) for name in ("read", "sync"))
    wide = replace(TABLE, sync_bytes_per_s=1e12, spreads=spreads)
    assert sentences(wide)[-1].endswith("so measure again: disk, reads.")  # a sync that takes no time has no rate
    met = replace(TABLE, collective=CostModel(2e-4, 12e9))
    assert "An all-reduce between the ranks takes 200 us, and a second per 12.00 GB." in sentences(met)
    alone = replace(TABLE, collective=CostModel(2e-4, 12e9, cores=0.9))
    assert sentences(alone)[-1].endswith("12.00 GB. It keeps 90% of the computing cores busy.")
    work = LayerWork(1.0, 7.1e6, 2e5, 4e9)
    computed = replace(TABLE, layers=(TimedLayer(LayerKind.BLOCK, "bf16", work, 0.02, 0.04),))
    said = "a block of 7.1M parameters in bf16 in 20 ms forward and 40 ms backward: 200 Gflop/s."
    assert said in sentences(computed)[-1]
    assert "go on side by side" in sentences(replace(TABLE, shared_bytes_per_s=2.4e9))[0]


def test_the_help_tells_the_times_that_are_taken() -> None:
    told = " ".join(run("--help").output.replace("│", " ").split())
    assert f"[default: {survey.THOROUGH.seconds:g}, quick {survey.QUICK.seconds:g}]" in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Missing option '--nvme'"),
        (["--nvme", ""], "an empty path is not a directory"),
        (["--nvme", "none"], "tierstore: none is not a directory; make it"),
        (["--nvme", ".", "--nvme", "../{here}"], "tierstore: a directory is listed twice in --nvme"),
        (["--nvme", ".", "--size", "1MiB"], "tierstore: --size must be at least 32 MiB, the largest block, not 1 MiB"),
        (["--nvme", ".", "--size", "4000TiB"], "are free; ask for less, or make room"),
        (["--nvme", ".", "--seconds", "nan"], "tierstore: --seconds must be at least 0.1"),
        (["--nvme", ".", "--against", "dd", "--size", "64MiB"], "tierstore: --against knows fio, not 'dd'"),
        (["--nvme", ".", "--against", "fio", "--size", "64MiB"], "--against fio needs --size of at least 256 MiB"),
        (["--nvme", ".", "--device", "tpu"], "tierstore: --device must be cpu, cuda or cuda:N, not tpu"),
        (["--nvme", ".", "--json", "none/rates.json"], "cannot write --json none/rates.json"),
        (["--nvme", ".", "--plot", "none/rates.png"], "cannot write --plot none/rates.png"),
        (["--nvme", ".", "--json", "."], "cannot write --json .: it is a directory"),
        (["--nvme", "disk\udcff", "--json", "rates.json"], "the name of 'disk\\udcff' is not UTF-8, and that of a"),
    ],
)
def test_what_cannot_be_asked(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    result = run(*(one.format(here=tmp_path.name) for one in arguments))
    assert result.exit_code in (1, 2)
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == []


def test_fio_that_is_missing_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    result = run("--nvme", str(tmp_path), "--against", "fio")
    assert result.exit_code == 2
    assert "fio is not installed here" in result.stderr


def test_an_interrupt_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(tierstore.apps.probe, "probe", interrupted)
    result = run("--nvme", str(tmp_path))
    assert (result.exit_code, result.stderr) == (
        130, "tierstore: interrupted; the files that were measured on are gone\n"
    )  # fmt: skip


def test_the_script_runs() -> None:
    root = Path(tierstore.__file__).parents[1]
    result = subprocess.run([sys.executable, "tools/measure_bandwidth.py", "--quik"], cwd=root, capture_output=True,
                            text=True, timeout=60, env={"PYTHONPATH": str(root)})  # fmt: skip
    assert result.returncode == 2
    assert "No such option" in result.stderr


def test_a_rank_that_is_not_the_first_measures_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    met: list[int] = []

    def meet(options: ProbeOptions, launch: Launch) -> CostModel:
        met.append(launch.rank)
        return CostModel(1e-4, 1e9)

    monkeypatch.setattr(tierstore.apps.probe, "_time_collectives", meet)
    tell: Callable[[str, float], None] = lambda what, done: None  # noqa: E731
    assert probe(ProbeOptions(nvme=(tmp_path,)), tell, Launch(1, 2, 1, 2)) is None
    assert met == [1]
