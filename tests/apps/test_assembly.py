"""Models as `train` builds them: no weights in memory, but the values of ordinary construction or of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.apps import presets
from tierstore.apps.assembly import Parts, assemble
from tierstore.apps.options import Precision, TrainOptions
from tierstore.errors import FormatError

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path / "config.json"


def _assemble(**values: Any) -> Parts:
    return assemble(TrainOptions(dtype=Precision.FP32, seed=7, **values))


def _streamed(parts: Parts) -> dict[str, torch.Tensor]:
    values = {name: torch.empty(held.numel(), dtype=held.dtype) for name, held in parts.model.named_parameters()}
    for name, start, piece in parts.source.stream():
        values[name][start : start + piece.numel()] = piece
    return values


def test_a_new_model_is_built_without_weights_and_gets_those_of_its_seed(config: Path) -> None:
    parts = _assemble(config=config)
    assert all(parameter.is_meta for parameter in parts.model.parameters())
    assert parts.model.training
    values = _streamed(parts)
    torch.manual_seed(7)
    expected = presets.build(presets.prepare(presets.file_configuration(config), dropout=0.0), Precision.FP32)
    assert all(torch.equal(values[name], held.reshape(-1)) for name, held in expected.named_parameters())


def test_a_checkpoint_gives_its_weights(config: Path, tmp_path: Path) -> None:
    saved = presets.build(presets.file_configuration(config), Precision.FP32)
    saved.save_pretrained(tmp_path / "saved")
    values = _streamed(_assemble(checkpoint=tmp_path / "saved"))
    assert all(torch.equal(values[name], held.reshape(-1)) for name, held in saved.named_parameters())


def test_a_checkpoint_of_another_shape_names_the_tensor(config: Path, tmp_path: Path) -> None:
    saved = presets.build(presets.file_configuration(config), Precision.FP32)
    saved.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**TINY, "n_inner": 24}))
    with pytest.raises(FormatError, match=r"h\.0\.mlp\.c_fc\.weight"):
        _assemble(checkpoint=tmp_path / "saved").source.names()
