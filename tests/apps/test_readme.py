"""The README's snippets run as they stand, except for their directories, device and length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from readme_snippets import engine_of_ranks, reducer_of_ranks, run_snippet

from tierstore.apps import presets
from tierstore.apps.options import Precision
from tierstore.config import AdamWConfig, TierConfig
from tierstore.train.engine import Engine

TINY = {"vocab_size": 256, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 0}  # fmt: skip


def test_the_loop_exports_a_model_that_can_be_loaded(disk_path: Path) -> None:
    model = presets.build(transformers.GPT2Config(**TINY), Precision.FP32)
    tokens = torch.randint(0, 256, (2, 16))
    batch_of = lambda step: {"input_ids": tokens, "labels": tokens}  # noqa: E731
    changes = {'"cuda"': '"cpu"', "8GiB": "8MiB", "32GiB": "32MiB", "/mnt/nvme0": str(disk_path), "1000": "2",
               "out/": f"{disk_path}/out"}  # fmt: skip
    run_snippet("save_pretrained", changes, {"model": model, "batch_of": batch_of})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(disk_path / "out")
    assert torch.isfinite(loaded(input_ids=tokens, labels=tokens).loss)


class Data:
    """Batches, and how many were taken."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> dict[str, torch.Tensor]:
        self.taken += 1
        tokens = torch.full((2, 16), self.taken)
        return {"input_ids": tokens, "labels": tokens}

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def test_a_loop_with_all_that_a_loop_has(disk_path: Path, capsys: Any) -> None:
    for steps in (2, 4):
        names: dict[str, Any] = {
            "torch": torch, "Engine": Engine, "AdamWConfig": AdamWConfig, "data": Data(), "held_out": Data().next(),
            "tiers": TierConfig(nvme=[disk_path / "store"]),
            "model": presets.build(transformers.GPT2Config(**TINY), Precision.FP32),
        }  # fmt: skip
        run_snippet("warm_up", {"1000": str(steps), "% 100": "% 2"}, names)
        assert names["data"].taken == 4 * steps
        told = capsys.readouterr().out.splitlines()
        assert [line.partition(":")[0].partition(" ")[0] for line in told] == [str(steps - 1), str(steps), "held"]
        assert names["report"].lr == pytest.approx([3e-4 * steps / 100] * 2)


def test_a_model_that_is_too_large_to_construct() -> None:
    names: dict[str, Any] = {"MyModel": lambda width: torch.nn.Linear(width, width), "config": 8, "Engine": Engine}
    names["tiers"] = TierConfig()
    run_snippet("tierstore.deferred", {}, names)
    with names["engine"] as engine:
        assert engine.state_dict()["weight"].abs().max() > 0


def test_the_store_without_a_model(disk_path: Path, capsys: Any) -> None:
    run_snippet("TensorStore", {"/mnt/nvme0": str(disk_path)}, {})
    assert capsys.readouterr().out.splitlines() == ["gpu 0 0 0%", "cpu 1 262144 25%", "nvme 3 786432 75%"]


def test_the_loop_of_several_ranks(disk_path: Path) -> None:
    assert run_ranks(2, engine_of_ranks, str(disk_path)) == [3, 3]
    assert (disk_path / "out" / "model.safetensors").exists()


def test_gradients_without_offload(tmp_path: Path) -> None:
    assert "2 steps, median" in run_ranks(2, reducer_of_ranks, str(tmp_path))[0]
    assert (tmp_path / "0.json").exists()


def test_batches_ahead(disk_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.randn(6, 8), batch_size=2)
    with Engine(torch.nn.Linear(8, 8), TierConfig(nvme=[disk_path / "store"])) as engine:
        run_snippet("PrefetchingLoader", {}, {"loader": loader, "device": "cpu", "engine": engine})
        assert engine.step_count == 3
