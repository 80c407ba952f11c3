"""How inputs of `tools/fuzz.py` are changed: JSON by its tree, pickles by their opcodes, the rest anywhere."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 255, 4095, 4096, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5,
    -0.0, "", ".", "..", "../x", "/etc/passwd", "\0", "\ud800", "ÿ" * 300, "none", "lz4", "U8", "F4", "F32", [], {},
    [[]], "0123456789abcdef", "__metadata__", "__pad__", "__chunks__" + "_" * 5000, [2**62, 4], [0, -1], {"$tuple": []},
)  # fmt: skip

Mutate = Callable[[bytes], bytes]
"""Changes bytes blindly."""


class Failure(Exception):
    """An input made its reader do what no file may cause."""


def changed_json(value: Any, rng: random.Random) -> Any:
    """The same tree with one or a few places changed."""
    places: list[tuple[tuple[Any, ...], Any]] = [((), value), *_places(value, ())]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path, old = rng.choice(places)
        kind = rng.randrange(6)
        new: Any
        if kind == 0 and type(old) is int:
            new = old + rng.choice((-1, 1, -4096, 4096, old))
        elif kind == 1 and isinstance(old, list) and old:
            new = old * rng.choice((2, 3)) if rng.random() < 0.5 else old[:-1]
        elif kind == 2 and isinstance(old, dict) and old:
            key = rng.choice(list(old))
            new = {other: item for other, item in old.items() if other != key}
            if rng.random() < 0.5:
                new[rng.choice(["x", "", "..", "$tuple", key + "_"])] = old[key]
        elif kind == 3:
            new = rng.choice(places)[1]
        else:
            new = rng.choice(ODD)
        value = _with(value, path, new)
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        yield from _places(item, (*path, key))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict) and path[0] in value:
        return {**value, path[0]: _with(value[path[0]], path[1:], new)}
    if isinstance(value, list) and isinstance(path[0], int) and path[0] < len(value):
        return [*value[: path[0]], _with(value[path[0]], path[1:], new), *value[path[0] + 1 :]]
    return value  # changed away meanwhile


def text_of(value: Any, rng: random.Random, **options: Any) -> bytes:
    """JSON, now and then with a key twice, or nested deep."""
    text = json.dumps(value, **options)
    if rng.random() < 0.03:
        text = re.sub(r'("\w+": ?[\w"]+),', r"\1,\1,", text, count=1)
    if rng.random() < 0.01:
        text = text.replace("[", "[" * rng.choice((300, 2000)), 1)
    return text.encode("utf-8", "surrogatepass")


def blind(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Bytes cut or changed anywhere."""
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else mutate(data)


def changed_pickle(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Opcodes repeated, taken out or put in; or bytes anywhere."""
    import pickletools

    if rng.random() < 0.4:
        return mutate(data)
    try:
        starts = [position or 0 for _, _, position in pickletools.genops(data)]
    except Exception:  # damaged already
        return mutate(data)
    first, second = sorted((rng.choice(starts), rng.choice(starts)))
    piece = rng.choice((
        data[first:second], bytes([rng.choice(b")]}\x85\x86\x87Natlu0be2()R\x81\x8f")]) * rng.choice((1, 2, 300)),
        b"r" + struct.pack("<I", rng.choice((0, 300, 2**32 - 1))), b"\x8a\x08" + rng.randbytes(8), b"J\xff\xff\xff\x7f",
        b"",
    ))  # fmt: skip
    return data[:first] + piece + data[rng.choice((first, second)) :]
