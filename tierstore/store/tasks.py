"""Running coroutines side by side, with plain errors.

Scope: `together`. Not here: work that no cancellation stops (`io/tasks.py`); owned tasks (`io/runtime.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any

from tierstore.io.tasks import raise_first


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


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
