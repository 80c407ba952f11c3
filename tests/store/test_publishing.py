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
    """A pack of no chunks, whose syncs end when they are told to."""

    kind = "state"
    current: tuple[()] = ()

    def __init__(self) -> None:
        self.syncs: list[asyncio.Future[None]] = []

    def datasync(self) -> None: ...

    def submit(self, *_: Any) -> asyncio.Future[None]:
        self.syncs.append(asyncio.get_running_loop().create_future())
        return self.syncs[-1]

    def commit(self, _: Any) -> None: ...

    def __len__(self) -> int:
        return 0


def test_commits_follow_one_another() -> None:
    """Also those of steps that have written nothing, whose own work waits for nobody."""
    asyncio.run(two_commits())


async def two_commits() -> None:
    published: list[int] = []

    async def publish(generation: Any) -> None:
        published.append(generation.number)

    pack = HeldPack()
    files: Any = SimpleNamespace(
        packs=[pack], committed_packs=[pack], manifests=SimpleNamespace(publish=publish), layout=dict,
        end_making=lambda: None,
    )  # fmt: skip
    placement: Any = SimpleNamespace(groups=(), chunk_count=lambda group: 0)
    others: dict[str, Any] = {"updates": None, "workers": pack}
    commits = Commits(
        [], placement, files, [], {kind: {} for kind in Kind}, team=Alone(),
        spawn=lambda work, name: asyncio.get_running_loop().create_task(work), tracer=Tracer(lambda: 0.0), **others,
    )  # fmt: skip
    for _ in range(2):
        commits.begin(None, {})
    for _ in range(20):
        await asyncio.sleep(0)
    for sync in reversed(pack.syncs):  # the second one's is over first, if it has begun
        sync.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)
    while len(published) < 2:
        for sync in pack.syncs:
            if not sync.done():
                sync.set_result(None)
        await asyncio.sleep(0)
    await commits.published()
    assert (published, commits.generation) == ([0, 1], 1)
