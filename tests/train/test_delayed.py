"""The delayed update is a plain loop that is one step stale, wherever the state lives, resumed or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import torch

from tierstore.config import AdamWConfig, TierConfig
from tierstore.train.engine import Engine

STEPS = 8
CLIP = 0.5


def stale_loop() -> list[float]:
    """Plain torch: each step applies the gradients of the step before, clipped by their own norm."""
    model = runs.tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, pending = [], None
    for batch in runs.tokens(STEPS):
        loss = runs.next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        arrived = [parameter.grad for parameter in model.parameters()]
        if pending is not None:
            for parameter, gradient in zip(model.parameters(), pending):
                parameter.grad = gradient
            optimizer.step()
        pending = arrived
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def delayed(directory: Path | None, cpu_memory: str, cuts: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the engine, closed and resumed at the steps in `cuts`."""
    losses: list[float] = []
    batches = runs.tokens(STEPS)
    state: dict[str, torch.Tensor] = {}
    for stop in [*cuts, STEPS]:
        tiers = TierConfig(gpu_memory="2MiB", cpu_memory=cpu_memory, nvme=[directory] if directory else [])
        config = AdamWConfig(lr=1e-2, weight_decay=0.1)
        with Engine(runs.tiny(), tiers, config, update="delayed", max_grad_norm=CLIP, resume="auto") as engine:
            for batch in batches[engine.step_count : stop]:
                loss = runs.next_token_loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            state = engine.state_dict()
    return losses, state


def test_delayed_is_one_step_stale(disk_path: Path) -> None:
    expected = stale_loop()
    losses, _ = delayed(disk_path / "store", "64MiB", [])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[2]


@pytest.mark.parametrize("cpu_memory", ["64MiB", "4MiB"])
@pytest.mark.parametrize("cuts", [[], [1, 4]])
def test_delayed_is_the_same_on_disk_and_after_a_resume(disk_path: Path, cpu_memory: str, cuts: list[int]) -> None:
    losses, weights = delayed(None, "64MiB", [])
    again, stored = delayed(disk_path / "store", cpu_memory, cuts)
    assert again == losses
    assert all(torch.equal(weights[name], stored[name]) for name in weights)
