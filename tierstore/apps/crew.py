"""The ranks of one `tierstore train`: meeting, exchanging small values, and one voice when something fails.

Scope: the process group, its end, exchanges outside the engine, which rank reports a failure.
Not here: which ranks torchrun has started (`apps/launch.py`), what the engine exchanges (`train/partition.py`).
Owner: the training thread.

[Note: one voice] A failure reaches every rank: as its own error, as "rank 1: ..." from an exchange, or as a lost rank.
Each rank writes its message into the launcher's store and waits a moment for the messages of the others. Of the ranks
whose messages mean the same, the first one shows it. The store outlives a rank that dies, because torchrun keeps it.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from tierstore.apps.launch import Launch
from tierstore.errors import ConfigError, RankLost, TierstoreError
from tierstore.store.team import attempt, outcome, results
from tierstore.train.ranks import Ranks, end_groups, refuse_different

T = TypeVar("T")
_TIMEOUT_S = 300.0
_PATIENCE_S = 1.0  # for what the others say of a failure
_POLL_S = 0.02
_FROM_RANK = re.compile(r"rank (\d+): (.*)", re.DOTALL)
_LOST = "lost"


class Crew:
    """The ranks, seen by one of them; without a process group it is alone."""

    def __init__(self, launch: Launch | None = None, ranks: Ranks | None = None) -> None:
        self.launch = launch or Launch()
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """The rank of this process among all."""
        return self.launch.rank

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.launch.count

    @property
    def leads(self) -> bool:
        """Whether this rank speaks and writes files for all."""
        return self.rank == 0

    def mesh(self, device: str) -> Any:
        """For several machines: state is sharded inside each machine, so that each has the same whole store.

        None for one machine. Shapes: (replicate, shard).
        """
        if self.launch.nodes == 1:
            return None
        shape = (self.launch.nodes, self.launch.local_count)
        return init_device_mesh(device.partition(":")[0], shape, mesh_dim_names=("replicate", "shard"))

    def exchange(self, what: str, mine: T) -> list[T]:
        """The values of all ranks, by rank. All ranks call it, in the same order.

        Raises:
            RankLost: a rank does not call; the message says by `what` what was waited for.
        """
        return [mine] if self._ranks is None else self._ranks.exchange(what, mine)

    def all_succeed(self, what: str, work: Callable[[], T]) -> T:
        """This rank's result of the work, once it has succeeded on every rank.

        Raises:
            TierstoreError: it failed on one; all raise.
        """
        result, failure = attempt(work)
        results(self.exchange(what, outcome(None, failure)), failure)
        return result  # type: ignore[return-value]

    def check_same(self, what: str, mine: Mapping[str, object]) -> None:
        """Refuse ranks that were given different values.

        Raises:
            ConfigError: on all of them, with the first difference.
        """
        refuse_different(self.exchange(what, mine))

    def sentence(self, error: TierstoreError) -> str:
        """What this rank reports of its failure; empty if another rank reports it. See [Note: one voice]."""
        text = " ".join(str(error).split())
        if self._ranks is None:
            return text
        mine, said = _LOST if isinstance(error, RankLost) else text, {}
        try:
            said = self._said(mine)
            same = {rank: other for rank, other in said.items() if _meant(other) == _meant(mine)}
            is_told = min(same) != self.rank or self._store().add(f"told/{_meant(mine)}", 1) > 1
        except RuntimeError:  # the store is gone with the rank that kept it
            same, is_told = {self.rank: mine}, False
        if is_told:
            return ""
        failed = [rank for rank, other in said.items() if other != _LOST]
        if mine == _LOST and failed:
            return f"rank {self.rank} stops, for rank {failed[0]} has failed"
        named = [other for other in same.values() if _FROM_RANK.fullmatch(other)]
        if mine == _LOST or (len(same) == self.count and not named):
            return text  # it names the lost rank; an error that all ranks met needs no name
        return named[0] if named else f"rank {self.rank}: {text}"

    def fail(self, error: Exception) -> None:
        """Let the other ranks know of an unexpected failure, which this rank shows with a traceback."""
        with contextlib.suppress(RuntimeError):
            self._store().set(f"{self.rank}", f"{type(error).__name__}: {error}")

    def _store(self) -> Any:
        # A prefix for these ranks only: torchrun's store keeps the messages of earlier ones.
        name = self._ranks.name if self._ranks is not None else ""
        return PrefixStore(f"{name}/failures", _get_default_store())

    def _said(self, mine: str) -> dict[int, str]:
        """The messages of the ranks, as far as they come within `_PATIENCE_S`."""
        store, deadline = self._store(), time.monotonic() + _PATIENCE_S
        store.set(f"{self.rank}", mine)
        while True:
            told = {rank: store.get(str(rank)).decode() for rank in range(self.count) if store.check([str(rank)])}
            if len(told) == self.count or time.monotonic() > deadline:
                return told
            time.sleep(_POLL_S)


def _meant(text: str) -> str:
    found = _FROM_RANK.fullmatch(text)
    return found[2] if found else text


def _name_of_start(store: Any, launch: Launch) -> str:
    """A name that the ranks of this start share, and no others.

    torchrun's store keeps what ranks wrote before they were started again, and each machine counts its own restarts.
    So a rank asks rank 0 under a name of its own, which no rank before it can have answered, and says that it has come;
    rank 0 also answers ranks that are no more. (Of each machine, torchrun ends all ranks before it starts them again.)

    Raises:
        RuntimeError: a rank does not come.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + _TIMEOUT_S
    if launch.rank:
        store.set(f"asks/{launch.rank}", mine)
        name: str = store.get(f"for/{mine}").decode()
        store.set(f"{name}/{launch.rank}", "")
        return name
    late = list(range(1, launch.count))
    while late:
        for rank in late:
            if store.check([f"asks/{rank}"]):
                store.set(f"for/{store.get(f'asks/{rank}').decode()}", mine)
        time.sleep(_POLL_S)
        late = [rank for rank in late if not store.check([f"{mine}/{rank}"])]
        if late and time.monotonic() > deadline:
            raise RuntimeError(f"rank {', '.join(map(str, late))} did not come in {_TIMEOUT_S:g} s")
    return mine


@contextlib.contextmanager
def joined(launch: Launch, device: str) -> Iterator[Crew]:
    """The ranks, as long as they train together: the process group is made here, and destroyed at the end.

    Raises:
        TierstoreError: what was raised in the block, with the words of `Crew.sentence`.
    """
    if launch.count == 1:
        yield Crew(launch)
        return
    is_cuda = device.startswith("cuda")
    if is_cuda and torch.cuda.is_available() and launch.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(device)  # NCCL uses the current device
    try:
        # Small values are exchanged from CPU memory.
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        timeout = timedelta(seconds=_TIMEOUT_S)
        store, rank, count = next(rendezvous("env://", timeout=timeout))
        store = PrefixStore(_name_of_start(PrefixStore("tierstore/starts", store), launch), store)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)
    except (ValueError, RuntimeError) as error:
        why = f"({' '.join(str(error).split())})"
        raise ConfigError(f"the {launch.count} ranks do not find each other {why}; start them with torchrun") from None
    ranks = Ranks(timeout_s=_TIMEOUT_S)
    crew, has_ended = Crew(launch, ranks), False
    try:
        yield crew
        crew.exchange("the end of the run", None)  # torchrun stops all when the first one ends with a nonzero exit code
        has_ended = True
    except TierstoreError as error:
        raise type(error)(crew.sentence(error)) from error
    except Exception as error:
        crew.fail(error)
        raise
    finally:
        ranks.close()
        end_groups([None], is_whole=has_ended)
