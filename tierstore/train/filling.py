"""Filling a new store with weights that arrive in pieces, without the whole model in memory.

Scope: what a source of weights is; collecting pieces into chunks, a few chunks open at a time; the same pieces at all
    ranks.
Not here: where pieces come from (`materialize.py`, `checkpoints.py`), how a chunk is stored (`store/at_rest.py`).
Owner: the thread that makes the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tierstore.errors import ConfigError, FormatError
from tierstore.io.runtime import Runtime
from tierstore.store.layout import ParameterSpec
from tierstore.store.training import TrainingStore
from tierstore.train.groups import Group

if TYPE_CHECKING:
    from tierstore.train.partition import Partition

PIECE_ELEMENTS = 2**20
BUILT_AS = "_tierstore_built_as"
"""Attribute of a parameter that `deferred` has built: the name that it had then."""
_OPEN_CHUNKS = 2


class Piece(NamedTuple):
    """Flat values of a parameter from element `offset` on, in row-major order."""

    name: str
    offset: int
    values: torch.Tensor


class Source(Protocol):
    """Where the values of a model's parameters come from, except those that the model holds itself."""

    def names(self) -> set[str]:
        """The parameters it provides, as `named_parameters()` names them (a tied one once)."""

    def stream(self) -> Iterator[Piece]:
        """Flat pieces (name, element offset, values), in any order, each element exactly once.

        Values have the parameter's dtype or the source's own; the receiver casts. The receiver may keep a piece.
        """


class BuiltSource(ABC):
    """A source for a model that `deferred` has built; nobody may have set a weight since."""

    @abstractmethod
    def names(self) -> set[str]:
        """As `Source.names`."""


def check_source(model: nn.Module, source: Source | None) -> None:
    """Refuse a source that would overwrite what somebody has set, fill a renamed parameter, or leave one unset.

    Raises:
        ConfigError: names the parameter.
    """
    changed = _overwritten(model, source) if source is not None and isinstance(source, BuiltSource) else ()
    for name, what in changed:
        raise ConfigError(
            f"parameter {name} {what}, which the source that is given as `initialize` does not know: change the "
            "model, and weights, in the function that deferred() calls; or weights of the engine, by "
            "load_state_dict(...) or in gathered(..., modify=True)"
        )
    known = set() if source is None else source.names()
    for name, parameter in model.named_parameters():
        if parameter.is_meta and parameter.numel() and name not in known:
            raise ConfigError(
                f"parameter {name} holds no values (meta device)"
                + ("; give their source as `initialize`" if source is None else ", and the source has none of it")
            )


def _overwritten(model: nn.Module, source: BuiltSource) -> Iterator[tuple[str, str]]:
    """Parameters that must not get the values that the source has for their names, and why."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if (what := _changed_since(parameter, name)) is not None:
            yield name, what
    known = source.names()
    for name, parameter in parameters.items():
        if name in known and not parameter.is_meta:
            yield name, "holds values"


def _changed_since(parameter: nn.Parameter, name: str) -> str | None:
    """What has happened to a parameter since `deferred` built it; None if nothing has, or `deferred` did not."""
    built_as = parameter.__dict__.get(BUILT_AS, name)
    if built_as != name:
        return f"was {built_as} when deferred() had built the model"
    if BUILT_AS in parameter.__dict__ and parameter.is_meta and parameter._version:
        return "was changed after deferred(), when it had no values"
    return None


def weights_of(model: nn.Module, source: Source | None = None) -> Iterator[Piece]:
    """The weights of a source, then those that only the model holds. The model's are let go one by one as they are
    taken.

    Raises:
        ConfigError: a lazy module has no weights yet.
    """
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ConfigError(f"parameter {lazy} has no shape yet (a lazy module); call the model once, under no_grad")
    own = [(name, p.detach()) for name, p in model.named_parameters() if not p.is_meta]
    own.reverse()
    given = None if source is None else source.stream()  # called now: it may read this model, whose memory goes

    def pieces() -> Iterator[Piece]:
        if source is not None and given is not None:
            known = source.names()
            own[:] = [(name, tensor) for name, tensor in own if name not in known]
            yield from given
        while own:
            name, tensor = own.pop()
            yield Piece(name, 0, tensor.reshape(-1))

    return pieces()


def in_pieces(values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A flat tensor cut into pieces: of each the index of its first element, and a view."""
    for start in range(0, values.numel(), PIECE_ELEMENTS):
        yield start, values[start : start + PIECE_ELEMENTS]


