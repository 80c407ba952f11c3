"""Gradients as autograd makes them: counted per group, and handed to the store when a group is complete.

Scope: accumulate-grad hooks, counting, what is kept for the next micro-batch.
Not here: the way to the store (`handover.py`), reductions (`reduction.py`), what follows from a complete gradient
    (`rounds.py`).
Owner: the training side.

[Note: complete] A group is complete when every parameter that the loss reaches has got its gradient. Autograd's graph
does not show what reentrant checkpointing will recompute: how many gradients it adds to a group is known from the steps
that used the group, as the most that it has added. A step may use less of the group, or nothing: so where something was
recomputed, all parameters have to get a gradient. At the first use the number is not known, and later it may be too
low. So groups that are left are taken when backward ends, and a gradient that comes after its group was taken is added,
or, if the group was updated or reduced already, it is an error that names the parameter. With other ranks all groups
are reduced in one order, in which a group that never completes would hold up all behind it. So where room is short in
the first step, groups whose turn is earlier are taken as they are, and gradients that come after that are reduced at
the end: up to rounding, the same as one reduction.

[Note: kept] With one rank, the gradient of a micro-batch that is not the last of its step stays on the device, if there
is room for it beside the largest group's gradient, and the next micro-batch adds to it there: a GPU adds far faster
than the link takes gradients away. Autograd may give several parameters views of one storage, so no gradient is added
to in place, and a view of a larger storage is copied before it is kept. `settle` hands kept gradients over before
anybody else looks for them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from tierstore.device.arithmetic import Piece
from tierstore.device.spans import TORCH_DTYPES
from tierstore.device.streams import ComputeDevice, Mark
from tierstore.errors import GraphError
from tierstore.io.runtime import Runtime
from tierstore.store.gradients import Arrival, Gradients
from tierstore.train.graph import KnownLeaves
from tierstore.train.groups import Group, ModelGroups
from tierstore.train.handover import Handover
from tierstore.train.reduction import Bucket, Reductions


class _Taker(partial[None]):
    """A hook on accumulated gradients that takes them away."""


@dataclass(slots=True)
class _Collected:
    """One group in one backward.

    Attributes:
        gradients: those that came and were not handed over yet, by position in the group.
        bucket: holds the gradients instead where there are other ranks.
        missing: positions that the loss reaches, or may reach by recomputation, and whose gradient has not come.
        reached: how many positions the loss reaches.
        fired: how many gradients have come.
        is_taken: the group was complete, or was taken as if it were.
    """

    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    bucket: Bucket | None = None
    missing: set[int] = field(default_factory=set)
    reached: int = 0
    fired: int = 0
    is_taken: bool = False


class GradientCollector:
    """Collects the gradients of all groups.

    Args:
        capacity_bytes: device memory for gradients that are complete or being made.
        reductions: with the other ranks, if there are any.

    Attributes:
        on_complete: called when a group that may be updated in backward is complete, on the loop if there are other
            ranks. Returns what the loop calls when the store has been told of the gradient, or None.
    """

    def __init__(
        self,
        groups: ModelGroups,
        runtime: Runtime,
        device: ComputeDevice,
        capacity_bytes: int,
        reductions: Reductions | None = None,
    ) -> None:
        self._groups = groups.groups
        self._trainable = [group for group in self._groups if group.spec.trainable]
        self._runtime = runtime
        self._device = device
        self._capacity_bytes = capacity_bytes
        self._reductions = reductions
        bytes_of = (lambda spec: spec.device_bytes) if reductions is None else reductions.buckets.device_bytes
        self._device_bytes = [bytes_of(group.spec) for group in self._groups]
        self._collected = [_Collected() for _ in self._groups]
        self._leaves = KnownLeaves(
            {(group.index, i): p for group in self._trainable for i, p in enumerate(group.parameters)}
        )
        self._recomputed: list[int | None] = [None] * len(self._groups)
        self.knows_graph = False
        """Whether a final backward has shown how many gradients recomputation adds to the groups that it reached."""
        self._forwards = 1
        self._waiting: set[int] = set()
        self._gathering: dict[int, Group] = {}  # gradients of these came and were not handed over
        self._largest_bytes = max((self._device_bytes[group.index] for group in self._trainable), default=0)
        self._kept: dict[int, dict[int, torch.Tensor]] = {}
        self._streams: set[Hashable] = set()
        running = {} if reductions is None else reductions.running
        self._handover = Handover(runtime, self._device_bytes, capacity_bytes, running)
        self._is_collecting = False
        self.touched: set[str] = set() if reductions is None else reductions.touched
        self.is_final = True
        self.is_streaming = False
        self.completed: list[int] = []
        """Groups in the order in which the last backward completed them."""
        self.on_complete: Callable[[int], Callable[[Mark], None] | None] = lambda group: None
        self.before_update: Callable[[int], None] = lambda group: None
        """Called in the last backward of a step, before a group is handed over: after that it may be updated."""
        if reductions is not None:
            reductions.on_complete = lambda group: self.on_complete(group)
            reductions.on_done = self._handover.count_done
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_Taker(self._arrived, group, position))  # type: ignore[no-untyped-call]
            for group in self._trainable
            for position, parameter in enumerate(group.parameters)
        ]
        for group in self._groups:
            self._forget_gradients(group)

    def renew(self, group: Group) -> None:
        """The tensors of a group may have been replaced: after `torch.utils.swap_tensors` parameters still hold their
        Python hooks, but nothing calls these until they are set again.
        """
        self._leaves.renew((group.index, position) for position in range(len(group.parameters)))
        self._forget_gradients(group)
        for parameter in group.parameters:
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks

    def _come_last(self) -> None:
        """Move the engine's hooks to the end: hooks of others, also later ones, see gradients before they are taken."""
        with torch._C.DisableTorchFunctionSubclass():  # many are hidden
            for parameter in (one for group in self._trainable for one in group.parameters):
                hooks = parameter._post_accumulate_grad_hooks
                if len(hooks) > 1:
                    own = next(key for key, hook in hooks.items() if isinstance(hook, _Taker))
                    hooks[own] = hooks.pop(own)  # torch goes by the order of the dictionary, not by OrderedDict's

    @staticmethod
    def _forget_gradients(group: Group) -> None:
        """Drop the `.grad` of each parameter: it is not one that the engine collected."""
        for parameter in group.parameters:
            parameter.grad = None

    def remove(self) -> None:
        """Take the hooks off the parameters. Twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leaves.forget()
        self._let_go()

    @property
    def recomputes(self) -> bool:
        """Whether recomputation has added gradients to those that the graph shows."""
        return any(self._recomputed)

    def expect(self, forwards: int) -> None:
        """This many forwards go into each backward of the step that begins; what another number showed is forgotten."""
        if forwards != self._forwards:
            self._forwards = forwards
            self._recomputed = [None] * len(self._groups)
            self.knows_graph = False

    def begin(
        self, store: Gradients, loss: torch.Tensor, needed: Sequence[int], *, is_final: bool, is_streaming: bool
    ) -> None:
        """A backward begins.

        Args:
            loss: the one that backward begins from.
            needed: groups in the order in which forward needed them first.
            is_final: this is the last backward of the step.
            is_streaming: a group may be updated as soon as it is complete.
        """
        for frozen in (group for group in self._groups if not group.spec.trainable):
            for spec, parameter in zip(frozen.spec.parameters, frozen.parameters):
                if parameter.requires_grad:
                    raise GraphError(
                        f"parameter {spec.name} was frozen when the engine was made, and needs a gradient now; make "
                        "the engine while it needs one, and freeze it after that, by requires_grad_(False), until it "
                        "is to be trained"
                    )
        self._come_last()
        self._is_collecting = True
        self._handover.store = store
        self.is_final = is_final
        self.completed = []
        self.is_streaming = is_streaming and is_final
        self._collected = [_Collected() for _ in self._groups]
        self._gathering.clear()
        self._waiting.clear()
        self._streams.clear()
        for index, kept in self._kept.items():
            self._collected[index].gradients = kept
        if self._reductions is not None:
            self._reductions.guess_order(needed)
        self._leaves.ask(loss, partial(self._expect, store))

    def _expect(self, store: Gradients, reached: Sequence[tuple[int, int]]) -> None:
        """Backward has begun, and will reach these parameters, given by group and position."""
        for group, position in reached:
            self._collected[group].missing.add(position)
            self._collected[group].reached += 1
        for hidden in (group for group in self._trainable if self._recomputed[group.index]):
            trained = (position for position, one in enumerate(hidden.parameters) if one.requires_grad)
            self._collected[hidden.index].missing.update(trained)  # which of them, may differ from step to step
        if self._reductions is not None:
            self._runtime.post(self._reductions.begin, store, self._reductions.order)
            for unreached in (group for group in self._trainable if not self._needed(group)):
                if self.is_streaming and not unreached.is_free():
                    self._waiting.add(unreached.index)  # other ranks may reach it
                else:
                    self._take(unreached)  # other groups need not wait for it

    def finish(self) -> None:
        """Backward is over: take what is left."""
        self._is_collecting = False
        for index, collected in reversed(list(enumerate(self._collected))):
            is_shared = self._reductions is not None and self._groups[index].spec.trainable
            if (collected.fired or is_shared) and (collected.gradients or not collected.is_taken):
                self._take(self._groups[index])
        if self._reductions is not None and self._reductions.is_first:
            self._take_late(self._reductions)
        if self.is_final:
            for index, collected in enumerate(self._collected):
                if collected.fired:
                    added = collected.fired - collected.reached
                    self._recomputed[index] = max(added, self._recomputed[index] or 0)
            self.knows_graph = True
        self._handover.wait()
        if self._reductions is not None and self.is_final:
            self._reductions.learn_order(self.completed)

    def settle(self) -> None:
        """Hand over what is kept, and wait until it is with the store. Called between passes."""
        if self._kept:
            for group in [self._groups[index] for index in self._kept]:
                self._hand_over(group)
            self._handover.wait()

    def forget(self) -> None:
        """The step is over, or given up: drop what is kept."""
        self._handover.count_done(self._kept_bytes)
        self._let_go()
        self.touched.clear()
        if self._reductions is not None:
            self._runtime.post(self._reductions.forget)

    def _arrived(self, group: Group, position: int, parameter: torch.Tensor) -> None:
        collected, gradient = self._collected[group.index], parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if not self._is_collecting:
            raise GraphError(
                f"a gradient of {group.spec.parameters[position].name} was computed outside of engine.backward: "
                "call engine.backward(loss), not loss.backward(); while another engine's loss goes through this model, "
                "freeze its parameters by requires_grad_(False)"
            )
        if gradient.layout is not torch.strided:
            raise GraphError(
                f"the gradient of {group.spec.parameters[position].name} is sparse, which Adam does not take; "
                "make the module with sparse=False"
            )
        if gradient.dtype is not (own := TORCH_DTYPES[group.spec.dtype]):  # its bytes are taken as they are
            raise GraphError(
                f"the gradient of {group.spec.parameters[position].name} is {gradient.dtype}, and the parameter {own}: "
                "somebody has set its grad_dtype; gradients are taken in the parameter's own dtype only"
            )
        self._streams.add(self._device.stream())
        if len(self._streams) > 1:  # a mark covers one stream, also for reads of weights, whose stream nobody can check
            raise GraphError(
                f"the gradient of {group.spec.parameters[position].name} was made in another CUDA stream than those "
                "before it: call all of the model in one stream, from the first forward on"
            )
        is_late = collected.is_taken and self._reductions is not None and self._reductions.is_first
        if collected.is_taken and not is_late and (self.is_streaming or self._reductions is not None):
            advice = "" if self._reductions is not None else ", or update='forward'"
            raise GraphError(
                f"the gradient of {group.spec.parameters[position].name} came after its group was "
                f"{'updated' if self.is_streaming else 'reduced'}: reentrant checkpointing recomputed more of the "
                f"group than in the steps before; use use_reentrant=False{advice}"
            )
        gradient = gradient.resolve_neg()  # a view of an imaginary part needs this: its bytes are read as they are
        self._add(group, collected, position, gradient)
        del gradient  # whoever copies it holds the last reference
        collected.fired += 1
        collected.missing.discard(position)
        if not collected.missing and collected.fired >= self._needed(group) and not is_late:
            self._waiting.add(group.index)
        for waiting in [self._groups[index] for index in sorted(self._waiting)]:
            if not self.is_streaming or waiting.is_free():
                self._take(waiting)

    def _add(self, group: Group, collected: _Collected, position: int, gradient: torch.Tensor) -> None:
        if self._reductions is not None:
            if collected.bucket is None:
                self._make_room(group)
                collected.bucket = self._reductions.bucket(group)
            collected.bucket.add(position, gradient)
            return
        gradients = collected.gradients
        if position in gradients:
            if group.spec.parameters[position].name not in self.touched:
                gradients[position] = gradients[position] + gradient
                return
            # Added one by one to what the store has, as torch does: a + (b + c) is not (a + b) + c.
            self._hand_over(group)
        if not gradients:
            self._make_room(group)
            self._gathering[group.index] = group
        gradients[position] = gradient

    def _needed(self, group: Group) -> int:
        """How many gradients make a group complete; `sys.maxsize`: it is taken when backward ends."""
        reached, added = self._collected[group.index].reached, self._recomputed[group.index]
        is_alone = self._reductions is None
        if added is None and not is_alone and self.knows_graph and not self.recomputes:
            added = 0  # other groups wait for their turn behind this one
        if added is not None and (reached + added or not is_alone):
            return reached + added
        if reached < len(group.parameters) and (self.is_streaming or not is_alone):
            return sys.maxsize  # nothing can be added once it is updated or reduced
        return reached or len(group.parameters)

    def _make_room(self, group: Group) -> None:
        """Wait until a group's gradient fits the device; if room is short, what came of other groups goes ahead."""
        group_bytes = self._device_bytes[group.index]
        if self._reductions is not None and self._reductions.is_first:
            self._take_before(group, self._reductions.order)
        held_bytes = self._kept_bytes + sum(self._device_bytes[index] for index in self._gathering) + group_bytes
        for other in list(self._gathering.values()):
            if held_bytes > self._capacity_bytes:
                self._hand_over(other)
                held_bytes -= self._device_bytes[other.index]
        self._handover.make_room(group_bytes)

    def _take(self, group: Group) -> None:
        """A group is complete, or counts as complete with what has come of it."""
        collected = self._collected[group.index]
        if collected.is_taken:
            self.completed.remove(group.index)
        collected.is_taken = True
        self.completed.append(group.index)
        self._waiting.discard(group.index)
        if self.is_final and collected.fired:
            self.before_update(group.index)
        if self._reductions is not None:
            mark, bucket, collected.bucket = self._device.record(), collected.bucket, None
            ready = (group.index, bucket, mark, self.is_final, self.is_streaming)
            self._runtime.post(self._reductions.ready, *ready)
            return
        if self._may_keep(group):
            for position, gradient in collected.gradients.items():
                if gradient.untyped_storage().nbytes() > gradient.nbytes:
                    collected.gradients[position] = gradient.clone()
            self._kept[group.index] = collected.gradients
            self._gathering.pop(group.index, None)
            return
        self._hand_over(group, is_complete=True)

    def _may_keep(self, group: Group) -> bool:
        """See [Note: kept]."""
        if self.is_final:
            return False
        if group.index in self._kept:
            return True
        return self._kept_bytes + self._device_bytes[group.index] + self._largest_bytes <= self._capacity_bytes

    def _let_go(self) -> None:
        self._kept.clear()
        self._collected = [_Collected() for _ in self._groups]

    @property
    def peak_bytes(self) -> int:
        """The most that gradients have taken on the device."""
        return self._handover.peak_bytes

    @property
    def keeps(self) -> bool:
        """Whether gradients are kept here that the store does not have."""
        return bool(self._kept)

    @property
    def _kept_bytes(self) -> int:
        return sum(self._device_bytes[index] for index in self._kept)

    def _take_before(self, group: Group, order: Sequence[int]) -> None:
        """If room is short, take the groups whose turn is before this one's, complete or not. See [Note: complete].

        Room is judged by which groups wait for their turn, not by what is on the device: the answer is the same in
        every run, and so is what comes late.
        """
        waiting = list(itertools.dropwhile(lambda index: self._collected[index].is_taken, order))
        held_bytes = sum(self._device_bytes[index] for index in waiting if self._collected[index].fired)
        is_late = self._collected[group.index].is_taken
        if not is_late and held_bytes + self._device_bytes[group.index] > self._capacity_bytes:
            for index in itertools.takewhile(lambda index: index != group.index, waiting):
                if not self._collected[index].is_taken:
                    self._take(self._groups[index])

    def _take_late(self, reductions: Reductions) -> None:
        """Take what has come, at any rank, after its group was taken. See [Note: complete]."""
        late = [index for index, collected in enumerate(self._collected) if collected.bucket is not None]
        order = reductions.late_order(late)
        self._runtime.post(reductions.begin, self._handover.store, order)
        for index in order:
            self._take(self._groups[index])

    def _pieces(self, group: Group) -> list[Piece]:
        """The gradients of a group that were not handed over yet; they are no longer kept here."""
        gradients, pieces = self._collected[group.index].gradients, []
        specs, touched = group.spec.parameters, self.touched
        for position in sorted(gradients):
            gradient, spec = gradients[position], specs[position]
            # Flat here, in the thread and the stream that made it: a gradient that is not contiguous is copied.
            flat = gradient if gradient.dim() == 1 else gradient.reshape(-1)
            pieces.append(Piece(spec.start, flat, spec.name not in touched))
            touched.add(spec.name)
        gradients.clear()
        self._gathering.pop(group.index, None)
        self._kept.pop(group.index, None)
        return pieces

    def _hand_over(self, group: Group, *, is_complete: bool = False) -> None:
        """Have the store take what came of a group; it is valid after the device work that is queued now."""
        pieces = self._pieces(group)
        then = self.on_complete(group.index) if is_complete and self.is_streaming else None
        arrival = Arrival(group.index, pieces, self._device.record(), self.is_final, then is not None)
        self._handover.give(group, arrival, then)
