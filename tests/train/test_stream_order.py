"""Nothing would race on a GPU: runs on a device whose kernels are late, see `tests/late_device.py`."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import test_must_work as must
import torch
from late_device import LateDevice, queueing
from runs import disk, next_token_loss, smallest_budgets, tiny, tokens, train
from torch import nn

from tierstore.device.streams import Bytes
from tierstore.errors import GraphError
from tierstore.plan.placement import BLOCK
from tierstore.store.gradients import Gradients
from tierstore.train.engine import Engine

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")
WIDTH = 16


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr("tierstore.train.assembly.open_device", lambda *_: device)
    monkeypatch.setattr(must, "WIDTH", WIDTH)  # `zero_models.py` makes it larger
    return device


@pytest.mark.parametrize(("kind", "way"), must.LATE)
def test_losses_are_those_of_plain_torch_and_nothing_races(
    kind: Any, way: tuple[str, float | None], late: LateDevice, tmp_path: Path
) -> None:
    with queueing(late):
        must.compare(kind, *way, tmp_path)
    assert late.hazards == []
    assert late.kernels > 100


def look_and_change(engine: Engine, step: int) -> None:
    """Read weights after each step, change some after the first, and load all after the second; a third one follows."""
    with engine.gathered("blocks.0", modify=step == 1), torch.no_grad():
        weight = engine.model.get_parameter("blocks.0.up.weight")
        assert weight.isfinite().all()
        if step == 1:
            weight.mul_(0.5)
    if step == 2:
        engine.load_state_dict(engine.state_dict())


def test_gradients_of_several_streams_are_refused(
    late: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter(range(100))
    with Engine(tiny(), disk(tmp_path)) as engine:
        engine.backward(next_token_loss(engine, tokens(1)[0]))
        engine.step()
        loss = next_token_loss(engine, tokens(1)[0])
        monkeypatch.setattr(late, "stream", lambda: next(streams))
        with pytest.raises(GraphError, match=r"the gradient of .* was made in another CUDA stream"):
            engine.backward(loss)


LEAST, DEVICE, ALL = (None, None), ("8MiB", None), ("8MiB", "64MiB")
GPU = ("32MiB", "8MiB")


@pytest.mark.parametrize(
    ("update", "memory"),
    [
        *((update, LEAST) for update in ("step", "forward", "backward", "speculative", "delayed")),
        *((update, DEVICE) for update in ("forward", "backward", "delayed")),
        ("step", ALL), *((update, GPU) for update in ("step", "forward", "speculative")),
    ],
)  # fmt: skip
def test_placements(update: str, memory: tuple[str | None, str | None], late: LateDevice, tmp_path: Path) -> None:
    """Weights and state on the disk, or all weights on the device, or all in memory, or all on the device; two
    micro-batches per step.
    """
    least = smallest_budgets(tiny(), nvme=["unused"], update=update)
    gpu, cpu = (given or smallest for given, smallest in zip(memory, least))
    clip = None if update == "backward" else 0.1
    tiers = disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu, state_on_gpu=memory == GPU)
    with queueing(late):
        run = train(
            tiny(dropout=0.1), tokens(6), tiers, update=update, max_grad_norm=clip, accumulate=2, after=look_and_change
        )
    assert all(map(math.isfinite, run.losses))
    assert late.hazards == []
    assert late.waited
    assert not [name for name in late.waited if name.startswith(("tierstore-io", "tierstore-update"))], "they have work"


class HalfTrained(nn.Module):
    """One group of two chunks. The last micro-batch only reads the first chunk, and keeps no view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.trained = (nn.Parameter(torch.full((BLOCK,), 0.5)) for _ in range(2))

    def forward(self, *, is_last: bool) -> torch.Tensor:
        with torch.set_grad_enabled(not is_last):
            scale = self.read.mean()
        return self.trained.mean() * scale


def test_a_chunk_that_got_no_gradient_last_is_updated_when_forward_has_read_it(
    late: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no gradient on its way that waits for forward; the gradient of the other chunk comes after its update."""
    updated, copy_in, collect = threading.Event(), late.copy_in, Gradients._collect

    def copy_in_and_tell(storage: torch.UntypedStorage, offset_bytes: int, source: Bytes) -> None:
        copy_in(storage, offset_bytes, source)
        updated.set()

    async def collect_after_that(*given: Any) -> None:
        while not updated.is_set():
            await asyncio.sleep(0)
        await collect(*given)

    options: dict[str, Any] = {"update": "backward", "chunk_bytes": 2**16}
    gpu, cpu = smallest_budgets(HalfTrained(), nvme=["unused"], **options)
    tiers = disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu, chunk_bytes=2**16)
    with queueing(late), Engine(HalfTrained(), tiers, update="backward") as engine:
        for step in range(3):
            with engine.no_sync():
                engine.backward(engine(is_last=False))
            loss = engine(is_last=True)
            updated.clear()
            with monkeypatch.context() as patched:
                if step == 2:
                    patched.setattr(late, "copy_in", copy_in_and_tell)
                    patched.setattr(Gradients, "_collect", collect_after_that)
                engine.backward(loss)
            engine.step()
    assert updated.is_set()
    assert late.hazards == []


def test_what_is_kept_and_not_contiguous(late: LateDevice, tmp_path: Path) -> None:
    """Such a gradient is made flat when it is handed over, between two passes, by a kernel of its own."""
    model = tiny()

    def turn(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.dim() == 2:
            parameter.grad = parameter.grad.t().contiguous().t()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(turn)
    tiers = disk(tmp_path, gpu_memory="8MiB", cpu_memory="64MiB", accumulation_steps=2)
    with queueing(late), Engine(model, tiers, update="step") as engine:
        with engine.no_sync():
            engine.backward(next_token_loss(engine, tokens(1)[0]))
        assert engine.gradient("blocks.0.up.weight").isfinite().all()
    assert late.hazards == []


@pytest.mark.parametrize("memory", [ALL, GPU])
@pytest.mark.parametrize("update", ["step", "forward"])
def test_weights_that_are_read_after_backward(
    update: str, memory: tuple[str, str], late: LateDevice, tmp_path: Path
) -> None:
    """They are read between backward and step(), by kernels for which only the update waits."""
    tiers = disk(tmp_path, gpu_memory=memory[0], cpu_memory=memory[1], state_on_gpu=memory == GPU)
    with queueing(late), Engine(tiny(), tiers, update=update) as engine:
        for batch in tokens(3):
            engine.backward(next_token_loss(engine, batch))
            with torch.no_grad():
                engine(batch)
            engine.step()
    assert late.hazards == []
