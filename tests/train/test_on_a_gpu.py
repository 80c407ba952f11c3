"""Engines and stores of tensors on a GPU: the losses of plain torch there, however late its kernels are.

`test_stream_order.py` looks for races without a GPU, too; the allocator, the streams and autograd's own threads are
real only here.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tensor_stores
import test_must_work as must
import torch
from runs import disk, smallest_budgets, tiny, tokens, train, train_plain, worst_difference
from torch import nn

from tierstore.config import Tier, TierConfig

DEVICE = "cuda"
LATE_CYCLES = 1_000_000  # about half a millisecond
Budgets = tuple[str | None, str | None, bool]
LEAST, WEIGHTS, ALL = (None, None, False), ("8MiB", None, False), ("8MiB", "64MiB", False)
GPU = ("64MiB", "16MiB", True)
"""GPU and CPU budgets, `state_on_gpu`: the least; all weights on the GPU; all state in CPU memory; state on the GPU."""

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_leaks", "one_thread")]


def be_late() -> None:
    if DEVICE == "cuda":
        torch.cuda._sleep(LATE_CYCLES)


class Late(torch.autograd.Function):
    """Both passes wait on the device, so that the host is far ahead of it."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        be_late()
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        be_late()
        return gradient


def late_model(dtype: torch.dtype) -> nn.Module:
    model = tiny(dtype, dropout=0.1)
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: Late.apply(output))
    return model


def tiers_of(memory: Budgets, update: str, dtype: torch.dtype, folder: Path) -> TierConfig:
    least = smallest_budgets(tiny(dtype), nvme=["unused"], update=update, device=DEVICE)
    gpu, cpu = (given or smallest for given, smallest in zip(memory, least))
    return disk(folder, gpu_memory=gpu, cpu_memory=cpu, device=DEVICE, state_on_gpu=memory[2])


@pytest.mark.parametrize(("kind", "way"), must.LATE)
def test_models(kind: Any, way: tuple[str, float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(must, "WIDTH", 16)  # `zero_models.py` makes it larger
    must.compare(kind, *way, tmp_path, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", [LEAST, WEIGHTS, ALL, GPU])
@pytest.mark.parametrize("update", ["step", "forward", "backward", "speculative"])
def test_placements(update: str, memory: Budgets, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two micro-batches per step; some steps are clipped, so speculation is wrong in some."""
    batches = [batch.to(DEVICE) for batch in tokens(8)]
    clip = None if update == "backward" else 1.0
    found = train(
        late_model(dtype), batches, tiers_of(memory, update, dtype, tmp_path), update=update, max_grad_norm=clip,
        accumulate=2,
    )  # fmt: skip
    # Plain torch has no fp32 master of its bf16 weights: the first steps are the same to their precision.
    steps, precision = (8, 1e-4) if dtype is torch.float32 else (4, 2e-2)
    expected = train_plain(late_model(dtype).to(DEVICE), batches[:steps], max_grad_norm=clip, accumulate=2)
    assert worst_difference(found.losses[:steps], expected.losses) < precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", [LEAST, WEIGHTS, ALL, GPU])
def test_placement_and_schedule_change_no_bit(memory: Budgets, dtype: torch.dtype, tmp_path: Path) -> None:
    batches = [batch.to(DEVICE) for batch in tokens(4)]
    ways = [(memory, "step"), (memory, "forward"), (memory, "speculative"), (ALL, "step")]
    runs = [
        train(late_model(dtype), batches, tiers_of(budgets, update, dtype, tmp_path / str(number)), update=update,
              max_grad_norm=1.0)
        for number, (budgets, update) in enumerate(ways)
    ]  # fmt: skip
    for run in runs[1:]:
        runs[0].check_equal(run)


def test_tensors_that_are_changed_come_back(tmp_path: Path) -> None:
    """More tensors than the GPU tier holds, changed by kernels that run long after the tensors are released."""

    async def play() -> list[float]:
        async with tensor_stores.opened(tmp_path, gpu_memory=3 * tensor_stores.CHUNK, device=DEVICE) as store:
            for number in range(6):
                await store.put(f"h.{number}", tensor_stores.block(number), tier=[Tier.NVME, Tier.CPU][number % 2])
            for _ in range(3):
                for number in range(6):
                    async with store.acquire(f"h.{number}", modify=True) as tensors:
                        be_late()
                        tensors["w"].add_(1)
            return [await tensor_stores.value_of(store, f"h.{number}") for number in range(6)]

    assert asyncio.run(play()) == [number + 3 for number in range(6)]
