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
bf16, and int16 is fp16 (the same 16 bits; the sign of the integer type only tells the two apart). The code that emits
the instructions of one element also emits those of a vector, lane by lane.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic as _intrinsic

from tierstore.errors import ConfigError
from tierstore.kernels.compile_cache import compiled

Array = npt.NDArray[Any]
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _intrinsic
intrinsic_with_constants: Callable[[Callable[..., Any]], Callable[..., Any]] = _intrinsic(prefer_literal=True)

LANES = 64  # partial sums of a block; wide enough that the additions of one lane do not wait for each other

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_INT16, _INT32 = ir.IntType(16), ir.IntType(32)
_ALIGNMENT = 1  # of vectors: they begin anywhere


# ------------------------------------------------------------------------------------------------ intrinsics


def _typed(result: Any, arguments: tuple[Any, ...], build: Callable[..., Any]) -> Any:
    """What a numba intrinsic returns: a signature, and the code that emits LLVM instructions for it."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return build(builder, *values)

    return result(*arguments), generate


def _require_half_instructions() -> None:
    """Raises without F16C: the compiler would call a library function that does not exist, and the process crash."""
    if platform.machine() in ("x86_64", "AMD64") and not binding.get_host_cpu_features().get("f16c", False):
        raise ConfigError("fp16 kernels need a processor with F16C (any x86-64-v3); use bf16 or fp32")


def _filled(like: Any, number: int) -> Any:
    """`number` as a constant of the type of `like`: an integer, or a vector of integers with `number` in each lane."""
    kind = like.type
    return ir.Constant(kind, [ir.Constant(kind.element, number)] * kind.count if _is_vector(like) else number)


def _as_wide(element: Any, like: Any) -> Any:
    """The type `element`, or a vector type of it with as many lanes as `like` has."""
    return ir.VectorType(element, like.type.count) if _is_vector(like) else element


def _is_vector(value: Any) -> bool:
    return isinstance(value.type, ir.VectorType)


def _upper_half(b: Any, bits: Any) -> Any:
    return b.trunc(b.lshr(bits, _filled(bits, 16)), _as_wide(_INT16, bits))


def _bits(b: Any, value: Any) -> Any:
    """The bits of fp32. Each NaN becomes the quiet one that ends in zeros: rounding others could carry to inf or 0."""
    bits = b.bitcast(value, _as_wide(_INT32, value))
    return b.select(b.fcmp_unordered("uno", value, value), _filled(bits, 0x7FC00000), bits)


def _unchanged(_b: Any, value: Any) -> Any:
    return value


def _widen_bf16(b: Any, element: Any) -> Any:
    bits = b.zext(element, _as_wide(_INT32, element))
    return b.bitcast(b.shl(bits, _filled(bits, 16)), _as_wide(_FLOAT, element))


def _widen_fp16(b: Any, element: Any) -> Any:
    return b.fpext(b.bitcast(element, _as_wide(_HALF, element)), _as_wide(_FLOAT, element))


def _round_even_bf16(b: Any, value: Any) -> Any:
    bits = _bits(b, value)
    odd = b.and_(b.lshr(bits, _filled(bits, 16)), _filled(bits, 1))
    return _upper_half(b, b.add(bits, b.add(odd, _filled(bits, 0x7FFF))))


def _round_even_fp16(b: Any, value: Any) -> Any:
    return b.bitcast(b.fptrunc(value, _as_wide(_HALF, value)), _as_wide(_INT16, value))


def _round_away(b: Any, value: Any) -> Any:
    bits = _bits(b, value)
    return _upper_half(b, b.add(bits, _filled(bits, 0x8000)))


def _residual_of(b: Any, value: Any) -> Any:
    return b.trunc(_bits(b, value), _as_wide(_INT16, value))


def _join(b: Any, weight: Any, residual: Any) -> Any:
    low = b.sext(residual, _as_wide(_INT32, residual))
    bits = b.shl(b.zext(weight, low.type), _filled(low, 16))
    value, alone = (b.bitcast(each, _as_wide(_FLOAT, weight)) for each in (b.add(bits, low), bits))
    return b.select(b.fcmp_unordered("uno", value, value), alone, value)


_WIDEN = {types.float32: _unchanged, types.uint16: _widen_bf16, types.int16: _widen_fp16}
_ROUND_EVEN = {types.float32: _unchanged, types.uint16: _round_even_bf16, types.int16: _round_even_fp16}


@intrinsic
def widen(_typing: Any, element: Any) -> Any:
    """fp32 of an fp32, bf16 or fp16 element; exact."""
    if element == types.int16:
        _require_half_instructions()
    return _typed(types.float32, (element,), _WIDEN[element]) if element in _WIDEN else None


@intrinsic
def round_even(_typing: Any, like: Any, value: Any) -> Any:
    """fp32 `value` as an element of the type of `like`, to nearest, ties to even (as torch casts)."""
    if like == types.int16:
        _require_half_instructions()
    return _typed(like, (like, value), lambda b, _, value: _ROUND_EVEN[like](b, value)) if like in _ROUND_EVEN else None


@intrinsic
def round_away(_typing: Any, value: Any) -> Any:
    """bf16 of fp32, to nearest, ties away from zero: then `bits(value) - (bf16 << 16)` always fits an int16."""
    return _typed(types.uint16, (value,), _round_away)


@intrinsic
def residual_of(_typing: Any, value: Any) -> Any:
    """What `round_away(value)` dropped: the low 16 bits as an int16; 0 for a NaN."""
    return _typed(types.int16, (value,), _residual_of)


@intrinsic
def join(_typing: Any, weight: Any, residual: Any) -> Any:
    """fp32 master of a bf16 weight and its residual.

    No residual makes a NaN of a number: one that would stayed behind when a weight was set to zero or infinity from
    outside, and counts as 0.
    """
    return _typed(types.float32, (weight, residual), _join)


@intrinsic
def pointer_to(_typing: Any, like: Any, address: Any) -> Any:
    """A pointer to elements of the type of the array `like`."""
    element = _FLOAT if like.dtype == types.float32 else _INT16
    return _typed(
        types.CPointer(like.dtype), (like, address), lambda b, _like, value: b.inttoptr(value, element.as_pointer())
    )


# ------------------------------------------------------------------------------------------------ xxh3

_XXH3_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_STRIPE_BYTES, _STRIPES = 64, 16
XXH3_BLOCK_BYTES = _STRIPE_BYTES * _STRIPES
"""`xxh3` takes multiples of this."""

_SEEDS = tuple(
    np.uint64(seed)
    for seed in (
        _PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1,
    )
)  # fmt: skip
_LAST_KEYS = tuple(np.uint64(int.from_bytes(_XXH3_SECRET[11 + 8 * i :][:8], "little")) for i in range(8))
_INT64, _INT128 = ir.IntType(64), ir.IntType(128)
_STRIPE = ir.VectorType(_INT64, 8)


def _stripe(values: Iterable[int]) -> Any:
    return ir.Constant(_STRIPE, [_INT64(value) for value in values])


def _secret_at(offset: int) -> Any:
    return _stripe(int.from_bytes(_XXH3_SECRET[offset + 8 * i :][:8], "little") for i in range(8))


def _add_stripes(offsets: Sequence[int], *, scrambles: bool) -> Callable[..., Any]:
    """The code that adds one stripe after the other to eight sums, each keyed by the secret from its offset on."""

    def build(b: Any, data: Any, sums: Any) -> Any:
        data = b.inttoptr(data, _STRIPE.as_pointer())
        sums = b.inttoptr(sums, _STRIPE.as_pointer())
        products, values = b.load(sums, align=8), _stripe([0] * 8)
        for number, offset in enumerate(offsets):
            value = b.load(b.gep(data, [_INT32(number)]), align=1)
            keyed = b.xor(value, _secret_at(offset))
            low, high = b.and_(keyed, _stripe([0xFFFFFFFF] * 8)), b.lshr(keyed, _stripe([32] * 8))
            products, values = b.add(products, b.mul(low, high)), b.add(values, value)
        neighbours = ir.Constant(ir.VectorType(_INT32, 8), [_INT32(i ^ 1) for i in range(8)])
        total = b.add(products, b.shuffle_vector(values, values, neighbours))  # each value goes to its neighbour's sum
        if scrambles:
            total = b.xor(b.xor(total, b.lshr(total, _stripe([47] * 8))), _secret_at(len(_XXH3_SECRET) - _STRIPE_BYTES))
            total = b.mul(total, _stripe([_PRIME32_1] * 8))
        b.store(total, sums, align=8)
        return ir.Constant(ir.IntType(8).as_pointer(), None)  # Python's None

    return build


_ADD_BLOCK = _add_stripes([8 * i for i in range(_STRIPES)], scrambles=True)
_ADD_LAST_BLOCK = _add_stripes([*(8 * i for i in range(_STRIPES - 1)), len(_XXH3_SECRET) - _STRIPE_BYTES - 7],
                               scrambles=False)  # fmt: skip


@intrinsic
def add_block(_typing: Any, data: Any, sums: Any) -> Any:
    """Adds a block at the address `data` to the eight sums at the address `sums`."""
    return _typed(types.none, (data, sums), _ADD_BLOCK)


@intrinsic
def add_last_block(_typing: Any, data: Any, sums: Any) -> Any:
    """As `add_block`, for the block that ends a message."""
    return _typed(types.none, (data, sums), _ADD_LAST_BLOCK)


@intrinsic
def fold(_typing: Any, a: Any, b: Any) -> Any:
    """The upper half xor the lower half of the 128-bit product of two uint64."""

    def build(b: Any, first: Any, second: Any) -> Any:
        product = b.mul(b.zext(first, _INT128), b.zext(second, _INT128))
        return b.trunc(b.xor(product, b.lshr(product, _INT128(64))), _INT64)

    return _typed(types.uint64, (a, b), build)


@compiled
def xxh3(address: int, nbytes: int, sums: Array) -> Any:
    """XXH3 (64 bits, no seed) of the bytes at an address; `nbytes` is a positive multiple of `XXH3_BLOCK_BYTES`.

    Source: the specification of xxHash, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, inputs of more
    than 240 bytes. Values are added to their neighbours' sums once per block and not once per stripe: the sums are the
    same, and vectors are shuffled only once per block.

    Args:
        sums: eight uint64 to work with.
    """
    for i in range(8):
        sums[i] = _SEEDS[i]
    for block in range(nbytes // XXH3_BLOCK_BYTES - 1):
        add_block(np.uint64(address + block * XXH3_BLOCK_BYTES), np.uint64(sums.ctypes.data))
    add_last_block(np.uint64(address + nbytes - XXH3_BLOCK_BYTES), np.uint64(sums.ctypes.data))
    total = np.uint64(nbytes) * np.uint64(_PRIME64_1)
    for i in range(4):
        total += fold(sums[2 * i] ^ _LAST_KEYS[2 * i], sums[2 * i + 1] ^ _LAST_KEYS[2 * i + 1])
    total ^= total >> np.uint64(37)
    total *= np.uint64(0x165667919E3779F9)
    return total ^ (total >> np.uint64(32))


@compiled
def leaf_digests(data: Array, leaf: int, out: Array) -> None:
    """out[k] = `xxh3` of bytes [k * leaf, (k + 1) * leaf) of `data`; both are multiples of `XXH3_BLOCK_BYTES`."""
    sums, address = np.empty(8, np.uint64), data.ctypes.data
    for k in range(out.size):
        out[k] = xxh3(address + k * leaf, min(leaf, data.size - k * leaf), sums)


# ------------------------------------------------------------------------------------------------ Adam


class Scalars(NamedTuple):
    """The factors of an update, rounded once to fp32. See `adam.AdamCoefficients.scalars`."""

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


_AT_ONCE = 16
"""Elements in the vectors of Adam: 16-bit ones then fill a register of AVX2 as fp32 fills two.