class _Filler:
    def __init__(self, store: TrainingStore, runtime: Runtime, keep: bool) -> None:
        self._keep = keep
        self._store = store
        self._runtime = runtime
        self._open: OrderedDict[tuple[int, int], npt.NDArray[np.float32]] = OrderedDict()
        self._left: dict[tuple[int, int], int] = {}
        self._written: set[tuple[int, int]] = set()

    def put(self, group: int, start: int, values: torch.Tensor) -> None:
        """Take values of a group from element `start` on; elements that other ranks keep are left out."""
        spec = self._store.groups[group]
        zero = start - spec.first  # where the values begin, perhaps before the part kept here
        here, last = spec.kept_part(start, start + values.numel())
        while here < last:
            key = group, here // self._store.placement.chunk_elements
            begin, end = self._store.placement.chunk(*key)
            stop = min(end, last)
            target = torch.from_numpy(self._opened(key)[here - begin : stop - begin])
            target.copy_(values[here - zero : stop - zero])
            self._left[key] -= stop - here
            if self._left[key] == 0:
                self._close(key)
            here = stop

    def finish(self) -> None:
        """Write what is still open."""
        for key in list(self._open):
            self._close(key)

    def _opened(self, key: tuple[int, int]) -> npt.NDArray[np.float32]:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= _OPEN_CHUNKS:
            self._close(next(iter(self._open)))
        if key in self._written:
            self._open[key] = self._runtime.call(self._store.at_rest.read, *key)
        else:
            start, stop = self._store.placement.chunk(*key)
            self._open[key] = np.zeros(stop - start, np.float32)
            self._left.setdefault(key, stop - start)
        return self._open[key]

    def _close(self, key: tuple[int, int]) -> None:
        put = partial(self._store.at_rest.put, keep_moments=self._keep)
        self._runtime.call(put, *key, self._open.pop(key))
        self._written.add(key)


def fill(
    store: TrainingStore, runtime: Runtime, groups: Iterable[Group], pieces: Iterable[Piece], *, keep: bool = False
) -> None:
    """Write all weights of these groups.

    Args:
        pieces: (parameter, first element, flat values), each element once, in any order; pieces of other groups are
            skipped.
        keep: moments stay; otherwise they are set to zero.

    Raises:
        FormatError: a parameter got too many or too few elements.
    """
    places: dict[str, tuple[int, ParameterSpec]] = {
        spec.name: (group.index, spec) for group in groups for spec in group.spec.parameters
    }
    missing = {name: spec.numel for name, (_, spec) in places.items()}
    filler = _Filler(store, runtime, keep)
    for name, start, values in pieces:
        if name not in places:
            continue
        group, spec = places[name]
        missing[name] -= values.numel()
        if missing[name] < 0 or start + values.numel() > spec.numel:
            raise FormatError(f"more than {spec.numel} elements were given for parameter {name}")
        filler.put(group, spec.start + start, values)
    filler.finish()
    short = [f"{name} ({count} elements)" for name, count in missing.items() if count]
    if short:
        raise FormatError(f"no weights were given for {', '.join(short[:5])}" + (", ..." if len(short) > 5 else ""))


def fill_alike(
    partition: Partition,
    store: TrainingStore,
    runtime: Runtime,
    groups: Iterable[Group],
    pieces: Iterable[Piece],
    *,
    keep: bool = False,
) -> None:
    """`fill` with the pieces of rank 0 at every rank; it fails at all of them or at none."""

    def work() -> None:
        coming = partition.from_first(pieces)
        try:
            fill(store, runtime, groups, coming, keep=keep)
        except Exception as error:
            coming.throw(error)  # raised at all ranks, where they ask for the next pieces
            raise

    partition.all_succeed("weights", work)
