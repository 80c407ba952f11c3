"""The engine against plain torch and torch.optim.AdamW: the same losses to rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from runs import Run, Ways, disk, next_token_loss, smallest_budgets, tiny, tokens, train, train_plain, worst_difference
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ConfigError, GraphError
from tierstore.train import whole
from tierstore.train.cpu_adam import CPUAdam
from tierstore.train.engine import Engine
from tierstore.train.optimizer import clip_coefficient

STEPS = 5
SCHEDULES = [("forward", 1.0), ("speculative", 1.0), ("step", 1.0), ("backward", None), ("step", None)]

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def small_tiers(model: nn.Module, tmp_path: Path, update: str) -> TierConfig:
    """Everything on NVMe, and one block at a time on the device."""
    gpu, cpu = smallest_budgets(model, nvme=["unused"], update=update)
    return disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu)


@pytest.mark.parametrize(("update", "clip"), SCHEDULES)
def test_losses_are_those_of_plain_torch(update: str, clip: float | None, tmp_path: Path) -> None:
    batches = tokens(STEPS)
    expected = train_plain(tiny(dropout=0.1), batches, max_grad_norm=clip)
    tiers = small_tiers(tiny(dropout=0.1), tmp_path, update)
    found = train(tiny(dropout=0.1), batches, tiers, update=update, max_grad_norm=clip)
    assert worst_difference(found.losses, expected.losses) < 1e-5
    assert found.losses[-1] < 0.9 * found.losses[0]
    assert [report.grad_norm for report in found.reports] == pytest.approx(expected.norms, rel=1e-5)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=2e-5)


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    model, batches = tiny(), tokens(2)
    expected = train_plain(tiny(), batches, max_grad_norm=1.0)
    tiers = small_tiers(tiny(), tmp_path, "step")
    with torch.device("meta"), Engine(model, tiers, AdamWConfig(lr=1e-3), update="step", max_grad_norm=1.0) as engine:
        for batch, loss in zip(batches, expected.losses):
            with engine.no_sync():
                engine.backward(next_token_loss(engine, batch) / 2)
            engine.backward(found := next_token_loss(engine, batch) / 2)
            engine.step()
            assert 2 * found.item() == pytest.approx(loss, rel=1e-5)
        engine.load_state_dict(engine.state_dict())
        engine.export(tmp_path / "out")
        assert {one.device.type for one in engine.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_clips_as_in_torch(bad: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([bad, 1.0, -2.0])
    given = weight.grad.clone()
    norm = float(nn.utils.clip_grad_norm_([weight], 0.5))
    _, clip = clip_coefficient(norm**2, 1.0, 0.5)
    torch.testing.assert_close(given * clip, weight.grad, equal_nan=True)


@pytest.mark.parametrize("update", ["step", "forward", "speculative"])
def test_the_clip_coefficient_is_that_of_torch(update: str, tmp_path: Path) -> None:
    """Adam does not see how large gradients are, unless its eps is of their size."""
    batches, options = tokens(STEPS), {"lr": 0.1, "eps": 0.1, "weight_decay": 0.0}
    expected = train_plain(
        tiny(), batches, max_grad_norm=0.5,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), **options),
    )  # fmt: skip
    tiers = small_tiers(tiny(), tmp_path, update)
    found = train(tiny(), batches, tiers, update=update, max_grad_norm=0.5, optimizer=AdamWConfig(**options))
    assert worst_difference(found.losses, expected.losses) < 1e-5
    assert found.losses[-1] < 0.9 * found.losses[0]


def test_accumulated_micro_batches_are_those_of_plain_torch(tmp_path: Path) -> None:
    batches = tokens(3 * STEPS)
    expected = train_plain(tiny(), batches, max_grad_norm=1.0, accumulate=3)
    tiers = small_tiers(tiny(), tmp_path, "forward")
    found = train(tiny(), batches, tiers, update="forward", max_grad_norm=1.0, accumulate=3)
    assert worst_difference(found.losses, expected.losses) < 1e-5


class Recomputed(Ways):
    """Uses of a layer are reentrant checkpoints, so one that is used twice gets two gradients; that of ~i is none."""

    def forward(self, x: torch.Tensor, way: Sequence[int]) -> torch.Tensor:
        x = x.requires_grad_()  # otherwise a reentrant checkpoint computes no gradients
        for index in way:
            layer = self.layers[max(index, ~index)]
            x = x + (layer(x) if index < 0 else checkpoint(layer, x, use_reentrant=True)).tanh()
        return x


@pytest.mark.parametrize("is_tight", [True, False])
def test_gradients_of_one_backward_are_added_in_the_order_of_torch(is_tight: bool, tmp_path: Path) -> None:
    """Each is added to the sum from the micro-batch before, one by one: bit for bit, wherever gradients are."""
    model, way = Recomputed(2, 16), (0, 1, 0, 1)
    own, data = copy.deepcopy(model), [torch.randn(4, 16) for _ in range(8)]
    optimizer = CPUAdam(own.parameters(), lr=1e-2, threads=1)
    tiers = small_tiers(model, tmp_path, "step") if is_tight else TierConfig(gpu_memory="64MiB", cpu_memory="64MiB")
    with Engine(model, tiers, AdamWConfig(lr=1e-2), update="step") as engine:
        for one, other in zip(data[::2], data[1::2]):
            with engine.no_sync():
                engine.backward(engine(one, way).square().mean())
            engine.backward(engine(other, way).square().mean())
            engine.step()
            for batch in (one, other):
                own(batch, way).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = engine.state_dict()
    for name, weight in own.state_dict().items():
        assert torch.equal(found[name], weight), name


ALL, PLAIN, TWICE, SKIPPED = (0, 1, 2), (~0, ~1, ~2), (0, 1, 1, 2), (0, 2)
LATER, AT_FIRST = [ALL, SKIPPED, SKIPPED, ALL, ALL], [SKIPPED, ALL, ALL]


@pytest.mark.parametrize(
    ("update", "has_store", "ways", "early"),
    [
        ("auto", False, LATER, [0, 2, 2, 3, 3]),
        ("auto", True, LATER, [0, 2, 2, 3, 3]),
        ("auto", False, AT_FIRST, [0, 2, 3]),  # nobody knows which gradients a first use will have
        ("speculative", True, AT_FIRST, [0, 2, 3]),
        ("auto", False, [PLAIN, ALL, ALL], [0, 0, 3]),
        ("backward", False, [TWICE, ALL, SKIPPED, TWICE], [0, 2, 2, 3]),
    ],
)
def test_reentrant_checkpoints_may_leave_layers_out(
    update: str, has_store: bool, ways: list[tuple[int, ...]], early: list[int], tmp_path: Path
) -> None:
    """As in plain torch, bit for bit, with updates in backward.

    Args:
        early: how many layers are updated before backward ends, in each step.
    """
    model = Recomputed()
    own, found = copy.deepcopy(model), list[int]()
    optimizer = CPUAdam(own.parameters(), lr=1e-2, threads=1)
    tiers = small_tiers(model, tmp_path, update) if has_store else TierConfig(gpu_memory="1MiB", cpu_memory="8MiB")
    with Engine(model, tiers, AdamWConfig(lr=1e-2), update=update) as engine:
        collector = engine._parts.collector

        def finish() -> None:
            found.append(len(collector.completed) if collector.is_streaming else 0)
            type(collector).finish(collector)

        with patch.object(collector, "finish", finish):
            for x, way in zip((torch.randn(4, 8) for _ in ways), ways):
                engine.backward(engine(x, way).square().mean())
                engine.step()
                own(x, way).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, weight in own.state_dict().items():
            assert torch.equal(engine.state_dict()[name], weight), name
    assert found == early


class Shift(nn.Module):
    """Backward reads none of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def test_a_gradient_after_its_update_is_refused() -> None:
    model, memory = Recomputed(), TierConfig(gpu_memory="1MiB", cpu_memory="8MiB")
    model.layers[1] = Shift()
    with Engine(model, memory) as engine:
        engine.backward(engine(torch.randn(4, 8), PLAIN).square().mean())
        engine.step()
        refusal = "layers.1.by came after its group was updated: .* use_reentrant=False, or update='forward'"
        with pytest.raises(GraphError, match=refusal):
            engine.backward(engine(torch.randn(4, 8), (~0, ~1, 1, ~2)).square().mean())


