from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from fake_engine import FakePlacement, FakeReport
from rich.console import Console

from tierstore.apps.report import Reporter, Totals, efficiency, summary_rows
from tierstore.config import Tier


def _report(step: int, **changes: object) -> FakeReport:
    return FakeReport(step, 1.0, [0.1], **changes)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"forward": 0.3, "backward": 0.5, "wait": 0.2, "total": 1.0}, 0.6),
        ({"forward": 1.0, "backward": 1.0, "wait": 0.0, "total": 1.5}, 1.0),
        ({"forward": 0.1, "wait": 0.2, "total": 1.0}, 0.0),
        ({}, 0.0),
    ],
)
def test_efficiency_is_the_share_of_compute(seconds: dict[str, float], expected: float) -> None:
    assert efficiency(seconds) == pytest.approx(expected)


def test_totals_add_up_and_keep_peaks() -> None:
    totals = Totals()
    totals.add(_report(3, peak_bytes={"gpu": 5}), 2.0, 10)
    totals.add(_report(4, peak_bytes={"gpu": 3}, skipped=True), 1.0, 10)
    assert (totals.first_step, totals.last_step, totals.steps, totals.skipped, totals.tokens) == (3, 4, 2, 1, 20)
    assert totals.bytes["nvme_read"] == 2 * 10**9
    assert totals.seconds["total"] == pytest.approx(2.0)
    assert totals.peak_bytes == {"gpu": 5}
    assert (totals.first_loss, totals.last_loss) == (2.0, 1.0)


def test_the_table_of_a_run() -> None:
    totals = Totals(held_out_before=5.5, held_out_after=2.25, wall_s=4.0, peak_rss_bytes=2**20)
    for step in (1, 2):
        totals.add(_report(step), 4.0 - step, 100)
    rows = dict(summary_rows(totals))
    assert rows["steps"] == "2 (1 to 2)"
    assert rows["training loss"] == "3.000 -> 2.000"
    assert rows["held-out loss, nats per byte"] == "5.500 -> 2.250"
    assert rows["tokens per second"] == "50"
    assert rows["seconds per step"] == "2.00"
    assert rows["  forward"] == "0.30"
    assert rows["  waiting for weights, of these"] == "0.20"
    assert rows["peak resident memory"] == "1 MiB"
    assert "steps skipped for overflow" not in rows


def test_the_table_says_where_a_run_diverged() -> None:
    totals = Totals()
    for step, loss in enumerate((1.0, math.inf, math.nan), start=1):
        totals.add(_report(step), loss, 10)
    assert dict(summary_rows(totals))["the loss is no number"] == "since step 2: the run has diverged"


def test_the_table_of_no_step() -> None:
    assert summary_rows(Totals()) == [("steps", "0")]


def test_plain_lines_come_at_intervals_and_at_the_end() -> None:
    output, now_s = io.StringIO(), [0.0]
    reporter = Reporter(Console(file=output, width=200), clock=lambda: now_s[0])
    reporter.start(0, 20)
    for step in range(1, 21):
        now_s[0] += 1.0
        reporter.step(_report(step), 2.0, 100, 20)
    reporter.stop()
    printed = [line.split()[1] for line in output.getvalue().splitlines()]
    assert printed == ["1/20", "6/20", "11/20", "16/20", "20/20"]


def test_a_terminal_gets_a_live_line() -> None:
    output = io.StringIO()
    reporter = Reporter(Console(file=output, width=160, force_terminal=True))
    reporter.start(2, 4)
    reporter.step(_report(3), 1.5, 100, 4)
    reporter.stop()
    reporter.stop()
    assert "loss 1.500" in output.getvalue()
    assert "tokens/s" in output.getvalue()


@pytest.mark.parametrize(("has_gpu", "tier"), [(True, "gpu"), (False, "gpu (main memory)")])
def test_the_placement_is_a_table(has_gpu: bool, tier: str) -> None:
    output, rows = io.StringIO(), FakePlacement().usage()
    rows += (replace(rows[0], tier=Tier.GPU),)
    Reporter(Console(file=output, width=80)).placement(rows, has_gpu=has_gpu)
    shown = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.getvalue().splitlines()]
    assert ["weights", "nvme", "3", "3 MiB"] in shown
    assert ["weights", tier, "3", "3 MiB"] in shown


def test_text_is_not_interpreted() -> None:
    output = io.StringIO()
    Reporter(Console(file=output, width=20)).say("a path [bold]/x[/bold] that is longer than the line")
    assert output.getvalue() == "a path [bold]/x[/bold] that is longer than the line\n"


def test_codecs_are_a_line_each_with_the_reason() -> None:
    output = io.StringIO()
    Reporter(Console(file=output, width=40)).codecs({"state": {"codec": "none", "why": "it would be [slow]; 0.9 x"}})
    assert output.getvalue() == "codec of state: none; it would be [slow]; 0.9 x\n"
