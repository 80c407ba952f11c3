"""Following a constructor: which operator calls are done at once, and which are written down for later.

Scope: the decision for each call, and what it means for the storages that take part.
Not here: how calls are seen (`watching.py`), the storages (`records.py`), the generator (`timeline.py`), doing what
was written down (`program.py`).
Owner: one `Recorder` per constructor call, on the thread that builds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tierstore.errors import ConfigError
from tierstore.train.deferred.operators import Call
from tierstore.train.deferred.program import SELF, Draw, Step, View, tensors_of
from tierstore.train.deferred.records import ADVICE, Record, Records
from tierstore.train.deferred.timeline import Timeline

_aten = torch.ops.aten


class Recorder:
    """Follows every operator call of a constructor.

    Calls on real tensors run at once, and how the tensors came about is kept where a few steps tell it; calls on hollow
    tensors ([Note: hollow] in `records.py`) are only written down.
    """

    def __init__(self, constant_limit_bytes: int) -> None:
        self.timeline = Timeline()
        self.records = Records(constant_limit_bytes)
        self._is_passing = False

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """In here calls are the recorder's own, and are not followed."""
        before, self._is_passing = self._is_passing, True
        try:
            yield
        finally:
            self._is_passing = before

    def handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operator call of the constructor."""
        if self._is_passing:
            return function(*args, **kwargs)
        call = Call(function, args, kwargs)
        if call.traits.touches_no_values:
            return call.run()
        if call.traits.draws and kwargs.get("generator") is None:
            kwargs.pop("generator", None)
            return self._draw(call)
        if call.traits.creates:
            return self._create(call)
        if any(map(self.records.is_hollow, call.written)):
            return self._put_off(call)
        source = self._mapped(call)
        record = None if source is None else self.records.of(source)
        if source is not None and record is not None and record.is_hollow:
            return self._map(call, source, record)
        call.args, call.kwargs = self.readable((args, kwargs))
        result = call.run()
        self._follow(call)
        if source is not None and record is not None:
            self._created(result, (*(record.steps or ()), self._map_step(call, source, record)), record.origin)
        return result

    def empty(self, parameter: nn.Parameter, label: str) -> None:
        """Takes a parameter's memory away; how it got its values so far is kept. Twice is fine.

        Raises:
            ConfigError: it is not in CPU memory.
        """
        if parameter.is_meta:
            raise ConfigError(
                f"{label} is on the meta device: build it on the CPU, as `from_config` of transformers does and "
                "`from_pretrained` does not; its weights come by deferred(..., checkpoint=directory)"
            )
        if parameter.device.type != "cpu" or parameter.layout != torch.strided:
            raise ConfigError(f"{label} is on {parameter.device} ({parameter.layout}): build on the CPU, or {ADVICE}")
        storage = parameter.untyped_storage()
        record = self.records.of(parameter)
        if record is None or (record.dtype != parameter.dtype and not record.is_hollow):
            elements = storage.nbytes() // parameter.element_size()
            record = Record(parameter.dtype, elements, parameter.dtype, None)
            self.records.keep(storage, record)
        record.label = label
        if record.is_hollow:
            return
        if record.steps is None:
            (values,) = self._frozen([record.flat.on(parameter.detach())], f"{label}, as registered")
            record.steps = (Step(record.flat, None, _aten.copy_.default, (SELF, values), is_exact=True),)
            record.origin = record.dtype
        record.is_hollow = True
        parameter.data = View.of(parameter).on(self.records.hollow(record))

    # Draws and new tensors.

    def _draw(self, call: Call) -> Any:
        device = call.kwargs.get("device") or next((item.device for item in call.tensors), torch.get_default_device())
        if torch.device(device).type != "cpu":
            return call.run()
        if len(call.tensors) == 1 and call.written and call.written[0] is call.args[0]:
            self.draw_into(call.args[0], call.function, call.args[1:], call.kwargs)
            return call.args[0]
        if any(map(self.records.is_hollow, call.written)):
            raise self.records.refusal(call.traits.name, call.written)
        if call.traits.redraw is not None:
            self.timeline.catch_up()
            result = call.run()
            draw = Draw(call.traits.redraw, (0.0, 1.0), {}, View.of(result), result.dtype)
            self.timeline.drawn(draw)
            return self._created(result, (Step(draw.view, draw),))
        call.args, call.kwargs = self.readable((call.args, call.kwargs))
        again = _Again(call.function, *self._frozen((call.args, call.kwargs), call.traits.name))
        self.timeline.catch_up()
        result = call.run()
        self.timeline.drawn(Draw(again, (), {}, View((0,), (1,), 0), torch.uint8))
        self.records.forget(call.written)
        return result

    def draw_into(
        self, target: torch.Tensor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Overwrites `target` with numbers of the generator: later if it is hollow, else now."""
        record, view = self.records.of(target), View.of(target)
        draw = Draw(function, args, kwargs, view, target.dtype)
        if record is not None and record.is_hollow:
            self.timeline.put_off(draw)
        else:
            self.timeline.catch_up()
            with self.passing():
                draw.run(target)
            self.timeline.drawn(draw)
        if record is not None:
            self._write(record, target, Step(view, draw), overwrites=True)

    def _create(self, call: Call) -> Any:
        result, value = call.run(), call.fill_value()
        if value is None:
            return self._created(result, ())
        flat = View((result.numel(),), (1,), 0)
        return self._created(result, (Step(flat, None, _aten.fill_.Scalar, (SELF, value), is_exact=True),))

    def _created(self, result: Any, steps: tuple[Step, ...], origin: torch.dtype | None = None) -> Any:
        if result.device.type == "cpu" and result.layout == torch.strided:
            record = Record(result.dtype, result.numel(), origin or result.dtype, steps)
            if record.is_whole(result) and result.untyped_storage().nbytes() == result.nbytes:
                self.records.keep(result.untyped_storage(), record)
        return result

    # Writing.

    def _put_off(self, call: Call) -> torch.Tensor:
        target, traits = call.written[0], call.traits
        record = self.records.of(target)
        if len(call.written) > 1 or record is None or traits.draws or traits.resizes:
            raise self.records.refusal(traits.name, call.written)
        if traits.name == "copy_" and self._copy(record, target, call.args[1]):
            return target
        args, kwargs = self._frozen(self.readable(call.about(target)), f"{traits.name} on {record.label}")
        view = View.of(target)
        is_exact = view.interval is not None and traits.is_exact(tensors_of((args, kwargs)), kwargs, view.elements)
        step = Step(view, None, call.function, args, kwargs, is_exact=is_exact)
        self._write(record, target, step, traits.overwrites)
        return target

    def _copy(self, record: Record, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Lets the whole of `target` come about as the whole of `source` did, if that is known."""
        origin = self.records.of(source)
        if origin is None or origin.steps is None or origin.elements != record.elements:
            return False
        if not (origin.is_whole(source) and record.is_whole(target)):
            return False
        record.steps, record.origin = origin.steps, origin.origin
        if origin.dtype != record.dtype:
            cast = {"dtype": record.dtype}
            step = Step(record.flat, None, _aten._to_copy.default, (SELF,), cast, is_in_place=False, is_exact=True)
            record.steps = (*record.steps, step)
        return True

    def _follow(self, call: Call) -> None:
        """Real tensors were written: a step that needs no other tensor is kept; after others only the bytes tell."""
        if call.traits.resizes:
            self.records.drop(call.written[0].untyped_storage())
            return
        record = self.records.of(call.written[0]) if len(call.written) == 1 else None
        if record is None or not call.traits.is_elementwise or len(call.tensors) > 1:
            self.records.forget(call.written)
            return
        target = call.written[0]
        view, (args, kwargs) = View.of(target), call.about(target)
        is_exact = view.interval is not None and call.traits.is_exact((), kwargs, view.elements)
        step = Step(view, None, call.function, args, kwargs, is_exact=is_exact)
        self._write(record, target, step, call.traits.overwrites)

    def _write(self, record: Record, target: torch.Tensor, step: Step, overwrites: bool) -> None:
        if target.dtype != record.dtype:
            if record.is_hollow:
                raise self.records.refusal(f"writing {target.dtype} into {record.dtype}", [target])
            record.steps = None
        elif overwrites and step.view.interval == (0, record.elements):
            record.steps, record.origin = (step,), record.dtype
        elif record.steps is not None:
            record.steps = (*record.steps, step)

    # Results that follow from one storage, element by element.

    def _mapped(self, call: Call) -> torch.Tensor | None:
        """The tensor that alone decides the result, if it is all of a storage whose steps are known."""
        device = call.kwargs.get("device")
        if call.written or not call.traits.is_elementwise or not call.tensors or device not in (None, _CPU):
            return None
        source = max(call.tensors, key=lambda tensor: (tensor.numel(), self.records.is_hollow(tensor)))
        record = self.records.of(source)
        if record is None or record.steps is None or not record.is_whole(source):
            return None
        others = [tensor for tensor in call.tensors if tensor is not source]
        is_alone = all(
            tensor.numel() == 1 and tensor.dim() <= source.dim() and not self.records.is_hollow(tensor)
            for tensor in others
        )
        return source if is_alone else None

    def _map_step(self, call: Call, source: torch.Tensor, record: Record) -> Step:
        args, kwargs = self._frozen(call.about(source), f"{call.traits.name} of {record.label}")
        # The memory format is dropped: pieces are flat, and only the values count.
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "memory_format")}
        is_exact = call.traits.is_exact(tensors_of((args, kwargs)), kwargs, record.elements)
        return Step(record.flat, None, call.function, args, kwargs, is_in_place=False, is_exact=is_exact)

    def _map(self, call: Call, source: torch.Tensor, record: Record) -> torch.Tensor:
        step = self._map_step(call, source, record)
        outline = step.outline(source)
        steps = (*(record.steps or ()), step)
        result = Record(outline.dtype, record.elements, record.origin, steps, record.label, is_hollow=True)
        return self.records.hollow(result).view(outline.shape)

    # Reading.

    def readable(self, value: Any) -> Any:
        """`value` with its hollow tensors computed. Costs a walk along the stream up to their last draw."""
        hollow = [record for tensor in tensors_of(value) if (record := self.records.of(tensor)) and record.is_hollow]
        if not hollow:
            return value
        storages = {record: torch.empty(record.elements, dtype=record.dtype, device="cpu") for record in hollow}
        requests = [record.request(str(place)) for place, record in enumerate(storages)]

        def computed(item: Any) -> Any:
            record = self.records.of(item) if isinstance(item, torch.Tensor) else None
            if record is None or record not in storages:
                return item
            return View.of(item).on(storages[record].view(item.dtype))

        with self.passing(), torch.no_grad():
            self.timeline.compute(requests, list(storages.values()))
            return tree_map(computed, value)

    def _frozen(self, value: Any, what: str) -> Any:
        with self.passing(), torch.no_grad():
            draws = (Step(event.view, event) for event in self.timeline.events if isinstance(event, Draw))
            return self.records.frozen(value, what, draws)


_CPU = torch.device("cpu")


class _Again:
    """Repeats a draw whose result nobody needs, because of what it takes off the stream."""

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._default_dtype = torch.get_default_dtype()

    def __call__(self, target: torch.Tensor) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._default_dtype)
        try:
            self._function(*self._args, **self._kwargs)
        finally:
            torch.set_default_dtype(before)
