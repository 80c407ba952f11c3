"""What a benchmark consists of: options, contestants, their results, and rows with their bars.

Scope: plain records, and how contestants are started. Not here: running them (`arena.py`), tables (`report.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tierstore
from tierstore.apps.output_files import check_outputs
from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.io.directories import why_not_writable
from tierstore.plan.bandwidth import middle

PEERS = ("deepspeed", "fio", "torch", "safetensors")
HEATS = ("disk", "memory", "accumulate", "cost")
DTYPES = ("bf16", "fp32")
ROOT = Path(tierstore.__file__).parent.parent
_DRIVERS = ROOT / "tools" / "peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """All options of one run; every field is the command-line option of the same name.

    Attributes:
        peer: peers to compare with; if empty, all that a case knows.
        peer_python: the interpreter that has the peers.
        nvme: a directory on the disk; files are made in a fresh one below it and removed.
        size: bytes of the file of `disk` and of the checkpoint of `load`.
        params: number of parameters of `adam`.
        steps: steps of `step` in a round, after one that does not count.
        curve: `step` at many CPU budgets, and nothing else of it.
        large: `step` with 1.5B parameters, and nothing else of it.
        heat: only this one of the `HEATS` of `step`; None is all of them, which take a quarter to half an hour.
        dtype: of the models of `step`, one of `DTYPES`; bf16 says little where the CPU has no fast products of it.
    """

    peer: tuple[str, ...] = ()
    peer_python: Path = Path(sys.executable)
    nvme: Path = Path()
    rounds: int = 5
    size: int = 2**32
    params: int = 2**26
    steps: int = 2
    curve: bool = False
    large: bool = False
    heat: str | None = None
    dtype: str = "bf16"
    device: str = "cpu"
    json: Path | None = None
    markdown: Path | None = None

    def __post_init__(self) -> None:
        for name in self.peer:
            if name not in PEERS:
                raise ConfigError(f"--peer knows {', '.join(PEERS)}, not {name!r}")
        if not 1 <= self.rounds <= 1000:
            raise ConfigError(f"--rounds must be at least 1 and at most 1000, not {self.rounds}")
        if not 2**26 <= self.size <= 2**44 or self.size % 2**26:
            raise ConfigError(
                f"--size must be a multiple of 64 MiB, at most 16 TiB, not {format_size(self.size)} ({self.size} B)"
            )
        if not 2**16 <= self.params <= 2**34:
            raise ConfigError(f"--params must be at least 65536 and at most {2**34}, not {self.params}")
        if not 1 <= self.steps <= 1000:
            raise ConfigError(f"--steps must be at least 1 and at most 1000, not {self.steps}")
        if self.curve and self.large:
            raise ConfigError("--curve and --large exclude each other: each is a run of its own")
        if self.heat is not None and self.heat not in HEATS:
            raise ConfigError(f"--heat knows {', '.join(HEATS)}, not {self.heat!r}")
        if self.heat is not None and (self.curve or self.large):
            raise ConfigError("--heat is a part of the usual run, which --curve and --large replace")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype knows {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device must be cpu or cuda, not {self.device!r}")
        if not self.peer_python.is_file():
            raise ConfigError(f"--peer-python {self.peer_python} is not there; give the path of a Python interpreter")
        if not self.nvme.is_dir():
            raise ConfigError(f"--nvme {self.nvme} is not a directory; make it, or name one on the disk to measure")
        if reason := why_not_writable(self.nvme):
            raise ConfigError(f"cannot use --nvme {self.nvme}: {reason}")
        check_outputs(json=self.json, markdown=self.markdown)

    @property
    def longer(self) -> float:
        """How many times as long a round may take as one of the defaults, since it has as many times as much to do."""
        return max(1.0, self.size / 2**32, self.params / 2**26, self.steps / 2)

    def wants(self, peer: str) -> bool:
        """Whether to compare with this peer."""
        return not self.peer or peer in self.peer


@dataclass(frozen=True, slots=True)
class Contestant:
    """A command that answers as `serve.py` does.

    Attributes:
        missing: why it cannot even be started.
        start_timeout_s: until it is ready; a peer may have to compile its operators first.
        round_timeout_s: for a round of the default size; see `BenchOptions.longer`.
    """

    name: str
    argv: tuple[str, ...]
    is_peer: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None
    start_timeout_s: float = 900.0
    round_timeout_s: float = 600.0


def ours(name: str, module: str, **options: Any) -> Contestant:
    """A contestant of our own: `contend` of a module of this package, in a process of its own."""
    command = (sys.executable, "-m", "tierstore.apps.bench.worker", module, json.dumps(options))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return Contestant(name, command, False, {"PYTHONPATH": path})


def peer(name: str, driver: str, python: Path, **options: Any) -> Contestant:
    """A peer: a script of `tools/peers`, run by the interpreter that has what it needs."""
    path = _DRIVERS / f"{driver}.py"
    missing = None if path.is_file() else f"no {path.name} in {_DRIVERS}: the drivers of peers come with the repository"
    return Contestant(name, (str(python), str(path), json.dumps(options)), True, missing=missing)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a contestant said of one round.

    Attributes:
        stolen: the share of the cores' time that the host of a virtual machine took meanwhile.
    """

    seconds: float
    figures: Mapping[str, float]
    peak_rss_bytes: int
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figure over the rounds, and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Of at least one sample."""
        return cls(*middle(samples))


@dataclass(slots=True)
class Result:
    """All that is known of one contestant.

    Attributes:
        facts: what it said of itself: versions, sizes.
        answers: of the rounds that count.
        trouble: why there are no more: `missing: ...`, `failed: ...` or `interrupted ...`.
    """

    contestant: Contestant
    facts: Mapping[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    trouble: str | None = None

    def samples(self, figure: str) -> list[float]:
        """A figure, or `seconds`, of each round that has it."""
        found = (one.seconds if figure == "seconds" else one.figures.get(figure) for one in self.answers)
        return [sample for sample in found if sample is not None]

    def spread(self, figure: str) -> Spread | None:
        """Median and quartiles of a figure; None where there is none."""
        found = self.samples(figure)
        return Spread.of(found) if found else None

    def median(self, figure: str) -> float | None:
        """As `spread`."""
        found = self.spread(figure)
        return None if found is None else found.median

    def least(self, figure: str) -> float | None:
        """That of the round with the least; None where there is none."""
        return min(self.samples(figure), default=None)

    @property
    def peak_rss_bytes(self) -> int | None:
        """The peak of the process and its children, over all rounds."""
        return max((one.peak_rss_bytes for one in self.answers), default=None)


Results = Mapping[str, Result]


def best(results: Results, whose: str, figure: str) -> Result | None:
    """The result with the highest median among those whose name begins with `whose`."""
    found = [result for name, result in results.items() if name.startswith(whose) and result.spread(figure) is not None]
    return max(found, key=lambda result: result.median(figure) or 0.0, default=None)


def best_median(results: Results, whose: str, figure: str) -> float | None:
    """The highest median among those whose name begins with `whose`; None where there is none."""
    found = best(results, whose, figure)
    return None if found is None else found.median(figure)


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row must reach.

    Attributes:
        of: what it is measured against, in words: `of fio's best`.
        measured: the ratio; None where the other side is missing.
        at_most: the bound is an upper one, as of a time.
    """

    bound: float
    of: str
    measured: float | None
    at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        if self.measured is None:
            return None
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def __str__(self) -> str:
        bar = f"bar {'at most ' if self.at_most else ''}{self.bound:g} {self.of}"
        if self.measured is None:
            return f"{bar}: not measured"
        return f"{bar}: {self.measured:.3g}, {'met' if self.is_met else 'short'}"


