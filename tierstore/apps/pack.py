"""What `tierstore pack` and `unpack` do and show.

Scope: from paths to files, a summary as a table and as JSON.
Not here: packing itself (`archive/`); `inspect` and `verify`, which have modules of their own.
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tierstore.apps.outputs import copy_companions
from tierstore.apps.plain import show_plain
from tierstore.apps.progress import byte_bar, spinner
from tierstore.archive import flow
from tierstore.archive.choosing import choose, measure
from tierstore.archive.opening import open_archive
from tierstore.archive.packing import Packed, PackOptions, pack
from tierstore.archive.sources import Source, open_source
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.config import Codec, format_size
from tierstore.errors import ConfigError, DoneButFor, StorageError
from tierstore.io.watch import Attended
from tierstore.pack.codec_rates import COMPRESSING
from tierstore.plan.archive_codec import ArchiveChoice

_TRIED: dict[Codec, tuple[Codec, ...]] = {Codec.NONE: (), Codec.AUTO: COMPRESSING}


@dataclass(frozen=True, slots=True)
class PackSummary:
    """A finished pack.

    Attributes:
        choices: by dtype, why its codec was taken; empty unless codecs were to be chosen.
    """

    source: Source
    packed: Packed
    choices: dict[str, ArchiveChoice]
    seconds: float


def run_pack(
    path: Path,
    options: PackOptions,
    codec: Codec,
    read_bytes_per_s: float | None,
    console: Console,
    *,
    below: str | None = None,
    timeout_s: float = flow.TIMEOUT_S,
) -> PackSummary:
    """Pack the checkpoint at `path`.

    Args:
        codec: AUTO measures what pays for each dtype.
        read_bytes_per_s: of the disk from which the pack will be read; None: it is an archive, the smallest is best.
        below: pack only what lies below this key, and leave the key out of the names.
        timeout_s: the longest that a call of the system may take; unfinished files are removed when the call returns.

    Raises:
        ConfigError, BudgetError, StorageError, FormatError: as `archive.packing.pack`.
        DoneButFor: the pack is there, not all that belongs beside it is.
        Timeout: a disk does not answer.
    """
    if read_bytes_per_s is not None and codec is not Codec.AUTO:
        raise ConfigError("--read-rate needs --codec auto")
    if read_bytes_per_s is not None and read_bytes_per_s <= 0:
        raise ConfigError("--read-rate 0 reads nothing: give bytes per second, such as 2GB")
    with Attended("pack", timeout_s) as attended:
        source = attended.look(open_source, path)
        if below is not None:
            source = source.below(below)
        tried = _TRIED.get(codec, (codec,))
        with spinner(console, "measuring codecs on the checkpoint's own tensors"):
            measured = attended.look(measure, source, options.chunk_bytes, tried, backend=attended.backend)
        choices = choose(measured, read_bytes_per_s) if codec is Codec.AUTO else {}
        codecs = {dtype: choices[dtype].codec if choices else codec for dtype in measured}
        ratios = {
            dtype: rates.ratio for dtype, tried in measured.items() for rates in tried if rates.codec is codecs[dtype]
        }
        total_bytes = sum(piece.nbytes for tensor in source.tensors.values() for piece in tensor.pieces)
        start = time.perf_counter()
        with byte_bar(console, "packing", total_bytes) as advance:
            packed = attended.call(
                pack, source, options, codecs, ratios=ratios, backend=attended.backend, progress=advance
            )
        seconds = time.perf_counter() - start
        if path.is_dir() and not options.names_a_file:  # beside a file may stand what belongs to another model
            _copy_companions(attended, path, options.destinations[0], replace=options.overwrite)
    return PackSummary(source, packed, choices, seconds)


def run_unpack(
    paths: Sequence[Path], options: UnpackOptions, console: Console, *, timeout_s: float = flow.TIMEOUT_S
) -> tuple[list[Path], float]:
    """Unpack an archive. Returns the files written, and the seconds that it took.

    Args:
        timeout_s: as for `run_pack`.
    """
    with Attended("unpack", timeout_s) as attended:
        files = attended.look(open_archive, paths)
        total_bytes = sum(group.content_bytes for file in files for group in file.archive.groups)
        start = time.perf_counter()
        with byte_bar(console, "unpacking", total_bytes) as advance:
            written = attended.call(unpack, files, options, backend=attended.backend, progress=advance)
        seconds = time.perf_counter() - start
        if paths[0].is_dir() and not options.names_a_file:
            _copy_companions(attended, paths[0], options.destination)
    return written, seconds


def _copy_companions(attended: Attended, source: Path, directory: Path, *, replace: bool = False) -> None:
    try:
        attended.call(copy_companions, source, directory, replace=replace)
    except (ConfigError, StorageError) as error:
        raise DoneButFor(
            f"the weights in {directory} are whole, but {error}; copy config.json and the tokenizer's files from "
            f"{source} yourself"
        ) from error


def show_pack(summary: PackSummary, console: Console) -> None:
    """Bytes, codec and ratio of each dtype, the reasons, and the files, whose names are never wrapped."""
    groups = summary.packed.groups
    content_bytes = sum(group.content_bytes for group in groups)
    rate = content_bytes / summary.seconds if summary.seconds else 0.0
    table = Table()
    for name in ("dtype", "codec", "tensors", "bytes", "stored", "ratio"):
        table.add_column(name, justify="left" if name in ("dtype", "codec") else "right")
    for dtype, row in _by_dtype(summary.packed).items():
        cells = [dtype, row["codec"], str(row["tensors"]), format_size(row["content_bytes"]),
                 format_size(row["stored_bytes"]), f"{row['ratio']:.3f}"]  # fmt: skip
        table.add_row(*cells)

    show_plain(
        console,
        f"{summary.source.kind} {summary.source.path}: {len(summary.source.tensors)} tensors in "
        f"{len(groups)} groups, {format_size(content_bytes)} in {summary.seconds:.2f} s ({rate / 1e9:.2f} GB/s)",
    )
    console.print(table)
    show_plain(console, f"order {summary.packed.archives[0].order}")
    for dtype, choice in sorted(summary.choices.items()):
        show_plain(console, f"{dtype} {choice.codec.value}: {choice.reason}")
    for path in summary.packed.files:
        show_plain(console, str(path))


def pack_json(summary: PackSummary) -> dict[str, Any]:
    """The same, in bytes and seconds."""
    return {
        "source": str(summary.source.path),
        "kind": summary.source.kind,
        "files": [str(path) for path in summary.packed.files],
        "order": summary.packed.archives[0].order,
        "groups": len(summary.packed.groups),
        "tensors": len(summary.source.tensors),
        "aliases": dict(summary.source.aliases),
        "left_out": list(summary.source.left_out),
        "seconds": summary.seconds,
        "dtypes": _by_dtype(summary.packed),
        "choices": {dtype: _choice_json(choice) for dtype, choice in summary.choices.items()},
    }


def _choice_json(choice: ArchiveChoice) -> dict[str, Any]:
    measured = [asdict(rates) | {"codec": rates.codec.value} for rates in choice.measured]
    return {"codec": choice.codec.value, "reason": choice.reason, "measured": measured}


def _by_dtype(packed: Packed) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = defaultdict(lambda: {"tensors": 0, "content_bytes": 0, "stored_bytes": 0})
    for group in packed.groups:
        row = rows[group.tensors[0].dtype]
        row["codec"] = group.codec.value if group.content_bytes else row.get("codec", group.codec.value)
        row["tensors"] += len(group.tensors)
        row["content_bytes"] += group.content_bytes
        row["stored_bytes"] += group.stored_bytes
    for row in rows.values():
        row["ratio"] = row["content_bytes"] / row["stored_bytes"] if row["stored_bytes"] else 1.0
    return dict(sorted(rows.items()))
