"""Partial squared norms and accumulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tierstore.errors import ConfigError
from tierstore.kernels.norms import add_into, copy_with_square_sums, square_sums
from tierstore.plan.placement import BLOCK

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def elements_of(tensor):
    return tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.uint16).numpy()


def random_tensor(dtype, elements, seed=0):
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)).to(TORCH[dtype])


def partials(dtype, tensor):
    out = np.full(-(-tensor.numel() // BLOCK), -1.0)
    square_sums(dtype, elements_of(tensor), out)
    return out


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("elements", [0, 1, 63, 64, 1003, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1003])
def test_partials_are_sums_of_squares_by_block(dtype, elements):
    tensor = random_tensor(dtype, elements)
    exact = [float((part.double() ** 2).sum()) for part in tensor.split(BLOCK)] if elements else []
    np.testing.assert_allclose(partials(dtype, tensor), exact, rtol=1e-13)


@pytest.mark.parametrize("dtype", TORCH)
def test_a_partial_depends_on_its_block_only(dtype):
    tensor = random_tensor(dtype, 3 * BLOCK + 77)
    whole = partials(dtype, tensor)
    for k, part in enumerate(tensor.split(BLOCK)):
        assert partials(dtype, part.clone())[0] == whole[k]
    padded = torch.cat([tensor, torch.zeros(BLOCK - 77, dtype=tensor.dtype)])
    np.testing.assert_array_equal(partials(dtype, padded), whole)


def test_order_of_addition_is_fixed():
    values = random_tensor("fp32", BLOCK).double().numpy() ** 2
    total = np.float64(0)
    for lane in values.reshape(-1, 64).cumsum(axis=0)[-1]:  # cumsum adds in order
        total += lane
    assert partials("fp32", random_tensor("fp32", BLOCK))[0] == total


@settings(max_examples=100)
@given(
    dtype=st.sampled_from(list(TORCH)),
    edges=st.lists(st.integers(0, 2 * BLOCK + 1003), min_size=2, max_size=8, unique=True).map(sorted),
    gap=st.integers(0, 7),
)
@example(dtype="fp32", edges=[10, 30, 63, 64, 65, BLOCK - 1, BLOCK + 1], gap=7)
@example(dtype="bf16", edges=[1, 2, BLOCK - 1, BLOCK, BLOCK + 70, 2 * BLOCK + 1], gap=1)
@example(dtype="fp16", edges=[0, 5, 130, BLOCK + 3, 2 * BLOCK + 1003], gap=7)
def test_copied_by_pieces_the_sums_are_the_same_bits(dtype, edges, gap):
    whole = elements_of(random_tensor(dtype, 2 * BLOCK + 1003))
    pieces = [(start, whole[start:stop].copy()) for start, stop in itertools.pairwise(edges)]
    del pieces[gap : gap + 1]  # where no gradient came it is zero
    expected, total = np.zeros_like(whole), np.zeros_like(whole)
    for start, piece in pieces:
        expected[start : start + piece.size] = piece
    sums, exact = np.full(3, -1.0), np.full(3, -1.0)
    copy_with_square_sums(dtype, [(start, piece.ctypes.data, piece.size) for start, piece in pieces], total, sums)
    square_sums(dtype, expected, exact)
    assert (total.tobytes(), sums.tobytes()) == (expected.tobytes(), exact.tobytes())


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 70, BLOCK + 3])
def test_inf_and_nan_propagate(dtype, value, position):
    tensor = random_tensor(dtype, BLOCK + 10)
    tensor[position] = value
    block, other = divmod(position, BLOCK)[0], 1 - position // BLOCK
    result = partials(dtype, tensor)
    np.testing.assert_array_equal(result[block], value * value)
    assert np.isfinite(result[other])
    copied, sums = np.zeros_like(elements_of(tensor)), np.zeros(2)
    copy_with_square_sums(dtype, [(0, tensor.data_ptr(), tensor.numel())], copied, sums)
    assert sums.tobytes() == result.tobytes()


def test_large_fp32_values_do_not_overflow():
    assert partials("fp32", torch.full((2,), 3e38))[0] == 2 * float(np.float32(3e38)) ** 2


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("elements", [0, 1, 17, 1003])
def test_accumulation_is_that_of_torch(dtype, elements):
    total, gradient = random_tensor(dtype, elements, 1), random_tensor(dtype, elements, 2) * 3
    expected = (total.clone().add_(gradient)).clone()
    add_into(dtype, elements_of(total), elements_of(gradient))
    assert torch.equal(total, expected)


@settings(max_examples=60)
@given(dtype=st.sampled_from(list(TORCH)), data=st.data())
def test_accumulation_is_that_of_torch_for_any_bits(dtype, data):
    size = data.draw(st.integers(1, 64))
    kind, signed = (np.uint32, torch.int32) if dtype == "fp32" else (np.uint16, torch.int16)
    total, gradient = (
        torch.from_numpy(data.draw(arrays(kind, size)).view(f"i{np.dtype(kind).itemsize}").copy())
        .view(signed)
        .view(TORCH[dtype])
        for _ in range(2)
    )
    expected = total.clone().add_(gradient)
    add_into(dtype, elements_of(total), elements_of(gradient))
    is_nan = expected.isnan()
    assert torch.equal(total.isnan(), is_nan)
    assert torch.equal(total.view(signed)[~is_nan], expected.view(signed)[~is_nan])


def test_what_would_be_misread_is_refused():
    with pytest.raises(ConfigError, match="2 partials of float64"):
        square_sums("fp32", np.zeros(BLOCK + 1, np.float32), np.zeros(1))
    for start, count in ((2, 2), (-1, 2), (2, -1)):
        with pytest.raises(ConfigError, match=f"a piece of {count} elements at {start} is not inside 3"):
            copy_with_square_sums("fp32", [(start, 0, count)], np.zeros(3, np.float32), np.zeros(1))
    with pytest.raises(ConfigError, match="expected 3 contiguous bf16"):
        add_into("bf16", np.zeros(3, np.uint16), np.zeros(4, np.uint16))
