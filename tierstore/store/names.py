"""The names of a store's files.

Scope: which file has which name. Not here: the files, and what they hold.
This module imports nothing of tierstore, so that a command can look at names without numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MANIFEST = re.compile(r"manifest-(?P<number>\d{12})\.json")
SMALL = re.compile(r"(manifest|captured)-(?P<number>\d{12})\.(json|safetensors)(\.tmp)?")
PACK = re.compile(r"(weights|state|gradients1?|spilled1?|put-\d+)\.[ab]\.safetensors")
LOCK, UNFINISHED, IDENTITY = "lock", "unfinished", "identity"
SNAPSHOTS = "snapshots"  # a directory; each directory in it is a store
_LOCKS = re.compile(r"lock(\.\d+)?")


def is_of_a_store(name: str) -> bool:
    """Whether a store gives this name to a file."""
    return name in (UNFINISHED, IDENTITY) or is_a_lock(name) or holds_data(name)


def holds_data(name: str) -> bool:
    """Whether this is the name of a pack, of a manifest or of a captured state."""
    return any(pattern.fullmatch(name) for pattern in (SMALL, PACK))


def advice_for(names: Iterable[str]) -> str:
    """The end of a refusal of a directory without a generation: what to do if its files are those of a store."""
    return "; of a store over several directories the first comes first" if any(map(holds_data, names)) else ""


def is_a_lock(name: str) -> bool:
    return _LOCKS.fullmatch(name) is not None


def marks_a_store(name: str) -> bool:
    """Whether only a store gives this name to a file."""
    return name == UNFINISHED or MANIFEST.fullmatch(name) is not None
