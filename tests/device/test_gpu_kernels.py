"""The kernels of a GPU against the compiled loops of the CPU, bit for bit.

Without a GPU the same cases run in Triton's interpreter, which is numpy: it shows the order of operations and the
addresses, not what a compiler makes of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tierstore.device import gpu_kernels
from tierstore.errors import ConfigError
from tierstore.kernels import compiled
from tierstore.kernels.adam import AdamCoefficients, state_bytes_per_element, update, view_state
from tierstore.kernels.elements import ELEMENT, to_float
from tierstore.plan.placement import BLOCK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = ("fp32", "bf16", "fp16")
SPECIAL = [0, 1 << 31, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F808000]
"""Zeros, denormals, infinities, NaN, the largest, and one half way between two of bf16; bits of fp32."""
Runs = Sequence[tuple[int, int, AdamCoefficients]]


if INTERPRETED:
    from triton.runtime import interpreter

    def run_instruction(_self: Any, instruction: str, _constraints: str, values: list[Any], *_: Any) -> SimpleNamespace:
        """The two instructions that the kernels have."""
        compute = {"sqrt.rn.f32": np.sqrt, "div.rn.f32": np.divide}[instruction.split()[0]]
        done = interpreter.TensorHandle(compute(*(value.data for value in values)), values[0].dtype)
        return SimpleNamespace(get_result=lambda _: done)

    interpreter.InterpreterBuilder.create_inline_asm = run_instruction


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    return (pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu)(test)


def coefficients(**changes: Any) -> AdamCoefficients:
    return AdamCoefficients(
        **{"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "step": 7, **changes}
    )


PLAIN = coefficients()
COUPLED = coefficients(decoupled=False, gradient_scale=0.37, step=1)
SCALED = coefficients(lr=3e-4, weight_decay=0.0, eps=1e-6, step=1000, gradient_scale=1 / 3)
FIRST = coefficients(beta1=0.0, beta2=0.0, lr=0.0)


def plausible(elements: int, random: np.random.Generator) -> list[np.ndarray]:
    """Master, m, v and gradient as in training."""
    p, m, v, g = (random.normal(0, scale, elements).astype(np.float32) for scale in (1.0, 1e-2, 1e-2, 1e-2))
    return [p, m, v * v, g]


def near_zero(elements: int, random: np.random.Generator) -> list[np.ndarray]:
    """The same, but so small that roots and quotients are of denormals, or are denormal."""
    scales = (1e-37, 1e-36, 1e-35, 1e-18)
    return [part * np.float32(scale) for part, scale in zip(plausible(elements, random), scales, strict=True)]


def of_any_bits(elements: int, random: np.random.Generator) -> list[np.ndarray]:
    bits = random.integers(0, 2**32, (4, elements), np.uint32)
    bits = np.where(random.random(bits.shape) < 0.3, random.choice(np.array(SPECIAL, np.uint32), bits.shape), bits)
    p, m, v, g = bits.view(np.float32)
    return [p, m, np.where(random.random(elements) < 0.9, np.abs(v), v), g]


def mixed(elements: int, random: np.random.Generator) -> list[np.ndarray]:
    kinds = [kind(elements, random) for kind in (plausible, near_zero, of_any_bits)]
    which = random.integers(0, 3, elements)
    return [np.choose(which, parts) for parts in zip(*kinds, strict=True)]


def narrow(dtype: str, values: np.ndarray) -> np.ndarray:
    if dtype == "fp32":
        return values.copy()
    with np.errstate(all="ignore"):
        half = values.astype(np.float16).view(np.uint16)
    return half if dtype == "fp16" else (values.view(np.uint32) >> 16).astype(np.uint16)


class Chunk:
    """Weights, state and gradient in numpy; residuals of any size, also negative ones at zeros."""

    def __init__(self, dtype: str, parts: list[np.ndarray], random: np.random.Generator) -> None:
        p, m, v, g = parts
        self.dtype, self.elements = dtype, p.size
        self.weights, self.gradient = narrow(dtype, p), narrow(dtype, g)
        self.state = np.zeros(p.size * state_bytes_per_element(dtype), np.uint8)
        views = view_state(dtype, self.state)
        views.m[:], views.v[:] = m, v
        if dtype == "fp16":
            views.complement[:] = p
        elif dtype == "bf16":
            views.complement[:] = random.integers(-(2**15), 2**15, p.size)

    def values(self) -> dict[str, np.ndarray]:
        """Bits of each section, the same for every NaN."""
        views = view_state(self.dtype, self.state)
        found = {"m": views.m, "v": views.v, "weights": self.weights, "complement": views.complement}
        is_nan = np.isnan(to_float(self.dtype, self.weights))
        found["weights"] = np.where(is_nan, np.nan if self.dtype == "fp32" else 0x7FFF, self.weights)
        return {
            name: np.where(np.isnan(part), np.float32(np.nan), part).astype(np.float32).view(np.uint32)
            if part.dtype.kind == "f"
            else part
            for name, part in found.items()
        }


def on_the_device(array: np.ndarray, offset: int) -> torch.Tensor:
    """The bytes of an array, `offset` bytes behind the start of an allocation."""
    there = torch.zeros(offset + array.nbytes, dtype=torch.uint8, device=DEVICE)[offset:]
    return there.copy_(torch.from_numpy(array.view(np.uint8).copy()))


def step(dtype: str, there: Sequence[torch.Tensor], runs: Runs, chunk_elements: int) -> gpu_kernels.AdamStep:
    """A step on these bytes of weights, state and gradient."""
    elements = there[0].numel() // ELEMENT[dtype].itemsize
    return gpu_kernels.AdamStep(dtype, *(part.data_ptr() for part in there), elements, chunk_elements, runs)


def check(dtype: str, parts: list[np.ndarray], runs: Runs, offset: int) -> None:
    random = np.random.default_rng(1)
    expected, found = Chunk(dtype, parts, random), Chunk(dtype, parts, np.random.default_rng(1))
    for start, stop, c in runs:
        update(dtype, expected.weights, expected.state, expected.gradient, start, stop, c)
    there = [on_the_device(part, offset) for part in (found.weights, found.state, found.gradient)]
    gpu_kernels.adam(DEVICE, [step(dtype, there, runs, max(1, len(parts[0])))])
    found.weights, found.state = there[0].cpu().numpy().view(ELEMENT[dtype]), there[1].cpu().numpy()
    for name, bits in expected.values().items():
        np.testing.assert_array_equal(found.values()[name], bits, err_msg=name)
    assert there[2].cpu().numpy().tobytes() == expected.gradient.tobytes()


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("c", [PLAIN, COUPLED, SCALED, FIRST], ids=["plain", "coupled", "scaled", "first"])
@pytest.mark.parametrize(("elements", "offset"), [(4096, 0), (4096, 4), (4099, 0), (1, 0)])
def test_adam_gives_the_bits_of_the_cpu(dtype: str, c: AdamCoefficients, elements: int, offset: int) -> None:
    check(dtype, mixed(elements, np.random.default_rng(elements)), [(0, elements, c)], offset)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("elements", "offset"), [(6144, 0), (6147, 8)])
def test_runs_have_their_own_coefficients_and_gaps_stay(dtype: str, elements: int, offset: int) -> None:
    runs = [
        (0, 1, COUPLED), (3, 1029, SCALED), (1029, 1029, PLAIN), (1029, 2048, COUPLED), (2052, 5121, FIRST),
        (5130, 6143, PLAIN),
    ]  # fmt: skip
    check(dtype, mixed(elements, np.random.default_rng(3)), runs, offset)


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("last", "offset"), [(2048, 0), (1156, 0), (5, 4)])
def test_chunks_that_follow_each_other_are_updated_as_alone(dtype: str, last: int, offset: int) -> None:
    random, size = np.random.default_rng(last), 2048
    runs = [(7, 2048, PLAIN), (2048, 3000, SCALED), (3001, 4100, FIRST)]
    chunks = [Chunk(dtype, mixed(elements, random), random) for elements in (size, size, last)]
    there = [
        on_the_device(np.concatenate([getattr(chunk, name) for chunk in chunks]), offset)
        for name in ("weights", "state", "gradient")
    ]
    gpu_kernels.adam(DEVICE, [step(dtype, there, runs, size)])
    found = [part.cpu().numpy() for part in there]
    for first, chunk in zip(range(0, 3 * size, size), chunks):
        for start, stop, c in runs:
            edges = (max(start - first, 0), min(stop - first, chunk.elements))
            if edges[0] < edges[1]:
                update(dtype, chunk.weights, chunk.state, chunk.gradient, *edges, c)
    item, state = ELEMENT[dtype].itemsize, state_bytes_per_element(dtype)
    for first, chunk in zip(range(0, 3 * size, size), chunks):
        stop, expected = first + chunk.elements, chunk.values()
        chunk.weights = found[0][first * item : stop * item].view(ELEMENT[dtype])
        chunk.state = found[1][first * state : stop * state]
        for name, bits in expected.items():
            np.testing.assert_array_equal(chunk.values()[name], bits, err_msg=name)


@on_device
def test_many_steps_are_as_one_by_one() -> None:
    """Of each dtype, more runs than one launch takes, of all sizes."""
    random, steps, expected, kept = np.random.default_rng(5), [], [], []
    for index in range(3 * 140):
        dtype, elements, c = DTYPES[index % 3], 1 + 37 * index, (PLAIN, COUPLED)[index % 2]
        chunk = Chunk(dtype, plausible(elements, random), random)
        there = [on_the_device(part, 0) for part in (chunk.weights, chunk.state, chunk.gradient)]
        middle = elements // 3
        steps.append(step(dtype, there, [(0, middle, c), (middle, elements, SCALED)], elements))
        update(dtype, chunk.weights, chunk.state, chunk.gradient, 0, middle, c)
        update(dtype, chunk.weights, chunk.state, chunk.gradient, middle, elements, SCALED)
        expected.append((chunk.weights, chunk.state))
        kept.append(there)
    gpu_kernels.adam(DEVICE, steps)
    for there, wanted in zip(kept, expected):
        for found, array in zip(there, wanted):
            assert np.array_equal(found.cpu().numpy(), array.view(np.uint8))


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_do(dtype: str) -> None:
    check(dtype, plausible(0, np.random.default_rng(0)), [], 0)
    check(dtype, plausible(7, np.random.default_rng(0)), [(2, 2, PLAIN)], 0)
    assert gpu_kernels.square_lanes(dtype, on_the_device(np.zeros(0, np.uint8), 0)).shape == (0, compiled.LANES)


def check_squares(dtype: str, gradient: np.ndarray, offset: int) -> None:
    lanes = gpu_kernels.square_lanes(dtype, on_the_device(gradient, offset)).cpu().numpy()
    typed = gradient.view(np.int16) if dtype == "fp16" else gradient
    blocks = -(-gradient.size // BLOCK)
    expected, sums, added = np.zeros((blocks, compiled.LANES)), np.empty(blocks), np.empty(blocks)
    compiled.copy_squares(typed, typed.copy(), 0, expected, BLOCK)
    compiled.square_sums(typed, sums, BLOCK)
    compiled.add_lanes(lanes, added)
    for got, want in ((lanes, expected), (added, sums)):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(*(np.nan_to_num(each, nan=-1.0).view(np.int64) for each in (got, want)))


@on_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("elements", "offset"), [(1, 4), (64, 0), (64 * 33 + 5, 0), (BLOCK + 777, 4)])
def test_lanes_of_squares_are_those_of_the_cpu(dtype: str, elements: int, offset: int) -> None:
    random = np.random.default_rng(elements)
    gradient = np.where(random.random(elements) < 0.2, near_zero(elements, random)[3], plausible(elements, random)[3])
    check_squares(dtype, narrow(dtype, gradient), offset)
    gradient[: len(SPECIAL)] = np.array(SPECIAL, np.uint32).view(np.float32)[:elements]
    check_squares(dtype, narrow(dtype, gradient[:5000]), offset)


@on_device
def test_it_works_here_and_is_warm() -> None:
    assert gpu_kernels.why_not(DTYPES, DEVICE) is None


@pytest.mark.skipif(INTERPRETED, reason="it is this run")
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_all_of_this_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]


def adam_machine_code(dtype: str, coupled: bool, architecture: int) -> str:
    """PTX of the kernel for aligned sections."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = gpu_kernels._kernels().adam
    constants = {"DTYPE": dtype, "COUPLED": coupled, "ALIGNED": True, "ROWS": 64, "TILE": 1024, "VECTOR": 4}
    signature = {"table": "*i64"} | dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = compile(ASTSource(kernel, signature, values, {}), GPUTarget("cuda", architecture, 32), options)
    return str(compiled.asm["ptx"])


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_machine_code_keeps_denormals_fuses_nothing_and_has_vector_loads(
    dtype: str, coupled: bool, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = adam_machine_code(dtype, coupled, architecture)
    assert not re.findall(r"fma\S*|\S+\.ftz\S*|\S+\.approx\S*|div\.full\S*", ptx)
    paths, for_each_thread = 2, 1024 // 128  # whole tiles, and those with a mask
    assert (
        len(re.findall(r"\bsqrt\.rn\.f32", ptx)) == len(re.findall(r"\bdiv\.rn\.f32", ptx)) == paths * for_each_thread
    )
    wide = {"fp32": {"v4": 8, "v2": 0}, "bf16": {"v4": 4, "v2": 6}, "fp16": {"v4": 6, "v2": 2}}[dtype]
    assert {width: len(re.findall(rf"ld\.global\.{width}\.b32", ptx)) for width in wide} == wide


@pytest.mark.skipif(INTERPRETED, reason="the interpreter works everywhere")
def test_why_not_on_a_cpu() -> None:
    assert "Triton" in (gpu_kernels.why_not(DTYPES, torch.device("cpu")) or "")


def test_of_an_error_only_the_first_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("\nno C compiler\nmuch more")

    monkeypatch.setattr(gpu_kernels, "_kernels", fail)
    assert gpu_kernels.why_not(DTYPES, torch.device("cpu")) == "Triton does not work on cpu: no C compiler"


def test_what_does_not_fit_is_refused() -> None:
    eight = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="dtype is one of fp32, bf16, fp16, not 'int8'"):
        gpu_kernels.square_lanes("int8", eight)
    with pytest.raises(ConfigError, match="7 B are not whole elements of bf16"):
        gpu_kernels.square_lanes("bf16", eight[:7])
    for wrong in (eight.view(torch.int16), eight[::2], eight.view(2, 4), torch.zeros(9, dtype=torch.uint8)[1:]):
        with pytest.raises(ConfigError, match="expected contiguous bytes at a multiple of 4"):
            gpu_kernels.square_lanes("bf16", wrong)
    good = gpu_kernels.AdamStep("bf16", 16, 64, 128, 4, 4, [])
    assert gpu_kernels.adam(torch.device("cpu"), [good, good._replace(runs=[(2, 2, PLAIN)])]) is None
    for runs in ([(0, 5, PLAIN)], [(2, 3, PLAIN), (0, 1, PLAIN)], [(-1, 2, PLAIN)]):
        with pytest.raises(ConfigError, match="are not in order, or not inside 4 elements"):
            gpu_kernels.adam(torch.device("cpu"), [good, good._replace(runs=runs)])
    for size in (0, 3):
        with pytest.raises(ConfigError, match=f"chunks of {size} elements are no multiples of 1024"):
            gpu_kernels.adam(torch.device("cpu"), [good._replace(chunk_elements=size)])
    with pytest.raises(ConfigError, match="dtype is one of fp32, bf16, fp16, not 'int8'"):
        gpu_kernels.adam(torch.device("cpu"), [good._replace(dtype="int8")])
    with pytest.raises(ConfigError, match="addresses 0x10, 0x42, 0x80 are not all multiples of 4"):
        gpu_kernels.adam(torch.device("cpu"), [good._replace(state=66)])
