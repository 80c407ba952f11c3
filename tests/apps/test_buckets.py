"""`tierstore simulate buckets`: the acceptance table, JSON, the plot, and what cannot be asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierstore.apps.buckets import SweepOptions, parse_layers, simulate, size_text
from tierstore.cli import app
from tierstore.errors import ConfigError
from tierstore.plan.buckets import Layer
from tierstore.plan.cost_model import CostModel

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", "buckets", *arguments])


def cells(output: str) -> list[list[str]]:
    """Rows of the table, without its frame."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line[:1] == "│"]


def test_the_acceptance_table() -> None:
    sizes = [f"--bucket={25 * layers}MB" for layers in (1, 2, 4, 8, 16, 48)]
    result = run("--layer", "25MB:3x48", "--alpha", "200", "--beta", "12GB/s", *sizes)
    assert result.exit_code == 0, result.output
    assert [row[2] for row in cells(result.output)] == ["146.3", "148.4", "152.5", "160.9", "177.5", "244.2"]
    assert [row[0] for row in cells(result.output)][::5] == ["25 MB", "1.2 GB"]
    assert cells(result.output)[0][3] == "253.6"
    assert "shortest: 25 MB, 146.3 ms; largest within 1 % of it: 25 MB" in " ".join(result.output.split())
    assert "…" not in result.output  # nothing is cut off in 80 columns


def test_the_defaults_are_the_acceptance_case() -> None:
    result = run()
    assert [row[2] for row in cells(result.output)] == ["146.3", "148.4", "152.5", "160.9", "177.5", "196.4", "244.2"]


def test_json_holds_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    given = "--layer 1MB:2 --layer 3MB:1x2 --before 5 --in-flight 2 --launch 10 --first-bucket 1MB --json"
    assert run(*given.split(), str(path)).exit_code == 0
    found = json.loads(path.read_text())
    assert found["layers"] == [
        {"nbytes": nbytes, "compute_s": s} for nbytes, s in ((10**6, 2e-3), *[(3 * 10**6, 1e-3)] * 2)
    ]
    assert found["link"] == {"alpha_s": 2e-4, "beta_bytes_per_s": 12e9, "launch_s": 1e-5, "cores": 0.0}
    assert (found["before_s"], found["max_in_flight"], found["first_bucket_bytes"]) == (5e-3, 2, 10**6)
    assert found["compute_s"] == pytest.approx(9e-3)
    assert {row["buckets"] for row in found["rows"]} == {3, 2}
    assert found["best_bucket_bytes"] == found["near_best_bucket_bytes"] == 3 * 10**6


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    assert run("--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(PNG)


def test_without_matplotlib_only_the_plot_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--plot", str(tmp_path / "sweep.png"))
    assert result.exit_code == 2
    assert result.stderr == "tierstore: a plot needs matplotlib: pip install matplotlib\n"
    assert run().exit_code == 0


def test_no_heavy_import() -> None:
    heavy = "{'torch', 'numpy', 'numba', 'matplotlib'}"
    code = (
        "import runpy, sys\nsys.argv[1:] = ['simulate', 'buckets']\n"
        "try: runpy.run_module('tierstore.cli', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"sys.exit(' '.join({heavy} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layer", "3"], "not a layer: '3'"),
        (["--layer", "3MB:x4"], "not a layer"),
        (["--layer", "3MB:1x0"], "not a layer"),
        (["--layer", "3MB:1e999"], "not a layer: '3MB:1e999'"),
        (["--layer", "3MB:-1"], "not a layer: '3MB:-1'"),
        (["--layer", "3XB:1"], "not a size: '3XB'"),
        (["--layer", "0:1"], "no layer has gradients"),
        (["--alpha", "-1"], "an interconnect has costs that are not negative"),
        (["--beta", "0"], "positive rate"),
        (["--beta", "12GB/h"], "not a size"),
        (["--before", "-1"], "--before cannot be -1.0 ms"),
        (["--in-flight", "0"], "--in-flight must be at least 1, not 0"),
        (["--bucket", "0"], "a bucket holds at least one byte"),
        (["--first-bucket", "0"], "a bucket holds at least one byte"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["plot", "json"])
def test_a_file_that_cannot_be_written(option: str, tmp_path: Path) -> None:
    if option == "plot":
        pytest.importorskip("matplotlib")
    path = tmp_path / "missing" / "file.png"
    with pytest.raises(ConfigError, match=r"cannot write .*missing/file\.png: its directory is missing"):
        simulate(SweepOptions(layers=(Layer(1, 1),), link=CostModel(0, 1), **{option: path}))  # type: ignore[arg-type]


def test_layers_are_parsed() -> None:
    assert parse_layers("25MB:3x2") == (Layer(25 * 10**6, 3e-3),) * 2
    assert parse_layers(" 1MiB : 0.5 ") == (Layer(2**20, 5e-4),)
    with pytest.raises(ConfigError):
        parse_layers("1MB:nan")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (25 * 10**6, "25 MB"),
        (2**20, "1 MiB"),
        (25 * 2**20, "25 MiB"),
        (1.2e9, "1.2 GB"),
        (310240000, "310 MB"),
        (7, "7 B"),
    ],
)
def test_sizes_read_as_given(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text
