"""What `tierstore verify` does and shows: every checksum of a pack or of a store, and what is damaged.

Scope: which of them a path is, totals, damage as a table and as JSON.
Not here: reading (`archive/reading.py`), the chunks of a store (`store/verification.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tierstore.apps.progress import byte_bar
from tierstore.archive.opening import open_archive
from tierstore.archive.reading import Damage, verify
from tierstore.config import format_size
from tierstore.io.backend import Backend
from tierstore.store.commit import Manifests


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was read, and what of it is damaged."""

    what: str
    chunks: int
    read_bytes: int
    seconds: float
    damages: tuple[Damage, ...]

    @property
    def rate_bytes_per_s(self) -> float:
        return self.read_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        rate = f"{self.rate_bytes_per_s / 1e9:.2f} GB/s"
        read = f"{self.chunks} chunks, {format_size(self.read_bytes)} in {self.seconds:.2f} s ({rate})"
        bad = f"{len(self.damages)} damaged" if self.damages else "all as written"
        return f"{self.what}: {bad}; {read}"

    def as_json(self) -> dict[str, Any]:
        """In bytes and seconds."""
        return {
            "what": self.what,
            "is_whole": not self.damages,
            "chunks": self.chunks,
            "read_bytes": self.read_bytes,
            "seconds": self.seconds,
            "damages": [asdict(damage) | {"path": str(damage.path)} for damage in self.damages],
        }


def run_verify(paths: Sequence[Path], memory_bytes: int, console: Console) -> Verdict:
    """Read all of a pack, or of the last generation of a store.

    Raises:
        FormatError, StorageError: what is there is neither, or its table cannot be read.
    """
    if is_store(paths[0]):
        from tierstore.store.verification import committed_chunks, verify_store

        generation, chunks = committed_chunks(paths)
        total = sum(chunk.padded_bytes for chunk in chunks)
        start = time.perf_counter()
        with byte_bar(console, "verifying", total) as advance:
            damages = verify_store(chunks, memory_bytes, progress=advance)
        what = f"store {paths[0]}, generation {generation.number}"
        return Verdict(what, len(chunks), total, time.perf_counter() - start, tuple(damages))
    files = open_archive(paths)
    total = sum(file.header.file_bytes for file in files)
    start = time.perf_counter()
    with byte_bar(console, "verifying", total) as advance:
        damages = verify(files, memory_bytes, progress=advance)
    count = sum(len(file.chunks()) for file in files)
    what = f"{'pack' if len(files) == 1 else f'{len(files)} packs'} {paths[0]}"
    return Verdict(what, count, total, time.perf_counter() - start, tuple(damages))


def is_store(path: Path) -> bool:
    """Whether a directory holds a generation of a training store."""
    return path.is_dir() and bool(Manifests(path, Backend()).numbers())


def damage_table(verdict: Verdict) -> Table:
    """Where the damage is, and which tensors it reaches."""
    table = Table(title=f"damaged: {len(verdict.damages)} of {verdict.chunks} chunks", title_justify="left")
    for name in ("file", "at byte", "bytes", "group", "tensors"):
        table.add_column(name, justify="right" if name in ("at byte", "bytes") else "left", overflow="fold")
    for damage in verdict.damages:
        names = ", ".join(damage.tensors[:8]) + (f" and {len(damage.tensors) - 8} more" if damage.tensors[8:] else "")
        table.add_row(damage.path.name, str(damage.offset), str(damage.nbytes), damage.group, names)
    return table
