"""What `tierstore verify` does and shows: every checksum of a pack or of a store, and what is damaged.

Scope: whether a path is a pack or a store; totals; damage as a table and as JSON.
Not here: reading (`archive/reading.py`), the chunks of a store (`store/verification.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierstore.alignment import padded
from tierstore.apps.progress import byte_bar
from tierstore.archive import flow
from tierstore.archive.opening import open_archive
from tierstore.archive.reading import Damage, verify
from tierstore.archive.sources import INDEX, SINGLE
from tierstore.config import TierConfig, format_size
from tierstore.errors import ChecksumMismatch, FormatError, StorageError, StoreLocked, TierstoreError
from tierstore.io.backend import Backend
from tierstore.io.watch import Attended
from tierstore.pack.layout import quoted
from tierstore.store.manifest_files import Manifests
from tierstore.store.names import advice_for
from tierstore.store.verification import CommittedChunk, committed_chunks, damaged_headers

_STORE_TIMEOUT_S = TierConfig().timeout_s
_OF_A_PACK = "pack again, or restore the files from a copy"
_OF_CHUNKS = "--resume previous goes back one generation, if all chunks of that are whole; else restore it from a copy"
_OF_HEADERS = "a run does not need these headers; other programs that open the files need an undamaged copy"
_OF_UNREAD_HEADERS = "a run cannot open the store while the disk does not give all headers: restore it from a copy"
_TIMES = 3  # attempts to read a store whose run goes on


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was read, what of it is damaged, and what can be done."""

    what: str
    chunks: int
    read_bytes: int
    seconds: float
    damages: tuple[Damage, ...]
    advice: str = ""

    def __str__(self) -> str:
        rate_bytes_per_s = self.read_bytes / self.seconds if self.seconds else 0.0
        rate = f"{rate_bytes_per_s / 1e9:.2f} GB/s"
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


def run_verify(
    paths: Sequence[Path], memory_bytes: int, console: Console, *, timeout_s: float = flow.TIMEOUT_S
) -> Verdict:
    """Read all of a pack, or of the last generation of a store.

    Args:
        timeout_s: the longest that a call of the system may take.

    Raises:
        ConfigError: one of several paths is no part of what the first one holds.
        FormatError, StorageError: the path is neither, or its table cannot be read.
        StoreLocked: a run changes the store meanwhile.
        Timeout: a disk does not answer.
    """
    with Attended("verify", timeout_s) as attended:
        if attended.call(is_store, paths[0], attended.backend):
            return _verify_store(paths, memory_bytes, console, attended)
        files = attended.call(open_archive, paths)
        total = sum(file.header.file_bytes for file in files)
        start = time.perf_counter()
        with byte_bar(console, "verifying", total) as advance:
            damages = attended.call(verify, files, memory_bytes, backend=attended.backend, progress=advance)
    count = sum(len(file.chunks()) for file in files)
    what = f"{'pack' if len(files) == 1 else f'{len(files)} packs'} {paths[0]}"
    return Verdict(what, count, total, time.perf_counter() - start, tuple(damages), _OF_A_PACK)


def _verify_store(paths: Sequence[Path], memory_bytes: int, console: Console, attended: Attended) -> Verdict:
    """The last generation. Chunks that a run writes meanwhile look damaged, so then the new last one is read."""
    numbers = Manifests(paths[0], attended.backend).numbers
    for _ in range(_TIMES):
        newest = attended.call(numbers)[0]
        try:
            verdict, number = _verify_last(paths, memory_bytes, console, attended)
        except (StorageError, FormatError):
            if newest in attended.call(numbers):
                raise
            continue  # it was removed meanwhile, maybe between its two files
        if not verdict.damages or number in attended.call(numbers)[:1]:
            return verdict
    raise StoreLocked(
        f"the store {paths[0]} is written faster than it can be read: verify it when the run has ended"
    )


def _verify_last(
    paths: Sequence[Path], memory_bytes: int, console: Console, attended: Attended
) -> tuple[Verdict, int]:
    """The verdict on the last generation, and its number."""
    generation, chunks = attended.call(committed_chunks, paths, backend=attended.backend)
    headers = attended.call(damaged_headers, generation, paths, attended.backend)
    total = sum(padded(chunk.stored_bytes) for chunk in chunks)
    start = time.perf_counter()
    with byte_bar(console, "verifying", total) as advance:
        damages = attended.call(
            _damages, chunks, flow.room(memory_bytes, len(chunks), _largest(chunks)), advance, attended.backend
        )
    what = f"store {paths[0]}, generation {generation.number}"
    seconds, advice = time.perf_counter() - start, _OF_CHUNKS if damages else _OF_HEADERS
    if any(reason for _, _, reason in headers):
        advice = _OF_UNREAD_HEADERS
    damages = [*starmap(_of_header, headers), *damages]
    return Verdict(what, len(chunks), total, seconds, tuple(damages), advice), generation.number