By itself the compiler takes 8, as many fp32 elements as fit, and half of each bf16 register stays empty: that took 1.16
ns for an element in the caches where this takes 0.86 (one core of an EPYC with AVX2, 2026-11-29).
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Floats:
    """fp32 in vectors, with operators that emit their instructions."""

    builder: Any
    value: Any

    def __add__(self, other: _Floats) -> _Floats:
        return _Floats(self.builder, self.builder.fadd(self.value, other.value))

    def __sub__(self, other: _Floats) -> _Floats:
        return _Floats(self.builder, self.builder.fsub(self.value, other.value))

    def __mul__(self, other: _Floats) -> _Floats:
        return _Floats(self.builder, self.builder.fmul(self.value, other.value))

    def __truediv__(self, other: _Floats) -> _Floats:
        return _Floats(self.builder, self.builder.fdiv(self.value, other.value))

    def root(self) -> _Floats:
        kind, functions = self.value.type, self.builder.module.globals
        name = f"llvm.sqrt.v{kind.count}f32"
        function = functions.get(name) or ir.Function(self.builder.module, ir.FunctionType(kind, [kind]), name)
        return _Floats(self.builder, self.builder.call(function, [self.value]))


def _adam(old: Sequence[_Floats], c: Any, *, is_coupled: bool) -> tuple[_Floats, _Floats, _Floats]:
    """(p, m, v) after one step, from (p, m, v, g); `c` is `Scalars`, each in all lanes."""
    p, m, v, g = old
    g = g * c.gradient_scale
    if is_coupled:  # not `+ 0 * p`: an infinite weight would turn m and v into NaN
        g = g + c.coupled_decay * p
    m = m * c.beta1 + g * c.rest1
    v = v * c.beta2 + g * g * c.rest2
    return p * c.decay - c.rate * (m / (v.root() * c.inverse_root + c.eps)), m, v


