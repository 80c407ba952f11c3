"""Short runs over a store that are broken off and resumed, with dropout, a scheduler and a data position."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from runs import next_token_loss, smallest_budgets, tiny, tokens

from tierstore.config import AdamWConfig, TierConfig
from tierstore.io.backend import Backend
from tierstore.train.engine import Engine

LIMIT_S = 20.0
MEMORY, DISK = "64MiB", None
"""CPU budgets: everything in memory beside the store, and the smallest that the planner takes."""


class Position:
    """What a run registers: how many batches it has taken."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> torch.Tensor:
        self.taken += 1
        return tokens(self.taken, shape=(1, 8))[-1]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]


@dataclass(frozen=True)
class Way:
    """How a run trains; `cpu_memory` None is the smallest that fits."""

    update: str = "forward"
    commit_every: int = 1
    cpu_memory: str | None = MEMORY
    dtype: torch.dtype = torch.float32
    blocks: int = 1
    width: int = 32
    codec: str = "none"
    directories: int = 1
    state_on_gpu: bool = False

    @property
    def clip(self) -> float | None:
        return None if self.update == "backward" else 0.5

    def model(self) -> torch.nn.Module:
        return tiny(self.dtype, blocks=self.blocks, width=self.width, dropout=0.1)

    def tiers(self, folder: Path, **changes: Any) -> TierConfig:
        cpu = smallest_cpu_bytes(self) if self.cpu_memory is None else self.cpu_memory
        nvme = [folder / f"store{n}" for n in range(self.directories)]
        return TierConfig(**({"gpu_memory": "8MiB", "cpu_memory": cpu, "nvme": nvme, "timeout_s": LIMIT_S,
                              "codec": self.codec, "io_threads": 2, "update_threads": 1,
                              "state_on_gpu": self.state_on_gpu} | changes))  # fmt: skip


@cache
def smallest_cpu_bytes(way: Way) -> int:
    options = {"update": way.update, "max_grad_norm": way.clip, "nvme": ["/nowhere"], "codec": way.codec}
    return smallest_budgets(way.model(), **options)[1]


@dataclass
class Run:
    """A loop over an engine."""

    engine: Engine
    position: Position
    losses: list[float] = field(default_factory=list)

    def step(self) -> None:
        loss = next_token_loss(self.engine, self.position.next())
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.item())

    def until(self, step: int) -> None:
        while self.engine.step_count < step:
            self.step()


def open_run(way: Way, folder: Path, backend: Backend | None = None, **changes: Any) -> Run:
    """An engine of this way over the store in `folder`, resumed if there is one.

    Args:
        changes: fields of `TierConfig` and arguments of `Engine` that differ.
    """
    torch.manual_seed(7)
    position = Position()
    options: dict[str, Any] = {
        "optimizer": AdamWConfig(lr=1e-2), "update": way.update, "commit_every": way.commit_every,
        "max_grad_norm": way.clip, "resume": "auto",
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "registered": {"position": position}, "backend": backend,
    }  # fmt: skip
    tiers = way.tiers(folder, **{k: changes.pop(k) for k in list(changes) if k in TierConfig.model_fields})
    model = changes.pop("model", None) or way.model()
    return Run(Engine(model, tiers, **(options | changes)), position)


@contextmanager
def opened(way: Way, folder: Path, backend: Backend | None = None, **changes: Any) -> Iterator[Run]:
    """As `open_run`, and closed at the end."""
    run = open_run(way, folder, backend, **changes)
    with run.engine:
        yield run


@dataclass(frozen=True)
class State:
    """What is compared: weights in fp32, and what the next step depends on."""

    weights: dict[str, torch.Tensor]
    taken: int
    random: torch.Tensor

    @staticmethod
    def of(run: Run) -> State:
        weights = run.engine.state_dict()
        return State(weights, run.position.taken, torch.get_rng_state())

    def check_equal(self, other: State) -> None:
        assert self.taken == other.taken
        assert torch.equal(self.random, other.random)
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def expected_states(way: Way, folder: Path, steps: int) -> list[State]:
    """The state after 0, 1, ... steps of an uninterrupted run."""
    with opened(way, folder) as run:
        states = [State.of(run)]
        while len(states) <= steps:
            run.step()
            states.append(State.of(run))
    return states


def check_resumes(way: Way, folder: Path, expected: list[State], **changes: Any) -> int:
    """Check that the store opens at a generation of the uninterrupted run, and goes on as that run did.

    Returns:
        The step that it opened at.
    """
    with opened(way, folder, **changes) as run:
        found = run.engine.step_count
        expected[found].check_equal(State.of(run))
        if found < len(expected) - 1:
            run.until(len(expected) - 1)
            expected[-1].check_equal(State.of(run))
    return found


def hold(way: Way, folder: Path, end: Connection) -> None:
    """In a process of its own: open the store, say so, and keep it."""
    with opened(way, folder):
        end.send("open")
        signal.pause()
