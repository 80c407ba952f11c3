"""Everything but weights and moments that is needed to begin the next step: random states, buffers, registered objects.

Scope: taking it out and putting it back. Not here: writing it (`store/commit.py`).
Owner: the training side.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tierstore.errors import ConfigError, FormatError

_AS_BYTES = {torch.bfloat16: np.int16, torch.float16: np.int16}


class Stateful(Protocol):
    """An object whose state is part of a generation."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values, arrays and tensors."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Put back what `state_dict` gave."""


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, of the CPU and of every CUDA device in use."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put back what `random_states` gave."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.from_numpy(state.copy()) for state in states["cuda"]])


def plain(value: Any) -> Any:
    """A state without tensors: each becomes an array with its dtype beside it. A copy: the state goes on changing."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        as_bytes = _AS_BYTES.get(tensor.dtype)
        array = tensor.view(torch.int16).numpy() if as_bytes else tensor.numpy()
        return {"$tensor": str(tensor.dtype).removeprefix("torch."), "data": array.copy()}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def with_tensors(value: Any) -> Any:
    """What `plain` was given."""
    if isinstance(value, dict):
        if "$tensor" in value:
            dtype = getattr(torch, value["$tensor"])
            tensor = torch.from_numpy(np.array(value["data"]))
            return tensor.view(dtype) if dtype in _AS_BYTES else tensor
        return {key: with_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item) for item in value)
    return value


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state_dict holds, by name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def load_buffers(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Copy buffers back in place.

    Raises:
        FormatError: the model has other buffers.
    """
    buffers = persistent_buffers(model)
    if buffers.keys() != values.keys():
        name = min(buffers.keys() ^ values.keys())
        raise FormatError(f"the store holds other buffers than the model: {name!r} is only in one of them")
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(with_tensors(values[name]))


def check_stateful(name: str, value: Any) -> None:
    """Refuse what cannot be registered.

    Raises:
        ConfigError: nothing was changed.
    """
    if not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
        raise ConfigError(f"cannot register {name!r}: {type(value).__name__} has no state_dict and load_state_dict")
