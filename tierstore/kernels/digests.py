"""Digests of chunks: xxh3 of the xxh3 of leaves, which may be computed in any order and at any time.

Scope: bytes in numpy arrays. Not here: the loops (`compiled.py`), which chunk has which digest (`store/slots.py`).
Owner: none; pure functions.

[Note: leaves] A digest that is computed in the order of the bytes takes a pass of its own, because a chunk of state
holds all m, then all v, and an update goes over both at once. Leaves can be digested as soon as the update has written
them, while they are in the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.kernels import compiled

LEAF_BYTES = 2**14
Bytes = npt.NDArray[np.uint8]
Leaves = npt.NDArray[np.uint64]


def digest(data: Bytes) -> int:
    """xxh3 (64 bits) of the little-endian xxh3 (64 bits) of each `LEAF_BYTES` of `data`; the last leaf may be shorter.

    Shapes: data [n], contiguous. Threads: releases the GIL.
    """
    leaves = empty_leaves(data.size)
    whole = data.size // LEAF_BYTES if data.size % compiled.XXH3_BLOCK_BYTES else leaves.size
    compiled.leaf_digests(data, LEAF_BYTES, leaves[:whole])
    if whole < leaves.size:
        leaves[whole] = xxhash.xxh3_64_intdigest(data[whole * LEAF_BYTES :].data)
    return combined(leaves)


def empty_leaves(nbytes: int) -> Leaves:
    """Room for the digests of the leaves of so many bytes."""
    return np.empty(-(-nbytes // LEAF_BYTES), np.uint64)


def combined(leaves: Leaves) -> int:
    """The digest of the data whose leaves have these digests."""
    little: npt.NDArray[Any] = leaves.astype("<u8", copy=False)
    return int(xxhash.xxh3_64_intdigest(little.tobytes()))
