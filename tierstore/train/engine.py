"""The engine: a model trained from three tiers with an ordinary loop.

Scope: the public face of training.
Not here: making and opening the store (`assembly.py`), what happens in a step (`steps.py`), the parts that do the work.
Owner: the thread that trains.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tierstore.config import AdamWConfig, Durability, MicroBatchSchedule, Resume, TierConfig, UpdateSchedule, at_home
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.io.table_file import with_rates
from tierstore.kernels.elements import to_float
from tierstore.plan.placement import Placement
from tierstore.plan.step_record import StepRecord
from tierstore.trace import Tracer
from tierstore.train import capture, whole
from tierstore.train.assembly import Assembly, assemble
from tierstore.train.call_order import CallOrder, in_turn
from tierstore.train.generations import Generations
from tierstore.train.meters import StepMeters
from tierstore.train.micro_batches import loss_by
from tierstore.train.optimizer import LossScale, TieredOptimizer
from tierstore.train.options import check_kinds, expect, options_of
from tierstore.train.partition import partition_of
from tierstore.train.report import StepReport
from tierstore.train.steps import Steps


class Engine:
    """Trains a model whose state lives on GPU, CPU and NVMe tiers.

    Call `torch.set_flush_denormal`, if at all, before the engine is made: its threads inherit the setting, and another
    one in the thread that trains would give other results.

    Args:
        model: its parameters are fp32, bf16 or fp16, one dtype per block or mixed; on the meta device if `initialize`
            is given. The engine takes the model over: outside of forward its weights are read inside `gathered`.
        tiers: budgets and directories.
        optimizer: hyper-parameters; groups in `parameter_groups` may override them, as in torch.
        update: "auto", "step", "forward", "backward", "speculative" or "delayed"; "auto" speculates in
            `train_step` only.
        max_grad_norm: clip gradients to this global norm; None: no clipping.
        commit_every: a generation is committed every so many steps.
        durability: "commit", or "none": half the disk space, and all training is lost when the process ends.
        resume: what to do with a store that holds a generation: "never" refuses it, "auto" continues if there is one,
            "must" insists on one, "previous" goes back one generation.
        parameter_groups: parameters, or groups of them with options of their own, as torch's optimizers take them; None
            is all of the model.
        lr_scheduler: makes a scheduler from `engine.optimizer`, which `step()` steps. It is called twice if the resumed
            run had a scheduler of another class.
        loss_scale: None is dynamic for weights in fp16 and 1 otherwise; "dynamic", or a fixed scale. Without fp16 and
            scale, gradients that are not finite reach the weights; else such a step is skipped.
        initialize: source of the weights of a model on the meta device, which `deferred` gives with the model.
        zero: ZeRO stage, 0 to 3, of several ranks; see `partition.py`. All ranks make the same calls of the engine in
            the same order; budgets are per rank.
        process_group: the ranks; None is the default group, if there is one.
        device_mesh: in its place, for hybrid sharding: one dimension (shard) or two (replicate, shard).
        registered: objects with a state_dict that are part of every generation, restored before this returns.
        overlap: False waits for every update and commit inside `step()`, as under "step": the serial baseline.
        tracer: gets a span for all that the engine does; None keeps none.
        clock: seconds, for reports and measured rates.
        backend: makes the system calls of the store; a seam for tests, which give one that fails or records.

    Raises:
        ConfigError, BudgetError, StoreLocked, StorageError, FormatError: nothing was changed on disk.
        RankLost, Timeout: another rank, or the disk, does not answer; a store that was being made is begun anew by the
            next start with resume="auto".
    """

    def __init__(
        self,
        model: nn.Module,
        tiers: TierConfig,
        optimizer: AdamWConfig | None = None,
        *,
        update: UpdateSchedule | str = "auto",
        max_grad_norm: float | None = None,
        commit_every: int = 1,
        durability: Durability | str = "commit",
        resume: Resume | str = "never",
        parameter_groups: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        loss_scale: float | str | None = None,
        initialize: Any = None,
        zero: int | None = None,
        process_group: ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        registered: Mapping[str, capture.Stateful] | None = None,
        overlap: bool = True,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        backend: Backend | None = None,
    ) -> None:
        check_kinds(
            model, tiers, optimizer, lr_scheduler, initialize, process_group, device_mesh, registered, tracer, clock,
            backend,
        )  # fmt: skip
        if torch.is_inference_mode_enabled():
            raise ConfigError("an engine that is made in torch.inference_mode() cannot train; make it outside of that")
        scale = LossScale.of(loss_scale, model)
        options = options_of(
            update, max_grad_norm, "dynamic" if scale.growth_interval else scale.scale, commit_every, durability,
            resume, overlap, may_skip=scale.may_skip, has_store=bool(tiers.nvme),
        )  # fmt: skip
        registered = registered or {}
        for name, value in registered.items():
            capture.check_stateful(name, value, model)
        tiers = with_rates(tiers)
        self._parts: Assembly = assemble(
            model, tiers, optimizer or AdamWConfig(), options, partition_of(zero, process_group, device_mesh, tiers),
            parameter_groups, initialize, self._step, lr_scheduler, registered,
            tracer or Tracer(clock, enabled=False), clock, backend or Backend(),
        )  # fmt: skip
        self.optimizer.on_zero_grad = self.zero_grad
        can_resume = self._parts.store.files.is_durable and commit_every == 1
        self._order = CallOrder(self._parts.driver, self._parts.runtime, can_resume=can_resume)
        self._parts.hooks.refuse_outside = partial(self._order.refuse_after_backward, "a call of the model")
        self._generations = Generations(self._parts, scale, registered)
        try:
            self._meters = StepMeters(self._parts, clock)
            self._steps = Steps(self._parts, self._order, self._generations, self._meters, scale)
            self._generations.begin()
            self._parts.depth.begin(tiers)
        except BaseException:
            with contextlib.suppress(Exception):  # the error on its way out is the one to tell
                self._parts.close()
            raise
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        _open.add(weakref.ref(self))

    if not TYPE_CHECKING:  # a type checker knows that there is no such attribute

        def __setattr__(self, name: str, value: object) -> None:
            if type(self) is Engine and name in _ARGUMENTS:
                raise ConfigError(f"{name} is an argument of Engine(...), and setting it later changes nothing")
            super().__setattr__(name, value)

    # --- the loop -----------------------------------------------------------------------------------------------

    @in_turn
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._steps.call(*args, **kwargs)

    @in_turn
    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a loss; gradients go to their tier on the way, and `.grad` is None afterwards.

        Outside of `no_sync` this is the last backward of its step, if the update schedule applies gradients as they
        arrive ("backward", "speculative").

        Raises:
            ConfigError: this is not a loss, or the step has had its last backward; nothing was changed.
            GraphError: the model cannot be trained as it is.
        """
        self._steps.backward(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only accumulate: another one of the same step follows."""
        self._order.refuse_closed()
        with self._order.no_sync():
            yield

    @in_turn
    def zero_grad(self) -> None:
        """Forget the gradients of this step, as if it had seen no backward. `model.zero_grad()` cannot do that.

        Raises:
            ConfigError: the gradients were applied as they arrived.
        """
        self._steps.zero_grad()

    @in_turn
    def train_step(
        self,
        batches: Iterable[Any],
        loss_of: Callable[[Any], torch.Tensor] | None = None,
        schedule: MicroBatchSchedule | str = MicroBatchSchedule.HORIZONTAL,
        *,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
    ) -> StepReport:
        """One step over all its micro-batches; the loss of each is divided by their number.

        Args:
            batches: mappings become keyword arguments of the model, anything else its first argument.
            loss_of: makes the loss from the model's output, in the thread of that forward, and may read weights; None
                takes its `.loss`.
            schedule: "horizontal": one micro-batch after the other, with the activations of one. "vertical": all of
                them side by side, so that weights are fetched once per pass, with the activations and outputs of all.
                Gradients agree to rounding, and dropout draws other numbers. Several calls of the model run at once,
                each in a thread of its own: the model may not keep in itself what belongs to one call, and where the
                calls take different ways several groups are in use together.
            criterion: makes the loss from the output and the target, such as `torch.nn.CrossEntropyLoss()`; each
                micro-batch is then a pair (inputs, target), and the model is called with the inputs.
        """
        loss_of_batch = loss_by(loss_of, criterion)
        self._generations.given.tell_what_is_left()
        return self._steps.train_step(self, batches, loss_of_batch, schedule)

    @in_turn
    def step(self) -> StepReport:
        """Apply the gradients, and commit the step in the background. It is `optimizer.step()`, with its hooks.

        Returns:
            What the step did; the step is on its way to disk, and `flush` waits for that.
        Raises:
            ConfigError: an option, such as a learning rate, was set after backward had applied gradients with its old
                value; or somebody has set the `.grad` of a parameter since.
            TierstoreError: also failures of work that earlier steps left running; the last generation is untouched.
        """
        self._steps.report = None
        self.optimizer.step()  # a wrapper of it may return nothing
        return self._steps.reported()

    def _step(self) -> None:
        with self._order.alone("step()"):
            self._generations.given.tell_what_is_left()
            self._steps.step()
        if self._order.is_to_close and not self._order.is_telling:
            self.close()

    @in_turn
    def apply_pending(self) -> None:
        """Apply the gradients that update="delayed" keeps for the next step, and commit; without any, as `flush`.

        Training can go on from there with any schedule; the next delayed step applies nothing, like the first of a run.

        Raises:
            ConfigError: in the middle of a step, or within `gathered`.
        """
        self._steps.apply_pending()

    # --- generations --------------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Finished steps, those of earlier runs included."""
        return self._generations.step_count

    @in_turn
    def register(self, name: str, value: capture.Stateful) -> None:
        """Make an object part of every generation; on resume it gets its state now.

        Raises:
            ConfigError: it has no state_dict; another object has that name; a resumed run has gone on without it; or
                a store cannot hold its state.
        """
        self._order.refuse_closed()
        self._generations.register(name, value)

    def on_step(self, callback: Callable[[StepReport], None]) -> None:
        """Call this inside every `step()`, before that step's commit is published.

        An error that it raises comes out of `step()`. The step is done by then, and is committed with the next one.

        Raises:
            ConfigError: this is not a function.
        """
        self._order.refuse_closed()
        expect(callable(callback), "what on_step calls", "a function of a report", callback)
        self._steps.callbacks.append(callback)

    def before_commit(self, callback: Callable[[], None]) -> None:
        """Call this before each later generation is published, in a thread of its own, while training goes on.

        The callback makes durable what must not be lost once a step is committed, such as a line that `on_step` has
        written and flushed. An error that it raises fails that commit, as an error of the store's disk would, and the
        generation before stays. It may not call the engine. Where nothing is committed (no `nvme`, durability="none")
        it is never called.

        Raises:
            ConfigError: this is not a function.
        """
        self._order.refuse_closed()
        expect(callable(callback), "what before_commit calls", "a function", callback)
        self._parts.store.commits.before.append(callback)

    @in_turn
    def flush(self) -> None:
        """Commit the last step if it is not committed, and wait until everything is at rest.

        A step that a callback of `on_step` has failed is committed with the next one, and not here.

        Raises:
            ConfigError: not every step is committed, the last one is not, and updates of the next one have begun.
        """
        self._order.refuse_closed()
        self._generations.flush()
        if self._generations.waits:
            raise ConfigError(
                f"flush() cannot commit step {self.step_count} any more: updates of the next one have begun, because "
                f"update={self._parts.driver.schedule.value!r} (given, or what 'auto' chose) applies gradients as they "
                "arrive; call it before engine.backward(), or make the engine with update='forward'"
            )

    @in_turn
    def snapshot(self, name: str) -> tuple[Path, ...]:
        """Keep this step, after `flush`, as a store of its own: `snapshots/NAME` in each directory.

        Where the file system shares blocks between files (reflink: XFS, Btrfs) it is there at once, and takes disk
        space only as later steps overwrite shared blocks. Elsewhere it is copied while training goes on for one step;
        the next step waits for the rest of the copy, and so do `flush` and, with `overlap=False`, this call.
        `StepReport.seconds` says how long a step waited, `statistics()` reports on the whole copy. If the copy fails,
        the call that waits for it raises, and training may go on.

        Returns:
            Its directories, to be given as `TierConfig(nvme=...)`; it opens once it is copied.
        Raises:
            ConfigError: this is not a name, or a snapshot has it, or there is no store that keeps generations; or this
                step is not committed, as in a callback of `on_step`, or after the next backward if not every step is.
            StorageError: the system refused, for example for lack of disk space; nothing is left of the snapshot.
        """
        parts = self._open_parts()
        if not parts.store.files.is_durable:
            raise ConfigError("snapshot() needs a store that keeps generations: give nvme=, and no durability='none'")
        return self._generations.snapshot(name)

    # --- looking in ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model that was given; the engine calls this one."""
        return self._parts.model

    @property
    def optimizer(self) -> TieredOptimizer:
        """The optimizer as torch knows it; its `param_groups` hold the learning rates."""
        return self._parts.stepper.optimizer

    def fix_prefetch_depth(self, depth: int) -> None:
        """Fetch this many groups ahead from now on, whatever is measured; 0 fetches on demand only.

        Raises:
            ConfigError: this is not a whole number from 0 on.
        """
        self._order.refuse_closed()
        self._parts.depth.fix(depth)

    def record(self) -> StepRecord:
        """The last step as `plan.step_model` takes it; if it began after `flush()`, no earlier update ran beside it."""
        parts, needs = self._parts, self.placement.groups
        completed = tuple(parts.collector.completed)
        return StepRecord(
            needs, *parts.access.last_visits(), completed, acquired_bytes=parts.groups.acquired_bytes(needs)
        )

    @property
    def placement(self) -> Placement:
        """Where every byte lives."""
        return self._parts.store.placement

    @contextlib.contextmanager
    def gathered(self, names: str | Iterable[str], modify: bool = False) -> Iterator[None]:
        """Parameters on the device, for reading outside of forward; with `modify` changes are kept.

        Several ranks all call it with the same names, and each gets what rank 0 has changed. An error undoes what the
        block has changed, except in buffers. Where that is not possible, because somebody holds a view of weights of
        which other ranks have parts, the engine refuses to go on: the other ranks may know nothing of the change.

        Args:
            names: of parameters, and of modules, which stand for all parameters below them; "" is the model.

        Raises:
            ConfigError: neither a parameter nor a module has such a name, ranks give different names, or `modify` in
                the middle of a step.
            GraphError: weights were changed without `modify`, or the model has a parameter that is not the engine's.
                A change that bypasses the version counters (`weight.data.zero_()`) is not noticed, and is lost unless
                the update takes the weights from the device.
            BudgetError: the parameters do not fit the device together.
        """
        parts = self._open_parts()
        self._order.refuse_after_backward("gathered()")
        if modify:
            self._order.refuse_broken()
            self._order.refuse_within_step("gathered(modify=True)")
        with contextlib.ExitStack() as block:
            block.enter_context(self._order.alone("gathered()"))
            groups = whole.wanted_groups(parts, names, modify=modify)
            kept = set(filter(self._order.is_modified, groups))  # by a block around this one
            if modify:
                self._generations.leave_newer()
                self._generations.flush()
            else:
                self._generations.settle()
            break_off = partial(self._order.break_off, what="a change of weights", keeps_weights=True)
            block.enter_context(whole.gathered(parts, groups, kept, break_off))
            block.enter_context(self._order.gathering(groups if modify else ()))
            with parts.hooks.watching():  # a loss may be made of what is read here
                yield
            if modify:
                self._order.refuse_broken()  # by a block within this one
                self._order.refuse_within_step("gathered(modify=True)")
                # What a block within this one has changed is committed before its place is written again.
                self._generations.flush()
                whole.take_back(parts, groups, kept)
                with self._order.unbroken("a change of weights"):
                    whole.keep_changes(parts, groups)
                self._commit_change()
            else:
                whole.refuse_changes(parts, [group for group in groups if group not in kept])

    @in_turn
    def gradient(self, name: str) -> torch.Tensor:
        """The accumulated gradient of a parameter after backward and before step, in fp32, with the loss scale.

        It is zero where none arrived: the parameter is frozen, or no loss depends on it.

        Shapes: as the parameter.

        Raises:
            ConfigError: the gradient was applied as it arrived, or by `step()`.
        """
        parts = self._open_parts()
        group, spec = parts.groups.locate(name)
        if not self._order.has_backward:
            raise ConfigError(f"{name} has no gradient: there was no backward since the last step()")
        if not parts.driver.is_speculating:  # a speculation keeps gradients until step() has decided
            self._order.refuse_after_backward("gradient()")
        parts.runtime.raise_failure()  # here it leaves the step whole
        with self._order.unbroken(keeps_weights=True):  # Ctrl-C may lose what is on its way to the store
            parts.collector.settle()
        begin, end = group.spec.kept_part(spec.start, spec.stop)
        part = parts.runtime.call(self._generations.gradients.read, group.index, begin, max(begin, end))
        if spec.name not in parts.collector.touched:
            part[:] = 0  # the update of the step before may still be due, and its gradient still there
        flat = parts.partition.joined(f"the gradient of {name}", part)
        return torch.from_numpy(to_float(group.spec.dtype, flat)).reshape(spec.shape)

    @in_turn
    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights in fp32 and the persistent buffers, in CPU memory; tied parameters under each of their names.

        Raises:
            GraphError: the model has a parameter that is not the engine's.
        """
        self._order.refuse_after_backward("state_dict()")
        parts = self._open_parts()
        parts.groups.refuse_newcomers(parts.model)
        self._generations.flush()
        return whole.state_dict(parts)

    @in_turn
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Set all weights and buffers; moments stay.

        Several ranks all call it; each gets the weights that rank 0 gives, and the buffers that it gives itself.

        Raises:
            ConfigError: in the middle of a step, or this is not a mapping; nothing was changed.
            FormatError: a tensor is missing, has another shape or is no ordinary one; nothing was changed.
            GraphError: the model has a parameter that is not the engine's; nothing was changed.
        """
        self._order.refuse_broken()
        self._order.refuse_within_step("load_state_dict")
        parts = self._open_parts()
        parts.partition.all_succeed("a change of weights", partial(whole.check_state_dict, parts, state_dict))
        self._generations.leave_newer()
        self._generations.flush()
        with self._order.unbroken("a change of weights"):
            whole.load_state_dict(parts, state_dict)
        self._commit_change()

    @in_turn
    def export(self, directory: str | os.PathLike[str]) -> None:
        """Write the weights as ordinary sharded safetensors with an index, streaming, atomically.

        Raises:
            GraphError: the model has a parameter that is not the engine's.
        """
        self._order.refuse_after_backward("export()")
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ConfigError(f"export() takes a directory, not {directory!r}")
        parts = self._open_parts()
        parts.groups.refuse_newcomers(parts.model)
        self._generations.flush()
        whole.export(parts, at_home(Path(directory)))

    def statistics(self) -> dict[str, Any]:
        """Totals since the engine was made: bytes by link, peaks by tier, generation, codecs, depth, buffered I/O.

        `stall_s` is the time in which compute waited for weights; `not_on_gpu` says why no optimizer state lives on
        the GPU although it may.
        """
        return self._meters.totals()

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is running, commit it, and give everything back. Twice is fine; at exit an open engine is closed.

        Called in a callback of `on_step`, it closes the engine at the end of that step. With several ranks an exception
        that leaves the `with` block, or ends the process, gives up the commit that waits and the snapshot in progress.

        Raises:
            ConfigError: another thread is in a call of this engine.
            TierstoreError: a failure of work left running; everything was given back all the same.
            Timeout: something does not end, and keeps what it uses and the store's lock; close again to go on waiting.
            ClosedError: this is the child of a fork; the engine is the parent's, and goes on there.
        """
        with self._order.alone("close()"):
            self._close()

    @staticmethod
    def close_all() -> None:
        """Close every open engine of this process, also one that no variable holds any more, as in a notebook.

        Raises:
            TierstoreError: as `close`, once all were tried.
        """
        with contextlib.ExitStack() as each:
            for engine in [left for one in list(_open) if (left := one()) is not None]:
                each.callback(engine.close)

    def _close(self, error: BaseException | None = None) -> None:
        """Close, because of an error if there is one."""
        is_over = self._order.is_closed and not self._parts.runtime.is_open
        if not is_over:
            self._parts.runtime.check_process()
        if self._order.is_telling:
            self._order.is_to_close = True
            return
        self._order.is_closed = True
        if is_over:
            self._parts.go_on_closing()
            return
        atexit.unregister(self._at_exit)
        _open.discard(weakref.ref(self))
        driver = self._parts.driver
        may_decide = self._parts.partition.is_shared and driver.has_begun and driver.is_streaming  # still, on the loop
        has_moved = driver.has_decided or (may_decide and (self._order.has_final_backward or self._order.is_broken))
        if has_moved or self._order.is_busy_elsewhere:
            self._generations.forget()  # the store has moved past that commit, into a step that nobody will finish
        if self._parts.partition.is_shared and isinstance(error, Exception):  # an interrupt comes to all ranks
            self._parts.close()  # to finish takes all ranks, and the others may be in a step
        else:
            self._parts.close(self._generations.finish)

    def __enter__(self) -> Engine:
        self._order.refuse_closed()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            with self._order.alone("close()"):
                self._close(error)
        except ConfigError as other:
            error.add_note(f"the engine stays open: {other}")
        except Exception:  # the error on its way out is the one to tell
            pass

    def _commit_change(self) -> None:
        if not self._order.is_telling:  # else it belongs to the step whose callbacks run, and its commit follows
            self._generations.commit_change()

    def _open_parts(self) -> Assembly:
        self._order.refuse_closed()
        return self._parts


_open: set[weakref.ref[Engine]] = set()
"""The engines that are not closed. Their threads keep them, whoever else has forgotten them."""

# A loop that sets `engine.max_grad_norm` would go on with the old value, and nobody would notice.
_ARGUMENTS = inspect.signature(Engine).parameters.keys() - {"model", "optimizer"}


def _close_at_exit(engine: weakref.ref[Engine]) -> None:
    """The interpreter ends, and nobody has closed the engine: its last step is committed all the same."""
    left = engine()
    if left is not None and not left._parts.runtime.is_inherited:
        left._close(getattr(sys, "last_value", None))  # a daemon thread may be in a call, which it will never finish

