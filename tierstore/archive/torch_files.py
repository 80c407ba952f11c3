"""Files of torch.save: where the bytes of their tensors are, without reading these, and empty files to be filled.

Scope: `.pt`, `.pth` and `.bin` in torch's zip format, unpickled by torch's own `weights_only` rules.
Not here: distributed checkpoints (`distributed.py`), which are made of such files.
Owner: none; nothing stays open.

[Note: without data] Under a `FakeTensorMode`, torch.load makes tensors on the meta device, and notes for each storage
where its bytes are in the file; torch.save under `skip_data` leaves room for them. So a file of any size is read and
written through our own buffers. These places are checked against the directory of the zip archive, which says how long
each record is and that it is not compressed. For reading, the mode is only set in the tracing context: entering it
takes a millisecond for each tensor. (`map_location="meta"` does the same, from torch 2.13 on.)
"""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from tierstore.archive.dtypes import file_dtype, torch_dtype
from tierstore.archive.pickles import MOST_BYTES, check_pickle
from tierstore.archive.sources import Piece, Source, SourceTensor, refuse_absent
from tierstore.errors import FormatError, StorageError, TierstoreError, first_line
from tierstore.io.backend import Backend, storage_errors
from tierstore.pack.layout import TensorSpec, quoted
from tierstore.pack.validate import opened_at_once

_LOCAL_HEADER_BYTES, _END_BYTES, _LOCATOR_BYTES, _END_64_BYTES = 30, 22, 20, 56
_MOST_PIECES = 2**16
_MOST_DEPTH = 100
_NAME_CHARACTERS_PER_BYTE = 64
_ALWAYS_FINE = 2**16  # values that are accepted, however short the pickle is
_VALUES_PER_BYTE = 8  # a flag takes one byte; a further reference to a list of ten values takes two
_ALWAYS_FINE_PIECES, _BYTES_OF_A_PIECE = 2**17, 16
_METADATA = {"format": "pt"}
_ODD = {
    "_rebuild_sparse_tensor": "sparse", "_rebuild_qtensor": "quantized", "_rebuild_nested_tensor": "nested",
    "_rebuild_njt": "nested", "_rebuild_meta_tensor_no_storage": "on the meta device, without values",
}  # fmt: skip
"""What kind of tensors functions of torch make."""


def torch_source(path: Path, files: Mapping[Path, Sequence[str]], config: Mapping[str, Any] | None) -> Source:
    """The tensors of files that together are one checkpoint.

    Args:
        files: each with the names of the tensors that an index puts there.

    Raises:
        FormatError: a file is not from torch.save, or has code in it, or a tensor has a layout that cannot be packed.
        StorageError: a file cannot be read.
    """
    tensors: dict[str, SourceTensor] = {}
    aliases: dict[str, str] = {}
    left_out: list[str] = []
    seen: dict[tuple[object, ...], str] = {}
    nested: dict[str, None] = {}
    file_bytes = piece_count = 0
    for file, expected in files.items():
        content, nbytes = _load(file)
        file_bytes += nbytes
        names: set[str] = set()
        for name, value in flattened(content, met=names.add):
            if name in tensors or name in aliases:
                where = f"{path}, once in {file.name}" if len(files) > 1 else str(path)
                raise FormatError(
                    f"tensor {quoted(name)} stands twice in {where} (keys of dictionaries inside dictionaries are "
                    "joined by dots); rename one"
                )
            if not isinstance(value, torch.Tensor):
                left_out.append(name)
                continue
            key = name.partition(".")[0]
            if isinstance(content, Mapping) and isinstance(content.get(key), Mapping | list | tuple):
                nested[key] = None
            place = (file, *_identity(value))
            if value.numel() and place in seen:
                aliases[name] = seen[place]
                continue
            seen[place] = name
            tensors[name] = _source_tensor(name, value, file)
            piece_count += len(tensors[name].pieces)
            check_piece_count(piece_count, file_bytes, str(path))
        refuse_absent(file, expected, names)
    if not tensors:
        raise FormatError(f"{path} holds no tensors")
    kind = "torch file" if len(files) == 1 else f"torch checkpoint in {len(files)} shards"
    return Source(path, kind, tensors, aliases, config, _METADATA, tuple(left_out), tuple(nested))


def check_piece_count(count: int, file_bytes: int, source: str) -> None:
    """Refuse more pieces than the size of a checkpoint explains: a stride of 0 makes many pieces of one element.

    Raises:
        FormatError: there are more.
    """
    if count > _ALWAYS_FINE_PIECES + file_bytes // _BYTES_OF_A_PIECE:
        raise FormatError(
            f"{source} has tensors of {count} pieces or more, too many for {file_bytes} B; save them with .contiguous()"
        )


def flattened(
    value: Any, prefix: str = "", depth: int = 0, met: Callable[[str], None] = lambda name: None
) -> Iterator[tuple[str, Any]]:
    """What nested dictionaries and lists hold, under names joined by dots.

    Args:
        met: called with the name of each value, and of each container that holds values.

    Raises:
        FormatError: they are nested too deep; perhaps one holds itself.
    """
    met(prefix)
    if depth > _MOST_DEPTH:
        raise FormatError(f"{quoted(prefix)} is nested deeper than {_MOST_DEPTH}")
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from flattened(item, f"{prefix}.{key}" if prefix else str(key), depth + 1, met)


