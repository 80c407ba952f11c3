"""Ordinary safetensors checkpoints, as Hugging Face lays them out, read and written without the model in memory.

Scope: a checkpoint as a source of a model's parameters; writing one whole or not at all.
Not here: files and their tensors (`checkpoint_files.py`), which name goes where (`conversion.py`), how written files
    are published (`archive/publish.py`).
Owner: a `CheckpointSource` holds no file open between streams.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from tierstore.archive.dtypes import TORCH_DTYPES, file_dtype
from tierstore.archive.publish import Publication
from tierstore.archive.shards import Shard, index_of, shards_of
from tierstore.archive.sources import SINGLE
from tierstore.caller import warn_caller
from tierstore.errors import CheckpointWarning, ConfigError, FormatError
from tierstore.io.backend import Backend
from tierstore.pack.layout import TensorSpec, listed, some_of, tensor_bytes
from tierstore.train.capture import persistent_buffers, writable
from tierstore.train.checkpoint_files import CheckpointFiles, Stored, stored_tensors
from tierstore.train.conversion import Recipe, recipes
from tierstore.train.filling import BuiltSource, Piece, in_pieces

MAX_SHARD_BYTES = 5 * 10**9
_QUANTIZED = "quantized weights cannot be trained"


@dataclass(frozen=True, slots=True)
class _Plan:
    parameters: frozenset[str]
    stored: dict[str, Stored]
    direct: list[tuple[str, Stored]]  # by name in the model, in file order
    converted: list[Recipe]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class CheckpointSource(BuiltSource):
    """The values of a model's parameters and persistent buffers in a directory of safetensors, perhaps a pack.

    Names may differ as transformers allows: with or without the base model's prefix, a tied weight under any of its
    names, and whatever transformers' tables convert on loading. For a converted tensor all that it is made of is read
    whole; other tensors are read in pieces of 2**20 elements.

    Args:
        model: has the parameters to fill, on any device, and real buffers. Files are first read by `names`,
            `unexpected` or `stream`.
        rest: gives the parameters of the names that the checkpoint lacks; missing buffers stay as they are. None: a
            missing tensor is an error.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        rest: Callable[[Container[str]], Iterator[Piece]] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._model = model
        self._rest = rest
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._canonical = {alias: names[held] for alias, held in model.named_parameters(remove_duplicate=False)}
        # No buffer itself is kept: converting the model, as by `model.bfloat16()`, makes new ones.
        tensors = {name: parameter for parameter, name in names.items()} | persistent_buffers(model)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._floating = {name for name, tensor in tensors.items() if _is_float(tensor.dtype)}

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Stored tensors that the model has no place for."""
        return self._plan.unexpected

    def names(self) -> set[str]:
        """All parameters of the model.

        Raises:
            FormatError: tensors are missing, quantized or have another shape, or the files are not safetensors, or a
                damaged pack.
            StorageError: a file cannot be read.
        """
        return set(self._plan.parameters)

    def stream(self) -> Iterator[Piece]:
        """All parameters in pieces, in the stored dtype; fills the persistent buffers.

        In file order, then those that are converted, then those of `rest`.

        Raises:
            As `names`.
        Warns:
            CheckpointWarning: names `unexpected` tensors, and those that the checkpoint lacks.
        """
        plan = self._plan
        told = []
        if plan.unexpected:
            told.append(f"holds {listed(plan.unexpected)}, for which the model has no place: not used")
        if plan.missing:
            told.append(f"lacks {listed(plan.missing)}: as the model is built")
        if told:
            warn_caller(f"the checkpoint in {self._directory} {'; and '.join(told)}", CheckpointWarning)
        buffers = persistent_buffers(self._model)
        with contextlib.closing(CheckpointFiles()) as files:
            for name, tensor in plan.direct:
                yield from self._deliver(buffers, name, files.pieces(tensor))
            for recipe in plan.converted:
                cooked = recipe.cook(self._model, lambda name: files.whole(plan.stored[name]))
                for target in recipe.targets:
                    name, values = self._canonical.get(target, target), cooked.pop(target, None)
                    shape = None if values is None else list(values.shape)
                    if values is None or tuple(values.shape) != self._shapes[name]:
                        raise self._misfit([f"{name}: {shape} converted, {list(self._shapes[name])} in the model"])
                    if name in self._floating and not _is_float(values.dtype):
                        raise self._misfit([f"{name}: {values.dtype} converted, and {_QUANTIZED}"])
                    yield from self._deliver(buffers, name, in_pieces(values.reshape(-1)))
        if plan.missing and self._rest is not None:
            yield from self._rest(plan.missing)

    @cached_property
    def _plan(self) -> _Plan:
        stored = stored_tensors(self._directory)
        found, unused = recipes(self._model, stored)
        # First the canonical name of a tied weight, then its others: the first one found is taken.
        found.sort(key=lambda recipe: recipe.targets[0] in self._shapes, reverse=True)
        filled: set[str] = set()
        direct: list[tuple[str, Stored]] = []
        problems: list[str] = []
        converted = []
        for recipe in found:
            names = [self._canonical.get(target, target) for target in recipe.targets]
            if not filled.isdisjoint(names):  # a tied weight that is stored twice
                continue
            if recipe.converter is not None:
                converted.append(recipe)
            elif names[0] in self._shapes:
                tensor = stored[recipe.sources[0]]
                direct.append((names[0], tensor))
                problems += self._problems_of(names[0], tensor)
            filled.update(names)
        missing = tuple(name for name in self._shapes if name not in filled and not self._may_miss(name))
        if self._rest is None or not (direct or converted):
            problems += [f"{name}: missing, {list(self._shapes[name])} in the model" for name in missing]
        if problems:
            raise self._misfit(problems)
        if meta := [name for name, buffer in persistent_buffers(self._model).items() if buffer.is_meta]:
            raise ConfigError(f"{len(meta)} buffers are on the meta device, first {meta[0]!r}: build with deferred()")
        direct.sort(key=lambda item: item[1].place)
        buffers = {name for name, _ in self._model.named_buffers()}
        unexpected = tuple(sorted(name for name in unused if self._is_strange(name, buffers)))
        return _Plan(frozenset(self._canonical.values()), stored, direct, converted, missing, unexpected)

    def _problems_of(self, name: str, tensor: Stored) -> Iterator[str]:
        """Why a stored tensor cannot fill this tensor of the model."""
        shape, wanted, dtype = tensor.shape, self._shapes[name], tensor.dtype
        if shape != wanted:
            yield f"{name}: {list(shape)} in the checkpoint, {list(wanted)} in the model"
        if name in self._floating and dtype in TORCH_DTYPES and not _is_float(TORCH_DTYPES[dtype]):
            yield f"{name}: {dtype} in the checkpoint, and {_QUANTIZED}"

    def _deliver(
        self, buffers: Mapping[str, torch.Tensor], name: str, pieces: Iterator[tuple[int, torch.Tensor]]
    ) -> Iterator[Piece]:
        buffer = buffers.get(name)
        for offset, values in pieces:
            if buffer is None:
                yield Piece(name, offset, values)
            else:
                _put(buffer, offset, values)

    def _may_miss(self, name: str) -> bool:
        return name not in self._canonical and self._ignores("missing", name)

    def _is_strange(self, name: str, buffers: Container[str]) -> bool:
        """Whether an unused tensor is worth a warning. Not recomputed buffers, which older models have stored."""
        is_computed = name in buffers or name.endswith("rotary_emb.inv_freq")
        return not (is_computed or self._ignores("unexpected", name))

    def _ignores(self, what: str, name: str) -> bool:
        """Whether the model, one of transformers', says that such a name does not matter."""
        patterns = getattr(self._model, f"_keys_to_ignore_on_load_{what}", None) or ()
        return any(re.search(pattern, name) for pattern in patterns)

    def _misfit(self, problems: Sequence[str]) -> FormatError:
        return FormatError(f"{self._directory} does not fit the model, {len(problems)} tensors: {some_of(problems)}")


