"""What threads and tasks are doing, in words, for the message of a deadline that has passed.

Scope: stacks, names of jobs. Not here: which of them are in flight (`runtime.py`, `workers.py`).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_FRAMES = 4


def named(function: Callable[..., object], arguments: Sequence[object] = ()) -> str:
    """The name of a function, and what it works on: its arguments that are names or paths."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return " ".join([name, *(str(argument) for argument in arguments if isinstance(argument, str | Path))])


def of_task(task: asyncio.Task[Any]) -> str:
    """The frames of a waiting task, innermost first (`Task.get_stack` stops at the outermost)."""
    frames: list[traceback.FrameSummary] = []
    step: Any = task.get_coro()
    while getattr(step, "cr_frame", None) is not None:
        frames += traceback.extract_stack(step.cr_frame, 1)
        step = step.cr_await
    return _in_words(frames) or "not started"


def of_thread(thread: threading.Thread) -> str:
    """The frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "not started" if thread.ident is None else "has ended"
    return _in_words(traceback.extract_stack(frame))


def of_threads(numbers: Collection[int]) -> list[str]:
    """One line for each thread that has one of these identifiers."""
    threads = [thread for thread in threading.enumerate() if thread.ident in numbers]
    return [f"{thread.name}: {of_thread(thread)}" for thread in sorted(threads, key=lambda thread: thread.name)]


def _in_words(frames: Sequence[traceback.FrameSummary]) -> str:
    shown = [f"{frame.name} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})" for frame in frames[-_FRAMES:]]
    return " < ".join(reversed(shown))
