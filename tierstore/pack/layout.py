"""Where each byte of a pack stands, and the header that says so.

Scope: dtypes, tensors laid back to back into 4096-aligned extents, pad tensors, the safetensors header.
Not here: reading a header that others wrote (`validate.py`); reading or writing data (`io/`).
Owner: none; pure functions on plain records.

[Note: pads] safetensors allows no hole between tensors, and O_DIRECT wants every extent at a multiple of 4096. The
space between the end of an extent and the next multiple is therefore a U8 tensor of its own. Its name starts with a
prefix that no other tensor of the pack starts with; `__metadata__` says which, so a reader can tell pads from data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.alignment import ALIGNMENT, padded
from tierstore.errors import FormatError
from tierstore.pack.codecs import checksum_bytes

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_DIMENSIONS = 64
PAD_KEY = "tierstore.pad_prefix"
SEAL_KEY = "tierstore.header_xxh3"

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element, for every dtype that safetensors 0.8 reads."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is to be laid out."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a pack; `begin` and `end` are bytes after the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Tensors that are read and written together."""

    name: str
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A chunk of a slot pack: sections (name, dtype, elements) back to back, in this order.

    A section is the 1-D tensor `{chunk name}.{section name}` of the pack.

    Attributes:
        tensors: names, as a user knows them, of the tensors of which it holds a part, or a part of their state.
    """

    name: str
    sections: tuple[tuple[str, str, int], ...]
    tensors: tuple[str, ...] = ()

    @property
    def item_bytes(self) -> int:
        """Bytes of its widest element, by which a codec transposes."""
        return max(item_bytes(dtype) for _, dtype, _ in self.sections)


@dataclass(frozen=True, slots=True)
class Span:
    """Where an extent or chunk stands: `offset` counts from the start of the file, a multiple of 4096.

    `padded_bytes` is what one aligned transfer moves.
    """

    offset: int
    padded_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole pack before its data is written; `spans` is by name, in file order."""

    entries: tuple[TensorEntry, ...]
    spans: dict[str, Span]
    header: bytes = field(repr=False)
    file_bytes: int

    @property
    def data_start(self) -> int:
        return len(self.header)


