"""ZeRO: which part of the training state each rank keeps, and what all ranks must agree on.

Scope: stages, process groups, cutting groups, exchanging small values, the global norm.
Not here: completing weights (`gathering.py`), reducing gradients (`reduction.py`), missing ranks (`ranks.py`).
Owner: the training side; the team's exchanges run in a thread of their own.

| stage | weights on the device | weights at rest | gradients | optimizer state |
|---|---|---|---|---|
| 0 | all, always | all | all-reduced, all kept | all |
| 1 | all, always | 1/N | all-reduced, 1/N kept | 1/N |
| 2 | all, always | 1/N | reduce-scattered | 1/N |
| 3 | as far as the budget goes | 1/N | reduce-scattered | 1/N |

Source: Rajbhandari et al., ZeRO, 2020; ZeRO-Infinity, 2021.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.distributed import ProcessGroup

from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.io.machine import boot_id
from tierstore.io.workers import Priority, WorkerPool
from tierstore.plan.placement import BLOCK
from tierstore.store.layout import GroupSpec, check_same_model, fingerprint, shard
from tierstore.store.team import Alone, Team, attempt, outcome, results
from tierstore.train.capture import writable
from tierstore.train.filling import PIECE_ELEMENTS, Piece, in_pieces
from tierstore.train.ranks import Ranks, end_groups, is_nccl, refuse_different

T = TypeVar("T")
Partials = npt.NDArray[np.float64]
_LEAST_CHUNKS = 4
"""Least number of chunks of the largest group per rank: parts differ by one, and the store may open on more ranks.

