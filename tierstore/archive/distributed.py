"""Checkpoints of torch.distributed.checkpoint: which bytes of which file each part of a tensor is.

Scope: the metadata of a checkpoint, unpickled so that only its own records are allowed; parts joined to tensors.
Not here: the files of torch.save of which it is made (`torch_files.py`).
Owner: none; nothing stays open.

[Note: stand-ins] A pickle can set attributes of everything that it names: a changed class of torch or of pathlib would
stay so for the rest of the process. So each pickle gets classes of its own, which only hold what it puts into them.
"""

from __future__ import annotations

import collections
import io
import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tierstore.archive.dtypes import file_dtype
from tierstore.archive.gather import Content
from tierstore.archive.pickles import MOST_BYTES, check_pickle
from tierstore.archive.sources import Piece, Source, SourceTensor, small_file
from tierstore.archive.torch_files import check_piece_count, load_without_data, pieces
from tierstore.errors import FormatError, TierstoreError
from tierstore.io.backend import storage_errors
from tierstore.pack.checked import file_name_of, number_of, text_of
from tierstore.pack.layout import TensorSpec, check_name, quoted, tensor_bytes
from tierstore.pack.validate import opened_at_once

_METADATA_FILE = ".metadata"
_MOST_PIECES = 2**20
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip
_PATHS = ("PosixPath", "WindowsPath")  # where the checkpoint was written; not used


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
    infos: dict[Any, dict[tuple[int, ...], Any]] = defaultdict(dict)
    for index, info in content.storage_data.items():
        infos[index.fqn][_numbers(index.offset or (), "an offset")] = info
    tensors, left_out = {}, []
    parts = _Parts(path)
    for name, item in content.state_dict_metadata.items():
        check_name(text_of(name, "a name"))
        if type(item).__name__ != "TensorStorageMetadata":
            left_out.append(name)
            continue
        size = _numbers(item.size, f"the size of {quoted(name)}")
        dtype, shape = file_dtype(name, item.properties.dtype, size, path)
        nbytes = tensor_bytes(name, dtype, shape)
        found = tuple(_joined(path, name, item, infos[name], parts))
        if sum(piece.nbytes for piece in found) != nbytes:
            raise FormatError(f"{path}: the parts of {quoted(name)} are not its {nbytes} B")
        tensors[name] = SourceTensor(TensorSpec(name, dtype, shape), found)
        parts.count(found)
    if not tensors:
        raise FormatError(f"{path} holds no tensors")
    return Source(path, "distributed checkpoint", tensors, metadata={"format": "pt"}, left_out=tuple(left_out))


def _numbers(values: Any, what: str) -> tuple[int, ...]:
    return tuple(number_of(value, 0, 2**63 - 1, what) for value in values)


class _Record:
    """See [Note: stand-ins]."""

    dtype: Any = None  # defaults of attributes that a state does not set
    offset: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of `TensorProperties`
            self.dtype = state[0]
        else:
            vars(self).update(state)


class _Member:
    """Stands for `getattr`, by which some Pythons (3.11.2 for one) pickle members of enumerations."""

    def __new__(cls, kind: Any, name: Any) -> Any:
        if not (isinstance(kind, type) and issubclass(kind, _Record)):
            raise pickle.UnpicklingError("it asks for more than members of enumerations")
        return kind(name)


