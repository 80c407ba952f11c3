"""The ranks that write one store together, as the store sees them: who leads, and how they tell each other of failures.

Scope: the interface of a team, a team of one, work that succeeds for all or for none.
Not here: process groups (`train/ranks.py`).

[Note: one store, many ranks] Every rank has the packs open and writes the chunks that it keeps. The first of the ranks
that share directories leads: it makes the files and publishes the manifest, with the records of all these ranks. A
generation is published when every rank's chunks are durable, and no rank overwrites a byte of the generation before
until every leader's manifest is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, cast

from tierstore.errors import TierstoreError

T = TypeVar("T")
Outcome = tuple[T | None, tuple[type[TierstoreError], str] | None]


class Team(Protocol):
    """The ranks of a run, as one of them sees it: each rank has a `Team` of its own."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def members(self) -> Sequence[int]:
        """The ranks that share the directories of this one, in order; the first of them leads."""

    async def exchange(self, what: str, mine: T) -> list[T]:
        """Give `mine` to all ranks, and return what each gave, by rank. All make the same calls in the same order.

        Raises:
            RankLost: a rank does not call; `what` says what was waited for.
        """


class Alone:
    """A team of one."""

    rank = 0
    members = (0,)

    async def exchange(self, what: str, mine: T) -> list[T]:
        """What this one rank gave."""
        return [mine]


def leads(team: Team) -> bool:
    """Whether this rank makes the files and publishes the manifests."""
    return team.rank == team.members[0]


async def all_succeed(team: Team, what: str, work: Callable[[], Awaitable[T]]) -> list[T]:
    """Do work at every rank, and return the results of all, by rank.

    Raises:
        TierstoreError: it failed at a rank. All ranks raise: each its own error, or else that of the first that failed.
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
    """What this rank tells the others of its work.

    Of a failure's class they are told what it is in tierstore's error tree: they may not know the class itself.
    """
    if failure is None:
        return result, None
    ours = (kind for kind in type(failure).__mro__ if issubclass(kind, TierstoreError))
    kind = next((kind for kind in ours if kind.__module__ == TierstoreError.__module__), TierstoreError)
    return result, (kind, str(failure))


def results(outcomes: Sequence[Outcome[T]], failure: Exception | None) -> list[T]:
    """The results of work that succeeded at all ranks, by rank.

    Raises:
        TierstoreError: this rank's own failure, or else that of the first rank that failed.
    """
    if failure is not None:
        raise failure
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            kind, text = told
            raise kind(f"rank {rank}: {text}")
    return [cast(T, value) for value, _ in outcomes]
