"""Building the engine's rooms: groups, placement, store, hooks; and taking them down in one written order.

Scope: from a model and options to an `Assembly`, new or resumed; filling a new store with weights; the depth.
Not here: the step (`engine.py`).
Owner: the thread that makes the engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierstore.config import AdamWConfig, Durability, Resume, TierConfig, UpdateSchedule
from tierstore.device.streams import ComputeDevice, open_device
from tierstore.errors import ChecksumMismatch, ConfigError, FormatError, TierstoreError, Timeout
from tierstore.io.backend import Backend
from tierstore.io.runtime import Runtime
from tierstore.kernels import warm_up
from tierstore.plan.bandwidth import Estimator
from tierstore.plan.prefetch import recommend_depth
from tierstore.plan.simulate import Visit
from tierstore.plan.tiers import place
from tierstore.store.commit import Generation, Manifests, StoreLock
from tierstore.store.layout import check_same_model
from tierstore.store.training import TrainingStore
from tierstore.trace import Tracer
from tierstore.train.access import DeviceAccess
from tierstore.train.backward import GradientCollector
from tierstore.train.budgets import request_for
from tierstore.train.filling import Piece, fill, weights_of
from tierstore.train.groups import ModelGroups, find_groups
from tierstore.train.hooks import ModelHooks
from tierstore.train.optimizer import AdamStepper, TieredOptimizer
from tierstore.train.rounds import RoundDriver

DRIFT = 1.5
"""The depth is computed again when a measured rate or compute time has changed by this factor."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose, validated."""

    schedule: UpdateSchedule
    durability: Durability
    resume: Resume
    commit_every: int
    max_grad_norm: float | None
    overlap: bool


@dataclass
class Assembly:
    """The rooms of one engine.

    Attributes:
        opened: the generation that was resumed; None for a new store.
    """

    runtime: Runtime
    backend: Backend
    device: ComputeDevice
    store: TrainingStore
    groups: ModelGroups
    access: DeviceAccess
    collector: GradientCollector
    hooks: ModelHooks
    stepper: AdamStepper
    driver: RoundDriver
    tracer: Tracer
    opened: Generation | None
    fixed_depth: int | None = None
    read_rate: Estimator = field(default_factory=lambda: Estimator(weight=0.5, enough=1))
    chosen_for: tuple[float, float] | None = None
    _seen: tuple[int, float] = (0, 0.0)

    def measure_depth(self, tiers: TierConfig) -> None:
        """Choose a first depth from the rates given or measured now."""
        self.fixed_depth = tiers.prefetch_depth
        if self.fixed_depth is not None:
            self.access.set_depth(self.fixed_depth)
            return
        if tiers.bandwidth is not None:
            self.read_rate.observe(tiers.bandwidth.read_bytes_per_s, 1.0)
        else:
            self.read_rate.observe(*self.runtime.call(self.store.measure_reads))
        self._seen = self.store.io.meters["read"].totals()
        self.access.set_depth(1)

    def choose_depth(self, computing_s: float) -> None:
        """Compute the depth again from what this step measured, when that has changed enough.

        Args:
            computing_s: of forward and backward, without waiting for weights.
        """
        moved_bytes, busy_s = self.store.io.meters["read"].totals()
        self.read_rate.observe(moved_bytes - self._seen[0], busy_s - self._seen[1])
        self._seen = (moved_bytes, busy_s)
        rate, access = self.read_rate.bytes_per_s, self.access
        if self.fixed_depth is not None or rate is None or not access.is_recorded:
            return
        visit_seconds = access.visit_seconds
        if self.device.kind == "cuda":
            # Kernels are queued, not run, during a visit: its share of the whole time is taken to be that of its bytes.
            total_bytes = sum(access.sizes[group] for group in access.order)
            visit_seconds = [computing_s * access.sizes[group] / total_bytes for group in access.order]
        compute_s = sum(visit_seconds)
        if self.chosen_for is not None and not any(
            max(new, old) > DRIFT * min(new, old) for new, old in zip((rate, compute_s), self.chosen_for)
        ):
            return
        self.chosen_for = (rate, compute_s)
        order = tuple(Visit(g, access.sizes[g], s) for g, s in zip(access.order, visit_seconds))
        access.set_depth(recommend_depth(order, rate, self.store.placement.gpu_weight_bytes).depth)

    def close(self, publish: Callable[[], object] = lambda: None) -> None:
        """Finish and give back, in this order: reads ahead are let go, writes finish, hooks, loop, threads, files.

        Args:
            publish: posts the commit of the last step, if there is one to post.

        Raises:
            TierstoreError: the first failure met on the way, after everything was given back.
        """
        failure: BaseException | None = None
        steps: list[Callable[[], object]] = [
            self.runtime.raise_failure,
            self.driver.give_up,
            publish,
            lambda: self.runtime.call(self.store.flush, raises_kept=False),
            self.access.close,
            lambda: self.runtime.call(_settled, raises_kept=False),
            self.hooks.remove,
            self.collector.remove,
            self.runtime.close,
            self.store.release,
        ]
        for step in steps:
            try:
                step()
            except BaseException as error:
                failure = failure or error
                if step == self.runtime.close and isinstance(error, Timeout):
                    break  # what does not end may still write: it keeps the memory, the files and the lock
        if failure is not None:
            raise failure


