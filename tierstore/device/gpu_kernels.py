"""Adam and the sums of squares on a CUDA GPU, bit for bit as the compiled loops of the CPU.

Scope: fp32, bf16 and fp16 weights, state and gradients that lie in the memory of a GPU; Triton, which comes with
    torch for CUDA.
Not here: the arithmetic's source and the layout of a state (see `kernels/compiled.py`, `kernels/adam.py`), when and on
    which stream an update runs.
Owner: none; the caller owns the tensors, and orders other uses of them.

[Note: the same bits on a GPU] IEEE operations in the order of `kernels/compiled.py`, without contraction
(`enable_fp_fusion=False` reaches LLVM and ptxas), denormals kept. Roots and quotients are PTX instructions: Triton 3.5
compiles its `sqrt_rn` and `div_rn` to `.ftz` ones, which treat denormals as zero. The payload of a NaN is unspecified.
Where the threads of the CPU flush denormals (`torch.set_flush_denormal`), results differ from theirs.

[Note: kernels without Triton] Functions marked `_kernel` are ordinary ones until `_kernels` is first called, so that
this module can be imported without Triton. They find each other, and `tl`, by global names. Of the arguments of a
launch, only a constexpr selects another compilation (by default, divisibility of an integer or address by 16 does so,
too): so `warm_up` can compile all variants.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from tierstore.errors import ConfigError, first_line
from tierstore.kernels import compiled
from tierstore.kernels.adam import AdamCoefficients, state_bytes_per_element
from tierstore.plan.placement import BLOCK

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

Function = TypeVar("Function", bound=Callable[..., Any])

_TYPES = {"fp32": torch.float32, "bf16": torch.int16, "fp16": torch.float16}
"""Types of weights and gradients in the kernels; bf16 as its bits."""
_TILE = 1024  # elements of a program of 128 threads
_VECTOR = 4  # elements of a load: 16 B of fp32, 8 B of the others: a thread has the same elements of all arrays
_ROWS = 64  # runs of a launch
_ROWS_AHEAD = 64  # unrolled rows of a block of squares: loads wait for no sum; ptxas starts as many as registers allow
_SQUARES_WARPS = 1  # two lanes a thread: with more threads, ptxas saves registers, and 8 rows are in flight, not 18
_cuda: Any = torch.cuda  # its functions are untyped
_sources: list[Callable[..., Any]] = []


class _Kernels(NamedTuple):
    adam: Any
    square_lanes: Any


def _kernel(function: Function) -> Function:
    _sources.append(function)
    return function


# ------------------------------------------------------------------------------------------------ what is compiled


@_kernel
def _adam_kernel(
    table: tl.tensor, DTYPE: tl.constexpr, COUPLED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, VECTOR: tl.constexpr,
) -> None:  # fmt: skip
    """Each program updates the elements [start, stop) of a run that are in one tile. Tiles are counted from element 0
    of the weights; each tile is in one chunk.

    Args:
        table: int64 [1 + fields of `_Run` + scalars, ROWS], see `_table`.
    """
    program = tl.program_id(0).to(tl.int64)
    row = tl.sum((tl.load(table + tl.arange(0, ROWS)) <= program).to(tl.int32), 0) - 1
    column = table + row
    first = (tl.load(column + ROWS) + program - tl.load(column)) * TILE
    start, stop = tl.load(column + 2 * ROWS), tl.load(column + 3 * ROWS)
    elements, chunk = tl.load(column + 4 * ROWS), tl.load(column + 5 * ROWS)
    before = first // chunk * chunk
    count, inside = tl.minimum(elements - before, chunk), first - before
    words = tl.load(column + 8 * ROWS).to(tl.pointer_type(tl.float32))
    if DTYPE == "bf16":
        place = before // 2 * 5 + inside
        halves = tl.load(column + 8 * ROWS).to(tl.pointer_type(tl.int16))
        complement = _at(halves, before * 5 + 4 * count + inside, ALIGNED, TILE, VECTOR)
        weights = tl.load(column + 6 * ROWS).to(tl.pointer_type(tl.int16))
        gradient = tl.load(column + 7 * ROWS).to(tl.pointer_type(tl.int16))
    elif DTYPE == "fp16":
        place = before * 3 + count + inside
        complement = _at(words, place - count, ALIGNED, TILE, VECTOR)
        weights = tl.load(column + 6 * ROWS).to(tl.pointer_type(tl.float16))
        gradient = tl.load(column + 7 * ROWS).to(tl.pointer_type(tl.float16))
    else:
        place = before * 2 + inside
        complement = words
        weights = tl.load(column + 6 * ROWS).to(tl.pointer_type(tl.float32))
        gradient = tl.load(column + 7 * ROWS).to(tl.pointer_type(tl.float32))
    weights, gradient = _at(weights, first, ALIGNED, TILE, VECTOR), _at(gradient, first, ALIGNED, TILE, VECTOR)
    m, v = _at(words, place, ALIGNED, TILE, VECTOR), _at(words, place + count, ALIGNED, TILE, VECTOR)
    c = (
        _scalar(column, 9, ROWS), _scalar(column, 10, ROWS), _scalar(column, 11, ROWS), _scalar(column, 12, ROWS),
        _scalar(column, 13, ROWS), _scalar(column, 14, ROWS), _scalar(column, 15, ROWS), _scalar(column, 16, ROWS),
        _scalar(column, 17, ROWS), _scalar(column, 18, ROWS),
    )  # fmt: skip
    if (start <= first) & (first + TILE <= stop):
        _adam_tile(weights, gradient, m, v, complement, None, c, DTYPE, COUPLED)  # a mask would undo vector loads
    else:
        i = first + tl.arange(0, TILE)
        _adam_tile(weights, gradient, m, v, complement, (start <= i) & (i < stop), c, DTYPE, COUPLED)


@_kernel
def _scalar(column: tl.tensor, NUMBER: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    return tl.load(column + NUMBER * ROWS).to(tl.int32).to(tl.float32, bitcast=True)


@_kernel
def _at(
    base: tl.tensor, first: tl.tensor, ALIGNED: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr
) -> tl.tensor:
    """The addresses of a tile's elements; ALIGNED: the first address is a multiple of VECTOR elements."""
    address = base + first  # the hint comes after this: given for an argument, it would be lost
    if ALIGNED:
        address = tl.multiple_of(address, VECTOR * address.dtype.element_ty.primitive_bitwidth // 8)
    return address + tl.arange(0, TILE)


@_kernel
def _adam_tile(
    weights: tl.tensor, gradient: tl.tensor, m: tl.tensor, v: tl.tensor, complement: tl.tensor, inside: tl.tensor,
    c: tl.tuple, DTYPE: tl.constexpr, COUPLED: tl.constexpr,
) -> None:  # fmt: skip
    if DTYPE == "bf16":
        p = _join(tl.load(weights, inside), tl.load(complement, inside))
    elif DTYPE == "fp16":
        p = tl.load(complement, inside)
    else:
        p = tl.load(weights, inside)
    g = _widen(tl.load(gradient, inside), DTYPE)
    p, new_m, new_v = _adam_element(p, tl.load(m, inside), tl.load(v, inside), g, c, COUPLED)
    tl.store(m, new_m, inside)
    tl.store(v, new_v, inside)
    if DTYPE == "bf16":
        tl.store(weights, _round_away(p), inside)
        tl.store(complement, _residual_of(p), inside)
    elif DTYPE == "fp16":
        tl.store(weights, p.to(tl.float16), inside)  # to nearest, ties to even
        tl.store(complement, p, inside)
    else:
        tl.store(weights, p, inside)


@_kernel
def _adam_element(
    p: tl.tensor, m: tl.tensor, v: tl.tensor, g: tl.tensor, c: tl.tuple, COUPLED: tl.constexpr
) -> tl.tuple:
    decay, coupled_decay, beta1, rest1, beta2, rest2, inverse_root, eps, rate, gradient_scale = c
    g = g * gradient_scale
    if COUPLED:
        g = g + coupled_decay * p
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    return p * decay - rate * _quotient(m, _root(v) * inverse_root + eps), m, v


@_kernel
def _root(x: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@_kernel
def _quotient(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1)


@_kernel
def _widen(element: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    if DTYPE == "bf16":
        return (element.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return element.to(tl.float32)


@_kernel
def _join(weight: tl.tensor, residual: tl.tensor) -> tl.tensor:
    bits = weight.to(tl.int32) << 16
    value = (bits + residual.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(value != value, bits.to(tl.float32, bitcast=True), value)


@_kernel
def _round_away(value: tl.tensor) -> tl.tensor:
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value != value, (bits >> 16) | 0x0040, (bits + 0x8000) >> 16).to(tl.int16)


@_kernel
def _residual_of(value: tl.tensor) -> tl.tensor:
    return tl.where(value != value, 0, value.to(tl.int32, bitcast=True)).to(tl.int16)


@_kernel
def _square_lanes_kernel(
    gradient: tl.tensor, lanes: tl.tensor, elements: tl.int64,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Each program sums one block, and each of its threads some lanes."""
    block, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    count = tl.minimum(elements - block * BLOCK, BLOCK).to(tl.int32)
    gradient += block * BLOCK
    sums = tl.zeros([LANES], tl.float64)
    for row in range(0, tl.cdiv(count, LANES), AHEAD):
        for k in tl.static_range(AHEAD):
            i = (row + k) * LANES + lane
            x = _widen(tl.load(gradient + i, i < count, 0), DTYPE).to(tl.float64)
            sums = tl.fma(x, x, sums)  # x * x is exact, so this rounds as an addition does
    tl.store(lanes + block * LANES + lane, sums)


# ------------------------------------------------------------------------------------------------ what is called


@functools.cache
def _kernels() -> _Kernels:
    triton = importlib.import_module("triton")
    names = globals()
    names["tl"] = importlib.import_module("triton.language")
    for function in _sources:
        plain = [name for name, note in function.__annotations__.items() if note != "tl.constexpr"]
        names[function.__name__] = triton.jit(function, do_not_specialize=plain)
    return _Kernels(names["_adam_kernel"], names["_square_lanes_kernel"])


def why_not(dtypes: Iterable[str], device: torch.device) -> str | None:
    """None if Triton works on this device for these dtypes, and is warmed up; otherwise why not, in one sentence.

    Blocks, Threads: as `warm_up`.
    """
    try:
        warm_up(dtypes, device)
    except torch.OutOfMemoryError:
        raise
    except ModuleNotFoundError as error:
        return f"Triton is not installed: {error}"
    except Exception as error:  # from a compiler, a driver or a file system: there is no list of them
        return f"Triton does not work on {device}: {first_line(error)}"
    return None


def warm_up(dtypes: Iterable[str], device: torch.device) -> None:
    """Compiles and loads all that `adam` and `square_lanes` run for these dtypes on this device, and waits for it.

    Blocks: for seconds if Triton's cache is empty.
    Threads: one at a time; later calls of the other functions may come from any.
    """
    for dtype in dtypes:
        item, elements = _TYPES[dtype].itemsize, 16
        for decoupled, offset in itertools.product((True, False), (0, 4)):
            weights, state, gradient = (
                torch.zeros(offset + nbytes, dtype=torch.uint8, device=device)[offset:]
                for nbytes in (elements * item, elements * state_bytes_per_element(dtype), elements * item)
            )
            c = AdamCoefficients(1.0, 0.5, 0.5, 1.0, 1.0, 1, decoupled)
            places = (weights.data_ptr(), state.data_ptr(), gradient.data_ptr())
            adam(device, [AdamStep(dtype, *places, elements, elements, [(0, elements, c)])])
        square_lanes(dtype, gradient).cpu()


class AdamStep(NamedTuple):
    """`kernels.adam.update` of runs of elements, in place.

    Attributes:
        weights, state, gradient: addresses in the memory of a device, multiples of 4 B. Loads are narrower if one is
            not a multiple of 16 B, or `elements` is not a multiple of 4.
        state: the states of the chunks, one after the other, see [Note: state of a chunk].
        chunk_elements: size of each chunk; the last one, or the only one, may have fewer elements.
        runs: start, stop and coefficients of each run, in order; runs do not overlap.
    """

    dtype: str
    weights: int
    state: int
    gradient: int
    elements: int
    chunk_elements: int
    runs: Sequence[tuple[int, int, AdamCoefficients]]


class _Run(NamedTuple):
    """A run in the table of a launch: a column has the number of the run's first program, these fields, and the bits of
    its scalars."""

    first_tile: int
    start: int
    stop: int
    elements: int
    chunk_elements: int
    weights: int
    gradient: int
    state: int

    @property
    def programs(self) -> int:
        return -(-self.stop // _TILE) - self.first_tile


def adam(device: torch.device, steps: Sequence[AdamStep]) -> None:
    """Queues Adam steps on the current stream of a device.

    Raises:
        ConfigError: the numbers of a step make no sense; nothing was queued.
    """
    launches: dict[tuple[str, bool, bool], list[tuple[_Run, compiled.Scalars]]] = {}
    known: dict[AdamCoefficients, compiled.Scalars] = {}
    for step in steps:
        _check(step)
        is_aligned = _is_aligned(step)
        places = (step.elements, step.chunk_elements, step.weights, step.gradient, step.state)
        for start, stop, c in step.runs:
            if start < stop:
                scalars = known[c] = known.get(c) or c.scalars()
                kind = (step.dtype, bool(scalars.coupled_decay != 0), is_aligned)
                launches.setdefault(kind, []).append((_Run(start // _TILE, start, stop, *places), scalars))
    with _cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for (dtype, coupled, aligned), runs in launches.items():
            for first in range(0, len(runs), _ROWS):
                some, scalars_of_some = zip(*runs[first : first + _ROWS])
                _kernels().adam[(sum(run.programs for run in some),)](
                    _table(some, scalars_of_some).to(device), DTYPE=dtype, COUPLED=coupled, ALIGNED=aligned,
                    ROWS=_ROWS, TILE=_TILE, VECTOR=_VECTOR, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip


def _table(runs: Sequence[_Run], scalars: Sequence[compiled.Scalars]) -> torch.Tensor:
    """The table that `_adam_kernel` reads, on the host; no program uses the columns that are left over."""
    table = np.full((1 + len(_Run._fields) + len(compiled.Scalars._fields), _ROWS), np.iinfo(np.int64).max)
    used = table[:, : len(runs)]
    used[0] = list(itertools.accumulate((run.programs for run in runs[:-1]), initial=0))
    used[1 : 1 + len(_Run._fields)] = np.array(runs, np.int64).T
    used[1 + len(_Run._fields) :] = np.array(scalars, np.float32).view(np.int32).T
    return torch.from_numpy(table)


def _check(step: AdamStep) -> None:
    edges = [0, *itertools.chain.from_iterable(run[:2] for run in step.runs), step.elements]
    if edges != sorted(edges):
        raise ConfigError(f"runs {edges[1:-1]} are not in order, or not inside {step.elements} elements")
    if step.chunk_elements < 1 or (step.chunk_elements < step.elements and step.chunk_elements % _TILE):
        raise ConfigError(f"chunks of {step.chunk_elements} elements are no multiples of {_TILE}")
    if (step.weights | step.state | step.gradient) % 4:
        places = ", ".join(map(hex, (step.weights, step.state, step.gradient)))
        raise ConfigError(f"addresses {places} are not all multiples of 4")


def _is_aligned(step: AdamStep) -> bool:
    """Whether loads may be wide."""
    wide = _VECTOR * _type_of(step.dtype).itemsize
    is_wide = step.weights % wide == 0 and step.gradient % wide == 0
    return is_wide and step.state % 16 == 0 and step.elements % _VECTOR == 0


def square_lanes(dtype: str, gradient: torch.Tensor) -> torch.Tensor:
    """The lanes of `compiled.square_sums`: `compiled.add_lanes` of them, on the host, gives its sums.

    Queued on the current stream of the gradient's device.

    Shapes: gradient uint8 [n * item], contiguous, at a multiple of 4; result fp64 [ceil(n / BLOCK), LANES].
    Raises:
        ConfigError: the gradient is not whole elements.
    """
    elements = _count(dtype, gradient)
    blocks = -(-elements // BLOCK)
    lanes = torch.empty((blocks, compiled.LANES), dtype=torch.float64, device=gradient.device)
    if blocks:
        with _cuda.device_of(gradient):
            _kernels().square_lanes[(blocks,)](
                gradient.view(_TYPES[dtype]), lanes, elements, DTYPE=dtype, BLOCK=BLOCK, LANES=compiled.LANES,
                AHEAD=_ROWS_AHEAD, num_warps=_SQUARES_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return lanes


def _count(dtype: str, tensor: torch.Tensor) -> int:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.data_ptr() % 4:
        raise ConfigError(f"expected contiguous bytes at a multiple of 4, got {tensor.dtype}{list(tensor.shape)}")
    elements, rest = divmod(tensor.numel(), _type_of(dtype).itemsize)
    if rest:
        raise ConfigError(f"{tensor.numel()} B are not whole elements of {dtype}")
    return elements


def _type_of(dtype: str) -> torch.dtype:
    if dtype not in _TYPES:
        raise ConfigError(f"dtype is one of {', '.join(_TYPES)}, not {dtype!r}")
    return _TYPES[dtype]
