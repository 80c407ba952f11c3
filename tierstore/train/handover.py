"""Gradients on their way to the store: small ones cross together, and the device holds no more than it has room for.

Scope: crossing to the loop, the tasks that wait for the store, back-pressure on device memory.
Not here: which gradients, and when (`backward.py`); copying and norms (`store/gradients.py`).
Owner: the training side; calls of the store run on the loop.

[Note: company] A small group's gradient waits for others, so that one crossing to the loop, one task and one worker job
serve several. A waiting gradient is handed over before anything else crosses, so nothing has to wait for it. If the
loop is late, it takes all gradients that are there by then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from tierstore.device.streams import Mark
from tierstore.errors import ClosedError
from tierstore.io.runtime import Runtime
from tierstore.plan.gpu_room import COMPANY_BYTES
from tierstore.store.gradients import Arrival, Gradients
from tierstore.train.groups import Group


class _Handed(NamedTuple):
    group: Group
    arrival: Arrival
    then: Callable[[Mark], None] | None


class Handover:
    """Hands gradients over to the store.

    Args:
        device_bytes: size of the gradient of each group.
        capacity_bytes: device memory for gradients that are complete or being made.
        running: the last task of each group; others may add to it.

    Attributes:
        store: takes the gradients of this step.
        peak_bytes: the most device memory that gradients have taken.
    """

    def __init__(
        self,
        runtime: Runtime,
        device_bytes: Sequence[int],
        capacity_bytes: int,
        running: dict[int, asyncio.Task[None]],
    ) -> None:
        self._runtime = runtime
        self._device_bytes = device_bytes
        self._capacity_bytes = capacity_bytes
        self._company_bytes = min(COMPANY_BYTES, capacity_bytes // 2)
        self._running = running
        self._handed: deque[_Handed] = deque()
        self._begun_bytes = 0
        self._done_bytes = 0
        self.store: Gradients | None = None
        self.peak_bytes = 0

    def make_room(self, nbytes: int) -> None:
        """Wait until a new gradient of this size fits on the device beside those that are there."""
        self._begun_bytes += nbytes
        over_bytes = self._begun_bytes - self._capacity_bytes
        if over_bytes > self._done_bytes:
            self._runtime.call(self._drained, over_bytes)
        self.peak_bytes = max(self.peak_bytes, self._begun_bytes - self._done_bytes)

    def count_done(self, nbytes: int) -> None:
        """So many of the bytes that room was made for are no longer on the device."""
        self._done_bytes += nbytes

    def give(self, group: Group, arrival: Arrival, then: Callable[[Mark], None] | None) -> None:
        """Have the store take an arrival of a group, then call `then` with the arrival's mark. See [Note: company]."""
        self._handed.append(_Handed(group, arrival, then))
        waiting_bytes = sum(self._device_bytes[one.group.index] for one in list(self._handed))
        post = self._runtime.post_with_next if waiting_bytes < self._company_bytes else self._runtime.post
        post(self._start_accept)

    def wait(self) -> None:
        """Wait until the store has all that was given."""
        self._runtime.call(self._accepted)

    # --- on the loop thread -------------------------------------------------------------------------------------

    def _start_accept(self) -> None:
        handed = []
        while self._handed:
            handed.append(self._handed.popleft())
        if (store := self.store) is None or not handed:
            return
        nbytes = sum(self._device_bytes[one.group.index] for one in handed if one.arrival.pieces)
        accepted = store.accept([one.arrival for one in handed])
        before = {task for one in handed if (task := self._running.get(one.group.index)) is not None}
        others = f" and {len(handed) - 1} more" if len(handed) > 1 else ""
        name = f"gradient of {handed[0].group.spec.name}{others}"
        try:
            task = self._runtime.spawn(self._accept(accepted, nbytes, before), name)
        except ClosedError:
            accepted.close()
            raise
        task.add_done_callback(lambda _: accepted.close())  # if it was cancelled before it began
        self._running |= {one.group.index: task for one in handed}
        for one in handed:
            if one.then is not None:
                one.then(one.arrival.after)  # the update may begin with the first chunk that has arrived

    async def _accept(self, work: Coroutine[Any, Any, None], nbytes: int, before: set[asyncio.Task[None]]) -> None:
        await work
        self.count_done(nbytes)
        for task in before:
            await asyncio.shield(task)

    async def _accepted(self) -> None:
        for task in dict.fromkeys(self._running.values()):
            await asyncio.shield(task)

    async def _drained(self, done_bytes: int) -> None:
        for task in dict.fromkeys(self._running.values()):
            if self._done_bytes >= done_bytes:
                return
            await asyncio.shield(task)
