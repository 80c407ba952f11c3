"""What a committed generation needs of the packs of a training store, read from its manifest alone.

Scope: the chunks of a generation, where each lies and what its checksum is. Nothing is opened or changed.
Not here: reading them (`apps/verify.py`); a store that is open (`training.py`); stores of named tensors.
Owner: none; plain records.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError
from tierstore.io.backend import Backend
from tierstore.io.runtime import Runtime
from tierstore.io.workers import WorkerPool
from tierstore.plan.tiers import Kind
from tierstore.store.commit import Generation, Manifests
from tierstore.store.layout import Codecs, chunk_specs, recorded_codecs, recorded_groups
from tierstore.store.slots import ChunkIO, ChunkRecord, SlotPack


@dataclass(frozen=True, slots=True)
class CommittedChunk:
    """A chunk as a manifest knows it, and where it lies."""

    path: Path
    name: str
    tensors: tuple[str, ...]
    group: str
    codec: str
    offset: int
    padded_bytes: int
    record: ChunkRecord

    @property
    def stored_bytes(self) -> int:
        """Of its bytes there."""
        return self.record.stored_bytes


def committed_chunks(
    directories: Sequence[Path], number: int | None = None
) -> tuple[Generation, list[CommittedChunk]]:
    """A generation of a store, and every chunk of it.

    Args:
        directories: of the store, in their order.
        number: of the generation; None is the last one.

    Raises:
        ConfigError: not all of them are given, or it is no training store.
        FormatError: the manifest, or the state beside it, is damaged, or a file is missing.
    """
    manifests = Manifests(directories[0], Backend())
    with Runtime("verify") as runtime:
        generation = runtime.call(manifests.read, manifests.numbers()[0] if number is None else number)
    layout = generation.layout
    if not layout["groups"]:
        raise ConfigError(f"{directories[0]} holds named tensors, not the training state of a model")
    if layout["directories"] != len(directories):
        raise ConfigError(
            f"the store in {directories[0]} is striped over {layout['directories']} directories; give all of them, in "
            "their order"
        )
    for pack in packs_of(generation, directories).values():
        pack.check(generation.records[pack.kind])
    return generation, chunks_of(generation, directories)


def packs_of(generation: Generation, directories: Sequence[Path]) -> dict[str, SlotPack]:
    """The packs of a training store, as its manifest alone describes them; not open.

    Raises:
        FormatError: it describes none that this release knows.
    """
    groups, codecs = recorded_groups(generation.layout), _codecs(generation.layout)
    io = ChunkIO(Backend(), WorkerPool("verify", 1), None, time.monotonic)  # its thread is never started
    packs = {}
    for kind in generation.records:
        specs = chunk_specs(_kind(kind), groups, generation.layout["chunk_elements"])
        if (codec := codecs[_kind(kind)].codec) is Codec.AUTO:
            raise FormatError(f"the store does not say what codec its {kind[:40]} are stored with")
        packs[kind] = SlotPack(kind, specs, directories, io, codec)
    return packs


def chunks_of(generation: Generation, directories: Sequence[Path]) -> list[CommittedChunk]:
    """Every chunk that a generation of a training store names."""
    groups, codecs = recorded_groups(generation.layout), _codecs(generation.layout)
    chunks = []
    for kind, pack in packs_of(generation, directories).items():
        specs = chunk_specs(_kind(kind), groups, generation.layout["chunk_elements"])
        codec = codecs[_kind(kind)].codec.value
        for number, record in enumerate(generation.records[kind]):
            if record is not None:
                name, tensors = specs[number].name, specs[number].tensors
                path, offset, padded_bytes = pack.location(number, record)
                group = name.rsplit("/", 2)[0]
                chunks.append(CommittedChunk(path, name, tensors, group, codec, offset, padded_bytes, record))
    return chunks


def _kind(name: str) -> Kind:
    try:
        return Kind(name.rstrip("0123456789"))
    except ValueError:
        raise FormatError(f"the store has packs of the kind {name[:40]!r}, which this release does not know") from None


def _codecs(layout: Mapping[str, Any]) -> Codecs:
    try:
        return recorded_codecs(layout)
    except ValueError as error:
        raise FormatError(f"the store has a codec that this release does not know: {error}") from None
