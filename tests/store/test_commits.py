"""The order in which generations are published."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tierstore.errors import StorageError
from tierstore.plan.placement import Kind
from tierstore.store.commits import Commits
from tierstore.store.snapshots import Snapshot
from tierstore.store.team import Alone, Team
from tierstore.trace import Tracer

pytestmark = pytest.mark.usefixtures("no_leaks")


class Pack:
    """A pack of no chunks, whose first sync ends when it is told to, or fails."""

    kind = "state"
    current: tuple[()] = ()

    def __init__(self, failure: StorageError | None = None) -> None:
        self.failure = failure
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def datasync(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)
        if self.failure is not None:
            raise self.failure

    def commit(self, _: Any) -> None: ...

    def __len__(self) -> int:
        return 0


class Manifests:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def capture(self, number: int, captured: Any) -> str:
        self.asked.append(("captured", number))
        return f"noted {number}"

    async def publish(self, generation: Any, noted: str) -> None:
        assert noted == f"noted {generation.number}"
        self.asked.append(("published", generation.number))

    async def abandon(self, number: int) -> None:
        self.asked.append(("abandoned", number))


def commits_of(pack: Pack, manifests: Manifests, team: Team | None = None) -> Commits:
    files: Any = SimpleNamespace(
        packs=[pack], committed_packs=[pack], manifests=manifests, layout=dict, end_making=lambda: None
    )
    placement: Any = SimpleNamespace(groups=(), chunk_count=lambda group: 0)
    others: dict[str, Any] = {"updates": SimpleNamespace(allow_through=lambda: None)}
    return Commits(
        [], placement, files, [], {kind: {} for kind in Kind}, team=team or Alone(),
        spawn=lambda work, name: asyncio.get_running_loop().create_task(work), tracer=Tracer(lambda: 0.0), **others,
    )  # fmt: skip


def test_commits_follow_one_another() -> None:
    """Also commits of steps that have written nothing, which have no work of their own to wait for."""
    pack, manifests = Pack(), Manifests()

    async def play() -> int:
        commits = commits_of(pack, manifests)
        for _ in range(2):
            commits.begin(None, {})
        await asyncio.to_thread(pack.has_begun.wait, 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert manifests.asked == [("captured", 0)]
        pack.may_end.set()
        await commits.published()
        return commits.generation

    assert asyncio.run(play()) == 1
    assert manifests.asked == [("captured", 0), ("published", 0), ("captured", 1), ("published", 1)]


def test_what_is_captured_goes_with_a_generation_whose_chunks_are_not_durable() -> None:
    pack, manifests = Pack(StorageError("fdatasync failed")), Manifests()
    pack.may_end.set()

    async def play() -> None:
        commits = commits_of(pack, manifests)
        commits.begin(None, {})
        await commits.published()

    with pytest.raises(StorageError, match="fdatasync failed"):
        asyncio.run(play())
    assert manifests.asked == [("captured", 0), ("abandoned", 0)]


def test_a_commit_waits_for_what_is_called_before_it() -> None:
    pack, manifests = Pack(), Manifests()
    pack.may_end.set()
    has_begun, may_end = threading.Event(), threading.Event()

    def sync() -> None:
        has_begun.set()
        assert may_end.wait(60)

    async def play() -> None:
        commits = commits_of(pack, manifests)
        commits.before.append(sync)
        commits.begin(None, {})
        await asyncio.to_thread(has_begun.wait, 60)
        for _ in range(20):
            await asyncio.sleep(0)
        asked = list(manifests.asked)
        may_end.set()
        await commits.published()
        assert asked == [("captured", 0)]

    asyncio.run(play())
    assert manifests.asked == [("captured", 0), ("published", 0)]


def test_what_fails_before_a_commit_is_its_failure() -> None:
    pack, manifests = Pack(), Manifests()
    pack.may_end.set()

    def sync() -> None:
        raise OSError("the disk of the log is full")

    async def play() -> None:
        commits = commits_of(pack, manifests)
        commits.before.append(sync)
        commits.begin(None, {})
        await commits.published()

    with pytest.raises(OSError, match="the disk of the log is full"):
        asyncio.run(play())
    assert manifests.asked[-1] == ("abandoned", 0)
    assert ("published", 0) not in manifests.asked


def test_ranks_tell_each_other_of_a_snapshot_behind_the_commit_that_is_on_its_way() -> None:
    """Otherwise a rank whose chunks are durable later than those of the others would tell of the snapshot first."""
    pack, manifests, told = Pack(), Manifests(), []

    class Noting(Alone):
        async def exchange(self, what: str, mine: Any) -> list[Any]:
            told.append(what)
            return await super().exchange(what, mine)

    async def moves() -> bool:
        return False

    async def play() -> None:
        commits = commits_of(pack, manifests, Noting())
        commits.kept = cast(Snapshot, SimpleNamespace(name="first", moves=moves))
        commits.begin(None, {})
        await asyncio.to_thread(pack.has_begun.wait, 60)
        more = asyncio.create_task(commits.snapshot_moves())
        for _ in range(20):
            await asyncio.sleep(0)
        pack.may_end.set()
        assert not await more
        await commits.published()

    asyncio.run(play())
    assert told == [
        "what generation 0 captures", "the chunks of generation 0", "the manifest of generation 0",
        "a part of snapshot 'first'",
    ]  # fmt: skip
