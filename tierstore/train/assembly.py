"""Building the engine's parts: groups, placement, store, hooks; and taking them down in a fixed order.

Scope: from a model and options to an `Assembly`, new or resumed; filling a new store with weights.
Not here: the step (`steps.py`), sizes (`sizing.py`), which generation is resumed (`opening.py`).
Owner: the thread that makes the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tierstore.caller import warn_caller
from tierstore.config import AdamWConfig, Codec, Durability, Resume, TierConfig, UpdateSchedule
from tierstore.cores import update_threads
from tierstore.device.streams import ComputeDevice, Mark, open_device
from tierstore.errors import BudgetError, ConfigError, MachineWarning, Timeout
from tierstore.io.backend import Backend
from tierstore.io.directories import warn_of_memory
from tierstore.io.machine import claim_memory, ranks_on_these_cores, refuse_impossible, shortage
from tierstore.io.meter import LinkMeter
from tierstore.io.runtime import Runtime
from tierstore.io.tasks import raise_first
from tierstore.kernels import warm_up
from tierstore.plan.placement import Placement, Request
from tierstore.plan.schedules import settled
from tierstore.plan.tiers import place
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import Generation
from tierstore.store.stripes import recorded_shares, shares_of, why_equal
from tierstore.store.team import Team, leads
from tierstore.store.training import TrainingStore
from tierstore.trace import Tracer
from tierstore.train import capture
from tierstore.train.access import DeviceAccess
from tierstore.train.backward import GradientCollector
from tierstore.train.codec_trial import codecs_of
from tierstore.train.depth import DepthChooser
from tierstore.train.filling import Piece, check_source, fill_alike, weights_of
from tierstore.train.gathering import Gathers
from tierstore.train.groups import ModelGroups, find_groups, refuse_empty_buffers
from tierstore.train.guard import Gate, guard, hide
from tierstore.train.hooks import ModelHooks
from tierstore.train.opening import check_same_store, find_generation, open_generation
from tierstore.train.optimizer import AdamStepper, TieredOptimizer, check_scheduler, ended_schedule
from tierstore.train.options import Options
from tierstore.train.owners import refuse_taken
from tierstore.train.parameter_groups import given_groups
from tierstore.train.partition import Partition
from tierstore.train.reduction import Reductions
from tierstore.train.rounds import RoundDriver
from tierstore.train.sizing import cut_groups
from tierstore.train.stand_ins import Pair, put_back, replace_meta_parameters

_SHARED_TIERS = {"gpu_memory", "codec", "prefetch_depth", "state_on_gpu"}
"""Options of the tiers that must be the same at all ranks, because what they do together depends on these."""


@dataclass
class Assembly:
    """The parts of one engine.

    Attributes:
        scheduler: sets the learning rates; None if there is none.
        gathers, reductions: collectives with the other ranks; None where they are not needed.
        links: meters of what moved between the ranks.
        is_resumed: whether it goes on from a generation.
        captured: what that generation holds besides weights and moments, until the run has it; None for a new store.
        not_on_gpu: why no state is on the GPU although it may be; None if some is, or none may be.
    """

    model: nn.Module
    options: Options
    runtime: Runtime
    backend: Backend
    device: ComputeDevice
    store: TrainingStore
    groups: ModelGroups
    access: DeviceAccess
    collector: GradientCollector
    hooks: ModelHooks
    stepper: AdamStepper
    scheduler: Any
    driver: RoundDriver
    tracer: Tracer
    partition: Partition
    gathers: Gathers | None
    reductions: Reductions | None
    links: dict[str, LinkMeter]
    depth: DepthChooser
    is_resumed: bool
    captured: Mapping[str, Any] | None
    not_on_gpu: str | None

    def close(self, finish: Callable[[], object] = lambda: None) -> None:
        """Finish, then give everything back, in this order: reads ahead, writes, hooks, loop, threads, files.

        Args:
            finish: publishes the commit that waits, if there is one.

        Raises:
            TierstoreError: the first failure met on the way, after everything was given back.
            Timeout: nothing moves any more; what is running goes on, and is waited for when this is called again.
        """
        failures = [_failure_of(self.runtime.raise_failure)]
        for step in (
            self.driver.give_up,
            finish,
            lambda: self.runtime.call(self.store.flush, raises_kept=False),
            self.access.close,
            self.access.settle,
            self.hooks.remove,
            self.collector.remove,
        ):
            failures.append(_failure_of(step))
            if isinstance(failures[-1], Timeout):  # to close the loop would cancel the commit
                raise_first(filter(None, reversed(failures)))
        self.go_on_closing(failures)

    def go_on_closing(self, met: Iterable[BaseException | None] = ()) -> None:
        """The end of `close`, which may itself end in a timeout, and is then repeated.

        Args:
            met: failures on the way here.
        """
        failures = [*met]
        for step in (self.runtime.close, self._end_threads, self.store.release):
            failures.append(_failure_of(step, tries=2))
            if not self.runtime.has_ended:
                break  # a loop that has not ended may still write: it keeps the memory, the files and the lock
        for failure in filter(None, failures):
            raise failure

    def _end_threads(self) -> None:
        """The threads that work with other ranks."""
        for room in (self.gathers, self.reductions, self.partition):
            if room is not None:
                room.close(self.runtime.timeout_s)


def assemble(
    model: nn.Module,
    tiers: TierConfig,
    config: AdamWConfig,
    options: Options,
    partition: Partition,
    parameter_groups: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None,
    source: Any,
    step: Callable[[], object],
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
    registered: Mapping[str, capture.Stateful],
    tracer: Tracer,
    clock: Callable[[], float],
    backend: Backend,
) -> Assembly:
    """Make everything that an engine is made of, or nothing.

    Args:
        source: gives the weights that the model does not hold itself.
        step: the engine's own, which its optimizer calls.

    Raises:
        TierstoreError: something failed; what was begun is taken down again.
    """
    runtime = Runtime(timeout_s=tiers.timeout_s, backend=backend)
    store: TrainingStore | None = None
    lock: StoreLock | None = None
    replaced: list[Pair] = []
    is_durable = options.durability is Durability.COMMIT
    try:
        device = open_device(tiers.device, clock, tracer)
        runtime.start()
        partition.check_same(_shared_options(tiers, config, options))
        team = partition.team(tiers, is_durable=is_durable)
        lock = StoreLock(member=None if leads(team) else team.rank)
        generation = find_generation(runtime, tiers, options, backend, lock, partition, team)
        partition.all_succeed("the model", lambda: refuse_taken(model))
        if generation is None:
            partition.all_succeed(
                "the source of weights", lambda: check_source(model, source) if partition.is_first else None
            )
        pieces: Iterable[Piece] = weights_of(model, source)
        refuse_empty_buffers(model)
        replace_meta_parameters(model, device.torch_device, replaced)
        groups = find_groups(model)
        specs = [group.spec for group in groups.groups]
        partition.check_same_model(specs)
        dtypes = {spec.dtype for spec in specs}
        warm_up(sorted(dtypes))
        if generation is not None:
            check_same_store(generation, specs, tiers, options.schedule)
        # Before the store is made and takes the weights: a mistake in the options must not cost the weights.
        optimizer = TieredOptimizer(given_groups(model, groups, parameter_groups, replaced), config, step)
        stepper = AdamStepper(groups, optimizer)
        if generation is not None:
            optimizer.restore(generation.captured["optimizer"])  # a new schedule goes on from these rates
        scheduler = None if lr_scheduler is None else _schedule(lr_scheduler, optimizer, generation)
        capture.check_storable(model, registered, scheduler, is_written=is_durable and bool(tiers.nvme))
        options_now = stepper.options(is_checked=generation is None)
        partition.check_same(stepper.members() | options_now | _forms(_of_first(model, generation)))
        codecs, pieces = codecs_of(tiers, generation, pieces, specs, partition, runtime, clock)
        is_coded = any(choice.codec is not Codec.NONE for choice in codecs.values())
        grid = generation.layout["chunk_elements"] if generation is not None else None
        request = cut_groups(groups, tiers, options.schedule, grid, partition, is_coded=is_coded)
        placement, not_on_gpu = _placed(request, tiers, device, dtypes, options)
        # On resume the model keeps its weights until the store is open, which may fail.
        given_back = _weight_bytes(model) if generation is None else 0
        _check_machine(placement, request.scratch_bytes, tiers, given_back, partition)
        store = TrainingStore(
            [group.spec for group in groups.groups], placement, tiers, device, runtime, backend, tracer, clock,
            is_durable=is_durable, lock=lock, team=team, codecs=codecs,
            shares=_shares(tiers, generation, partition, team), codec_scratch_bytes=request.scratch_bytes,
            update_threads=update_threads(tiers.update_threads, ranks_on_these_cores(partition.exchange)),
        )  # fmt: skip
        if generation is None:
            runtime.call(store.files.create)
        else:
            open_generation(runtime, store, generation, is_previous=options.resume is Resume.PREVIOUS)
        _bind(groups, store, device)
        if generation is None:
            fill_alike(partition, store, runtime, groups.groups, pieces)
        partition.same_buffers(_of_first(model, generation).values())
        _move_buffers(model, device)  # not earlier: a source of weights fills the buffers that the model had
        driver = _driver_of(options, store, runtime, device, partition)
        links = {"gather": LinkMeter(clock), "reduce": LinkMeter(clock)} if partition.is_shared else {}
        gathers = None if partition.keeps_all else Gathers(partition, device, links["gather"], tracer)
        reductions = None
        if partition.is_shared:
            reductions = Reductions(partition, groups.groups, runtime, device, links["reduce"], tracer)
        access = DeviceAccess(groups.groups, store, runtime, device, clock, gathers)
        hooks = ModelHooks(model, groups, access)
        collector = GradientCollector(groups, runtime, device, store.placement.gpu_gradient_bytes, reductions)
        _hook_up(groups, access, collector, stepper, driver, reductions)
        depth = DepthChooser(access, store, runtime, device, partition, links)
        return Assembly(
            model, options, runtime, backend, device, store, groups, access, collector, hooks, stepper, scheduler,
            driver, tracer, partition, gathers, reductions, links, depth, generation is not None,
            None if generation is None else generation.captured, not_on_gpu,
        )  # fmt: skip
    except BaseException:
        _take_down(runtime, store, lock)
        partition.close(tiers.timeout_s)
        put_back(model, replaced)
        raise


def _check_machine(
    placement: Placement, scratch_bytes: int, tiers: TierConfig, given_back_bytes: int, partition: Partition
) -> None:
    """Refuse, or warn of, more memory than the machine has for its ranks; warn of directories that lie in memory.

    Raises:
        BudgetError: at all ranks: the machine can never give that much.
    """
    nbytes = placement.pools.total_bytes + scratch_bytes + (placement.gpu_filled_bytes if tiers.device == "cpu" else 0)
    claims = partition.exchange("the memory of the machine", claim_memory(nbytes, given_back_bytes))
    refuse_impossible(claims, "a run with these budgets")
    if (short := shortage(claims)) is not None:
        warn_caller(short, MachineWarning)
    warn_of_memory(tiers.nvme)


def _weight_bytes(model: nn.Module) -> int:
    """CPU memory that the weights of a model take."""
    storages = {p.untyped_storage() for p in model.parameters() if p.device.type == "cpu"}
    return sum(storage.nbytes() for storage in storages)


def _schedule(
    make: Callable[[torch.optim.Optimizer], Any], optimizer: TieredOptimizer, generation: Generation | None
) -> Any:
    captured = None if generation is None else generation.captured
    if captured is not None and captured["scheduler"] is None:
        optimizer.begin_schedules_here()
    scheduler = make(optimizer)
    check_scheduler(scheduler)
    if captured is not None and ended_schedule(captured, scheduler) is not None:
        optimizer.restore(captured["optimizer"])  # what was made has set the rates of its first step
        optimizer.begin_schedules_here()
        scheduler = make(optimizer)
    return scheduler


def _driver_of(
    options: Options, store: TrainingStore, runtime: Runtime, device: ComputeDevice, partition: Partition
) -> RoundDriver:
    in_memory = all(partition.exchange("what updates need", store.placement.updates_in_memory))
    schedule = options.schedule
    if options.is_auto:
        schedule = settled(schedule, shares_cores=device.kind == "cpu", in_memory=in_memory)
    return RoundDriver(schedule, store, runtime, is_unasked=options.is_auto)


def _shared_options(tiers: TierConfig, config: AdamWConfig, options: Options) -> dict[str, object]:
    """By name, the options that must be the same at all ranks."""
    shared = asdict(options) | tiers.model_dump(include=_SHARED_TIERS) | config.model_dump()
    shared["update"] = shared.pop("schedule")
    return shared | {"nvme": "given" if tiers.nvme else "not given"}


def _of_first(model: nn.Module, generation: Generation | None) -> dict[str, torch.Tensor]:
    """The buffers with whose values of rank 0 all ranks begin; of those in a generation each rank gets its own."""
    kept = {} if generation is None else capture.persistent_buffers(model)
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def _forms(buffers: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """What must be the same of them at all ranks."""
    forms = [f"{name} {buffer.dtype} {tuple(buffer.shape)}" for name, buffer in buffers.items()]
    return {"the buffers of the model": forms}


def _placed(
    request: Request, tiers: TierConfig, device: ComputeDevice, dtypes: set[str], options: Options
) -> tuple[Placement, str | None]:
    """Where everything lives, and why nothing is updated on the GPU although it may be (else None).

    Raises:
        BudgetError: as `place`.
        ConfigError: updates on the GPU were asked for (`state_on_gpu`), and are not possible.
    """
    placement = place(request)
    if not tiers.may_update_on_gpu:
        return placement, None
    if placement.gpu_update_bytes:
        reason = device.arithmetic.why_not(dtypes)
    elif options.schedule is UpdateSchedule.DELAYED:
        reason = "update='delayed' keeps the gradients of two steps"
    elif not request.updates_on_gpu:
        reason = "there are several ranks"
    elif place(replace(request, cpu_bytes=2**62)).gpu_update_bytes:
        reason = "cpu_memory has no room for the buffers of its transfers"
    else:
        reason = "gpu_memory has no room for the state of any group beside all weights"
    if reason is None:
        return placement, None
    told = f"state cannot be updated on {tiers.device}: {reason}"
    if tiers.state_on_gpu:
        raise ConfigError(f"state_on_gpu: {told}")
    try:
        return place(replace(request, updates_on_gpu=False)), reason
    except BudgetError as error:
        raise BudgetError(f"{error}; {told}") from error


def _take_down(runtime: Runtime, store: TrainingStore | None, lock: StoreLock | None) -> None:
    # Errors in here are not reported: the one on its way out is.
    _failure_of(runtime.close, tries=2)
    for room in (store, lock) if runtime.has_ended else ():  # a loop that goes on may still write: it keeps both
        if room is not None:
            _failure_of(room.release, tries=2)


def _failure_of(step: Callable[[], object], tries: int = 1) -> BaseException | None:
    """What `step` raised. An interrupt only ends the wait in `step`: it is called again, up to `tries` times in all."""
    interrupt: KeyboardInterrupt | None = None
    for _ in range(tries):
        try:
            step()
        except KeyboardInterrupt as error:
            interrupt = interrupt or error
        except BaseException as error:
            return interrupt or error
        else:
            break
    return interrupt


def _hook_up(
    groups: ModelGroups,
    access: DeviceAccess,
    collector: GradientCollector,
    stepper: AdamStepper,
    driver: RoundDriver,
    reductions: Reductions | None,
) -> None:
    """Connect access and collector to the updates: what they ask of these, and what they tell them."""

    def on_complete(index: int) -> Callable[[Mark], None] | None:
        return driver.decide_group(index, stepper.updates(index, collector.touched, driver.guessed_scale))

    def awaits_update(index: int) -> bool:
        # Which gradients are complete depends on the rank; which groups are fetched ahead must not.
        is_complete = reductions is None and index in collector.completed
        return groups.groups[index].spec.trainable and not is_complete

    def before_update(index: int) -> None:
        if driver.is_streaming or (driver.may_wait and reductions is None):  # ranks would have to agree
            access.withdraw(index)

    collector.on_complete = on_complete
    collector.before_update = before_update
    access.read_late = lambda index: driver.read_late(groups.groups[index].spec.name)
    access.awaits_update = awaits_update


def _bind(groups: ModelGroups, store: TrainingStore, device: ComputeDevice) -> None:
    gate = Gate()
    for group in groups.groups:
        group.bind(device)
        guard(group, gate)  # in case no engine is made: reading an empty storage would crash the process
        hide(group)
    store.use_storages([group.storage for group in groups.groups])


def _shares(tiers: TierConfig, generation: Generation | None, partition: Partition, team: Team) -> tuple[int, ...]:
    """The share of each directory: as when the store was made; in a new one, by the rates that its leader was given."""
    if generation is not None:
        return recorded_shares(generation.layout)
    if (reason := why_equal(tiers)) is not None:
        warn_caller(reason, MachineWarning)
    return partition.exchange("the shares of the disks", shares_of(tiers))[team.members[0]]


def _move_buffers(model: nn.Module, device: ComputeDevice) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device.torch_device:
                module._buffers[name] = buffer.to(device.torch_device)
