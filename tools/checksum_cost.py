#!/usr/bin/env python3
"""What do checksums cost a step? Rounds of one engine's steps with and without them, in turns.

A machine's speed drifts by more than they cost, so neighbours are compared: each figure is of pairs of rounds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierstore.pack.codecs import Bytes, checksum
from tierstore.store import slots

_WAYS = {"reads not checked": "writes", "neither computed nor checked": "nothing"}
_NOT_COMPUTED = 0


class Switch:
    """Takes the place of the store's checksum; `computes` is "everything", "writes" or "nothing"."""

    def __init__(self) -> None:
        self.computes = "everything"
        self._reading = threading.local()
        self._read_here = slots.SlotPack.read_here

    def checksum(self, array: Bytes) -> int:
        """Of a chunk that was written, or read, which then has the number that is wanted of it."""
        wanted = getattr(self._reading, "wanted", None)
        if self.computes == "nothing" or (self.computes == "writes" and wanted is not None):
            return _NOT_COMPUTED if wanted is None else int(wanted)
        found = checksum(array)
        return _NOT_COMPUTED if wanted == _NOT_COMPUTED else found

    def put_in(self) -> None:
        """From now on the store of this process asks this."""
        read_here, reading = self._read_here, self._reading

        def watched(pack: slots.SlotPack, index: int, array: Any, record: slots.ChunkRecord, scratch: Any) -> None:
            reading.wanted = record.checksum
            try:
                read_here(pack, index, array, record, scratch)
            finally:
                reading.wanted = None

        vars(slots)["checksum"] = self.checksum
        slots.SlotPack.read_here = watched  # type: ignore[method-assign,assignment]


def checksum_cost(
    nvme: Annotated[Path | None, typer.Option(help="Directory on the disk \\[default: a temporary one].")] = None,
    preset: Annotated[str, typer.Option(help="Model, as in `tierstore train`.")] = "124m",
    cpu_memory: Annotated[str, typer.Option(help="Budget, as in `tierstore train`.")] = "512MiB",
    pairs: Annotated[int, typer.Option(min=3, help="Pairs of rounds per line; a round is four steps.")] = 20,
) -> None:
    """Measure on an otherwise idle machine: twenty pairs of GPT-2 124M take 12 minutes."""
    from tierstore.apps.bench.step_worker import contend
    from tierstore.cli.interrupts import interruptible

    switch, ratios = Switch(), {name: list[float]() for name in _WAYS}
    switch.put_in()
    with interruptible("interrupted; nothing is left behind"), tempfile.TemporaryDirectory(dir=nvme) as folder:
        train = {
            "preset": preset, "batch": 1, "sequence": 64, "cpu_memory": cpu_memory, "gpu_memory": "256MiB",
            "update": "speculative", "nvme": [folder], "evaluate": 0,
        }  # fmt: skip
        with contend({"train": train, "steps": 2}) as (_, run_round):

            def seconds(computes: str) -> float:
                switch.computes = computes
                return run_round(0)[1]["drained_s"]

            seconds("everything")
            for turn in range(pairs):
                for name, computes in _WAYS.items():
                    ratios[name].append(_ratio(seconds, computes, is_first=turn % 2 == 0))
    table = Table("compared with a step", "checksums cost it, median of pairs", "95 %, by bootstrap")
    for name, found in ratios.items():
        low, high = _interval(found)
        table.add_row(name, f"{statistics.median(found) - 1:.1%}", f"{low - 1:.1%} to {high - 1:.1%}")
    Console().print(table)


def _ratio(seconds: Callable[[str], float], computes: str, *, is_first: bool) -> float:
    """Of two rounds, one with everything; each goes first in half of the pairs."""
    if is_first:
        whole = seconds("everything")
        return whole / seconds(computes)
    less = seconds(computes)
    return seconds("everything") / less


def _interval(found: Sequence[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(4000))
    return medians[100], medians[-101]


if __name__ == "__main__":
    typer.run(checksum_cost)
