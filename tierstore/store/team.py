"""The ranks that write one store together, as the store sees them: who leads, and telling each other how it went.

Scope: the face of a team, a team of one, work that succeeds for all or for none.
Not here: process groups (`train/ranks.py`).

[Note: one store, many ranks] Every rank has the packs open and writes the chunks that it keeps. The first of those that
share the directories leads: it makes the files and publishes the manifest, with the records of all. A generation is
published when every rank's chunks are durable, and none overwrites a byte of the one before until every leader's
manifest is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from tierstore.errors import TierstoreError

T = TypeVar("T")


class Team(Protocol):
    """The ranks of a run; every one has a team of its own."""

    @property
    def rank(self) -> int:
        """Which of them this is."""

    @property
    def members(self) -> Sequence[int]:
        """The ranks that share the directories of this one, in order; the first of them leads."""

    async def exchange(self, what: str, mine: T) -> list[T]:
        """What every rank gives, by rank. All call it, in the same order.

        Raises:
            RankLost: one does not; `what` says what was waited for.
        """


class Alone:
    """A team of one."""

    rank = 0
    members = (0,)

    async def exchange(self, what: str, mine: T) -> list[T]:
        """Its own."""
        return [mine]


def leads(team: Team) -> bool:
    """Whether this rank makes the files and publishes the manifests."""
    return team.rank == team.members[0]


async def all_succeed(team: Team, what: str, work: Callable[[], Awaitable[T]]) -> list[T]:
    """What the work gave at every rank, by rank.

    Raises:
        TierstoreError: it failed at one; all raise, each its own error or that of the first rank that has one.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = await work()
    except asyncio.CancelledError:
        raise
    except Exception as error:
        failure = error
    told = None if failure is None else (type(failure), str(failure))
    outcomes = await team.exchange(what, (result, told))
    if failure is not None:
        raise failure
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            kind, text = told
            raise (kind if issubclass(kind, TierstoreError) else TierstoreError)(f"rank {rank}: {text}")
    return [value for value, _ in outcomes]  # type: ignore[misc]
