"""What becomes of freed memory: by the pages that the system has to give again, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ROUNDS, _BYTES, _PAGE = 10, 2**23, 4096
_SET_THP_DISABLE = 41  # PR_SET_THP_DISABLE of linux/prctl.h
_PROGRAM = f"""
import ctypes, resource
from tierstore.apps.heap import return_freed_memory, serve_steps
from tierstore.apps.options import FreedMemory

def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        bytearray({_BYTES})[::{_PAGE}] = bytes({_BYTES // _PAGE})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).prctl({_SET_THP_DISABLE}, 1, 0, 0, 0)  # a huge page is one fault
return_freed_memory()
built = faults({_ROUNDS})
serve_steps(FreedMemory(WISH), updates_in_memory=IN_MEMORY)
faults(2)
served = faults({_ROUNDS})
hole, above = bytearray({_BYTES}), bytearray({_BYTES})
del hole
return_freed_memory()
print(built, served, faults(1))
"""


@pytest.mark.parametrize(
    ("wish", "updates_in_memory", "keeps"),
    [("keep", False, True), ("return", True, False), ("auto", True, True), ("auto", False, False)],
)
def test_freed_memory_is_returned_while_an_engine_is_made_and_then_kept_or_not(
    wish: str, updates_in_memory: bool, keeps: bool
) -> None:
    program = _PROGRAM.replace("WISH", repr(wish)).replace("IN_MEMORY", repr(updates_in_memory))
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    built, served, given_back = map(int, told.split())
    pages = _ROUNDS * _BYTES // _PAGE
    assert built >= pages // 2
    assert served < pages // 20 if keeps else served >= pages // 2
    assert given_back >= pages // _ROUNDS // 2
