"""What memory torch gets, and where freed memory goes, by the system's figures on pages, in a process of its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import NoReturn

import pytest
from mappings import needs_huge_pages
from typer.testing import CliRunner

from tierstore.apps import crew, heap
from tierstore.apps.options import FreedMemory
from tierstore.cli import app
from tierstore.errors import ConfigError

_ROUNDS, _BYTES, _SMALL_BYTES, _PAGE = 10, 2**23, 2**22, 4096
_SET_THP_DISABLE = 41  # PR_SET_THP_DISABLE of linux/prctl.h
_PROGRAM = f"""
import ctypes, resource
from tierstore.apps.heap import prepare_heap, serve_steps
from tierstore.apps.options import FreedMemory

def faults(rounds, nbytes={_BYTES}):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        bytearray(nbytes)[::{_PAGE}] = bytes(nbytes // {_PAGE})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).prctl({_SET_THP_DISABLE}, 1, 0, 0, 0)  # a huge page is one fault
prepare_heap()
built = faults({_ROUNDS})
with serve_steps(FreedMemory(WISH), updates_in_memory=IN_MEMORY):
    faults(2)
    served = faults({_ROUNDS})
    faults(2, {_SMALL_BYTES})
    served_small = faults({_ROUNDS}, {_SMALL_BYTES})
    hole, above = bytearray({_BYTES}), bytearray({_BYTES})
    del hole
print(built, served, served_small, faults(1))
"""


@pytest.mark.parametrize(
    ("wish", "updates_in_memory", "keeps", "keeps_small"),
    [
        ("keep", False, True, True),
        ("return", True, False, False),
        ("auto", True, True, True),
        ("auto", False, False, True),
    ],
)
def test_freed_memory_is_returned_while_an_engine_is_made_and_then_kept_or_not(
    wish: str, updates_in_memory: bool, keeps: bool, keeps_small: bool
) -> None:
    program = _PROGRAM.replace("WISH", repr(wish)).replace("IN_MEMORY", repr(updates_in_memory))
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    built, served, served_small, given_back = map(int, told.split())
    pages = _ROUNDS * _BYTES // _PAGE
    assert built >= pages // 2
    assert served < pages // 20 if keeps else served >= pages // 2
    small_pages = pages * _SMALL_BYTES // _BYTES
    assert served_small < small_pages // 20 if keeps_small else served_small >= small_pages // 2
    assert given_back >= pages // _ROUNDS // 2


class _Engine:
    """An object in a reference cycle: it holds itself."""

    def __init__(self) -> None:
        self.itself = self


def test_collections_pass_over_an_engine_as_long_as_it_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_set", lambda *values: None)
    monkeypatch.setattr(heap, "prepare_heap", lambda: None)
    engine = _Engine()
    alive = weakref.ref(engine)
    with heap.serve_steps(FreedMemory.RETURN, updates_in_memory=False):
        assert not any(known is engine for known in gc.get_objects())
        del engine
        gc.collect()
        assert alive() is not None
    gc.collect()
    assert alive() is None


_TENSOR_PROGRAM = """
from mappings import asks_for_huge_pages
from tierstore.apps.heap import prepare_heap
import torch

prepare_heap()
tensor = torch.empty(2**26, dtype=torch.uint8)
print(asks_for_huge_pages(tensor.data_ptr() + 2**25))
"""


@needs_huge_pages
def test_large_tensors_ask_for_huge_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    asked = [sys.executable, "-c", _TENSOR_PROGRAM]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, env=environment).stdout
    assert told.split() == ["True"]


def test_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_HUGE_PAGES", Path("/"))
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    heap.ask_for_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def test_a_system_that_does_not_tell_of_huge_pages_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_HUGE_PAGES", Path("x" * 256))  # an error, as where /sys cannot be read
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is restored afterwards
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    heap.ask_for_huge_pages()
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ


def test_ranks_ask_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks make tensors when they meet, and torch reads the variable only once."""
    found: list[str | None] = []

    def met(*_: object) -> NoReturn:
        found.append(os.environ.get("THP_MEM_ALLOC_ENABLE"))
        raise ConfigError("that was all")

    monkeypatch.setattr(heap, "_HUGE_PAGES", Path("/"))
    monkeypatch.setattr(crew, "joined", met)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")  # so that it is restored afterwards
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    result = CliRunner().invoke(app, ["train", "--preset", "25m", "--steps", "1"])
    assert "that was all" in result.stderr
    assert found == ["1"]
