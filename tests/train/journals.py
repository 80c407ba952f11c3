"""Runs of two ranks that share a disk, in processes of their own; each rank records its changes of the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from power_cuts import Change, JournalBackend
from runs import next_token_loss, tiny
from sharing import batches

from tierstore.config import AdamWConfig, TierConfig
from tierstore.train.engine import Engine


def make_engine(folder: Path | None, rank_options: dict[str, Any]) -> Engine:
    """Over a store in `folder`, or in memory."""
    nvme = [folder / "store"] if folder is not None else []
    tiers = TierConfig(nvme=nvme, gpu_memory="10MiB", cpu_memory="4MiB" if nvme else "64MiB", timeout_s=20.0)
    options = {"update": "forward", "max_grad_norm": 1.0, "resume": "auto" if nvme else "never"} | rank_options
    return Engine(tiny(blocks=1), tiers, AdamWConfig(lr=1e-2), **options)


def record(rank: int, ranks: int, folder: str, until: int, **options: Any) -> tuple[dict[Path, bytes], list[Change]]:
    """The files that this rank finds, and its changes from opening to closing."""
    backend = JournalBackend(Path(folder), turns=Path(folder).with_suffix(".turns"))
    with make_engine(Path(folder), {"backend": backend} | options) as engine:
        for batch in batches(until, rank, ranks)[engine.step_count :]:
            engine.backward(next_token_loss(engine, batch))
            engine.step()
    return backend.found, backend.journal


def states(rank: int, ranks: int, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """In memory: the losses of this rank, and all weights after 0, 1, ... steps."""
    losses = []
    with make_engine(None, {}) as engine:
        weights = [engine.state_dict()]
        for batch in batches(steps, rank, ranks):
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            weights.append(engine.state_dict())
    return losses, [{name: value.numpy() for name, value in state.items()} for state in weights]


def go_on(rank: int, ranks: int, folders: list[str], until: int) -> list[tuple[int, list[float]]]:
    """The step at which each store opens, and the losses from there."""
    told = []
    for folder in folders:
        losses = []
        with make_engine(Path(folder), {}) as engine:
            begun = engine.step_count
            for batch in batches(until, rank, ranks)[begun:]:
                loss = next_token_loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        told.append((begun, losses))
    return told
