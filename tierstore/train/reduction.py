"""Gradients reduced over all ranks, group by group, while the rest of backward runs.

Scope: the bucket of a group, the order of reductions, and handing the result to the store.
Not here: when a group's gradient is complete (`backward.py`); reducing without offload (`data_parallel/`).
Owner: the thread that runs backward fills buckets; all else is the loop's, which reduces in a thread of its own.

[Note: the order of reductions] Every backward reduces every trainable group once, in one order at every rank: the order
in which rank 0's gradients were complete in the second step, before that in the first, and in the first step the
reverse of the order in which rank 0's forward needed the groups. Buckets that wait for their turn take memory of the
device. A group that got no gradient here takes part with zeros. Gradients that come late in the first step are reduced
once more at its end, in the reverse order of registration.

[Note: flags] A parameter is updated if it got a gradient at any rank. Behind every part of the bucket each rank puts a
1 for each parameter that got a gradient at that rank, so that the sums tell, without a collective of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import distributed

from tierstore.alignment import padded
from tierstore.device.arithmetic import Piece
from tierstore.device.spans import TORCH_DTYPES
from tierstore.device.streams import ComputeDevice, Mark, Reached
from tierstore.io.meter import LinkMeter
from tierstore.io.runtime import Runtime
from tierstore.io.workers import Priority, WorkerPool
from tierstore.store.gradients import Arrival, Gradients
from tierstore.store.layout import GroupSpec
from tierstore.trace import Tracer
from tierstore.train.groups import Group
from tierstore.train.partition import Partition
from tierstore.train.ranks import reduce_scatter_flat

_LESSONS = 2  # in the first backward, what a recomputation adds is not known


class Buckets:
    """The shape of buckets: one part per rank that gets one, each with flags behind it."""

    def __init__(self, partition: Partition) -> None:
        self._parts = partition.count if partition.scatters else 1

    def part(self, spec: GroupSpec) -> int:
        """Elements of one part, without its flags."""
        return spec.device_elements // self._parts

    def width(self, spec: GroupSpec) -> int:
        """Elements of one part with its flags."""
        return self.part(spec) + len(spec.parameters)

    def elements(self, spec: GroupSpec) -> int:
        """Elements of a bucket."""
        return self._parts * self.width(spec)

    def device_bytes(self, spec: GroupSpec) -> int:
        """Padded bytes of a bucket and, if it is scattered, of this rank's part of the result."""
        own = self.width(spec) if self._parts > 1 else 0
        return padded((self.elements(spec) + own) * spec.item_bytes)

    def spans(self, spec: GroupSpec, position: int) -> Iterator[tuple[int, int, int]]:
        """Where a parameter lies in the bucket: (element of the bucket, element of the parameter, count)."""
        part, width, parameter = self.part(spec), self.width(spec), spec.parameters[position]
        start = parameter.start
        while start < parameter.stop:
            index, offset = divmod(start, part)
            count = min(part - offset, parameter.stop - start)
            yield index * width + offset, start - parameter.start, count
            start += count

    def flag(self, spec: GroupSpec, position: int) -> slice:
        """The flags of a parameter, one in every part."""
        return slice(self.part(spec) + position, None, self.width(spec))


class Bucket:
    """The gradient of one group at this rank, on the device, already divided by the number of ranks."""

    def __init__(self, buckets: Buckets, group: Group, device: torch.device, ranks: int) -> None:
        self._buckets = buckets
        self._spec = group.spec
        self._share = 1.0 / ranks
        self._seen: set[int] = set()
        self.flat = torch.zeros(buckets.elements(group.spec), dtype=TORCH_DTYPES[group.spec.dtype], device=device)

    @torch.no_grad()
    def add(self, position: int, gradient: torch.Tensor) -> None:
        """Add a gradient of a parameter; several of one parameter are summed."""
        values, is_first = gradient.reshape(-1), position not in self._seen
        for start, first, count in self._buckets.spans(self._spec, position):
            target, source = self.flat[start : start + count], values[first : first + count]
            if is_first:
                torch.mul(source, self._share, out=target)
            else:
                target.add_(source, alpha=self._share)
        self.flat[self._buckets.flag(self._spec, position)] = 1.0
        self._seen.add(position)


@dataclass(slots=True)
class _Ready:
    bucket: Bucket | None
    after: Mark
    is_final: bool
    is_streaming: bool


