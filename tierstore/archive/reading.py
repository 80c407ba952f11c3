"""Reading packs: a chunk verified and decoded, in one hop; and every chunk of an archive, to verify it.

Scope: reading chunks into buffers; which tensors damage reaches.
Not here: tensors (`loading.py`), files (`opening.py`).
Owner: the caller's `OpenFiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.alignment import padded
from tierstore.archive import flow
from tierstore.archive.gather import OpenFiles
from tierstore.archive.opening import ArchiveFile, PlacedChunk, check_header, placed_chunks
from tierstore.config import Codec
from tierstore.errors import ChecksumMismatch, FormatError, StorageError, TierstoreError
from tierstore.io.backend import Backend
from tierstore.io.memory import Bytes
from tierstore.pack.codecs import checksum, codec_for


def read_stored(files: OpenFiles, placed: PlacedChunk, buffer: Bytes) -> Bytes:
    """The bytes of a chunk as they are stored, at the start of `buffer`, which is aligned.

    Raises:
        ChecksumMismatch: names the chunk and its tensors.
    """
    chunk = placed.chunk
    stored = buffer[: padded(chunk.stored_bytes)]
    files(placed.file.path).read_into(stored, chunk.offset)
    found = checksum(stored)
    if found != chunk.checksum:
        raise ChecksumMismatch(
            f"damaged: {placed}: its {len(stored)} B have checksum {found:016x}, not {chunk.checksum:016x}; "
            "pack again, or restore the file from a copy"
        )
    return stored[: chunk.stored_bytes]


def read_content(files: OpenFiles, placed: PlacedChunk, buffer: Bytes, destination: Bytes) -> None:
    """Fill `destination` with the content of a chunk.

    Args:
        buffer: aligned room for the stored bytes; it may be that of `destination` if nothing is encoded.

    Raises:
        ChecksumMismatch, FormatError: it is damaged.
    """
    stored = read_stored(files, placed, buffer)
    if len(stored) < placed.chunk.content_bytes:
        try:
            codec_for(placed.group.codec, placed.group.item_bytes).decode(stored, destination)
        except FormatError as error:
            raise FormatError(f"{placed}: {error}") from None
    elif stored.ctypes.data != destination.ctypes.data:
        destination[:] = stored


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with one range of a file; `tensors` are those that the damage reaches."""

    path: Path
    offset: int
    nbytes: int
    group: str
    tensors: tuple[str, ...]
    message: str


def verify(
    files: Sequence[ArchiveFile],
    memory_bytes: int,
    *,
    backend: Backend | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Damage]:
    """Read every byte of an archive, and report all that is not as it was written, or cannot be read.

    Args:
        progress: called with bytes read, from another thread.

    Raises:
        StorageError: a file cannot be opened.
    """
    damages = []
    for file in files:
        try:
            check_header(file)
        except TierstoreError as error:
            damages.append(Damage(file.path, 0, file.header.data_start, "header", (), str(error)))
    chunks = placed_chunks(files)
    largest = max((padded(placed.chunk.stored_bytes) for placed in chunks), default=1)

    def done(placed: PlacedChunk, error: TierstoreError | None) -> None:
        stored_bytes = padded(placed.chunk.stored_bytes)
        progress(stored_bytes)
        if error is not None:
            names = tuple(placed.tensors())
            damages.append(
                Damage(placed.file.path, placed.chunk.offset, stored_bytes, placed.group.name, names, str(error))
            )

    with OpenFiles(backend or Backend()) as opened:

        def check(placed: PlacedChunk, buffer: Bytes) -> TierstoreError | None:
            opened(placed.file.path)  # not in the block below: too many open files, for one, are no damage
            try:
                read_stored(opened, placed, buffer)
            except (FormatError, StorageError) as error:
                return error
            return None

        flow.run(chunks, check, flow.room(memory_bytes, len(chunks), largest), done=done)
    return sorted(damages, key=lambda damage: (damage.path, damage.offset))


def content_room(chunks: Sequence[PlacedChunk], memory_bytes: int) -> flow.Room:
    """Room for jobs that hold a chunk as it is stored, and its content behind it."""
    content = max((padded(placed.chunk.content_bytes) for placed in chunks), default=1)
    beside = 2 * content if any(placed.group.codec is not Codec.NONE for placed in chunks) else 0
    return flow.room(memory_bytes, len(chunks), 2 * content, beside_bytes=beside)
