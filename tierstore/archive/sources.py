"""Checkpoints as lists of tensors and the places of their bytes in files.

Scope: what a path holds; safetensors files, sharded with an index or not. Reads headers, never data.
Not here: files of torch (`torch_files.py`, `distributed.py`, imported when a path is one), reading data (`gather.py`).
Owner: none; plain records.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierstore.archive.index import is_of_pack
from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.io.backend import storage_errors
from tierstore.pack.archive import ARCHIVE_KEY
from tierstore.pack.checked import file_name_of, list_of
from tierstore.pack.layout import MAX_HEADER_BYTES, PAD_KEY, SEAL_KEY, TensorSpec, check_name, quoted
from tierstore.pack.strict_json import parse_json
from tierstore.pack.validate import Header, opened_at_once, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PARTIAL = ".partial"
TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_TORCH_SINGLE, _TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DISTRIBUTED = ".metadata"


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file."""

    path: Path
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor whose bytes, in row-major order, are `pieces` one after the other."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Source:
    """A checkpoint.

    Attributes:
        kind: what it is, in words for the user.
        aliases: further names of tensors, each with the name that its tensor has in `tensors`.
        config: Hugging Face's config.json beside it; None: there is none; {}: it holds no object.
        metadata: metadata of its headers.
        left_out: names of values that are no tensors, and so go into no pack.
        nested: keys of the containers in it that hold tensors, whose names begin with these keys.
    """

    path: Path
    kind: str
    tensors: dict[str, SourceTensor]
    aliases: dict[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()

    def below(self, key: str) -> Source:
        """The part below a key, which is cut off the names: `state_dict.head.weight` becomes `head.weight`.

        Raises:
            ConfigError: no tensor lies below it.
        """
        begin = f"{key.removesuffix('.')}."
        tensors: dict[str, SourceTensor] = {}
        aliases: dict[str, str] = {}
        own_names: dict[str, str] = {}  # the first name of each tensor below the key, perhaps an alias of one outside
        names = (*self.tensors, *self.aliases)
        for name in filter(lambda name: name.startswith(begin), names):
            own, first = name.removeprefix(begin), self.aliases.get(name, name)
            if first in own_names:
                aliases[own] = own_names[first]
            else:
                own_names[first] = own
                tensors[own] = replace(self.tensors[first], spec=replace(self.tensors[first].spec, name=own))
        if not tensors:
            keys = Counter(name.partition(".")[0] for name in names if "." in name)
            found = ", ".join(f"{quoted(one)} ({count})" for one, count in keys.most_common(5))
            told = f"no tensor of {self.path} lies below {quoted(key)}"
            raise ConfigError(f"{told}; some do below {found}" if found else told)
        left_out = tuple(name.removeprefix(begin) for name in self.left_out if name.startswith(begin))
        return replace(self, tensors=tensors, aliases=aliases, left_out=left_out, nested=())


def open_source(path: Path) -> Source:
    """The checkpoint at `path`: a file, or a directory as Hugging Face or torch's distributed checkpoint writes it.

    Raises:
        StorageError: there is no such file, or it cannot be read.
        FormatError: it is no checkpoint, or a damaged one.
    """
    if not path.exists():
        raise StorageError(f"there is no {path}")
    refuse_unfinished(path)
    if path.is_dir():
        return _directory(path)
    if path.suffix in TORCH_SUFFIXES:
        from tierstore.archive.torch_files import torch_source

        return torch_source(path, {path: ()}, _config(path.parent))
    return _safetensors_source(path, {path: read_header(path)}, "safetensors file")


def is_pack(directory: Path) -> bool:
    """Whether the safetensors checkpoint in a directory is a pack, of one file or of several.

    Raises:
        FormatError, StorageError: its header or its index cannot be read.
    """
    if (directory / SINGLE).is_file():
        return ARCHIVE_KEY in read_header(directory / SINGLE).metadata
    index = directory / INDEX
    return index.is_file() and is_of_pack(parse_json(small_file(index), str(index)))


def _directory(path: Path) -> Source:
    if (path / SINGLE).is_file():
        return _safetensors_source(path, {path / SINGLE: read_header(path / SINGLE)}, "safetensors checkpoint")
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / _DISTRIBUTED).is_file():
        from tierstore.archive.distributed import distributed_source

        return distributed_source(path)
    for name, is_index in ((_TORCH_SINGLE, False), (_TORCH_INDEX, True)):
        if (path / name).is_file():
            from tierstore.archive.torch_files import torch_source

            files = _named_files(path / name) if is_index else {path / name: ()}
            return torch_source(path, files, _config(path))
    raise FormatError(
        f"{path} holds no checkpoint: none of {SINGLE}, {INDEX}, {_TORCH_SINGLE}, {_TORCH_INDEX} and {_DISTRIBUTED}"
    )