def _vector_at(context: Any, b: Any, kind: Any, array: Any, i: Any, lanes: int) -> Any:
    """A pointer to elements [i, i + lanes) of an array."""
    element = _FLOAT if kind.dtype == types.float32 else _INT16
    first = b.gep(context.make_array(kind)(context, b, array).data, [i])
    return b.bitcast(first, ir.VectorType(element, lanes).as_pointer())


def _in_all_lanes(b: Any, scalar: Any, lanes: int) -> Any:
    vector = b.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _INT32(0))
    return b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes))


@intrinsic_with_constants
def adam_lanes(
    _typing: Any, lanes: Any, is_coupled: Any, weights: Any, gradient: Any, m: Any, v: Any, complement: Any, copy: Any,
    i: Any, c: Any,
) -> Any:  # fmt: skip
    """One step of Adam on the elements [i, i + lanes) of a chunk; `lanes` and `is_coupled` are constants."""
    if not isinstance(lanes, types.IntegerLiteral):  # a second attempt, after a type was refused
        return None
    kinds, count = [weights, gradient, m, v, complement, copy], lanes.literal_value
    is_fp32, is_bf16 = weights.dtype == types.float32, weights.dtype == types.uint16
    of_weights, of_state = (weights.dtype, True), (types.float32, True)
    of_complement = (types.int16 if is_bf16 else types.float32, True)
    wanted = (of_weights, (weights.dtype, False), of_state, of_state, of_complement, of_weights)
    for kind, (dtype, is_written) in zip(kinds, wanted):  # addresses, which the code works with, have no types
        if kind != types.none and (kind.dtype != dtype or kind.layout != "C" or kind.mutable < is_written):
            return None
    if weights.dtype == types.int16:
        _require_half_instructions()

    def generate(context: Any, b: Any, _signature: Any, values: Any) -> Any:
        at = [
            _vector_at(context, b, kind, array, values[-2], count)
            for kind, array in zip(kinds, values[2:]) if kind != types.none
        ]  # fmt: skip
        weight, gradient, m, v = (b.load(each, align=_ALIGNMENT) for each in at[:4])
        rest = None if is_fp32 else b.load(at[4], align=_ALIGNMENT)
        master = weight if is_fp32 else _join(b, weight, rest) if is_bf16 else rest
        old = [_Floats(b, value) for value in (master, m, v, _WIDEN[weights.dtype](b, gradient))]
        scalars = (_in_all_lanes(b, b.extract_value(values[-1], k), count) for k in range(len(Scalars._fields)))
        new = _adam(old, Scalars._make(_Floats(b, each) for each in scalars), is_coupled=is_coupled.literal_value)
        master, m, v = (each.value for each in new)
        weight = _round_away(b, master) if is_bf16 else _ROUND_EVEN[weights.dtype](b, master)
        rest = None if is_fp32 else _residual_of(b, master) if is_bf16 else master
        for value, to in zip((weight, None, m, v, rest, weight), at):
            if value is not None:
                b.store(value, to, align=_ALIGNMENT)
        return context.get_dummy_value()

    return types.none(lanes, is_coupled, *kinds, i, c), generate


