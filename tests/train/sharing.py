"""What ranks run in the tests of ZeRO: a tiny model on a stage, every rank with its own part of the global batch."""

from __future__ import annotations

from typing import Any

import torch
from runs import next_token_loss, tiny, tokens

from tierstore.config import AdamWConfig, TierConfig
from tierstore.train.engine import Engine

GLOBAL_BATCH = 12  # rows; 1, 2, 3 and 4 ranks have equal parts


def batches(steps: int, rank: int, ranks: int) -> list[torch.Tensor]:
    """This rank's rows of each step's batch."""
    rows = GLOBAL_BATCH // ranks
    return [batch[rank * rows : (rank + 1) * rows] for batch in tokens(steps, shape=(GLOBAL_BATCH, 16))]


def train(
    rank: int, ranks: int, directory: str | None, steps: int = 3, model: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train, and tell the losses, the norms, the first step's gradients and the final weights."""
    options = {"zero": 3, "update": "forward", "max_grad_norm": 1.0} | options
    memory = options.pop("memory", {"gpu_memory": "4MiB", "cpu_memory": "24MiB"})
    tiers = TierConfig(nvme=[directory] if directory else [], timeout_s=20.0, **memory)
    start = options.pop("start", 0)
    built = tiny(seed=options.pop("seed", 0), **(model or {}))
    told: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}}
    with Engine(built, tiers, AdamWConfig(lr=1e-2), **options) as engine:
        told["begun_at"] = engine.step_count
        for batch in batches(start + steps, rank, ranks)[start:]:
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            if not told["gradients"] and options["update"] != "backward":
                told["gradients"] = {name: engine.gradient(name).numpy() for name in ("embedding.weight", "norm.bias")}
            told["norms"].append(engine.step().grad_norm)
            told["losses"].append(loss.item())
        told |= {name: engine.statistics()[name] for name in ("bytes", "peak_bytes")}
        told["weights"] = {name: value.numpy() for name, value in engine.state_dict().items()}
    return told


def look(rank: int, ranks: int, directory: str, memory: dict[str, str]) -> dict[str, Any]:
    """The weights of a store, opened and left as it is."""
    tiers = TierConfig(nvme=[directory], timeout_s=20.0, **memory)
    with Engine(tiny(seed=1), tiers, zero=3, resume="must", update="forward", max_grad_norm=1.0) as engine:
        return {name: value.numpy() for name, value in engine.state_dict().items()}
