"""What the next step needs besides weights and moments: random states, buffers, registered objects.

Scope: capturing and restoring these. Not here: writing them (`store/manifest_files.py`).
Owner: the training side.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from tierstore.errors import ConfigError, FormatError
from tierstore.pack import tree
from tierstore.pack.checked import list_of, mapping_of, number_of, object_of

_AS_INTEGERS = {
    torch.bfloat16: torch.int16, torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8, torch.float8_e8m0fnu: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8, torch.float8_e5m2fnuz: torch.uint8,
}  # fmt: skip

_CAPTURED: Mapping[str, type | tuple[type, ...]] = {
    "step": int, "steps": dict, "loss_scale": list, "optimizer": list, "registered": dict, "buffers": dict,
    "random": dict, "pending": (dict, type(None)), "scheduler": object,
}  # fmt: skip
_MT19937_WORDS = 624
_DEPTH_OF_A_RANK = 2
"""How deep the state of another rank is nested in that of the first rank, which is written for all of them."""


class Stateful(Protocol):
    """An object whose state is part of a generation."""

    def state_dict(self) -> Mapping[str, Any]:
        """Plain values, arrays and tensors."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Put back what `state_dict` gave."""


def random_states(gpu: int | None = None, rank: int = 0) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, of the CPU and of every CUDA device in use.

    Args:
        gpu: which of these the model is on; None if it is on none, or if it does not matter.
        rank: whose states these are; `restore_random_states` leaves it to its caller.

    Raises:
        ConfigError: as `check_generators`.
    """
    check_generators()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), np.array(keys), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state().numpy(),
        "rank": rank,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [state.numpy() for state in torch.cuda.get_rng_state_all()]
        states["gpu"] = gpu
    return states


def check_generators() -> None:
    """Refuse a global generator of numpy that is not its usual one.

    Raises:
        ConfigError: a generation cannot hold its state.
    """
    name = np.random.get_state(legacy=False)["bit_generator"]
    if name != "MT19937":
        raise ConfigError(
            f"numpy's global random generator is {name}, whose state a store does not hold: leave "
            "np.random as it is, and draw from a numpy.random.Generator, which engine.register() makes part of a "
            "generation with a state_dict of its own"
        )


def restore_random_states(states: Mapping[str, Any], gpu: int | None = None) -> None:
    """Put back what `random_states` gave.

    Args:
        gpu: which one the model is on now: it goes on from the state of the one that the model was on.

    Raises:
        FormatError: they are not such states.
    """
    try:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
        if "cuda" in states and torch.cuda.is_available():
            found = [torch.from_numpy(state.copy()) for state in states["cuda"]]
            torch.cuda.set_rng_state_all(found[: torch.cuda.device_count()])  # there may be fewer now
            if gpu is not None and (before := states.get("gpu")) is not None:  # older releases do not tell
                torch.cuda.set_rng_state(found[before], gpu)
    except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError, LookupError) as error:
        raise FormatError(f"the random states of the store cannot be restored: {error}") from None


def check_captured(captured: Any) -> None:
    """Check that a run can begin with a captured state that was read; the states of users' objects are not checked.

    Raises:
        FormatError: it cannot.
    """
    what = "the captured state"
    captured = mapping_of(captured, what)
    if absent := sorted(_CAPTURED.keys() - captured.keys()):
        raise FormatError(f"{what} lacks {', '.join(absent)}")
    for part in (captured, *list_of(captured.get("ranks", []), "the captured states of the ranks")):
        for key, kinds in _CAPTURED.items():
            if key in mapping_of(part, what) and not isinstance(part[key], kinds):
                raise FormatError(f"{what} holds a {type(part[key]).__name__} as {key}")
        _check_random_states(mapping_of(part.get("random"), "the random states"))
    pending = captured["pending"]
    if pending is not None:
        object_of(pending, ("set", "touched", "scale"), "the pending gradients")
        number_of(pending["set"], 0, 1, "the set of the pending gradients")
        list_of(pending["touched"], "the parameters of the pending gradients")
    if [type(number) in (int, float) for number in captured["loss_scale"]] != [True, True]:
        raise FormatError(f"{what} holds no loss scale")
    if not all(isinstance(count, int) for count in captured["steps"].values()):
        raise FormatError(f"{what} holds steps of parameters that are no numbers")
    for group in (*captured["optimizer"], *list_of(captured.get("made_with") or [], "what the store was made with")):
        mapping_of(group, "a parameter group of the optimizer")


def _check_random_states(states: Mapping[str, Any]) -> None:
    state, of_torch = states.get("numpy"), states.get("torch")
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(of_torch, np.ndarray):
        raise FormatError("the random states of the store are not those of numpy and torch")
    name, keys, position, *_ = state
    if name != "MT19937" or not isinstance(keys, np.ndarray) or keys.shape != (_MT19937_WORDS,):
        raise FormatError("the random state of numpy is of another length")
    number_of(position, 0, _MT19937_WORDS, "the position of numpy's random state")  # numpy reads at this index
    number_of(states.get("rank", 0), 0, 2**31, "the rank of the random states")


def reseed(rank: int) -> None:
    """Go on from the current random states so that each rank draws other numbers, the same ones for the same rank."""
    seed = (torch.initial_seed() + int(torch.randint(2**31, (), device="cpu").item()) + rank) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def plain(state: Any, name: str = "state") -> Any:
    """A copy, as the state goes on changing, without tensors: each becomes an array with its dtype beside it.

    Raises:
        ConfigError: a generation cannot hold some value; names its path.
    """
    try:
        found = _plain(state, name)
        tree.encode(found, name, depth=_DEPTH_OF_A_RANK)  # tried now: the commit encodes when the step is over
    except FormatError as error:
        raise ConfigError(str(error)) from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deep; does it contain itself?") from None
    return found


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        try:
            tensor = value.detach().cpu().resolve_conj().resolve_neg()
            array = tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype)).numpy().copy()
        except (TypeError, RuntimeError):
            raise ConfigError(f"{path}: cannot store a tensor of {value.dtype}, {value.layout}") from None
        return {"$tensor": str(tensor.dtype).removeprefix("torch."), "data": array}
    if isinstance(value, dict):
        return _as_kind_of(value, {key: _plain(item, f"{path}.{key}") for key, item in value.items()})
    if type(value) in (list, tuple):
        if {*map(type, value)} <= {int, float}:  # as in random states, which are hundreds of numbers
            return type(value)(value)
        return type(value)(_plain(item, f"{path}[{index}]") for index, item in enumerate(value))
    return value.copy() if isinstance(value, (np.ndarray, set)) else value


def _as_kind_of(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """These items in a dictionary of the class of `value`, if a store can hold that class; else in an ordinary one."""
    return type(value)(items) if type(value) in (OrderedDict, Counter) else items


def with_tensors(value: Any) -> Any:
    """Undo `plain`.

    Raises:
        FormatError: this is not what `plain` gives.
    """
    if isinstance(value, dict):
        if "$tensor" in value:
            dtype = getattr(torch, str(value["$tensor"]), None)
            if not isinstance(dtype, torch.dtype) or not isinstance(value.get("data"), np.ndarray):
                raise FormatError(f"a tensor of the store has the dtype {value['$tensor']!r:.40}, not one of torch")
            tensor = torch.from_numpy(np.array(value["data"]))
            if dtype in _AS_INTEGERS and tensor.element_size() == dtype.itemsize:
                return tensor.view(dtype)
            return tensor
        return _as_kind_of(value, {key: with_tensors(item) for key, item in value.items()})
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


def writable(buffer: torch.Tensor) -> torch.Tensor:
    """The same buffer; if it was expanded, so that elements share memory, each now has memory of its own."""
    if any(size > 1 and step == 0 for size, step in zip(buffer.shape, buffer.stride())):
        buffer.data = buffer.detach().clone(memory_format=torch.contiguous_format)
    return buffer


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules with a `get_extra_state` of their own add to a state_dict, by name."""
    return {name: module.get_extra_state() for name, module in _with_extra_state(model)}


