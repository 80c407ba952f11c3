"""The files of a training store: made, opened, and removed when no generation needs them.

Scope: packs, directories and lock, at every rank that shares them.
Not here: what is read and written in a pack (`slots.py`), when a generation is published (`commits.py`).
Owner: the loop thread, which lets a thread make the system calls; `release` runs when the loop has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.config import Tier, TierConfig, format_size
from tierstore.errors import ConfigError, StorageFull
from tierstore.plan.placement import Kind, Placement
from tierstore.store.directories import begin_store, claim_directory, end_store_making, refuse_mixed
from tierstore.store.layout import Codecs, GroupSpec, chunk_specs, fingerprint
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.names import holds_data
from tierstore.store.slots import SLOT_NAMES, ChunkIO, SlotPack
from tierstore.store.team import Team, all_succeed, leads


class StoreFiles:
    """Packs, manifests and lock in the directories of one store; without directories there are none.

    Args:
        shares: the share of the chunks that each directory gets.
        is_durable: steps can be committed; otherwise the packs have one slot and are removed at the end.
        lock: holds the first directory already if a generation was read there. The others are locked here; `release`
            unlocks all.

    Attributes:
        packs: of weights, of state, and of gradients if any are written to disk.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        tiers: TierConfig,
        codecs: Codecs,
        io: ChunkIO,
        team: Team,
        lock: StoreLock,
        *,
        shares: Sequence[int],
        is_durable: bool,
    ) -> None:
        self._shares = shares
        self.directories = [Path(path) for path in tiers.nvme]
        self.is_durable = is_durable and bool(self.directories)
        self._groups = groups
        self._placement = placement
        self._asked = tiers.codec
        self._codecs = codecs
        self._io = io
        self.backend = io.backend
        self._team = team
        self._lock = lock
        self._is_new = False
        self._is_ours = False
        self._opened: int | None = None
        self.manifests = Manifests(self.directories[0], self.backend, lock=lock) if self.directories else None
        self.packs = self._make_packs() if self.directories else []

    def _make_packs(self) -> list[SlotPack]:
        slots, copies = 2 if self.is_durable else 1, self._placement.gradient_copies
        packs = [self._pack(kind, kind.value, slots) for kind in (Kind.WEIGHTS, Kind.STATE)]
        # A delayed update's pending gradients are part of a generation, wherever they live.
        is_pending_kept = copies == 2 and self.is_durable
        if is_pending_kept or any(home is Tier.NVME for home in self._placement.gradient_home):
            # Packs that no generation keeps have names of their own: the last generation may need `gradients`.
            kept = "gradients" if is_pending_kept else "spilled"
            names = [f"{kept}{copy or ''}" for copy in range(copies)]
            packs += [self._pack(Kind.GRADIENTS, name, 2 if is_pending_kept else 1) for name in names]
        return packs

    def _pack(self, kind: Kind, name: str, slots: int) -> SlotPack:
        grid = self._placement.chunk_elements
        chunks = chunk_specs(kind, self._groups, grid)
        rests = [not group.trainable for group in self._groups for _ in range(0, group.size, grid)]
        return SlotPack(
            name, chunks, self.directories, self._io, self._codecs[kind].codec, slots=slots, shares=self._shares,
            rests=rests,
        )  # fmt: skip

    @property
    def committed_packs(self) -> list[SlotPack]:
        """The packs whose records a manifest keeps."""
        return self.packs if self._placement.gradient_copies == 2 else self.packs[:2]

    def layout(self) -> dict[str, Any]:
        """The fingerprint: it must be equal for a store to open."""
        grid, disks = self._placement.chunk_elements, len(self.directories)
        uneven = {"shares": list(self._shares)} if len(set(self._shares)) > 1 else {}  # older releases know no shares
        return fingerprint(self._groups, grid, disks, self._asked.value, self._codecs) | uneven

    # --- making and opening -------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Make the files of an empty store, at full size.

        Raises:
            ConfigError, StorageError, StoreLocked: after `release` nothing is left behind except the directories. For a
                full disk, the message says what the store takes.
        """
        await self._led(self._create, self._join)

    async def open(self, generation: Generation) -> None:
        """Open the files that a generation needs, and make the others.

        Raises:
            ConfigError: directories are missing, or of different stores; nothing was changed.
            FormatError: the files are not those of the generation.
        """
        await self._led(partial(self._open, generation), partial(self._join, generation))

    async def adopt(self, number: int) -> None:
        """Make this generation the last one, for good: newer ones are removed."""

        async def adopt() -> None:
            if self.manifests is not None and leads(self._team):
                await self.manifests.adopt(number)

        await all_succeed(self._team, f"going on from generation {number}", adopt)

    async def _led(self, lead: Callable[[], None], follow: Callable[[], None]) -> None:
        """Run the leaders' part in a thread; when all leaders have succeeded, run that of the other ranks."""
        is_leader = leads(self._team)
        for job in (lead if is_leader else _nothing, _nothing if is_leader else follow):
            await all_succeed(self._team, "the files of the store", partial(asyncio.to_thread, job))

    def _join(self, generation: Generation | None = None) -> None:
        """Open what the leader has made."""
        self._lock.add(self.directories)
        for pack in self.packs:
            kept = generation.records.get(pack.kind) if generation is not None else None
            pack.open(kept or [None] * len(pack))

    def _create(self) -> None:
        if not self.directories:
            return
        for directory in self.directories:
            claim_directory(directory, self.backend)
        self._lock.add(self.directories)
        begin_store(self.directories, self.backend)
        self._is_ours = self._is_new = True
        try:
            for pack in self.packs:
                pack.create()
        except StorageFull as error:
            total = format_size(sum(pack.file_bytes for pack in self.packs))
            raise StorageFull(f"{error}; all files of the store take {total}") from error
        for directory in self.directories:
            self.backend.sync_directory(directory)

    def _open(self, generation: Generation) -> None:
        for directory in self.directories:
            with self.backend.calling("inspection", directory):
                is_there = directory.is_dir() and any(map(holds_data, self.backend.names(directory)))
            if not is_there:
                raise ConfigError(
                    f"{directory} is not there, or holds nothing of the store: is its disk mounted? Give all "
                    "directories of the store, in their order"
                )
        refuse_mixed(self.directories)
        self._lock.add(self.directories)
        kept = [pack for pack in self.committed_packs if pack.kind in generation.records]
        for pack in kept:  # all of them, before anything is changed: the files may be those of another store
            pack.check(generation.records[pack.kind])
        self._is_ours, self._opened = True, generation.number
        end_store_making(self.directories, self.backend)
        is_made = False
        for pack in self.packs:
            if pack in kept:
                is_made |= pack.open(generation.records[pack.kind])
            else:  # no generation needs it, or the update schedule is new to this store
                self._remove(pack.paths())
                pack.create()
                is_made = True
        for directory in self.directories if is_made else ():
            self.backend.sync_directory(directory)

    def end_making(self) -> None:
        """Remove the mark of an unfinished store: it holds a generation now, or nothing any more."""
        end_store_making(self.directories, self.backend)

    # --- the end ------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Close the files, remove those that no generation needs, and give the lock back. Twice is fine.

        In the child of a fork this does nothing: all is the parent's.
        """
        if self._lock.is_inherited:
            return
        with contextlib.ExitStack() as stack:  # runs them in reverse order, each even if another fails
            stack.callback(self._lock.release)
            if self._is_ours:
                self._is_ours = False
                if self._lock.is_in_place:  # else another store may be there
                    stack.callback(self._remove_needless)
            for pack in self.packs:
                stack.callback(pack.close)

    def _remove_needless(self) -> None:
        numbers = self.manifests.numbers() if self.manifests is not None else []
        has_nothing = self._is_new and not (self.is_durable and numbers)
        for pack in self.packs if has_nothing else self.packs[len(self.committed_packs) :]:
            self._remove(pack.paths())
        if self._opened is not None and numbers and numbers[-1] > self._opened:
            self._remove(self._left_gradients())  # all generations that are left were made by this run
        if has_nothing:
            self.end_making()

    def _remove(self, paths: Iterable[Path]) -> None:
        """Remove those of the files that exist."""
        for path in paths:
            if os.path.lexists(path):
                self.backend.remove(path)

    def _left_gradients(self) -> Iterator[Path]:
        """Files in which another update schedule, which used this store before, may have left gradients."""
        ours = {path for pack in self.packs for path in pack.paths()}
        for directory, kept, copy, slot in itertools.product(
            self.directories, ("gradients", "spilled"), ("", "1"), SLOT_NAMES
        ):
            if (path := directory / f"{kept}{copy}.{slot}.safetensors") not in ours:
                yield path


def _nothing() -> None:
    return None
