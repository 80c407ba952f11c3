"""What an archive pack says of its own data: groups in execution order, codecs, and length and checksum of each chunk.

Scope: the table in `__metadata__["tierstore"]` as text, strictly read back and checked against the header around it.
Not here: reading or writing data (`archive/`); slot packs, whose records stand in a manifest (`store/`).
Owner: none; pure functions on plain records.

[Note: chunks of an archive] The data of a pack are its groups, back to back; a group is its chunks, back to back, each
padded with zeros to a multiple of 4096. A chunk holds `chunk_bytes` of the group's content, the last one the rest. Its
checksum covers the padding too, and the header is sealed: so a checksum covers each byte of the file. With codec "none"
a group's tensors are tensors of the file; else its chunks together are one U8 tensor, and the table says which tensors
they hold. A chunk whose stored length is that of its content is raw, whatever the codec.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.alignment import ALIGNMENT, padded
from tierstore.config import Codec
from tierstore.errors import FormatError
from tierstore.pack.checked import checksum_of, list_of, mapping_of, number_of, object_of, text_of
from tierstore.pack.layout import (
    Extent,
    TensorEntry,
    TensorSpec,
    back_to_back,
    check_contiguous,
    check_name,
    check_plain_name,
    lay_out,
    quoted,
    unused_prefix,
)
from tierstore.pack.strict_json import parse_json
from tierstore.pack.validate import Header

ARCHIVE_KEY = "tierstore"
VERSION = 1
LARGEST_CHUNK_BYTES = 2**25
_CHUNKS = "__chunks__"
_CODECS = tuple(codec.value for codec in Codec if codec is not Codec.AUTO)


@dataclass(frozen=True, slots=True)
class ArchiveChunk:
    """A chunk as it is stored; `offset` counts from the start of the file."""

    content_bytes: int
    offset: int
    stored_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ArchiveGroup:
    """A group of tensors of one dtype.

    Attributes:
        position: its place in the execution order of the whole archive, whichever file it is in.
        item_bytes: bytes of an element, for codecs that shuffle.
        tensors: `begin` and `end` count from the start of the group's content.
        chunks: stored length and checksum of each chunk, (0, 0) while unknown.
    """

    name: str
    position: int
    codec: Codec
    item_bytes: int
    tensors: tuple[TensorEntry, ...]
    chunks: tuple[tuple[int, int], ...]

    @property
    def content_bytes(self) -> int:
        return self.tensors[-1].end

    @property
    def stored_bytes(self) -> int:
        """Bytes that the group takes in the file."""
        return sum(padded(stored) for stored, _ in self.chunks)


@dataclass(frozen=True, slots=True)
class Archive:
    """One file of an archive.

    Attributes:
        identity: equal in all its files, 16 hexadecimal digits.
        shard: which of `shards` files this is, from 0.
        order: where the execution order comes from, in words.
        aliases: further names of a tensor, with the name under which it is stored in this file.
    """

    identity: str
    shard: int
    shards: int
    chunk_bytes: int
    order: str
    groups: tuple[ArchiveGroup, ...]
    aliases: dict[str, str]

    @property
    def tensors(self) -> list[TensorEntry]:
        """Tensors of all groups; each counts from the start of its group's content."""
        return [entry for group in self.groups for entry in group.tensors]

    def chunks(self, data_start: int) -> Iterator[tuple[ArchiveGroup, int, ArchiveChunk]]:
        """Every chunk in file order, with its group and where it begins in that group's content."""
        offset = data_start
        for group in self.groups:
            for number, (stored_bytes, checksum) in enumerate(group.chunks):
                begin = number * self.chunk_bytes
                content_bytes = min(self.chunk_bytes, group.content_bytes - begin)
                yield group, begin, ArchiveChunk(content_bytes, offset, stored_bytes, checksum)
                offset += padded(stored_bytes)


