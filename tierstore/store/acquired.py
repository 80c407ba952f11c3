"""The tensors of an acquired entry, as its user gets them.

Scope: checking that they are the same tensors at the release. Not here: their bytes (`copies.py`).
Owner: the loop thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tierstore.errors import ConfigError

_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class Acquired:
    """Views of the tensors of a device copy, in a mapping of the user's own.

    Attributes:
        tensors: the mapping.
    """

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {key: tensor.detach() for key, tensor in tensors.items()}
        self._name = name
        self._given = {key: (tensor, _place(tensor)) for key, tensor in self.tensors.items()}

    def check_same(self) -> None:
        """Refuse changes that would be lost: only changes in the memory of the given tensors are kept.

        Raises:
            ConfigError: a tensor was added, removed or replaced, or has another memory, shape, strides or dtype.
        """
        for key in {**self._given, **self.tensors}:
            one, (same, place) = self.tensors.get(key), self._given.get(key, (None, None))
            if one is None or one is not same or _place(one) != place:
                raise ConfigError(
                    f"tensor {key!r} of {self._name!r} was replaced in the mapping, or has other memory or another "
                    f"shape now, which would be lost; change the tensor that is there, as tensors[{key!r}].copy_(...), "
                    "or store the new tensors by put()"
                )


def _place(tensor: torch.Tensor) -> _Place:
    """What stays the same as long as a tensor keeps its memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
