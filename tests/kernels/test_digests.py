"""Digests are what the library xxhash computes from the bytes, leaf by leaf, whoever computes them and whenever."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.kernels import compiled
from tierstore.kernels.adam import (
    AdamCoefficients,
    init_state,
    state_bytes_per_element,
    update,
    update_with_digests,
)
from tierstore.kernels.digests import LEAF_BYTES, Bytes, digest

ELEMENTS = LEAF_BYTES // 2  # of two bytes, in a leaf
COEFFICIENTS = [AdamCoefficients(1e-2 * k, 0.9, 0.95, 1e-8, 0.1 * (k % 2), step=k) for k in range(1, 4)]


def by_library(data: Bytes) -> int:
    leaves = [data[start : start + LEAF_BYTES].tobytes() for start in range(0, data.size, LEAF_BYTES)]
    return xxhash.xxh3_64_intdigest(b"".join(xxhash.xxh3_64_digest(leaf)[::-1] for leaf in leaves))


def some_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("blocks", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_xxh3_is_that_of_the_library(blocks: int, shift: int) -> None:
    data = some_bytes(blocks * compiled.XXH3_BLOCK_BYTES + shift)[shift:]
    found = compiled.xxh3(data.ctypes.data, data.size, np.empty(8, np.uint64))
    assert found == xxhash.xxh3_64_intdigest(data.tobytes())


@given(size=st.integers(1, 3 * LEAF_BYTES + 5) | st.sampled_from([LEAF_BYTES, 2 * LEAF_BYTES, 4096, 5 * 4096]))
def test_a_digest_is_that_of_the_leaves(size: int) -> None:
    data = some_bytes(size)
    assert digest(data) == by_library(data)


def test_the_digest_does_not_change_with_a_release() -> None:
    """Digests are on the disk."""
    data = np.arange(5 * 4096, dtype=np.uint32).astype(np.uint8)
    assert (digest(data), digest(data[:100])) == (0x1D19858676D3AFBC, 0x6DCF054756F0933A)


def test_a_bit_a_swap_and_a_shift_change_it() -> None:
    data = some_bytes(4 * LEAF_BYTES)
    swapped = np.concatenate([data[LEAF_BYTES : 2 * LEAF_BYTES], data[:LEAF_BYTES], data[2 * LEAF_BYTES :]])
    changed = [swapped, np.roll(data, 1), np.append(data, np.zeros(4096, np.uint8))]
    for bit in range(0, 8 * data.size, 8009):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        changed.append(flipped)
    found = [digest(data), *map(digest, changed)]
    assert len(set(found)) == len(found)


def _padded(nbytes: int) -> Bytes:
    return np.zeros(-(-nbytes // 4096) * 4096, np.uint8)


def _chunk(dtype: str, count: int, seed: int) -> tuple[Bytes, Bytes, Any, Bytes, Any]:
    """Weights and state with padding, both without it, and a gradient."""
    random, item = np.random.default_rng(seed), 4 if dtype == "fp32" else 2
    kind: Any = {"fp32": np.float32, "bf16": np.uint16, "fp16": np.uint16}[dtype]
    stored = _padded(count * item), _padded(count * state_bytes_per_element(dtype))
    weights, state = stored[0][: count * item].view(kind), stored[1][: count * state_bytes_per_element(dtype)]
    init_state(dtype, random.standard_normal(count, np.float32), weights, state)
    gradient = random.standard_normal(count, np.float32)
    if dtype != "fp32":
        gradient = (gradient.view(np.uint32) >> 16) if dtype == "bf16" else gradient.astype(np.float16).view(np.uint16)
    return *stored, weights, state, gradient.astype(kind)


_EDGES = st.sampled_from([1, 7, ELEMENTS - 1, ELEMENTS, ELEMENTS + 1, 2 * ELEMENTS, 65536, 65536 + 3 * ELEMENTS + 5])


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    count=st.integers(1, 5 * ELEMENTS) | _EDGES,
    cuts=st.lists(st.floats(0, 1), max_size=6),
    wanted=st.sampled_from(["none", "copy", "copy is stored"]),
    asks_before=st.tuples(st.booleans(), st.booleans()),
)
def test_an_update_gives_the_digests_of_what_it_finds_and_leaves(
    dtype: str, count: int, cuts: list[float], wanted: str, asks_before: tuple[bool, bool]
) -> None:
    bounds = sorted({int(cut * count) for cut in cuts})
    runs = [(a, b, COEFFICIENTS[k % 3]) for k, (a, b) in enumerate(itertools.pairwise(bounds)) if k % 4 != 3]
    stored_weights, stored_state, weights, state, gradient = _chunk(dtype, count, 3)
    other = _padded(weights.nbytes)
    copy: Any = other[: weights.nbytes].view(weights.dtype)
    copy[:] = weights
    kept = other if wanted == "copy is stored" else stored_weights
    stored = (kept, stored_state)
    before = tuple(by_library(part) if asks else None for part, asks in zip(stored, asks_before))
    found = update_with_digests(
        dtype, weights, state, gradient, runs, None if wanted == "none" else copy, stored, asks_before
    )
    assert found == (before, (by_library(kept), by_library(stored_state)))
    _, plain_state, plain_weights, exact, _ = _chunk(dtype, count, 3)
    for start, stop, coefficients in runs:
        update(dtype, plain_weights, exact, gradient, start, stop, coefficients)
    assert np.array_equal(plain_weights, weights)
    assert np.array_equal(plain_state, stored_state)
    assert wanted == "none" or np.array_equal(copy, weights)


@pytest.mark.parametrize(
    ("runs", "cut", "message"),
    [
        ([(0, 50), (40, 60)], 0, "are not in order"),
        ([(0, 101)], 0, "not inside a chunk of 100 elements"),
        ([(0, 100)], 1, "has no digest of whole blocks"),
        ([(0, 100)], 4096, "do not hold 100 elements"),
    ],
)
def test_what_would_be_misread_is_refused(runs: list[tuple[int, int]], cut: int, message: str) -> None:
    stored_weights, stored_state, weights, state, gradient = _chunk("bf16", 100, 1)
    stored = (stored_weights[: 4096 - cut], stored_state)
    with pytest.raises(ConfigError, match=message):
        update_with_digests("bf16", weights, state, gradient, [(*run, COEFFICIENTS[0]) for run in runs], None, stored)
