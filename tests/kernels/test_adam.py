"""The fused Adam pass: its arithmetic, its bit-exactness, and the layout of a state."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tierstore.errors import ConfigError
from tierstore.kernels.adam import (
    AdamCoefficients,
    adopt_weights,
    init_state,
    read_master,
    state_bytes_per_element,
    update,
    view_state,
    write_master,
)
from tierstore.plan.placement import BLOCK

DTYPES = ("fp32", "bf16", "fp16")
ODD = 1003  # not a multiple of any vector width


def weights_type(dtype):
    return np.float32 if dtype == "fp32" else np.uint16


def narrow(dtype, values):
    """Values in the representation of a dtype, by torch."""
    if dtype == "fp32":
        return values.astype(np.float32)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    return torch.from_numpy(values.astype(np.float32)).to(kind).view(torch.uint16).numpy()


def widen(dtype, elements):
    if dtype == "fp32":
        return elements
    return torch.from_numpy(elements).view(torch.bfloat16 if dtype == "bf16" else torch.float16).float().numpy()


class Chunk:
    """Weights, state and gradient of one chunk with some history."""

    def __init__(self, dtype, elements, seed=0):
        random = np.random.default_rng(seed)
        self.dtype, self.elements = dtype, elements
        self.master = random.normal(0, 1, elements).astype(np.float32)
        self.weights = np.zeros(elements, weights_type(dtype))
        self.state = np.zeros(elements * state_bytes_per_element(dtype), np.uint8)
        init_state(dtype, self.master, self.weights, self.state)
        views = view_state(dtype, self.state)
        views.m[:] = random.normal(0, 1e-2, elements)
        views.v[:] = random.normal(0, 1e-2, elements) ** 2
        self.gradient = narrow(dtype, random.normal(0, 1e-2, elements))

    def update(self, c, cuts=()):
        edges = [0, *cuts, self.elements]
        for start, stop in itertools.pairwise(edges):
            update(self.dtype, self.weights, self.state, self.gradient, start, stop, c)
        return self

    def read_master(self):
        out = np.empty(self.elements, np.float32)
        read_master(self.dtype, self.weights, self.state, out)
        return out

    def bits(self):
        return self.weights.tobytes() + self.state.tobytes()


def coefficients(**changes):
    return AdamCoefficients(
        **{"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 7, **changes}
    )


def reference(p, m, v, g, c, kind):
    """The textbook formula in the precision of `kind`; in float32 with the factors and order of the kernel."""
    p, m, v, g = (x.astype(kind) for x in (p, m, v, g))
    decay, coupled, b1, r1, b2, r2, root, eps, rate, scale = (kind(x) for x in c.scalars())
    if kind is np.float64:
        b1, r1, b2, r2, eps, scale = c.beta1, 1 - c.beta1, c.beta2, 1 - c.beta2, c.eps, c.gradient_scale
        decay = 1 - c.lr * c.weight_decay if c.decoupled else 1.0
        coupled = 0.0 if c.decoupled else c.weight_decay
        root, rate = 1 / np.sqrt(1 - b2**c.step), c.lr / (1 - b1**c.step)
    g = g * scale
    g = g + coupled * p if coupled else g
    m = m * b1 + g * r1
    v = v * b2 + g * g * r2
    return p * decay - rate * (m / (np.sqrt(v) * root + eps)), m, v


CASES = [
    {},
    {"step": 1},
    {"step": 100_000},
    {"decoupled": False},
    {"weight_decay": 0.0},
    {"gradient_scale": 0.37},
    {"beta1": 0.0, "beta2": 0.0},
    {"eps": 1e-3, "lr": 0.0},
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_gets_the_new_weights_of_its_range_and_changes_nothing(dtype):
    plain, copied = Chunk(dtype, ODD), Chunk(dtype, ODD)
    there = np.full(ODD, 7, weights_type(dtype))
    for chunk, copy in ((plain, None), (copied, there)):
        update(dtype, chunk.weights, chunk.state, chunk.gradient, 70, 801, coefficients(), copy)
    assert copied.bits() == plain.bits()
    assert there[70:801].tobytes() == plain.weights[70:801].tobytes()
    assert (there[:70] == 7).all()
    assert (there[801:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_update_is_the_formula(dtype, changes):
    c, chunk = coefficients(**changes), Chunk(dtype, ODD)
    views = view_state(dtype, chunk.state)
    before = (chunk.read_master(), views.m.copy(), views.v.copy(), widen(dtype, chunk.gradient))
    chunk.update(c)
    for got, exact, close in zip(
        (chunk.read_master(), views.m, views.v),
        reference(*before, c, np.float32),
        reference(*before, c, np.float64),
        strict=True,
    ):
        np.testing.assert_array_equal(got.view(np.uint32), exact.view(np.uint32))  # no contraction, no reassociation
        np.testing.assert_allclose(got, close, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_the_rounded_master(dtype):
    chunk = Chunk(dtype, ODD).update(coefficients())
    master = chunk.read_master()
    if dtype == "bf16":  # ties away from zero, where torch rounds them to even
        np.testing.assert_array_equal(chunk.weights, ((master.view(np.uint32) + 0x8000) >> 16).astype(np.uint16))
    else:
        np.testing.assert_array_equal(chunk.weights, narrow(dtype, master))


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    elements=st.integers(1, 200),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    decoupled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_cuts_change_no_bit(dtype, elements, cuts, decoupled, seed):
    c = coefficients(decoupled=decoupled)
    whole, cut = Chunk(dtype, elements, seed).update(c), Chunk(dtype, elements, seed)
    assert cut.update(c, sorted(int(x * elements) for x in cuts)).bits() == whole.bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_elements_and_vectors_agree(dtype):
    c = coefficients()
    assert Chunk(dtype, ODD).update(c, range(1, ODD)).bits() == Chunk(dtype, ODD).update(c).bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype):
    c, chunk = coefficients(), Chunk(dtype, 3 * BLOCK + ODD)
    edges = [0, BLOCK, 2 * BLOCK, 3 * BLOCK, chunk.elements]
    arguments = [(dtype, chunk.weights, chunk.state, chunk.gradient, a, b, c) for a, b in itertools.pairwise(edges)]
    threads = [threading.Thread(target=update, args=item) for item in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chunk.bits() == Chunk(dtype, chunk.elements).update(c).bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_flush_denormal_matters_for_denormals_only(dtype):
    normal, flushed = Chunk(dtype, ODD).update(coefficients()), Chunk(dtype, ODD)
    tiny, tiny_flushed = Chunk("fp32", ODD), Chunk("fp32", ODD)
    for chunk in (tiny, tiny_flushed):
        view_state("fp32", chunk.state).v[:] = 0
        chunk.gradient[:] = 1e-20  # its square is denormal

    def run():
        torch.set_flush_denormal(True)  # of this thread only
        flushed.update(coefficients())
        tiny_flushed.update(coefficients())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert flushed.bits() == normal.bits()
    assert tiny_flushed.bits() != tiny.update(coefficients()).bits()


@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_reach_the_weights(dtype):
    chunk = Chunk(dtype, 64)
    bad = np.zeros(64, np.float32)
    bad[3], bad[40], bad[50] = np.nan, np.inf, -np.inf
    chunk.gradient[:] = narrow(dtype, bad)
    values = widen(dtype, chunk.update(coefficients()).weights)
    assert set(np.flatnonzero(~np.isfinite(values))) == {3, 40, 50}


def test_an_infinite_weight_does_not_poison_decoupled_moments():
    chunk = Chunk("fp32", 8)
    chunk.weights[2] = np.inf
    chunk.update(coefficients(weight_decay=0.0))
    assert np.isinf(chunk.weights[2])
    assert np.isfinite(view_state("fp32", chunk.state).m).all()


# ------------------------------------------------------------------------------------------------ bf16 residual


def bf16_state_of(bits):
    master = bits.view(np.float32)
    weights, state = np.zeros(bits.size, np.uint16), np.ones(10 * bits.size, np.uint8)
    init_state("bf16", master, weights, state)
    out = np.empty_like(master)
    read_master("bf16", weights, state, out)
    return weights, out


def check_lossless(bits):
    weights, out = bf16_state_of(bits)
    values, rounded = bits.view(np.float32), widen("bf16", weights)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(out.view(np.uint32)[~is_nan], bits[~is_nan])
    assert np.isnan(out[is_nan]).all()
    assert np.isnan(rounded[is_nan]).all()
    assert not np.isnan(rounded[~is_nan]).any()
    np.testing.assert_array_equal(rounded[np.isinf(values)], values[np.isinf(values)])
    np.testing.assert_array_equal(np.signbit(rounded[~is_nan]), np.signbit(values[~is_nan]))
    away = (((bits & 0x7FFFFFFF) + 0x8000) >> 16) | ((bits >> 16) & 0x8000)
    np.testing.assert_array_equal(weights[~is_nan], away[~is_nan].astype(np.uint16))


@settings(max_examples=50)
@given(arrays(np.uint32, st.integers(1, 300), elements=st.integers(0, 2**32 - 1)))
def test_bf16_and_residual_hold_any_fp32(bits):
    check_lossless(bits)


def test_bf16_and_residual_hold_a_sweep_of_all_fp32():
    check_lossless(np.arange(0, 2**32, 4093, dtype=np.uint64).astype(np.uint32))  # a prime stride: all low halves


def test_bf16_and_residual_hold_the_edges():
    high = np.array([0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF], np.uint32)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    magnitudes = ((high[:, None] << 16) | low).ravel()
    check_lossless(np.concatenate([magnitudes, magnitudes | np.uint32(0x80000000)]))


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x7F80, 0xFF80])
def test_a_weight_set_to_zero_or_infinity_from_outside_is_no_nan(bits):
    weights, state = np.full(6, bits, np.uint16), np.zeros(60, np.uint8)
    view_state("bf16", state).complement[:] = [-1, -32768, 0, 5, 32767, 1]
    out, again = np.empty(6, np.float32), np.empty(6, np.uint16)
    read_master("bf16", weights, state, out)
    init_state("bf16", out, again, np.zeros(60, np.uint8))
    np.testing.assert_array_equal(again, weights)


# ------------------------------------------------------------------------------------------------ state


@pytest.mark.parametrize(("dtype", "sections"), [("fp32", "mv"), ("bf16", "mvr"), ("fp16", "pmv")])
def test_layout_of_a_state(dtype, sections):
    n = 5
    chunk = Chunk(dtype, n)
    views = view_state(dtype, chunk.state)
    parts = {"m": views.m, "v": views.v, "r": views.complement, "p": views.complement}
    assert chunk.state.tobytes() == b"".join(parts[name].tobytes() for name in sections)
    assert parts["p"].size == (0 if dtype == "fp32" else n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_master_survives_and_moments_stay(dtype):
    chunk = Chunk(dtype, ODD)
    views = view_state(dtype, chunk.state)
    moments = views.m.tobytes() + views.v.tobytes()
    np.testing.assert_array_equal(chunk.read_master(), chunk.master)
    other = (chunk.master * np.float32(1.1)).astype(np.float32)
    write_master(dtype, other, chunk.weights, chunk.state)
    np.testing.assert_array_equal(chunk.read_master(), other)
    assert views.m.tobytes() + views.v.tobytes() == moments
    init_state(dtype, other, chunk.weights, chunk.state)
    assert not views.m.any()
    assert not views.v.any()


def test_fp16_weights_are_write_only_until_adopted():
    chunk, same = Chunk("fp16", ODD), Chunk("fp16", ODD)
    chunk.weights[:] = 0x5555
    assert chunk.update(coefficients()).bits() == same.update(coefficients()).bits()
    chunk.weights[::2] = narrow("fp16", np.float32([0.5]))
    adopt_weights("fp16", chunk.weights, view_state("fp16", chunk.state), 0, ODD)
    np.testing.assert_array_equal(chunk.read_master()[::2], np.float32(0.5))
    np.testing.assert_array_equal(chunk.read_master()[1::2], same.read_master()[1::2])


@settings(max_examples=50)
@given(arrays(np.uint32, st.integers(1, 100), elements=st.integers(0, 2**32 - 1)))
def test_fp16_casts_are_those_of_torch(bits):
    master = bits.view(np.float32)
    weights, state = np.zeros(bits.size, np.uint16), np.zeros(12 * bits.size, np.uint8)
    init_state("fp16", master, weights, state)
    np.testing.assert_array_equal(widen("fp16", weights), widen("fp16", narrow("fp16", master)))  # NaN equals NaN here


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "fp64"}, "dtype is one of"),
        ({"weights": np.zeros(8, np.float32)}, "contiguous bf16 elements as uint16"),
        ({"weights": np.zeros(16, np.uint16)[::2]}, "contiguous"),
        ({"gradient": np.zeros(7, np.uint16)}, "expected 8"),
        ({"state": np.zeros(79, np.uint8)}, "10 per element; got 79"),
        ({"state": np.zeros(70, np.uint8)}, "8 weights, but state for 7"),
        ({"state": np.zeros(84, np.uint8)[2:82]}, "4-aligned"),
        ({"start": 5, "stop": 4}, r"range \[5, 4\)"),
        ({"stop": 9}, r"range \[0, 9\)"),
        ({"c": coefficients(step=0)}, "first step"),
    ],
)
def test_what_would_be_misread_is_refused(change, message):
    arguments = {
        "dtype": "bf16",
        "weights": np.zeros(8, np.uint16),
        "state": np.zeros(80, np.uint8),
        "gradient": np.zeros(8, np.uint16),
        "start": 0,
        "stop": 8,
        "c": coefficients(),
    }
    with pytest.raises(ConfigError, match=message):
        update(**{**arguments, **change})