def test_train_step_is_the_mean_over_its_micro_batches(tmp_path: Path) -> None:
    batches = tokens(6)
    expected = train_plain(tiny(), batches, accumulate=3)
    with Engine(tiny(), small_tiers(tiny(), tmp_path, "backward"), update="backward") as engine:
        for step in range(2):
            pairs = [({"tokens": batch}, batch) for batch in batches[3 * step : 3 * step + 3]]
            engine.train_step(pairs, criterion=_next_token_loss)
        weights = engine.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "batch", [{"tokens": torch.zeros(1, 2)}, torch.zeros(1, 2), 7], ids=["a mapping", "a tensor", "a number"]
)
def test_train_step_takes_a_list_also_of_one(batch: Any, tmp_path: Path) -> None:
    with Engine(tiny(), small_tiers(tiny(), tmp_path, "forward"), update="forward") as engine:
        with pytest.raises(ConfigError, match=f"not {type(batch).__name__}; give \\[batch\\] for one"):
            engine.train_step(batch)
        assert engine.step_count == 0


def _next_token_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return next_token_loss(lambda _: logits, batch)


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
def test_train_step_takes_pairs_and_a_criterion(schedule: str, tmp_path: Path) -> None:
    batches = tokens(4)
    expected = train_plain(tiny(), batches, accumulate=2)
    with Engine(tiny(), small_tiers(tiny(), tmp_path, "forward"), update="forward") as engine:
        for step in range(2):
            pairs = [(batch, batch) for batch in batches[2 * step : 2 * step + 2]]
            report = engine.train_step(pairs, schedule=schedule, criterion=_next_token_loss)
            assert report.loss == pytest.approx(sum(expected.losses[2 * step : 2 * step + 2]) / 2, rel=1e-4)
        for odd, told in ((batches[0], "not Tensor"), ((batches[0],) * 3, "not 3 items")):
            with pytest.raises(ConfigError, match=rf"a micro-batch is a pair \(inputs, target\), {told}"):
                engine.train_step([odd], schedule=schedule, criterion=_next_token_loss)
        with pytest.raises(ConfigError, match="loss_of, which gets the output, or criterion"):
            engine.train_step(pairs, lambda output: output.sum(), criterion=_next_token_loss)
        assert engine.step_count == 2
        engine.train_step(pairs, schedule=schedule, criterion=_next_token_loss)