def _is_float(dtype: torch.dtype) -> bool:
    """Whether its numbers are values by themselves; those of 8 bits, and pairs of 4, are so only with their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


@torch.no_grad()
def _put(buffer: torch.Tensor, offset: int, values: torch.Tensor) -> None:
    if writable(buffer).is_contiguous():
        buffer.view(-1)[offset : offset + values.numel()] = values
    else:
        whole = buffer.reshape(-1)
        whole[offset : offset + values.numel()] = values
        buffer.copy_(whole.view(buffer.shape))


class TensorOut(NamedTuple):
    """A tensor to write.

    Attributes:
        pieces: its values in order, in its dtype. They are read when the tensor's turn comes, after all tensors were
            listed: they must not depend on a loop variable that listing changes.
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
    """Writes `model.safetensors`, or shards and their index if that file would be larger than a shard.

    An older checkpoint in the directory is replaced; other files stay. Inside a shard wider dtypes come first, so that
    all are aligned. Memory: one piece. See `archive/publish.py`, [Note: publication].

    Args:
        tensors: all are listed first, because a header comes before its data; a tied weight once, under one name.
        max_shard_bytes: a tensor that is larger gets a shard of its own.

    Raises:
        ConfigError: a name is given twice, or another process writes there; nothing was changed.
        FormatError: a file cannot hold a dtype, or the pieces of a tensor do not have the number of elements of its
            shape, or have another dtype; nothing was changed.
        DoneButFor: all was written, but is not known to be durable, or something old is left.
        StorageFull, StorageError: nothing was changed.
    """
    target, backend = Path(directory), Backend() if backend is None else backend
    listed: dict[str, TensorOut] = {}
    for tensor in tensors:
        if tensor.name in listed:
            raise ConfigError(f"tensor {tensor.name!r} is to be written twice")
        listed[tensor.name] = tensor
    specs = [TensorSpec(one.name, *file_dtype(one.name, one.dtype, one.shape)) for one in listed.values()]
    shards = shards_of(specs, {"format": "pt"}, max_shard_bytes)
    destination = target / SINGLE if len(shards) == 1 else [target]
    with Publication(destination, len(shards), backend, overwrite=True) as publication:
        publication.begin([shard.file_bytes for shard in shards])
        for path, shard in zip(publication.temporaries, shards, strict=True):
            _write_shard(path, shard, listed, backend)
        names = _new_names(target, len(shards))
        publication.commit(names, index_of(shards, names))