The store keeps its chunks: on more ranks its parts are less equal. Chunks of a store that one rank has made may be as
large as a group; then rank 0 of several keeps all of that group.
"""


class Partition:
    """The ranks of one engine, and which part of every group this one keeps.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        ranks: all of them; None without a process group.
        rank: number of this rank among those that share the parts.
        count: number of parts.
        shards: the ranks that share the parts, by their numbers among all.
        position: place of this rank among those that share the directories of the store.
        replicas: the group of ranks that keep the same part (hybrid sharding); None if nobody else does.
    """

    def __init__(
        self, stage: int, ranks: Ranks | None, shards: ProcessGroup | None = None, replicas: ProcessGroup | None = None
    ) -> None:
        self.stage = stage
        self.ranks = ranks
        self.rank, self.count, self.position = 0, 1, 0
        self.replicas: ProcessGroup | None = None
        self._team: _RankTeam | None = None
        self._groups: list[ProcessGroup] = []
        if ranks is not None:
            shards = shards or ranks.group
            self.rank, self.count = distributed.get_rank(shards), distributed.get_world_size(shards)
            members = distributed.get_process_group_ranks(shards)
            self.shards = [ranks.members.index(member) for member in members]
            # Every sequence of collectives with an order of its own has a process group of its own.
            self.gathers = ranks.subgroup(members=members)
            self.turns = ranks.subgroup(backend="gloo", members=members)
            self.reductions = ranks.subgroup(members=members)
            if replicas is not None:
                self.replicas = ranks.subgroup(members=distributed.get_process_group_ranks(replicas))
            self._control = ranks.subgroup(backend="gloo")
            self._sharing = ranks.subgroup(backend="gloo", members=members)
            self._teams = ranks.subgroup(backend="gloo")
            made = [self.gathers, self.turns, self.reductions, self.replicas, self._control, self._sharing, self._teams]
            self._groups = [group for group in made if group is not None]

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self.ranks is not None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of all, or the only one."""
        return self.number == 0

    @property
    def keeps_all(self) -> bool:
        """Whether every rank keeps everything."""
        return self.stage == 0 or self.count == 1

    @property
    def scatters(self) -> bool:
        """Whether a rank gets only its part of a reduced gradient."""
        return self.stage >= 2 and self.count > 1

    @property
    def number(self) -> int:
        """Number of this rank among all."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def world(self) -> int:
        """Number of ranks, each with its own batches."""
        return 1 if self.ranks is None else self.ranks.count

    def close(self, timeout_s: float) -> None:
        """Stop the heartbeat and the thread, and destroy the process groups. Twice is fine."""
        if self.ranks is None:
            return
        if self._team is not None:
            self._team.close(timeout_s)
            self._team = None
        self.ranks.close()
        if not self._groups:
            return
        end_groups(self._groups, is_whole=self.ranks.is_whole)
        # With its last reference a group's connections close: ranks that wait for this one learn it at once.
        del self.gathers, self.turns, self.reductions, self._control, self._sharing, self._teams
        self._groups, self.replicas = [], None

    # --- cutting ------------------------------------------------------------------------------------------------

    def cut(self, spec: GroupSpec, chunk_elements: int) -> GroupSpec:
        """The part of a group that this rank keeps."""
        return spec if self.keeps_all else shard(spec, self.rank, self.count, chunk_elements)

    def chunk_limit(self, specs: Sequence[GroupSpec]) -> int:
        """The most elements that a chunk of a new store may have, so that its parts are about equal on these ranks."""
        largest = max(spec.size for spec in specs)
        return max(1, -(-largest // (self.count * _LEAST_CHUNKS * BLOCK))) * BLOCK

    # --- agreeing -----------------------------------------------------------------------------------------------

    def exchange(self, what: str, mine: T) -> list[T]:
        """The values that all ranks give, by rank. All ranks call this, in the training thread.

        Raises:
            RankLost: a rank does not.
        """
        return [mine] if self.ranks is None else self.ranks.exchange(what, mine, self._control)

    def all_succeed(self, what: str, work: Callable[[], T]) -> list[T]:
        """The results of `work` at all ranks, by rank; see `store/team.py`."""
        result, failure = attempt(work)
        return results(self.exchange(what, outcome(result, failure)), failure)

    def check_same(self, options: Mapping[str, object]) -> None:
        """Refuse ranks that were given different options.

        Raises:
            ConfigError: raised at all of them, with the first difference.
        """
        refuse_different(self.exchange("the options of the engine", {"zero": self.stage} | dict(options)))

    def check_same_model(self, groups: Sequence[GroupSpec]) -> None:
        """Refuse ranks that train different models, with the first difference.

        Raises:
            ConfigError: raised at all of them.
        """
        first = self.agree("the model", fingerprint(groups, 0, 0, ""))
        self.all_succeed("the model", lambda: check_same_model(first, groups, "rank 0 trains another model"))

    def agree(self, what: str, mine: T) -> T:
        """The value that rank 0 gives."""
        return self.exchange(what, mine)[0]

    def team(self, tiers: TierConfig, *, is_durable: bool) -> Team:
        """The ranks that write the store, as the store sees them.

        Raises:
            ConfigError: raised at all ranks: some that share the parts write another store, so none is whole; or ranks
                of two replicas write the same store, over each other.
        """
        if self.ranks is None:
            return Alone()
        where = _Place(boot_id(), [os.path.realpath(path) for path in tiers.nvme] or [f"rank {self.number}"])
        told = self.exchange("the directories of the store", (where, self.shards[0], [*map(_identity, tiers.nvme)]))
        # In two containers of one machine a path may be of two volumes; ranks that share the parts are in one.
        places = [(place, told[first][2]) for place, first, _ in told]
        for rank, (place, first, _) in enumerate(told) if tiers.nvme else ():
            if is_durable:
                _check_one_store(rank, place, first, told[first][0])
            there = places.index(places[rank])
            _check_own_store(rank, place, first, there, told[there][1])
        members = [rank for rank, place in enumerate(places) if place == places[self.number]]
        self.position = members.index(self.number)
        self._team = _RankTeam(self.ranks, self._teams, members)
        return self._team

    def square_sum(
        self, groups: Sequence[GroupSpec], partials: Sequence[Partials], depth: int, options: Mapping[str, object]
    ) -> tuple[float, int]:
        """The squared global norm, and the depth that rank 0 has computed.

        Partial sums of all ranks are added by their position in the model, so the result has the same bits for every
        number of ranks, if the reduced gradients have.

        Args:
            options: those of this step's update, which must be the same at all ranks.

        Raises:
            ConfigError: raised at all ranks: they have different options.
        """
        told = self.exchange("the gradient norm", (self._own_partials(groups, partials), depth, options))
        refuse_different([options for _, _, options in told])
        if not self.keeps_all:
            partials = self._all_partials(groups, [told[rank][0] for rank in self.shards])
        return (float(np.cumsum(np.concatenate(partials))[-1]) if partials else 0.0), told[0][1]

    def _own_partials(self, groups: Sequence[GroupSpec], partials: Sequence[Partials]) -> Partials:
        """The partial sums that other ranks need, one group after the other."""
        if self.keeps_all:
            return np.zeros(0)
        parts = self._partial_counts(groups)
        mine = np.zeros(sum(parts))
        for start, own in zip(np.cumsum([0, *parts]), partials):
            mine[start : start + len(own)] = own
        return mine

    def _all_partials(self, groups: Sequence[GroupSpec], ranks: Sequence[Partials]) -> list[Partials]:
        parts = self._partial_counts(groups)
        return [
            np.concatenate([rank[start : start + part] for rank in ranks])[: -(-spec.size // BLOCK)]
            for spec, start, part in zip(groups, np.cumsum([0, *parts]), parts)
        ]

    def _partial_counts(self, groups: Sequence[GroupSpec]) -> list[int]:
        return [spec.device_elements // self.count // BLOCK for spec in groups]

    def from_first(self, pieces: Iterable[Piece]) -> Generator[Piece, None, None]:
        """Yield rank 0's pieces at every rank; the pieces of other ranks are dropped.

        An error thrown into this generator is raised at all ranks before more pieces are made.
        """
        if self.ranks is None:
            for piece in pieces:  # noqa: UP028, what is thrown in is none of theirs
                yield piece
            return
        what, own = "weights", _handfuls(pieces) if self.ranks.rank == 0 else iter(())
        if self.ranks.rank and isinstance(pieces, Generator):
            pieces.close()  # the generator holds the pieces
        given: list[Piece] = []
        failures: list[Exception] = []

        def announce() -> list[tuple[str, int, int, torch.dtype]]:
            if failures:
                raise failures[0]
            given.clear()  # before the next are made
            given.extend(next(own, ()))
            return [(name, offset, values.numel(), values.dtype) for name, offset, values in given]

        while announced := self.all_succeed(what, announce)[0]:
            for index, (name, offset, count, dtype) in enumerate(announced):
                with self.ranks.waiting(what):
                    values = given[index].values if given else torch.empty(count, dtype=dtype, device="cpu")
                    distributed.broadcast(values.view(torch.uint8), self.ranks.members[0], group=self._control)
                if not failures:
                    try:
                        yield Piece(name, offset, values)
                    except Exception as error:
                        failures.append(error)

    def joined(self, what: str, part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The parts of all ranks, one after the other."""
        if self.keeps_all:
            return part
        found = self.exchange(what, part)
        return np.concatenate([found[rank] for rank in self.shards])

    def same_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's values into the buffers of every rank."""
        if self.ranks is not None:
            held = list(buffers)
            given: list[Any] = [[buffer.detach().cpu() for buffer in held] if self.ranks.rank == 0 else None]
            with self.ranks.waiting("initial buffers"):  # not by `agree`, where each rank would hold one copy per rank
                distributed.broadcast_object_list(given, self.ranks.members[0], group=self._control)
            with torch.no_grad():
                for buffer, value in zip(held, given[0]):
                    writable(buffer).copy_(value)

    def owner(self, spec: GroupSpec, element: int) -> int:
        """The rank (of all) that keeps an element of a group, the first of those that do."""
        return self.shards[element // (spec.device_elements // self.count)]

    def as_first(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, flat and in CPU memory."""
        if self.ranks is None:
            return values.cpu()
        # Not in place: the process group's threads release it a little later, and its group would seem to be in use.
        found = values.to("cpu", copy=True)
        with self.ranks.waiting("changed weights"):
            distributed.broadcast(found.view(torch.uint8), self.ranks.members[0], group=self._control)
        return found

    def from_owner(self, owner: int, values: torch.Tensor) -> torch.Tensor:
        """`values` as their owner has them."""
        if self.ranks is not None and not self.keeps_all:
            with self.ranks.waiting(f"weights of rank {owner}"):
                distributed.broadcast(values, self.ranks.members[owner], group=self._sharing)
        return values


class _RankTeam:
    """See `Team`. Its exchanges have a process group and a thread of their own: commits end while training goes on."""

    def __init__(self, ranks: Ranks, group: ProcessGroup, members: Sequence[int]) -> None:
        self.rank = ranks.rank
        self.members = members
        self._ranks = ranks
        self._group = group
        self._thread = WorkerPool("tierstore-team", 1)

    async def exchange(self, what: str, mine: T) -> list[T]:
        return await self._thread.submit(Priority.DEMAND, self._ranks.exchange, what, mine, self._group)

    def close(self, timeout_s: float) -> None:
        self._thread.close(timeout_s)
        del self._group


def _handfuls(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces, in CPU memory, each small enough for a rank: one large piece alone, or several small ones."""
    handful: list[Piece] = []
    elements = 0
    for name, offset, values in pieces:
        for start, part in in_pieces(values):
            if elements + part.numel() > PIECE_ELEMENTS:
                yield handful
                handful, elements = [], 0
            is_rest = part.numel() < min(values.numel(), PIECE_ELEMENTS)  # a view would keep all of a large tensor
            part = part.clone() if is_rest else part
            handful.append(Piece(name, offset + start, part.detach().cpu().contiguous()))
            elements += part.numel()
    yield handful


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank has its part of a store."""

    machine: str
    directories: Sequence[str]


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode of a directory, or of the first one above it that exists."""
    absolute = Path(os.path.realpath(path))
    found = os.stat(next(one for one in (absolute, *absolute.parents) if os.path.exists(one)))
    return found.st_dev, found.st_ino


def _check_one_store(rank: int, place: _Place, first: int, expected: _Place) -> None:
    """Refuse a rank whose part would be in another store than that of the first rank that it shares the parts with."""
    if place.machine != expected.machine:
        raise ConfigError(
            f"ranks {first} and {rank} are on two machines, and a store with all parts is on one: give "
            "device_mesh=init_device_mesh(..., (machines, ranks of each), mesh_dim_names=('replicate', 'shard')), so "
            "that each machine has a whole store"
        )
    if place.directories != expected.directories:
        here, there = (", ".join(directories) for directories in (place.directories, expected.directories))
        raise ConfigError(
            f"nvme is {here} at rank {rank} and {there} at rank {first}, and a store with all parts is in one place: "
            "give all ranks of a machine the same directories, of all its disks if there are several"
        )


def _check_own_store(rank: int, place: _Place, first: int, there: int, expected: int) -> None:
    """Refuse a rank with the directories of a rank of another replica: both keep all parts, each over the other's."""
    if first != expected:
        raise ConfigError(
            f"nvme is {', '.join(place.directories)} at ranks {there} and {rank}, which device_mesh makes two "
            "replicas: each keeps a whole store, so give each replica directories of its own"
        )


def partition_of(
    zero: int | None, process_group: ProcessGroup | None, device_mesh: Any, tiers: TierConfig
) -> Partition:
    """The partition that a user asks for; without a process group there is one rank, which keeps everything.

    Raises:
        ConfigError: the options contradict each other, or ranks of GPUs could wait for each other for ever.
    """
    if zero not in (None, 0, 1, 2, 3):
        raise ConfigError(f"zero must be 0, 1, 2 or 3, not {zero!r}")
    if process_group is not None and device_mesh is not None:
        raise ConfigError("give process_group or device_mesh, not both")
    is_given = process_group is not None or device_mesh is not None
    if not is_given and not (distributed.is_available() and distributed.is_initialized()):
        return Partition(zero or 0, None)
    stage = 3 if zero is None else zero
    shards: ProcessGroup | None = None
    replicas: ProcessGroup | None = None
    if device_mesh is not None:
        if device_mesh.ndim > 2 or device_mesh.size() != distributed.get_world_size():
            raise ConfigError(
                f"device_mesh has shape {tuple(device_mesh.shape)} and there are {distributed.get_world_size()} ranks; "
                "give one dimension (shard) or two (replicate, shard) that hold them all"
            )
        shards = device_mesh.get_group(device_mesh.ndim - 1)
        replicas = device_mesh.get_group(0) if device_mesh.ndim == 2 else None
    device = torch.device(tiers.device)
    ranks = Ranks(process_group, timeout_s=tiers.timeout_s, device=device)
    if ranks.count == 1:
        ranks.close()
        return Partition(stage, None)
    try:
        if stage == 0 and tiers.nvme:
            raise ConfigError(
                "zero=0 keeps everything at every rank, and a store keeps every byte once: use zero=1, which keeps the "
                "optimizer state once, or give no nvme directory"
            )
        # Only stage 3 gathers weights while gradients are reduced; their order differs between ranks.
        if stage == 3 and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and is_nccl(ranks.group, device):
            raise ConfigError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 gives a GPU one queue for all its work, in which gathers of weights and "
                "reductions of gradients may wait for each other for ever: unset it, or use zero=2"
            )
        return Partition(stage, ranks, shards, replicas)
    except BaseException:
        ranks.close()  # stops its heartbeat
        raise
