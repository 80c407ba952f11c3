"""State comes back exactly: types, order, bits; what cannot be stored is refused with its path."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import FormatError
from tierstore.pack.strict_json import parse_json
from tierstore.pack.tree import MAX_DEPTH, Array, decode, encode


def same(a: Any, b: Any) -> bool:
    """Equal in type, bits and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def dump(state: Any) -> tuple[str, dict[str, Array]]:
    tree, arrays = encode(state)
    return json.dumps(tree, allow_nan=False, separators=(",", ":")), arrays


def load(text: str | bytes, arrays: Mapping[str, Array]) -> Any:
    return decode(parse_json(text, "state"), arrays)


def round_trip(state: Any) -> Any:
    return load(*dump(state))


STATES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, False, "x"], "b": {"c": []}, "d": {}},
    "tuples": ((), (1,), ((2,), [3])),
    "integer keys": {0: "a", "0": "b", -5: "c"},
    "odd keys": {None: 1, 2.5: 2, (1, "a"): 3, b"k": 4, True: 5},
    "dollar keys": {"$tuple": [1], "x": 2, "$": 3},
    "one dollar key": {"$float": "nan"},
    "floats": [math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1],
    "nan payload": struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0],
    "integers": [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**128, 3**20_000],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "text": ["", "\0", "\ud800", "日本", "\U0001f600"],
    "sets": [set(), {1, 2}, frozenset({"a"})],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": {"milestones": Counter({30: 1, 80: 2})},
    "arrays": {"x": np.arange(6, dtype=np.uint32).reshape(2, 3), "y": [np.zeros((0, 2), np.float16), np.array(3)]},
    "scalars": [np.float64(0.1), np.float32(np.nan), np.int64(-1), np.bool_(True)],
    "python random": random.Random(3).getstate(),
    "numpy generator": np.random.Generator(np.random.PCG64(7)).bit_generator.state,
    "numpy legacy": np.random.RandomState(7).get_state(),
}


@pytest.mark.parametrize("case", STATES)
def test_round_trip(case: str) -> None:
    text, arrays = dump(STATES[case])
    json.loads(text)
    assert same(load(text, arrays), STATES[case])
    assert same(load(text.encode(), arrays), STATES[case])


def test_random_state_continues() -> None:
    source = random.Random(11)
    source.random()
    copy = random.Random()
    copy.setstate(round_trip(source.getstate()))
    assert [copy.random() for _ in range(5)] == [source.random() for _ in range(5)]


KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=3),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
TREES = st.recursive(
    KEYS | st.floats() | st.builds(lambda n: np.arange(n, dtype=np.int16), st.integers(0, 5)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.just("$tuple"), inner, max_size=4)
        | st.frozensets(KEYS, max_size=3)
    ),
    max_leaves=15,
)


@settings(max_examples=150)
@given(TREES)
def test_any_state_round_trips(state: Any) -> None:
    assert same(round_trip(state), state)


def test_arrays_are_named_by_their_path_and_not_copied() -> None:
    weights = np.ones(3)
    tree, arrays = encode({"ema": [weights], "odd\n": weights}, "callback")
    assert arrays["callback.ema[0]"] is weights
    assert list(arrays) == ["callback.ema[0]", "callback"]
    assert decode(tree, arrays)["ema"][0] is weights


def test_colliding_paths_keep_two_arrays() -> None:
    state = {"a": {"b": np.array([1])}, "a.b": np.array([2])}
    _, arrays = dump(state)
    assert len(arrays) == 2
    assert same(round_trip(state), state)


def test_equal_sets_give_equal_text() -> None:
    assert dump({"b", "a", "c"})[0] == dump({"c", "b", "a"})[0] == '{"$set":["a","b","c"]}'


class Odd(dict):  # type: ignore[type-arg]
    pass


def cyclic() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"lambdas": [len]}, r"^scheduler\.lambdas\[0\]: cannot store builtin_function_or_method$"),
        (lambda: {"f": lambda: 0}, r"^scheduler\.f: cannot store function$"),
        (lambda: {1: {"x": object()}}, r"^scheduler\[1\]\.x: cannot store object$"),
        (lambda: (Odd(),), r"^scheduler\[0\]: cannot store Odd$"),
        (lambda: deque([1]), r"^scheduler: cannot store deque$"),
        (lambda: 1j, r"^scheduler: cannot store complex$"),
        (lambda: {"a": np.array([object()])}, r"^scheduler\.a: cannot store an array of object$"),
        (lambda: {"a": np.zeros(2, ">f4")}, r"^scheduler\.a: cannot store an array of >f4$"),
        (lambda: {"a": np.array(["x"])}, r"^scheduler\.a: cannot store an array of <U1$"),
        (lambda: np.str_("x"), r"^scheduler: cannot store an array of <U1$"),
        (lambda: {object(): 1}, r"\(the key\): cannot store object"),
        (cyclic, "nested deeper than 64; does it contain itself"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encode(make(), "scheduler")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,]", "NaN", '{"a":1,"a":2}', "1e999", "9" * 30,
        '{"$nothing":"x"}', '{"$tuple":1}', '{"$tuple":[],"b":1}', '{"$dict":[[1]]}', '{"$dict":[[[],1]]}',
        '{"$dict":[[1,2],[1,3]]}', '{"$dict":[1]}', '{"$set":[1,1]}', '{"$set":[[]]}', '{"$int":"12"}', '{"$int":"0x"}',
        '{"$int":5}', '{"$float":"00"}', '{"$float":"zz"}', '{"$float":null}', '{"$bytes":"="}', '{"$bytes":"é"}',
        '{"$array":"w"}', '{"$array":["w","<i8"]}', '{"$array":["w","<i4",[3]]}', '{"$array":["w","<i8",[4]]}',
        '{"$array":["absent","<i8",[3]]}', '{"$array":[["w"],"<i8",[3]]}', '{"$scalar":null}', '{"$array":5}',
        "[" * 200 + "]" * 200, "[" * 100_000, '{"$counter":[["a"]]}',
    ],
)  # fmt: skip
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        load(text, {"w": np.arange(3)})


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "list": lambda state: [state],
    "dict": lambda state: {"a": state},
    "tuple": lambda state: (state,),
    "frozenset": lambda state: frozenset([state]),
    "integer keys": lambda state: {0: state},
    "dollar keys": lambda state: {"$": state},
    "ordered": lambda state: OrderedDict(a=state),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_depth_is_bounded_the_same_way_on_both_sides(kind: str) -> None:
    state: Any = 1
    for _ in range(MAX_DEPTH):
        state = WRAPPED[kind](state)
    assert round_trip(state) == state
    with pytest.raises(FormatError, match="nested deeper"):
        dump([state])


def test_text_nested_too_deep_is_refused() -> None:
    with pytest.raises(FormatError, match="nested deeper"):
        load("[" * (MAX_DEPTH + 1) + "1" + "]" * (MAX_DEPTH + 1), {})


def test_mutated_text_parses_or_raises() -> None:
    text, arrays = dump({name: state for name, state in STATES.items() if name not in ("integers", "python random")})
    generator = random.Random(2)
    for _ in range(1500):
        letters = list(text)
        for _ in range(generator.randint(1, 3)):
            letters[generator.randrange(len(letters))] = generator.choice('"{}[]:,019-$xé')
        try:
            load("".join(letters), arrays)
        except FormatError:
            continue