async def _settled() -> None:
    """Let drops that were posted begin and end."""
    me = asyncio.current_task()
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t is not me and t.get_name().startswith("drop ")))


def schedule_for(
    update: str, max_grad_norm: float | None, model: nn.Module, commit_every: int, durability: str, overlap: bool
) -> UpdateSchedule:
    """The schedule that a name means for this run.

    Raises:
        ConfigError: it cannot be exact with these options.
    """
    try:
        schedule = UpdateSchedule(update)
    except ValueError:
        names = ", ".join(item.value for item in UpdateSchedule)
        raise ConfigError(f"update must be one of {names}, not {update!r}") from None
    if type(commit_every) is not int:
        raise ConfigError(f"commit_every must be a whole number, not {commit_every!r}")
    if commit_every < 1:
        raise ConfigError(f"commit_every must be at least 1, not {commit_every}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm must be above 0, not {max_grad_norm}; None switches clipping off")
    is_half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
    needs_whole_backward = max_grad_norm is not None or is_half
    if schedule is UpdateSchedule.BACKWARD and needs_whole_backward:
        reason = "clipping by the global norm" if max_grad_norm is not None else "fp16 loss scaling"
        raise ConfigError(f"update='backward' cannot know {reason} in time; use 'forward' or 'speculative'")
    if schedule is UpdateSchedule.SPECULATIVE and (commit_every != 1 or durability != "commit"):
        raise ConfigError("update='speculative' goes back to the committed slot: it needs commit_every=1 and a store")
    if schedule is UpdateSchedule.AUTO:
        schedule = UpdateSchedule.FORWARD if needs_whole_backward else UpdateSchedule.BACKWARD
    return schedule if overlap else UpdateSchedule.STEP