def _new_names(target: Path, count: int) -> list[str]:
    """Names of shards that no file has; the usual names, if no file in the directory has one of them."""
    stems = itertools.chain(["model"], (f"model-{number:08x}" for number in itertools.count(1)))
    tries = ([f"{stem}-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)] for stem in stems)
    return next(names for names in tries if not any(os.path.lexists(target / name) for name in names))


def _write_shard(path: Path, shard: Shard, tensors: Mapping[str, TensorOut], backend: Backend) -> None:
    with contextlib.closing(backend.open(path, writable=True, direct=False, is_counted=False)) as file:
        file.write_from(np.frombuffer(shard.header, np.uint8), 0)
        for name, begin in shard.places.items():
            tensor, written = tensors[name], 0
            nbytes = tensor_bytes(name, *file_dtype(name, tensor.dtype, tensor.shape))
            for piece in tensor.pieces:
                if piece.dtype != tensor.dtype:
                    raise FormatError(f"tensor {name!r}: {piece.dtype} was given for {tensor.dtype}")
                values = piece.detach().to("cpu").resolve_conj().resolve_neg().reshape(-1).contiguous()
                if written + values.nbytes <= nbytes:
                    file.write_from(values.view(torch.uint8).numpy(), begin + written)
                written += values.nbytes
            if written != nbytes:
                count = written // tensor.dtype.itemsize
                raise FormatError(f"tensor {name!r}: {count} elements were given for shape {list(tensor.shape)}")
        file.datasync()
