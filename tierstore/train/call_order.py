"""The order in which an engine may be called.

Scope: how far the step in progress has come, which blocks hold weights, which call is in progress; and the errors that
    refuse a call which would disturb these.
Not here: what the calls do (`steps.py`, `engine.py`).
Owner: the training side.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from tierstore.caller import warn_caller
from tierstore.errors import ClosedError, ConfigError
from tierstore.io.runtime import Runtime
from tierstore.train.rounds import RoundDriver

P = ParamSpec("P")
T = TypeVar("T")

_INSIDE: ContextVar[tuple[object, ...]] = ContextVar("_INSIDE", default=())
"""The calls that this thread is in, or works for: threads that a call starts have a copy of its context."""

_TELLING: ContextVar[tuple[CallOrder, ...]] = ContextVar("_TELLING", default=())
"""Likewise, the engines (by their order) whose callbacks this thread is in."""


class CallOrder:
    """The calls of one engine.

    Args:
        can_resume: every step is committed, so a run can go on from the step before a broken one.

    Attributes:
        is_syncing: the next backward is the last one of its step (not in `no_sync`).
        has_backward, has_final_backward: the step in progress has had a backward, and its last one.
        is_broken: a step, or a change, was left half done.
        is_closed: the engine was closed.
        is_to_close: a callback wants the engine closed once the step that the callback was told of is committed.
    """

    def __init__(self, driver: RoundDriver, runtime: Runtime, *, can_resume: bool) -> None:
        self._driver = driver
        self._runtime = runtime
        self._can_resume = can_resume
        self._broken_by: BaseException | None = None
        self._broken_off = ""
        self._keeps_weights = True
        self.is_syncing = True
        self.has_backward = self.has_final_backward = False
        self.is_closed = self.is_to_close = False
        self._gathered: dict[object, Collection[int]] = {}
        """For each block of `gathering` in progress, the groups that it changes."""
        self._holder: dict[str, object] = {}
        """The call in progress, if there is one. No lock: Ctrl-C could come between taking a lock and noting that."""
        self._is_walked = False
        self._tellings = 0
        self.uncompiled: Callable[..., Any] = torch.compiler.disable(  # type: ignore[no-untyped-call]
            _call, reason="an engine cannot be compiled, only blocks of its model"
        )
        """Makes a call into which `torch.compile` does not look. Not at module level: the import takes seconds."""

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Let one thread at a time in, with the threads that it waits for; a call may contain another.

        Raises:
            ConfigError: another thread is inside.
            ClosedError: this is the child of a fork.
        """
        if self._is_inside(self._holder.get("call")):
            yield
            return
        call = object()
        try:
            _INSIDE.set((*_INSIDE.get(), call))
            if self._holder.setdefault("call", call) is not call:
                self._runtime.check_process()
                raise ConfigError(
                    f"{what} was called while another thread is in a call of the same engine; use it from one thread, "
                    "or guard each call with a lock"
                )
            yield
        finally:
            if "call" in self._holder and self._holder["call"] is call:  # no function call: Ctrl-C comes after it
                del self._holder["call"]
            _INSIDE.set(tuple(one for one in _INSIDE.get() if one is not call))

    def _is_inside(self, held: object) -> bool:
        """Whether this thread is in the call in progress, or works for it."""
        return held in _INSIDE.get() or (self._is_walked and torch._C._current_graph_task_id() != -1)

    @contextlib.contextmanager
    def walked(self) -> Iterator[None]:
        """Autograd walks a graph in here; for a GPU in a thread of its own, where hooks lack this thread's context.

        A hook of another model's backward that runs in another thread meanwhile is mistaken for one of these hooks.
        """
        self._is_walked = True
        try:
            yield
        finally:
            self._is_walked = False

    @contextlib.contextmanager
    def last_backward(self, is_last: bool) -> Iterator[None]:
        """A backward runs in here; during the last one of its step updates may change weights already.

        After an error `is_broken` tells what there is to tell.
        """
        before, self.has_final_backward = self.has_final_backward, is_last
        try:
            yield
        except BaseException:
            self.has_final_backward = before
            raise

    @property
    def is_busy_elsewhere(self) -> bool:
        """Whether another thread is in a call."""
        held = self._holder.get("call")
        return held is not None and not self._is_inside(held)

    @property
    def is_broken(self) -> bool:
        return self._broken_by is not None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are not the last of their step."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    @contextlib.contextmanager
    def unbroken(self, what: str = "a step", *, keeps_weights: bool = False) -> Iterator[None]:
        """An error in here leaves half a step, or half a change, behind: the engine refuses to go on.

        Args:
            keeps_weights: the weights are all of one step even then, and may be read.
        """
        try:
            yield
        except BaseException as error:
            self.break_off(error, what, keeps_weights=keeps_weights)
            raise

    def break_off(self, error: BaseException, what: str = "a step", *, keeps_weights: bool) -> None:
        """As `unbroken`, for an error that is on its way already."""
        self._broken_by, self._broken_off = error, what
        self._keeps_weights &= keeps_weights

    @contextlib.contextmanager
    def gathering(self, modified: Collection[int]) -> Iterator[None]:
        """Somebody reads weights in here, and changes those of the groups `modified`."""
        block = object()
        try:
            self._gathered[block] = modified
            yield
        finally:
            self._gathered.pop(block, None)

    def is_modified(self, group: int) -> bool:
        """Whether a block in progress changes the weights of this group and will keep the changes."""
        return any(group in groups for groups in self._gathered.values())

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Callbacks are told in here of a step that is not committed yet; they may make steps of their own."""
        if not self.is_telling:
            self.is_to_close = False
        count, around = self._tellings, _TELLING.get()
        try:  # set inside: a count that Ctrl-C left behind would keep the engine from being closed
            self._tellings = count + 1
            _TELLING.set((*around, self))
            yield
        finally:
            self._tellings = count
            _TELLING.set(around)

    @property
    def is_telling(self) -> bool:
        """Whether the call in progress comes from such a callback."""
        return self._tellings > 0 and self in _TELLING.get()

    def refuse_closed(self) -> None:
        """Refuse to go on in a closed engine, or in the child of a fork.

        Raises:
            ClosedError: the engine is closed, or this is the child of a fork.
        """
        if self.is_closed:
            raise ClosedError("the engine is closed")
        self._runtime.check_process()

    def refuse_broken(self) -> None:
        """Refuse to train or change anything after a step or a change was broken off, or in a closed engine.

        Raises:
            ClosedError: one was broken off, or the engine is closed.
        """
        if self._broken_by is not None:
            raise ClosedError(
                f"{self._broken_off} was broken off by {type(self._broken_by).__name__} and cannot be finished; "
                "close the engine, and make another one that resumes the store"
            ) from self._broken_by
        self.refuse_closed()

    def refuse_while_modified(self) -> None:
        """Weights are not to be trained while somebody changes them.

        Raises:
            ConfigError: somebody does.
        """
        if any(self._gathered.values()):
            raise ConfigError("weights are being changed by gathered(modify=True); train after it")

    def refuse_while_gathered(self, what: str) -> None:
        """Weights are not to be changed while somebody reads them.

        Raises:
            ConfigError: somebody does.
        """
        if self._gathered:
            raise ConfigError(f"weights are in use by gathered(); call {what} after it")

    def refuse_within_step(self, what: str) -> None:
        """Weights are not to be changed while a step uses them.

        Raises:
            ConfigError: a step has begun.
        """
        if self._driver.has_begun:
            begun = "" if self.has_backward else " that a forward has begun (one under torch.no_grad() begins none)"
            raise ConfigError(
                f"{what} would change weights in the middle of a step{begun}; call it after step(), "
                "or close the engine to give that step up"
            )

    def refuse_after_backward(self, what: str) -> None:
        """Weights are not to be read while updates change them.

        Raises:
            ConfigError: updates do so since the last backward.
            ClosedError: a step that was broken off has changed some of them. It is only a warning where no run can be
                resumed at the step before: these weights are all that is left.
        """
        if not self._keeps_weights and self._can_resume:
            self.refuse_broken()
        if not self._keeps_weights:
            cause = type(self._broken_by).__name__
            warn_caller(
                f"{what} after {self._broken_off} that was broken off by {cause}: some weights are new, others "
                "those of before"
            )
        if self.has_final_backward and self._driver.updates_in_backward:
            raise ConfigError(
                f"{what} between engine.backward() and step() would meet weights that "
                f"update={self._driver.schedule.value!r} (given, or what 'auto' chose) is changing meanwhile; call it "
                "after step(), put earlier backwards under no_sync(), or make the engine with update='forward'"
            )


def _call(run: Callable[..., T], *args: Any) -> T:
    return run(*args)


class _HasOrder(Protocol):
    _order: CallOrder


E = TypeVar("E", bound=_HasOrder)


def in_turn(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """A method of an engine, for one thread at a time.

    The engine keeps account of one pass only, and weights read chunk by chunk would be of several steps.
    """
    name = "the engine" if method.__name__ == "__call__" else f"{method.__name__}()"

    def alone(engine: E, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        with engine._order.alone(name):
            return method(engine, *args, **kwargs)

    @functools.wraps(method)
    def called(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._order.uncompiled(alone, self, args, kwargs)
        return result

    return called
