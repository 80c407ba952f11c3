"""The order in which generations are published."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tierstore.plan.tiers import Kind
from tierstore.store.publishing import Commits
from tierstore.store.team import Alone
from tierstore.trace import Tracer


class HeldPack:
    """A pack whose syncs end when they are told to."""

    kind = "state"

    def __init__(self, chunks: int = 0) -> None:
        self.current: list[None] = [None] * chunks
        self.syncs: list[asyncio.Future[None]] = []

    def datasync(self) -> None: ...

    def submit(self, *_: Any) -> asyncio.Future[None]:
        self.syncs.append(asyncio.get_running_loop().create_future())
        return self.syncs[-1]

    def commit(self, _: Any) -> None: ...

    def __len__(self) -> int:
        return len(self.current)


class Residents:
    """One chunk that lives in CPU memory, and the update that has it: `chain` and `dirty` are those of a pipeline."""

    def __init__(self) -> None:
        self.updated: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.chain: dict[tuple[int, int], Any] = {(0, 0): self.updated}
        self.dirty = {(0, 0)}
        self.writes = 0

    async def write_resident(self, group: int, chunk: int) -> None:
        self.writes += 1
        await self.written


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def commits_of(pack: HeldPack, publish: Any, residents: Residents | None = None) -> Commits:
    groups: Any = [SimpleNamespace(first=0, size=1, trainable=True)] if residents else []
    files: Any = SimpleNamespace(
        packs=[pack], committed_packs=[pack], manifests=SimpleNamespace(publish=publish), layout=dict,
        end_making=lambda: None,
    )  # fmt: skip
    placement: Any = SimpleNamespace(groups=groups, chunk_count=lambda group: 1, chunk_elements=1)
    leases: dict[Kind, Any] = {kind: {(0, 0): None} if residents else {} for kind in Kind}
    others: dict[str, Any] = {"updates": residents, "workers": pack}
    return Commits(
        groups, placement, files, [], leases, team=Alone(),
        spawn=lambda work, name: asyncio.get_running_loop().create_task(work), tracer=Tracer(lambda: 0.0), **others,
    )  # fmt: skip


def test_what_is_written_ahead_waits_for_its_update_and_is_not_written_again() -> None:
    asyncio.run(one_written_ahead())


async def one_written_ahead() -> None:
    async def publish(_: Any) -> None: ...

    residents, pack = Residents(), HeldPack(1)
    commits = commits_of(pack, publish, residents)
    commits.write_ahead()
    await settled()
    assert residents.writes == 0
    residents.updated.set_result(None)
    await settled()
    assert residents.writes == 1  # no commit has begun
    waiting = asyncio.create_task(commits.published())
    commits.begin(None, {})
    await settled()
    assert not waiting.done()
    assert not pack.syncs  # files are synced after the write
    residents.written.set_result(None)
    await settled()
    pack.syncs[0].set_result(None)
    await waiting
    await commits.published()
    assert (residents.writes, commits.generation, residents.dirty) == (1, 0, set())


def test_who_flushes_waits_for_what_is_written_ahead() -> None:
    """Weights set by a callback between the update and the commit would be overwritten while they are written."""
    asyncio.run(one_flushed())


async def one_flushed() -> None:
    residents, pack = Residents(), HeldPack(1)
    commits = commits_of(pack, None, residents)
    residents.updated.set_result(None)
    commits.write_ahead()
    waiting = asyncio.create_task(commits.published())
    await settled()
    assert not waiting.done()
    residents.written.set_result(None)
    await waiting


def test_a_chunk_that_was_updated_since_is_written_once_more() -> None:
    asyncio.run(one_updated_twice())


async def one_updated_twice() -> None:
    async def publish(_: Any) -> None: ...

    residents, pack = Residents(), HeldPack(1)
    commits = commits_of(pack, publish, residents)
    residents.updated.set_result(None)
    residents.written.set_result(None)
    commits.write_ahead()
    await commits.published()
    residents.dirty.add((0, 0))
    again = residents.chain[0, 0] = asyncio.get_running_loop().create_future()
    commits.begin(None, {})
    await settled()
    assert residents.writes == 1
    again.set_result(None)
    await settled()
    assert residents.writes == 2
    pack.syncs[0].set_result(None)
    await commits.published()


def test_commits_follow_one_another() -> None:
    """Also those of steps that have written nothing, whose own work waits for nobody."""
    asyncio.run(two_commits())


async def two_commits() -> None:
    published: list[int] = []

    async def publish(generation: Any) -> None:
        published.append(generation.number)

    pack = HeldPack()
    commits = commits_of(pack, publish)
    for _ in range(2):
        commits.begin(None, {})
    await settled()
    for sync in reversed(pack.syncs):  # the second one's is over first, if it has begun
        sync.set_result(None)
        await settled()
    while len(published) < 2:
        for sync in pack.syncs:
            if not sync.done():
                sync.set_result(None)
        await asyncio.sleep(0)
    await commits.published()
    assert (published, commits.generation) == ([0, 1], 1)
