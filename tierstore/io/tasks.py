"""What coroutines share: work side by side, work that no cancellation stops, and telling several failures as one.

Scope: `together`, `to_the_end`, `raise_first`. Not here: tasks that outlive their starter (`runtime.py` owns those).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all; when one fails the others are cancelled and waited for.

    Raises:
        BaseException: the first failure itself, not a group of them: callers and users catch the error tree.
        CancelledError: one of them was cancelled from elsewhere, so not all is done.
    """
    works = list(coroutines)
    if len(works) <= 1:
        for work in works:
            await work  # a task of its own would take longer than what small groups do in it
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
    if any(task.cancelled() for task in tasks):  # a group says nothing of it
        raise asyncio.CancelledError


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run in a task of its own, and hold cancellations back until that has ended.

    Only who ends the loop stops it, by cancelling every task that there is. (A task that refused would refuse its own
    `asyncio.timeout` too.)

    Raises:
        BaseException: what the work raised; cancelled meanwhile, and the work done: `CancelledError`.
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
        del task  # an error would be held by the frame that it holds, and all arguments with it
    if cancelled is not None:
        raise cancelled
    return result


def raise_first(errors: Iterable[BaseException]) -> NoReturn:
    """Raise the first of at least one error, with the others noted on it."""
    first, *others = errors
    seen = set(getattr(first, "__notes__", ()))
    for other in others:
        note = f"then also: {other!r}"
        if other is not first and note not in seen:  # many wait for one thing, and all get its failure
            seen.add(note)
            first.add_note(note)
    raise first


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
