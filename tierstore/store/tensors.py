"""Named tensors on three tiers, in the caller's own event loop: the store without a model.

Scope: the names; put, acquire, prefetch, move, delete, commit, open and close.
Not here: how an entry gets from tier to tier (`entries.py`), packs and generations on disk (`shelf.py`).
Owner: the event loop that opened the store. There are no locks against other threads: these are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tierstore.alignment import ALIGNMENT, padded
from tierstore.caller import warn_caller
from tierstore.config import Codec, Resume, Tier, TierConfig, choice, format_size
from tierstore.device.streams import ComputeDevice, open_device
from tierstore.errors import BudgetError, ConfigError, MachineWarning, TierstoreError, Timeout
from tierstore.io.backend import Backend
from tierstore.io.directories import reasons_in_memory
from tierstore.io.file_threads import FileThreads
from tierstore.io.machine import claim_memory, refuse_impossible
from tierstore.io.memory import Arena, Pool
from tierstore.io.table_file import with_rates
from tierstore.io.tasks import to_the_end, together
from tierstore.io.watch import Watch
from tierstore.io.workers import Priority, WorkerPool
from tierstore.store.acquired import Acquired
from tierstore.store.buffers import DEFAULT_CHUNK_BYTES, BufferPlan, plan_buffers
from tierstore.store.copies import DeviceTier
from tierstore.store.entries import Entry, Homes, recorded_entries
from tierstore.store.extents import ExtentLayout, check_tensors
from tierstore.store.manifest import Generation
from tierstore.store.owner import LoopOwner
from tierstore.store.routes import Given, Route, flattened, taken
from tierstore.store.shelf import Directories, Shelf
from tierstore.store.slots import ChunkIO
from tierstore.store.stripes import shares_of, why_equal
from tierstore.trace import Tracer


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier at one moment.

    Attributes:
        count: entries at home on this tier.
        bytes: bytes of their tensors.
        share: their part of the bytes of all entries; the offloaded share is that of CPU and NVMe together.
        used_bytes: bytes of the budget in use: by homes, and on the device by copies too.
        peak_bytes: the largest `used_bytes` since the store was opened; of NVMe, which has no budget, that of now.
        capacity_bytes: the budget; NVMe has none.
    """

    count: int
    bytes: int
    share: float
    used_bytes: int
    peak_bytes: int
    capacity_bytes: int | None


