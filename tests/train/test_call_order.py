"""Ctrl-C in the code that lets in one call at a time: an interrupted call keeps no other one out."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from opcode import opname
from types import FrameType
from typing import Any

import pytest

from tierstore.errors import ConfigError
from tierstore.io.runtime import Runtime
from tierstore.train import call_order
from tierstore.train.call_order import CallOrder

_LOOKS = {"CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}
"""After these instructions the interpreter checks for signals."""


def interrupted_at(number: int, run: Callable[[], None]) -> bool:
    """Whether a run makes this many checks for signals in `call_order`; the last of them then finds Ctrl-C."""
    left, before = number, dict[FrameType, str]()

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != call_order.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last = before.get(frame, "")
            before[frame] = opname[frame.f_code.co_code[frame.f_lasti]]
            if last in _LOOKS:
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 needs this before tracing begins
    sys.settrace(trace)
    try:
        contextvars.copy_context().run(run)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def elsewhere(call: Callable[[], None]) -> list[Exception]:
    """The error of a call by another thread, if any."""
    errors = []

    def run() -> None:
        try:
            call()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


@pytest.mark.parametrize("block", [lambda order: order.alone("step()"), lambda order: order.gathering([1])])
def test_whoever_is_interrupted_is_out_again(
    block: Callable[[CallOrder], AbstractContextManager[None]], runtime: Runtime
) -> None:
    looks = 0

    def inside() -> None:
        with block(order):
            pass

    def others() -> None:
        with order.alone("step()"):
            order.refuse_while_gathered("step()")
            order.refuse_while_modified()

    while True:
        order: Any = CallOrder(None, runtime, can_resume=False)  # type: ignore[arg-type]
        looks += 1
        is_over = not interrupted_at(looks, inside)
        assert not elsewhere(others), looks
        if is_over:
            break
    assert looks > 2
