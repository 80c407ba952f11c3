"""The names of a store's files.

Scope: which name is of what. Not here: the files, and what they hold. It imports nothing: commands look at once.
"""

from __future__ import annotations

import re

MANIFEST = re.compile(r"manifest-(?P<number>\d{12})\.json")
SMALL = re.compile(r"(manifest|captured)-(?P<number>\d{12})\.(json|safetensors)(\.tmp)?")
PACK = re.compile(r"(weights|state|gradients1?|spilled1?|put-\d+)\.[ab]\.safetensors")
LOCK, UNFINISHED, IDENTITY = "lock", "unfinished", "identity"
SNAPSHOTS = "snapshots"  # a directory; those in it are stores
_LOCKS = re.compile(r"lock(\.\d+)?")


def is_of_a_store(name: str) -> bool:
    """Whether a store gives this name to a file."""
    return name in (UNFINISHED, IDENTITY) or is_a_lock(name) or holds_data(name)


def holds_data(name: str) -> bool:
    """Whether it is the name of a pack, or of what makes a generation."""
    return any(pattern.fullmatch(name) for pattern in (SMALL, PACK))


def is_a_lock(name: str) -> bool:
    return _LOCKS.fullmatch(name) is not None


def marks_a_store(name: str) -> bool:
    """Whether nobody but a store gives this name to a file."""
    return name == UNFINISHED or MANIFEST.fullmatch(name) is not None
