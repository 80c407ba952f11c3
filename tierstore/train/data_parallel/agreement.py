"""Ranks that begin alike: the same model and options everywhere, and rank 0's values.

Scope: comparison of names, shapes and options across ranks; broadcasts, coalesced.
Not here: gradients (`reducer.py`).
Owner: nothing here has state; all ranks call each function together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from tierstore.errors import ConfigError
from tierstore.pack.layout import some_of
from tierstore.train.data_parallel.buckets import memory_format
from tierstore.train.ranks import Ranks

_BROADCAST_BYTES = 64 * 2**20  # of one broadcast: bounds the copy that it takes


def described(module: nn.Module) -> dict[str, str]:
    """Every parameter and buffer of a module by name: what must be the same on all ranks."""
    lines = {f"parameter {name}": _described(p, p.requires_grad) for name, p in module.named_parameters()}
    return lines | {f"buffer {name}": _described(b, False) for name, b in module.named_buffers()}


def check_same(ranks: Ranks, lines: Mapping[str, str]) -> None:
    """Check that all ranks have the same lines, in the same order.

    Raises:
        ConfigError: they do not; raised on every rank, naming what differs from rank 0 and where.
        RankLost: a rank did not come.
    """
    digest = hashlib.sha256(repr(list(lines.items())).encode()).hexdigest()
    if len(set(ranks.exchange("the comparison of models", digest))) == 1:
        return
    everything = ranks.exchange("the comparison of models", dict(lines))
    found = [line for rank, theirs in enumerate(everything) for line in _differences(everything[0], theirs, rank)]
    raise ConfigError(f"the ranks differ: {some_of(found)}")


def broadcast_flat(ranks: Ranks, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Give all ranks rank 0's values, in one broadcast per dtype and device (and per 64 MiB).

    Raises:
        RankLost: a rank did not come.
    """
    with ranks.waiting(what), torch.no_grad():
        begun = []
        for batch in _batches(tensors):
            if ranks.rank == 0:
                flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            else:
                flat = batch[0].new_empty(sum(tensor.numel() for tensor in batch))
            data = flat.view(torch.uint8)  # each backend refuses some other dtypes
            work: Any = distributed.broadcast(data, group=ranks.group, group_src=0, async_op=True)
            begun.append((batch, flat, work))
        for batch, flat, work in begun:
            work.wait()
            if ranks.rank != 0:
                parts = torch.split(flat, [tensor.numel() for tensor in batch])
                for tensor, part in zip(batch, parts, strict=True):
                    tensor.data.copy_(part.view(tensor.shape))  # as DDP: graphs that have saved it do not notice


def _described(tensor: torch.Tensor, is_trained: bool) -> str:
    said = f"{tuple(tensor.shape)} {tensor.dtype}"
    if is_trained:
        order = memory_format(tensor)  # others are reduced and sent in the order of their elements, whatever that is
        said += " trained" if order is torch.contiguous_format else f" trained in {order}"
    return said.replace("torch.", "")


def _differences(first: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> Iterator[str]:
    for name in {**first, **theirs}:  # in an order that is the same in every process
        ours, other = first.get(name, "missing"), theirs.get(name, "missing")
        if ours != other:
            yield f"{name} is {other} on rank {rank}, {ours} on rank 0"
    if first == theirs and list(first) != list(theirs):
        yield f"rank {rank} registers the same parameters in another order than rank 0"


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device, at most 64 MiB together unless one alone is larger."""
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    filled_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if filling.get(kind) and filled_bytes[kind] + tensor.nbytes > _BROADCAST_BYTES:
            yield filling.pop(kind)
        if kind not in filling:
            filling[kind], filled_bytes[kind] = [], 0
        filling[kind].append(tensor)
        filled_bytes[kind] += tensor.nbytes
    yield from filling.values()
