"""The steps of an engine: what happens in forward, backward and step, in which order.

Scope: from a call of the model to updates that are decided and a generation that is due.
Not here: the public face (`engine.py`), the parts that do the work.
Owner: the thread that trains.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tierstore.config import MicroBatchSchedule, UpdateSchedule, choice
from tierstore.errors import ConfigError, GraphError, TierstoreError
from tierstore.store.rounds import Updates
from tierstore.train import whole
from tierstore.train.assembly import Assembly
from tierstore.train.call_order import CallOrder
from tierstore.train.generations import Generations, Pending
from tierstore.train.meters import StepMeters
from tierstore.train.micro_batches import LossOfBatch, check_loss, losses_side_by_side, mean_of
from tierstore.train.optimizer import LossScale, clip_coefficient
from tierstore.train.report import StepReport

if TYPE_CHECKING:
    from tierstore.train.engine import Engine


class Steps:
    """Runs one step after the other; the public methods are those of the engine, which documents them.

    Attributes:
        callbacks: called inside every step, before its commit is published.
        report: of the last step.
    """

    def __init__(
        self, parts: Assembly, order: CallOrder, generations: Generations, meters: StepMeters, loss_scale: LossScale
    ) -> None:
        self._parts = parts
        self._order = order
        self._generations = generations
        self._meters = meters
        self._loss_scale = loss_scale
        self.callbacks: list[Callable[[StepReport], None]] = []
        self.report: StepReport | None = None
        self._losses: list[torch.Tensor] = []  # of the micro-batches of this train_step, until its step
        self._zeroed = 0  # how often the gradients of this step were forgotten
        self._applied_with: dict[str, object] = {}  # options of the optimizer, in the last backward

    # --- forward and backward -----------------------------------------------------------------------------------

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._forward(lambda: self._parts.model(*args, **kwargs))

    def _forward(self, run: Callable[[], Any], count: int = 1) -> Any:
        """Run a forward: `run` calls the model `count` times."""
        parts = self._parts
        self._order.refuse_broken()
        if parts.access.is_inside:  # called by `train_step`, by a loss, or by a hook: a part of that pass
            with parts.hooks.watching():
                return run()
        parts.groups.refuse_newcomers(parts.model)
        self._order.refuse_after_backward("another forward")
        trains = torch.is_grad_enabled()
        if trains:
            self._order.refuse_while_modified()
        if trains and not parts.driver.has_begun:
            self._make_way()
            self._generations.leave_newer()
            parts.driver.guessed_scale = 1.0 / self._loss_scale.scale
            parts.collector.expect(count)
            parts.driver.begin(
                parts.access.order, parts.collector.completed, knows_graph=parts.collector.knows_graph,
                recomputes=parts.collector.recomputes, accumulates=not self._order.is_syncing,
            )  # fmt: skip
        parts.access.stops_at_step = self._order.is_syncing and not parts.driver.is_streaming
        try:
            parts.access.begin_forward()
            with self._meters.phase("forward") if trains else self._meters.outside(), parts.hooks.watching():
                output = run()
            parts.driver.check_begun()
            parts.groups.check_kept_views(is_resumed=parts.is_resumed)
        finally:
            parts.access.is_inside = False  # no function call: Ctrl-C comes after it
            parts.access.end_pass()
        self._refuse_changes()
        return output

    def _refuse_changes(self) -> None:
        """Refuse a forward that has changed weights, and undo that: updates start from the weights at rest.

        Raises:
            GraphError: names one.
        """
        changed = [(group, name) for group, name in self._parts.access.changed() if not self._order.is_modified(group)]
        if not changed:
            return
        name = changed[0][1]
        try:
            raise GraphError(
                f"{name} was changed in forward, which is undone; change weights between steps, inside "
                f"`with engine.gathered([{name!r}], modify=True):` (some models change theirs when they evaluate)"
            )
        except GraphError as error:
            if not whole.undo_changes(self._parts, sorted({group for group, _ in changed})):
                self._order.break_off(error, "a change of weights", keeps_weights=True)
            raise

    def _make_way(self) -> None:
        """End a snapshot that is being copied, if the next round would overwrite what it copies."""
        if self._generations.must_end_snapshot:
            with self._meters.phase("snapshot"):
                self._generations.end_snapshot()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss, the last one of its step unless in `no_sync`."""
        parts = self._parts
        self._order.refuse_broken()
        self._order.refuse_after_backward("a second backward outside no_sync()")
        parts.driver.check_begun()
        if not parts.driver.has_begun:
            raise ConfigError("backward() needs a forward through the engine before it, in the same step")
        check_loss(loss)
        self._applied_with = parts.stepper.options()  # gradients may be applied as they arrive
        parts.driver.backward_begins()
        is_streaming = parts.driver.is_streaming
        with torch.enable_grad():  # as torch's own backward, which may be called under no_grad(), too
            scaled = loss * self._loss_scale.scale if self._loss_scale.scale != 1 else loss
        gradients, is_final = self._generations.gradients, self._order.is_syncing
        needed = parts.access.first_visits()
        parts.collector.begin(gradients, scaled, needed, is_final=is_final, is_streaming=is_streaming)
        with self._order.unbroken(keeps_weights=not is_streaming), self._order.last_backward(is_final):
            try:
                parts.access.begin_backward()
                with self._meters.phase("backward"):
                    with parts.hooks.watching(), self._order.walked():
                        _walk(scaled)
                    parts.collector.finish()
            finally:
                parts.access.is_inside = False  # as above
                parts.access.end_pass()
            parts.access.learn_order()
            self._order.has_backward = True

    def zero_grad(self) -> None:
        """Forget the gradients of this step, as if it had seen no backward."""
        parts = self._parts
        self._order.refuse_broken()
        touched = parts.collector.touched
        if touched or parts.collector.keeps:
            self._order.refuse_after_backward("zero_grad()")
            groups = [g.index for g in parts.groups.groups if any(p.name in touched for p in g.spec.parameters)]
            parts.runtime.raise_failure()  # here it leaves the step whole
            with self._order.unbroken(keeps_weights=True):
                parts.runtime.call(self._generations.gradients.discard, groups)
                parts.collector.forget()
            self._order.has_final_backward = False
            self._zeroed += 1

    # --- a step of micro-batches --------------------------------------------------------------------------------

    def train_step(
        self,
        engine: Engine,
        batches: Iterable[Any],
        loss_of_batch: LossOfBatch,
        schedule: MicroBatchSchedule | str,
    ) -> StepReport:
        """One step over all its micro-batches; the loss of each counts 1 / their number.

        Args:
            engine: its methods are called, because a subclass may override them.
        """
        if not isinstance(batches, Iterable) or isinstance(batches, (Mapping, torch.Tensor)):
            raise ConfigError(
                f"train_step takes a list of micro-batches, not {type(batches).__name__}; give [batch] for one"
            )
        batches = list(batches)
        if not batches:
            raise ConfigError("train_step was given no micro-batches: an empty list, or an iterator that is used up")
        order = choice(MicroBatchSchedule, "schedule", schedule)
        has_others = bool(self._parts.collector.touched or self._parts.collector.keeps)
        try:
            with self._parts.driver.whole_step():
                if order is MicroBatchSchedule.VERTICAL and len(batches) > 1:
                    parts = self._parts
                    losses = self._forward(
                        lambda: losses_side_by_side(parts.model, batches, loss_of_batch, parts.access, parts.hooks),
                        len(batches),
                    )
                    self._losses += [loss.detach() for loss in losses]
                    engine.backward(torch.stack(losses).sum() / len(batches))
                    return engine.step()
                for position, batch in enumerate(batches):
                    is_last = position == len(batches) - 1
                    run = partial(loss_of_batch, engine, batch)  # in forward: the loss, too, may read weights
                    with contextlib.nullcontext() if is_last else engine.no_sync():
                        engine.backward(self._noted(self._forward(run)) / len(batches))
                return engine.step()
        except BaseException as error:
            self._give_up(engine, error, has_others=has_others)
            raise
        finally:
            self._losses.clear()

    def _noted(self, loss: torch.Tensor) -> torch.Tensor:
        """Note a loss and return it; no variable keeps it, so that its graph ends with backward."""
        check_loss(loss)
        self._losses.append(loss.detach())
        return loss

    def _give_up(self, engine: Engine, error: BaseException, *, has_others: bool) -> None:
        """Forget what a failed `train_step` has added: a caller that goes on gives all of its micro-batches again.

        Args:
            has_others: there were other gradients before, which cannot be told from those of this step's micro-batches.
        """
        order, driver = self._order, self._parts.driver
        if order.is_broken or (order.has_final_backward and driver.updates_in_backward):
            return  # no micro-batch will be accepted again
        try:
            if not order.has_final_backward:
                driver.guess_nothing()
            if has_others and self._losses:
                order.break_off(error, keeps_weights=True)
            elif self._losses:
                engine.zero_grad()
        except BaseException as other:  # also a second Ctrl-C
            order.break_off(other, keeps_weights=True)
            if not isinstance(other, TierstoreError):  # which does not hide the error that led here
                raise

    # --- step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Apply the gradients, and commit the step in the background."""
        parts = self._parts
        self._order.refuse_broken()
        parts.driver.check_begun()
        if not (parts.driver.has_begun and self._order.has_backward):
            raise ConfigError("step() needs a forward through the engine and engine.backward(loss) before it")
        parts.groups.refuse_gradients()
        self._generations.check_generators()
        options = parts.stepper.options()
        late = [name for name, value in options.items() if value != self._applied_with[name]]
        if late and not parts.partition.is_shared:  # with other ranks later, when all know; here the step can go on
            parts.driver.refuse_late(late[0])
        with self._order.unbroken(keeps_weights=True):
            report = self._finish(options, late)
        with self._order.telling():
            for callback in self.callbacks:
                callback(report)
        self._generations.commit(parts.driver.last_round)
        if not parts.options.overlap:
            self._generations.flush()
        parts.access.prefetch_start()
        self.report = report

    def reported(self) -> StepReport:
        """The report of the step that was just made.

        Raises:
            ConfigError: none was.
        """
        if self.report is None:
            raise ConfigError("optimizer.step was replaced by something that does not call it")
        return self.report

    def _finish(self, options: dict[str, object], late: list[str]) -> StepReport:
        """The parts of a step that happen together or not at all: its updates, the scheduler, the count."""
        parts, optimizer = self._parts, self._parts.stepper.optimizer
        with self._meters.phase("update"), self._order.unbroken():
            loss = mean_of(self._losses) if self._losses else None  # before updates, which would contend for the GPU
            self._losses.clear()  # a callback may make a step of its own
            norm, is_finite = self._apply(options, late)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if parts.scheduler is not None and is_finite:
            parts.scheduler.step()
        self._generations.step_count += 1
        parts.depth.step_ended(self._meters.computing_s)
        report = self._meters.report(
            step=self._generations.step_count,
            grad_norm=norm,
            loss_scale=self._loss_scale.scale,
            skipped=not is_finite,
            lr=rates,
            loss=loss,
        )
        self._loss_scale.update(is_finite)
        return report

    def _apply(self, options: dict[str, object], late: list[str]) -> tuple[float | None, bool]:
        """Decide the updates of the step. Returns the norm, and whether it was finite.

        Args:
            options: those of the optimizer.
            late: names of options that had other values in backward.
        """
        parts = self._parts
        self._generations.forget()  # from here on the store moves past the commit that waits
        self._order.has_backward = self._order.has_final_backward = False
        parts.collector.settle()
        touched = set(parts.collector.touched)
        partials = parts.runtime.call(self._generations.gradients.take_partials)
        specs = [group.spec for group in parts.groups.groups]
        options = options | {
            "the number of zero_grad() in this step": self._zeroed,
            "what was set between backward() and step()": late,
        }
        if parts.partition.is_shared:
            options["what was frozen since the engine was made"] = parts.groups.frozen_since()
        self._zeroed = 0
        square_sum, depth = parts.partition.square_sum(specs, partials, parts.depth.wanted, options)
        if late:  # the same at all ranks, or `square_sum` has raised
            parts.driver.refuse_late(late[0])
        parts.depth.agree(depth)
        norm, clip = clip_coefficient(square_sum, self._loss_scale.scale, parts.options.max_grad_norm)
        is_finite = math.isfinite(norm) or not self._loss_scale.may_skip
        arrived = Pending(touched, clip / self._loss_scale.scale) if is_finite else None
        now = arrived
        if parts.driver.schedule is UpdateSchedule.DELAYED:
            now = self._generations.turn_over(arrived)
        self._decide(now, is_plain=clip == 1.0 and is_finite and not late)
        parts.collector.forget()
        return (norm if touched else None), is_finite

    def _decide(self, now: Pending | None, *, is_plain: bool) -> None:
        """Have the round in progress apply these gradients; None applies nothing."""
        parts = self._parts
        trainable = [group.index for group in parts.groups.groups if group.spec.trainable]
        updates: Updates = {}
        if now is not None:
            updates = {group: parts.stepper.updates(group, now.touched, now.scale) for group in trainable}
        parts.access.keep_views(trainable)
        parts.driver.decide(updates, is_plain=is_plain, used=parts.device.record())
        if now is not None:
            parts.stepper.count(now.touched)
        parts.hooks.step_ended()
        parts.access.weights_changed(trainable)

    def apply_pending(self) -> None:
        """Apply the gradients that a delayed update keeps for the next step, and commit; without any, as `flush`."""
        parts = self._parts
        self._order.refuse_broken()
        self._order.refuse_within_step("apply_pending()")
        if self._order.is_telling:
            raise ConfigError("apply_pending() would commit a step whose callbacks are not done: call it after step()")
        self._order.refuse_while_gathered("apply_pending()")
        if self._generations.pending is None:
            self._generations.flush()
            return
        self._make_way()
        self._generations.leave_newer()
        parts.stepper.options()  # raises if an option makes no sense
        parts.access.release_all()  # a load on its way would put old weights over new ones
        with self._order.unbroken():
            self._generations.forget()
            parts.driver.begin(parts.access.order, (), knows_graph=False, recomputes=False, accumulates=False)
            self._decide(self._generations.take_pending(), is_plain=True)
        self._generations.commit(parts.driver.last_round)
        self._generations.flush()


def _walk(loss: torch.Tensor) -> None:
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "through the graph a second time" not in str(error):
            raise
        raise GraphError(
            "backward came to a graph that it had been through before: detach() what is carried over from an earlier "
            "forward, as a recurrent state; several losses of one forward are added, for one engine.backward(a + b)"
        ) from error
