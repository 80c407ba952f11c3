"""Models larger than memory: built without their weights, whose values follow as a stream.

Scope: `deferred`, and what a source of parameter values is: a put-off construction is one.
Not here: how a constructor is followed (`deferred/recording.py`); values from a checkpoint (`checkpoints.py`).
Owner: none; a source can be streamed any number of times.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import swap_tensors

from tierstore.errors import ConfigError
from tierstore.train.checkpoints import CheckpointSource
from tierstore.train.deferred.program import Draw, Request, Reseed, View, walk
from tierstore.train.deferred.recording import Recorder
from tierstore.train.deferred.records import ADVICE
from tierstore.train.deferred.watching import watching
from tierstore.train.filling import Piece

CONSTANT_LIMIT_BYTES = 64 * 2**20


class Source(Protocol):
    """Where the values of a model's parameters come from."""

    def names(self) -> set[str]:
        """The parameters it provides, as `named_parameters()` names them (a tied one once)."""

    def stream(self) -> Iterator[Piece]:
        """Flat pieces (name, element offset, values), in any order, each element exactly once.

        Values have the parameter's dtype or the source's own; the receiver casts. A piece may be kept.
        """


class DeferredSource:
    """The parameters of a construction that was put off by `deferred`."""

    def __init__(self, events: Sequence[Draw | Reseed], state: torch.Tensor, requests: Sequence[Request]) -> None:
        self._events, self._state, self._requests = events, state, requests

    def names(self) -> set[str]:
        return {request.name for request in self._requests}

    def stream(self) -> Iterator[Piece]:
        """As `Source.stream`; at its end the default generator is as ordinary construction leaves it.

        Memory: a few pieces of 4 MiB, and each parameter whole whose initializer cannot be cut (`trunc_normal_`,
        `sparse_`, exp and its kin).
        """
        final = yield from walk(self._events, self._state, self._requests)
        torch.set_rng_state(final)


def deferred(
    build: Callable[[], nn.Module],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    constant_limit_bytes: int = CONSTANT_LIMIT_BYTES,
) -> tuple[nn.Module, Source]:
    """Runs a constructor without ever holding its parameters.

    The module has meta parameters and real buffers; parameters, buffers and (after the stream) the generator's state
    are bit-equal to those of ordinary construction with the same seed. Parameters that the constructor leaves as
    `torch.empty` made them are zero. Until the stream ends the default generator stays as it was before the call:
    stream before you draw anything else.

    Args:
        build: constructs on the CPU, with the default generator.
        checkpoint: directory of safetensors that the values come from instead; the generator is then left alone.
        constant_limit_bytes: memory for parameter values that can only be kept, not produced again (read from
            elsewhere, or computed from other tensors: `orthogonal_`).

    Raises:
        ConfigError: the constructor does to a parameter what cannot be done later; the message names both.
    """
    recorder = Recorder(constant_limit_bytes)
    try:
        with watching(recorder):
            model = build()
        with torch.no_grad():
            source = _finished(recorder, model)
        return model, source if checkpoint is None else CheckpointSource(checkpoint, model)
    finally:
        torch.set_rng_state(recorder.timeline.initial_state)


def _finished(recorder: Recorder, model: nn.Module) -> DeferredSource:
    timeline = recorder.timeline
    timeline.notice_reseed()
    requests = []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(f"parameter {name!r} has no shape yet: lazy modules cannot be put off")
        recorder.empty(parameter, f"parameter {name!r}")
        record = recorder.records.of(parameter)
        if record is None or record.dtype != parameter.dtype:
            raise ConfigError(f"parameter {name!r} views memory of another dtype; {ADVICE}")
        requests.append(record.request(name, View.of(parameter)))
    _fill_others(recorder, model)
    _make_meta(model)
    return DeferredSource(tuple(timeline.events), timeline.initial_state, requests)


def _fill_others(recorder: Recorder, model: nn.Module) -> None:
    """Gives hollow tensors that are no parameters their values, see [Note: hollow] in `deferred/records.py`."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    for name, buffer in model.named_buffers():
        if buffer.device.type == "cpu" and buffer.untyped_storage()._cdata in parameters:
            raise ConfigError(f"buffer {name!r} shares its memory with a parameter; {ADVICE}")
    living = list(recorder.records.living_hollow(parameters))
    if living:
        del living
        gc.collect()  # what only a cycle keeps alive needs no values
        living = list(recorder.records.living_hollow(parameters))
    requests = [record.request(str(place)) for place, (record, _) in enumerate(living)]
    recorder.timeline.compute(requests, [target for _, target in living])


def _make_meta(model: nn.Module) -> None:
    for parameter in list(model.parameters()):
        outline = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
        replacement = torch.Tensor._make_subclass(type(parameter), outline, parameter.requires_grad)
        replacement.__dict__.update(parameter.__dict__)
        try:
            # Whoever holds the parameter sees the change.
            swap_tensors(parameter, replacement)  # type: ignore[no-untyped-call]
        except RuntimeError:  # somebody holds a weak reference (recurrent modules do)
            for module in model.modules():
                for name, held in list(module._parameters.items()):
                    if held is parameter:
                        setattr(module, name, replacement)