# --- parameter groups and schedulers --------------------------------------------------------------------------------


def decayed_and_not(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 2e-3},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS + 1),
}


@pytest.mark.parametrize(
    ("scheduler", "update", "clip"),
    [
        ("lambda", "forward", 1.0), ("lambda", "backward", None), ("cosine", "forward", 1.0),
        ("one cycle", "backward", None),
    ],
)  # fmt: skip
def test_parameter_groups_and_schedulers(scheduler: str, update: str, clip: float | None, tmp_path: Path) -> None:
    batches, options = tokens(STEPS), {"lr": 1e-3, "weight_decay": 1e-2}
    expected = train_plain(
        tiny(), batches, max_grad_norm=clip, make_scheduler=SCHEDULERS[scheduler],
        make_optimizer=lambda model: torch.optim.AdamW(decayed_and_not(model), **options),
    )  # fmt: skip
    model = tiny()
    tiers = small_tiers(tiny(), tmp_path, update)
    found = train(
        model, batches, tiers, update=update, max_grad_norm=clip, optimizer=AdamWConfig(**options),
        parameter_groups=decayed_and_not(model), lr_scheduler=SCHEDULERS[scheduler],
    )  # fmt: skip
    assert worst_difference(found.losses, expected.losses) < 1e-5
    assert len({tuple(report.lr) for report in found.reports}) > STEPS // 2