def assemble(
    model: nn.Module,
    tiers: TierConfig,
    config: AdamWConfig,
    options: Options,
    parameter_groups: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None,
    source: Any,
    step: Callable[[], object],
    prepare: Callable[[TieredOptimizer], None],
    tracer: Tracer,
    clock: Callable[[], float],
    backend: Backend | None = None,
) -> Assembly:
    """Make everything that an engine is made of, or nothing.

    Args:
        prepare: called with the optimizer before anything is changed; what it raises ends the making.

    Raises:
        TierstoreError: what was begun is taken down again.
    """
    device = open_device(tiers.device, clock, tracer)
    backend = backend or Backend()
    if options.schedule is UpdateSchedule.SPECULATIVE and not tiers.nvme:
        raise ConfigError("update='speculative' needs a store: give nvme a directory")
    runtime = Runtime(timeout_s=tiers.timeout_s).start()
    store: TrainingStore | None = None
    lock = StoreLock()
    try:
        generation = _find_generation(runtime, tiers, options, backend, lock)
        pieces: Iterable[Piece] = weights_of(model) if source is None else source.stream()
        groups = find_groups(model, device.torch_device)
        specs = [group.spec for group in groups.groups]
        warm_up({spec.dtype for spec in specs})
        if generation is not None:
            check_same_model(generation.layout, specs, tiers.nvme[0])
            _check_same_store(generation, tiers, options.schedule)
        # Before the store is made and takes the weights: what is wrong with the options must not cost them.
        stepper = AdamStepper(groups, TieredOptimizer(_option_groups(model, groups, parameter_groups), config, step))
        prepare(stepper.optimizer)
        grid = generation.layout["chunk_elements"] if generation is not None else None
        request = request_for([spec.need() for spec in specs], tiers, options.schedule, grid)
        store = TrainingStore(
            specs, place(request), tiers, device, [], runtime, backend, tracer, clock,
            is_durable=options.durability is Durability.COMMIT,
            update_threads=tiers.update_threads or min(8, os.cpu_count() or 1),
            codec_scratch_bytes=request.scratch_bytes,
            lock=lock,
        )  # fmt: skip
        if generation is None:
            runtime.call(store.create)
            _bind(groups, store, device)
            fill(store, runtime, groups, pieces)
        else:
            _open(runtime, store, generation, is_previous=options.resume is Resume.PREVIOUS)
            _bind(groups, store, device)
        _move_buffers(model, device)
        driver = RoundDriver(options.schedule, store, runtime)
        return _hook_up(model, groups, store, runtime, backend, device, stepper, driver, tracer, clock, generation)
    except BaseException:
        _take_down(runtime, store)
        lock.release()
        raise


def _take_down(runtime: Runtime, store: TrainingStore | None) -> None:
    # Errors in here are not told: the one on its way out is.
    try:
        runtime.close()
    except Timeout:
        return  # what does not end keeps the store
    except TierstoreError:
        pass
    if store is not None:
        store.release()


def _hook_up(
    model: nn.Module,
    groups: ModelGroups,
    store: TrainingStore,
    runtime: Runtime,
    backend: Backend,
    device: ComputeDevice,
    stepper: AdamStepper,
    driver: RoundDriver,
    tracer: Tracer,
    clock: Callable[[], float],
    generation: Generation | None,
) -> Assembly:
    access = DeviceAccess(groups.groups, store, runtime, device, clock, depth=1)
    hooks = ModelHooks(model, groups, access)

    def is_free(group: int) -> bool:
        return not hooks.is_saved(group) and not groups.groups[group].is_viewed()

    collector = GradientCollector(groups, runtime, device, store.placement.gpu_gradient_bytes, is_free)

    def on_complete(index: int) -> Callable[[], None] | None:
        group = groups.groups[index]
        return driver.decide_group(index, stepper.updates(group, collector.touched, driver.guessed_scale))

    collector.on_complete = on_complete
    access.awaits_update = lambda index: groups.groups[index].spec.trainable and index not in collector.completed
    return Assembly(
        runtime, backend, device, store, groups, access, collector, hooks, stepper, driver, tracer, generation
    )