def chunk_count(content_bytes: int, chunk_bytes: int) -> int:
    return -(-content_bytes // chunk_bytes)


def archive_header(archive: Archive, metadata: Mapping[str, str], data_start: int | None = None) -> bytes:
    """The header of a file, with the lengths that the chunks have now.

    A header of the same tensors with shorter chunks is never longer.

    Args:
        data_start: where the data begin; None is the first place possible.

    Raises:
        FormatError: the header does not end there.
    """
    encoded = _encoded_prefix(archive)
    extents = [Extent(str(group.position), _as_stored(group, encoded)) for group in archive.groups]
    return lay_out(extents, {**metadata, ARCHIVE_KEY: _text(archive)}, data_start=data_start, seal=True).header


def read_archive(header: Header, source: str) -> Archive | None:
    """The checked table of a pack; None: the file has none, it is an ordinary safetensors file.

    Raises:
        FormatError: the table is not one that this release reads, or does not fit the header.
    """
    text = header.metadata.get(ARCHIVE_KEY)
    if text is None:
        return None
    try:
        archive = _parsed(parse_json(text, "its table of chunks"))
        _check_against(archive, header)
    except FormatError as error:
        raise type(error)(f"{source}: {error}") from None
    return archive


def _as_stored(group: ArchiveGroup, encoded: str) -> tuple[TensorSpec, ...]:
    if group.codec is Codec.NONE:
        return tuple(TensorSpec(entry.name, entry.dtype, entry.shape) for entry in group.tensors)
    return (TensorSpec(f"{encoded}{group.position}", "U8", (group.stored_bytes,)),)


def _encoded_prefix(archive: Archive) -> str:
    return unused_prefix(_CHUNKS, (entry.name for entry in archive.tensors))


def _text(archive: Archive) -> str:
    body = {
        "version": VERSION,
        "archive": archive.identity,
        "shard": archive.shard,
        "shards": archive.shards,
        "chunk_bytes": archive.chunk_bytes,
        "order": archive.order,
        "aliases": archive.aliases,
        "groups": [
            {
                "name": group.name,
                "position": group.position,
                "codec": group.codec.value,
                "item_bytes": group.item_bytes,
                "tensors": [[entry.name, entry.dtype, list(entry.shape)] for entry in group.tensors],
                "chunks": [[stored_bytes, f"{checksum:016x}"] for stored_bytes, checksum in group.chunks],
            }
            for group in archive.groups
        ],
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _parsed(body: Any) -> Archive:
    version = body.get("version") if isinstance(body, dict) else None
    if version != VERSION:
        raise FormatError(f"an archive of version {version!r:.40}; this release reads version {VERSION}")
    keys = ("version", "archive", "shard", "shards", "chunk_bytes", "order", "aliases", "groups")
    _, identity, shard, shards, chunk_bytes, order, aliases, groups = object_of(body, keys, "its table")
    shards = number_of(shards, 1, 2**20, "shards")
    return Archive(
        f"{checksum_of(identity):016x}",
        number_of(shard, 0, shards - 1, "shard"),
        shards,
        _chunk_bytes(chunk_bytes),
        text_of(order, "order"),
        tuple(_group(item, chunk_bytes) for item in list_of(groups, "groups")),
        _aliases(aliases),
    )


def _group(item: Any, chunk_bytes: int) -> ArchiveGroup:
    keys = ("name", "position", "codec", "item_bytes", "tensors", "chunks")
    name, position, codec, item_bytes, tensors, chunks = object_of(item, keys, "a group")
    name = text_of(name, "the name of a group")
    check_plain_name(name)
    if codec not in _CODECS:
        raise FormatError(
            f"group {quoted(name)} has the codec {quoted(str(codec))}, which this release does not know; it knows "
            + ", ".join(_CODECS)
        )
    entries = back_to_back([_tensor(tensor) for tensor in list_of(tensors, "tensors")])
    if not entries:
        raise FormatError(f"group {quoted(name)} has no tensors")
    rows = [list_of(chunk, f"a chunk of group {quoted(name)}", 2) for chunk in list_of(chunks, "chunks")]
    if len(rows) != chunk_count(entries[-1].end, chunk_bytes):
        raise FormatError(f"group {quoted(name)} of {entries[-1].end} B has {len(rows)} chunks of {chunk_bytes} B")
    stored = []
    for number, row in enumerate(rows):
        most = min(chunk_bytes, entries[-1].end - number * chunk_bytes)
        least = most if codec == Codec.NONE.value else 1
        stored.append((number_of(row[0], least, most, f"a chunk of group {quoted(name)}"), checksum_of(row[1])))
    return ArchiveGroup(
        name,
        number_of(position, 0, 2**31, "position"),
        Codec(codec),
        number_of(item_bytes, 1, 16, "item_bytes"),
        entries,
        tuple(stored),
    )


def _tensor(item: Any) -> TensorSpec:
    values = list_of(item, "a tensor", 3)
    name, dtype, shape = text_of(values[0], "a name"), text_of(values[1], "a dtype"), list_of(values[2], "a shape")
    check_name(name)
    return TensorSpec(name, dtype, tuple(number_of(size, 0, 2**63 - 1, "a shape") for size in shape))


def _check_against(archive: Archive, header: Header) -> None:
    """Checks that the table describes this very file: the places that follow from it are those in the header."""
    tensors = archive.tensors
    names = {entry.name for entry in tensors}
    if len(names) != len(tensors):
        raise FormatError(f"{len(tensors) - len(names)} tensors stand in two groups")
    for alias, name in archive.aliases.items():
        if name not in names or alias in names:
            raise FormatError(f"the alias {quoted(alias)} is a tensor itself, or {quoted(name)}, its target, is none")
    positions = [group.position for group in archive.groups]
    if positions != sorted(set(positions)):
        raise FormatError("the groups are not in their order")
    encoded, begin, expected = _encoded_prefix(archive), 0, list[TensorEntry]()
    for group in archive.groups:
        expected += back_to_back(_as_stored(group, encoded), begin)
        begin += group.stored_bytes
    for entry in expected:
        if header.tensors.get(entry.name) != entry:
            raise FormatError(f"tensor {quoted(entry.name)} is not where the table of chunks says, at {entry.begin}")
    if len(header.tensors) != len(expected):
        raise FormatError(f"{len(header.tensors)} tensors, of which the table of chunks knows {len(expected)}")
    if header.data_start % ALIGNMENT or header.data_start + begin != header.file_bytes:
        raise FormatError(f"the chunks end at byte {header.data_start + begin}, but the file has {header.file_bytes} B")
    check_contiguous(list(header.entries.values()))


def _aliases(item: Any) -> dict[str, str]:
    aliases = mapping_of(item, "aliases")
    for alias, name in aliases.items():
        check_name(alias)
        text_of(name, "an alias")
    return aliases


def _chunk_bytes(item: Any) -> int:
    value = number_of(item, ALIGNMENT, LARGEST_CHUNK_BYTES, "chunk_bytes")
    if value % ALIGNMENT:
        raise FormatError(f"chunk_bytes is {value}, not a multiple of {ALIGNMENT}")
    return value