def quoted(name: str) -> str:
    """A name from a file as a message may show it: escaped, and never long."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names as a message may show them: quoted, and not too many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(quoted, names[:most])) + more


def some_of(problems: Sequence[str]) -> str:
    """Problems as one sentence may tell them: not too many."""
    return "; ".join([*problems[:5], *([f"and {len(problems) - 5} more"] if problems[5:] else [])])


def tensor_bytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor.

    Raises:
        FormatError: unknown dtype, a bad dimension, more elements than 64 bits count, or not a whole number of bytes.
    """
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise FormatError(f"tensor {quoted(name)}: unknown dtype {quoted(dtype)}")
    if len(shape) > MAX_DIMENSIONS:
        raise FormatError(f"tensor {quoted(name)}: {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    elements = 1
    for size in shape:
        if size < 0:
            raise FormatError(f"tensor {quoted(name)}: the dimension {size} is negative")
        elements *= size
        # Bounded inside the loop: 64 large dimensions would otherwise multiply into a very long number.
        if elements >= 2**63:
            raise FormatError(f"tensor {quoted(name)}: the shape {list(shape)} has more than 2**63 elements")
    if elements * bits % 8:
        raise FormatError(f"tensor {quoted(name)}: {elements} elements of {bits} bits are not a whole number of bytes")
    return elements * bits // 8


def item_bytes(dtype: str) -> int:
    """Bytes of an element, for codecs that shuffle; 1 for elements smaller than a byte."""
    return max(1, DTYPE_BITS[dtype] // 8)


def check_name(name: str) -> None:
    """Refuse names that a header cannot hold. Control characters are allowed: messages show names by `quoted`.

    Raises:
        FormatError: reserved, or not encodable.
    """
    if name == "__metadata__":
        raise FormatError("no tensor can be named '__metadata__'")
    # isprintable is cheap; the exact test only for the few names that need it
    if not name.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise FormatError(f"tensor name {quoted(name)} is not valid Unicode (lone surrogate)")


def check_plain_name(name: str) -> None:
    """Refuse also characters that would not survive a terminal or a C string, in names that we choose.

    Raises:
        FormatError: as `check_name`; control characters.
    """
    check_name(name)
    if not name.isprintable() and any(letter < " " or letter == "\x7f" for letter in name):
        raise FormatError(f"the name {quoted(name)} holds a control character")


def back_to_back(tensors: Iterable[TensorSpec], begin: int = 0) -> tuple[TensorEntry, ...]:
    """Tensors with their places from `begin` on."""
    entries, position = [], begin
    for spec in tensors:
        end = position + tensor_bytes(spec.name, spec.dtype, spec.shape)
        entries.append(TensorEntry(spec.name, spec.dtype, spec.shape, position, end))
        position = end
    return tuple(entries)


def unused_prefix(start: str, names: Iterable[str]) -> str:
    """`start`, with as few underscores behind it as it takes for none of `names` to start with it."""
    tails = [name[len(start) :] for name in names if name.startswith(start)]
    return start + "_" * max((len(tail) - len(tail.lstrip("_")) + 1 for tail in tails), default=0)


def check_contiguous(entries: Sequence[TensorEntry]) -> int:
    """Bytes of data that `entries`, sorted by begin and end, cover without hole or overlap from byte 0.

    Raises:
        FormatError: a hole, an overlap, or a size that does not follow from dtype and shape.
    """
    position, previous = 0, "the start of the data"
    for entry in entries:
        needed = tensor_bytes(entry.name, entry.dtype, entry.shape)
        if entry.end - entry.begin != needed:
            raise FormatError(
                f"tensor {quoted(entry.name)}: {entry.dtype} {list(entry.shape)} takes {needed} B, "
                f"but its offsets [{entry.begin}, {entry.end}] span {entry.end - entry.begin} B"
            )
        if entry.begin != position:
            what = "overlaps" if entry.begin < position else "leaves a hole after"
            raise FormatError(
                f"tensor {quoted(entry.name)} begins at {entry.begin} and {what} {previous}, which ends at {position}"
            )
        position, previous = entry.end, quoted(entry.name)
    return position


def build_header(
    entries: Iterable[TensorEntry],
    metadata: Mapping[str, str],
    *,
    data_start: int | None = None,
    seal: bool = False,
) -> bytes:
    """A safetensors header, 8-byte length included, whose length is a multiple of 4096: where the data starts.

    Args:
        data_start: the exact length wanted; None is the shortest.
        seal: add a checksum of the header itself, which `read_header` verifies.

    Raises:
        FormatError: entries that no safetensors file may hold, or a header that is too long.
    """
    ordered = sorted(entries, key=lambda entry: (entry.begin, entry.end, entry.name))
    check_contiguous(ordered)
    names = {entry.name for entry in ordered}
    if len(names) != len(ordered):
        raise FormatError(f"{len(ordered) - len(names)} tensor names stand twice in one pack")
    for name in names:
        check_name(name)
    if seal:
        metadata = {**metadata, SEAL_KEY: header_seal(ordered, metadata)}
    text = _header_text(ordered, metadata)
    shortest = padded(8 + len(text))
    length = shortest if data_start is None else data_start
    if length < shortest or length % ALIGNMENT:
        raise FormatError(f"a header of {len(text)} B does not end at byte {length}")
    if length - 8 > MAX_HEADER_BYTES:
        raise FormatError(
            f"a header of {length - 8} B for {len(ordered)} tensors is over the limit of safetensors, "
            f"{MAX_HEADER_BYTES} B; write several packs"
        )
    return (length - 8).to_bytes(8, "little") + text.ljust(length - 8)


def header_seal(ordered: Sequence[TensorEntry], metadata: Mapping[str, str]) -> str:
    """Checksum of what a header says (not of its spelling), without its own seal; entries in file order."""
    bare = {key: metadata[key] for key in sorted(metadata) if key != SEAL_KEY}
    return f"{checksum_bytes(_header_text(ordered, bare)):016x}"


def lay_out(
    extents: Sequence[Extent],
    metadata: Mapping[str, str] | None = None,
    *,
    data_start: int | None = None,
    seal: bool = False,
) -> Layout:
    """A pack of `extents` in this order; inside each, wider dtypes first, so that every tensor is aligned.

    Args:
        data_start, seal: as for `build_header`.
    """
    ordered = [
        Extent(extent.name, tuple(sorted(extent.tensors, key=lambda item: -DTYPE_BITS.get(item.dtype, 0))))
        for extent in extents
    ]
    return _assemble(ordered, metadata or {}, data_start, seal=seal)


def slot_pack(chunks: Sequence[ChunkSpec]) -> Layout:
    """A pack of chunks, each an aligned span of 1-D tensors in the order given.

    Raises:
        FormatError: a section would not start at a multiple of its element size.
    """
    extents = []
    for chunk in chunks:
        tensors = []
        position = 0
        for section, dtype, elements in chunk.sections:
            spec = TensorSpec(f"{chunk.name}.{section}", dtype, (elements,))
            if position * 8 % DTYPE_BITS.get(dtype, 8):
                raise FormatError(f"tensor {quoted(spec.name)} of {dtype} would start at byte {position}, not aligned")
            position += tensor_bytes(spec.name, dtype, spec.shape)
            tensors.append(spec)
        extents.append(Extent(chunk.name, tuple(tensors)))
    return _assemble(extents, {})


def capacity_pack(chunks: Sequence[ChunkSpec]) -> Layout:
    """A pack for encoded chunks: each chunk is an opaque U8 tensor of fixed capacity, named as the chunk."""
    extents = []
    for chunk in chunks:
        content_bytes = sum(tensor_bytes(f"{chunk.name}.{name}", dtype, (n,)) for name, dtype, n in chunk.sections)
        extents.append(Extent(chunk.name, (TensorSpec(chunk.name, "U8", (padded(content_bytes),)),)))
    return _assemble(extents, {})


def _assemble(
    extents: Sequence[Extent], metadata: Mapping[str, str], data_start: int | None = None, *, seal: bool = False
) -> Layout:
    prefix = unused_prefix("__pad__", (tensor.name for extent in extents for tensor in extent.tensors))
    entries: list[TensorEntry] = []
    places: list[tuple[str, int, int]] = []
    position, pads = 0, 0
    for extent in extents:
        begin = position
        for entry in back_to_back(extent.tensors, begin):
            entries.append(entry)
            position = entry.end
        if pad_bytes := padded(position) - position:  # [Note: pads]
            entries.append(TensorEntry(f"{prefix}{pads}", "U8", (pad_bytes,), position, position + pad_bytes))
            position += pad_bytes
            pads += 1
        places.append((extent.name, begin, position))
    complete = {**metadata, PAD_KEY: prefix} if pads else metadata
    header = build_header(entries, complete, data_start=data_start, seal=seal)
    start = len(header)
    spans = {name: Span(start + begin, end - begin) for name, begin, end in places}
    if len(spans) != len(extents):
        raise FormatError(f"{len(extents) - len(spans)} extent names stand twice in one pack")
    return Layout(tuple(entries), spans, header, start + position)


def _header_text(entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    # One line of text per tensor: four times faster than json.dumps of nested dictionaries for 80,000 tensors.
    encode = json.encoder.encode_basestring
    parts = [
        f'{encode(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{",".join(map(str, entry.shape))}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
        for entry in entries
    ]
    if metadata:
        parts.insert(0, f'"__metadata__":{json.dumps(dict(metadata), ensure_ascii=False)}')
    try:
        return f"{{{','.join(parts)}}}".encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"a header cannot hold {error.object[error.start : error.end]!a}: a lone surrogate") from None
