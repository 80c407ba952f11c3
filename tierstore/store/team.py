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
from typing import Protocol, TypeVar, cast

from tierstore.errors import TierstoreError

T = TypeVar("T")
Outcome = tuple[T | None, tuple[type[Exception], str] | None]


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
    return results(await team.exchange(what, outcome(result, failure)), failure)


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What the work gives, or how it fails."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def outcome(result: T | None, failure: Exception | None) -> Outcome[T]:
    """What the others are told."""
    return result, None if failure is None else (type(failure), str(failure))


def results(outcomes: Sequence[Outcome[T]], failure: Exception | None) -> list[T]:
    """What succeeded everywhere, by rank.

    Raises:
        TierstoreError: the rank's own failure, or that of the first rank that has one.
    """
    if failure is not None:
        raise failure
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            kind, text = told
            raise (kind if issubclass(kind, TierstoreError) else TierstoreError)(f"rank {rank}: {text}")
    return [cast(T, value) for value, _ in outcomes]
