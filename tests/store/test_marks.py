"""Waiting for the device: in a thread of its own, and not at all for a mark that is reached already."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tierstore.device.streams import Reached
from tierstore.store.marks import Marks

pytestmark = pytest.mark.usefixtures("no_leaks")


class Later:
    """A mark that is reached when the test says so."""

    def __init__(self) -> None:
        self.is_asked, self.is_over = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.is_asked.set()
        assert self.is_over.wait(10)

    def is_done(self) -> bool:
        return self.is_over.is_set()


def test_the_loop_goes_on_and_a_cancelled_wait_is_held_back() -> None:
    async def play() -> None:
        marks, mark = Marks(), Later()
        await marks.reached(Reached())
        assert not any(thread.name.startswith("tierstore-marks") for thread in threading.enumerate())
        waiting = asyncio.create_task(marks.reached(mark))
        await asyncio.to_thread(mark.is_asked.wait, 10)
        (line,) = marks.in_flight()
        assert "Later.synchronize" in line
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()  # the memory behind the mark is in use until then
        mark.is_over.set()
        await asyncio.wait([waiting])
        marks.close(10)

    asyncio.run(play())
