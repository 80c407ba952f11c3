"""Pieces of gradients, and how a worker brings them into the memory of a chunk.

Scope: cutting pieces at the edges of chunks; copying or adding those of one chunk, and computing its partial norms.
Not here: which memory that is and whose turn it is (`gradients.py`).
Owner: the caller owns the memory; a `Filling` runs once, in one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tierstore.device.arithmetic import Piece
from tierstore.device.spans import bytes_at
from tierstore.device.streams import ComputeDevice, Mark
from tierstore.io.memory import Bytes
from tierstore.kernels import norms
from tierstore.kernels.elements import Array, elements_of
from tierstore.kernels.norms import add_into, copy_with_square_sums, square_sums


def cut(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """The parts of pieces that lie in elements `[start, stop)`, with their starts counted from `start`."""
    return [part for piece in pieces if (part := _cut(piece, start, stop)) is not None]


def _cut(piece: Piece, start: int, stop: int) -> Piece | None:
    count = piece.gradient.numel()
    first, last = max(piece.start, start), min(piece.start + count, stop)
    if first >= last:
        return None
    part = piece.gradient if last - first == count else piece.gradient[first - piece.start : last - piece.start]
    return Piece(first - start, part, piece.is_first)


@dataclass(slots=True)
class Filling:
    """When called, brings the parts of a chunk into the chunk's CPU memory.

    Attributes:
        memory, elements: of the chunk; the memory behind its elements is padding.
        is_new: nothing of this step is in the memory yet.
        parts: the thread that copies them then empties this list.
        after: the device work that must be over before they are valid.
        partials: gets the sums of squares of the whole chunk, these parts included; None: they are not wanted.
    """

    device: ComputeDevice
    dtype: str
    memory: Bytes
    elements: int
    is_new: bool
    parts: list[Piece]
    after: Mark
    partials: npt.NDArray[np.float64] | None

    def __call__(self) -> None:
        total = elements_of(self.memory, self.dtype, self.elements)
        arrived = sum(part.gradient.numel() for part in self.parts if part.is_first)
        if self.is_new:
            self.memory[total.nbytes :] = 0
            if arrived < len(total):
                total[:] = 0
        places = _all_in_place(self.device, total, self.parts) if self.is_new else None
        if self.partials is None or places is None:
            self._copy_and_measure(total)
        else:
            self.after.synchronize()
            start_s = self.device.counters.clock()
            copy_with_square_sums(self.dtype, places, total, self.partials)
            self.device.counters.add("d2h", total.itemsize * arrived, start_s)
        self.parts.clear()  # here, so that this thread frees them: the coroutine on the loop has the list too

    def _copy_and_measure(self, total: Array) -> None:
        first = [part for part in self.parts if part.is_first]
        self.device.copy_out(
            [part.gradient for part in first],
            [total[part.start : part.start + part.gradient.numel()].view(np.uint8) for part in first],
            self.after,
        )
        _add(self.device, self.dtype, total, [part for part in self.parts if not part.is_first], self.after)
        if self.partials is not None:
            square_sums(self.dtype, total, self.partials)


def _address(device: ComputeDevice, total: Array, gradient: torch.Tensor) -> int | None:
    """Where a gradient lies, if it can be read there and its elements are as wide as those of `total`."""
    return device.address_of(gradient) if gradient.element_size() == total.itemsize else None


def _all_in_place(device: ComputeDevice, total: Array, parts: list[Piece]) -> list[norms.Piece] | None:
    """The parts as `norms.Piece`, sorted; None unless all can be read where they lie and none is to be added."""
    places = []
    for start, flat, is_first in parts:
        address = _address(device, total, flat) if is_first else None
        if address is None:
            return None
        places.append((start, address, flat.numel()))
    return sorted(places)


def _add(device: ComputeDevice, dtype: str, total: Array, parts: list[Piece], after: Mark) -> None:
    """Add parts from where they lie, or else through a small scratch memory, in runs that fit into it."""
    after.synchronize()
    start_s, apart = device.counters.clock(), []
    for part in parts:
        if (address := _address(device, total, part.gradient)) is None:
            apart.append(part)
            continue
        there = bytes_at(address, part.gradient.nbytes).view(total.dtype)
        add_into(dtype, total[part.start : part.start + len(there)], there)
        device.counters.add("d2h", there.nbytes, start_s)
    scratch = device.passing().view(total.dtype) if apart else total
    for run in _runs(apart, len(scratch)):
        starts = list(itertools.accumulate((part.gradient.numel() for part in run), initial=0))
        addends = [scratch[start:stop] for start, stop in itertools.pairwise(starts)]
        device.copy_out([part.gradient for part in run], [addend.view(np.uint8) for addend in addends], after)
        for part, addend in zip(run, addends):
            add_into(dtype, total[part.start : part.start + len(addend)], addend)


def _runs(parts: list[Piece], elements: int) -> Iterator[list[Piece]]:
    """The parts in their order, cut into runs of at most `elements` elements."""
    run: list[Piece] = []
    room = elements
    for start, gradient, is_first in parts:
        for offset in range(0, gradient.numel(), elements):
            here = gradient[offset : offset + elements]
            if here.numel() > room:
                yield run
                run, room = [], elements
            run.append(Piece(start + offset, here, is_first))
            room -= here.numel()
    if run:
        yield run
