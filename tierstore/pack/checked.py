"""Values out of untrusted JSON, each with its type and its bounds.

Scope: one value at a time. Not here: parsing text (`strict_json.py`), what values mean together (their readers).
Owner: none; pure functions. Each raises FormatError, which names the value by `what`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tierstore.errors import FormatError

_LONGEST_NAME_BYTES = 255
"""NAME_MAX of Linux."""


def object_of(item: Any, keys: Collection[str], what: str) -> list[Any]:
    """The values of an object that has exactly these keys, in their order."""
    if not isinstance(item, dict) or item.keys() != set(keys):
        odd = min(item.keys() ^ set(keys), key=str) if isinstance(item, dict) else None
        told = f": {odd!r:.40} is {'missing' if odd in keys else 'not known'}" if odd is not None else ""
        raise FormatError(f"{what} is not an object of {', '.join(keys)}{told}")
    return [item[key] for key in keys]


def mapping_of(item: Any, what: str) -> dict[str, Any]:
    """An object with any keys."""
    if not isinstance(item, dict):
        raise FormatError(f"{what} is a {type(item).__name__}, not an object")
    return item


def list_of(item: Any, what: str, length: int | None = None) -> list[Any]:
    if not isinstance(item, list):
        raise FormatError(f"{what} is a {type(item).__name__}, not a list")
    if length is not None and len(item) != length:
        raise FormatError(f"{what} is {len(item)} values, not {length}")
    return item


def text_of(item: Any, what: str) -> str:
    if not isinstance(item, str):
        raise FormatError(f"{what} is a {type(item).__name__}, not text")
    return item


def number_of(item: Any, least: int, most: int, what: str) -> int:
    if type(item) is not int or not least <= item <= most:  # isinstance would let `true` through
        raise FormatError(f"{what} is {item!r:.40}, not a number of {least} to {most}")
    return item


def checksum_of(item: Any) -> int:
    """A checksum of 16 hexadecimal digits."""
    if not isinstance(item, str) or len(item) != 16 or not set(item) <= set("0123456789abcdef"):
        raise FormatError(f"{item!r:.40} is not 16 hexadecimal digits")
    return int(item, 16)


def file_name_of(item: Any, what: str) -> str:
    """The name of a file in the same directory: nothing that leads elsewhere."""
    name = text_of(item, what)
    if name in ("", ".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > _LONGEST_NAME_BYTES:
        raise FormatError(f"{what} {name[:80]!r} is not a plain file name")
    return name
