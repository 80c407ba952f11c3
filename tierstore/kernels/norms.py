"""Sums over gradients: partial squared norms by block, and accumulation.

Scope: fp32, bf16 and fp16 gradients in numpy arrays (bf16 and fp16 as uint16 bit patterns).
Not here: the order in which partials are added (by position, whatever the partition; the caller's), threads.
Owner: none; the caller owns the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError
from tierstore.kernels import compiled
from tierstore.kernels.adam import check_arrays
from tierstore.kernels.elements import typed
from tierstore.plan.placement import BLOCK

Piece = tuple[int, int, int]
"""Contiguous elements: where they go in the total, their address, and their number."""


def square_sums(dtype: str, gradient: npt.NDArray[Any], out: npt.NDArray[np.float64]) -> None:
    """out[k] = sum of squares of elements [k * BLOCK, (k + 1) * BLOCK), in fp64 and in one fixed order.

    A partial depends on its own block only, and a ragged last block counts as if padded with zeros: cutting a gradient
    at multiples of BLOCK never changes a bit. inf and NaN propagate.

    Shapes: gradient [n], out [ceil(n / BLOCK)].
    """
    _check_sums(dtype, gradient, out)
    compiled.square_sums(typed(dtype, gradient), out, BLOCK)


def copy_with_square_sums(
    dtype: str, pieces: Sequence[Piece], total: npt.NDArray[Any], out: npt.NDArray[np.float64]
) -> None:
    """Copies pieces into `total`, and sets `out` as `square_sums` of `total` would, bit for bit.

    This takes less time than a copy and then the sums. Pieces are in order and do not overlap; elements of `total`
    outside all pieces must be zero already. The caller keeps the memory of the pieces until this returns.

    Shapes: total [n], out [ceil(n / BLOCK)].
    """
    _check_sums(dtype, total, out)
    for start, _, count in pieces:
        if not 0 <= start <= start + count <= total.size:
            raise ConfigError(f"a piece of {count} elements at {start} is not inside {total.size}")
    lanes, places = np.zeros((out.size, compiled.LANES)), np.array(pieces, np.int64).reshape(-1, 3)
    compiled.copy_all_squares(places, typed(dtype, total), lanes, BLOCK)
    compiled.add_lanes(lanes, out)


def add_into(dtype: str, total: npt.NDArray[Any], gradient: npt.NDArray[Any]) -> None:
    """total += gradient: added in fp32 and rounded once, to nearest even, as torch's in-place addition does."""
    check_arrays(dtype, total, total.size)
    check_arrays(dtype, gradient, total.size)
    compiled.add_into(typed(dtype, total), typed(dtype, gradient))


def _check_sums(dtype: str, gradient: npt.NDArray[Any], out: npt.NDArray[np.float64]) -> None:
    check_arrays(dtype, gradient, gradient.size)
    blocks = -(-gradient.size // BLOCK)
    if out.dtype != np.float64 or out.shape != (blocks,) or not out.flags.c_contiguous:
        raise ConfigError(
            f"{gradient.size} elements have {blocks} partials of float64, got {out.dtype}{list(out.shape)}"
        )
