"""Buckets: which gradients are reduced together, their storage, and what is known of their trip.

Scope: assignment by byte cap, flat storages with a view per parameter, records of one step.
Not here: when a bucket is launched (`reducer.py`), the collective and its stream (`launching.py`); times predicted
from a cost model (`plan/buckets.py`).
Owner: the reducer; the thread that runs backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.plan.buckets import form_buckets


def assign_buckets(
    order: Sequence[int], sizes_bytes: Sequence[int], kinds: Sequence[Hashable], first_cap_bytes: int, cap_bytes: int
) -> list[list[int]]:
    """Which parameters share a bucket, by index, in the order in which the buckets are complete.

    A bucket holds one kind; for one kind the boundaries are those of DDP (see `form_buckets`).

    Args:
        order: indices in the order in which gradients come.
        first_cap_bytes: the cap of the first bucket of each kind.
    """
    place = {index: position for position, index in enumerate(order)}
    found: list[list[int]] = []
    for kind in dict.fromkeys(kinds):
        members = [index for index in order if kinds[index] == kind]
        runs = form_buckets([sizes_bytes[index] for index in members], cap_bytes, first_cap_bytes)
        found += [[members[at] for at in run] for run in runs]
    return sorted(found, key=lambda members: place[members[-1]])


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """One bucket in one step; seconds of the reducer's clock.

    Attributes:
        ready_s: when its last gradient was there.
        launched_s: when its collective was started; it may have waited for buckets before it, or for room in flight.
        done_s: when its collective ended. Exact if the reducer is timed; else when it was first seen to have ended.
        exposed_s: how long the end of backward waited for it, after those before it.
    """

    index: int
    nbytes: int
    parameters: tuple[str, ...]
    ready_s: float
    launched_s: float
    done_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One backward that was reduced; seconds of the reducer's clock.

    Attributes:
        last_gradient_s: when the last gradient was made.
        ended_s: when the gradients were all reduced; if delayed, those of the step before.
        order: names of the parameters, as their gradients were made.
    """

    began_s: float
    last_gradient_s: float
    ended_s: float
    order: tuple[str, ...]
    buckets: tuple[BucketRecord, ...]


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced in one collective, and where they are on their way.

    Attributes:
        members: indices of its parameters, in the order of their places.
        flat: the whole bucket; padded to a multiple of the number of ranks if it is scattered.
        shard: what a reduce-scatter leaves at this rank.
        missing: number of gradients that are expected and have not been made.
        work: what was launched: a `Work`, or the future of a hook. On CUDA None once its end is a mark of the stream.
        streams: CUDA streams on which its gradients were made.
        ready_marks, begun_mark, done_mark: CUDA events: gradients ready, collective begun and done.
        wait_marks: CUDA events around the wait of the compute stream, if timed.
    """

    index: int
    members: list[int]
    parameters: list[torch.Tensor]
    flat: torch.Tensor
    views: list[torch.Tensor]
    shard: torch.Tensor | None = None
    is_last: bool = False
    missing: int = 0
    is_ready: bool = False
    work: Any = None
    streams: set[Any] = field(default_factory=set)
    ready_marks: Sequence[Any] = ()
    begun_mark: Any = None
    done_mark: Any = None
    wait_marks: Sequence[Any] = ()
    ready_s: float = 0.0
    launched_s: float = 0.0
    done_s: float | None = None
    exposed_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that its collective moves in and out."""
        return self.flat.nbytes

    def begin(self, missing: int) -> None:
        """A backward begins that makes `missing` of its gradients."""
        self.missing, self.is_ready = missing, False
        self.done_s, self.exposed_s, self.streams = None, 0.0, set()
        self.ready_marks, self.begun_mark, self.wait_marks = (), None, ()


class HookBucket:
    """A bucket as comm hooks know it: the face of `torch.distributed.GradBucket`, which Python cannot construct."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat

    def index(self) -> int:
        """Its place in the order of launches."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """All gradients, flat, not yet averaged."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the place of `buffer()`, for those who read this object later."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer()`, one for each parameter."""
        flat, start = self._buffer, self._bucket.flat.storage_offset()
        return [flat[v.storage_offset() - start :][: v.numel()].view(v.shape) for v in self._bucket.views]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients()`."""
        return self._bucket.parameters

    def is_last(self) -> bool:
        """Whether it is the last bucket of the step."""
        return self._bucket.is_last


class BucketSet:
    """All buckets of a model, with their storages.

    Attributes:
        views: the place of every parameter's gradient, by index.
        home: the bucket of every parameter, by index.
        unfired: parameters without a gradient in the last backward, by index.
        used: the collective that says for which parameters any rank made one, while it runs (see
            `Launcher.start_used`).
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], assignment: Sequence[Sequence[int]], *, pad_to: int, scatter: bool
    ) -> None:
        self.buckets: list[Bucket] = []
        self.views: list[torch.Tensor] = [torch.empty(0)] * len(parameters)
        self.home: list[Bucket] = [None] * len(parameters)  # type: ignore[list-item]
        self.unfired: list[int] = []
        self.used: tuple[torch.Tensor, Any] | None = None
        for index, members in enumerate(assignment):
            bucket = _allocate(index, [(i, parameters[i]) for i in members], pad_to, scatter)
            bucket.is_last = index == len(assignment) - 1
            self.buckets.append(bucket)
            for member, view in zip(members, bucket.views, strict=True):
                self.views[member], self.home[member] = view, bucket

    @property
    def nbytes(self) -> int:
        """The device memory that it takes."""
        shards = [bucket.shard for bucket in self.buckets if bucket.shard is not None]
        return sum(bucket.nbytes for bucket in self.buckets) + sum(shard.nbytes for shard in shards)


def _allocate(index: int, members: Sequence[tuple[int, torch.Tensor]], pad_to: int, scatter: bool) -> Bucket:
    first = members[0][1]
    elements = sum(parameter.numel() for _, parameter in members)
    padded = -(-elements // pad_to) * pad_to if scatter else elements
    flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
    views, start = [], 0
    for _, parameter in members:
        views.append(_view(flat, start, parameter))
        start += parameter.numel()
    shard = flat.new_zeros(padded // pad_to) if scatter else None
    return Bucket(index, [i for i, _ in members], [p for _, p in members], flat, views, shard)


def _view(flat: torch.Tensor, start: int, parameter: torch.Tensor) -> torch.Tensor:
    """The place of one gradient; with the strides of its parameter, so that autograd need not change its layout."""
    if memory_format(parameter) is not torch.contiguous_format:
        return flat.as_strided(parameter.shape, parameter.stride(), start)
    return flat[start : start + parameter.numel()].view(parameter.shape)


def memory_format(parameter: torch.Tensor) -> torch.memory_format:
    """The order of a gradient's elements in its bucket, which must be the same on all ranks."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(parameter.dim())
    if order is None or parameter.is_contiguous() or not parameter.is_contiguous(memory_format=order):
        return torch.contiguous_format
    return order
