"""What coroutines share: work that goes on when its waiter is cancelled, and telling several failures as one.

Scope: `to_the_end`, `raise_first`.
Not here: tasks that outlive their starter (`io/runtime.py` owns those); work side by side (`store/tasks.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


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
