"""The compiled loops over elements, and the bit patterns of bf16 and fp16 in them.

Scope: every numba function of the package, in one file because numba's on-disk cache looks at the time stamp of the
    file that holds the called function only: an edit of a helper elsewhere would leave stale machine code in use.
Not here: checks of arguments and the layout of a state (see `adam.py`, `norms.py`); threads (callers bring their own,
    every loop releases the GIL).
Owner: none; pure functions on arrays that the caller owns.

[Note: bit-exact elements] Every element is computed from its own inputs by IEEE operations in a fixed order. There is
no fastmath and no contraction to fused multiply-add, so that vector bodies, scalar remainders, threads and machines
agree. The payload of a NaN is unspecified. Left to the caller: the flush-to-zero setting (`torch.set_flush_denormal`)
belongs to a thread and must be the same in all threads that run these loops, or results differ where a value, m or v
(v near g * g, so for |g| < 1e-19 already) is denormal. On Linux a new thread inherits the setting of its creator.

[Note: element types] A loop is written once and specialized by the dtype of its arrays: float32 is fp32, uint16 is
bf16, and int16 is fp16 (the same 16 bits; the sign of the integer type only tells the two apart).
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic as _intrinsic

from tierstore.errors import ConfigError

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

compiled: Callable[[Function], Function] = numba.njit(nogil=True, cache=True, error_model="numpy")
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _intrinsic

LANES = 64  # partial sums of a block; wide enough that the additions of one lane do not wait for each other

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT16, _INT32 = ir.IntType(16), ir.IntType(32)


# ------------------------------------------------------------------------------------------------ intrinsics


def _typed(result: Any, arguments: tuple[Any, ...], build: Callable[..., Any]) -> Any:
    """What a numba intrinsic returns: a signature, and the code that emits LLVM instructions for it."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return build(builder, *values)

    return result(*arguments), generate


def _require_half_instructions() -> None:
    """Without F16C the compiler calls a library function that is not there, and the process crashes."""
    if platform.machine() in ("x86_64", "AMD64") and not binding.get_host_cpu_features().get("f16c", False):
        raise ConfigError("fp16 kernels need a processor with F16C (any x86-64-v3); use bf16 or fp32")


def _high_half(builder: Any, bits: Any) -> Any:
    return builder.lshr(bits, _INT32(16))


def _bf16_or_nan(builder: Any, value: Any, bits: Any, rounded: Any) -> Any:
    """The upper half of `rounded`; of a NaN its own upper half, made quiet: rounding could carry it to inf or 0."""
    quiet = builder.or_(_high_half(builder, bits), _INT32(0x0040))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, _high_half(builder, rounded)), _INT16)


@intrinsic
def widen(_typing: Any, element: Any) -> Any:
    """fp32 of an fp32, bf16 or fp16 element; exact."""
    if element == types.float32:
        return _typed(types.float32, (element,), lambda _, value: value)
    if element == types.uint16:
        return _typed(
            types.float32, (element,), lambda b, value: b.bitcast(b.shl(b.zext(value, _INT32), _INT32(16)), _FLOAT)
        )
    if element == types.int16:
        _require_half_instructions()
        return _typed(types.float32, (element,), lambda b, value: b.fpext(b.bitcast(value, _HALF), _FLOAT))
    return None


@intrinsic
def round_even(_typing: Any, like: Any, value: Any) -> Any:
    """fp32 `value` as an element of the type of `like`, to nearest, ties to even (as torch casts)."""

    def to_bf16(b: Any, _like: Any, value: Any) -> Any:
        bits = b.bitcast(value, _INT32)
        odd = b.and_(_high_half(b, bits), _INT32(1))
        return _bf16_or_nan(b, value, bits, b.add(bits, b.add(odd, _INT32(0x7FFF))))

    if like == types.float32:
        return _typed(like, (like, value), lambda _, _like, value: value)
    if like == types.uint16:
        return _typed(like, (like, value), to_bf16)
    if like == types.int16:
        _require_half_instructions()
        return _typed(like, (like, value), lambda b, _like, value: b.bitcast(b.fptrunc(value, _HALF), _INT16))
    return None


@intrinsic
def round_away(_typing: Any, value: Any) -> Any:
    """bf16 of fp32, to nearest, ties away from zero: then `bits(value) - (bf16 << 16)` always fits an int16."""

    def build(b: Any, value: Any) -> Any:
        bits = b.bitcast(value, _INT32)
        return _bf16_or_nan(b, value, bits, b.add(bits, _INT32(0x8000)))

    return _typed(types.uint16, (value,), build)


@intrinsic
def residual_of(_typing: Any, value: Any) -> Any:
    """What `round_away(value)` dropped: the low 16 bits as an int16; 0 for a NaN."""

    def build(b: Any, value: Any) -> Any:
        low = b.trunc(b.bitcast(value, _INT32), _INT16)
        return b.select(b.fcmp_unordered("uno", value, value), _INT16(0), low)

    return _typed(types.int16, (value,), build)


@intrinsic
def join(_typing: Any, weight: Any, residual: Any) -> Any:
    """fp32 master of a bf16 weight and its residual.

    A zero has no negative residual; one that stayed behind when a weight was set to zero from outside counts as 0
    (subtracted from the bits of zero it would make a NaN).
    """

    def build(b: Any, weight: Any, residual: Any) -> Any:
        is_zero = b.icmp_unsigned("==", b.shl(weight, _INT16(1)), _INT16(0))
        is_stale = b.and_(is_zero, b.icmp_signed("<", residual, _INT16(0)))
        low = b.sext(b.select(is_stale, _INT16(0), residual), _INT32)
        return b.bitcast(b.add(b.shl(b.zext(weight, _INT32), _INT32(16)), low), _FLOAT)

    return _typed(types.float32, (weight, residual), build)


