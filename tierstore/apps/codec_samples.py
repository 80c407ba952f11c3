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
from tierstore.pack.layout import DTYPE_BITS, ChunkSpec, capacity_pack, slot_pack
from tierstore.pack.validate import read_header
from tierstore.plan.placement import Kind
from tierstore.store.layout import chunk_specs, recorded_codecs, recorded_groups
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.slots import SLOT_NAMES, ChunkRecord
from tierstore.store.verification import is_of_tensors

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
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} holds no generation of a store and no safetensors file")
    return _of_files(files, limit_bytes)


def _of_store(directory: Path, generation: Generation, limit_bytes: int) -> list[Sample]:
    layout = generation.layout
    if is_of_tensors(generation):
        raise ConfigError(f"{directory} is a store of tensors, not of training; give the store of an Engine")
    groups = recorded_groups(layout)
    samples: dict[tuple[Kind, str], Sample] = {}
    for kind in Kind:
        records = generation.records.get(kind.value, ())
        codec = recorded_codecs(layout)[kind].codec
        # Chunks go to the directories in turn; the first directory has the manifests.
        chunks = chunk_specs(kind, groups, layout["chunk_elements"])[:: layout["directories"]]
        dtypes = [group.dtype for group in groups for _ in chunk_specs(kind, [group], layout["chunk_elements"])]
        spans = (slot_pack if codec is Codec.NONE else capacity_pack)(chunks).spans
        rows = zip(chunks, dtypes[:: layout["directories"]], records[:: layout["directories"]])
        found = [
            (chunk, spans[chunk.name], dtype, record)
            for chunk, dtype, record in rows
            if record is not None and chunk.item_bytes > 1  # frozen parameters have a byte in place of state
        ]
        for dtype in dict.fromkeys(dtypes):
            own = [row for row in found if row[2] == dtype]
            for chunk, span, _, record in _spread(own, limit_bytes, lambda row: row[1].padded_bytes):
                sample = samples.setdefault((kind, dtype), Sample(kind, dtype, chunk.item_bytes))
                file = directory / f"{kind.value}.{SLOT_NAMES[record.slot]}.safetensors"
                sample.parts.append(_chunk(file, chunk, span.offset, span.padded_bytes, record, codec))
    return list(samples.values())


def _chunk(path: Path, chunk: ChunkSpec, offset: int, size_bytes: int, record: ChunkRecord, codec: Codec) -> Bytes:
    stored = _read(path, offset, min(record.stored_bytes, size_bytes))
    if record.checksum_of(stored) != record.checksum:
        raise ChecksumMismatch(f"damaged, or just being written: chunk {chunk.name} at offset {offset} of {path}")
    if stored.size == size_bytes:
        return stored
    raw = np.empty(size_bytes, np.uint8)
    codec_for(codec, chunk.item_bytes).decode(stored, raw)
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
