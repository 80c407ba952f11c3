"""A check of pickles before they are loaded: it is fast, and refuses those too deep or too large, but no good one."""

from __future__ import annotations

import pickle
import pickletools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.archive.pickles import check_pickle
from tierstore.errors import FormatError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=300)
    | st.binary(max_size=300)
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict) | st.frozensets(st.integers()) | st.builds(Counter)
    ),
    max_leaves=30,
)  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tuples_nested_too_deep_are_refused(protocol: int) -> None:
    check_pickle(pickle.dumps({nested(100): [nested(100)]}, protocol), "a")
    with pytest.raises(FormatError, match="a: the pickle in it nests tuples deeper than 100"):
        check_pickle(pickle.dumps({nested(101): 1}, protocol), "a")


@pytest.mark.parametrize(
    "deeper",
    [b"q\x00h\x00\x85", b"r\x00\x00\x00\x00j\x00\x00\x00\x00\x85", b"p0\ng0\n\x85", b"2\x86", b"(0\x85", b"K\x00\x86"],
    ids=["short memo", "long memo", "memo as text", "twice", "a mark taken off", "beside a number"],
)
def test_so_are_those_that_are_made_by_turns(deeper: bytes) -> None:
    with pytest.raises(FormatError, match="deeper than 100"):
        check_pickle(b"\x80\x04)" + deeper * 101 + b".", "a")


@given(VALUES, st.sampled_from(PROTOCOLS))
def test_good_ones_are_not_refused(value: Any, protocol: int) -> None:
    check_pickle(pickle.dumps(value, protocol), "a")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "index out of range"),
        (b"\x80\x02", "index out of range"),
        (b"\x80\x02].junk", None),
        (b"\xff.", "there is no opcode 255"),
        (b"a.", "takes more off its stack than there is"),
        (b"K\x01(t\x85.", None),
        (b"K\x01(\x85.", "takes more off its stack than there is"),
        (b"t.", "pop from empty list"),
        (b"h\x00.", "0"),
        (b"T\xff\xff\xff\xff.", "an argument of -1 B"),
        (b"X\xff\xff\xff\x7f.", "index out of range"),
        (b"N.p-1\n", None),
        (b"Np-1\n.", "memo -1 in a pickle"),
        (b"Nr\xff\xff\xff\xff.", "memo 4294967295 in a pickle"),
        (b"Np99999999999\n.", "memo 99999999999 in a pickle"),
    ],
)
def test_damage_is_told(data: bytes, said: str | None) -> None:
    if said is None:
        check_pickle(data, "a")
    else:
        with pytest.raises(FormatError, match=f"a: the pickle in it is damaged: .*{said}"):
            check_pickle(data, "a")


def test_many_entries_take_little_more_than_to_read_their_opcodes() -> None:
    data = pickle.dumps({f"layers.{i}": (i, (1.5, f"of {i}")) for i in range(10_000)}, 2)

    def seconds(work: Callable[[], object]) -> float:
        start = time.thread_time()
        work()
        return time.thread_time() - start

    pairs = [
        (seconds(lambda: check_pickle(data, "a")), seconds(lambda: list(pickletools.genops(data)))) for _ in range(5)
    ]
    assert min(checked for checked, _ in pairs) < 1.8 * min(read for _, read in pairs)
