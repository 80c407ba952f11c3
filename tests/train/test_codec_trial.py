"""codec="auto": measured when the store is made, recorded, and without any effect on results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from runs import disk, next_token_loss, tiny, tokens, train
from torch import nn

from tierstore.config import Codec, TierConfig
from tierstore.errors import ConfigError
from tierstore.pack.codec_rates import measure_codec
from tierstore.plan.bandwidth import BandwidthTable
from tierstore.plan.codec_choice import CodecChoice
from tierstore.plan.placement import Kind
from tierstore.store.layout import GroupSpec, ParameterSpec
from tierstore.train import codec_trial
from tierstore.train.engine import Engine
from tierstore.train.filling import Piece

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def rates(disk_bytes_per_s: float) -> BandwidthTable:
    return BandwidthTable(disk_bytes_per_s, disk_bytes_per_s, disk_bytes_per_s, 1e10, 1e10, 1e10, 1e9)


def auto(tmp_path: Path, disk_bytes_per_s: float, **options: Any) -> TierConfig:
    return disk(
        tmp_path, gpu_memory="1MiB", cpu_memory="6MiB", codec="auto", bandwidth=rates(disk_bytes_per_s), **options
    )


@pytest.mark.parametrize("disk_bytes_per_s", [1e5, 1e13])
def test_auto_decides_by_the_disk_and_changes_no_bit(disk_bytes_per_s: float, tmp_path: Path) -> None:
    batches = tokens(4)
    expected = train(tiny(torch.bfloat16), batches, TierConfig(cpu_memory="64MiB"), next_token_loss, update="step")
    decided: list[Any] = []
    run = train(
        tiny(torch.bfloat16), batches, auto(tmp_path, disk_bytes_per_s), next_token_loss, update="step",
        after=lambda engine, step: decided.append(engine.statistics()["codecs"]),
    )  # fmt: skip
    run.check_equal(expected)
    chosen = {kind: choice["codec"] for kind, choice in decided[0].items()}
    if disk_bytes_per_s == 1e13:
        assert set(chosen.values()) == {"none"}
    else:
        assert set(chosen.values()) <= {"lz4-bitshuffle", "zstd-bitshuffle"}
        assert "x as fast as the raw disk: ratio 1." in decided[0]["state"]["why"]
    assert set(chosen) == {"weights", "gradients", "state"}


def test_a_resumed_store_keeps_what_was_decided(tmp_path: Path) -> None:
    def decided(disk_bytes_per_s: float, resume: str) -> Any:
        engine = Engine(tiny(torch.bfloat16), auto(tmp_path, disk_bytes_per_s), update="step", resume=resume)
        with engine:
            return engine.statistics()["codecs"]

    first = decided(1e5, "never")
    assert decided(1e13, "must") == first
    with pytest.raises(ConfigError, match="made with codec 'auto', not 'none'; give the same codec"):
        Engine(tiny(torch.bfloat16), disk(tmp_path, gpu_memory="1MiB", cpu_memory="6MiB"), resume="must")


def test_without_a_table_the_disk_is_measured_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_trial, "_FILE_BYTES", 2**23)
    monkeypatch.setattr(codec_trial, "_LOOK_S", 0.001)
    tiers = auto(tmp_path, 1e9).model_copy(update={"bandwidth": None, "nvme": (tmp_path / "new" / "store",)})
    with Engine(tiny(torch.bfloat16), tiers, update="step") as engine:
        assert "the disk reads" in engine.statistics()["codecs"]["weights"]["why"]
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
        assert {path.name.split(".")[0].split("-")[0] for path in (tmp_path / "new" / "store").iterdir()} <= {
            "weights", "state", "gradients", "manifest", "captured", "lock", "unfinished",
        }  # fmt: skip


def test_without_a_store_there_is_nothing_to_measure() -> None:
    with Engine(tiny(), TierConfig(cpu_memory="64MiB", codec="auto"), update="step") as engine:
        assert engine.statistics()["codecs"]["state"] == {"codec": "none", "why": "nothing is stored"}


def test_the_sample_takes_no_weight_away() -> None:
    pieces = [Piece(str(i), 0, torch.full((2**18 + i,), float(i))) for i in range(9)]
    coming, taken = iter(pieces), deque[Piece]()
    sample = codec_trial._sample(coming, taken)
    assert sample.size == 2**20
    assert np.unique(sample).tolist() == [0, 1, 2, 3]
    assert [piece.name for piece in codec_trial._again(taken, coming)] == [piece.name for piece in pieces]


def test_a_source_may_give_weights_as_torch_has_them() -> None:
    """Those of another model, which need gradients, or the imaginary part of a conjugate."""
    weights = [nn.Parameter(torch.full((2,), 3.0)), torch.full((2,), 1 + 2j).conj().imag]
    assert (weights[0].requires_grad, weights[1].is_neg()) == (True, True)
    pieces = [Piece(str(number), 0, values) for number, values in enumerate(weights)]
    assert codec_trial._sample(iter(pieces), deque[Piece]()).tolist() == [3.0, 3.0, -2.0, -2.0]


@pytest.mark.parametrize(
    ("kind", "dtype", "item_bytes", "low", "high"),
    [
        (Kind.WEIGHTS, "bf16", 2, 1.30, 1.34),
        (Kind.WEIGHTS, "fp32", 4, 1.12, 1.16),
        (Kind.STATE, "bf16", 4, 1.10, 1.14),
        (Kind.STATE, "fp32", 4, 1.13, 1.17),
        (Kind.GRADIENTS, "bf16", 2, 1.30, 1.36),
    ],
)
def test_what_is_tried_compresses_as_trained_state_does(
    kind: Kind, dtype: str, item_bytes: int, low: float, high: float
) -> None:
    """The bounds enclose the ratios of GPT-2 after 45 steps, see [Note: what is tried]."""
    master = (np.random.default_rng(5).standard_normal(2**17) * 0.02).astype(np.float32)
    sample = codec_trial.like_trained(kind, dtype, master)
    assert low <= measure_codec(Codec.LZ4_BITSHUFFLE, item_bytes, [sample], dtype).ratio <= high


def test_what_is_zero_at_first_is_not_counted_on_unless_it_stays() -> None:
    zeros = np.zeros(2**17, np.float32)
    ratios = [
        measure_codec(
            Codec.LZ4_BITSHUFFLE, 2, [codec_trial.like_trained(Kind.WEIGHTS, "bf16", zeros, is_frozen=is_frozen)], ""
        ).ratio
        for is_frozen in (False, True)
    ]
    assert ratios[0] < 1.5
    assert ratios[1] > 1000


class Follower:
    """The second of two ranks."""

    is_first = False

    def all_succeed(self, what: str, work: Callable[[], Any]) -> list[Any]:
        return [{kind: CodecChoice(Codec.LZ4, "rank 0 says so") for kind in Kind}, work()]


def test_rank_0_decides_for_all(tmp_path: Path) -> None:
    pieces = iter([Piece("w", 0, torch.ones(3))])
    spec = GroupSpec("g", "fp32", True, (ParameterSpec("w", (3,), 0),))
    follower, runtime = cast(Any, Follower()), cast(Any, None)
    tiers = auto(tmp_path, 1e5)
    chosen, rest = codec_trial.codecs_of(tiers, None, pieces, [spec], follower, runtime, lambda: 0.0)
    assert {choice.why for choice in chosen.values()} == {"rank 0 says so"}
    assert [piece.name for piece in rest] == ["w"]


def test_a_frozen_model_has_a_codec_too() -> None:
    spec = GroupSpec("g", "bf16", False, (ParameterSpec("w", (2**17,), 0),))
    master = np.random.default_rng(5).standard_normal(2**17).astype(np.float32)
    tiers = TierConfig(nvme=["unused"], codec="auto")
    chosen = codec_trial._choose(master, [spec], tiers, (1e5, 1e5), iter(range(1000)).__next__)
    assert set(chosen) == set(Kind)
