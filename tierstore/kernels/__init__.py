"""Compiled kernels of the CPU: Adam, norms, rounding.

Scope: numba functions that release the GIL and work on numpy arrays; the caller brings the threads.
Not here: tensors, tiers, files.
Owner: none; pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tierstore.kernels import adam, compiled, digests, elements, norms

_COEFFICIENTS = adam.AdamCoefficients(lr=0.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, step=1)


def warm_up(dtypes: Iterable[str]) -> None:
    """Compiles, or loads from numba's cache on disk, every kernel for these dtypes ("fp32", "bf16", "fp16").

    Call it at construction: a first step would otherwise wait for the compiler (7 to 10 s per dtype when nothing is
    cached, on a slow core; milliseconds when it is). Loops of other dtypes are compiled when first used.
    """
    digests.digest(np.zeros(compiled.XXH3_BLOCK_BYTES, np.uint8))
    for dtype in dtypes:
        warm_up_adam([dtype])
        weights, gradient, state = _one_element(dtype)
        adam.init_state(dtype, np.zeros(1, np.float32), weights, state)
        adam.narrow(dtype, np.zeros(1, np.float32), weights)
        stored = (np.zeros(compiled.XXH3_BLOCK_BYTES, np.uint8), np.zeros(compiled.XXH3_BLOCK_BYTES, np.uint8))
        for copy in (None, weights.copy()):
            adam.update(dtype, weights, state, gradient, 0, 1, _COEFFICIENTS, copy)
            adam.update_with_digests(dtype, weights, state, gradient, [(0, 1, _COEFFICIENTS)], copy, stored)
        norms.add_into(dtype, gradient, weights)
        norms.square_sums(dtype, gradient, np.zeros(1, np.float64))
        norms.copy_with_square_sums(dtype, [(0, gradient.ctypes.data, 1)], weights, np.zeros(1, np.float64))


def warm_up_adam(dtypes: Iterable[str]) -> None:
    """As `warm_up`, but only the kernels that update plain arrays, in a tenth of the time."""
    for dtype in dtypes:
        weights, gradient, state = _one_element(dtype)
        adam.adopt_weights(dtype, weights, adam.view_state(dtype, state), 0, 1)
        adam.update(dtype, weights, state, gradient, 0, 1, _COEFFICIENTS)
        adam.read_master(dtype, weights, state, np.zeros(1, np.float32))


def _one_element(dtype: str) -> tuple[adam.Weights, adam.Weights, adam.Bytes]:
    """Weights, gradient and state, all zero."""
    weights, gradient = (np.zeros(1, elements.ELEMENT[dtype]) for _ in range(2))
    return weights, gradient, np.zeros(adam.state_bytes_per_element(dtype), np.uint8)