class TensorStore:
    """Named groups of tensors, each at home on one tier, used on the compute device while acquired.

        async with TensorStore.open(TierConfig(nvme=["/mnt/nvme0/run1"])) as store:
            await store.put("h.0", {"w": tensor}, tier=Tier.NVME)
            async with store.acquire("h.0") as tensors:
                ...

    Threads: the event loop that opened it, for everything.
    """

    def __init__(
        self,
        tiers: TierConfig,
        resume: Resume,
        device: ComputeDevice,
        backend: Backend,
        clock: Callable[[], float],
        tracer: Tracer | None,
    ) -> None:
        self._tiers = tiers
        self._resume = resume
        self._device = device
        self._backend = backend
        self._clock = clock
        self._tracer = tracer
        self._watch = Watch(backend, tiers.timeout_s)
        self._owner = LoopOwner(self._watch)
        self._entries: dict[str, Entry] = {}
        self._committed: Any = None
        self._publishing = asyncio.Lock()
        self._files = FileThreads(1, "tierstore-files")
        self._directories = Directories([Path(path) for path in tiers.nvme], backend, self._files)
        self._workers = WorkerPool("tierstore-io", tiers.io_threads * max(1, len(tiers.nvme)))
        for description in (self._workers.in_flight, self._files.in_flight, backend.in_flight):
            self._owner.describe(description)
        self._arena: Arena | None = None
        self._leaving: Future[None] | None = None
        self._is_given_back = False

    @classmethod
    def open(
        cls,
        tiers: TierConfig,
        *,
        resume: Resume | str = Resume.AUTO,
        device: ComputeDevice | None = None,
        backend: Backend | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tracer: Tracer | None = None,
    ) -> TensorStore:
        """A store to be entered by `async with`; nothing is touched before that.

        Args:
            resume: "auto" opens the last generation if there is one, "must" fails without one, "previous" opens the one
                before it, after verifying every chunk of that, and gives the last one up at the first commit of a
                change; "never" refuses a store that has a generation.
            device: if None, the one that `tiers` names.

        Raises:
            ConfigError: there is no such device, no such way to resume, or the codec is "auto".
        Warns:
            MachineWarning: when it is entered, for a directory whose files are in memory, or whose rate is missing
                among those of `tiers`.
        """
        wanted = choice(Resume, "resume", resume)
        if not isinstance(tiers, TierConfig):
            raise ConfigError(f"tiers must be a TierConfig(nvme=[...]), not a {type(tiers).__name__}")
        if tiers.codec is Codec.AUTO:
            raise ConfigError("codec='auto' is decided for the state of an Engine; name a codec for a store of tensors")
        device = device or open_device(tiers.device, clock, tracer)
        return cls(tiers, wanted, device, backend or Backend(), clock, tracer)

    # --- use ----------------------------------------------------------------------------------------------------

    async def put(self, name: str, tensors: Mapping[str, torch.Tensor], *, tier: Tier | str) -> None:
        """Store copies of `tensors` under `name`, in place of an entry of that name.

        Shapes: any; every dense dtype; strides and `requires_grad` are not kept. Do not change `tensors` before this
            returns.
        Raises:
            BudgetError: names the smallest budget that fits. The old entry counts: it stays until the new one is whole.
            StorageError: the old entry is there, unchanged.
            CancelledError: the old entry is there, unchanged, or the new one is, if it was in place by then.
            Timeout: the old entry is there; `tensors` may still be read until the disk answers.
        """
        self._owner.check()
        check_tensors(name, tensors, self._device.torch_device)
        home, given = choice(Tier, "tier", tier), taken(self._device, tensors)
        await self._owner.run(f"put {name!r}", self._put, name, given, home)

    async def _put(self, name: str, given: Given, home: Tier) -> None:
        self._check_tier(home)
        described = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in given.tensors.items()]
        entry = Entry(name, ExtentLayout.of(described, self._plan.chunk_bytes), home)
        source = await flattened(self._device, entry.layout, given, self._workers)
        await self._homes.settle_in(entry, source)
        replaced = self._entries.get(name)
        self._entries[name] = entry
        if replaced is not None:
            self._homes.retire(replaced)

    @contextlib.asynccontextmanager
    async def acquire(self, name: str, *, modify: bool = False) -> AsyncIterator[dict[str, torch.Tensor]]:
        """The tensors of an entry on the compute device, valid inside the `async with`; all users share them.

        In-place changes are kept only with `modify`, if the block ends without an error. Otherwise they are lost,
        except on an entry at home on the GPU tier, which has no other bytes. Changes past the version counter (`.data`,
        numpy) are seen only with `modify`. Queue all work on the tensors on the stream that is current at the end.

        Blocks: on the load. With `modify` also on writing back, which a cancellation does not stop.
        Raises:
            KeyError: there is no such entry.
            ConfigError: the block put another tensor into the mapping, which would be lost. This counts as an error of
                the block.
            BudgetError: what is acquired already leaves no room; names the smallest budget that fits.
            ChecksumMismatch: names the damaged chunk and its file.
            Timeout: nothing moves any more; the load, or writing back, goes on when the disk answers.
        """
        with self._owner.call(f"acquire {name!r}"):
            self._owner.raise_kept()
            entry = self._find(name)
            async with self._owner.deadline(f"{name!r} was not loaded"):
                copy = await self._homes.acquire(entry)
        copy.modifiers += modify
        try:
            acquired = Acquired(name, copy.tensors)
            yield acquired.tensors
            acquired.check_same()
        except BaseException:
            copy.modifiers -= modify
            self._homes.leave(entry, copy, is_modified=modify)
            raise
        if not modify:
            self._homes.leave(entry, copy, is_modified=False)
            return
        self._homes.gpu.used(copy)  # now: in the next turn of the loop another stream may be current
        await self._owner.run(f"write back {name!r}", self._homes.write_back, entry, copy)

    async def prefetch(self, names: str | Iterable[str]) -> list[str]:
        """Begin to load entries, in this order, and return at once.

        Idle copies make room, acquired ones never do.

        Returns:
            Names of the entries on the device or on their way there; for the others there is no room now.
        Raises:
            KeyError: there is no such entry; nothing was begun. (A load that fails raises at the next `acquire`.)
        """
        with self._owner.call("prefetch"):
            wanted = [names] if isinstance(names, str) else dict.fromkeys(names)
            return [entry.name for entry in self._homes.prefetch([self._find(name) for name in wanted])]

    async def move(self, name: str, tier: Tier | str) -> None:
        """Change the home of an entry; acquired tensors stay as they are.

        Raises:
            KeyError: there is no such entry.
            BudgetError, StorageError, Timeout: it is where it was, as after a cancellation.
        """
        await self._owner.run(f"move {name!r}", self._move, name, choice(Tier, "tier", tier))

    async def _move(self, name: str, home: Tier) -> None:
        self._check_tier(home)
        while not await self._homes.move(self._find(name), home):
            pass

    async def delete(self, name: str) -> None:
        """Forget an entry; whoever has acquired it keeps it until the release.

        Raises:
            KeyError: there is no such entry.
        """
        with self._owner.call(f"delete {name!r}"):
            self._homes.retire(self._find(name))
            del self._entries[name]

    async def commit(self) -> int:
        """Make the entries as they are now a durable generation; those in memory are written first.

        What an open `acquire(modify=True)` has changed so far is not part of it (on the GPU tier it may be).

        Returns:
            The number of the generation; that of the last one if nothing has changed since.
        Raises:
            StorageError: the generation before is there, as after a cancellation. After a failed sync the next commit
                writes again what is in memory; an entry at home on NVMe has to be put again first.
            Timeout: the generation before is there, or this one is, though it is not known to be durable.
        """
        self._owner.check()
        self._owner.raise_kept()
        return await self._owner.run("commit", self._commit)

    def usage(self) -> dict[Tier, TierUsage]:
        """Count, bytes and share of the entries at home on each tier, and its budget."""
        self._owner.check()
        gpu, cpu = self._homes.gpu.budget, self._homes.resident
        total = sum(entry.layout.nbytes for entry in self._entries.values())
        found = {}
        for tier in Tier:
            sizes = [entry.layout.nbytes for entry in self._entries.values() if entry.home is tier]
            nbytes = sum(sizes)
            used, peak, capacity = {
                Tier.GPU: (gpu.used_bytes, gpu.peak_bytes, gpu.capacity_bytes),
                Tier.CPU: (cpu.used_bytes, cpu.peak_bytes, cpu.capacity_bytes),
                Tier.NVME: (nbytes, nbytes, None),
            }[tier]
            found[tier] = TierUsage(len(sizes), nbytes, nbytes / total if total else 0.0, used, peak, capacity)
        return found

    def names(self) -> list[str]:
        """All names, in the order in which they were first put."""
        self._owner.check()
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        self._owner.check()
        return name in self._entries

    def home(self, name: str) -> Tier:
        """The tier where an entry lives.

        Raises:
            KeyError: there is no such entry.
        """
        self._owner.check()
        return self._find(name).home

    @property
    def generation(self) -> int:
        """Number of the last generation; -1 before the first."""
        self._owner.check()
        return self._shelf.generation

    # --- opening ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> TensorStore:
        self._owner.begin()
        try:
            warnings = await self._owner.in_time("the store did not open", to_the_end(self._open()))
            for reason in warnings:
                warn_caller(reason, MachineWarning)
        except Timeout:
            with contextlib.suppress(Timeout):  # it still hangs
                await self.close()
            raise
        except BaseException:
            await self.close()
            raise
        self._owner.is_open = True
        return self

    async def _open(self) -> list[str]:
        warnings = await self._workers.submit(Priority.DEMAND, self._check_machine)
        directories = self._directories
        if directories.paths:
            await self._workers.submit(Priority.DEMAND, directories.claim)
        generation = await directories.find(self._resume)
        self._plan = self._plan_buffers(generation)
        shares: tuple[int, ...] = ()  # a generation has its own
        if generation is None:
            shares, reason = await self._workers.submit(Priority.DEMAND, self._choose_shares)
            warnings += [] if reason is None else [reason]
        self._build(generation, shares)
        rows = [] if generation is None else recorded_entries(generation)
        self._check_budgets(rows)
        if directories.paths:
            extents = {kind: (entry.name, entry.layout) for entry, kind in rows}
            await self._shelf.recover(generation, extents, verify=self._resume is Resume.PREVIOUS)
        await together(self._restore(entry, kind) for entry, kind in rows)
        self._entries = {entry.name: entry for entry, _ in rows}
        self._committed = self._describe()
        return warnings

    def _check_machine(self) -> list[str]:
        """Check the machine, and return what to warn of."""
        refuse_impossible([claim_memory(self._tiers.cpu_memory)], "a store with this cpu_memory")
        return reasons_in_memory(self._tiers.nvme)

    def _choose_shares(self) -> tuple[tuple[int, ...], str | None]:
        """The shares of the directories, and what to warn of."""
        tiers = with_rates(self._tiers)
        return shares_of(tiers), why_equal(tiers)

    def _plan_buffers(self, generation: Generation | None) -> BufferPlan:
        tiers, asked = self._tiers, self._tiers.chunk_bytes
        chunk_bytes = (asked or DEFAULT_CHUNK_BYTES) // ALIGNMENT * ALIGNMENT
        if generation is not None:
            stored, codec = generation.layout["chunk_bytes"], generation.layout["codec"]
            if codec != tiers.codec.value or (asked is not None and chunk_bytes != stored):
                raise ConfigError(
                    f"the store in {tiers.nvme[0]} was made with codec={codec!r} and chunk_bytes={stored}; open it "
                    "with these"
                )
            chunk_bytes = stored
        return plan_buffers(tiers.cpu_memory, chunk_bytes, tiers.io_threads * max(1, len(tiers.nvme)), tiers.codec)

    def _build(self, generation: Generation | None, shares: tuple[int, ...]) -> None:
        plan, device = self._plan, self._device
        self._arena = arena = Arena(plan.cpu_bytes, device.pin, device.unpin)
        staging = {False: arena.pool("demand", plan.demand_bytes), True: arena.pool("prefetch", plan.prefetch_bytes)}
        scratch: Pool = arena.pool("codec", plan.scratch_bytes)
        io = ChunkIO(self._backend, self._workers, scratch, self._clock, self._tracer)
        route = Route(self._workers, staging)
        owner, later = self._owner, partial(self._owner.later, self._workers)
        self._shelf = Shelf(
            self._directories, io, self._tiers.codec, route, plan.chunk_bytes, shares, generation, later
        )
        gpu = DeviceTier(device, self._tiers.gpu_budget_bytes, self._workers, owner.spawn)
        resident = arena.pool("resident", plan.resident_bytes)
        self._homes = Homes(gpu, resident, self._shelf, route, plan, owner.spawn, owner.keep_failure)

    def _check_budgets(self, rows: list[tuple[Entry, str]]) -> None:
        gpu_bytes = sum(entry.layout.nbytes for entry, _ in rows if entry.home is Tier.GPU)
        cpu_bytes = sum(padded(entry.layout.nbytes) for entry, _ in rows if entry.home is Tier.CPU)
        for option, needed_bytes, have_bytes, smallest_bytes in (
            ("gpu_memory", gpu_bytes, self._tiers.gpu_budget_bytes, gpu_bytes),
            ("cpu_memory", cpu_bytes, self._plan.resident_bytes, self._plan.smallest_bytes(cpu_bytes)),
        ):
            if needed_bytes > have_bytes:
                raise BudgetError(
                    f"{option}: the store has {format_size(needed_bytes)} at home there, more than "
                    f"{format_size(have_bytes)}; the smallest {option} that fits is {smallest_bytes} B"
                )

    async def _restore(self, entry: Entry, kind: str) -> None:
        pack = self._shelf.pack(kind)
        if entry.home is not Tier.NVME:
            async with self._shelf.opened(pack, Priority.DEMAND) as place:
                await self._homes.settle_in(entry, place)
        entry.pack = pack

    # --- committing ---------------------------------------------------------------------------------------------

    async def _commit(self) -> int:
        self._check_tier(Tier.NVME)
        async with self._publishing:
            while unsaved := [entry for entry in self._entries.values() if not entry.is_saved]:
                await together(self._homes.save(entry) for entry in unsaved)
            # No await between the last look at the entries and these lines: both are of one moment.
            described, packs = self._describe(), [entry.pack for entry in self._entries.values() if entry.pack]
            if described != self._committed:
                self._committed = None
                await self._shelf.publish(packs, described)
                self._committed = described
            return self._shelf.generation

    def _describe(self) -> dict[str, Any]:
        return {
            "entries": [
                {
                    "name": entry.name,
                    "tier": entry.home.value,
                    "pack": entry.pack.kind if entry.pack is not None else "",
                    "tensors": entry.layout.describe(),
                }
                for entry in self._entries.values()
            ]
        }

    def _find(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(f"there is no entry {name!r} in the store")
        return entry

    def _check_tier(self, tier: Tier) -> None:
        if tier is Tier.NVME and not self._shelf.is_durable:
            raise ConfigError("this store has no NVMe tier; give TierConfig(nvme=[...]) a directory")

    # --- the end ------------------------------------------------------------------------------------------------

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, in this order: refuse new work, wait for running calls, cancel loads, commit unless the block failed,
        remove what no generation names, join the workers, unlock, free the memory. A block of `acquire` is no call: end
        those of other tasks before, or they raise `ClosedError` at their end, and what they changed is lost.

        Raises:
            Timeout: something did not end. It may still write, so memory and lock are kept until `close` is called, or
                the process ends.
            TierstoreError: the first failure on the way, or one that nobody has heard of yet.
        """
        self._owner.check()
        self._owner.is_open = False
        try:
            await to_the_end(self._finish(is_clean=error is None))
        except TierstoreError as failure:
            if error is None:
                raise
            error.add_note(f"and the store did not close cleanly: {failure}")

    async def _finish(self, *, is_clean: bool) -> None:
        try:
            await self._owner.rest()
            if is_clean and self._shelf.is_durable:
                await self._owner.in_time("the last commit did not end", self._commit())
            await self._owner.rest()  # for removals that the commit has begun
            await self._owner.in_time("the store did not close", self._remove_unnamed())
        except TierstoreError as failure:
            self._owner.keep_failure(failure)  # after those that came first
        finally:
            try:
                await self.close()
            except Timeout as failure:
                self._owner.keep_failure(failure)
        self._owner.raise_kept()

    async def _remove_unnamed(self) -> None:
        await self._workers.submit(Priority.WRITE, self._shelf.unlink, self._shelf.unnamed())

    async def close(self) -> None:
        """Give everything back, if opening or closing the store ended with `Timeout`. Twice is fine.

        Raises:
            Timeout: something still hangs; call again.
            RuntimeError: the store is in use.
        """
        self._owner.check_process()
        if self._owner.is_open:
            raise RuntimeError("a store that is in use is closed by the end of its 'async with', which commits it")
        if self._is_given_back:
            return
        try:
            await self._owner.rest()
            await self._owner.in_time("the store did not close", self._leave())
        except Timeout:
            self._workers.give_up()  # else tasks that wait for them would keep the event loop from ending
            self._files.shutdown(wait=False)
            raise
        self._entries = {}
        if self._arena is not None:
            self._homes.gpu.release()
            for lease in self._arena.close():
                lease.free()
            self._arena.close()
        self._is_given_back = True

    async def _leave(self) -> None:
        if self._leaving is None or self._leaving.done():
            thread = FileThreads(1, "tierstore-close")
            self._leaving = thread.submit(self._give_back)  # goes on even if nobody waits for it any more
            thread.shutdown(wait=False)
        await asyncio.wrap_future(self._leaving)

    def _give_back(self) -> None:
        self._workers.close(threading.TIMEOUT_MAX)  # the waiter looks whether anything moves
        self._files.shutdown()
        self._directories.release()
