"""Names of dtypes in files, and torch's own.

Scope: one table. Not here: bits of an element (`pack/layout.py`).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from tierstore.errors import FormatError
from tierstore.pack.layout import quoted

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
FILE_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape in torch of a tensor of a file. (torch counts two 4-bit floats as one element.)

    Raises:
        FormatError: torch has no such dtype, or no such shape.
    """
    if dtype not in TORCH_DTYPES:
        raise FormatError(f"tensor {quoted(name)} has dtype {dtype}, which torch does not have; leave it out by names=")
    if math.prod(max(size, 1) for size in shape) >= 2**63:  # perhaps without elements, but torch computes strides
        raise FormatError(f"tensor {quoted(name)} has the shape {list(shape)}, which torch cannot make")
    if dtype == "F4":
        if shape[-1] % 2:
            raise FormatError(f"tensor {quoted(name)} has rows of {shape[-1]} 4-bit floats; torch needs an even number")
        shape = (*shape[:-1], shape[-1] // 2)
    return TORCH_DTYPES[dtype], shape


def file_dtype(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], source: Path | None = None
) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape in a file of a tensor of torch; the inverse of `torch_dtype`.

    Args:
        source: where the tensor is now, for messages.

    Raises:
        FormatError: the format has no such dtype, or no such shape.
    """
    if dtype not in FILE_DTYPES:
        of = f" of {source}" if source is not None else ""
        raise FormatError(f"tensor {quoted(name)}{of} has dtype {dtype}, which a safetensors file cannot hold")
    if dtype is torch.float4_e2m1fn_x2:
        if not shape:
            raise FormatError(
                f"tensor {quoted(name)} is two 4-bit floats without a dimension, which a safetensors file cannot hold; "
                "save it with .reshape(1)"
            )
        shape = (*shape[:-1], shape[-1] * 2)
    return FILE_DTYPES[dtype], shape
