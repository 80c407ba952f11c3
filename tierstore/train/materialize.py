"""Models larger than memory: built without their weights, whose values follow as a stream.

Scope: `deferred`, and the source of weights that stands for a construction that was put off.
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
    """The parameters of a construction that `deferred` has put off.

    Args:
        state: what the default generator holds when the construction begins, and until the first stream ends.
    """

    def __init__(self, events: Sequence[Draw | Reseed], state: torch.Tensor, requests: Sequence[Request]) -> None:
        self._events, self._state, self._requests = events, state, requests
        self._has_streamed = False

    def names(self) -> set[str]:
        return {request.name for request in self._requests}

    def stream(self, only: Container[str] | None = None) -> Iterator[Piece]:
        """As `Source.stream`; at the end of the first stream the default generator is as ordinary construction leaves
        it, unless it was used or seeded meanwhile.

        Args:
            only: stream these parameters; None is all.

        Memory: a few pieces of 4 MiB, and the whole of each parameter whose initializer cannot be cut (`trunc_normal_`,
        `sparse_`, exp and similar functions).
        Warns:
            UserWarning: it was used or seeded meanwhile.
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
    are bit-equal to those of ordinary construction with the same seed (with several ranks, rank 0 streams). Parameters
    that the constructor leaves as `torch.empty` made them are zero. Until the stream ends the default generator stays
    as it was before the call: make the engine before you draw anything else.

    Changes of parameters before the engine is made belong into `build`. Later changes are refused if they are seen,
    which they are not through `.data` or in a deepcopy. Parameters with values of their own, such as adapters, may be
    added later; the existing parameters must keep their names.

    Args:
        build: constructs on the CPU, with the default generator. For a model of transformers: `from_config`, not
            `from_pretrained`.
        checkpoint: directory of safetensors that the values come from instead; the generator is then left alone. A
            warning names tensors in it that the model does not have.
        missing: "refuse" raises if the checkpoint lacks parameters or buffers; "build" takes those (a new head, say) as
            `build` makes them, with a warning, and leaves the generator as after `build`.
        constant_limit_bytes: memory for parameter values that can only be kept, not produced again (read from
            elsewhere, or computed from other tensors: `orthogonal_`).

    Raises:
        ConfigError: the constructor does something to a parameter that cannot be done later; the message names both.
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
    """Requests for all parameters, to be streamed later; their memory is released."""
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
    """Gives hollow tensors that are not parameters their values, see [Note: hollow] in `deferred/records.py`.

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
    """Hollow storages that are in use, as flat tensors; not those that only reference cycles keep alive."""
    if not any(True for _ in recorder.records.living_hollow(is_wanted)):
        return []
    gc.collect()
    return list(recorder.records.living_hollow(is_wanted))


def _tell_aliases(recorder: Recorder, parameters: set[int]) -> None:
    """Warns if something still holds memory of parameters, which the parameters themselves have released."""
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
