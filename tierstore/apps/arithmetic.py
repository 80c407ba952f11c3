"""Whether torch multiplies matrices of a dtype fast on this CPU, and what to say where it does not.

Without instructions for it (bf16 with AVX2 alone, say) torch falls back to a plain loop on one core: GPT-2 124M on 64
tokens took 31 s in bf16 and 1.0 s in fp32 (2 cores of an EPYC of the third generation, torch 2.13, 2026-11-25). With
AVX512, but without its instructions for bf16, torch converts: 1.4 s and 0.74 s, and products in bf16 take 3 to 4 times
as long (2 cores of a Xeon, 2026-11-28).

Scope: one small product, timed. Not here: layers of models (`measure/layers.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from tierstore.apps.options import Precision
from tierstore.device.spans import TORCH_DTYPES

_ROWS, _SIDE = 64, 768
_TIMES, _IN_A_ROW = 8, 3
_MANY = 2.5  # a processor with instructions for both dtypes is never so uneven


def slow_products_notes(dtype: Precision, device: str, clock: Callable[[], float] = time.perf_counter) -> list[str]:
    """A sentence if matrix products of this dtype are slow on this CPU; none if they are not, or if a GPU computes."""
    if device != "cpu" or dtype is Precision.FP32:
        return []
    own_s = fp32_s = math.inf
    for times in range(_TIMES):  # in turns: other processes may disturb some products, but not all of one dtype
        own_s, fp32_s = min(own_s, _seconds(dtype, clock)), min(fp32_s, _seconds(Precision.FP32, clock))
        if (factor := own_s / fp32_s) < _MANY and times:
            return []
    return [f"torch takes {factor:.0f} times as long for products in {dtype.value} on this CPU as in fp32: "
            "--dtype fp32 is faster"]  # fmt: skip


def _seconds(dtype: Precision, clock: Callable[[], float]) -> float:
    left, right = (torch.ones(rows, _SIDE, dtype=TORCH_DTYPES[dtype.value]) for rows in (_ROWS, _SIDE))
    taken = []
    for _ in range(_IN_A_ROW):
        begun_s = clock()
        torch.mm(left, right)
        taken.append(clock() - begun_s)
    return min(taken)
