"""The ranks that train together: their members, their collectives, and which ranks are missing when one fails.

Scope: a process group with a heartbeat, collectives on flat tensors under one name for every version of torch.
Not here: what is reduced or gathered, and when (`reduction.py`, `gathering.py`, `data_parallel/`).
Owner: the thread that makes it; any thread may enter `waiting`.

[Note: who is missing] A collective that fails names a socket, or nothing. So every rank writes to the group's store a
count of its heartbeats and what it waits for; a rank whose count stands still after a failure is missing. If the store
does not answer, the rank that keeps it is gone or stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import (
    _abort_process_group,
    _get_default_group,
    _get_default_store,
    _new_process_group_helper,
    _world,
)

from tierstore.errors import ConfigError, GraphError, RankLost, first_line
from tierstore.pack.layout import listed

T = TypeVar("T")
_BEAT_S = 0.25
_LOST_BEATS = 3
"""After so many failed beats in a row the store is gone. torch prints a stack for each."""
_GAVE_UP, _LEFT = "gave-up", "left"
_SHARE = 0.75
"""Share of the timeout for a collective: missing ranks are to be known before the wait around it ends."""
_NCCL_SHARE = 2.0
"""The same for NCCL: its own watchdog ends the whole process, so it is to come last."""
_UNTOLD_TIMEOUT_S = 300.0
"""Assumed for a group whose own timeout counts; a part of it is for the store's answers."""


