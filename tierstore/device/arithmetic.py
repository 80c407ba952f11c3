"""Computation on bytes that stay on a device: collecting gradients, summing their squares, updating weights.

Scope: the CPU twin and CUDA.
Not here: the kernels (`kernels/`, for CUDA `device/gpu_kernels.py`), where the bytes are (`store/on_gpu.py`).
Owner: nothing here has state; the caller owns storages and tensors, and holds them until a call returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierstore.device import gpu_kernels
from tierstore.device.spans import TORCH_DTYPES, Span, alias, bytes_at
from tierstore.device.streams import Bytes
from tierstore.errors import ConfigError
from tierstore.kernels import compiled, norms
from tierstore.kernels.adam import AdamCoefficients, state_bytes_per_element, update
from tierstore.kernels.elements import Array, elements_of

Run = tuple[int, int, AdamCoefficients]
"""Elements `[start, stop)`, and their coefficients."""
Sums = npt.NDArray[np.float64]
_LANES_BYTES = compiled.LANES * 8
"""Size of the partial sums of one block."""
MOST_MEASURED = 2**28
"""The most elements of a gradient whose squares are summed: a thread's pinned memory has room for the partial sums."""


class Piece(NamedTuple):
    """A 1-D gradient from element `start` of a whole on. The first one of a step there is copied, others are added."""

    start: int
    gradient: torch.Tensor
    is_first: bool


class Collection(NamedTuple):
    """Gradients to be brought to their place.

    Attributes:
        parts: the gradients; they are valid by now.
        total: the place, on the device. If `is_new`, it holds nothing of this step yet, and elements that no part
            covers become zero.
        out: gets the sums of squares of `total`, as from `kernels.norms.square_sums`; None: they are not wanted.
    """

    dtype: str
    parts: list[Piece]
    total: Span
    is_new: bool
    out: Sums | None


class Update(NamedTuple):
    """One Adam step of runs of elements, in their order.

    Attributes:
        state: the states of the chunks, one after the other; each has `chunk_elements`, the last may have fewer.
    """

    dtype: str
    weights: Span
    state: Span
    gradient: Span
    runs: Sequence[Run]
    chunk_elements: int


class Arithmetic(Protocol):
    """Jobs of a worker thread; each returns when its results are valid for kernels launched from now on.

    The same bits come out on every device (see [Note: bit-exact elements] in `kernels/compiled.py`).
    """

    def why_not(self, dtypes: Iterable[str]) -> str | None:
        """None if it works for weights of these dtypes, and is compiled for them; otherwise what is missing."""

    def collect(self, collections: Sequence[Collection]) -> None:
        """Brings gradients to their place, one collection after the other."""

    def adam(self, updates: Sequence[Update]) -> None:
        """As `kernels.adam.update`."""


class HostArithmetic:
    """The CPU twin: the kernels themselves, in the calling thread."""

    def why_not(self, dtypes: Iterable[str]) -> str | None:
        return None

    def collect(self, collections: Sequence[Collection]) -> None:
        for dtype, parts, total, is_new, out in collections:
            whole = _elements(dtype, total)
            if is_new and not _covers(parts, len(whole)):
                whole[:] = 0
            for start, gradient, is_first in parts:
                place, flat = whole[start : start + gradient.numel()], gradient.contiguous()
                if is_first:
                    ctypes.memmove(place.ctypes.data, flat.data_ptr(), place.nbytes)
                else:
                    norms.add_into(dtype, place, bytes_at(flat.data_ptr(), place.nbytes).view(place.dtype))
            if out is not None:
                norms.square_sums(dtype, whole, out)

    def adam(self, updates: Sequence[Update]) -> None:
        for dtype, weights, state, gradient, runs, chunk_elements in updates:
            flat, values, all_state = _elements(dtype, weights), _elements(dtype, gradient), _host_bytes(state)
            state_bytes = state_bytes_per_element(dtype)
            for first in range(0, len(flat), chunk_elements):
                chunk = slice(first, min(first + chunk_elements, len(flat)))
                there = all_state[chunk.start * state_bytes : chunk.stop * state_bytes]
                for start, stop, coefficients in runs:
                    if start < chunk.stop and stop > chunk.start:
                        edges = max(start, chunk.start) - first, min(stop, chunk.stop) - first
                        update(dtype, flat[chunk], there, values[chunk], *edges, coefficients)


