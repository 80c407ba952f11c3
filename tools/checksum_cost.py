#!/usr/bin/env python3
"""What does it cost a step to check what it reads? Rounds of one engine's steps with and without checks, in turns.

The digests of what a step writes are made in the pass of Adam, and are not measured here. A machine's speed drifts by
more than checks cost, so neighbouring rounds are compared: each figure is of pairs of rounds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierstore.kernels import adam
from tierstore.store import slots, trip_bytes


class Switch:
    """Whether the store of this process checks what it reads."""

    def __init__(self) -> None:
        self.is_on = True
        self._checksum_of = slots.ChunkRecord.checksum_of
        self._update: Callable[..., Any] = adam.update_with_digests

    def put_in(self) -> None:
        """From now on this switch decides whether loads, and what an update reads, are checked."""

        def checksum_of(record: slots.ChunkRecord, data: Any) -> int:
            return self._checksum_of(record, data) if self.is_on else record.checksum

        def update(*given: Any) -> Any:
            *most, asks_before = given
            return self._update(*most, asks_before if self.is_on else (False, False))

        slots.ChunkRecord.checksum_of = checksum_of  # type: ignore[method-assign,assignment]
        trip_bytes.update_with_digests = update  # type: ignore[assignment,attr-defined]


def checksum_cost(
    nvme: Annotated[Path | None, typer.Option(help="Directory on the disk \\[default: a temporary one].")] = None,
    preset: Annotated[str, typer.Option(help="Model, as in `tierstore train`.")] = "124m",
    cpu_memory: Annotated[str, typer.Option(help="Budget, as in `tierstore train`.")] = "512MiB",
    pairs: Annotated[int, typer.Option(min=3, help="Pairs of rounds; a round is four steps.")] = 20,
) -> None:
    """Measure on an otherwise idle machine: twenty pairs of GPT-2 124M take 6 minutes."""
    from tierstore.apps.bench.step_worker import contend
    from tierstore.cli.interrupts import interruptible

    switch = Switch()
    switch.put_in()
    with interruptible("interrupted; nothing is left behind"), tempfile.TemporaryDirectory(dir=nvme) as folder:
        train = {
            "preset": preset, "batch": 1, "sequence": 64, "cpu_memory": cpu_memory, "gpu_memory": "256MiB",
            "update": "speculative", "nvme": [folder], "evaluate": 0,
        }  # fmt: skip
        with contend({"train": train, "steps": 2}) as (_, run_round):

            def seconds(*, is_on: bool) -> float:
                switch.is_on = is_on
                return run_round(0)[1]["drained_s"]

            seconds(is_on=True)
            ratios = [_ratio(seconds, is_first=turn % 2 == 0) for turn in range(pairs)]
    low, high = _interval(ratios)
    table = Table("checks of what is read cost a step, median of pairs", "95 %, by bootstrap")
    table.add_row(f"{statistics.median(ratios) - 1:.1%}", f"{low - 1:.1%} to {high - 1:.1%}")
    Console().print(table)


def _ratio(seconds: Callable[..., float], *, is_first: bool) -> float:
    """Of a round with checks to one without; each goes first in half of the pairs."""
    if is_first:
        checked = seconds(is_on=True)
        return checked / seconds(is_on=False)
    unchecked = seconds(is_on=False)
    return seconds(is_on=True) / unchecked


def _interval(found: Sequence[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(4000))
    return medians[100], medians[-101]


if __name__ == "__main__":
    typer.run(checksum_cost)