@compiled
def adam(
    weights: Array, gradient: Array, m: Array, v: Array, complement: Array, copy: Array | None, c: Scalars
) -> None:
    """`copy` gets the new weights, too; None leaves that out of the machine code."""
    whole = weights.size // _AT_ONCE * _AT_ONCE
    if c.coupled_decay == 0:
        for i in range(0, whole, _AT_ONCE):
            adam_lanes(_AT_ONCE, False, weights, gradient, m, v, complement, copy, i, c)
        for i in range(whole, weights.size):
            adam_lanes(1, False, weights, gradient, m, v, complement, copy, i, c)
    else:
        for i in range(0, whole, _AT_ONCE):
            adam_lanes(_AT_ONCE, True, weights, gradient, m, v, complement, copy, i, c)
        for i in range(whole, weights.size):
            adam_lanes(1, True, weights, gradient, m, v, complement, copy, i, c)


@compiled
def adam_with_digests(
    weights: Array, gradient: Array, m: Array, v: Array, complement: Array, copy: Array | None,
    bounds: Array, scalars: Array, leaf: int, stored: Any, sections: Any, before: Any, after: Any,
) -> None:  # fmt: skip
    """Adam over runs of elements, and `leaf_digests` of the bytes that hold them, while these are in the caches.

    Args:
        bounds: int64 [runs, 2], first element and last + 1 of each run, in order.
        scalars: fp32 [runs, 10], the `Scalars` of each run.
        stored: two arrays of bytes.
        sections: for each array, int64 [sections, 2], where elements lie in it: first byte, and bytes of an element.
        before: for each array, gets its `leaf_digests` before the update; empty where these are not wanted.
        after: for each array, gets its `leaf_digests` after the update.
    """
    sums = np.empty(8, np.uint64)
    was_0, was_1 = _progress(sections[0], leaf, 0, before[0]), _progress(sections[1], leaf, 0, before[1])
    is_0, is_1 = _progress(sections[0], leaf, leaf - 1, after[0]), _progress(sections[1], leaf, leaf - 1, after[1])
    run = 0
    for begin in range(0, weights.size, leaf // 2):
        end = min(begin + leaf // 2, weights.size)
        _digest_sections(stored[0], leaf, sections[0], end, 1, was_0, before[0], sums)  # leaves about to change
        _digest_sections(stored[1], leaf, sections[1], end, 1, was_1, before[1], sums)
        while run < len(bounds) and bounds[run, 0] < end:
            a, b = max(bounds[run, 0], begin), min(bounds[run, 1], end)
            c = _scalars_of(scalars[run])
            if copy is None:
                adam(weights[a:b], gradient[a:b], m[a:b], v[a:b], complement[a:b], None, c)
            else:
                adam(weights[a:b], gradient[a:b], m[a:b], v[a:b], complement[a:b], copy[a:b], c)
            if bounds[run, 1] > end:
                break
            run += 1
        _digest_sections(stored[0], leaf, sections[0], end, leaf, is_0, after[0], sums)  # leaves that are final
        _digest_sections(stored[1], leaf, sections[1], end, leaf, is_1, after[1], sums)
    _digest_rest(stored[0], leaf, was_0, before[0], sums)
    _digest_rest(stored[1], leaf, was_1, before[1], sums)
    _digest_rest(stored[0], leaf, is_0, after[0], sums)
    _digest_rest(stored[1], leaf, is_1, after[1], sums)


@compiled
def _progress(sections: Array, leaf: int, rounding: int, out: Array) -> tuple[Array, Array]:
    """For each section the leaf that comes next, and for each leaf whether its digest is there."""
    return (sections[:, 0] + rounding) // leaf, np.zeros(out.size, np.bool_)


@compiled
def _scalars_of(row: Array) -> Scalars:
    return Scalars(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9])


@compiled
def _digest_sections(
    data: Array, leaf: int, sections: Array, end: int, reach: int, progress: Any, out: Array, sums: Array
) -> None:
    """Digests leaves that have at least `reach` bytes before the end of a section's element `end - 1`."""
    following, is_done = progress
    if out.size == 0:
        return
    for s in range(len(sections)):
        k = following[s]
        while k * leaf + reach <= sections[s, 0] + sections[s, 1] * end:
            _digest_leaf(data, leaf, k, is_done, out, sums)
            k += 1
        following[s] = k


@compiled
def _digest_rest(data: Array, leaf: int, progress: Any, out: Array, sums: Array) -> None:
    for k in range(out.size):
        _digest_leaf(data, leaf, k, progress[1], out, sums)


@compiled
def _digest_leaf(data: Array, leaf: int, k: int, is_done: Array, out: Array, sums: Array) -> None:
    if not is_done[k]:
        out[k] = xxh3(data.ctypes.data + k * leaf, min(leaf, data.size - k * leaf), sums)
        is_done[k] = True


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
def narrow(master: Array, weights: Array) -> None:
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
def copy_all_squares(pieces: Array, target: Array, lanes: Array, block: int) -> None:
    """`copy_squares` of `pieces`, int64 [pieces, 3]: start in `target`, address of the first element, and size."""
    for k in range(len(pieces)):
        source = numba.carray(pointer_to(target, pieces[k, 1]), (pieces[k, 2],))
        copy_squares(source, target, pieces[k, 0], lanes, block)


@compiled
def copy_squares(source: Array, target: Array, start: int, lanes: Array, block: int) -> None:
    """Copies to `target` from `start` on; adds to lanes[k] what `square_sums` would add to the lanes of block k."""
    done = 0
    while done < source.size:
        row, lane = lanes[start // block], start % LANES
        size = min(source.size - done, block - start % block)
        from_, to = source[done : done + size], target[start : start + size]
        head = min(-lane % LANES, size)
        body = (size - head) // LANES * LANES
        copy_squares_in(from_[:head], to[:head], lane, row)
        from_body, to_body = from_[head : head + body], to[head : head + body]
        for i in range(0, body, LANES):
            for j in range(LANES):
                to_body[i + j] = from_body[i + j]
                x = np.float64(widen(from_body[i + j]))
                row[j] += x * x
        copy_squares_in(from_[head + body :], to[head + body :], (lane + head) % LANES, row)
        done, start = done + size, start + size


@compiled
def copy_squares_in(source: Array, target: Array, lane: int, lanes: Array) -> None:
    """Copies a few elements, and adds their squares to the lanes; the first element belongs to `lane`."""
    for i in range(source.size):
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
