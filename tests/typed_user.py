"""What a person writes, for the type checker: strict mypy finds nothing wrong with it. It is not run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tierstore import (
    AdamWConfig,
    CPUAdam,
    Engine,
    GradientReducer,
    PrefetchingLoader,
    StepReport,
    TensorStore,
    Tier,
    TierConfig,
    load_pack,
)
from tierstore.config import Codec, Durability, Resume, UpdateSchedule


def train(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    tiers = TierConfig(gpu_memory="8GiB", cpu_memory=2**30, nvme=["/mnt/nvme0/run1", Path("other")], codec="lz4")
    same = TierConfig(nvme=("a",), codec=Codec.NONE, bandwidth="rates.json", chunk_bytes="8MiB")
    losses: list[float] = []
    with Engine(model, tiers, AdamWConfig(lr=3e-4), max_grad_norm=1.0, resume="auto") as engine:
        for batch in PrefetchingLoader(batches, "cpu"):
            loss = engine(**batch).loss
            engine.backward(loss)
            report: StepReport = engine.step()
            losses.append(float(loss) + report.step)
        with engine.gathered("blocks.0", modify=True):
            pass
        engine.export("out/")
    Engine(
        model, same, update=UpdateSchedule.AUTO, durability=Durability.COMMIT, resume=Resume.AUTO,
        parameter_groups=[{"params": list(model.parameters()), "lr": 1e-4}],
    ).close()  # fmt: skip
    return losses


async def keep(tensors: dict[str, torch.Tensor]) -> None:
    async with TensorStore.open(TierConfig(nvme=["/mnt/nvme0/tensors"])) as store:
        await store.put("a", tensors, tier=Tier.NVME)
        await store.put("b", tensors, tier="cpu")
        async with store.acquire("a", modify=True) as found:
            found["w"] += 1


def parts(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = CPUAdam(model.parameters(), lr=1e-3, fused=True)
    with GradientReducer(model, bucket="25MiB") as reducer:
        reducer.backward(reducer(torch.ones(1)).sum())
        optimizer.step()
    return load_pack("my-model.safetensors")