class GpuArithmetic:
    """Kernels on a stream of their own.

    Args:
        queue: makes that stream current in its block, for one thread at a time, and then waits on the host for what was
            queued.
        passing: returns pinned memory of the calling thread.
    """

    def __init__(
        self,
        device: torch.device,
        queue: Callable[[], AbstractContextManager[None]],
        passing: Callable[[], Bytes],
    ) -> None:
        self._device = device
        self._queue = queue
        self._passing = passing

    def why_not(self, dtypes: Iterable[str]) -> str | None:
        with self._queue():
            return gpu_kernels.why_not(dtypes, self._device)

    def collect(self, collections: Sequence[Collection]) -> None:
        passing = self._passing()
        for some in _runs(collections, len(passing) // _LANES_BYTES):
            room, lanes = passing.view(np.float64).reshape(-1, compiled.LANES), []
            for one in some:
                here, room = np.split(room, [0 if one.out is None else len(one.out)])
                lanes.append(here)
            with self._queue():
                for one, here in zip(some, lanes):
                    whole = _tensor(one.total)
                    _bring(one.parts, whole.view(TORCH_DTYPES[one.dtype]), is_new=one.is_new)
                    if one.out is not None:  # not `lanes.cpu()`: it would wait here, where others wait for their turn
                        torch.from_numpy(here).copy_(gpu_kernels.square_lanes(one.dtype, whole), non_blocking=True)
            for one, here in zip(some, lanes):
                if one.out is not None:
                    compiled.add_lanes(here, one.out)

    def adam(self, updates: Sequence[Update]) -> None:
        steps = [_step(update) for update in updates]
        with self._queue():
            gpu_kernels.adam(self._device, steps)


def _step(update: Update) -> gpu_kernels.AdamStep:
    dtype, weights, state, gradient, runs, chunk_elements = update
    elements = weights.nbytes // TORCH_DTYPES[dtype].itemsize
    if (gradient.nbytes, state.nbytes) != (weights.nbytes, elements * state_bytes_per_element(dtype)):
        raise ConfigError(
            f"{elements} weights of {dtype}, but {gradient.nbytes} B of a gradient, and {state.nbytes} B of state"
        )
    return gpu_kernels.AdamStep(
        dtype, _address(weights), _address(state), _address(gradient), elements, chunk_elements, runs
    )


def _address(span: Span) -> int:
    return span.storage.data_ptr() + span.offset


def _runs(collections: Sequence[Collection], blocks: int) -> Iterator[list[Collection]]:
    """Runs of consecutive collections, whose squares are summed in at most `blocks` blocks; a run may be only one."""
    run: list[Collection] = []
    room = blocks
    for one in collections:
        measured = 0 if one.out is None else len(one.out)
        if run and measured > room:
            yield run
            run, room = [], blocks
        run.append(one)
        room -= measured
    if run:
        yield run


def _bring(parts: Sequence[Piece], whole: torch.Tensor, *, is_new: bool) -> None:
    if is_new and not _covers(parts, len(whole)):
        whole.zero_()
    places = [whole[start : start + len(gradient)] for start, gradient, _ in parts]
    first = [(place, gradient) for place, (_, gradient, is_first) in zip(places, parts) if is_first]
    others = [(place, gradient) for place, (_, gradient, is_first) in zip(places, parts) if not is_first]
    if first:
        torch._foreach_copy_([place for place, _ in first], [gradient for _, gradient in first])
    if others:
        torch._foreach_add_([place for place, _ in others], [gradient for _, gradient in others])


def _covers(parts: Sequence[Piece], elements: int) -> bool:
    return sum(gradient.numel() for _, gradient, is_first in parts if is_first) >= elements


def _host_bytes(span: Span) -> Bytes:
    return bytes_at(_address(span), span.nbytes)


def _elements(dtype: str, span: Span) -> Array:
    return elements_of(_host_bytes(span), dtype, span.nbytes // TORCH_DTYPES[dtype].itemsize)


def _tensor(span: Span) -> torch.Tensor:
    return alias(span.storage, span.offset, span.nbytes)
