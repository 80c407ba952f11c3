"""Batches on the device one step ahead, with a position that counts only those that were handed out.

Scope: moving nested batches, the resume position of any loader, errors at the right batch.
Not here: reading samples (the wrapped loader and its workers), what a generation holds (`capture.py`).
Owner: the training thread. No thread of its own: loading ahead is what the workers of a DataLoader are for, and a
thread would draw random numbers in the middle of a step.

[Note: the resume position]
When batch n is handed out, batch n + 1 has been taken from the wrapped loader already. So the position that belongs to
batch n is recorded before that: the state of a loader that has one, else a count of batches and what the order of the
pass was drawn from (the random states, generators and samplers at its start; between passes, generators and samplers
as they are). On resume a counted pass begins again from these and discards the batches that were trained on. Data that
is made in this process may draw random numbers too: batch n + 1 drew its own before step n was computed, so on resume
it is made again from the random states of that moment, and the run goes on with the states of the generation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import operator
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar, cast

import torch

from tierstore.errors import ConfigError
from tierstore.train.capture import random_states, restore_random_states

T = TypeVar("T")
_COUNTED = frozenset({"batches", "batch_size", "begin"})


class PrefetchingLoader(Generic[T]):
    """Iterates over a loader, with each batch moved to the device while the one before it is computed.

    On CUDA the copy runs on a stream of its own, from pinned memory, and the current stream waits for it when the batch
    is handed out. `engine.register("data", loader)` makes its position a part of every generation; take `state_dict`
    when a step has ended, as the engine does: then exactly the batches that were handed out have been trained on.

    Args:
        loader: a DataLoader, or any iterable. With `state_dict` and `load_state_dict` it resumes at once; without, the
            batches of the pass before the position are loaded again and thrown away.
        device: where the batches go. Tensors in mappings, lists, tuples and dataclasses are moved, and so are objects
            with a method `to(device, non_blocking=)`.
        pin: copy tensors into pinned memory first, unless the loader has done that.

    Breaking off a pass ends its workers (with `persistent_workers=True` they wait for the next pass, as in the
    DataLoader itself). The next pass is a new one, or goes on at the position that was loaded if no batch was handed
    out since; over a loader with a state, it goes on after the last batch that was handed out; over an iterator, which
    has no second pass, the batch ahead is lost. With `persistent_workers=True` and workers that draw random numbers, a
    resumed run is exact in the first pass only: such workers go on from states of their own, which are not part of a
    generation.

    A pass ends when it is asked for more after its last batch. A position before that, as of a loop that breaks off at
    the last batch, is one in that pass: on resume no batch is left of it, and the next pass is whole.
    """

    def __init__(self, loader: Iterable[T], device: torch.device | str = "cpu", *, pin: bool = True) -> None:
        self._loader = loader
        self._mover = _Mover(torch.device(device), pin)
        self._is_stateful = _has_state(loader)
        self._batch_size = _batch_size(loader)
        self._makes_here = getattr(loader, "num_workers", 0) == 0
        self._handed_out = 0  # in this pass
        self._has_more = True  # after those handed out
        self._begin: dict[str, Any] | None = None
        self._source: Any = None
        self._ahead: dict[str, Any] | None = None
        self._to_resume = False
        self._is_under_way = False  # a pass over a loader with a state was begun, and has not come to its end
        self._iterator: Iterator[T] | None = None
        # Weak: a loop that is left drops its pass, and with it the workers, at once and not at a later collection.
        self._pass: Callable[[], Any] = lambda: None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        """A pass over the loader, from the position that was loaded or from the beginning.

        There is one pass at a time: a new one ends the one that runs, which raises ConfigError if it is asked for more.
        An error of the loader is raised when its batch is asked for, after all batches before it.
        """
        running = self._pass()
        if running is not None:
            running.give_way(has_more=self._has_more)
        begun = _Pass(self._iterate())
        self._pass = weakref.ref(begun)
        return begun

    def close(self) -> None:
        """Ends the pass, as leaving the loop does. Twice is fine; a new pass may begin."""
        running = self._pass()
        if running is not None:
            running.close()

    def __enter__(self) -> PrefetchingLoader[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was handed out."""
        state: dict[str, Any] = {"ahead": self._ahead, "batches": self._handed_out}
        if self._is_stateful:
            return {**state, "source": self._source if self._source is not None else self._source_state()}
        begin = self._begin if self._begin is not None else _drawn_from(self._loader)
        return {**state, "batch_size": self._batch_size, "begin": begin}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass go on at a saved position; a running pass is ended.

        Raises:
            ConfigError: the position is that of another kind of loader, or counts batches of another size or of another
                part of the data.
        """
        if not state_dict.keys() >= ({"ahead", "source"} if "source" in state_dict else {"ahead", *_COUNTED}):
            raise ConfigError("the saved position is not that of a PrefetchingLoader")
        if ("source" in state_dict) != self._is_stateful:
            raise ConfigError(
                "the saved position is that of a loader with state_dict, and this one has none (or the other way round)"
            )
        if not self._is_stateful and state_dict["batches"]:
            self._refuse_other_samples(state_dict)
        self.close()
        self._ahead, self._begin = state_dict["ahead"], None
        # Older positions of a loader with a state and workers do not tell: as between passes, then.
        self._handed_out = state_dict.get("batches", int(self._ahead is not None))
        with _random_states_kept():  # the engine may have restored them already
            if self._is_stateful:
                self._source = copy.deepcopy(state_dict["source"])
                cast(Any, self._loader).load_state_dict(copy.deepcopy(state_dict["source"]))
                self._is_under_way = False
            else:
                begin = state_dict["begin"]
                if self._handed_out:
                    self._begin = begin
                elif begin is not None and _is_drawn_alike(self._loader, begin):  # older positions do not tell
                    _draw_from(self._loader, begin)
        self._to_resume = True

    def _refuse_other_samples(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a position in the middle of a pass that counts other batches than those of this loader."""
        batches, size, parts = state_dict["batches"], state_dict["batch_size"], _parts(self._loader)
        if size not in (getattr(self._loader, "batch_size", None), self._batch_size):  # None: a batch sampler's own
            raise ConfigError(
                f"the saved position counts {batches} batches of {size} samples; "
                f"with batches of {self._batch_size} these would be other samples"
            )
        if (saved := (state_dict["begin"] or {}).get("parts", parts)) != parts:  # older positions do not tell
            raise ConfigError(
                f"the saved position counts {batches} batches of one of {saved} parts of the data, and this loader has "
                f"one of {parts}: these would be other samples; end the pass with num_replicas={saved}, on as many "
                "ranks as before"
            )

    # --- one pass -----------------------------------------------------------------------------------------------

    def _iterate(self) -> Generator[T]:
        try:
            if self._is_stateful:
                self._put_right()
            ahead = self._resumed() if self._to_resume else self._begun()
            while not ahead.is_end:
                if ahead.error is not None:
                    raise ahead.error
                before = random_states() if self._makes_here else None
                current, ahead = ahead, self._take()
                batch = self._mover.arrived(current)
                # Not earlier: a Ctrl-C in the loader would count a batch that nobody gets.
                self._handed_out, self._source, self._ahead = self._handed_out + 1, current.source, before
                self._to_resume = False
                self._has_more = not ahead.is_end
                yield batch
            self._source = ahead.source
            # Only now: until the pass is asked for more, the last batch may not have been trained on.
            self._handed_out, self._begin, self._ahead = 0, None, None
            self._to_resume = self._is_under_way = False
        finally:
            self._iterator = None  # a DataLoader ends its workers when nobody holds its iterator

    def _put_right(self) -> None:
        """Make a loader with a state go on after the last batch that was handed out, before a pass begins."""
        if self._is_under_way:  # it may have given out batches that nobody got
            with _random_states_kept():
                cast(Any, self._loader).load_state_dict(copy.deepcopy(self._source))
        elif not self._to_resume:
            self._source = self._source_state()
        self._is_under_way = True

    def _begun(self) -> _Ahead:
        self._handed_out = 0  # the last pass may have been broken off
        self._ahead = None
        self._begin = None if self._is_stateful else _beginning(self._loader)
        self._iterator = iter(self._loader)
        return self._take()

    def _resumed(self) -> _Ahead:
        if not self._handed_out:  # between passes, also if a try has failed
            before = random_states()
            ahead = self._begun()
            if ahead.is_end and not self._is_stateful:  # a sampler whose state is a position, which was its end
                restore_random_states(before)
                ahead = self._begun()
            return ahead
        with _random_states_kept():
            if self._begin is not None:
                _begin_again(self._loader, self._begin)
            self._iterator = iter(self._loader)
            for number in range(0 if self._is_stateful else self._handed_out):
                if next(self._iterator, self) is self:
                    raise ConfigError(
                        f"the saved position is after batch {self._handed_out} of a pass, and this loader has "
                        f"{number}: is it the same data?"
                    )
            if self._ahead is not None:
                restore_random_states(self._ahead)
            return self._take()

    def _take(self) -> _Ahead:
        """The next batch of the loader, on its way to the device."""
        try:
            batch = next(cast(Iterator[T], self._iterator))
            return self._mover.depart(batch, self._source_state())
        except StopIteration:
            return _Ahead(is_end=True, source=self._source_state())
        except Exception as error:
            return _Ahead(error=error)

    def _source_state(self) -> Any:
        # A copy: the loader goes on changing its state.
        return copy.deepcopy(cast(Any, self._loader).state_dict()) if self._is_stateful else None