def test_a_parameter_in_no_group_does_not_change(tmp_path: Path) -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    groups = [{"params": list(model.blocks[1].parameters())}]
    tiers = small_tiers(tiny(), tmp_path, "forward")
    found = train(model, tokens(3), tiers, update="forward", parameter_groups=groups)
    for name, weight in found.weights.items():
        assert torch.equal(weight, before[name]) == (not name.startswith("blocks.1.")), name


# --- fp16 -----------------------------------------------------------------------------------------------------------

LOUD, HALF_STEPS = 3, 8  # the step whose loss is out of fp16's range; the number of steps


def fp16_loss(model: Any, batch: Any) -> torch.Tensor:
    inputs, loudness = batch
    return next_token_loss(model, inputs) * loudness


def plain_fp16(batches: list[Any], clip: float, interval: int = 2000) -> tuple[Run, list[float], list[bool]]:
    """An fp32 master, an fp16 copy that computes, and dynamic loss scaling, written out."""
    run, scales, skips = Run(), [], []
    model = tiny(torch.float16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=1e-2)
    scale, good = 2.0**16, 0
    for batch in batches:
        loss = fp16_loss(model, batch)
        (loss * scale).backward()
        run.losses.append(loss.item())
        gradients = [p.grad.float() / scale for p in model.parameters() if p.grad is not None]
        skipped = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        scales.append(scale)
        skips.append(skipped)
        if skipped:
            scale, good = scale / 2, 0
        else:
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient
            nn.utils.clip_grad_norm_(masters, clip)
            optimizer.step()
            good += 1
            if good == interval:
                scale, good = scale * 2, 0
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
        model.zero_grad()
    run.weights = {name: m.detach() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}
    return run, scales, skips


def test_fp16_with_a_dynamic_loss_scale(tmp_path: Path) -> None:
    """Steps are skipped until the scale fits, and once more in the middle; all schedules are bit-identical."""
    batches = [(batch, 1e4 if step == LOUD else 1.0) for step, batch in enumerate(tokens(HALF_STEPS))]
    expected, scales, skips = plain_fp16(batches, clip=1.0)
    memory = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=20.0)
    found = train(tiny(torch.float16), batches, memory, fp16_loss, update="step", max_grad_norm=1.0)
    assert [report.loss_scale for report in found.reports] == scales
    assert [report.skipped for report in found.reports] == skips
    assert skips[LOUD]
    assert 2 <= sum(skips) < HALF_STEPS // 2
    assert worst_difference(found.losses, expected.losses) < 2e-3  # the fp16 weights round, to one part in 2048
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-3)
    for update in ("step", "forward", "speculative"):
        tiers = small_tiers(tiny(torch.float16), tmp_path / update, update)
        other = train(tiny(torch.float16), batches, tiers, fp16_loss, update=update, max_grad_norm=1.0)
        other.check_equal(found)
        assert [(report.loss_scale, report.skipped) for report in other.reports] == list(zip(scales, skips))


def test_state_dict_reads_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, chunk = [], whole._chunk

    def noted(parts: Any, group: Any, first: int) -> torch.Tensor:
        read.append((group.index, first))
        return chunk(parts, group, first)

    monkeypatch.setattr(whole, "_chunk", noted)
    with Engine(tiny(), TierConfig(gpu_memory="16MiB", cpu_memory="16MiB"), AdamWConfig()) as engine:
        assert len(engine.state_dict()) > len(read)
    assert len(set(read)) == len(read) > 1
