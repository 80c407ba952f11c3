"""Groups whose weights change where they are: the jobs under way, and what a failed one has spoilt.

Not here: the changes themselves (`updates.py`, `gpu_updates.py`).
Owner: the loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from tierstore.store.layout import GroupSpec
from tierstore.trace import Tracer


class Changing:
    """By group."""

    def __init__(self, groups: Sequence[GroupSpec], tracer: Tracer) -> None:
        self._groups = groups
        self._tracer = tracer
        self._jobs: Counter[int] = Counter()
        self._idle = asyncio.Condition()
        self._spoilt: dict[int, BaseException] = {}
        self.on_spoilt: Callable[[int], None] = lambda group: None
        """Called when what is in memory of a group may not be used any more, on the device or in CPU memory."""

    @contextlib.asynccontextmanager
    async def group(self, group: int) -> AsyncIterator[None]:
        """In here the weights of a group change where they are, and the group stays on the device if it is there."""
        self._jobs[group] += 1
        try:
            with self._tracer.measure("update", self._groups[group].name):
                yield
        except BaseException as error:
            self._spoilt.setdefault(group, error)  # what it has changed in place is no step's
            self.on_spoilt(group)
            raise
        finally:
            async with self._idle:
                self._jobs[group] -= 1
                self._idle.notify_all()

    async def ended(self, group: int) -> None:
        """Wait until nothing changes the weights of a group."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._jobs[group])

    def refuse_spoilt(self, group: int) -> None:
        """Raises what an update of this group has failed with, if that has left in memory what nobody may use."""
        if (error := self._spoilt.get(group)) is not None:
            raise error
