"""Every exact schedule and every placement gives the same losses and weights, bit for bit."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, disk, next_token_loss, smallest_budgets, tiny, tokens, train

from tierstore.config import Tier, TierConfig
from tierstore.device.transfers import CpuDevice
from tierstore.plan.placement import Placement
from tierstore.store import updates
from tierstore.store.updates import UpdatePipeline
from tierstore.train.rounds import Speculation

STEPS = 4
CLIP = 10.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Loud and quiet batches in turn: with CLIP between their norms every other step is clipped.
LOUDNESS = (3.0, 0.05)

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def model_of(dtype: str) -> torch.nn.Module:
    return tiny(DTYPES[dtype], dropout=0.1)


def batches(accumulate: int = 1) -> list[Any]:
    """The batches of a whole run, which has three steps if a step has several batches."""
    count = STEPS if accumulate == 1 else 3 * accumulate
    return list(zip(tokens(count), itertools.cycle(LOUDNESS)))


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, loudness = batch
    return next_token_loss(model, inputs) * loudness


@pytest.fixture(autouse=True)
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of the tests: whether gradients and weights must be copied, as from and to a GPU."""
    if getattr(request, "param", False):
        monkeypatch.setattr(CpuDevice, "in_place", lambda *_: None)
        monkeypatch.setattr(CpuDevice, "address_of", lambda *_: None)


@cache
def reference(dtype: str, clip: float | None, accumulate: int = 1) -> Run:
    """Everything in CPU memory, all updates inside step(), all copied."""
    tiers = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=60.0)
    options: dict[str, Any] = {"update": "step", "max_grad_norm": clip, "accumulate": accumulate}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "in_place", lambda *_: None)
        patch.setattr(CpuDevice, "address_of", lambda *_: None)
        return train(model_of(dtype), batches(accumulate), tiers, loss_of, **options)


@cache
def budgets(dtype: str, update: str, chunk_bytes: int | None = None) -> tuple[int, int]:
    return smallest_budgets(model_of(dtype), nvme=["unused"], update=update, chunk_bytes=chunk_bytes)


def tiers_for(placement: str, dtype: str, update: str, tmp_path: Path, **options: Any) -> TierConfig:
    """Budgets that put everything, a part, or nothing into CPU memory; the device never has room for all groups."""
    gpu, cpu = budgets(dtype, update, options.get("chunk_bytes"))
    if options.get("codec"):
        cpu += 2**20
    if placement == "memory":
        return TierConfig(gpu_memory=gpu, cpu_memory="64MiB", timeout_s=60.0, **options)
    memory = {"memory+store": 2**26, "mixed": cpu + 3 * 2**20, "disk": cpu}[placement]
    return disk(tmp_path, gpu_memory=gpu, cpu_memory=memory, **options)


def on_disk(placement: Placement) -> float:
    """The share of the chunks of weights and state that are not in CPU memory."""
    groups = range(len(placement.groups))
    state = sum(placement.chunk_count(g) - placement.state_resident_chunks[g] for g in groups)
    weights = sum(placement.chunk_count(g) for g in groups if placement.weights_home[g] is Tier.NVME)
    return (state + weights) / (2 * sum(placement.chunk_count(g) for g in groups))


def check_placement(name: str, placement: Placement) -> None:
    share = on_disk(placement)
    if name == "disk":
        assert share == 1.0
    elif name == "mixed":
        assert 0 < share < 1
    else:
        assert share == 0


@pytest.mark.parametrize(
    ("placement", "update", "dtype", "apart"),
    [
        ("memory", "forward", "fp32", False), ("memory", "backward", "bf16", True),
        ("memory+store", "step", "bf16", False), ("memory+store", "forward", "bf16", True),
        ("memory+store", "speculative", "fp32", False), ("memory+store", "backward", "fp32", True),
        ("mixed", "step", "fp32", True), ("mixed", "forward", "fp32", False),
        ("mixed", "speculative", "bf16", True), ("mixed", "backward", "bf16", False),
        ("disk", "step", "bf16", False), ("disk", "forward", "bf16", True),
        ("disk", "speculative", "fp32", False), ("disk", "backward", "fp32", True),
    ],
    indirect=["apart"],
)  # fmt: skip
def test_placement_and_schedule_change_no_bit(placement: str, update: str, dtype: str, tmp_path: Path) -> None:
    clip = None if update == "backward" else CLIP
    seen: list[Placement] = []
    run = train(
        model_of(dtype), batches(), tiers_for(placement, dtype, update, tmp_path), loss_of, update=update,
        max_grad_norm=clip, after=lambda engine, step: seen.append(engine.placement),
    )  # fmt: skip
    check_placement(placement, seen[0])
    assert run.moved["h2d"] > STEPS * 4 * 2**16  # groups really came and went
    run.check_equal(reference(dtype, clip))


