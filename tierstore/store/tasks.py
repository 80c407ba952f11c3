"""Running coroutines side by side with plain errors.

Scope: one helper. Not here: tasks that outlive their starter (`io/runtime.py` owns those).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


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


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