class _Pass(Iterator[T]):
    """The batches of one pass, until the next pass begins."""

    def __init__(self, batches: Generator[T]) -> None:
        self._batches = batches
        self._gave_way = False

    def __next__(self) -> T:
        if self._gave_way:
            raise ConfigError(
                "another pass over this PrefetchingLoader has begun, which ended this one: evaluate over a loader of "
                "its own, or over the one inside"
            )
        return next(self._batches)

    def close(self) -> None:
        self._batches.close()

    def give_way(self, *, has_more: bool) -> None:
        """Another pass begins. Asking this one for more raises, unless it has handed out its last batch."""
        state = inspect.getgeneratorstate(self._batches)
        self._gave_way = state == inspect.GEN_CREATED or (state == inspect.GEN_SUSPENDED and has_more)
        self.close()


@dataclasses.dataclass(slots=True)
class _Ahead:
    """A batch that was taken and not yet handed out, or the error or the end in its place.

    Attributes:
        source: state of the loader after it.
        event: CUDA event after its copy.
    """

    batch: Any = None
    source: Any = None
    event: Any = None
    error: Exception | None = None
    is_end: bool = False


class _Mover:
    """Moves batches to a device.

    The copy stream allocates what it copies into, so the allocator gives the memory of freed batches back to that
    stream, and not every object shows which memory it has. So each copy waits for the kernels that are queued by then
    where batches were handed out: those of all steps but the one that it runs beside, whose batch is not freed yet.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device = device
        self._pin = pin
        self._stream: Any = None
        self._used_in: set[Any] = set()

    def depart(self, batch: Any, source: Any) -> _Ahead:
        """Starts the copy."""
        if self._device.type != "cuda":
            return _Ahead(_mapped(batch, self._moved), source)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for stream in self._used_in:
            self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            moved = _mapped(batch, self._moved)
        return _Ahead(moved, source, self._stream.record_event())

    def arrived(self, ahead: _Ahead) -> Any:
        """The batch, for kernels that are launched on the current stream from now on."""
        if ahead.event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(ahead.event)
            self._used_in.add(current)
        return ahead.batch

    def _moved(self, value: Any) -> Any:
        is_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        if is_host and self._pin and self._device.type == "cuda" and not value.is_pinned():
            value = value.pin_memory()  # a copy from other memory is not asynchronous
        return value.to(self._device, non_blocking=True) if callable(getattr(value, "to", None)) else value


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with `function` applied to its leaves; an object with a method `to` is a leaf."""
    made: Any
    if type(value) is dict or (isinstance(value, Mapping) and not isinstance(value, MutableMapping)):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        made = copy.copy(value)  # a defaultdict, or the batch of a library
        for key, item in value.items():
            made[key] = _mapped(item, function)
        return made
    if isinstance(value, torch.Tensor) or callable(getattr(value, "to", None)):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, function) for item in value))
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [_mapped(item, function) for item in value]
        return made
    if isinstance(value, tuple):
        items = tuple(_mapped(item, function) for item in value)
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            # Bypasses a frozen class, and an __init__ that may do more than assign.
            object.__setattr__(made, field.name, _mapped(getattr(value, field.name), function))
        return made
    return function(value)


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