class Ranks:
    """One process group, and whether its ranks are alive.

    Args:
        group: None is the default group.
        timeout_s: a rank that does not come to a collective for so long is missing; None: the group's own timeout
            counts.
        device: this rank's GPU, for process groups that handle GPUs only; None is torch's current one.
    """

    def __init__(
        self, group: ProcessGroup | None = None, *, timeout_s: float | None = None, device: torch.device | None = None
    ) -> None:
        if not distributed.is_initialized():
            raise ConfigError(
                "there is no process group: start with torchrun, and call torch.distributed.init_process_group() first"
            )
        given: object = group
        if given == distributed.GroupMember.NON_GROUP_MEMBER:  # what `new_group` returns at other ranks
            raise ConfigError("this rank is not in the process group that was given: make nothing of it here")
        if not (group is None or isinstance(group, ProcessGroup)):
            raise ConfigError(
                f"process_group must be a torch.distributed.ProcessGroup, not a {type(group).__name__}; that of a "
                "DeviceMesh is mesh.get_group()"
            )
        self.group = group or distributed.group.WORLD
        self.rank = distributed.get_rank(self.group)
        self.count = distributed.get_world_size(self.group)
        self.timeout_s = _UNTOLD_TIMEOUT_S if timeout_s is None else timeout_s
        self._larger = "init_process_group a longer timeout"
        if timeout_s is not None:
            self._larger = f"a larger TierConfig(timeout_s=) than {timeout_s:g}, of which three quarters count"
        self._device = device or torch.device("cpu")
        self.members = distributed.get_process_group_ranks(self.group)
        self.name = f"tierstore/{self._agreed(uuid.uuid4().hex, device)}"
        self._store = PrefixStore(self.name, _get_default_store())
        self._subgroups = 0
        self._waits: dict[int, str] = {}
        self._lost: RankLost | None = None
        self._has_begun_all = True
        self._reporting = threading.Lock()
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="tierstore-heart", daemon=True)
        if self.count > 1:
            self._heart.start()

    def _agreed(self, token: str, device: torch.device | None) -> str:
        """The first rank's token, new for every start: torchrun's store keeps what ranks wrote before a restart."""
        told, begun, is_of_gpus = [token], 0, distributed.get_backend(self.group) == "nccl"
        store, key = _get_default_store(), f"tierstore/begun/{'-'.join(map(str, self.members))}/"
        try:
            begun = store.add(f"{key}{self.rank}", 1)
            distributed.broadcast_object_list(
                told, self.members[0], group=self.group, device=device if is_of_gpus else None
            )
        except RuntimeError as error:
            where = f"rank {self.rank} of {self.count} waited for all ranks to begin"
            if late := self._told(lambda: [rank for rank in range(self.count) if store.add(f"{key}{rank}", 0) < begun]):
                where += f", and rank {', '.join(map(str, late))} did not"
            raise RankLost(
                f"{where}: see whether one has died or is stuck; if they take so long to build the model, give "
                f"init_process_group a longer timeout; start all ranks again ({error})"
            ) from error
        return told[0]

    def close(self) -> None:
        """Stop the heartbeat, and tell ranks that may still wait for this one. Twice is fine."""
        self._stopped.set()
        if self._heart.is_alive():
            self._heart.join(self._answer_s)
            if not self._heart.is_alive():  # else the store does not answer
                with contextlib.suppress(RuntimeError):
                    self._store.set(str(self.rank), _LEFT)

    def subgroup(self, *, backend: str | None = None, members: Sequence[int] | None = None) -> ProcessGroup:
        """Make another group, whose collectives have an order of their own. All its ranks call this.

        Args:
            members: global ranks; None is all members of this group.

        Raises:
            RankLost: a rank does not come.
        """
        chosen = self.members if members is None else list(members)
        backend = backend or distributed.get_backend(self.group)
        share = _NCCL_SHARE if self._device.type == "cuda" and backend != "gloo" else _SHARE
        self._subgroups += 1
        # As `new_group`, but with a name of our own: that function names a group after its ranks and the number of
        # groups there are. A group made after another has ended would find the addresses that its ranks have left in
        # the store, and ranks that are in different numbers of other groups would not meet at all.
        name = f"{self.name}/{'-'.join(map(str, chosen))}/{self._subgroups}"
        with self.waiting("all ranks to meet"), _unbound():
            made, _ = _new_process_group_helper(
                len(chosen),
                chosen.index(self.members[self.rank]),
                chosen,
                backend,
                self._store,
                name,  # type: ignore[arg-type]  # a NewType, in new versions of torch
                timeout=timedelta(seconds=share * self.timeout_s),
            )
        _world.pg_group_ranks[made] = {member: rank for rank, member in enumerate(chosen)}
        return cast(ProcessGroup, made)  # this rank is one of its members

    @property
    def is_whole(self) -> bool:
        """Whether no rank was found missing, and this one has joined every collective."""
        return self._lost is None and self._has_begun_all

    @property
    def wait_s(self) -> float:
        """How long a collective may take."""
        return _SHARE * self.timeout_s

    @property
    def _answer_s(self) -> float:
        """How long the store may take to answer: only a part of what is left of the timeout."""
        return max(8 * _BEAT_S, 0.1 * self.timeout_s)

    def exchange(self, what: str, mine: T, group: ProcessGroup | None = None) -> list[T]:
        """The values that all ranks give, by rank. All ranks call this, in the same order.

        Args:
            group: a subgroup of all ranks, whose collectives have an order of their own.

        Raises:
            RankLost: a rank does not; `what` says what was waited for.
            GraphError: raised at all ranks that came: one of them came with another `what`.
        """
        found: list[Any] = [None] * self.count
        with self.waiting(what), self._current_device():
            distributed.all_gather_object(found, (what, mine), group=group or self.group)
        first = found[0][0]
        for rank, (told, _) in enumerate(found):
            if told != first:
                raise GraphError(
                    f"rank 0 is at {first} and rank {rank} at {told}: all ranks make the same calls, in the same order"
                )
        return [given for _, given in found]

    def _current_device(self) -> contextlib.AbstractContextManager[Any]:
        """In here this rank's device is the current one: NCCL sends objects through the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The thread waits for the other ranks in here.

        Raises:
            RankLost: the collective failed; says which ranks are missing. Every later one fails at once.
        """
        if self._lost is not None:
            raise RankLost(str(self._lost))
        me = threading.get_ident()
        self._waits[me] = what
        begin = time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:  # of this rank alone; the others may wait in a collective
            self._has_begun_all = False
            raise
        except (RuntimeError, TimeoutError) as error:
            with self._reporting:  # one report is enough
                self._lost = self._lost or RankLost(self._report(what, time.monotonic() - begin, error))
            raise RankLost(str(self._lost)) from error
        finally:
            self._waits.pop(me, None)

    def _report(self, what: str, waited_s: float, error: Exception) -> str:
        where = f"rank {self.rank} of {self.count} waited for {what}"
        if (said := self._last_words(what)) is None:
            return (
                f"{where}, and the store of the process group does not answer: the rank that keeps it has died or is "
                "stuck; start all ranks again"
            )
        before, after = said
        # A rank that has given up, too, has no heartbeat any more.
        missing = [r for r in after if after[r] == before[r] and not after[r].startswith(_GAVE_UP)]
        if left := [rank for rank in missing if after[rank] == _LEFT]:
            names = ", ".join(map(str, left))
            verb = "has" if len(left) == 1 else "have"
            return f"{where}, and rank {names} {verb} left (closed); see why there, and start all ranks again"
        if missing:
            names = ", ".join(map(str, missing))
            verb = "does" if len(missing) == 1 else "do"
            return f"{where}, and rank {names} {verb} not answer: it has died or is stuck; start all ranks again"
        doing = "; ".join(f"rank {rank} {text.partition(' ')[2]}" for rank, text in after.items())
        if waited_s < self.wait_s and not any(text.startswith(_GAVE_UP) for text in after.values()):
            return f"{where}, and it failed though all ranks are alive ({doing}); start all ranks again: {error}"
        return (
            f"{where}, and {doing}: all ranks make the same calls, in the same order, and in time; do so, or give "
            f"{self._larger}, and start all ranks again ({first_line(error)})"
        )

    def _last_words(self, what: str) -> tuple[dict[int, str], dict[int, str]] | None:
        """What the other ranks say now, and a while later; this one says that it gives up. None without an answer."""

        def say() -> tuple[dict[int, str], dict[int, str]]:
            self.close()  # stops the heartbeat: the next line is the last word
            self._store.set(str(self.rank), f"{_GAVE_UP} has given up waiting for {what}")
            before = self._beats()
            time.sleep(3 * _BEAT_S)
            return before, self._beats()

        return self._told(say)

    def _told(self, ask: Callable[[], T]) -> T | None:
        """The store's answer; None: it does not answer in time, or fails."""
        said: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                said.append(ask())

        # If the rank that keeps the store is stopped, a call of the store blocks for as long as its own timeout.
        asking = threading.Thread(target=run, name="tierstore-last-words", daemon=True)
        asking.start()
        asking.join(self._answer_s)
        return said[0] if said else None

    def _beats(self) -> dict[int, str]:
        """What the other ranks have said last; empty if nothing yet."""
        store, others = self._store, [rank for rank in range(self.count) if rank != self.rank]
        return {rank: store.get(str(rank)).decode() if store.check([str(rank)]) else "" for rank in others}

    def _beat(self) -> None:
        lost = 0
        for count in itertools.count():
            waits = "waits for " + " and ".join(self._waits.copy().values()) if self._waits else "computes"
            try:
                self._store.set(str(self.rank), f"{count} {waits}")
                lost = 0
            except RuntimeError:
                lost += 1
            if lost == _LOST_BEATS or self._stopped.wait(_BEAT_S):
                return


