"""What ranks of `tierstore train` run in tests that need no torchrun: forks of one process."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tierstore.apps.crew import Crew
from tierstore.apps.launch import Launch
from tierstore.apps.options import Precision, TrainOptions
from tierstore.apps.report import Reporter
from tierstore.apps.stopping import StopRequest
from tierstore.apps.train import train
from tierstore.config import Resume
from tierstore.errors import ConfigError, RankLost, StorageFull, TierstoreError
from tierstore.train.engine import Engine
from tierstore.train.ranks import Ranks


def crew_of(rank: int, ranks: int) -> tuple[Crew, Ranks]:
    group = Ranks(timeout_s=20.0)
    return Crew(Launch(rank, ranks, rank, ranks), group), group


def one_fails(rank: int, ranks: int) -> str:
    def work() -> None:
        if rank == 1:
            raise StorageFull("no space left")

    return _sentence(rank, ranks, lambda crew: crew.all_succeed("a test", work))


def all_fail(rank: int, ranks: int) -> str:
    def work() -> None:
        raise ConfigError("no such file")

    return _sentence(rank, ranks, lambda crew: crew.all_succeed("a test", work))


def differ(rank: int, ranks: int) -> str:
    return _sentence(rank, ranks, lambda crew: crew.check_same("options", {"data": None, "steps": 3 + rank}))


def one_is_lost(rank: int, ranks: int) -> str:
    def work(crew: Crew) -> None:
        raise StorageFull("no space left") if rank == 1 else RankLost("rank 0 of 2 waited for rank 1")

    return _sentence(rank, ranks, work)


def _sentence(rank: int, ranks: int, work: Any) -> str:
    crew, group = crew_of(rank, ranks)
    try:
        work(crew)
    except TierstoreError as error:
        return crew.sentence(error)
    finally:
        group.close()
    return "nothing failed"


def options_in(folder: str) -> TrainOptions:
    return TrainOptions(
        config=Path(folder, "config.json"), data=Path(folder, "text"), batch=4, sequence=32, gpu_memory=2**22,
        cpu_memory=2**23, dtype=Precision.FP32, dropout=0.2, evaluate=3, threads=1,
    )  # fmt: skip


def given(rank: int, ranks: int, folder: str, others: dict[str, Any]) -> str:
    """The sentence of a run in which the last rank is given other options."""
    options = replace(options_in(folder), **(others if rank == ranks - 1 else {}))
    console = Console(file=io.StringIO(), force_terminal=False)
    return _sentence(rank, ranks, lambda crew: train(options, Reporter(console), crew=crew))


def trained(rank: int, ranks: int, folder: str, name: str, steps: int, stop_at: int | None = None) -> dict[str, Any]:
    """A run with dropout; one rank of it may be asked to stop while a step runs.

    Returns:
        Losses as rank 0 wrote them, what ended the run, and a random number of each rank after it.
    """
    crew, group = crew_of(rank, ranks)
    lines = Path(folder, f"{name}.jsonl")
    options = replace(options_in(folder), nvme=(Path(folder, name),), steps=steps, resume=Resume.AUTO, json=lines)
    with StopRequest(rank=rank, ranks=ranks) as stop:

        def make_engine(**arguments: Any) -> Engine:
            engine = Engine(**arguments)
            if rank == ranks - 1:
                engine.on_step(lambda report: stop._handle(2, None) if report.step == stop_at else None)
            return engine

        outcome = train(options, Reporter(Console(file=io.StringIO(), force_terminal=False)), make_engine, stop, crew)
    group.close()
    return {
        "losses": [json.loads(line)["loss"] for line in lines.read_text().splitlines()],
        "stopped_by": outcome.stopped_by, "last": outcome.totals.last_step, "draw": float(torch.rand(())),
    }  # fmt: skip