class _OnlyRecords(pickle.Unpickler):
    """Refuses everything that is not a plain record of a checkpoint: an unpickled name can be any function."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._stand_ins: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()) or (module.split(".")[0] == "pathlib" and name in _PATHS):
            return self._stand_ins.setdefault(name, type(name, (_Record,), {}))
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return self._stand_ins.setdefault(name, type(name, (_Member,), {}))
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _metadata(path: Path) -> Any:
    data = small_file(path, MOST_BYTES)
    check_pickle(data, str(path))
    try:
        content = _OnlyRecords(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise FormatError(f"{path} holds more than records, and loading it could run code: refused ({error})") from None
    except Exception as error:  # a damaged pickle raises anything
        raise FormatError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    if type(content).__name__ != "Metadata" or not isinstance(getattr(content, "storage_data", None), dict):
        raise FormatError(f"{path} is not the metadata of a distributed checkpoint")
    return content


def _joined(
    path: Path, name: str, item: Any, infos: dict[tuple[int, ...], Any], parts: _Parts
) -> Iterator[Piece]:
    """The pieces of a tensor in row-major order.

    Raises:
        FormatError: parts are missing or overlap.
    """
    size, item_bytes = tuple(item.size), item.properties.dtype.itemsize
    runs: list[tuple[int, Piece]] = []
    seen: set[tuple[int, ...]] = set()
    for chunk in item.chunks:
        offsets, sizes = _numbers(chunk.offsets, "an offset"), _numbers(chunk.sizes, "a size")
        info = infos.get(offsets)
        if offsets in seen:
            raise FormatError(f"{path}: the part of {quoted(name)} at {list(offsets)} stands twice in {_METADATA_FILE}")
        seen.add(offsets)
        if info is None:
            raise FormatError(f"{path}: the part of {quoted(name)} at {list(offsets)} is missing in {_METADATA_FILE}")
        if 0 not in sizes:
            part = parts.read(name, info, item.properties.dtype, sizes)
            for begin, start, nbytes in _runs(size, offsets, sizes, item_bytes):
                runs += [(begin + at, piece) for piece, at in part.pieces(start, nbytes)]
                if len(runs) > _MOST_PIECES:
                    raise _too_many(f"{path}: {quoted(name)}")
    position = 0
    for begin, piece in sorted(runs, key=lambda run: run[0]):
        if begin != position:
            raise FormatError(f"{path}: the parts of {quoted(name)} leave a hole or overlap at byte {position}")
        position += piece.nbytes
        yield piece


def _too_many(what: str) -> FormatError:
    return FormatError(f"{what} is cut into more than {_MOST_PIECES} pieces")


class _Parts:
    """The data of parts: each is a file of torch.save within a file, and is examined only once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[Path, int, int], tuple[torch.dtype, tuple[int, ...], Content]] = {}
        self._pieces = 0

    def read(self, name: str, info: Any, dtype: torch.dtype, sizes: tuple[int, ...]) -> Content:
        file = self._path / file_name_of(info.relative_path, f"{self._path}: the file of {quoted(name)}")
        offset, nbytes = _numbers((info.offset, info.length), f"{self._path}: where {quoted(name)} stands")
        if (key := (file, offset, nbytes)) not in self._found:
            self._found[key] = self._look(name, *key)
        found_dtype, shape, content = self._found[key]
        if (found_dtype, shape) != (dtype, sizes):
            raise FormatError(f"{file}: what stands at offset {offset} is not the part of {quoted(name)}")
        return content

    def _look(
        self, name: str, file: Path, offset: int, nbytes: int
    ) -> tuple[torch.dtype, tuple[int, ...], Content]:
        with storage_errors("read", file), opened_at_once(file) as opened:
            window: Any = _Window(opened, offset, nbytes)
            tensor = load_without_data(window, f"{file}, {nbytes} B at offset {offset},")
        if not isinstance(tensor, torch.Tensor):
            raise FormatError(f"{file}: what stands at offset {offset} is not the part of {quoted(name)}")
        return tensor.dtype, tuple(tensor.shape), Content(pieces(tensor, file, name, offset))

    def count(self, found: Sequence[Piece]) -> None:
        """Refuse a checkpoint whose parts are used more often than its size explains."""
        self._pieces += len(found)
        check_piece_count(self._pieces, sum(nbytes for *_, nbytes in self._found), str(self._path))


def _runs(
    size: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...], item_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Runs of a part that are contiguous in the whole tensor: begin in that, begin in the part, length; in bytes."""
    inner = len(size)
    run = item_bytes
    while inner and sizes[inner - 1] == size[inner - 1]:
        inner -= 1
        run *= sizes[inner]
    if inner:  # rows along the innermost dimension that is cut are still contiguous
        inner -= 1
        run *= sizes[inner]
    strides = [item_bytes] * len(size)
    for dimension in reversed(range(len(size) - 1)):
        strides[dimension] = strides[dimension + 1] * size[dimension + 1]
    if math.prod(sizes[:inner]) > _MOST_PIECES:  # `product` would make a tuple of each range
        raise _too_many("a part")
    corner = sum(offset * stride for offset, stride in zip(offsets, strides))
    for number, index in enumerate(itertools.product(*map(range, sizes[:inner]))):
        begin = corner + sum(at * stride for at, stride in zip(index, strides))
        yield begin, number * run, run


class _Window(io.RawIOBase):
    """A range of a file, as a file."""

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