@contextlib.contextmanager
def _unbound() -> Iterator[None]:
    """In here the default group is bound to no GPU: else torch splits new groups of NCCL off it, and a split waits for
    all ranks of the default group, also for those that make no engine."""
    world = _get_default_group()
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


def end_groups(groups: Sequence[ProcessGroup | None], *, is_whole: bool) -> None:
    """Destroy process groups; None stands for all there are.

    Args:
        is_whole: no rank is missing in a collective. Otherwise these are aborted: NCCL would wait until they end.
    """

    def end(group: ProcessGroup | None) -> None:
        with contextlib.suppress(Exception):  # one that has lost a rank
            (distributed.destroy_process_group if is_whole else _abort_process_group)(group)

    if is_whole:
        for group in groups:
            end(group)
        return
    # Together: an abort may free memory, for which the GPU waits until the collectives of other groups have ended, too.
    try:
        with ThreadPoolExecutor(len(groups)) as threads:
            threads.map(end, groups)
    except RuntimeError:  # the process exits, and begins no thread
        end(None)


def refuse_different(told: Sequence[Mapping[str, object]]) -> None:
    """Refuse values that are not the same at all ranks.

    Args:
        told: by rank, the values that it was given, by name.

    Raises:
        ConfigError: with the first difference.
    """
    for rank, theirs in enumerate(told):
        for name in {**theirs, **told[0]}:  # also what rank 0 alone was given
            if (value := theirs.get(name)) != (other := told[0].get(name)):
                raise ConfigError(f"{_difference(name, rank, value, other)}; give all ranks the same")


def _difference(name: str, rank: int, value: object, first: object) -> str:
    """The values that a rank and rank 0 were given; of two lists, the items that only one of them has."""
    if isinstance(value, list) and isinstance(first, list):
        for one, other, here, there in ((value, first, rank, 0), (first, value, 0, rank)):
            if only := [str(item) for item in one if item not in other]:
                return f"{name}: {listed(only)} at rank {here}, and not at rank {there}"
    mine, theirs = (one.value if isinstance(one, Enum) else one for one in (value, first))
    return f"{name} is {mine!r} at rank {rank} and {theirs!r} at rank 0"


def is_nccl(group: Any, device: torch.device) -> bool:
    """Whether NCCL runs this group's collectives on tensors of this device; it may have another backend for the CPU."""
    try:
        return bool(group._get_backend(device).name() == "nccl")
    except RuntimeError:  # no backend for such tensors
        return False


def all_gather_flat(output: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    """Every rank's shard, in the order of ranks; `shard` may be this rank's part of `output`.

    Shapes: output (ranks * n,), shard (n,).
    """
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(output, shard, group=group)


def reduce_scatter_flat(shard: torch.Tensor, full: torch.Tensor, group: ProcessGroup, *, async_op: bool = False) -> Any:
    """This rank's part of the sum of `full` over ranks.

    Shapes: shard (n,), full (ranks * n,).
    """
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    return scatter(shard, full, group=group, async_op=async_op)