# ------------------------------------------------------------------------------------------------ Adam


class Scalars(NamedTuple):
    """What an update needs besides arrays, rounded once to fp32. See `adam.AdamCoefficients.scalars`."""

    decay: np.float32
    coupled_decay: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    inverse_root: np.float32
    eps: np.float32
    rate: np.float32
    gradient_scale: np.float32


@compiled
def adam_element(p: Any, m: Any, v: Any, g: Any, c: Scalars) -> tuple[Any, Any, Any]:
    """(p, m, v) of one element after one step; all fp32."""
    g = g * c.gradient_scale
    if c.coupled_decay != 0:  # not `+ 0 * p`: an infinite weight would turn m and v into NaN
        g = g + c.coupled_decay * p
    m = m * c.beta1 + g * c.rest1
    v = v * c.beta2 + g * g * c.rest2
    return p * c.decay - c.rate * (m / (math.sqrt(v) * c.inverse_root + c.eps)), m, v


@compiled
def adam_fp32(weights: Array, gradient: Array, m: Array, v: Array, copy: Array | None, c: Scalars) -> None:
    """`copy`, here and below, gets the new weights, too; None leaves that out of the machine code."""
    for i in range(weights.size):
        p, m[i], v[i] = adam_element(weights[i], m[i], v[i], gradient[i], c)
        weights[i] = p
        if copy is not None:
            copy[i] = p


@compiled
def adam_bf16(
    weights: Array, gradient: Array, m: Array, v: Array, residual: Array, copy: Array | None, c: Scalars
) -> None:
    for i in range(weights.size):
        p, m[i], v[i] = adam_element(join(weights[i], residual[i]), m[i], v[i], widen(gradient[i]), c)
        weight = round_away(p)
        weights[i] = weight
        residual[i] = residual_of(p)
        if copy is not None:
            copy[i] = weight


@compiled
def adam_fp16(
    weights: Array, gradient: Array, m: Array, v: Array, master: Array, copy: Array | None, c: Scalars
) -> None:
    for i in range(weights.size):
        p, m[i], v[i] = adam_element(master[i], m[i], v[i], widen(gradient[i]), c)
        weight = round_even(weights[i], p)
        weights[i] = weight
        master[i] = p
        if copy is not None:
            copy[i] = weight


# ------------------------------------------------------------------------------------------------ conversions


@compiled
def split_bf16(master: Array, weights: Array, residual: Array) -> None:
    for i in range(master.size):
        weights[i] = round_away(master[i])
        residual[i] = residual_of(master[i])


@compiled
def join_bf16(weights: Array, residual: Array, master: Array) -> None:
    for i in range(weights.size):
        master[i] = join(weights[i], residual[i])


@compiled
def narrow_fp16(master: Array, weights: Array) -> None:
    for i in range(master.size):
        weights[i] = round_even(weights[i], master[i])


@compiled
def adopt_fp16(weights: Array, master: Array) -> None:
    for i in range(weights.size):
        kept = round_even(weights[i], master[i]) == weights[i]
        master[i] = master[i] if kept else widen(weights[i])


# ------------------------------------------------------------------------------------------------ gradients


@compiled
def square_sums(values: Array, out: Array, block: int) -> None:
    """out[k] = sum of squares of block k: lane j adds elements j, j + LANES, ... of the block, then lanes in order."""
    lanes = np.empty(LANES, np.float64)
    for k in range(out.size):
        lanes[:] = 0.0
        row = values[k * block : (k + 1) * block]
        whole = row.size // LANES * LANES
        for i in range(0, whole, LANES):
            for j in range(LANES):
                x = np.float64(widen(row[i + j]))
                lanes[j] += x * x
        for j in range(row.size - whole):
            x = np.float64(widen(row[whole + j]))
            lanes[j] += x * x
        total = 0.0
        for j in range(LANES):
            total += lanes[j]
        out[k] = total


@compiled
def copy_squares(source: Array, target: Array, start: int, lanes: Array, block: int) -> None:
    """Copies to element `start` of `target`; lanes[k] gets what `square_sums` would add to the lanes of block k."""
    done = 0
    while done < source.size:
        row, lane = lanes[start // block], start % LANES
        size = min(source.size - done, block - start % block)
        from_, to = source[done : done + size], target[start : start + size]
        head = min(-lane % LANES, size)
        body = (size - head) // LANES * LANES
        copy_squares_in(from_, to, 0, head, lane, row)
        from_body, to_body = from_[head : head + body], to[head : head + body]
        for i in range(0, body, LANES):
            for j in range(LANES):
                to_body[i + j] = from_body[i + j]
                x = np.float64(widen(from_body[i + j]))
                row[j] += x * x
        copy_squares_in(from_, to, head + body, size, lane, row)
        done, start = done + size, start + size


@compiled
def copy_squares_in(source: Array, target: Array, begin: int, end: int, lane: int, lanes: Array) -> None:
    """Elements [begin, end), of which element 0 belongs to this lane."""
    for i in range(begin, end):
        target[i] = source[i]
        x = np.float64(widen(source[i]))
        lanes[(lane + i) % LANES] += x * x


@compiled
def add_lanes(lanes: Array, out: Array) -> None:
    for k in range(out.size):
        total = 0.0
        for j in range(LANES):
            total += lanes[k, j]
        out[k] = total


@compiled
def add_into(total: Array, gradient: Array) -> None:
    for i in range(total.size):
        total[i] = round_even(total[i], widen(total[i]) + widen(gradient[i]))
