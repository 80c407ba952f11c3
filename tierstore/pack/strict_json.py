"""JSON from untrusted files.

Scope: UTF-8, one value, no duplicate keys, no NaN or Infinity, numbers and nesting bounded.
Not here: what the value means (see `validate.py`, `tree.py`).
Owner: none; pure functions.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tierstore.errors import FormatError

MOST_DEPTH = 256
"""The deepest nesting of lists and objects."""
_LONGEST_INTEGER = 20
"""Characters of the longest number that fits 64 bits, sign included."""


def parse_json(text: bytes | str, source: str) -> Any:
    """The value that `text` holds.

    Args:
        source: what is read, for the message: for example a path.

    Raises:
        FormatError: not UTF-8, not JSON, a key twice in one object, NaN, Infinity or a number too large, too deep.
    """
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            decoded,
            object_pairs_hook=_unique,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise FormatError(f"{source}: not UTF-8 at byte {error.start} of {len(text)}") from None
    except RecursionError:
        raise FormatError(f"{source}: JSON is nested too deep ({len(text)} B of text)") from None
    except ValueError as error:  # JSONDecodeError, and the hooks below
        raise FormatError(f"{source}: not valid JSON: {error}") from None
    if not _is_shallow(value):  # a reader may recurse for each level
        raise FormatError(f"{source}: JSON is nested too deep ({len(text)} B of text)")
    return value


def _is_shallow(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        inner = (item.values() if type(item) is dict else item for item in level)
        level = [item for items in inner for item in items if type(item) is dict or type(item) is list]
        if not level:
            return True
    return False


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:80]!r} stands twice in one object")
            seen.add(key)
    return result


def _integer(digits: str) -> int:
    # Bounded before int(): its cost is quadratic in the digits.
    if len(digits) > _LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits)} digits does not fit 64 bits")
    if digits == "-0":
        raise ValueError("-0 is not an integer")  # other readers take it for a float, or refuse the file
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