def empty_torch_file(
    path: Path, specs: Mapping[str, TensorSpec], aliases: Mapping[str, str], backend: Backend
) -> dict[str, int]:
    """Writes a file of torch.save with room for these tensors. Returns where their bytes are to be written.

    Raises:
        FormatError: a dtype that torch does not have.
        StorageError: it cannot be written.
    """
    with FakeTensorMode():
        tensors = {}
        for spec in specs.values():
            dtype, shape = torch_dtype(spec.name, spec.dtype, spec.shape)
            tensors[spec.name] = torch.empty(shape, dtype=dtype, device="cpu")
        for alias, name in aliases.items():
            tensors[alias] = tensors[name]
    try:
        with backend.calling("write of an empty torch file", path), skip_data(materialize_fake_tensors=True):
            torch.save(tensors, path)
    except (OSError, RuntimeError) as error:  # its writer in C++ raises the latter
        raise StorageError(f"cannot write {path}: {error}") from error
    found, _ = _load(path)
    return {name: _offset(found[name]) for name, spec in specs.items() if found[name].numel()}


def pieces(tensor: torch.Tensor, file: Path, name: str, base: int = 0) -> tuple[Piece, ...]:
    """Where the bytes of a tensor without data are, in row-major order; `base` is where its file begins in `file`."""
    item_bytes = tensor.dtype.itemsize
    start = base + _offset(tensor) + int(tensor.storage_offset()) * item_bytes
    if tensor.is_contiguous():
        return (Piece(file, start, tensor.numel() * item_bytes),)
    # The longest contiguous runs, and where each of them begins.
    run, dimension = 1, tensor.dim()
    while dimension and (tensor.shape[dimension - 1] == 1 or tensor.stride(dimension - 1) == run):
        dimension -= 1
        run *= tensor.shape[dimension]
    count = tensor.numel() // run
    if count > _MOST_PIECES:
        raise FormatError(
            f"tensor {quoted(name)} of {file} is not contiguous: {count} pieces of {run * item_bytes} B; save it with "
            ".contiguous()"
        )
    steps: list[int] = [0]
    for size, stride in zip(tensor.shape[:dimension], tensor.stride()[:dimension]):
        steps = [step + index * int(stride) for step in steps for index in range(size)]
    return tuple(Piece(file, start + step * item_bytes, run * item_bytes) for step in steps)


def load_without_data(opened: IO[bytes], source: str) -> Any:
    """What torch.save wrote, with tensors without data; each storage is checked to be a record of the file.

    Raises:
        FormatError: the file is something else, or damaged.
    """
    try:
        records, pickle_bytes = _records(opened, source)
        opened.seek(0)
        with tracing(TracingContext(FakeTensorMode())):
            value = torch.load(opened, map_location="cpu", weights_only=True)
        _check_all(value, records, pickle_bytes, source)
    except TierstoreError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise FormatError(f"{source} is damaged: its directory leads to before its beginning") from None
    except zipfile.BadZipFile:
        raise FormatError(
            f"{source} is not a file of torch.save, or it is truncated; one of torch before 1.6 must be saved again"
        ) from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # without torch's advice, which is to let the code run
        what = f" ({named[1]})" if named else ""
        raise FormatError(
            f"{source} holds more than tensors{what}, and loading it could run code: refused; save its state_dict alone"
        ) from None
    except Exception as error:  # a damaged file makes torch raise anything
        raise FormatError(f"{source} is not a readable file of torch.save: {first_line(error)}") from None
    return value


def _load(path: Path) -> tuple[Any, int]:
    """What a file holds, and its length."""
    with storage_errors("read", path), opened_at_once(path) as opened:
        return load_without_data(opened, str(path)), os.fstat(opened.fileno()).st_size


def _records(opened: IO[bytes], source: str) -> tuple[dict[int, int], int]:
    """Lengths of the records of a zip archive, by where their bytes begin; and the length of its pickle.

    Torch has a zip reader of its own: an archive that Python's reader may see differently is refused.

    Raises:
        FormatError: torch could not load it safely: a pickle (see `pickles.py`), or another order of bytes.
        BadZipFile, ValueError: it is no archive of torch.
    """
    records, names, spans, pickles = {}, set(), [], []
    file_bytes = opened.seek(0, os.SEEK_END)
    _check_directory(opened, file_bytes)
    with zipfile.ZipFile(opened) as archive:
        for info in archive.infolist():
            name = info.filename.lower()  # torch ignores case when it looks for records
            if name in names or info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"record {quoted(info.filename)} stands twice, or is compressed")
            names.add(name)
            begin = _begin(opened, info)
            if begin + info.file_size > file_bytes:
                raise ValueError(f"record {quoted(info.filename)} ends after the file")
            records[begin] = info.file_size
            spans.append((info.header_offset, begin + info.file_size))
            if name.endswith(".pkl"):
                pickles.append(info)
            elif name.endswith("byteorder") and (info.file_size > len(b"little") or archive.read(info) != b"little"):
                raise FormatError(f"{source} was written on a machine of another byte order; save it again on this one")
        spans.sort()
        if any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans)):
            raise ValueError("two records of the archive overlap")
        pickle_bytes = sum(info.file_size for info in pickles)
        if pickle_bytes > MOST_BYTES:
            raise ValueError(f"a pickle of {pickle_bytes} B, more than {MOST_BYTES}")
        for info in pickles:
            data = archive.read(info)
            check_pickle(data, source)
            _refuse_odd(data, source)
    return records, pickle_bytes


