"""What each codec makes of a person's own tensors, and on which disk it pays: as a table, sentences, JSON.

Scope: what `tierstore codecs` asks and shows.
Not here: which bytes are tried (`codec_samples.py`), the timing (`pack/codec_rates.py`), the decision
(`plan/codec_choice.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.codec_samples import Sample, read_samples
from tierstore.apps.output_files import check_outputs
from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.pack.codec_rates import COMPRESSING, measure_codec
from tierstore.plan.bandwidth import CodecRates
from tierstore.plan.codec_choice import WORTH, CodecChoice, Conditions, choose_codec
from tierstore.plan.costs import codec_break_even_bytes_per_s, codec_pays, pays_below_bytes_per_s
from tierstore.plan.placement import Kind

if TYPE_CHECKING:
    from rich.table import Table

_ENDLESS = 1e12  # no codec is that fast


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecOptions:
    """What a person asks of `tierstore codecs`.

    Attributes:
        path: a store, a directory of safetensors files, or one such file.
        disk: bytes per second that a disk reads and writes; None: no particular disk.
        cores: how many encode and decode at once.
        overlapped: these cores have nothing else to do, as beside a GPU.
        sample: bytes to read of each kind and dtype.
    """

    path: Path
    disk: int | None = None
    cores: int = 1
    overlapped: bool = False
    sample: int = 2**26
    json: Path | None = None

    def __post_init__(self) -> None:
        for name, value in (("disk", self.disk), ("cores", self.cores), ("sample", self.sample)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, not {value}")
        if self.overlapped and self.disk is None:
            raise ConfigError("--overlapped says how a codec pays on a disk: give --disk, too")

    @property
    def conditions(self) -> Conditions | None:
        if self.disk is None:
            return None
        return Conditions(self.disk, self.disk, self.cores, self.overlapped)


@dataclass(frozen=True, slots=True)
class Tried:
    """One kind and dtype.

    Attributes:
        choice: what codec "auto" would take on the disk that was asked for.
    """

    kind: Kind
    sample_bytes: int
    codecs: tuple[CodecRates, ...]
    choice: CodecChoice | None


def compare(options: CodecOptions, tell: Callable[[str, float], None]) -> list[Tried]:
    """Tries every codec on every kind and dtype.

    Raises:
        ConfigError, FormatError, StorageError: nothing to try, or files that cannot be read.
    """
    check_outputs([options.path], json=options.json)
    samples = read_samples(options.path, options.sample)
    tried = []
    for number, sample in enumerate(samples):
        tell(f"{sample.kind.value} {sample.dtype}", number / len(samples))
        tried.append(_try(sample, options.conditions))
    return tried


def _try(sample: Sample, conditions: Conditions | None) -> Tried:
    rates = tuple(measure_codec(codec, sample.item_bytes, sample.parts, sample.dtype) for codec in COMPRESSING)
    choice = None if conditions is None else choose_codec(sample.kind, rates, conditions)
    return Tried(sample.kind, sample.nbytes, rates, choice)


def as_table(options: CodecOptions, tried: list[Tried]) -> Table:
    """A row per kind, dtype and codec."""
    from rich.table import Table

    table = Table(title="codecs, GB/s of raw bytes on one core", title_justify="left")
    for name in ("kind", "codec"):
        table.add_column(name)
    names = ["ratio", "in", "out"]
    names += ["needs", "write\npays", "read\npays"] if options.disk else ["write pays\nbelow", "read pays\nbelow"]
    for name in names:
        table.add_column(name, justify="right")
    for one in tried:
        for rates in one.codecs:
            cells = [f"{one.kind.value} {rates.data}", rates.codec.value]
            table.add_row(*cells, *_figures(options, rates), end_section=rates is one.codecs[-1])
    return table


def legend(options: CodecOptions, tried: list[Tried]) -> str:
    """What the columns of the table mean, and what was tried."""
    size = format_size(sum(one.sample_bytes for one in tried))
    cores = "1 core" if options.cores == 1 else f"{options.cores} cores"
    if options.disk is None:
        return f"{size} tried; pays below: rate of a disk, in GB/s, under which the codec in series pays on {cores}"
    way = "overlapped" if options.overlapped else "in series"
    return (
        f"{size} tried; needs: rate above which a codec in series pays on a disk of {_gb(options.disk)} GB/s; "
        f"pays: {way}, on {cores}"
    )


def sentences(tried: list[Tried]) -> list[str]:
    """What codec "auto" would take, a line for each kind and dtype."""
    return [
        f"{one.kind.value} {one.codecs[0].data}: {one.choice.codec.value}; {one.choice.why}"
        for one in tried
        if one.choice is not None
    ]


def _pays_below(options: CodecOptions, rates: CodecRates) -> tuple[float, float]:
    """Rates of disks below which the codec pays on the given cores, in writing and in reading."""
    ways = (rates.encode_bytes_per_s, rates.decode_bytes_per_s)
    encoding, decoding = (pays_below_bytes_per_s(rates.ratio, way * options.cores) for way in ways)
    return encoding, decoding


def _figures(options: CodecOptions, rates: CodecRates) -> list[str]:
    figures = [f"{rates.ratio:.3f}", _gb(rates.encode_bytes_per_s), _gb(rates.decode_bytes_per_s)]
    if options.disk is None:
        return figures + [_gb(rate) for rate in _pays_below(options, rates)]
    needed = codec_break_even_bytes_per_s(options.disk, rates.ratio)
    ways = (rates.encode_bytes_per_s * options.cores, rates.decode_bytes_per_s * options.cores)
    is_smaller = rates.ratio >= WORTH
    pays = [is_smaller and codec_pays(options.disk, rates.ratio, way, overlapped=options.overlapped) for way in ways]
    return [*figures, _gb(needed) if needed < _ENDLESS else "-", *("yes" if one else "no" for one in pays)]


def as_json(options: CodecOptions, tried: list[Tried]) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    return {
        "path": str(options.path),
        "disk_bytes_per_s": options.disk,
        "cores": options.cores,
        "overlapped": options.overlapped,
        "kinds": [
            {
                "kind": one.kind.value,
                "dtype": one.codecs[0].data,
                "sample_bytes": one.sample_bytes,
                "codecs": [_rates_json(options, rates) for rates in one.codecs],
                "auto": None if one.choice is None else {"codec": one.choice.codec.value, "why": one.choice.why},
            }
            for one in tried
        ],
    }


def _rates_json(options: CodecOptions, rates: CodecRates) -> dict[str, Any]:
    writing, reading = _pays_below(options, rates)
    pays = {"write_pays_below_bytes_per_s": writing, "read_pays_below_bytes_per_s": reading}
    return asdict(rates) | {"codec": rates.codec.value} | pays


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"
