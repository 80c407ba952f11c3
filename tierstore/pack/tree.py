"""Nested state as JSON and named arrays, and back without loss: what a manifest keeps instead of a pickle.

Scope: dict, OrderedDict, Counter, list, tuple, set, frozenset, str, bytes, int, float, bool, None, numpy arrays and
scalars, exactly those types. Dictionaries may have any key that is hashable and made of these.
Not here: tensors of a framework (callers turn them into arrays and tag them); where arrays are written.
Owner: none; pure functions.

Plain values are written as they are in JSON. Everything else is an object with one key that starts with `$`:
`{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}`, `{"$array": "name"}`, `{"$float": "7ff0000000000000"}` and so on;
a dictionary with such a key of its own is written as `$dict`, so the two are never confused.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from tierstore.errors import FormatError
from tierstore.pack.layout import quoted
from tierstore.pack.strict_json import MOST_DEPTH

Array = np.ndarray[Any, np.dtype[Any]]

MAX_DEPTH = MOST_DEPTH // 4
"""The most levels of state, however it is written: a level takes up to three of JSON, and a document is around it."""
_ARRAY_DTYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8"])
"""`dtype.str` of what both numpy and safetensors hold."""
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[], dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_TAG_OF: dict[type, str] = {
    tuple: "$tuple", set: "$set", frozenset: "$frozenset", dict: "$dict", OrderedDict: "$ordered", Counter: "$counter",
}  # fmt: skip


def encode(state: Any, name: str = "state", *, depth: int = 0) -> tuple[Any, dict[str, Array]]:
    """`state` as a tree that `json` can write and the arrays that it names, for use inside a larger document.

    The arrays are those of `state`, not copies; each name starts with `name` and is the path to the array.

    Args:
        depth: how deep the state will stand inside a larger one.

    Raises:
        FormatError: a value of another type, by its path: `scheduler.lambdas[0]: cannot store function`.
    """
    encoder = _Encoder(name)
    return encoder.encode(state, name, depth), encoder.arrays


def decode(tree: Any, arrays: Mapping[str, Array], name: str = "state") -> Any:
    """The state that `encode` was given; its arrays are those of `arrays`, not copies.

    Raises:
        FormatError: `tree` is not what `encode` gives, or an array is missing or of another dtype or shape.
    """
    return _Decoder(arrays).decode(tree, name, 0)


class _Encoder:
    def __init__(self, name: str) -> None:
        self._name = name
        self.arrays: dict[str, Array] = {}

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise FormatError(f"{path}: nested deeper than {MAX_DEPTH}; does it contain itself?")
        kind = type(value)  # exact types: a subclass would come back as its base
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            # The bits, because JSON has no infinity and a NaN has a sign and a payload.
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind is np.ndarray:
            return self._array("$array", value, path)
        if isinstance(value, np.generic):
            return self._array("$scalar", np.asarray(value), path)
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
        tag = _TAG_OF.get(kind)
        if tag in _SEQUENCES:
            items = self._items(value, path, depth)
            # A set has no order of its own; one is chosen, so that equal states give equal text.
            return {tag: items if kind is tuple else sorted(items, key=json.dumps)}
        if tag in _MAPPINGS:
            return {tag: [self._pair(key, item, path, depth) for key, item in value.items()]}
        raise FormatError(f"{path}: cannot store {kind.__name__}")

    def _items(self, items: Collection[Any], path: str, depth: int) -> list[Any]:
        # Random states are hundreds of numbers, in every step: looked at together, not one by one.
        if depth < MAX_DEPTH and {*map(type, items)} == {int} and min(items) >= -(2**63) and max(items) < 2**63:
            return list(items)
        return [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]

    def _pair(self, key: Any, item: Any, path: str, depth: int) -> list[Any]:
        step = f"{path}.{key}" if type(key) is str else f"{path}[{key!r}]"
        return [self.encode(key, f"{step} (the key)", depth + 1), self.encode(item, step, depth + 1)]

    def _array(self, tag: str, array: Array, path: str) -> dict[str, Any]:
        if array.dtype.str not in _ARRAY_DTYPES:
            raise FormatError(f"{path}: cannot store an array of {array.dtype}")
        name = path if path.isprintable() else self._name
        while name in self.arrays:
            name += "'"
        self.arrays[name] = array
        return {tag: [name, array.dtype.str, list(array.shape)]}


class _Decoder:
    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def decode(self, tree: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise FormatError(f"{path}: nested deeper than {MAX_DEPTH}")
        if isinstance(tree, list):
            return [self.decode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        tags = [key for key in tree if key.startswith("$")]
        if not tags:
            return {key: self.decode(item, f"{path}.{_shown(key)}", depth + 1) for key, item in tree.items()}
        if len(tree) > 1:
            raise FormatError(f"{path}: {quoted(tags[0])} stands beside other keys")
        try:
            return self._tagged(tags[0], tree[tags[0]], path, depth)
        except FormatError:
            raise
        except (TypeError, ValueError, KeyError, binascii.Error) as error:
            raise FormatError(f"{path}: malformed {_shown(tags[0])}: {str(error)[:200]}") from None

    def _tagged(self, tag: str, body: Any, path: str, depth: int) -> Any:
        if tag in _SEQUENCES or tag in _MAPPINGS:
            if not isinstance(body, list):
                raise FormatError(f"{path}: {tag} holds a {type(body).__name__}, not a list")
            if tag in _SEQUENCES:
                result = _SEQUENCES[tag](self.decode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(body))
            else:
                result = _mapping(tag, [self._pair(pair, f"{path}[{i}]", depth) for i, pair in enumerate(body)])
            if len(result) != len(body):
                raise FormatError(f"{path}: {tag} holds {len(body)} items, of which {len(result)} differ")
            return result
        if tag in ("$array", "$scalar"):
            return self._array(tag, body, path)
        if not isinstance(body, str):
            raise FormatError(f"{path}: {_shown(tag)} holds a {type(body).__name__}, not text")
        if tag == "$int" and re.fullmatch(r"-?0x[0-9a-f]+", body):
            return int(body, 16)
        if tag == "$float":
            return struct.unpack(">d", _eight_bytes(body))[0]
        if tag == "$bytes":
            return base64.b64decode(body, validate=True)
        raise FormatError(f"{path}: unknown {_shown(tag)} {body[:40]!r}; written by a newer version?")

    def _pair(self, pair: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise FormatError(f"{path}: not a key and a value")
        return [self.decode(part, path, depth + 1) for part in pair]

    def _array(self, tag: str, body: Any, path: str) -> Any:
        name, dtype, shape = body
        array = self._arrays.get(name) if isinstance(name, str) else None
        if array is None:
            raise FormatError(f"{path}: the array {name!r:.80} is missing")
        if array.dtype.str != dtype or list(array.shape) != shape:
            found, wanted = f"{array.dtype.str} {list(array.shape)}", f"{dtype} {shape}"
            raise FormatError(f"{path}: the array {quoted(name)} is {found:.200}, not {wanted!r:.200}")
        return array if tag == "$array" else array[()]


def _shown(key: str) -> str:
    """A key of a file as a message may show it."""
    return key if key.isprintable() and len(key) <= 80 else quoted(key)


def _mapping(tag: str, pairs: list[Any]) -> dict[Any, Any]:
    result = _MAPPINGS[tag]()
    for key, item in pairs:
        result[key] = item
    return result


def _eight_bytes(text: str) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != 8:
        raise ValueError(f"{len(raw)} B, not 8")
    return raw
