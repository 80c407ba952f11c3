"""Checkpoints of torch.distributed.checkpoint: which stretch of which file each part of a tensor is.

Scope: the metadata of a checkpoint, unpickled with nothing allowed but its own records; parts joined to tensors.
Not here: the files of torch.save of which it is made (`torch_files.py`).
Owner: none; nothing stays open.
"""

from __future__ import annotations

import collections
import io
import itertools
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from tierstore.archive.dtypes import file_dtype
from tierstore.archive.gather import Content
from tierstore.archive.pickles import check_pickle
from tierstore.archive.sources import Piece, Source, SourceTensor
from tierstore.archive.torch_files import load_without_data, pieces
from tierstore.errors import FormatError, TierstoreError
from tierstore.io.backend import storage_error
from tierstore.pack.checked import file_name_of
from tierstore.pack.layout import TensorSpec, quoted

_METADATA_FILE = ".metadata"
_MOST_PIECES = 2**20
_RECORDS = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (metadata, ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                    "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        (filesystem, ("_StorageInfo",)),
    )
    for name in names
}  # fmt: skip


def distributed_source(path: Path) -> Source:
    """The tensors of a distributed checkpoint, joined from the parts that its ranks wrote.

    Raises:
        FormatError: it is damaged, incomplete, or its metadata holds code.
        StorageError: it cannot be read.
    """
    content = _metadata(path / _METADATA_FILE)
    try:
        return _source(path, content)
    except (TierstoreError, OSError):
        raise
    except Exception as error:  # its records may have fields of any type, or none
        raise FormatError(f"{path / _METADATA_FILE} is damaged: {type(error).__name__}: {error}") from None


def _source(path: Path, content: Any) -> Source:
    parts: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
    for index, info in content.storage_data.items():
        parts[index.fqn][tuple(index.offset or ())] = info
    tensors, left_out = {}, []
    for name, item in content.state_dict_metadata.items():
        if not isinstance(item, metadata.TensorStorageMetadata):
            left_out.append(name)
            continue
        dtype, shape = file_dtype(name, item.properties.dtype, tuple(item.size))
        found = tuple(_joined(path, name, item, parts[name]))
        tensors[name] = SourceTensor(TensorSpec(name, dtype, shape), found)
    if not tensors:
        raise FormatError(f"{path} holds no tensors")
    return Source(path, "distributed checkpoint", tensors, metadata={"format": "pt"}, left_out=tuple(left_out))


class _OnlyRecords(pickle.Unpickler):
    """Refuses everything that is not a plain record of a checkpoint: an unpickled name can be any function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was written; that is not looked at
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _metadata(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise storage_error(error, "read", path) from error
    check_pickle(data, str(path))
    try:
        content = _OnlyRecords(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise FormatError(f"{path} holds more than records, and loading it could run code: refused ({error})") from None
    except Exception as error:  # a damaged pickle raises anything
        raise FormatError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if not isinstance(content, metadata.Metadata) or not isinstance(content.storage_data, dict):
        raise FormatError(f"{path} is not the metadata of a distributed checkpoint")
    return content


def _joined(path: Path, name: str, item: Any, parts: dict[tuple[int, ...], Any]) -> Iterator[Piece]:
    """The pieces of a tensor in row-major order.

    Raises:
        FormatError: parts are missing or overlap.
    """
    size, item_bytes = tuple(item.size), item.properties.dtype.itemsize
    runs: list[tuple[int, Piece]] = []
    seen: set[tuple[int, ...]] = set()
    for chunk in item.chunks:
        offsets = tuple(chunk.offsets)
        info = parts.get(offsets)
        if offsets in seen:
            raise FormatError(f"{path}: the part of {quoted(name)} at {list(offsets)} stands twice in {_METADATA_FILE}")
        seen.add(offsets)
        if info is None:
            raise FormatError(f"{path}: the part of {quoted(name)} at {list(offsets)} is missing in {_METADATA_FILE}")
        if 0 not in tuple(chunk.sizes):
            part = _part(path, name, info, tuple(chunk.sizes))
            for begin, start, nbytes in _runs(size, offsets, tuple(chunk.sizes), item_bytes):
                runs += [(begin + at, piece) for piece, at in part.pieces(start, nbytes)]
                if len(runs) > _MOST_PIECES:
                    raise FormatError(f"{path}: {quoted(name)} is cut into more than {_MOST_PIECES} pieces")
    position = 0
    for begin, piece in sorted(runs, key=lambda run: run[0]):
        if begin != position:
            raise FormatError(f"{path}: the parts of {quoted(name)} leave a hole or overlap at byte {position}")
        position += piece.nbytes
        yield piece
    if position != torch.Size(size).numel() * item_bytes:
        raise FormatError(f"{path}: the parts of {quoted(name)} end at byte {position}")


def _part(path: Path, name: str, info: Any, sizes: tuple[int, ...]) -> Content:
    """The data of one part: it is a file of torch.save within a file."""
    file = path / file_name_of(info.relative_path, f"{path}: the file of {quoted(name)}")
    try:
        with open(file, "rb") as opened:
            window: Any = _Window(opened, info.offset, info.length)
            tensor = load_without_data(window, f"{file}, {info.length} B at offset {info.offset},")
    except OSError as error:
        raise storage_error(error, "read", file) from error
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != sizes:
        raise FormatError(f"{file}: what stands at offset {info.offset} is not the part of {quoted(name)}")
    return Content(pieces(tensor, file, name, info.offset))


def _runs(
    size: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], item_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Stretches of a part that are contiguous in the whole tensor: begin there, begin in the part, length; in bytes."""
    inner = len(size)
    run = item_bytes
    while inner and sizes[inner - 1] == size[inner - 1]:
        inner -= 1
        run *= sizes[inner]
    if inner:  # of the first dimension that is cut, a row of the part is still in one piece
        inner -= 1
        run *= sizes[inner]
    strides = [item_bytes] * len(size)
    for dimension in reversed(range(len(size) - 1)):
        strides[dimension] = strides[dimension + 1] * size[dimension + 1]
    corner = sum(offset * stride for offset, stride in zip(offsets, strides))
    for number, index in enumerate(itertools.product(*map(range, sizes[:inner]))):
        begin = corner + sum(at * stride for at, stride in zip(index, strides))
        yield begin, number * run, run


class _Window(io.RawIOBase):
    """A stretch of a file as a file."""

    def __init__(self, file: Any, start: int, nbytes: int) -> None:
        self._file = file
        self._start = start
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._nbytes)[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._nbytes - self._position))
        self._file.seek(self._start + self._position)
        count = int(self._file.readinto(view[:count]))
        self._position += count
        return count
