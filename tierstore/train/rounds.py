"""When the update of a step runs: the schedules.

Scope: beginning a round of updates, deciding it, speculating.
Not here: the trips (`store/updates.py`), coefficients (`optimizer.py`).
Owner: the training side; `_decide`, `_begin` and `_take_back` run on the loop.

| schedule | a group is updated | its weights come from |
|---|---|---|
| step | inside step() | the store, with the state; the device if all stay there |
| forward | when the next forward needs it, or backward begins | as under step |
| backward | when its gradient is complete | the device |
| delayed | as forward, with the gradients of the step before: one step stale, not exact | as under step |
| speculative | as backward, with no clipping assumed; redone from the committed slot if that was wrong | the device |

Under speculative, a step that does not speculate, because guessing rests or calls may come before step(), is updated as
under forward. Groups that the GPU updates (`store/gpu_updates.py`) are updated when step() has decided, under every
schedule: the GPU takes next to no time for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tierstore.config import UpdateSchedule
from tierstore.device.streams import Mark, Reached
from tierstore.errors import ClosedError, ConfigError, GraphError
from tierstore.io.runtime import Runtime
from tierstore.plan.schedules import updates_in_backward
from tierstore.store.rounds import ParameterUpdate, Round, Updates
from tierstore.store.training import TrainingStore


class Speculation:
    """Whether to guess that a step needs no clipping: at first, and then after enough steps in a row that needed none.

    A wrong guess costs a second update, and doubles the number of steps that are enough; a right guess lowers it by
    one. So guessing ends where every few steps are clipped, and goes on where clipping is rare. Steps without a guess
    count, too: in the end it is known whether one would have been right.
    """

    least, most = 4, 64

    def __init__(self) -> None:
        self._enough = self._right_in_a_row = self.least

    def should_try(self) -> bool:
        """Whether the next step speculates."""
        return self._right_in_a_row >= self._enough

    def was(self, right: bool, *, is_guessed: bool) -> None:
        """How the guess turned out, or would have."""
        if is_guessed:
            self._enough = max(self._enough - 1, self.least) if right else min(2 * self._enough, self.most)
        self._right_in_a_row = self._right_in_a_row + 1 if right else 0


class RoundDriver:
    """The round of the step in progress.

    Args:
        is_unasked: the user left the schedule open. Then only steps that nobody can interrupt speculate, because
            speculation refuses calls between backward and step(), and a loop that sets learning rates there must go on.
    """

    def __init__(self, schedule: UpdateSchedule, store: TrainingStore, runtime: Runtime, *, is_unasked: bool) -> None:
        self._schedule = schedule
        self._is_unasked = is_unasked
        self._guesses_unasked = is_unasked and schedule is UpdateSchedule.SPECULATIVE
        self._waits_for_step = False
        self._has_decided = False
        self._is_whole_step = False
        self.schedule = UpdateSchedule.FORWARD if self._guesses_unasked else schedule
        """The schedule in force: that of the round in progress, else of the last one."""
        self._store = store
        self._runtime = runtime
        self._round: Round | None = None
        self._failed: tuple[Round, BaseException] | None = None
        self.speculation = Speculation()
        self.is_speculating = False
        self.can_redo = False
        """Whether the state is that of a generation that is committed, or on its way: a redo begins from that."""
        self.last_round: Round | None = None
        self.gradient_set = 0
        """Which of the store's gradients the round in progress applies."""
        self.guessed_scale = 1.0
        """The factor of the gradients when a group is decided before the norm is known."""
        self.is_streaming = False
        """Whether groups are decided one by one in this step."""

    @property
    def may_guess(self) -> bool:
        """Whether whole steps may speculate, asked for or not."""
        return self._schedule is UpdateSchedule.SPECULATIVE

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """In here nothing comes between the last backward of a step and its `step()`, unless the step is broken off."""
        self._is_whole_step = not self.has_begun
        try:
            yield
        finally:
            self._is_whole_step = False

    def guess_nothing(self) -> None:
        """A whole step was broken off before any decision: if the schedule was left open, go on as under forward."""
        if self._guesses_unasked:
            self.schedule, self.is_streaming = UpdateSchedule.FORWARD, False

    @property
    def updates_in_backward(self) -> bool:
        """Whether a gradient may be applied as it arrives."""
        return updates_in_backward(self.schedule)

    @property
    def may_wait(self) -> bool:
        """Whether a gradient may be applied as it arrives, although the user left the schedule open."""
        return self._is_unasked and self.updates_in_backward

    @property
    def has_begun(self) -> bool:
        """Whether this step's round reads ahead already."""
        return self._round is not None

    def begin(
        self, visits: Sequence[int], completed: Sequence[int], *, knows_graph: bool, recomputes: bool, accumulates: bool
    ) -> None:
        """The first forward of a step begins: updates may read ahead.

        Args:
            visits: groups in the order in which forward and backward need them.
            completed: groups in the order in which their gradients were complete in the last backward.
            knows_graph: a whole step was seen before; until then nothing is updated before step().
            recomputes: the graph does not show all of its gradients, so one may come after the update: an error.
            accumulates: the next backward is not the step's last.
        """
        self.schedule = self._schedule
        if self._guesses_unasked and (recomputes or not self._is_whole_step):
            self.schedule = UpdateSchedule.FORWARD
        may_guess = self.schedule is UpdateSchedule.SPECULATIVE and self.can_redo
        self.is_speculating = may_guess and self.speculation.should_try()
        from_device = self.schedule is UpdateSchedule.BACKWARD or self.is_speculating
        trainable = {group: None for group, spec in enumerate(self._store.groups) if spec.trainable}  # in this order
        need = [*completed, *reversed(trainable)] if from_device else [*visits, *trainable]
        wanted = [group for group in dict.fromkeys(need) if group in trainable]
        self._has_decided = False
        self.is_streaming = from_device and knows_graph and not self._waits_for_step
        self._make_round: Callable[[], Round] = partial(
            Round,
            wanted,
            self._store.gradients[self.gradient_set],
            reads_weights=not (from_device or self._store.placement.weights_stay),
            is_lazy=self.schedule is not UpdateSchedule.STEP and not from_device,
            keeps_gradients=self.is_speculating,
            barrier=None,
            borrows=self.is_speculating and self.is_streaming and not accumulates,
            eager=self._store.on_gpu,
            then=tuple(dict.fromkeys(visits)) if self.is_speculating else (),  # under backward trips just pass through
        )
        self._runtime.raise_failure()  # from before: raised before anything begins
        self._begin_round()

    def _begin_round(self) -> None:
        round_ = self._make_round()
        try:
            self._round = round_
            self._runtime.post(self._begin, round_)  # without waiting for what the loop still does for the last step
        except BaseException:  # an interrupt
            self._round = None
            with contextlib.suppress(ClosedError):
                self._runtime.post(self._take_back, round_)
            raise

    def _begin(self, round_: Round) -> None:
        try:
            round_.barrier = self._store.commits.barrier
            self._store.updates.begin(round_)
        except BaseException as error:
            self._failed = (round_, error)  # first: taking back may fail, too
            self._take_back(round_)

    @property
    def has_decided(self) -> bool:
        """Whether the round in progress may have changed the state."""
        return self.has_begun and self._has_decided

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """In here no round is in progress, unless it has decided something: it is taken back, and begins anew after."""
        if not self.has_begun or self._has_decided:
            yield
            return
        try:
            self._end_undecided()
            yield
        finally:
            try:
                self._begin_round()
            except BaseException:  # an interrupt: the step goes on
                self._begin_round()
                raise

    def _end_undecided(self) -> None:
        round_ = self._round
        if round_ is None or self._has_decided:
            return
        try:
            self._runtime.post(self._take_back, round_)
        except BaseException:  # an interrupt
            self._runtime.post(self._take_back, round_)
            raise
        finally:
            self._round = None

    def check_begun(self) -> None:
        """Raise the error that kept the round in progress from beginning, if it is known; then no round has begun."""
        if self._failed is not None and self._failed[0] is self._round:
            self._round = None
            raise self._failed[1]

    def _take_back(self, round_: Round) -> None:
        """Drop a round that nobody knows of: if it was begun, it ends with nothing done. Twice is fine."""
        if round_.trips and not round_.is_void:
            round_.is_void = True
            round_.allow_through()
            self._store.updates.decide(round_, {})

    def refuse_late(self, option: str) -> None:
        """An option of the optimizer was set between the last backward and `step()`.

        A speculation is redone. From now on, a schedule that was left open applies nothing before `step()`.

        Raises:
            ConfigError: gradients were applied with the old value, for good.
        """
        if self._has_decided and not self.is_speculating:
            raise ConfigError(
                f"{option} was set after backward() had applied gradients with what it was before: set it back, and "
                "from the next step on before backward(), or give update='forward'"
            )
        self._waits_for_step = self._is_unasked

    def read_late(self, group: str) -> None:
        """Backward reads weights of a group after the last of their gradients.

        From now on, a schedule that was left open applies nothing before `step()`.

        Raises:
            GraphError: an update may have changed them by then.
        """
        if self.is_streaming:
            raise GraphError(
                f"weights of {group} are read in backward after the last of their gradients came, when an update "
                f"(update={self._schedule.value!r}, given or what 'auto' chose) may have changed them: by a hook, or "
                "what is computed again; make the engine with update='forward'"
            )
        self._waits_for_step = self._is_unasked

    def decide_group(self, group: int, updates: Sequence[ParameterUpdate]) -> Callable[[Mark], None] | None:
        """What the loop calls when the store has been told of this group's gradient; None: nothing, until `decide`.

        Its argument is the mark after which the gradient is valid.
        """
        round_ = self._round
        if round_ is None or group in self._store.on_gpu:
            return None
        self._has_decided = True
        return lambda after: self._store.updates.decide_group(round_, group, updates, after)

    def backward_begins(self) -> None:
        """Forward is over: updates of the step before no longer need to wait for it."""
        self._runtime.post(self._store.updates.allow_through, None)

    def decide(self, updates: Updates, *, is_plain: bool = True, used: Mark | None = None) -> None:
        """The step is complete; these are its updates, empty if it is skipped.

        Args:
            is_plain: gradients were finite and not clipped, and no option was set late: decisions by group were right.
            used: mark after which nothing on the device reads the weights of this step; None: nothing does.
        """
        round_ = self._round
        if round_ is None:
            return
        is_guessed = self.is_streaming and self.is_speculating
        self.speculation.was(is_plain, is_guessed=is_guessed)
        is_redo = is_guessed and not is_plain
        round_.used = used or Reached()
        decided = self._runtime.call(self._decide, round_, updates, is_redo)
        self._round = None  # not before: a round that nobody decides would wait for ever
        self.can_redo = False
        self._is_whole_step = False  # a forward that callbacks call begins another step
        if self.schedule is UpdateSchedule.STEP:
            self._runtime.call(self._store.updates.round_ended, decided)
        self.last_round = decided

    async def _decide(self, round_: Round, updates: Updates, is_redo: bool) -> Round:
        pipeline = self._store.updates
        if updates and self._failed is not None and self._failed[0] is round_:
            raise self._failed[1]
        pipeline.decide(round_, updates)  # also before a redo: for groups not decided yet, this is right
        if is_redo:
            return await pipeline.redo(round_, updates)
        if round_.keeps_gradients:
            pipeline.approve(round_)
        return round_

    def give_up(self) -> None:
        """No step will follow: release what was read ahead. Gradients that a commit may hold stay."""
        self._end_undecided()
        self.decide({})
