"""Reading the header of an untrusted safetensors file.

Scope: every MUST of the format, one error per way to be wrong, nothing allocated that the file is too small to hold.
Not here: reading data (`io/`); checksums of data (`codecs.py`, and the callers that know them).
Owner: none; a `Header` is a plain record.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from tierstore.errors import ChecksumMismatch, FormatError, StorageError, Truncated
from tierstore.pack.layout import (
    MAX_HEADER_BYTES,
    PAD_KEY,
    SEAL_KEY,
    TensorEntry,
    check_contiguous,
    check_name,
    header_seal,
    quoted,
)
from tierstore.pack.strict_json import parse_json

_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class Header:
    """What a file says about itself; `entries` is by name, in file order, pads included."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """The entries that are not pads, see [Note: pads] in `layout.py`."""
        prefix = self.metadata.get(PAD_KEY)
        if not prefix:
            return self.entries
        return {name: entry for name, entry in self.entries.items() if not name.startswith(prefix)}


def read_header(path: str | os.PathLike[str]) -> Header:
    """The checked header of the safetensors file at `path`.

    Raises:
        Truncated: the file ends before its header or its data does.
        ChecksumMismatch: the header was sealed and then changed.
        FormatError: the file is not safetensors.
        StorageError: it cannot be opened or read.
    """
    source = os.fspath(path)
    try:
        with opened_at_once(source) as file:  # buffered: a raw read may be short
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = _header_length(prefix, file_bytes, source)
            text = file.read(length)
    except OSError as error:
        raise StorageError(f"{source}: {error.strerror or error}") from error
    return parse_header(prefix + text, file_bytes, source)


@contextlib.contextmanager
def opened_at_once(path: str | Path) -> Iterator[BinaryIO]:
    """A file to be read, opened without waiting for the writer of a pipe.

    Raises:
        FormatError: it is a pipe or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FormatError(f"{path}: not a regular file")
        yield file


def parse_header(head: bytes, file_bytes: int, source: str) -> Header:
    """The checked header in `head`, the first bytes of a file of `file_bytes`.

    Raises:
        As `read_header`, except StorageError.
    """
    length = _header_length(head[:8], file_bytes, source)
    if len(head) < 8 + length:
        raise Truncated(f"{source}: the header ends at byte {8 + length}, but only {len(head)} B could be read")
    content = parse_json(head[8 : 8 + length], f"{source}: header")
    try:
        return _checked(content, 8 + length, file_bytes)
    except FormatError as error:
        raise type(error)(f"{source}: {error}") from None


def _header_length(prefix: bytes, file_bytes: int, source: str) -> int:
    if len(prefix) < 8 or file_bytes < 8:
        raise Truncated(f"{source}: {min(len(prefix), file_bytes)} B, shorter than the 8 B that give the header length")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        if prefix.startswith(b"PK"):
            raise FormatError(
                f"{source} is a zip file, as torch.save makes them, not safetensors; "
                "`tierstore pack` reads it if its name ends in .pt"
            )
        raise FormatError(
            f"{source} does not begin as a safetensors file: a header of {length} B is over the limit of "
            f"{MAX_HEADER_BYTES} B"
        )
    if 8 + length > file_bytes:
        raise Truncated(f"{source}: the header ends at byte {8 + length}, but the file has {file_bytes} B")
    return length


def _checked(content: Any, data_start: int, file_bytes: int) -> Header:
    if not isinstance(content, dict):
        raise FormatError(f"the header is a JSON {type(content).__name__}, not an object")
    metadata = _metadata(content.pop("__metadata__", None))
    entries = [_entry(name, item) for name, item in content.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end, entry.name))
    data_bytes = check_contiguous(entries)
    if data_start + data_bytes > file_bytes:
        raise Truncated(f"the data ends at byte {data_start + data_bytes}, but the file has {file_bytes} B")
    if data_start + data_bytes < file_bytes:
        extra = file_bytes - data_start - data_bytes
        raise FormatError(f"{extra} B after the end of the data at byte {data_start + data_bytes} belong to no tensor")
    seal = metadata.get(SEAL_KEY)
    if seal is not None and seal != header_seal(entries, metadata):
        raise ChecksumMismatch(f"the header was changed after it was sealed with xxh3 {quoted(seal)}")
    return Header({entry.name: entry for entry in entries}, metadata, data_start, file_bytes)


def _metadata(item: Any) -> dict[str, str]:
    if item is None:
        return {}
    if not isinstance(item, dict):
        raise FormatError(f"__metadata__ is a {type(item).__name__}, not an object")
    for key, value in item.items():
        if not isinstance(value, str):
            raise FormatError(f"__metadata__[{quoted(key)}] is a {type(value).__name__}, not text")
        try:
            (key + value).encode()
        except UnicodeEncodeError:
            raise FormatError(f"__metadata__[{quoted(key)}] is not valid Unicode (lone surrogate)") from None
    return item


def _entry(name: str, item: Any) -> TensorEntry:
    check_name(name)
    if not isinstance(item, dict):
        raise FormatError(f"tensor {quoted(name)} is a {type(item).__name__}, not an object")
    if item.keys() != _FIELDS:
        missing, unknown = sorted(_FIELDS - item.keys()), [quoted(key) for key in sorted(item.keys() - _FIELDS)[:3]]
        raise FormatError(f"tensor {quoted(name)}: missing {missing}, unknown {unknown}")
    dtype = item["dtype"]
    if not isinstance(dtype, str):
        raise FormatError(f"tensor {quoted(name)}: dtype is a {type(dtype).__name__}, not text")
    shape = _integers(name, item, "shape")
    offsets = _integers(name, item, "data_offsets")
    if len(offsets) != 2:
        raise FormatError(f"tensor {quoted(name)}: data_offsets holds {len(offsets)} numbers, not 2")
    begin, end = offsets
    if begin > end:
        raise FormatError(f"tensor {quoted(name)}: data_offsets begin at {begin}, after their end {end}")
    return TensorEntry(name, dtype, shape, begin, end)


def _integers(name: str, item: Mapping[str, Any], key: str) -> tuple[int, ...]:
    values = item[key]
    if not isinstance(values, list):
        raise FormatError(f"tensor {quoted(name)}: {key} is a {type(values).__name__}, not a list")
    for value in values:
        if type(value) is not int:  # isinstance would let `true` through
            raise FormatError(f"tensor {quoted(name)}: {key} holds a {type(value).__name__}, not only integers")
        if not 0 <= value < 2**63:
            raise FormatError(f"tensor {quoted(name)}: {key} holds {value}, not within 0 and 2**63")
    return tuple(values)
