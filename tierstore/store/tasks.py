"""Running coroutines, with plain errors.

Scope: work side by side, and work that goes on when its waiter is cancelled.
Not here: tasks that outlive their starter (`io/runtime.py` owns those).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all; when one fails the others are cancelled and waited for.

    Raises:
        BaseException: the first failure itself, not a group of them: callers and users catch the error tree.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except BaseExceptionGroup as group:
        raise _first(group) from None


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run in a task of its own, and hold a cancellation back until that has ended.

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
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
