"""Models larger than memory: built without their weights, whose values follow as a stream.

Scope: `deferred`, and the source of weights that a put-off construction is.
Not here: how a constructor is followed (`deferred/recording.py`); values from a checkpoint (`checkpoints.py`).
Owner: none; a source can be streamed any number of times.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tierstore.caller import warn_caller
from tierstore.errors import ConfigError
from tierstore.pack.layout import some_of
from tierstore.train.checkpoints import CheckpointSource
from tierstore.train.deferred.program import Draw, Request, Reseed, View, walk
from tierstore.train.deferred.recording import Recorder
from tierstore.train.deferred.records import ADVICE, Record
from tierstore.train.deferred.watching import watching
from tierstore.train.filling import BUILT_AS, BuiltSource, Piece, Source
from tierstore.train.overlaps import Place, refuse_overlap, span
from tierstore.train.stand_ins import replace

CONSTANT_LIMIT_BYTES = 64 * 2**20


class DeferredSource(BuiltSource):
    """The parameters of a construction that was put off by `deferred`.

    Args:
        state: of the default generator, when the construction began and until the first stream ends.
    """

    def __init__(self, events: Sequence[Draw | Reseed], state: torch.Tensor, requests: Sequence[Request]) -> None:
        self._events, self._state, self._requests = events, state, requests
        self._has_streamed = False

    def names(self) -> set[str]:
        return {request.name for request in self._requests}

    def stream(self, only: Container[str] | None = None) -> Iterator[Piece]:
        """As `Source.stream`; at the end of the first one the default generator is as ordinary construction leaves it,
        unless somebody has used or seeded it meanwhile.

        Args:
            only: of these parameters.

        Memory: a few pieces of 4 MiB, and each parameter whole whose initializer cannot be cut (`trunc_normal_`,
        `sparse_`, exp and its kin).
        Warns:
            UserWarning: somebody has.
        """
        is_moved = not self._has_streamed and not torch.equal(torch.get_rng_state(), self._state)
        if is_moved:
            warn_caller(
                "torch's default generator was used or seeded between deferred() and the engine: it stays as it is; "
                "what was drawn there, without another seed, are the numbers of the weights: draw, and seed, after the "
                "engine is made, or before deferred()"
            )
        wanted = [request for request in self._requests if only is None or request.name in only]
        final = yield from walk(self._events, self._state, wanted)
        if not (is_moved or self._has_streamed):
            torch.set_rng_state(final)
        self._has_streamed = True


def deferred(
    build: Callable[[], nn.Module],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    missing: Literal["refuse", "build"] = "refuse",
    constant_limit_bytes: int = CONSTANT_LIMIT_BYTES,
) -> tuple[nn.Module, Source]:
    """Runs a constructor without ever holding its parameters.

    The module has meta parameters and real buffers; parameters, buffers and (after the stream) the generator's state
    are bit-equal to those of ordinary construction with the same seed (of several ranks rank 0 streams). Parameters
    that the constructor leaves as `torch.empty` made them are zero. Until the stream ends the default generator stays
    as it was before the call: make the engine before you draw anything else.

    What is done to parameters later, before the engine is made, belongs into `build`: it is refused where it is seen,
    which it is not through `.data`, nor in a deepcopy. Others may be added to the model then, with values of their own,
    as adapters are, beside what is there, so that its names stay.

    Args:
        build: constructs on the CPU, with the default generator. Of a model of transformers: `from_config`, not
            `from_pretrained`.
        checkpoint: directory of safetensors that the values come from instead; the generator is then left alone. What
            it has beside those of the model is told by a warning.
        missing: parameters and buffers that the checkpoint lacks are refused, or as `build` makes them, as a new head,
            which a warning tells; the generator is as after it then.
        constant_limit_bytes: memory for parameter values that can only be kept, not produced again (read from
            elsewhere, or computed from other tensors: `orthogonal_`).

    Raises:
        ConfigError: the constructor does to a parameter what cannot be done later; the message names both.
    """
    if missing not in ("refuse", "build"):
        raise ConfigError(f"missing must be one of refuse, build, not {missing!r}")
    recorder = Recorder(constant_limit_bytes)
    try:
        with watching(recorder):
            model = build()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"deferred() calls a function that returns a torch.nn.Module, not {model!r}")
        with torch.no_grad():
            source = _finished(recorder, model)
        if checkpoint is None:
            return model, source
        return model, CheckpointSource(checkpoint, model, rest=source.stream if missing == "build" else None)
    finally:
        torch.set_rng_state(recorder.timeline.initial_state)


def _finished(recorder: Recorder, model: nn.Module) -> DeferredSource:
    timeline = recorder.timeline
    timeline.notice_reseed()
    requests = _requests(recorder, model)
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    _fill_others(recorder, model, parameters)
    _make_meta(model)
    _tell_aliases(recorder, parameters)
    return DeferredSource(tuple(timeline.events), timeline.initial_state, requests)


def _requests(recorder: Recorder, model: nn.Module) -> list[Request]:
    """What is to be streamed: all parameters, whose memory goes."""
    requests, places = [], []
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet: lazy modules cannot be put off; call the model once in the "
                f"function that deferred() calls, or {ADVICE}"
            )
        recorder.empty(parameter, f"parameter {name!r}")
        record = recorder.records.of(parameter)
        if record is None or record.dtype != parameter.dtype:
            raise ConfigError(f"parameter {name!r} views memory of another dtype; {ADVICE}")
        requests.append(record.request(name, View.of(parameter)))
        if parameter.numel():
            begin = int(parameter.storage_offset())
            places.append(Place(str(id(record)), begin, begin + span(parameter.shape, parameter.stride()), True, name))
    refuse_overlap(places)
    return requests


def _fill_others(recorder: Recorder, model: nn.Module, parameters: set[int]) -> None:
    """Gives hollow tensors that are no parameters their values, see [Note: hollow] in `deferred/records.py`.

    Args:
        parameters: storages of the model's parameters.
    """
    for name, buffer in model.named_buffers():
        if buffer.device.type == "cpu" and buffer.untyped_storage()._cdata in parameters:
            raise ConfigError(f"buffer {name!r} shares its memory with a parameter; {ADVICE}")
    living = _living(recorder, lambda storage: storage not in parameters)
    requests = [record.request(str(place)) for place, (record, _) in enumerate(living)]
    recorder.timeline.compute(requests, [target for _, target in living])


def _living(recorder: Recorder, is_wanted: Callable[[int], bool]) -> list[tuple[Record, torch.Tensor]]:
    """Hollow storages that somebody uses, as flat tensors. What only a cycle keeps alive, nobody does."""
    if not any(True for _ in recorder.records.living_hollow(is_wanted)):
        return []
    gc.collect()
    return list(recorder.records.living_hollow(is_wanted))


def _tell_aliases(recorder: Recorder, parameters: set[int]) -> None:
    """Warns of memory of parameters that others hold still: the parameters have let go of it."""
    labels = sorted({record.label for record, _ in _living(recorder, parameters.__contains__)})
    if labels:
        warn_caller(
            f"an attribute, or something else that is no parameter of the model, holds memory of {some_of(labels)} (by "
            "detach() or .data, or where torch cannot replace the parameter in place, as in a recurrent module): there "
            "it is zero, and does not follow the parameter; take it from its module, or use a clone()"
        )


def _make_meta(model: nn.Module) -> None:
    for name, parameter in list(model.named_parameters()):
        outline = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device="meta")
        built = replace(model, parameter, outline)
        built.__dict__[BUILT_AS] = name
