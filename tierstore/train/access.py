"""Which groups the training side holds on the device, and what it asks of the store when it moves to another group.

Scope: entering and leaving groups, prefetch by the recorded order.
Not here: parameters that are not on the device (`guard.py`), the policy (`plan/residency.py`), the moves themselves
    (`moves.py`), the hooks that call this (`hooks.py`).
Owner: the training side, which is one thread at a time (forward's, or the one that runs backward). A group that
it holds stays on the device, so work inside a held group crosses to no other thread.

[Note: who may drop] Only the training side decides to drop a group, and only if nobody is inside it and nobody holds a
view of its storage (`Group.is_viewed`). The loop then waits for the device and frees the memory. Copies and gathers
hold views themselves, so for a group that is not ready only views from before count (`keep_views`). With other ranks
garbage must hold none: each rank's collector would find it at another time (`_free_garbage`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tierstore.device.streams import ComputeDevice, Reached
from tierstore.errors import BudgetError, GraphError
from tierstore.io.runtime import Runtime
from tierstore.plan.residency import Decision, ResidencyPolicy
from tierstore.store.training import TrainingStore
from tierstore.train.gathering import Gathers
from tierstore.train.groups import Group
from tierstore.train.guard import Gate, guard, hide, show
from tierstore.train.moves import GroupMoves, Move


class _InUse(Container[int]):
    """The groups that may not be dropped, for one decision: the answer for a group is cached, so it cannot change."""

    def __init__(self, is_in_use: Callable[[Any], bool]) -> None:
        self._is_in_use = functools.cache(is_in_use)

    def __contains__(self, group: object) -> bool:
        return self._is_in_use(group)


class DeviceAccess:
    """The groups on the device.

    Args:
        clock: seconds, for the compute time of each visit.
        gathers: completes groups with the parts of other ranks; None if this rank has all parts. With it, decisions
            here do not depend on timing (see [Note: the order of gathers]).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        store: TrainingStore,
        runtime: Runtime,
        device: ComputeDevice,
        clock: Callable[[], float],
        gathers: Gathers | None = None,
    ) -> None:
        self._groups = groups
        self._store = store
        self._runtime = runtime
        self.device = device
        self._clock = clock
        self._gathers = gathers
        # Then ranks may take different ways through the model: all groups are loaded at once, not in one rank's order.
        self._holds_all = gathers is not None and store.placement.weights_stay
        self.depth = 1
        """How many groups are fetched ahead, once the order is known."""
        self.sizes = tuple(group.spec.device_bytes for group in groups)
        count = len(groups)
        # Until the first step has shown the order: as registered, then in reverse, on demand only.
        self.order: tuple[int, ...] = (*range(count), *reversed(range(count)))
        self.is_recorded = False
        self.visit_seconds: list[float] = [0.0] * len(self.order)
        self._policy = self._make_policy()
        self._position = -1
        self._current: int | None = None
        self._users = [0] * count
        self._long_users = [0] * count
        self._held: set[int] = set()
        self._moves = GroupMoves(groups, store, runtime, gathers)
        self._ready = self._moves.ready
        self._stale: set[int] = set()
        self._kept: set[int] = set()
        self._really_viewed: set[tuple[Hashable, int]] = set()
        self._withdrawn: set[int] = set()
        self._visits: list[tuple[int, float]] = []
        self._forward_visits = 0
        self._since = clock()
        self.stall_s = 0.0
        self.is_inside = False
        """Whether a forward or a backward is running."""
        self.stops_at_step = False
        self.awaits_update: Callable[[int], bool] = lambda group: False
        """Whether a group will still be updated in this step, so that its weights are not yet those of the next."""
        self.before_visit: Callable[[int], None] = lambda group: None
        """Called before forward uses a group; of forwards side by side (`vertical.py`) it may let others go first."""
        self.read_late: Callable[[int], None] = lambda group: None
        """Called when a withdrawn group is read after all; it may refuse that."""
        self.gate = Gate(self)
        for group in groups:
            guard(group, self.gate)
            hide(group)

    # --- passes -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The model's forward begins."""
        self._users = list(self._long_users)  # after an interrupt some `leave` may be missing
        self._position = -1
        self._current = None
        self._visits = []
        self._since = self._clock()
        self.is_inside = True
        if self._holds_all:
            self._move((), [group for group in range(len(self._groups)) if group not in self._held])

    def begin_backward(self) -> None:
        """Backward begins; the recorded order goes on after forward's visits."""
        self._forward_visits = len(self._visits)
        self._since = self._clock()
        self.is_inside = True

    def end_pass(self) -> None:
        """Forward or backward is over: leave the groups that were entered for its whole length."""
        self.is_inside = False
        self._account()
        self._users = list(self._long_users)  # after an error some `leave` may be missing
        self._withdrawn.clear()
        for group in self._held:
            self._guard(group)

    def learn_order(self) -> None:
        """Take the visits of the last forward and backward as the order of the steps to come."""
        order = tuple(group for group, _ in self._visits)
        if not order:
            return
        if order != self.order or not self.is_recorded:
            self.order = order
            self._position = len(order) - 1  # where backward has ended
            self.is_recorded = True
            self._policy = self._make_policy()
            self._really_viewed.clear()
            self.visit_seconds = [seconds for _, seconds in self._visits]
        else:
            self.visit_seconds = [0.5 * (a + b) for a, (_, b) in zip(self.visit_seconds, self._visits)]

    def last_visits(self) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]:
        """Groups and the seconds of their visits in the last forward, and in the last backward."""
        return tuple(self._visits[: self._forward_visits]), tuple(self._visits[self._forward_visits :])

    def first_visits(self) -> list[int]:
        """Groups in the order in which they were first needed since the last forward began."""
        return list(dict.fromkeys(group for group, _ in self._visits))

    def _make_policy(self) -> ResidencyPolicy:
        return ResidencyPolicy(self.order, self.sizes, self._store.placement.gpu_weight_bytes, 0)

    # --- entering and leaving -----------------------------------------------------------------------------------

    def enter(self, group: int, *, for_long: bool = False) -> None:
        """Bring a group to the device and keep it until `leave` or the end of the pass; `for_long`: until `leave`.

        Raises:
            BudgetError: the group does not fit beside the groups in use.
        """
        self.pass_through(group)
        self._users[group] += 1
        self._long_users[group] += for_long

    def leave(self, group: int, *, for_long: bool = False) -> None:
        """Undo one `enter`; the group stays as long as the policy keeps it."""
        self._users[group] -= 1
        self._long_users[group] -= for_long
        if not self.is_inside:
            self._guard(group)

    def is_gathered(self, group: int) -> bool:
        """Whether somebody has entered a group with `for_long`."""
        return self._long_users[group] > 0

    def pass_through(self, group: int) -> None:
        """Bring a group to the device now; other forwards may go first (`before_visit`)."""
        self.before_visit(group)
        if group not in self._withdrawn:  # a withdrawn group is hidden: reading it calls `enter_unasked`
            self.visit(group)

    def visit(self, group: int) -> None:
        """Bring a group to the device now; a view of its storage keeps it there (see [Note: who may drop])."""
        self._tell_if_late(group)
        if group != self._current or group not in self._ready:
            self._go_to(group)

    def enter_unasked(self, group: int, parameter: nn.Parameter, *, is_write: bool) -> None:
        """Bring a group that no module has announced to the device, until `leave` or the end of forward or backward.

        Args:
            parameter: the parameter of the group that is accessed.
            is_write: the parameter is to be changed in place.

        Raises:
            GraphError: neither forward nor backward is running.
        """
        if not self.is_inside:
            name = self._groups[group].name_of(parameter)
            if is_write:
                raise GraphError(
                    f"{name} was written while it is not on the device; write it inside "
                    f"`with engine.gathered([{name!r}], modify=True):`, or all weights by engine.load_state_dict(...)"
                )
            raise GraphError(
                f"{name} was read while it is not on the device; read it inside `with engine.gathered([{name!r}]):` "
                "(to write to its .data, with modify=True), as model.generate() may, too, or all weights by "
                "engine.state_dict() or engine.export(...); to train and to evaluate call engine(...) and not the model"
            )
        self._tell_if_late(group)
        self.enter(group)

    def withdraw(self, group: int) -> None:
        """Call `read_late` if this group is read later in this backward: an update may have changed it by then.

        Not for reads by those who have entered the group, or hold a view of it: until they let go, it is not updated
        on the device.
        """
        self._withdrawn.add(group)
        self._guard(group)

    def _tell_if_late(self, group: int) -> None:
        if group in self._withdrawn:
            self.read_late(group)
            self._withdrawn.discard(group)

    def changed(self) -> list[tuple[int, str]]:
        """The groups of weights that were changed since their values were last known, and the names of these weights.

        A change that bypasses the version counters (`weight.data.clamp_()`) is not noticed, and is lost unless the
        update takes the weights from the device.
        """
        with torch._C.DisableTorchFunctionSubclass():  # six times as fast: most parameters are hidden now
            return [(group.index, name) for group in self._groups for name in group.changed()]

    def _go_to(self, group: int) -> None:
        self._account()
        self._let_go_without_room()  # by now there may be room
        self._refresh_stale()
        position = self._locate(group)
        if position is not None:
            self._position = position
        self._visits.append((group, 0.0))
        self._current = group
        while True:
            decision = self._decide(max(self._position, 0), group, self._depth_from(self._position))
            if not decision.wait:
                break
            self._wait_for(decision.wait[0])
        self._move(decision.evict, decision.load)
        if group not in self._ready and (error := self._wait_for(group)) is not None:
            raise error
        self._kept.discard(group)
        show(self._groups[group])
        self._since = self._clock()

    def _decide(self, position: int, group: int, depth: int) -> Decision:
        self._policy.depth = depth
        if self._policy.is_settled(position, self._held, group):
            return Decision()
        place = (self.is_inside, position, group)
        if self._gathers is not None and (viewed := self._viewed()):
            self._runtime.call(self._moves.unviewed, viewed)  # a copy may be over at one rank and not at another
            self._free_garbage(viewed, place)
        # Loading groups cannot be dropped yet. With other ranks they count as ready, which they may be elsewhere.
        loading = self._held - self._ready if self._gathers is None else set()

        def decide() -> Decision:
            in_use = _InUse(self._is_in_use)
            return self._policy.decide(position, self._held - loading, in_use, loading, demand=group)

        try:
            return decide()
        except BudgetError:
            self._runtime.call(self._moves.unviewed, self._viewed())
            self._free_garbage(self._viewed(), place)
        try:
            return decide()
        except BudgetError as error:
            told = f"{error} (it is {self._store.placement.gpu_bytes} B)"
            if kept := [self._groups[index].spec.name for index in self._viewed()]:
                told += (
                    f"; {kept[0]} stays there because somebody holds a view of its weights: code that has read "
                    "them (keep a clone()), the model, a checkpoint over several blocks, or a graph made with "
                    "create_graph=True"
                )
            raise BudgetError(told) from None

    def _viewed(self) -> list[int]:
        """Groups that are in use only because somebody holds a view: the model, or an update that copies."""
        return [group for group in self._held if not self._users[group] and self._is_in_use(group)]

    def _free_garbage(self, groups: Iterable[int], place: Hashable) -> None:
        """See to it that no view of these groups is held only by a cycle of garbage (see [Note: who may drop]).

        Args:
            place: what asks; a view that was really held there is taken to be so again, because collecting takes long.
                So ranks may still part where the model held a view in some steps, and leaves it in garbage in others.
        """
        viewed = {(place, group) for group in groups if group not in self._kept and self._is_viewed(group)}
        if not self._really_viewed.issuperset(viewed):
            gc.collect()
            self._really_viewed.update(one for one in viewed if self._is_viewed(one[1]))

    def _depth_from(self, position: int) -> int:
        """How far to fetch ahead: not before the order is known, and not past an update that makes weights stale."""
        if not self.is_recorded or self._holds_all:
            return 0
        if len(set(self.order[position : position + self.depth + 1])) > self.depth:
            return self.depth  # all of these are visited in this step
        count, seen = len(self.order), {self.order[position]}
        for place in range(position + 1, position + count):
            group = self.order[place % count]
            if len(seen) > self.depth or (place >= count and (self.stops_at_step or self.awaits_update(group))):
                break
            seen.add(group)
        return min(self.depth, len(seen) - 1)

    def _is_in_use(self, group: int) -> bool:
        return self._users[group] != 0 or self._is_viewed(group)

    def _is_viewed(self, group: int) -> bool:
        return group in self._kept or (group in self._ready and self._groups[group].is_viewed())

    def _locate(self, group: int) -> int | None:
        """The next place of a group in the order, cyclically."""
        order, start = self.order, self._position + 1
        for offset in range(len(order)):
            position = (start + offset) % len(order)
            if order[position] == group:
                return position
        return None

    def _wait_for(self, group: int) -> BudgetError | None:
        """Wait until a group is ready. If it finds no room, it is no longer held, and the reason is returned."""
        begin = self._clock()
        self._runtime.call(self._moves.loaded, group)
        self.stall_s += self._clock() - begin
        return self._let_go_without_room().get(group)

    def _let_go_without_room(self) -> dict[int, BudgetError]:
        """Stop holding groups whose loads have found no room, and return why: who needs one asks for it again."""
        found = {group: self._moves.without_room.pop(group) for group in list(self._moves.without_room)}
        self._held.difference_update(found)
        self._stale.difference_update(found)
        return found

    def _account(self) -> None:
        """Add the time since the last visit began to that visit."""
        if self._visits:
            group, seconds = self._visits[-1]
            self._visits[-1] = (group, seconds + self._clock() - self._since)
        self._since = self._clock()

    def _move(self, dropped: Sequence[int], loaded: Sequence[int]) -> None:
        """Drop some, then load others, in one crossing to the loop."""
        for group in dropped:
            if group not in self._ready:
                self._wait_for(group)
        if not (dropped or loaded):
            return
        move = Move(tuple(dropped), self.device.record() if dropped else Reached(), tuple(loaded))
        try:
            self._begin_move(move)
        except BaseException:  # Ctrl-C between the sets and the crossing: never change one without the other
            self._begin_move(move)
            raise

    def _begin_move(self, move: Move) -> None:
        """Begin a move; calling this twice with one move is fine."""
        for group in move.dropped:
            hide(self._groups[group])
            self._held.discard(group)
            self._stale.discard(group)
            self._ready.discard(group)
        self._held.update(move.loaded)
        self._runtime.post(self._moves.start, move)

    # --- between steps ------------------------------------------------------------------------------------------

    def keep_views(self, groups: Iterable[int]) -> None:
        """Before updates of these groups are pending: keep each group that somebody views until it is needed again.

        Needed with other ranks only: without them, a group that is not ready is not dropped anyway. Every rank keeps
        the same groups: copies by updates of this backward are waited for, and later updates take their views later.
        Groups that were kept before are ready by now, or will be soon.
        """
        if self._gathers is not None:
            self._await_ready(self._kept)
            self._kept.clear()
            viewed = [group for group in groups if group in self._held and self._is_viewed(group)]
            self._runtime.call(self._moves.unviewed, viewed)
            self._free_garbage(viewed, "step")
            self._kept = {group for group in viewed if self._is_viewed(group)}

    def weights_changed(self, groups: Iterable[int]) -> None:
        """Updates of these groups are pending: those that are held become ready again only after their updates."""
        changed = set(groups) & self._held
        self._moves.change(changed)
        self._current = None
        self._stale |= changed

    def prefetch_start(self) -> None:
        """Begin to fetch the groups that the next forward needs first."""
        if self.is_recorded and self.depth > 0 and not self._holds_all:
            try:
                decision = self._decide(0, self.order[0], self.depth - 1)
            except BudgetError:
                decision = Decision()  # somebody reads the weights of this step, so there is no room yet
            self._move(decision.evict, decision.load)
        self._refresh_stale()

    def _refresh_stale(self) -> None:
        # After the loads were posted: a refresh lets updates run, and these hand their weights to announced loads.
        if self._stale:
            self._runtime.post(self._moves.refresh, sorted(self._stale))
            self._stale.clear()

    def release(self, groups: Collection[int]) -> None:
        """Drop these groups, except those in use; changes that exist only on the device are lost."""
        if self._gathers is not None:
            # All ranks must drop the same groups, but their updates and gathers end at different times.
            self._await_ready(groups)
            self._free_garbage(groups, "release")
        self._move([group for group in groups if group in self._ready and not self._is_in_use(group)], ())

    def release_all(self) -> None:
        """Drop every group that nobody uses."""
        self._await_ready(self._held)
        self._kept.clear()
        if self._gathers is not None:
            self._free_garbage(self._held, "release")
        self._move([group for group in sorted(self._held) if not self._is_in_use(group)], ())
        self._current = None

    def _await_ready(self, groups: Collection[int]) -> None:
        self._refresh_stale()
        for group in sorted(self._held.intersection(groups) - self._ready):
            self._wait_for(group)

    def close(self) -> None:
        """Drop every group; none will be loaded again."""
        self.gate.cut()
        self.release_all()

    def settle(self) -> None:
        """Wait until the dropped groups are gone from the device."""
        self._runtime.call(self._moves.dropped, raises_kept=False)

    # --- guarding -----------------------------------------------------------------------------------------------

    def _guard(self, group: int) -> None:
        """Hide a group that nobody has entered, so that no read goes unnoticed: its update may be due."""
        if not self._users[group]:
            hide(self._groups[group])
            if group == self._current:
                self._current = None
