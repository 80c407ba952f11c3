"""Which of several processes this one is, as torchrun tells every process that it starts.

Scope: the launcher's variables, and what follows from them for the options of one rank.
Not here: the process group (`apps/crew.py`). No torch: bad options are refused before it is imported.
Owner: the record is immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierstore.apps.options import TrainOptions
from tierstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Launch:
    """One process among those that train together.

    Attributes:
        rank, count: this process's rank among all processes, and their number.
        local_rank, local_count: likewise among the processes on this machine.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1

    @property
    def nodes(self) -> int:
        """Number of machines; torchrun starts the same number of ranks on each."""
        return self.count // self.local_count

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """As the variables of torchrun say; without torchrun there is one rank.

        Raises:
            ConfigError: the variables are not numbers, no valid place among ranks, or only some of them are set; or not
                all machines have the same number of ranks.
        """
        if "WORLD_SIZE" not in environment or "RANK" not in environment:
            return cls()
        values = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        try:
            launch = cls(*map(int, values.values()))
            if not (0 <= launch.rank < launch.count and 0 <= launch.local_rank < launch.local_count <= launch.count):
                raise ValueError
        except ValueError:
            found = ", ".join(f"{name}={value}" for name, value in values.items())
            raise ConfigError(f"the launcher's variables say {found}: start several ranks with torchrun") from None
        machines = environment.get("GROUP_WORLD_SIZE", "") if launch.count > 1 else ""  # perhaps of a run around this
        if launch.count % launch.local_count or machines not in ("", str(launch.nodes)):
            told = f", one of {machines}" if machines else ""
            raise ConfigError(
                f"{launch.local_count} of the {launch.count} ranks are on this machine{told}: give torchrun the same "
                "--nproc-per-node on all machines"
            )
        return launch

    def options(self, given: TrainOptions) -> TrainOptions:
        """The options of this rank: its GPU.

        Raises:
            ConfigError: the options cannot work with so many ranks.
        """
        if self.count == 1:
            return given
        if given.batch % self.count:
            more = -(-given.batch // self.count) * self.count
            raise ConfigError(
                f"--batch {given.batch} cannot be divided among {self.count} ranks: it counts the samples of all of "
                f"them; give a multiple of {self.count}, such as {more}"
            )
        if given.zero == 0 and given.nvme:
            raise ConfigError(
                "--zero 0 keeps everything at every rank, and a store keeps every byte once: give --zero 1, which "
                "keeps the optimizer state once, or no --nvme"
            )
        if given.device == "cuda":
            given = replace(given, device=f"cuda:{self.local_rank}")
        elif given.device != "cpu" and self.local_count > 1:
            raise ConfigError(f"{self.local_count} ranks cannot share --device {given.device}: give --device cuda, "
                              "and each takes the GPU of its local rank")  # fmt: skip
        return given