class Reductions:
    """Reduces buckets in one order, and gives this rank's part to the store.

    Args:
        meter: measures the link between the ranks.

    Attributes:
        touched: names of parameters that got a gradient in this step at any rank.
        on_complete: decides the update of a group; called on the loop when its reduced gradient is on its way.
        on_done: called with the bytes of device memory that have become free.
    """

    def __init__(
        self,
        partition: Partition,
        groups: Sequence[Group],
        runtime: Runtime,
        device: ComputeDevice,
        meter: LinkMeter,
        tracer: Tracer,
    ) -> None:
        self.buckets = Buckets(partition)
        self.order = [group.index for group in reversed(groups) if group.spec.trainable]
        self._lessons = _LESSONS
        self._partition = partition
        self._groups = groups
        self._runtime = runtime
        self._device = device
        self._meter = meter
        self._tracer = tracer
        self.touched: set[str] = set()
        self._thread = WorkerPool("tierstore-reduce", 1)
        self._ready: dict[int, _Ready] = {}
        self._turns: Iterator[int] = iter(())
        self._next: int | None = None
        self._begun: set[int] = set()
        self.running: dict[int, asyncio.Task[None]] = {}
        self.store: Gradients | None = None
        self.on_complete: Callable[[int], Callable[[Mark], None] | None] = lambda group: None
        self.on_done: Callable[[int], None] = lambda nbytes: None

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._thread.close(timeout_s)

    def bucket(self, group: Group) -> Bucket:
        """An empty bucket, made in the current stream."""
        return Bucket(self.buckets, group, self._device.torch_device, self._partition.world)

    @property
    def is_first(self) -> bool:
        """Whether this is the first step: the same at all ranks, whatever each of them knows of its graph."""
        return self._lessons == _LESSONS

    def guess_order(self, needed: Sequence[int]) -> None:
        """In the first step, take the reverse of rank 0's forward. See [Note: the order of reductions]."""
        if self.is_first:
            trainable = {group.index for group in self._groups if group.spec.trainable}
            last = sorted(trainable.difference(needed), reverse=True)  # complete when backward ends, if ever
            mine = [*(group for group in reversed(needed) if group in trainable), *last]
            self.order = self._partition.agree("the order of gradients", mine)

    def learn_order(self, completed: Sequence[int]) -> None:
        """Take the order of rank 0; between backwards, in the training thread. See [Note: the order of reductions]."""
        if self._lessons:
            self._lessons -= 1
            self.order = self._partition.agree("the order of gradients", list(completed))

    def late_order(self, groups: Sequence[int]) -> list[int]:
        """The late groups of all ranks, in one order; in the training thread."""
        ranks = self._partition.exchange("late gradients", list(groups))
        return sorted({group for rank in ranks for group in rank}, reverse=True)

    # --- on the loop thread -------------------------------------------------------------------------------------

    def begin(self, store: Gradients | None, order: Sequence[int]) -> None:
        """Expect these groups, once each: all of a backward that begins, or those that came late in it."""
        self.store = store
        self._turns = iter(order)
        self._next = next(self._turns, None)
        self._ready.clear()

    def forget(self) -> None:
        """The step is over, or given up: the next gradient of each group is its first."""
        self._begun.clear()
        self.touched.clear()

    def ready(self, group: int, bucket: Bucket | None, after: Mark, is_final: bool, is_streaming: bool) -> None:
        """A group is complete at this rank (None: it got no gradient here). See [Note: the order of reductions]."""
        self._ready[group] = _Ready(bucket, after, is_final, is_streaming)
        while (launched := self._next) is not None and launched in self._ready:
            self._next = next(self._turns, None)
            self._launch(self._groups[launched], self._ready.pop(launched))

    def _launch(self, group: Group, ready: _Ready) -> None:
        if self.store is None:
            return
        # Submitted here and not by the task: the order of submission is that of the collectives.
        job = self._thread.submit(Priority.DEMAND, self._reduce, group, ready.bucket, ready.after)
        before = self.running.get(group.index)
        work = self._deliver(group, ready, job, self.store, before)
        self.running[group.index] = self._runtime.spawn(work, f"reduce {group.spec.name}")

    async def _deliver(
        self,
        group: Group,
        ready: _Ready,
        job: asyncio.Future[tuple[torch.Tensor, list[int]]],
        store: Gradients,
        before: asyncio.Task[None] | None,
    ) -> None:
        spec = group.spec
        self._meter.begin()
        try:
            with self._tracer.measure("reduce", spec.name):
                reduced, positions = await job
        finally:
            self._meter.end(spec.device_bytes)
        is_held, ready.bucket = ready.bucket is not None, None
        if before is not None:
            await asyncio.shield(before)
        if positions:
            self.touched.update(spec.parameters[position].name for position in positions)
            pieces = [Piece(0, reduced, group.index not in self._begun)] if len(reduced) else []
            self._begun.add(group.index)
            accepted = store.accept([Arrival(group.index, pieces, Reached(), ready.is_final, ready.is_streaming)])
            if ready.is_streaming and (then := self.on_complete(group.index)) is not None:
                then(ready.after)  # the update may begin with the first chunk that has arrived
            await accepted
        if is_held:
            self.on_done(self.buckets.device_bytes(spec))

    # --- in the thread that reduces -----------------------------------------------------------------------------

    def _reduce(self, group: Group, bucket: Bucket | None, after: Mark) -> tuple[torch.Tensor, list[int]]:
        """This rank's part of the sum, and the positions of the parameters that got a gradient at any rank."""
        partition, ranks, spec = self._partition, self._partition.ranks, group.spec
        if ranks is None:
            raise RuntimeError("there is nobody to reduce with")
        after.synchronize()
        width, part = self.buckets.width(spec), self.buckets.part(spec)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def launch() -> None:
            full = (bucket or self.bucket(group)).flat
            own = full
            if partition.scatters:
                own = torch.empty(width, dtype=full.dtype, device=full.device)
                reduce_scatter_flat(own, full, partition.reductions)
            else:
                distributed.all_reduce(full, group=partition.reductions)
            if partition.replicas is not None:
                distributed.all_reduce(own, group=partition.replicas)
            found.append((own, own[part:].to("cpu", non_blocking=True)))  # in this stream: not behind backward's

        with ranks.waiting(f"the gradient of {spec.name}"):
            self._device.complete("reduce", launch, ranks.wait_s)
        own, flags = found[0]
        first = 0 if partition.scatters else spec.first
        return own[first : first + spec.elements], [i for i, flag in enumerate(flags.tolist()) if flag]
