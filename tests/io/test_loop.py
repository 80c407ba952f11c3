"""Other threads wake the loop, also one that calls before the loop waits; timers end its waits."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from tierstore.io.loop import Loop

WAIT_S = 20.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_a_call_from_another_thread_ends_a_wait_without_end(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("who writes to a socket gives up the interpreter")

    monkeypatch.setattr(socket.socket, "send", refuse)
    seen: list[int] = []

    def call() -> None:
        for number in range(1000):
            loop.call_soon_threadsafe(seen.append, number)
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=call)
    loop.call_soon(thread.start)
    loop.run_forever()
    thread.join()
    assert seen == list(range(1000))


def test_a_call_before_the_wait_is_not_lost(loop: Loop) -> None:
    for _ in range(3):
        loop.call_soon_threadsafe(loop.stop)
        loop.call_soon_threadsafe(lambda: None)
        loop.run_forever()


def test_every_thread_gets_its_answer(loop: Loop) -> None:
    """Each thread waits for the loop before it calls again, so a call that is not heard fails the test."""
    served = threading.Thread(target=loop.run_forever, daemon=True)
    served.start()
    answered: list[bool] = []

    def ask() -> None:
        for _ in range(500):
            heard = threading.Event()
            loop.call_soon_threadsafe(heard.set)
            answered.append(heard.wait(WAIT_S))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loop.call_soon_threadsafe(loop.stop)
    served.join(WAIT_S)
    assert answered == [True] * 2000


def test_timers_threads_and_debugging(loop: Loop) -> None:
    async def work() -> str:
        await asyncio.sleep(0.001)
        return await asyncio.to_thread(lambda: "done")

    for debug in (False, True):
        loop.set_debug(debug)
        assert loop.run_until_complete(asyncio.wait_for(work(), WAIT_S)) == "done"
