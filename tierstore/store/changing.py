"""Groups whose weights are updated in place: the jobs in progress, and the groups that a failed job has spoilt.

Not here: the updates themselves (`updates.py`, `gpu_updates.py`).
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
    """The update jobs in progress and the errors of failed ones, by group."""

    def __init__(self, groups: Sequence[GroupSpec], tracer: Tracer) -> None:
        self._groups = groups
        self._tracer = tracer
        self._jobs: Counter[int] = Counter()
        self._idle = asyncio.Condition()
        self._spoilt: dict[int, BaseException] = {}
        self.on_spoilt: Callable[[int], None] = lambda group: None
        """Called when a failed update has made the data of a group unusable, on the device or in CPU memory."""

    @contextlib.asynccontextmanager
    async def group(self, group: int) -> AsyncIterator[None]:
        """A job that changes the weights of a group in place; until it ends the group does not leave the device."""
        self._jobs[group] += 1
        try:
            with self._tracer.measure("update", self._groups[group].name):
                yield
        except BaseException as error:
            self._spoilt.setdefault(group, error)  # what the job has changed in place belongs to no step
            self.on_spoilt(group)
            raise
        finally:
            async with self._idle:
                self._jobs[group] -= 1
                self._idle.notify_all()

    async def ended(self, group: int) -> None:
        """Wait until no job changes the weights of a group."""
        async with self._idle:
            await self._idle.wait_for(lambda: not self._jobs[group])

    def refuse_spoilt(self, group: int) -> None:
        """Raise the error of the first failed update of this group, if any: its data in memory are unusable."""
        if (error := self._spoilt.get(group)) is not None:
            raise error