def ratio(value: float | None, other: float | None) -> float | None:
    """The quotient; None where either is missing, or `other` is 0."""
    return None if value is None or not other else value / other


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    Attributes:
        value: median and quartiles, in `unit`.
        floor: what the machine allows, in the same unit.
        floor_of: how that was found, in words.
        trouble: why there is no value, or not of all rounds, or why it says little.
    """

    work: str
    contestant: str
    unit: str
    value: Spread | None
    floor: float | None = None
    floor_of: str = ""
    bars: tuple[Bar, ...] = ()
    peak_rss_bytes: int | None = None
    trouble: str | None = None


def row_of(
    result: Result,
    figure: str,
    work: str,
    unit: str,
    *,
    floor: float | None = None,
    floor_of: str = "",
    bars: Sequence[Bar] = (),
) -> Row:
    """The row of a contestant's figure."""
    return Row(work, result.contestant.name, unit, result.spread(figure), floor, floor_of, tuple(bars),
               result.peak_rss_bytes, result.trouble)  # fmt: skip


def through_the_cache(row: Row) -> Row:
    """A row of what a file system without O_DIRECT did: it is shown, but meets no bar and misses none."""
    why = "the file system refuses O_DIRECT: this went through the page cache, so no bar counts"
    return replace(row, bars=tuple(replace(bar, measured=None) for bar in row.bars), trouble=row.trouble or why)


Heat = Sequence[Contestant]
"""Contestants that are alive at the same time and take turns."""


@dataclass(frozen=True, slots=True)
class Case:
    """One benchmark.

    Attributes:
        heats: contestants, by options and a scratch directory that is removed afterwards. Names differ between heats.
        rows: the table, from all results by name of the contestant.
        disk_bytes: what it writes at most.
        prepare: makes in the scratch directory what contestants read.
        reads: the options that it reads, of those that not every case reads.
    """

    name: str
    heats: Callable[[BenchOptions, Path], Sequence[Heat]]
    rows: Callable[[BenchOptions, Results], Sequence[Row]]
    disk_bytes: Callable[[BenchOptions], int] = lambda options: 0
    prepare: Callable[[BenchOptions, Path], None] = lambda options, scratch: None
    reads: tuple[str, ...] = ()
