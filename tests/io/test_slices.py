"""The loop's thread asks for short time slices; threads that it starts do not have them, and nothing else changes."""

from __future__ import annotations

import os
import platform
import re
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from tierstore.io import slices
from tierstore.io.runtime import Runtime

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def asked() -> tuple[slices.Attributes | None, slices.Attributes | None]:
    before = slices.attributes()
    slices.ask_for_short_slices()
    return before, slices.attributes()


_RELEASE = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
needs_slices = pytest.mark.skipif(
    _RELEASE < (6, 12) or slices.attributes() is None, reason="Linux has slices since 6.12"
)


@needs_slices
def test_only_the_slice_changes() -> None:
    before, after = in_thread(asked)
    assert before is not None
    assert after is not None
    assert after.runtime == 100_000 < before.runtime
    assert (after.policy, after.nice, after.priority) == (before.policy, before.nice, before.priority)


@needs_slices
def test_a_better_niceness_is_not_lost_to_what_the_thread_starts() -> None:
    def started() -> slices.Attributes | None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, -1)  # of this thread only
        except PermissionError:
            return None
        slices.ask_for_short_slices()
        return in_thread(slices.attributes)

    if (found := in_thread(started)) is None:
        pytest.skip("who is not root may not be nicer to itself")
    assert found.nice == -1


@needs_slices
def test_the_loop_has_them_and_what_it_starts_does_not(runtime: Runtime) -> None:
    async def seen() -> list[slices.Attributes | None]:
        return [slices.attributes(), in_thread(slices.attributes)]

    own, started = runtime.call(seen)
    usual = slices.attributes()
    assert own is not None
    assert started is not None
    assert usual is not None
    assert own.runtime == 100_000
    assert started.runtime == usual.runtime


@pytest.mark.parametrize("machine", ["riscv64", "x86_64"])
def test_where_nothing_is_known_or_allowed_nothing_happens(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine == "x86_64":
        monkeypatch.setattr(slices, "_NUMBERS", {platform.machine(): (-1, -1)})  # no such call
    else:
        monkeypatch.setattr(platform, "machine", lambda: machine)
    assert in_thread(asked) == (None, None)