def _refuse_odd(data: bytes, source: str) -> None:
    """Refuse a pickle of tensors that torch cannot make without their data, and that no pack could hold."""
    if not any(function.encode() in data for function in _ODD):
        return
    name = text = ""  # the name of the value that comes now; the string on top of the stack
    memo: dict[Any, str] = {}
    for opcode, argument, _ in pickletools.genops(data):
        if "UNICODE" in opcode.name:
            name = text = str(argument)
        elif "PUT" in opcode.name:
            memo[argument] = text
        elif "GET" in opcode.name:
            text = memo.get(argument, "")
            name = text or name
        elif opcode.name in ("GLOBAL", "MARK"):
            if (kind := _ODD.get(str(argument).rpartition(" ")[2])) is not None:
                what = f"tensor {quoted(name)}" if name else "a tensor"
                raise FormatError(f"{what} of {source} is {kind}, which a safetensors file cannot hold")
            text = ""
        else:
            name = text = ""


def _check_directory(opened: IO[bytes], file_bytes: int) -> None:
    """Check that the directory ends with the file, and is not too large for `zipfile`, which reads it at once."""
    tail_bytes = min(_END_64_BYTES + _LOCATOR_BYTES + _END_BYTES, file_bytes)
    opened.seek(file_bytes - tail_bytes)
    tail = opened.read(tail_bytes)
    end, locator, end_64 = tail[-_END_BYTES:], tail[-_END_BYTES - _LOCATOR_BYTES :], tail
    if end[:4] != b"PK\5\6":
        raise zipfile.BadZipFile("something stands behind the directory")
    sizes = [int.from_bytes(end[12:16], "little")]
    if locator[:4] == b"PK\6\7":
        if end_64[:4] != b"PK\6\6" or int.from_bytes(locator[8:16], "little") != file_bytes - tail_bytes:
            raise zipfile.BadZipFile("readers of zip would find two directories")
        sizes = [size for size in sizes if size != 2**32 - 1] + [int.from_bytes(end_64[40:48], "little")]
    if max(sizes) > MOST_BYTES:
        raise zipfile.BadZipFile(f"a directory of {max(sizes)} B")


def _begin(opened: IO[bytes], info: zipfile.ZipInfo) -> int:
    opened.seek(info.header_offset)
    local = opened.read(_LOCAL_HEADER_BYTES)
    if local[:4] != b"PK\3\4":
        raise ValueError(f"record {quoted(info.filename)} is not where the directory says")
    skip = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    return info.header_offset + _LOCAL_HEADER_BYTES + skip


def _check_all(value: Any, records: Mapping[int, int], pickle_bytes: int, source: str) -> None:
    taken = 0

    def met(name: str) -> None:
        nonlocal taken
        taken += 1 + len(name) // _NAME_CHARACTERS_PER_BYTE
        # A list that holds another list ten times multiplies the values in that by ten, and takes only 20 bytes.
        if taken > max(_VALUES_PER_BYTE * pickle_bytes, _ALWAYS_FINE):
            raise FormatError(f"{source} holds more values, or longer names, than its pickle of {pickle_bytes} B can")

    for name, tensor in flattened(value, met=met):
        if isinstance(tensor, torch.Tensor):
            _check(tensor, records, f"tensor {quoted(name)} of {source}")


def _check(tensor: torch.Tensor, records: Mapping[int, int], what: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise FormatError(f"{what} is sparse or quantized, which a safetensors file cannot hold")
    if not tensor.numel():
        return
    if tensor.is_conj() or tensor.is_neg():
        raise FormatError(f"{what} is a conjugate or negative of its bytes; save it with .resolve_conj().resolve_neg()")
    length = records.get(_offset(tensor), 0)  # the storage itself reports a multiple of that, in torch 2.9
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    if (last + 1) * tensor.dtype.itemsize > length:
        raise FormatError(f"{what} reaches beyond its record of {length} B; damaged?")


def _source_tensor(name: str, tensor: torch.Tensor, file: Path) -> SourceTensor:
    dtype, shape = file_dtype(name, tensor.dtype, tuple(tensor.shape), file)
    return SourceTensor(TensorSpec(name, dtype, shape), pieces(tensor, file, name) if tensor.numel() else ())


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return _offset(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _offset(tensor: torch.Tensor) -> int:
    return int(getattr(tensor.untyped_storage(), "_checkpoint_offset", None) or 0)
