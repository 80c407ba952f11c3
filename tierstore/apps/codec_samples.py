"""Bytes to try codecs on: chunks of a store as training reads and writes them, or tensors of safetensors files.

Scope: finding and reading samples, evenly spread over the whole. Not here: what codecs make of them (`codecs.py`).
Owner: files are only read; the store may be in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.archive.sources import refuse_unfinished
from tierstore.config import Codec
from tierstore.errors import ChecksumMismatch, ConfigError, StorageError
from tierstore.io.backend import Backend
from tierstore.pack.codecs import Bytes, codec_for
from tierstore.pack.layout import DTYPE_BITS
from tierstore.pack.validate import read_header
from tierstore.plan.placement import Kind
from tierstore.store.layout import recorded_groups
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.names import advice_for, holds_data
from tierstore.store.verification import CommittedChunk, chunks_of, is_of_tensors, packs_of

_PIECE_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes of one kind and dtype, each part to be encoded alone.

    Attributes:
        item_bytes: size of the elements that a codec transposes.
    """

    kind: Kind
    dtype: str
    item_bytes: int
    parts: list[Bytes] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(part.size for part in self.parts)


def read_samples(path: Path, limit_bytes: int) -> list[Sample]:
    """Samples of at most about `limit_bytes` for each kind and dtype.

    Args:
        path: a store (the first of its directories), a directory of safetensors files, or one such file.

    Raises:
        ConfigError: the path holds none of these.
        FormatError, StorageError: a file is damaged or unfinished, or cannot be read.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give a store or a safetensors file")
    refuse_unfinished(path)
    numbers = Manifests(path, Backend()).numbers() if path.is_dir() else []
    if numbers:
        return _of_store(path, Manifests(path, Backend()).read_here(numbers[0]), limit_bytes)
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files = [file for file in found if file == path or not holds_data(file.name)]
    if not files:
        advice = advice_for(file.name for file in found)
        raise ConfigError(f"{path} holds no generation of a store and no safetensors file{advice}")
    return _of_files(files, limit_bytes)


def _of_store(directory: Path, generation: Generation, limit_bytes: int) -> list[Sample]:
    """Of the chunks that lie in this directory; the others need not be known."""
    layout = generation.layout
    if is_of_tensors(generation):
        raise ConfigError(f"{directory} is a store of tensors, not of training; give the store of an Engine")
    dtypes = {group.name: group.dtype for group in recorded_groups(layout)}
    # The manifests are in the first directory; what is named here is never opened.
    others = [directory / "not given"] * (layout["directories"] - 1)
    packs = packs_of(generation, [directory, *others])
    samples = []
    for kind in (kind for kind in Kind if kind.value in packs):
        pack = packs[kind.value]
        item_bytes = {spec.name: spec.item_bytes for spec in pack.specs}
        found: dict[str, list[CommittedChunk]] = {}
        for chunk in chunks_of(generation, {kind.value: pack}):
            if chunk.path.parent == directory and item_bytes[chunk.name] > 1:  # frozen parameters have a byte of state
                found.setdefault(dtypes[chunk.group], []).append(chunk)
        for dtype, chunks in found.items():
            sample = Sample(kind, dtype, item_bytes[chunks[0].name])
            spread = _spread(chunks, limit_bytes, lambda chunk: chunk.padded_bytes)
            sample.parts.extend(_chunk(chunk, pack.codec, sample.item_bytes) for chunk in spread)
            samples.append(sample)
    return samples


def _chunk(chunk: CommittedChunk, codec: Codec, item_bytes: int) -> Bytes:
    stored = _read(chunk.path, chunk.offset, min(chunk.stored_bytes, chunk.padded_bytes))
    if chunk.record.checksum_of(stored) != chunk.record.checksum:
        raise ChecksumMismatch(
            f"damaged, or just being written: chunk {chunk.name} at offset {chunk.offset} of {chunk.path}"
        )
    if stored.size == chunk.padded_bytes:
        return stored
    raw = np.empty(chunk.padded_bytes, np.uint8)
    codec_for(codec, item_bytes).decode(stored, raw)
    return raw


def _of_files(files: Sequence[Path], limit_bytes: int) -> list[Sample]:
    pieces: dict[str, list[tuple[Path, int, int]]] = {}
    for path in files:
        header = read_header(path)
        for entry in header.tensors.values():
            if DTYPE_BITS[entry.dtype] < 8:
                continue
            for begin in range(entry.begin, entry.end, _PIECE_BYTES):
                piece = (path, header.data_start + begin, min(_PIECE_BYTES, entry.end - begin))
                pieces.setdefault(entry.dtype.lower(), []).append(piece)
    samples = []
    for dtype, found in pieces.items():
        sample = Sample(Kind.WEIGHTS, dtype, DTYPE_BITS[dtype.upper()] // 8)
        sample.parts.extend(_read(*piece) for piece in _spread(found, limit_bytes, lambda piece: piece[2]))
        samples.append(sample)
    return samples


def _spread(rows: Sequence[Any], limit_bytes: int, size_of: Any) -> Iterator[Any]:
    """Rows of about `limit_bytes`, evenly spread; at least one, if there is one."""
    total_bytes = sum(map(size_of, rows))
    every = max(1, -(-total_bytes // max(1, limit_bytes)))
    yield from rows[every // 2 :: every] or rows[:1]


def _read(path: Path, offset: int, size_bytes: int) -> Bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            data = np.fromfile(file, np.uint8, size_bytes)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    if data.size != size_bytes:
        raise StorageError(f"short read: {data.size} of {size_bytes} B at offset {offset} of {path}; file truncated?")
    return data
