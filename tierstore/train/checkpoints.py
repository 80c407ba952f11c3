"""Ordinary safetensors checkpoints, as Hugging Face lays them out, in and out without the model in memory.

Scope: a checkpoint as a source of a model's parameters; writing one whole or not at all.
Not here: files and their tensors (`checkpoint_files.py`), which name goes where (`conversion.py`), headers (`pack/`).
Owner: a `CheckpointSource` holds no file between streams; `write_checkpoint` owns a subdirectory while it runs.

[Note: publishing] Everything is written and synced in a subdirectory first, then renamed, shards to names that nothing
has there. A reader prefers the single file to an index. With an old single file, the new index therefore goes in before
that is removed, and with a new single file the old index is removed after it; an index replaces another one at once. So
a kill or an error at any moment leaves one whole checkpoint. What else a kill leaves is named by the two indexes in the
subdirectory, the new one until it is renamed and a copy of the old one: the next write removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tierstore.archive.dtypes import TORCH_DTYPES, file_dtype
from tierstore.archive.sources import INDEX, SINGLE, small_file, weight_files
from tierstore.errors import ConfigError, FormatError
from tierstore.io.backend import Backend, storage_errors
from tierstore.io.files import make_anew, takes_lock
from tierstore.pack.layout import TensorEntry, build_header, some_of, tensor_bytes
from tierstore.train.capture import persistent_buffers
from tierstore.train.checkpoint_files import CheckpointFiles, Stored, stored_tensors
from tierstore.train.conversion import Recipe, recipes
from tierstore.train.filling import PIECE_ELEMENTS, Piece

MAX_SHARD_BYTES = 5 * 10**9
_UNFINISHED = ".checkpoint-unfinished"
_OLD_INDEX = "old-" + INDEX
_SHARD = re.compile(r"model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")
_QUANTIZED = "quantized weights cannot be trained"


@dataclass(frozen=True, slots=True)
class _Plan:
    parameters: frozenset[str]
    stored: dict[str, Stored]
    direct: list[tuple[str, str]]  # (name in the model, name in the checkpoint), in file order
    converted: list[Recipe]
    unexpected: tuple[str, ...]


class CheckpointSource:
    """The values of a model's parameters and persistent buffers in a directory of safetensors.

    Names may differ as transformers lets them: the base model's prefix there or not, a tied weight under any of its
    names, and whatever its tables convert on loading. A converted tensor is read whole, with all that it is made of;
    others in pieces of 2**20 elements.

    Args:
        model: has the parameters to fill, on any device, and real buffers. Files are first read by `names`,
            `unexpected` or `stream`.
    """

    def __init__(self, directory: str | os.PathLike[str], model: nn.Module) -> None:
        self._directory = Path(directory)
        self._model = model
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._canonical = {alias: names[held] for alias, held in model.named_parameters(remove_duplicate=False)}
        self._buffers = persistent_buffers(model)
        tensors = {name: parameter for parameter, name in names.items()} | self._buffers
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._floating = {name for name, tensor in tensors.items() if _is_float(tensor.dtype)}

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Stored tensors that the model has no use for (a tied weight that is stored twice counts once)."""
        return self._plan.unexpected

    def names(self) -> set[str]:
        """All parameters of the model.

        Raises:
            FormatError: tensors are missing or have another shape, or the files are not safetensors.
            StorageError: a file cannot be read.
        """
        return set(self._plan.parameters)

    def stream(self) -> Iterator[Piece]:
        """All parameters in pieces, in the dtype that is stored, in file order; fills the persistent buffers.

        Raises:
            As `names`.
        """
        plan = self._plan
        with contextlib.ExitStack() as stack:
            files = CheckpointFiles(stack)
            for name, source in plan.direct:
                yield from self._deliver(name, files.pieces(plan.stored[source]))
            for recipe in plan.converted:
                cooked = recipe.cook(self._model, lambda name: files.whole(plan.stored[name]))
                for target in recipe.targets:
                    name, values = self._canonical.get(target, target), cooked.pop(target, None)
                    shape = None if values is None else list(values.shape)
                    if values is None or tuple(values.shape) != self._shapes[name]:
                        raise self._misfit([f"{name}: {shape} converted, {list(self._shapes[name])} in the model"])
                    if name in self._floating and not _is_float(values.dtype):
                        raise self._misfit([f"{name}: {values.dtype} converted, and {_QUANTIZED}"])
                    yield from self._deliver(name, _cut(values.reshape(-1)))

    @cached_property
    def _plan(self) -> _Plan:
        stored = stored_tensors(self._directory)
        found, unused = recipes(self._model, stored)
        # First the canonical name of a tied weight, then its others: the first one found is taken.
        found.sort(key=lambda recipe: recipe.targets[0] in self._canonical.values(), reverse=True)
        filled: set[str] = set()
        direct: list[tuple[str, str]] = []
        problems: list[str] = []
        converted = []
        for recipe in found:
            names = [self._canonical.get(target, target) for target in recipe.targets]
            if not filled.isdisjoint(names):
                unused += recipe.sources
            elif recipe.converter is not None:
                converted.append(recipe)
            elif names[0] in self._shapes:
                direct.append((names[0], recipe.sources[0]))
                shape, wanted = stored[recipe.sources[0]].shape, self._shapes[names[0]]
                if shape != wanted:
                    problems.append(f"{names[0]}: {list(shape)} in the checkpoint, {list(wanted)} in the model")
                dtype = stored[recipe.sources[0]].dtype
                if names[0] in self._floating and dtype in TORCH_DTYPES and not _is_float(TORCH_DTYPES[dtype]):
                    problems.append(f"{names[0]}: {dtype} in the checkpoint, and {_QUANTIZED}")
            filled.update(names)
        problems += [
            f"{name}: missing, {list(shape)} in the model"
            for name, shape in self._shapes.items()
            if name not in filled and not self._may_miss(name)
        ]
        if problems:
            raise self._misfit(problems)
        if meta := [name for name, buffer in self._buffers.items() if buffer.is_meta]:
            raise ConfigError(f"{len(meta)} buffers are on the meta device, first {meta[0]!r}: build with deferred()")
        direct.sort(key=lambda item: (stored[item[1]].path, stored[item[1]].begin))
        return _Plan(frozenset(self._canonical.values()), stored, direct, converted, tuple(sorted(unused)))

    def _deliver(self, name: str, pieces: Iterator[tuple[int, torch.Tensor]]) -> Iterator[Piece]:
        buffer = self._buffers.get(name)
        for offset, values in pieces:
            if buffer is None:
                yield Piece(name, offset, values)
            else:
                _put(buffer, offset, values)

    def _may_miss(self, name: str) -> bool:
        patterns = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        return name in self._buffers and any(re.search(pattern, name) for pattern in patterns)

    def _misfit(self, problems: Sequence[str]) -> FormatError:
        return FormatError(f"{self._directory} does not fit the model, {len(problems)} tensors: {some_of(problems)}")