def _of_header(path: Path, nbytes: int, reason: str) -> Damage:
    message = reason or f"the header of {path}, which a run does not need, but other programs do"
    return Damage(path, 0, nbytes, "", (), f"damaged: {message}")


def _largest(chunks: Sequence[CommittedChunk]) -> int:
    return max((padded(chunk.stored_bytes) for chunk in chunks), default=1)


def _damages(
    chunks: Sequence[CommittedChunk],
    room: flow.Room,
    advance: Callable[[int], None],
    backend: Backend,
) -> list[Damage]:
    """A file is open only while a chunk of it is read: a store may have more files than may be open at once."""
    damages: list[Damage] = []

    def problem(chunk: CommittedChunk, buffer: npt.NDArray[np.uint8]) -> str | None:
        with contextlib.closing(backend.open(chunk.path)) as file:
            try:
                file.read_into(buffer[: padded(chunk.stored_bytes)], chunk.offset)
            except StorageError as error:
                return f"damaged: chunk {chunk.name}: {error}"
        if chunk.record.checksum_of(buffer) == chunk.record.checksum:
            return None
        return f"damaged: chunk {chunk.name} at offset {chunk.offset} of {chunk.path}"

    def done(chunk: CommittedChunk, message: str | None) -> None:
        advance(padded(chunk.stored_bytes))
        if message is not None:
            damages.append(Damage(chunk.path, chunk.offset, chunk.stored_bytes, chunk.group, chunk.tensors, message))

    flow.run(chunks, problem, room, done=done)
    return damages


@contextlib.contextmanager
def advised(paths: Sequence[Path], console: Console, *, timeout_s: float = _STORE_TIMEOUT_S) -> Iterator[None]:
    """If the block finds damage in a store, reads all chunks of its generations, and says what can be done.

    Args:
        paths: directories of the store, which is closed when the block has ended; if empty, errors stay as they are.
        console: for a bar meanwhile.
        timeout_s: the longest that a call of the system may take; beyond it the damage is told without advice.
    """
    try:
        yield
    except ChecksumMismatch as error:
        if not any(str(path) in str(error) for path in paths):
            raise
        damage = str(error).rpartition("; ")[0] or str(error)  # without its advice
        try:
            with Attended("advice", timeout_s) as attended:
                advice = _advice(paths, console, attended)
        except TierstoreError:
            raise error from None
        raise ChecksumMismatch(f"{damage}; {advice}") from error


def _advice(paths: Sequence[Path], console: Console, attended: Attended) -> str:
    numbers = attended.call(Manifests(paths[0], attended.backend).numbers)
    for number, resume in zip(numbers, ("auto", "previous")):
        with contextlib.suppress(FormatError, StorageError):
            _, chunks = attended.call(committed_chunks, paths, number, attended.backend)
            total = sum(padded(chunk.stored_bytes) for chunk in chunks)
            room = flow.Room(flow.THREADS, _largest(chunks))
            with byte_bar(console, f"damage was found: reading generation {number}", total) as advance:
                damages = attended.call(_damages, chunks, room, advance, attended.backend)
            if not damages:
                return f"generation {number} is whole, every chunk of it was read: go on with resume='{resume}'"
    return f"no generation of the store is whole ({len(numbers)} were read): restore it from a copy"


def is_store(path: Path, backend: Backend | None = None) -> bool:
    """Whether a directory holds a generation of a store.

    Raises:
        FormatError: it is a directory that does not hold a pack either.
    """
    backend = backend or Backend()
    with backend.calling("inspection", path):
        is_directory = path.is_dir()
    if not is_directory:
        return False
    names = backend.names(path)
    if Manifests(path, backend).numbers():
        return True
    if not any(name.startswith(Path(SINGLE).stem) for name in names):
        advice = advice_for(names)
        raise FormatError(f"{path} holds neither a pack ({SINGLE} or {INDEX}) nor a generation of a store{advice}")
    return False


def damage_table(verdict: Verdict) -> Table:
    """Where the damage is, and which tensors it reaches."""
    table = Table(title=f"damaged places: {len(verdict.damages)}; chunks: {verdict.chunks}", title_justify="left")
    for name in ("file", "at byte", "bytes", "group", "tensors"):
        table.add_column(name, justify="right" if name in ("at byte", "bytes") else "left", overflow="fold")
    for damage in verdict.damages:
        names = ", ".join(map(quoted, damage.tensors[:8]))
        names += f" and {len(damage.tensors) - 8} more" if damage.tensors[8:] else ""
        where = escape(str(damage.path)), str(damage.offset), str(damage.nbytes)
        table.add_row(*where, escape(damage.group) or "its header", escape(names))
    return table
