"""`tierstore simulate step`: folklore against figures, the chart, and what cannot be asked."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierstore.apps import pipeline
from tierstore.cli import app
from tierstore.plan.bandwidth import BandwidthTable
from tierstore.plan.cost_model import CostModel

ROOT = Path(__file__).parents[2]


def step(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "step", *arguments])


def figures(tmp_path: Path, *arguments: str) -> Any:
    path = tmp_path / "steps.json"
    result = step(*arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text())


def test_a_third_buffer_does_not_raise_bandwidth_and_the_words_say_so() -> None:
    result = step()
    words = " ".join(result.output.split())
    rows = [line.strip("│").split("│") for line in result.output.splitlines() if line[:1] == "│"]
    assert [row[3].strip() for row in rows] == ["130.0", "80.0", "80.0", "80.0", "80.0"]
    assert "Bandwidth-bound" in words
    assert "a link 1.6 times as fast" in words
    assert "A third buffer gains nothing over two" in words
    assert "buffers do not raise the rate of a link" in words
    assert "…" not in result.output  # nothing is cut off in 80 columns


def test_a_second_disk_is_what_helps(tmp_path: Path) -> None:
    found = figures(tmp_path, "--disk", "1GB", "--disk", "1GB/s", "--depth", "1")
    assert found["rows"][0]["seconds"] / found["visits"] == pytest.approx(0.05)
    assert found["verdict"].startswith("Compute-bound: depth 1 hides the transfers")


def test_unequal_layers_and_jitter_gain_by_depth(tmp_path: Path) -> None:
    unequal = ["--layer", "300MB:100", "--layer", "10MB:100x5"]
    found = figures(tmp_path, *unequal * 4, "--disk", "1GB", "--memory", "700MB", "--depth", "1", "--depth", "3")
    assert found["rows"][0]["stall_s"] > 1.5 * found["rows"][1]["stall_s"]
    assert "it absorbs unequal layers" in found["verdict"]
    first, again = (figures(tmp_path, "--jitter", "0.4", "--layer", "80MB:80x12", "--depth", "1", "--depth", "4")
                    for _ in range(2))  # fmt: skip
    assert first == again
    assert "it absorbs jitter" in first["verdict"]


def test_ranks_read_a_part_and_gather_the_rest(tmp_path: Path) -> None:
    found = figures(tmp_path, "--ranks", "4", "--gather", "2GB", "--depth", "2", "--backward", "2")
    disk, gather = found["links"]
    assert (disk["share"], gather["share"], gather["bytes_per_s"]) == (0.25, 0.75, 2e9)
    assert {span["link"] for span in found["rows"][0]["timeline"] if span["track"] == "link"} == {0, 1}
    assert found["visits"] == 48


def test_layers_that_stay_at_one_depth_are_not_said_to_stay_at_any() -> None:
    words = " ".join(step("--layer", "80MB:50x4", "--depth", "1", "--depth", "4").output.split())
    assert "All layers stay on the device at depth 4: nothing is fetched. Depth 4 is 60.0% faster than two" in words
    assert "4 fewer fetches, for the memory holds more layers" in words
    words = " ".join(step("--layer", "80MB:50x4", "--memory", "1GB").output.split())
    assert "All layers stay on the device: nothing is fetched, at any depth." in words


def test_other_traffic_is_not_called_a_fetch() -> None:
    words = " ".join(step("--other", "1GB", "--depth", "1").output.split())
    assert "busy all the time, 1080.0 ms a visit with all its traffic beside 50.0 ms of computing" in words


def test_rates_of_a_probe_stand_in_for_what_is_not_given(tmp_path: Path) -> None:
    table = BandwidthTable(2.5e9, 2e9, 1.8e9, 1e10, 1e10, 1e10, 1e9)
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps(table.to_json()))
    given = ["--bandwidth", str(rates), "--ranks", "2", "--depth", "1"]
    assert [link["bytes_per_s"] for link in figures(tmp_path, *given)["links"]] == [2.5e9, 1e10]
    rates.write_text(json.dumps(replace(table, collective=CostModel(1e-4, 3e9)).to_json()))
    assert [link["bytes_per_s"] for link in figures(tmp_path, *given)["links"]] == [2.5e9, 3e9]
    said = [*given, "--disk", "1GB", "--gather", "4GB"]
    assert [link["bytes_per_s"] for link in figures(tmp_path, *said)["links"]] == [1e9, 4e9]


def test_an_interrupt_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: pipeline.PipelineOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    result = step()
    assert (result.exit_code, result.stderr) == (130, "tierstore: interrupted\n")


@pytest.mark.parametrize(("name", "magic"), [("chart.png", b"\x89PNG\r\n\x1a\n"), ("chart.svg", b"<?xml")])
def test_the_chart_is_a_picture(name: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    result = step("--layer", "80MB:50x3", "--depth", "1", "--disk", "1GB", "--other", "10MB", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(magic)


def test_the_text_timeline_shows_who_waits_for_whom() -> None:
    lines = step("--layer", "80MB:80x3", "--depth", "0").output.splitlines()
    compute, disk = (next(line[18:] for line in lines if line[9:17].strip() == name) for name in ("compute", "disk"))
    assert "0" in compute
    assert not any(a != "·" and b != "·" for a, b in zip(compute, disk))  # without prefetch they take turns


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layer", "80MB"], "not a layer"),
        (["--depth", "-1"], "--depth is 0 to 64"),
        (["--disk", "0"], "a positive one"),
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--backward", "-1"], "--backward must be at least 0"),
        (["--jitter", "-1"], "a jitter is a part of a time"),
        (["--depth", "-1", "--depth", "2"], "--depth is 0 to 64 layers, not -1"),
        (["--layer", "80MB:0x4"], "a step that computes nothing hides nothing: give a --layer some milliseconds"),
        (["--memory", "10MB"], "--memory 10 MB cannot hold the largest layer, 80 MB: give more"),
        (["--json", "/nowhere/x.json"], "cannot write --json /nowhere/x.json: its directory is missing"),
        (["--plot", "/"], "cannot write --plot /: it is a directory"),
        (["--bandwidth", "/nowhere/rates.json"], "cannot read the bandwidth table /nowhere/rates.json: No such file"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], sentence: str) -> None:
    result = step(*arguments)
    assert result.exit_code in (1, 2)
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_the_script_is_the_command_and_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'numba', 'matplotlib'}"
    code = (
        "import runpy, sys\nsys.argv[1:] = ['--layer', '80MB:50x20']\n"
        "try: runpy.run_path('tools/simulate_step.py', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"sys.exit(' '.join({heavy} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert "Bandwidth-bound" in result.stdout
