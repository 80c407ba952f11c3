"""A first look at a pickle, before an unpickler gets it: what even one that makes only plain values cannot bear.

Scope: opcodes and the stack that they work on. Nothing is made.
Not here: which names may be called (torch's `weights_only` rules, `distributed.py`).
Owner: none; a pure function.

[Note: pickles] Files of torch are pickles. One that names no function can still end the process: a tuple nested 100,000
deep overflows the stack of C when it is hashed as a key, and a memo of number 2**32 - 1 takes 64 GiB.
"""

from __future__ import annotations

import pickletools
from typing import Any

from tierstore.errors import FormatError

_MOST_DEPTH = 100
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_PUTS, _GETS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})


def check_pickle(data: bytes, source: str) -> None:
    """Refuse tuples nested too deep and memos that the pickle is too short to fill.

    Raises:
        FormatError: or it is none.
    """
    try:
        depth = _deepest_tuple(data)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, AttributeError) as error:
        raise FormatError(f"{source}: the pickle in it is damaged: {str(error)[:200]}") from None
    if depth > _MOST_DEPTH:
        raise FormatError(f"{source}: the pickle in it nests tuples deeper than {_MOST_DEPTH}")


def _deepest_tuple(data: bytes) -> int:
    stack: list[int | None] = []  # how deep tuples are nested in each; None is a mark
    memo: dict[int, int | None] = {}
    deepest = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _PUTS or name == "MEMOIZE":
            number = len(memo) if argument is None else int(argument)
            if number > len(data):
                raise ValueError(f"memo {number} in a pickle of {len(data)} B")
            memo[number] = stack[-1]
        elif name in _GETS:
            stack.append(memo[int(argument or 0)])
        elif name == "MARK":
            stack.append(None)
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP":
            stack.pop()
        else:
            depth = _popped(stack, opcode) + (name in _TUPLES)  # what is made of a tuple may be that tuple
            deepest = max(deepest, depth)
            stack += [depth] * len(opcode.stack_after)
            if deepest > _MOST_DEPTH:
                break
    return deepest


def _popped(stack: list[int | None], opcode: Any) -> int:
    """Take off what an opcode takes off; how deep it is."""
    before = [item.name for item in opcode.stack_before]
    taken: list[int | None] = []
    if "mark" in before:
        while (top := stack.pop()) is not None:
            taken.append(top)
        before = before[: before.index("mark")]
    taken += [stack.pop() for _ in before]
    return max((depth for depth in taken if depth is not None), default=0)
