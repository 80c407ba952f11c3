"""The content of a manifest and of the captured state beside it: a generation as bytes, strictly read back.

Scope: encoding a generation as two files, and decoding it; everything read is checked before it is used.
Not here: files, and in which order they are written (`manifest_files.py`); what the captured state means (`train/`).
Owner: none; pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from tierstore.alignment import ALIGNMENT
from tierstore.config import Codec
from tierstore.errors import ChecksumMismatch, FormatError
from tierstore.pack import tree
from tierstore.pack.checked import checksum_of, list_of, mapping_of, number_of, object_of, text_of
from tierstore.pack.codecs import checksum_bytes
from tierstore.pack.layout import check_name, quoted, tensor_bytes
from tierstore.pack.strict_json import parse_json
from tierstore.pack.validate import parse_header
from tierstore.store.slots import SLOT_NAMES, ChunkRecord
from tierstore.store.stripes import MOST_SHARES

FORMAT_VERSION = 2
_WHOLE_VERSION = 1  # all its checksums are of whole chunks
_SHARES_VERSION = 3  # with unequal shares of disks: a release that does not know them would look for chunks elsewhere
_KEYS = (
    "format", "version", "generation", "layout", "records", "captured", "captured_bytes", "captured_checksum",
)  # fmt: skip
_ADVICE = "go back one with resume='previous'"
_CODECS = tuple(codec.value for codec in Codec)
_DTYPES = ("fp32", "bf16", "fp16")
_LARGEST_CHUNK_BYTES = 2**25
_ARRAY_DTYPES = {
    "BOOL": "|b1", "I8": "|i1", "U8": "|u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8",
    "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """One committed state of the whole store.

    Attributes:
        number: counts commits from 0.
        layout: what the packs look like; a store opens only for an equal one.
        records: per pack, the record of each chunk.
        captured: everything else that is needed to begin the next step.
    """

    number: int
    layout: Mapping[str, Any]
    records: Mapping[str, Sequence[ChunkRecord | None]]
    captured: Any


@dataclass(frozen=True, slots=True)
class Captured:
    """What a manifest says of the captured state.

    Attributes:
        state: as JSON; its arrays are in a file of their own, of `nbytes` bytes with `checksum`.
    """

    state: Any
    nbytes: int
    checksum: str


def captured_text(captured: Any) -> tuple[Captured, bytes]:
    """What the manifest says of a captured state, and its arrays as safetensors."""
    state, arrays = tree.encode(captured)
    data = safetensors.numpy.save(arrays)
    return Captured(state, len(data), digest(data)), data


def manifest_text(
    number: int, layout: Mapping[str, Any], records: Mapping[str, Sequence[ChunkRecord | None]], captured: Captured
) -> bytes:
    """The manifest of a generation; the arguments are those of `Generation`."""
    body = {
        "format": "tierstore",
        "version": _SHARES_VERSION if "shares" in layout else FORMAT_VERSION,
        "generation": number,
        "layout": layout,
        "records": {kind: _rows(rows) for kind, rows in records.items()},
        "captured": captured.state,
        "captured_bytes": captured.nbytes,
        "captured_checksum": captured.checksum,
    }
    data = json.dumps(body, separators=(",", ":")).encode()
    return data + b"\n" + digest(data).encode()


def digest(data: bytes) -> str:
    """xxh3, as a manifest writes it."""
    return f"{checksum_bytes(data):016x}"


def read_manifest(text: bytes, number: int, source: str) -> dict[str, Any]:
    """The body of a manifest, checked as far as that is possible without the arrays of the captured state.

    Raises:
        FormatError: it is damaged, of an unknown version, or not that of generation `number`.
    """
    data, _, found = text.rpartition(b"\n")
    if digest(data).encode() != found:
        raise ChecksumMismatch(f"the manifest {source} is damaged; {_ADVICE}")
    body = mapping_of(parse_json(data, source), source)
    known = (_WHOLE_VERSION, FORMAT_VERSION, _SHARES_VERSION)
    if body.get("format") != "tierstore" or body.get("version") not in known:
        raise FormatError(
            f"{source} has format {body.get('format')!r:.40} version {body.get('version')!r:.40}; "
            f"this release reads tierstore versions {_WHOLE_VERSION} to {_SHARES_VERSION}"
        )
    object_of(body, _KEYS, source)
    number_of(body["generation"], number, number, f"{source}: generation")
    number_of(body["captured_bytes"], 0, 2**63 - 1, f"{source}: captured_bytes")
    records = mapping_of(body["records"], f"{source}: records")
    rows_of = _whole_records if body["version"] == _WHOLE_VERSION else _records
    body["records"] = {kind: rows_of(rows, f"{source}: records of {quoted(kind)}") for kind, rows in records.items()}
    _check_layout(mapping_of(body["layout"], f"{source}: layout"), body["records"], source)
    return body


def read_generation(body: Mapping[str, Any], captured: bytes, source: str) -> Generation:
    """The generation that `read_manifest` has found, with the state captured beside it.

    Args:
        source: the path of `captured`, for messages.

    Raises:
        FormatError: the captured state is damaged, or that of another generation.
    """
    if len(captured) != body["captured_bytes"] or digest(captured) != body["captured_checksum"]:
        raise ChecksumMismatch(f"{source} is damaged; {_ADVICE}")
    state = tree.decode(body["captured"], _arrays(captured, source), source)
    return Generation(body["generation"], body["layout"], body["records"], state)


def _arrays(captured: bytes, source: str) -> dict[str, tree.Array]:
    header, arrays = parse_header(captured, len(captured), source), {}
    for name, entry in header.entries.items():
        if entry.dtype not in _ARRAY_DTYPES:
            raise FormatError(f"{source}: array {quoted(name)} has the dtype {entry.dtype}, which numpy does not have")
        # A writable copy: objects keep the arrays that they are given as their own.
        data = bytearray(captured[header.data_start + entry.begin : header.data_start + entry.end])
        try:
            arrays[name] = np.ndarray(entry.shape, _ARRAY_DTYPES[entry.dtype], data)
        except ValueError as error:  # without elements, but with larger sizes or more dimensions than numpy allows
            raise FormatError(f"{source}: array {quoted(name)} of shape {list(entry.shape)}: {error}") from None
    return arrays


def _rows(records: Sequence[ChunkRecord | None]) -> list[list[Any] | None]:
    return [
        None if r is None else [r.slot, r.stored_bytes, f"{r.checksum:016x}", r.is_of_leaves] for r in records
    ]


def _records(rows: Any, what: str) -> list[ChunkRecord | None]:
    return [None if row is None else _record(list_of(row, what, 4), what) for row in list_of(rows, what)]


def _whole_records(rows: Any, what: str) -> list[ChunkRecord | None]:
    return [None if row is None else _record([*list_of(row, what, 3), False], what) for row in list_of(rows, what)]


def _record(row: Sequence[Any], what: str) -> ChunkRecord:
    slot = number_of(row[0], 0, len(SLOT_NAMES) - 1, f"{what}: a slot")
    stored_bytes = number_of(row[1], 1, _LARGEST_CHUNK_BYTES, f"{what}: a length")
    if not isinstance(row[3], bool):
        raise FormatError(f"{what}: whether a checksum is one of leaves is {row[3]!r:.40}, not true or false")
    return ChunkRecord(slot, stored_bytes, checksum_of(row[2]), row[3])


def _check_layout(layout: Mapping[str, Any], records: Mapping[str, Sequence[object]], source: str) -> None:
    """Check the form of a layout, and that it has as many chunks as records, which bounds what is built from it."""
    what = f"{source}: layout"
    count = number_of(layout.get("directories"), 1, 2**16, f"{what}: directories")
    for share in list_of(layout.get("shares", [1] * count), f"{what}: shares", count):
        number_of(share, 1, MOST_SHARES, f"{what}: a share")
    _codec(layout.get("codec"), what)
    groups = list_of(layout.get("groups"), f"{what}: groups")
    if not groups:  # named tensors, each in a pack of its own: see `entries.py`
        most = number_of(layout.get("chunk_bytes"), ALIGNMENT, _LARGEST_CHUNK_BYTES, f"{what}: chunk_bytes")
        number_of(most % ALIGNMENT, 0, 0, f"{what}: chunk_bytes past a multiple of {ALIGNMENT}")
        return
    for kind, decided in mapping_of(layout.get("codecs", {}), f"{what}: codecs").items():
        name, why = list_of(decided, f"{what}: codec of {quoted(kind)}", 2)
        _codec(name, what)
        text_of(why, f"{what}: the reason for a codec")
    chunk_elements = number_of(layout.get("chunk_elements"), 1, _LARGEST_CHUNK_BYTES, f"{what}: chunk_elements")
    chunks = sum(-(-_elements(group, what) // chunk_elements) for group in groups)
    for kind, rows in records.items():
        number_of(len(rows), chunks, chunks, f"{source}: the number of records of {quoted(kind)}")


def _codec(name: Any, what: str) -> None:
    if name not in _CODECS:
        raise FormatError(f"{what}: this release does not know the codec {name!r:.40}; it knows {', '.join(_CODECS)}")


def _elements(group: Any, what: str) -> int:
    """The number of elements of a group, after a check of all its fields."""
    keys = ("name", "dtype", "trainable", "parameters")
    name, dtype, trainable, parameters = object_of(group, keys, f"{what}: a group")
    check_name(f"{text_of(name, f'{what}: the name of a group')}/")  # a module may have any name; messages quote it
    if dtype not in _DTYPES or not isinstance(trainable, bool):
        raise FormatError(f"{what}: group {quoted(name)} has the dtype {dtype!r:.40}, trainable {trainable!r:.40}")
    total = 0
    for row in list_of(parameters, f"{what}: parameters of group {quoted(name)}"):
        parameter, shape = list_of(row, f"{what}: a parameter", 2)
        sizes = [number_of(size, 0, 2**63 - 1, f"{what}: a shape") for size in list_of(shape, f"{what}: a shape")]
        total += tensor_bytes(text_of(parameter, f"{what}: the name of a parameter"), "U8", sizes)
    return number_of(total, 0, 2**63 - 1, f"{what}: the elements of group {quoted(name)}")