@pytest.mark.parametrize("update", ["step", "forward", "backward", "speculative"])
def test_a_cpu_copies_nothing_but_what_it_loads(update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are read and weights written where the model has them, also those at home on the disk."""
    clip = None if update == "backward" else CLIP
    expected = reference("bf16", clip)
    copied: dict[str, list[int]] = {"in": [], "out": []}
    copy_in, run_adam = CpuDevice.copy_in, updates.run_adam
    monkeypatch.setattr(CpuDevice, "copy_in", lambda *given: copied["in"].append(1) or copy_in(*given))
    monkeypatch.setattr(CpuDevice, "copy_out", lambda *_: copied["out"].append(1))
    monkeypatch.setattr(CpuDevice, "copy_out_ranges", lambda *_: copied["out"].append(1))
    updated: list[bool] = []
    monkeypatch.setattr(
        updates,
        "run_adam",
        lambda *given, copy, **rest: updated.append(copy is not None) or run_adam(*given, copy=copy, **rest),
    )
    _, cpu = budgets("bf16", update)
    tiers = disk(tmp_path, gpu_memory="8MiB", cpu_memory=cpu)
    run = train(model_of("bf16"), batches(), tiers, loss_of, update=update, max_grad_norm=clip)
    run.check_equal(expected)
    assert copied["out"] == []
    assert all(updated)
    assert 0 < len(copied["in"]) < len(updated) / 2  # each chunk once, when the run begins


def wrong_guesses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one whenever a round is redone."""
    found: list[int] = []
    redo = UpdatePipeline.redo

    async def counted(self: UpdatePipeline, *args: Any) -> Any:
        found.append(1)
        return await redo(self, *args)

    monkeypatch.setattr(UpdatePipeline, "redo", counted)
    return found


@pytest.mark.parametrize(
    ("clip", "enough", "wrong", "dtype", "apart"),
    [
        (CLIP, 0, 1, "bf16", True), (1e-2, 0, 3, "fp32", False), (1e-2, 1, 0, "bf16", False),
        (1e4, 3, 0, "fp32", True),
    ],
    indirect=["apart"],
)  # fmt: skip
def test_speculation_is_exact_however_often_it_fails(
    clip: float, enough: int, wrong: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other guess is wrong; all are; all would be, so none is made; none is. The first step never guesses."""
    redone = wrong_guesses(monkeypatch)
    monkeypatch.setattr(Speculation, "least", enough)
    tiers = tiers_for("disk", dtype, "speculative", tmp_path)
    run = train(model_of(dtype), batches(), tiers, loss_of, update="speculative", max_grad_norm=clip)
    run.check_equal(reference(dtype, clip))
    assert len(redone) == wrong


@pytest.mark.parametrize(
    ("clipped_every", "guesses", "wrong"), [(2, 2, 1), (6, 6, 1), (12, 18, 3), (20, 188, 15), (100, 284, 3)]
)
def test_speculation_ends_where_clipping_is_frequent(clipped_every: int, guesses: int, wrong: int) -> None:
    """Of 300 steps, `guesses` are guessed, `wrong` of them wrongly."""
    speculation, seen = Speculation(), []
    for step in range(1, 301):
        is_right = step % clipped_every > 0
        is_guessed = speculation.should_try()
        seen.append((is_guessed, is_right))
        speculation.was(is_right, is_guessed=is_guessed)
    assert (sum(tried for tried, _ in seen), seen.count((True, False))) == (guesses, wrong)


@pytest.mark.parametrize(("update", "apart"), [("forward", False), ("speculative", True)], indirect=["apart"])
def test_without_clipping_all_schedules_equal_backward(update: str, tmp_path: Path) -> None:
    run = train(model_of("fp32"), batches(), tiers_for("disk", "fp32", update, tmp_path), loss_of, update=update)
    run.check_equal(reference("fp32", None))


@pytest.mark.parametrize(
    ("update", "dtype", "chunk_bytes", "blocks", "placement", "update_threads", "apart"),
    [
        ("forward", "fp32", 2**19, 1, "mixed", 3, True), ("speculative", "bf16", 2**19, 1, "mixed", 3, False),
        ("forward", "fp32", 3 * 2**19, 2, "memory+store", 1, False),
        ("speculative", "bf16", 3 * 2**19, 2, "memory+store", 3, True),
        ("backward", "bf16", 3 * 2**19, 2, "memory+store", 3, False),
    ],
    indirect=["apart"],
)  # fmt: skip
def test_threads_and_chunk_size_change_no_bit(
    update: str, dtype: str, chunk_bytes: int, blocks: int, placement: str, update_threads: int, tmp_path: Path
) -> None:
    clip = None if update == "backward" else CLIP
    tiers = tiers_for(placement, dtype, update, tmp_path, chunk_bytes=chunk_bytes, update_threads=update_threads)
    chunks: list[int] = []
    run = train(
        model_of(dtype), batches(), tiers, loss_of, update=update, max_grad_norm=clip,
        after=lambda engine, step: chunks.append(engine.placement.chunk_elements),
    )  # fmt: skip
    assert chunks[0] == blocks * 2**16
    run.check_equal(reference(dtype, clip))


@pytest.mark.parametrize(
    ("update", "codec", "dtype", "apart"),
    [
        ("step", "lz4", "fp32", True), ("forward", "lz4", "bf16", False),
        ("speculative", "lz4-bitshuffle", "bf16", False), ("backward", "zstd-bitshuffle", "fp32", True),
    ],
    indirect=["apart"],
)  # fmt: skip
def test_a_codec_changes_no_bit(update: str, codec: str, dtype: str, tmp_path: Path) -> None:
    clip = None if update == "backward" else CLIP
    tiers = tiers_for("mixed", dtype, update, tmp_path, codec=codec, chunk_bytes=2**19)
    run = train(model_of(dtype), batches(), tiers, loss_of, update=update, max_grad_norm=clip)
    run.check_equal(reference(dtype, clip))


@pytest.mark.parametrize(
    ("placement", "update", "dtype", "apart"),
    [
        ("memory", "forward", "fp32", True), ("memory", "backward", "bf16", False), ("disk", "step", "fp32", True),
        ("disk", "forward", "bf16", False), ("disk", "speculative", "bf16", True), ("disk", "backward", "fp32", False),
    ],
    indirect=["apart"],
)  # fmt: skip
def test_accumulated_gradients_change_no_bit(placement: str, update: str, dtype: str, tmp_path: Path) -> None:
    """Three micro-batches a step; on disk the gradients are spilled and added to there."""
    clip = None if update == "backward" else CLIP
    homes: list[Any] = []
    tiers = tiers_for(placement, dtype, update, tmp_path)
    run = train(
        model_of(dtype), batches(accumulate=3), tiers, loss_of, update=update, max_grad_norm=clip, accumulate=3,
        after=lambda engine, step: homes.append(engine.placement.gradient_home),
    )  # fmt: skip
    assert (Tier.NVME in homes[0]) == (placement == "disk")
    run.check_equal(reference(dtype, clip, accumulate=3))


@pytest.mark.parametrize(
    ("update", "options", "apart"),
    [
        ("forward", {"commit_every": 3}, False),
        ("backward", {"commit_every": 3}, True),
        ("backward", {"durability": "none"}, False),
        ("speculative", {"overlap": False}, True),
    ],
    indirect=["apart"],
)
def test_commits_and_overlap_change_no_bit(update: str, options: dict[str, Any], tmp_path: Path) -> None:
    clip = None if update == "backward" else CLIP
    tiers = tiers_for("mixed", "bf16", update, tmp_path)
    run = train(model_of("bf16"), batches(), tiers, loss_of, update=update, max_grad_norm=clip, **options)
    run.check_equal(reference("bf16", clip))
