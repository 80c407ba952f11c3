"""Bytes of storages, as numpy and as torch see them.

Scope: ranges, types of elements, and views that do not look like uses by the model.
Not here: copies (`transfers.py`), what is computed (`arithmetic.py`).
Owner: none; whoever has a view keeps the storage as long as the view is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tierstore.device.streams import Bytes

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `[offset, offset + nbytes)` of a storage."""

    storage: torch.UntypedStorage
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        check_range(self.storage, self.offset, self.nbytes)


def check_range(storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> None:
    """Refuses a range that is not inside the storage: torch would silently enlarge the storage.

    Raises:
        ValueError: the range is not inside.
    """
    if offset_bytes < 0 or offset_bytes + nbytes > storage.nbytes():
        raise ValueError(f"{nbytes} B at offset {offset_bytes} are not in a storage of {storage.nbytes()} B")


class _Memory:
    """Bytes at an address, in the form that numpy takes. (Views by torch would look like uses by the model.)"""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


def bytes_at(address: int, nbytes: int) -> Bytes:
    """A view of host memory."""
    return np.asarray(_Memory(address, nbytes))


def alias(storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> torch.Tensor:
    """A range of a storage as a uint8 tensor with its own version counter."""
    check_range(storage, offset_bytes, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset_bytes, (nbytes,), (1,))
