"""Helpers for coroutines: concurrent work, work that no cancellation stops, errors of threads, several raised as one.

Scope: `together`, `to_the_end`, `carried`, `raise_first`.
Not here: tasks that outlive their starter (`runtime.py` owns those).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all of them concurrently; when one fails, the others are cancelled and waited for.

    Raises:
        BaseException: the first failure itself, not a group of them: callers and users catch the error tree.
        CancelledError: one of them was cancelled from elsewhere, so not all work is done.
    """
    works = list(coroutines)
    if len(works) <= 1:
        for work in works:
            await work  # a task of its own would take longer than the work of a small group
        return
    failures: list[BaseException] = []
    tasks: list[asyncio.Task[Any]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(work) for work in works]
    except BaseExceptionGroup as caught:
        failures.extend(_leaves(caught))
    if failures:  # not inside `except`: the failure keeps its own cause and context
        raise_first(failures)
    if any(task.cancelled() for task in tasks):  # a `TaskGroup` does not report this
        raise asyncio.CancelledError


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run the work in a task of its own, and hold cancellations of the caller back until that task has ended.

    Only the end of the loop stops the task, by cancelling all tasks. (If the task itself refused cancellations, it
    would refuse those of its own `asyncio.timeout` too.)

    Raises:
        BaseException: what the work raised, or `CancelledError` if it succeeded and the caller was cancelled meanwhile.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        result = task.result()
    finally:
        del task  # otherwise an error and this frame would hold each other, and with them all arguments
    if cancelled is not None:
        raise cancelled
    return result


def carried(error: BaseException) -> BaseException:
    """An error of work in a thread, as a future carries it to its waiter.

    A future refuses a `StopIteration`, and its waiter would wait for ever. An error that says "cancelled" would cancel
    the waiter, and nobody would hear of it. So they are wrapped in a `RuntimeError`.
    """
    if not isinstance(error, (StopIteration, asyncio.CancelledError, concurrent.futures.CancelledError)):
        return error
    wrapped = RuntimeError(f"work in a thread raised {error!r}")
    wrapped.__cause__ = error
    return wrapped


def raise_first(errors: Iterable[BaseException]) -> NoReturn:
    """Raise the first of at least one error, with the others noted on it."""
    first, *others = errors
    seen = set(getattr(first, "__notes__", ()))
    for other in others:
        note = f"then also: {other!r}"
        if other is not first and note not in seen:  # all that wait for the same thing get the same failure
            seen.add(note)
            first.add_note(note)
    raise first


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