# --- what the order of a pass is drawn from -------------------------------------------------------------------------


def _samplers(loader: Any) -> list[Any]:
    found = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    found.append(getattr(found[1], "sampler", None))
    return [one for index, one in enumerate(found) if one is not None and all(one is not two for two in found[:index])]


def _batch_size(loader: Any) -> int | None:
    """Its own, or that of a sampler of batches that it was given; None if neither tells."""
    sizes = (getattr(one, "batch_size", None) for one in (loader, *_samplers(loader)))
    return next((size for size in sizes if size is not None), None)


def _parts(loader: Any) -> int:
    """Into how many parts its samplers divide the data: a DistributedSampler gives each rank one."""
    return max((getattr(sampler, "num_replicas", None) or 1 for sampler in _samplers(loader)), default=1)


def _generators(loader: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def _beginning(loader: Any) -> dict[str, Any]:
    """All that the order of the pass that begins now depends on."""
    return {
        "random": random_states(),
        "epochs": [getattr(sampler, "epoch", None) for sampler in _samplers(loader)],  # of a DistributedSampler
        "parts": _parts(loader),
        **_drawn_from(loader),
    }


def _begin_again(loader: Any, begin: Mapping[str, Any]) -> None:
    """Puts back what `_beginning` found."""
    if not _is_drawn_alike(loader, begin):
        raise ConfigError("the loader has other samplers or generators than the one whose position was saved")
    restore_random_states(begin["random"])
    for sampler, epoch in zip(_samplers(loader), begin["epochs"]):
        if epoch is not None:
            sampler.epoch = epoch
    _draw_from(loader, begin)


def _drawn_from(loader: Any) -> dict[str, Any]:
    """The states of the loader's own that the order of a pass depends on. Between passes, all others are elsewhere."""
    return {
        "generators": [generator.get_state().numpy() for generator in _generators(loader)],
        "samplers": [copy.deepcopy(one.state_dict()) if _has_state(one) else None for one in _samplers(loader)],
    }


def _is_drawn_alike(loader: Any, found: Mapping[str, Any]) -> bool:
    stateful, were_stateful = map(_has_state, _samplers(loader)), (state is not None for state in found["samplers"])
    return len(_generators(loader)) == len(found["generators"]) and [*stateful] == [*were_stateful]


def _draw_from(loader: Any, found: Mapping[str, Any]) -> None:
    """Puts back what `_drawn_from` found."""
    for generator, state in zip(_generators(loader), found["generators"]):
        generator.set_state(torch.from_numpy(state.copy()))
    for sampler, state in zip(_samplers(loader), found["samplers"]):
        if state is not None:
            sampler.load_state_dict(copy.deepcopy(state))


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    before = random_states()
    try:
        yield
    finally:
        restore_random_states(before)