def load_extra_states(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Put back what `extra_states` gave, for the modules that `values` has a state of."""
    for name, module in _with_extra_state(model):
        if name in values:
            module.set_extra_state(values[name])


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def module_state(model: nn.Module) -> dict[str, Any]:
    """What a state_dict holds besides parameters."""
    return persistent_buffers(model) | extra_states(model)


def load_module_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Put back what `module_state` gave; buffers take the shape and dtype that they had then.

    A store of an older release has no extra states.

    Raises:
        FormatError: the model has other buffers.
    """
    buffers, extra = persistent_buffers(model), {name for name, _ in _with_extra_state(model)}
    if buffers.keys() != values.keys() - extra:
        name = min(buffers.keys() ^ (values.keys() - extra))
        where = "model" if name in buffers else "store"
        raise FormatError(
            f"the store holds other buffers than the model: {name!r} is only in the {where}; a buffer that was added "
            "or removed while training must be added or removed before the engine is made, too, with any values"
        )
    with torch.no_grad():
        for name, buffer in buffers.items():
            value = with_tensors(values[name])
            if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
                buffer.data = torch.empty(value.shape, dtype=value.dtype, device=buffer.device)
            writable(buffer).copy_(value)
    load_extra_states(model, {name: with_tensors(values[name]) for name in extra & values.keys()})


def check_stateful(name: str, value: Any, model: nn.Module) -> None:
    """Refuse what cannot be registered with an engine of this model.

    Raises:
        ConfigError: it cannot be; nothing was changed.
    """
    if not isinstance(name, str):
        raise ConfigError(f"what is registered has a name that is text, not {name!r}")
    if isinstance(value, nn.Module) and not {*value.parameters()}.isdisjoint(model.parameters()):
        raise ConfigError(f"cannot register {name!r}: it holds weights of the model, which every generation has anyway")
    if not callable(getattr(value, "state_dict", None)) or not callable(getattr(value, "load_state_dict", None)):
        raise ConfigError(f"cannot register {name!r}: {type(value).__name__} has no state_dict and load_state_dict")


def check_storable(model: nn.Module, registered: Mapping[str, Stateful], scheduler: Any, *, is_written: bool) -> None:
    """Refuse states that a generation could not hold.

    Args:
        scheduler: the engine's; None if it has none.
        is_written: generations go to a store, and buffers and the scheduler's state with them.

    Raises:
        ConfigError: names one.
    """
    if is_written:
        check_generators()
    plain({name: value.state_dict() for name, value in registered.items()}, "registered")
    plain(extra_states(model), "extra state")
    if is_written and scheduler is not None:
        plain(scheduler.state_dict(), "scheduler")
    for name, buffer in persistent_buffers(model).items() if is_written else ():
        try:
            plain(buffer, f"buffer {name}")
        except ConfigError as error:
            raise ConfigError(f"{error}; register_buffer(..., persistent=False) leaves it out of the store") from None