def _is_float(dtype: torch.dtype) -> bool:
    """Whether torch converts it to other floats, which it does not with pairs of 4-bit ones."""
    return dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2


def _cut(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for start in range(0, values.numel(), PIECE_ELEMENTS):
        yield start, values[start : start + PIECE_ELEMENTS]


@torch.no_grad()
def _put(buffer: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    if buffer.is_contiguous():
        buffer.view(-1)[offset : offset + values.numel()] = values
    else:
        whole = buffer.reshape(-1)
        whole[offset : offset + values.numel()] = values
        buffer.copy_(whole.view(buffer.shape))


class TensorOut(NamedTuple):
    """A tensor to write.

    Attributes:
        pieces: its values in order, in its dtype; begun when the tensor's turn comes, which is after all tensors were
            listed: what they need must not be a variable that the list changes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Iterable[torch.Tensor]


def write_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Iterable[TensorOut],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    backend: Backend | None = None,
) -> None:
    """Writes `model.safetensors`, or shards and their index if that would be larger than a shard.

    An older checkpoint in the directory is replaced; other files stay. Inside a shard wider dtypes come first, so that
    all are aligned. Memory: one piece.

    Args:
        tensors: listed at once, for a header comes before its data; a tied weight once, under one of its names.
        max_shard_bytes: a tensor that is larger gets a shard of its own.

    Raises:
        ConfigError: a name stands twice, or another process writes there; nothing was changed.
        FormatError: a file cannot hold a dtype, or the pieces of a tensor are not as many elements as its shape, or of
            another dtype; likewise.
        StorageFull, StorageError: likewise, or all was written and something old is left: see [Note: publishing].
    """
    target, backend = Path(directory), Backend() if backend is None else backend
    shards = _shards(list(tensors), max_shard_bytes)
    backend.make_directories(target)
    with _locked(target):
        _write(target, shards, backend)


def _write(target: Path, shards: Sequence[Sequence[TensorOut]], backend: Backend) -> None:
    unfinished = target / _UNFINISHED
    _clear_leftovers(unfinished, target, backend)
    make_anew(unfinished, backend)
    try:
        names = [SINGLE] if len(shards) == 1 else _new_names(target, len(shards))
        for name, shard in zip(names, shards, strict=True):
            _write_shard(unfinished / name, shard, backend)
        if len(shards) > 1:
            files = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total_bytes = sum(_nbytes(tensor) for shard in shards for tensor in shard)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
            with _File(unfinished / INDEX, 0, backend) as file:
                file.write(json.dumps(index, indent=2, ensure_ascii=False).encode())
        replaced = _publish(unfinished, target, names, backend)
    except BaseException:
        if (unfinished / INDEX).exists() or not (unfinished / _OLD_INDEX).exists():  # else the new one has its place
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    backend.sync_directory(target)  # what ends this, or what follows, leaves the subdirectory: it tells the next write
    for name in replaced:
        if (target / name).is_file():
            backend.remove(target / name)
    backend.sync_directory(target)
    shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One write at a time: each would take what the other has not finished for leftovers."""
    with storage_errors("lock", directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not takes_lock(descriptor):
            raise ConfigError(f"another process writes to {directory}; wait for it, or give another one")
        yield
    finally:
        os.close(descriptor)


def _new_names(target: Path, count: int) -> list[str]:
    """Names of shards that nothing has; those that everybody uses, where the directory holds no shards."""
    stems = itertools.chain(["model"], (f"model-{number:08x}" for number in itertools.count(1)))
    tries = ([f"{stem}-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)] for stem in stems)
    return next(names for names in tries if not any(os.path.lexists(target / name) for name in names))


def _clear_leftovers(unfinished: Path, target: Path, backend: Backend) -> None:
    """See [Note: publishing]."""
    if unfinished.is_symlink():
        return
    current = _named(target / INDEX)
    renamed = {name for name in _named(unfinished / INDEX) if not (unfinished / name).exists()}
    replaced = _named(unfinished / _OLD_INDEX) if current else set()
    for name in (set(filter(_SHARD.fullmatch, renamed)) | replaced) - current:
        if (target / name).is_file():
            backend.remove(target / name)


def _named(index: Path) -> set[str]:
    """The shards that an index names; none if there is none that can be read."""
    with contextlib.suppress(FormatError):
        return weight_files(index) if index.is_file() else set()
    return set()


def _shards(tensors: Sequence[TensorOut], max_shard_bytes: int) -> list[list[TensorOut]]:
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"tensor {twice!r} is to be written twice")
    shards: list[list[TensorOut]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if shards[-1] and size_bytes + nbytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += nbytes
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _nbytes(tensor: TensorOut) -> int:
    return tensor_bytes(tensor.name, *file_dtype(tensor.name, tensor.dtype, tensor.shape))


def _write_shard(path: Path, shard: Sequence[TensorOut], backend: Backend) -> None:
    entries, position = [], 0
    for tensor in shard:
        end = position + _nbytes(tensor)
        entries.append(TensorEntry(tensor.name, *file_dtype(tensor.name, tensor.dtype, tensor.shape), position, end))
        position = end
    header = build_header(entries, {"format": "pt"})
    with _File(path, len(header) + position, backend) as file:
        file.write(header)
        for tensor, entry in zip(shard, entries, strict=True):
            written = 0
            for piece in tensor.pieces:
                if piece.dtype != tensor.dtype:
                    raise FormatError(f"tensor {tensor.name!r}: {piece.dtype} was given for {tensor.dtype}")
                values = piece.detach().to("cpu").reshape(-1).contiguous()
                written += values.nbytes
                if written <= entry.end - entry.begin:
                    file.write(values.view(torch.uint8).numpy().data)
            if written != entry.end - entry.begin:
                count = written // tensor.dtype.itemsize
                raise FormatError(f"tensor {tensor.name!r}: {count} elements were given for shape {list(tensor.shape)}")


class _File:
    """A new file, written from start to end; durable when the block ends without an error."""

    def __init__(self, path: Path, size_bytes: int, backend: Backend) -> None:
        self._path, self._size_bytes, self._backend = path, size_bytes, backend
        self._descriptor = -1

    def __enter__(self) -> _File:
        with storage_errors(f"allocation of {self._size_bytes} B", self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                if self._size_bytes:
                    os.posix_fallocate(self._descriptor, 0, self._size_bytes)
            except OSError:
                os.close(self._descriptor)
                raise
        return self

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        with storage_errors(f"write of {len(left)} B", self._path):
            while len(left):
                left = left[os.write(self._descriptor, left) :]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._backend.fsync_file(self._descriptor, self._path)
        finally:
            os.close(self._descriptor)


def _take_back(path: Path, index: Path) -> None:
    if index.exists():  # else it has its place, and names this
        with contextlib.suppress(OSError):  # the first error is the one to tell
            path.unlink(missing_ok=True)


def _publish(unfinished: Path, target: Path, names: Sequence[str], backend: Backend) -> list[str]:
    """See [Note: publishing]. Returns what is to be removed then, in this order."""
    stale = sorted(_named(target / INDEX) - set(names))
    if list(names) == [SINGLE]:
        backend.replace(unfinished / SINGLE, target / SINGLE)
        return [*stale, INDEX]
    if stale:
        content = small_file(target / INDEX)
        with _File(unfinished / _OLD_INDEX, 0, backend) as file:
            file.write(content)
    with contextlib.ExitStack() as undo:
        for name in names:
            undo.callback(_take_back, target / name, unfinished / INDEX)
            backend.replace(unfinished / name, target / name)
        backend.sync_directory(target)
        backend.replace(unfinished / INDEX, target / INDEX)
        undo.pop_all()
    return [SINGLE, *stale]
