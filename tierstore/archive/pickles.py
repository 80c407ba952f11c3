"""A check of a pickle before it is unpickled: refuses what breaks even an unpickler that makes only plain values.

Scope: opcodes and the stack that they work on. No object is made.
Not here: which names may be called (torch's `weights_only` rules, `distributed.py`).
Owner: none; a pure function.

[Note: pickles] Files of torch contain pickles. One that names no function can still end the process: a tuple nested
100,000 deep overflows the C stack when it is hashed as a key, and a memo of number 2**32 - 1 takes 64 GiB.
"""

from __future__ import annotations

import io
import pickletools
from typing import Any

from tierstore.errors import FormatError

MOST_BYTES = 2**29
"""Of a pickle that says where tensors are; one of torch.save that names 80,000 tensors has 8 MB."""
_MOST_DEPTH = 100
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_LENGTHS = {  # for arguments that begin with their length: the bytes of that, and whether it has a sign
    pickletools.TAKEN_FROM_ARGUMENT1: (1, False),
    pickletools.TAKEN_FROM_ARGUMENT4: (4, True),
    pickletools.TAKEN_FROM_ARGUMENT4U: (4, False),
    pickletools.TAKEN_FROM_ARGUMENT8U: (8, False),
}
_UNKNOWN, _NEW, _TAKE, _TAKE_TO_MARK, _MARK, _POP, _STOP, _GET, _GET_LINE, _PUT, _PUT_LINE, _PUT_NEXT = range(12)
_DOES = {
    "BINPUT": _PUT, "LONG_BINPUT": _PUT, "PUT": _PUT_LINE, "MEMOIZE": _PUT_NEXT,
    "BINGET": _GET, "LONG_BINGET": _GET, "GET": _GET_LINE, "MARK": _MARK, "POP": _POP, "STOP": _STOP,
}  # fmt: skip


def _rule(opcode: Any) -> tuple[int, int, int, int, int, Any]:
    """What an opcode does (`_NEW`: it puts one value on the stack, `_TAKE`: it takes some off, and puts some on); the
    bytes of its argument (negative: the argument says how many); how many values it takes (not counting those after a
    mark) and gives; how much deeper than those taken the given values are nested; and its argument.
    """
    before, given = [item.name for item in opcode.stack_before], len(opcode.stack_after)
    does = _DOES.get(opcode.name, _TAKE_TO_MARK if "mark" in before else _TAKE if before or given != 1 else _NEW)
    taken = before.index("mark") if does == _TAKE_TO_MARK else len(before)
    return does, opcode.arg.n if opcode.arg else 0, taken, given, int(opcode.name in _TUPLES), opcode.arg


_RULES = [(_UNKNOWN, 0, 0, 0, 0, None)] * 256
for _opcode in pickletools.opcodes:
    _RULES[ord(_opcode.code)] = _rule(_opcode)


def check_pickle(data: bytes, source: str) -> None:
    """Refuse tuples nested too deep, and memo numbers larger than the pickle is long.

    Raises:
        FormatError: it has one of these, or is not a whole pickle.
    """
    try:
        depth = _deepest_tuple(data)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, AttributeError) as error:
        raise FormatError(f"{source}: the pickle in it is damaged: {str(error)[:200]}") from None
    if depth > _MOST_DEPTH:
        raise FormatError(f"{source}: the pickle in it nests tuples deeper than {_MOST_DEPTH}")


def _deepest_tuple(data: bytes) -> int:
    # One loop almost without calls, because a checkpoint has millions of opcodes: `pickletools.genops` takes longer.
    stack: list[int] = []  # how deep tuples are nested in each value
    marks: list[int] = []  # the length of the stack at each mark
    memo: dict[int, int] = {}
    rules, number_of = _RULES, int.from_bytes
    deepest = position = floor = 0  # values below the last mark are out of reach
    while deepest <= _MOST_DEPTH:
        does, argument_bytes, taken, given, nests, argument = rules[data[position]]
        begin = position + 1
        position = begin + argument_bytes if argument_bytes >= 0 else _end(data, begin, argument)
        if does == _NEW:
            stack.append(0)
        elif does == _GET:
            stack.append(memo[number_of(data[begin:position], "little")])
        elif does >= _PUT:
            number = len(memo) if does == _PUT_NEXT else number_of(data[begin:position], "little")
            if does == _PUT_LINE:
                number = int(data[begin:position])
            if not 0 <= number <= len(data):
                raise ValueError(f"memo {number} in a pickle of {len(data)} B")
            memo[number] = stack[-1]
        elif does == _MARK:
            floor = len(stack)
            marks.append(floor)
        elif does == _GET_LINE:
            stack.append(memo[int(data[begin:position])])
        elif does == _UNKNOWN:
            raise ValueError(f"there is no opcode {data[begin - 1]}")
        else:
            at = len(stack)
            if does == _TAKE_TO_MARK or (does == _POP and marks and at == floor):
                at, taken = marks.pop(), taken if does == _TAKE_TO_MARK else 0
                floor = marks[-1] if marks else 0
            at -= taken
            if at < floor:
                raise ValueError("it takes more off its stack than there is")
            parts = stack[at:]
            depth = (max(parts) if parts else 0) + nests  # a value made from a tuple may be that tuple
            stack[at:] = (depth,) * given
            if depth > deepest:
                deepest = depth
            if does == _STOP:
                break
    return deepest


def _end(data: bytes, begin: int, argument: Any) -> int:
    """The end of an argument that itself says how long it is."""
    if argument.n not in _LENGTHS:  # lines of text, as in the first protocol
        file = io.BytesIO(data)
        file.seek(begin)
        argument.reader(file)
        return file.tell()
    width, has_sign = _LENGTHS[argument.n]
    length = int.from_bytes(data[begin : begin + width], "little", signed=has_sign)
    if length < 0:
        raise ValueError(f"an argument of {length} B")
    return begin + width + length
