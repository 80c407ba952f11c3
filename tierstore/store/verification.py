"""What a committed generation needs of the packs of a store, read from its manifest alone.

Scope: the chunks of a generation of a model or of named tensors, where each lies and what its checksum is. Nothing is
    changed.
Not here: reading them (`apps/verify.py`); a store that is open (`training.py`, `tensors.py`).
Owner: none; plain records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError
from tierstore.io.backend import Backend
from tierstore.io.workers import WorkerPool
from tierstore.pack.layout import ChunkSpec
from tierstore.plan.placement import Kind
from tierstore.store.directories import refuse_mixed
from tierstore.store.layout import chunk_specs, recorded_codecs, recorded_groups
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.slots import ChunkIO, ChunkRecord, SlotPack
from tierstore.store.stripes import recorded_shares


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
        """Bytes that the chunk takes there."""
        return self.record.stored_bytes


@dataclass(frozen=True, slots=True)
class CommittedPack:
    """A pack as a manifest describes it; not open.

    Attributes:
        specs, groups: its chunks, and for each of them the group or entry that it belongs to.
    """

    slots: SlotPack
    specs: Sequence[ChunkSpec]
    groups: Sequence[str]
    codec: Codec


def is_of_tensors(generation: Generation) -> bool:
    """Whether it holds named tensors (`TensorStore`), and not the training state of a model."""
    return not generation.layout["groups"]


def committed_chunks(
    directories: Sequence[Path], number: int | None = None, backend: Backend | None = None
) -> tuple[Generation, list[CommittedChunk]]:
    """A generation of a store, and every chunk of it.

    Args:
        directories: of the store, in their order.
        number: of the generation; None is the last one.

    Raises:
        ConfigError: not all directories are given, or some are of another store.
        FormatError: the manifest, or the state beside it, is damaged, or a file is missing.
    """
    manifests = Manifests(directories[0], backend or Backend())
    generation = manifests.read_here(manifests.numbers()[0] if number is None else number)
    layout = generation.layout
    if layout["directories"] != len(directories):
        raise ConfigError(
            f"the store in {directories[0]} is striped over {layout['directories']} directories; give all of them, in "
            f"their order, and no other ({len(directories)} were given)"
        )
    refuse_mixed(directories)
    packs = packs_of(generation, directories, backend)
    for kind, pack in packs.items():
        pack.slots.check(generation.records[kind])
    return generation, chunks_of(generation, packs)


def packs_of(
    generation: Generation, directories: Sequence[Path], backend: Backend | None = None
) -> dict[str, CommittedPack]:
    """The packs of a store, as its manifest alone describes them.

    Raises:
        FormatError: it describes packs that this release does not know.
    """
    describe = _packs_of_tensors if is_of_tensors(generation) else _packs_of_training
    io = ChunkIO(backend or Backend(), WorkerPool("verify", 1), None, time.monotonic)  # its thread is never started
    return {pack.slots.kind: pack for pack in describe(generation, directories, io)}


def _packs_of_training(generation: Generation, directories: Sequence[Path], io: ChunkIO) -> Iterator[CommittedPack]:
    groups, codecs = recorded_groups(generation.layout), recorded_codecs(generation.layout)
    for kind in generation.records:
        specs = chunk_specs(_kind(kind), groups, generation.layout["chunk_elements"])
        codec = _decided(codecs[_kind(kind)].codec, kind)
        names = [spec.name.rsplit("/", 2)[0] for spec in specs]
        slots = SlotPack(kind, specs, directories, io, codec, shares=recorded_shares(generation.layout))
        yield CommittedPack(slots, specs, names, codec)


def _packs_of_tensors(generation: Generation, directories: Sequence[Path], io: ChunkIO) -> Iterator[CommittedPack]:
    from tierstore.store.entries import recorded_entries  # imports torch, which all else here does without
    from tierstore.store.shelf import put_pack

    codec = _decided(Codec(generation.layout["codec"]), "tensors")
    for entry, kind in recorded_entries(generation):
        specs = entry.layout.chunk_specs(entry.name)
        slots = put_pack(kind, specs, directories, io, codec, generation.layout)
        yield CommittedPack(slots, specs, [entry.name] * len(specs), codec)


def _decided(codec: Codec, kind: str) -> Codec:
    if codec is Codec.AUTO:
        raise FormatError(f"the manifest is damaged: it does not say with which codec its {kind[:40]} are stored")
    return codec


def chunks_of(generation: Generation, packs: Mapping[str, CommittedPack]) -> list[CommittedChunk]:
    """Every chunk that a generation names."""
    chunks = []
    for kind, pack in packs.items():
        for number, record in enumerate(generation.records[kind]):
            if record is not None:
                spec, group = pack.specs[number], pack.groups[number]
                path, offset, padded_bytes = pack.slots.location(number, record)
                chunks.append(
                    CommittedChunk(path, spec.name, spec.tensors, group, pack.codec.value, offset, padded_bytes, record)
                )
    return chunks


def damaged_headers(
    generation: Generation, directories: Sequence[Path], backend: Backend | None = None
) -> list[tuple[Path, int, str]]:
    """Files of a generation whose header is not as it was made, or cannot be read; as `SlotPack.damaged_headers`.

    The engine makes a damaged header anew; other programs that open the files need it.

    Raises:
        StorageError: a file cannot be opened.
    """
    packs = packs_of(generation, directories, backend)
    return [one for kind, pack in packs.items() for one in pack.slots.damaged_headers(generation.records[kind])]


def tensors_of(generation: Generation) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
    """Name, dtype and shape of the tensors of each group or entry."""
    if is_of_tensors(generation):
        from tierstore.store.entries import recorded_entries

        layouts = {entry.name: entry.layout.describe() for entry, _ in recorded_entries(generation)}
        return {group: [(name, dtype, tuple(shape)) for name, dtype, shape in rows] for group, rows in layouts.items()}
    return {
        group["name"]: [(name, group["dtype"], tuple(shape)) for name, shape in group["parameters"]]
        for group in generation.layout["groups"]
    }


def _kind(name: str) -> Kind:
    try:
        return Kind(name.rstrip("0123456789"))
    except ValueError:
        raise FormatError(f"the store has packs of the kind {name[:40]!r}, which this release does not know") from None
