"""What a generation holds besides the weights and the optimizer's state, and when one is committed.

Scope: capturing and restoring steps, scales, buffers, random states; the commit that is due, and the one that waits.
Not here: hyper-parameters, schedule and registered objects (`given.py`), how a state becomes plain data (`capture.py`),
    how a generation reaches the disk (`store/commits.py`).
Owner: the training side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.config import Resume, UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.store.gradients import Gradients
from tierstore.store.rounds import Round
from tierstore.train import capture
from tierstore.train.assembly import Assembly
from tierstore.train.given import Given
from tierstore.train.optimizer import LossScale


@dataclass(frozen=True, slots=True)
class Pending:
    """Gradients for an update: the names of the parameters that got one, and the factor that scales them."""

    touched: set[str]
    scale: float


class Generations:
    """The progress of a run, and its commits: one is due every `commit_every` steps; until then the last one waits.

    Attributes:
        step_count: finished steps.
        pending: gradients that arrived in the last step and are applied in the next one (a delayed update).
        gradient_set: which of the store's gradients the step in progress collects.
        given: what this run was given anew.
    """

    def __init__(self, parts: Assembly, loss_scale: LossScale, registered: Mapping[str, capture.Stateful]) -> None:
        self._parts = parts
        self._loss_scale = loss_scale
        self.given = Given(parts.stepper.optimizer, parts.scheduler, registered)
        self.step_count = 0
        self.pending: Pending | None = None
        self.gradient_set = 0
        if parts.driver.schedule is UpdateSchedule.DELAYED:
            self._collect_in(0)
        self._waiting: tuple[Round | None, dict[str, Any], Gradients | None] | None = None
        self._is_previous = False
        self._resumed_at = 0
        self._published_step = 0
        self._has_published_since = False  # since the last snapshot

    @property
    def gradients(self) -> Gradients:
        """Where the gradients of the step in progress are collected."""
        return self._parts.store.gradients[self.gradient_set]

    def turn_over(self, arrived: Pending | None) -> Pending | None:
        """Keep the gradients that arrived for the next step, and return those of the step before."""
        before, self.pending = self.pending, arrived
        if arrived is None:
            self._parts.runtime.post(self.gradients.drop_all)
        self._collect_in(1 - self.gradient_set)
        return before

    def take_pending(self) -> Pending | None:
        """Return the gradients that wait for the next step, to be applied now."""
        # The next step collects in the set that it would have used: those taken may still be on their way to the state.
        taken, self.pending = self.pending, None
        return taken

    def _collect_in(self, gradient_set: int) -> None:
        """Collect in this set from now on, for the update of a step later; rounds apply the other set meanwhile."""
        self.gradient_set = gradient_set
        self._parts.driver.gradient_set = 1 - gradient_set

    # --- commits ------------------------------------------------------------------------------------------------

    def commit(self, round_: Round | None) -> None:
        """Publish the state as it is after `round_`, in the background, or keep it until a commit is due.

        Without a store that keeps generations there is nothing to do.
        """
        if not self._parts.store.files.is_durable:
            return
        pending = self._parts.store.gradients[1 - self.gradient_set] if self.pending is not None else None
        self._waiting = (round_, self._captured(), pending)
        if self.step_count % self._parts.options.commit_every == 0:
            self.publish()

    def check_generators(self) -> None:
        """Refuse to make a step whose random states a generation could not hold.

        Raises:
            ConfigError: as `capture.check_generators`.
        """
        if self._parts.store.files.is_durable:
            capture.check_generators()

    def commit_change(self) -> None:
        """Publish a change that was made between steps at once: a run that resumes would not make the change again."""
        self.commit(None)
        self.publish()

    def publish(self) -> None:
        """Publish the commit that waits, but not in the middle of a step: its updates may have begun."""
        if self._waiting is not None and not self._parts.driver.has_begun:
            self._parts.runtime.post(self._parts.store.commits.begin, *self._waiting)
            self._published_step, self._has_published_since, self._waiting = self.step_count, True, None
            self._parts.driver.can_redo = True

    @property
    def waits(self) -> bool:
        """Whether a commit waits to be published."""
        return self._waiting is not None

    def flush(self) -> None:
        """Publish the commit that waits, and wait until everything is at rest."""
        self.finish()
        self.settle()

    def settle(self) -> None:
        """Wait for updates and for commits on their way; a commit that is not due goes on waiting."""
        self._parts.runtime.call(self._parts.store.flush)

    def snapshot(self, name: str) -> tuple[Path, ...]:
        """Begin a snapshot of the last generation, after `flush`.

        Raises:
            ConfigError: that generation is of an earlier step.
        """
        self.flush()
        if self._published_step != self.step_count:
            raise ConfigError(
                f"snapshot() would be of step {self._published_step}, which is committed, and not of step "
                f"{self.step_count}: call it when step() has returned, and before the next backward"
            )
        self._has_published_since = False
        directories = self._parts.runtime.call(self._parts.store.commits.snapshot, name).directories
        if not self._parts.options.overlap:
            self.end_snapshot()  # so a failure is raised here, and not in a step that is done
        return directories

    def end_snapshot(self) -> None:
        """Wait until the snapshot in progress is copied, however long that takes, as long as the copy moves on.

        Raises:
            StorageError: the snapshot could not be copied; nothing is left of it.
        """
        commits, call, clock = self._parts.store.commits, self._parts.runtime.call, self._parts.tracer.clock
        if (kept := commits.kept) is None:
            return
        start_s = clock()
        try:
            while call(commits.snapshot_moves, raises_kept=False):  # a failure of something else is raised elsewhere
                pass
            call(commits.end_snapshot, raises_kept=False)
        finally:
            kept.waited_s += clock() - start_s

    @property
    def must_end_snapshot(self) -> bool:
        """Whether the round that begins now would overwrite a generation that is being copied."""
        return self._has_published_since and self._parts.store.commits.kept is not None

    def finish(self) -> None:
        """Publish the commit that waits, and wait for the snapshot in progress.

        If updates of the next step have begun, that commit goes on waiting: the store has moved past it.
        """
        self.publish()
        self.end_snapshot()
        if self._waiting is not None:  # not earlier: the round in progress would overwrite what a snapshot copies
            with self._parts.driver.paused():
                self.publish()

    def forget(self) -> None:
        """The store is about to move past the commit that waits, which can then no longer be published: drop it."""
        self._waiting = None

    def leave_newer(self) -> None:
        """Called before the state changes: gives up a generation newer than the one that was resumed, and warns of a
        schedule whose state is given up."""
        self.given.tell_what_ends()
        if self._is_previous:
            self._parts.runtime.call(self._parts.store.go_back)
            self._is_previous = False

    # --- what is captured ---------------------------------------------------------------------------------------

    def register(self, name: str, value: capture.Stateful) -> None:
        """Make an object part of every generation; on resume it gets its state now.

        Raises:
            ConfigError: the resumed run has made steps, and the state kept for this object is from before them; or
                another object has that name; or a generation cannot hold the object's state.
        """
        capture.check_stateful(name, value, self._parts.model)
        if self.given.awaits(name) and self.step_count > self._resumed_at:
            raise ConfigError(
                f"{name!r} is registered after step {self.step_count}, and would get its state after step "
                f"{self._resumed_at}, from which the run was resumed: register it before the first step"
            )
        if self._parts.store.files.is_durable and not self.given.awaits(name):
            capture.plain(value.state_dict(), f"registered.{name}")  # else the next commit fails, and its step is made
        self.given.register(name, value)

    def _captured(self) -> dict[str, Any]:
        state = {
            "step": self.step_count,
            "steps": self._parts.stepper.steps,
            "loss_scale": self._loss_scale.captured(),
            "buffers": capture.module_state(self._parts.model),
            "pending": None,
        } | self.given.captured()
        if self.pending is not None:
            touched = sorted(self.pending.touched)
            state["pending"] = {"set": self.gradient_set, "touched": touched, "scale": self.pending.scale}
        # The random states last: capturing the others may draw random numbers.
        random = capture.random_states(self._parts.device.torch_device.index, self._parts.partition.number)
        plain: dict[str, Any] = capture.plain(state) | {"random": random}
        return plain

    def begin(self) -> None:
        """Go on from the generation that was opened; in a new store, commit the first one.

        Raises:
            FormatError: the generation has other buffers than the model, or random states that no generator takes.
        """
        captured, self._parts.captured = self._parts.captured, None
        if captured is None:
            self.commit(None)
        else:
            self._restore(captured)

    def _restore(self, captured: Mapping[str, Any]) -> None:
        # A newer generation stays until the state changes.
        self._is_previous = self._parts.options.resume is Resume.PREVIOUS
        self.step_count = self._resumed_at = self._published_step = captured["step"]
        self._parts.stepper.steps.update(captured["steps"])
        self._loss_scale.restore(captured["loss_scale"])
        if (pending := captured["pending"]) is not None:
            touched = set(pending["touched"])
            self.pending = Pending(touched & self._parts.stepper.steps.keys(), pending["scale"])
            self._collect_in(pending["set"])
        position, number = self._parts.partition.position, self._parts.partition.number
        parts = [captured, *captured.get("ranks", [])]  # by position, what differs by rank (`PER_RANK`)
        own = parts[position] if position < len(parts) else captured
        self.given.restore(captured, own["registered"])
        capture.load_module_state(self._parts.model, own["buffers"])
        capture.restore_random_states(own["random"], self._parts.device.torch_device.index)
        # Not this rank's states: it is new, or the directories are copies of another machine's. Older releases do not
        # tell whose states these are.
        if position >= len(parts) or own["random"].get("rank", number) != number:
            capture.reseed(number)