def _indexed(path: Path) -> Source:
    if is_pack(path):  # before its files are looked at: a striped one may lack some, one with a codec all tensors
        raise _is_a_pack(path)
    headers = {file: header for file, header, _ in indexed_files(path)}
    if not headers:
        raise FormatError(f"{path / INDEX} names no tensors")
    return _safetensors_source(path, headers, f"safetensors checkpoint in {len(headers)} shards")


def indexed_files(directory: Path) -> Iterator[tuple[Path, Header, list[str]]]:
    """The files of a safetensors index, each with its header and the names of the tensors that the index puts there.

    Raises:
        FormatError: a file is missing, or a tensor in it; or it is a pack.
        StorageError: a file cannot be read.
    """
    for path, names in _named_files(directory / INDEX).items():
        header = read_header(path)
        if ARCHIVE_KEY in header.metadata:
            raise _is_a_pack(path)
        refuse_absent(path, names, header.tensors)
        yield path, header, names


def _named_files(index: Path) -> dict[Path, list[str]]:
    """The files of an index, in order, each with the names of the tensors that it puts there.

    Raises:
        FormatError: a file is missing.
    """
    by_file: dict[Path, list[str]] = {}
    files = _weight_map(parse_json(small_file(index), str(index)), index)
    for name, file in sorted(files.items(), key=lambda item: item[1]):
        by_file.setdefault(index.parent / file, []).append(name)
    for path in by_file:
        with storage_errors("inspection", path):
            is_there = path.exists()
        if not is_there:
            raise FormatError(f"{path} is missing: {index.name} names it")
    return by_file


def refuse_absent(path: Path, names: Iterable[str], held: Container[str]) -> None:
    """Refuse a file that lacks tensors that its index puts there.

    Raises:
        FormatError: names the first of them.
    """
    if absent := [name for name in names if name not in held]:
        raise FormatError(f"{path} lacks {len(absent)} tensors that the index puts there: {quoted(absent[0])}")


def _safetensors_source(path: Path, headers: Mapping[Path, Header], kind: str) -> Source:
    tensors: dict[str, SourceTensor] = {}
    metadata: dict[str, str] = {}
    for file, header in headers.items():
        if ARCHIVE_KEY in header.metadata:
            raise _is_a_pack(file)
        for name, entry in header.tensors.items():
            if name in tensors:
                raise FormatError(f"tensor {quoted(name)} stands in two files of {path}; one of them is {file.name}")
            piece = Piece(file, header.data_start + entry.begin, entry.end - entry.begin)
            tensors[name] = SourceTensor(TensorSpec(name, entry.dtype, entry.shape), (piece,))
        metadata |= own_metadata(header.metadata)
    return Source(path, kind, tensors, config=_config(path if path.is_dir() else path.parent), metadata=metadata)


def _is_a_pack(path: Path) -> FormatError:
    return FormatError(f"{path} is a pack; unpack it first, or use it as it is")


def own_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata without the keys of tierstore."""
    return {key: value for key, value in metadata.items() if key not in (ARCHIVE_KEY, PAD_KEY, SEAL_KEY)}


def _weight_map(content: Any, path: Path) -> dict[str, str]:
    """File name by tensor name, from an index.

    Raises:
        FormatError: it is not such an index.
    """
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise FormatError(f"{path}: no weight_map of names to files")
    for name, file in files.items():
        check_name(name)
        file_name_of(file, f"{path}: the file of {quoted(name)}")
    return files


def weight_files(path: Path) -> set[str]:
    """The safetensors files that an index names, for removal: an index may name anything else in its directory, too.

    The index of a pack also names those of its files that hold no tensor.

    Raises:
        FormatError: it is not such an index.
    """
    content = parse_json(small_file(path), str(path))
    files, metadata = set(_weight_map(content, path).values()), content.get("metadata")
    if isinstance(metadata, dict) and "files" in metadata:
        files.update(file_name_of(file, f"{path}: a file") for file in list_of(metadata["files"], f"{path}: files"))
    return {file for file in files if file.endswith(".safetensors")}


def _config(directory: Path) -> Mapping[str, Any] | None:
    """The configuration beside a checkpoint, which only decides the order; {} if its file holds no object."""
    path = directory / CONFIG
    if not path.is_file():
        return None
    text = small_file(path)
    try:
        content = parse_json(text, str(path))
    except FormatError:
        content = None
    return content if isinstance(content, dict) else {}


def refuse_unfinished(path: Path) -> None:
    """Refuse a file that somebody is writing, or did not finish.

    Raises:
        FormatError: its name says so.
    """
    if path.name.endswith(PARTIAL) and path.is_file():
        raise FormatError(f"{path} is not finished; if nobody writes it now, write it again")


def small_file(path: Path, most_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """All bytes of a file that is read whole before it is parsed.

    Raises:
        FormatError: it is larger than any file of its kind, even if it consists of holes.
        StorageError: it cannot be read.
    """
    with storage_errors("read", path), opened_at_once(path) as file:
        data = file.read(min(os.fstat(file.fileno()).st_size, most_bytes + 1))
    if len(data) > most_bytes:
        raise FormatError(f"{path} has more than {most_bytes} B, which no such file needs")
    return data
