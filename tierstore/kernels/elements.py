"""Elements of tensors as the kernels see them: fp32 as it is, bf16 and fp16 as their bits in uint16.

Not here: arithmetic on them (`adam.py`, `norms.py`).
Owner: none; `elements_of` and `typed` return views.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ELEMENT: Mapping[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "fp16": np.dtype(np.uint16),
}  # fmt: skip


def elements_of(array: npt.NDArray[np.uint8], dtype: str, count: int) -> Array:
    """The first `count` elements of a buffer."""
    return array[: count * ELEMENT[dtype].itemsize].view(ELEMENT[dtype])


def typed(dtype: str, elements: Array) -> Array:
    """With the type by which the loops tell fp16 from bf16: see [Note: element types] in `compiled.py`."""
    return elements.view(np.int16) if dtype == "fp16" else elements


def to_float(dtype: str, elements: Array) -> npt.NDArray[np.float32]:
    """The values of elements, as fp32."""
    if dtype == "bf16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.view(np.float16).astype(np.float32) if dtype == "fp16" else elements.astype(np.float32)