def _find_generation(
    runtime: Runtime, tiers: TierConfig, options: Options, backend: Backend, lock: StoreLock
) -> Generation | None:
    """The generation to resume, by the user's wish; the store is then locked, so that it stays the one to resume."""
    resume = options.resume
    directory = Path(tiers.nvme[0]) if tiers.nvme else None
    manifests = Manifests(directory, backend) if directory is not None else None
    if manifests is None or directory is None or not manifests.numbers():
        if resume in (Resume.MUST, Resume.PREVIOUS):
            raise ConfigError(f"resume='{resume.value}': there is no generation in {directory or 'memory'}")
        return None
    lock.add([directory])
    numbers = manifests.numbers()
    if options.durability is Durability.NONE:
        raise ConfigError(
            f"{directory} holds generation {numbers[0]}, which durability='none' would overwrite; "
            "use durability='commit', or choose another directory"
        )
    if resume is Resume.NEVER:
        raise ConfigError(
            f"{directory} already holds generation {numbers[0]}; continue it with resume='auto', "
            "or choose another directory"
        )
    if resume is Resume.PREVIOUS and len(numbers) < 2:
        raise ConfigError(f"{directory} holds only generation {numbers[0]}; there is none before it")
    if resume is Resume.PREVIOUS:
        previous = runtime.call(manifests.read, numbers[1])
        _check_can_look_back(runtime, manifests, numbers[0], previous, options.schedule)
        return previous
    return runtime.call(manifests.read, numbers[0])


def _check_can_look_back(
    runtime: Runtime, manifests: Manifests, newest: int, previous: Generation, schedule: UpdateSchedule
) -> None:
    """Refuse to open a previous generation in a way that takes pending gradients from the newest one."""
    try:
        kinds = runtime.call(manifests.read, newest).records.keys()
    except FormatError:
        return  # it is damaged: nothing can be taken from it
    if kinds > {"weights", "state"} and (kinds != previous.records.keys() or schedule is not UpdateSchedule.DELAYED):
        raise ConfigError(
            f"generation {newest} of {manifests.directory} holds gradients of update='delayed', which going back with "
            f"update={schedule.value!r} would lose; resume generation {newest} with update='delayed' first"
        )


def _open(runtime: Runtime, store: TrainingStore, generation: Generation, *, is_previous: bool) -> None:
    if not is_previous:
        runtime.call(store.open, generation)
        return
    try:
        runtime.call(partial(store.open, is_previous=True), generation)
        runtime.call(store.verify, generation)
    except ChecksumMismatch as error:
        damage = str(error).rpartition("; ")[0]  # without its advice to do what is being done
        raise ChecksumMismatch(f"generation {generation.number} is not whole any more: {damage}") from None


def _check_same_store(generation: Generation, tiers: TierConfig, schedule: UpdateSchedule) -> None:
    layout = generation.layout
    if generation.captured["pending"] is not None and schedule is not UpdateSchedule.DELAYED:
        raise ConfigError(
            f"the store in {tiers.nvme[0]} was trained with update='delayed', and the gradients of its last step are "
            f"not applied yet; update={schedule.value!r} would lose them: resume it with update='delayed'"
        )
    if layout["directories"] != len(tiers.nvme):
        raise ConfigError(
            f"the store in {tiers.nvme[0]} is striped over {layout['directories']} directories, {len(tiers.nvme)} are "
            "given; give all of them, in their order"
        )
    if layout["codec"] != tiers.codec.value:
        raise ConfigError(
            f"the store in {tiers.nvme[0]} was made with codec {layout['codec']!r}, not {tiers.codec.value!r}; "
            "give the same codec, or choose another directory"
        )


def _bind(groups: ModelGroups, store: TrainingStore, device: ComputeDevice) -> None:
    for group in groups.groups:
        group.bind(device)
    store.use_storages([group.storage for group in groups.groups])


def _move_buffers(model: nn.Module, device: ComputeDevice) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device.torch_device:
                module._buffers[name] = buffer.to(device.torch_device)


def _option_groups(model: nn.Module, groups: ModelGroups, given: Any) -> list[Any]:
    """Parameter groups as torch takes them, with parameters of a meta model replaced by the real ones."""
    if given is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad and p in groups.names]}]

    def real(parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        for parameter in [parameters] if isinstance(parameters, nn.Parameter) else parameters:
            yield groups.replaced.get(parameter, parameter)

    items = list(given)
    if items and isinstance(items[0], Mapping):
        return [dict(item, params=list(real(item["params"]))) for item in items]
    return [{"params": list(real(items))}]
