"""What a constructor did to its parameters, written down, and how it is done again later.

Scope: draws, the steps of one parameter, and the walk along the generator's stream that yields values piece by piece.
Not here: watching a constructor (see `recording.py`); who receives the values.
Owner: none; records are immutable, a walk owns its scratch memory and its copy of the generator's state.

[Note: pieces] On the CPU, drawing n numbers in several calls gives the same stream as one call only under a rule.
`uniform_` takes one word per element. `normal_` on at least 16 contiguous elements works on blocks of 16 and, if the
last is ragged, draws the final 16 anew: pieces are therefore multiples of 16 and the last holds at least 16. Arithmetic
runs on pieces only where a single rounding defines the result; exp and similar functions differ between the vector loop
and its scalar tail, so the result would show where a tensor was cut, and such steps work on the whole parameter.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierstore.train.filling import PIECE_ELEMENTS, Piece, in_pieces

NORMAL_BLOCK = 16
_ADVANCE_WORDS = 2**16

_aten = torch.ops.aten
_NORMAL = _aten.normal_.default
_UNIFORM = _aten.uniform_.default
_WORDS_PER_ELEMENT = {torch.float64: 2, torch.float32: 1, torch.bfloat16: 1, torch.float16: 1}

SELF = object()
"""Stands in a step's arguments for the tensor that the step works on."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor's place in its storage, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def interval(self) -> tuple[int, int] | None:
        """The elements [start, stop) of the storage, if the tensor is contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.elements:
                return None
            expected *= size
        return self.offset, self.offset + self.elements

    def on(self, storage: torch.Tensor) -> torch.Tensor:
        """This view of a flat tensor."""
        return storage.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, eq=False, slots=True)
class Draw:
    """One use of the generator; `function(target, *args, **kwargs)` repeats it.

    `view` matters for how the numbers are laid out: the stream is consumed in memory order of the strides.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    view: View
    dtype: torch.dtype

    @property
    def can_split(self) -> bool:
        is_simple = self.function in (_NORMAL, _UNIFORM) and self.dtype in _WORDS_PER_ELEMENT
        return is_simple and self.view.interval is not None

    @property
    def skippable_elements(self) -> int:
        """The leading elements whose use of the stream is known without drawing them."""
        elements = self.view.elements
        return elements if self.function is _UNIFORM else max(0, elements // NORMAL_BLOCK - 1) * NORMAL_BLOCK

    def spans(self) -> Iterator[tuple[int, int]]:
        """Bounds of the pieces, see [Note: pieces]."""
        start, elements = 0, self.view.elements
        while start < elements:
            stop = start + PIECE_ELEMENTS
            stop = stop if elements - stop >= NORMAL_BLOCK else elements
            yield start, stop
            start = stop

    def run(self, target: torch.Tensor) -> None:
        self.function(target, *self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class Reseed:
    """The constructor gave the generator a new state."""

    state: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One thing done to a storage: a draw, or a call on `view` of it.

    Attributes:
        args: the call's arguments; SELF is the view, tensors are constants.
        is_in_place: False: the call's result replaces the whole storage.
        is_exact: the result does not depend on where the storage is cut, see [Note: pieces].
    """

    view: View
    draw: Draw | None = None
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_in_place: bool = True
    is_exact: bool = False

    def constants(self) -> Iterator[torch.Tensor]:
        yield from tensors_of((self.args, self.kwargs))
        if self.draw is not None:
            yield from tensors_of((self.draw.args, self.draw.kwargs))

    def outline(self, source: torch.Tensor) -> torch.Tensor:
        """Shape and dtype (a meta tensor) of what a step that is not in place makes of `source`."""
        return self._call(torch.empty_like(source, device="meta"), 0, self.view.elements)

    def apply(self, storage: torch.Tensor) -> torch.Tensor:
        """The storage after this step."""
        if self.is_in_place:
            self._call(self.view.on(storage), 0, self.view.elements)
            return storage
        return self._call(storage, 0, self.view.elements)

    def apply_to_piece(self, piece: torch.Tensor, start: int) -> torch.Tensor:
        """The elements [start, ...) of the storage after this step; only for exact steps."""
        interval = self.view.interval
        if not self.is_in_place or interval is None:
            return self._call(piece, start, start + piece.numel())
        first, last = max(interval[0], start), min(interval[1], start + piece.numel())
        if first < last:
            self._call(piece[first - start : last - start], first - interval[0], last - interval[0])
        return piece

    def _call(self, target: torch.Tensor, first: int, last: int) -> torch.Tensor:
        def actual(argument: Any) -> Any:
            if argument is SELF:
                return target
            is_cut = self.is_exact and isinstance(argument, torch.Tensor) and argument.numel() > 1
            return argument.reshape(-1)[first:last].view(target.shape) if is_cut else argument

        kwargs = {name: actual(value) for name, value in self.kwargs.items()}
        result: torch.Tensor = self.function(*map(actual, self.args), **kwargs) if self.function else target
        return result


@dataclass(frozen=True, slots=True)
class Request:
    """A parameter wanted from a walk: `view` of a storage of `elements`, after `steps` on zeros of `dtype`."""

    name: str
    steps: tuple[Step, ...]
    elements: int
    dtype: torch.dtype
    view: View

    @property
    def draws(self) -> list[Draw]:
        return [step.draw for step in self.steps if step.draw is not None]

    @property
    def can_split(self) -> bool:
        whole = (0, self.elements)
        is_first = all(step.draw is None for step in self.steps[1:])
        rest = self.steps[1:] if self.draws else self.steps
        return (
            self.view.interval == whole
            and is_first
            and all(draw.can_split and draw.view.elements == self.elements for draw in self.draws)
            and all(step.is_exact for step in rest)
        )


def walk(
    events: Iterable[Draw | Reseed], state: torch.Tensor, requests: Sequence[Request]
) -> Generator[Piece, None, torch.Tensor]:
    """Follows the stream from `state` and yields what is requested, each parameter as soon as its last draw is done.

    The default generator is borrowed for each draw and is in between as the caller left it.
    Memory: a few pieces, and the whole of each parameter whose steps cannot be cut.

    Returns:
        The state of the generator after the last event.
    """
    stream = _Stream(state)
    whole = {draw for request in requests if not request.can_split for draw in request.draws}
    cut: dict[Draw, list[Request]] = defaultdict(list)
    held: dict[Draw, list[_Held]] = defaultdict(list)
    for request in requests:
        if not request.draws:
            yield from _undrawn(request)
        elif whole.isdisjoint(request.draws):
            cut[request.draws[0]].append(request)
        else:
            holder = _Held(request)
            for draw in request.draws:
                held[draw].append(holder)
    for event in events:
        if isinstance(event, Reseed):
            stream.state = event.state
        elif holders := held.pop(event, None):
            yield from _drawn_whole(event, stream, holders)
        elif event.can_split:
            yield from _drawn_in_pieces(event, stream, cut.pop(event, []))
        else:
            stream.draw(event, torch.empty_strided(event.view.size, event.view.stride, dtype=event.dtype, device="cpu"))
    return stream.state


class _Stream:
    """A state of the default CPU generator, put in force for one operation at a time."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state
        self._scratch = torch.empty(_ADVANCE_WORDS, dtype=torch.uint8, device="cpu")

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
            self.state = torch.get_rng_state()
        finally:
            torch.set_rng_state(outer)

    def draw(self, draw: Draw, target: torch.Tensor) -> None:
        with self._lent():
            draw.run(target)

    def advance(self, words: int) -> None:
        """Takes so many words off the stream: for numbers that would be overwritten before anybody reads them."""
        with self._lent():
            for start in range(0, words, _ADVANCE_WORDS):
                self._scratch[: words - start].random_()  # one word a byte: the cheapest draw there is


class _Held:
    """A parameter that is computed whole, from its first draw to its last."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._storage: torch.Tensor | None = None
        self._done = 0

    def target(self, draw: Draw) -> torch.Tensor:
        """Where the numbers of `draw` go, all earlier steps done."""
        storage = self._advance(draw)
        view = self._request.steps[self._done].view
        self._done += 1
        return view.on(storage)

    def finish(self) -> Iterator[Piece]:
        """The values, if no draw is outstanding."""
        if any(step.draw is not None for step in self._request.steps[self._done :]):
            return
        values = self._request.view.on(self._advance(None)).reshape(-1)
        self._storage = None
        for start, part in in_pieces(values):
            yield Piece(self._request.name, start, part)

    def _advance(self, draw: Draw | None) -> torch.Tensor:
        request = self._request
        if self._storage is None:
            self._storage = torch.zeros(request.elements, dtype=request.dtype, device="cpu")
        while self._done < len(request.steps) and (draw is None or request.steps[self._done].draw is not draw):
            self._storage = request.steps[self._done].apply(self._storage)
            self._done += 1
        return self._storage


def _undrawn(request: Request) -> Iterator[Piece]:
    if not request.can_split:
        yield from _Held(request).finish()
        return
    for start in range(0, request.elements, PIECE_ELEMENTS):
        elements = min(PIECE_ELEMENTS, request.elements - start)
        values = torch.zeros(elements, dtype=request.dtype, device="cpu")
        yield Piece(request.name, start, _applied(request.steps, values, start))


def _drawn_in_pieces(draw: Draw, stream: _Stream, requests: Sequence[Request]) -> Iterator[Piece]:
    if not requests:
        stream.advance(draw.skippable_elements * _WORDS_PER_ELEMENT[draw.dtype])
        # The tail is drawn: how a ragged one uses the stream differs between dtypes.
        stream.draw(draw, torch.empty(draw.view.elements - draw.skippable_elements, dtype=draw.dtype, device="cpu"))
        return
    for start, stop in draw.spans():
        drawn = torch.empty(stop - start, dtype=draw.dtype, device="cpu")
        stream.draw(draw, drawn)
        for request in requests:
            # Copied parameters share the draw of their original; each works on numbers of its own.
            values = drawn if request is requests[-1] else drawn.clone()
            yield Piece(request.name, start, _applied(request.steps[1:], values, start))


def _drawn_whole(draw: Draw, stream: _Stream, holders: Sequence[_Held]) -> Iterator[Piece]:
    targets = [holder.target(draw) for holder in holders]
    stream.draw(draw, targets[0])
    for target in targets[1:]:
        target.copy_(targets[0])
    for holder in holders:
        yield from holder.finish()


def _applied(steps: Iterable[Step], values: torch.Tensor, start: int) -> torch.Tensor:
    for step in steps:
        values = step.apply_to_piece(values, start)
    return values


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries of arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
