"""Counts of parameters: against transformers' own models, and against well-known sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tierstore.apps import presets
from tierstore.apps.options import Precision, Preset
from tierstore.apps.preset_sizes import PRESET_FIELDS
from tierstore.errors import ConfigError
from tierstore.plan.model_size import (
    ModelShape,
    from_config,
    from_parameters,
    size_name,
    streaming_hides_from_tokens,
)
from tierstore.train.groups import find_groups

_LLAMA = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
          "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 16},
    "gpt2, other inner width": {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 2, "n_inner": 40},
    "gpt2, untied": {"model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 2, "tie_word_embeddings": False},
    "llama": {"model_type": "llama", **_LLAMA},
    "llama, tied, biased": {
        "model_type": "llama", **_LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
    },
    "llama, grouped": {"model_type": "llama", **_LLAMA, "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", **_LLAMA, "num_key_value_heads": 2, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **_LLAMA, "num_key_value_heads": 2},
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_key_value_heads": 2, "num_local_experts": 4},
}  # fmt: skip


def built(values: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    fields = dict(values)
    with torch.device("meta"):
        return presets.build(transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields), Precision.BF16)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_groups_are_those_of_the_engine(name: str) -> None:
    shape = from_config(CONFIGS[name])
    groups = find_groups(built(CONFIGS[name])).groups
    assert [(part.name, part.parameters) for part in shape.parts] == [(g.spec.name, g.spec.size) for g in groups]
    assert shape.layers == CONFIGS[name].get("n_layer", 3)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [(Preset.P124M, 124_439_808), (Preset.P350M, 354_823_168), (Preset.P1_5B, 1_557_611_200),
     (Preset.P7B, 6_738_415_616)],
)  # fmt: skip
def test_presets(preset: Preset, parameters: int) -> None:
    assert from_config(PRESET_FIELDS[preset]).parameters == parameters


def test_published_sizes() -> None:
    mixtral = from_config(
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    )  # fmt: skip
    assert size_name(mixtral.parameters) == "46.7B"
    assert size_name(mixtral.parameters - mixtral.idle_parameters) == "12.7B"  # 12.9B with the looked-up embedding


@pytest.mark.parametrize("count", [1e6, 3e6, 124e6, 7e9, 70e9, 175e9, 500e9, 1e12, 2.5e13])
def test_a_bare_number_is_met_exactly_and_plausibly(count: float) -> None:
    shape = from_parameters(count)
    assert shape.parameters == count
    assert shape.hidden % 128 == 0
    blocks = [part.parameters for part in shape.parts if part.is_block]
    assert blocks
    if count >= 1e8:
        assert min(blocks) == pytest.approx(12 * shape.hidden**2, rel=0.05)
        assert 60 < shape.hidden / shape.layers < 260


def test_flop_of_a_block() -> None:
    shape = from_parameters(500e9)
    tokens, sequence = 4 * 2048, 2048
    blocks = 24 * tokens * shape.hidden**2 + 4 * tokens * sequence * shape.hidden
    assert shape.forward_flop(tokens, sequence) == pytest.approx(shape.layers * blocks, rel=0.05)


def test_streaming_a_block_hides_behind_enough_tokens() -> None:
    # 400 Tflop/s behind 32 GB/s: 12 500 tokens, of a block of any width.
    assert streaming_hides_from_tokens(400e12, 32e9) == 12500
    hidden = 8192
    assert 24 * 12500 * hidden**2 / 400e12 == pytest.approx(2 * 12 * hidden**2 / 32e9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "lama"}, "'lama' cannot be counted .*did you mean llama.*--params"),
        ({"model_type": "resnet"}, "known are gpt2, llama"),
        ({}, "model_type None"),
        ({"model_type": "llama"}, "hidden_size = None; it must be a whole number"),
        ({"model_type": "gpt2", "n_layer": 0}, "n_layer = 0"),
        ({"model_type": "gpt2", "n_layer": 300_000}, "n_layer = 300000; a plan is for at most 10000 layers"),
        ({"model_type": "gpt2", "n_embd": 10**9}, "more than 1e[+]16 parameters"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "n_embd = 'wide'"),
        ({"model_type": "gpt2", "tie_word_embeddings": 1}, "tie_word_embeddings = 1; it must be true or false"),
    ],
)
def test_what_cannot_be_counted(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_config(values)


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan"), float("inf"), 1000.0, 1.1e16])
def test_no_size_of_a_model(count: float) -> None:
    with pytest.raises(ConfigError, match="give --params from 1e6"):
        from_parameters(count)


def test_sizes_are_said_as_people_say_them() -> None:
    sizes = (124_439_808, 1_557_611_200, 1e12, 999.9e9, 7)
    assert [size_name(size) for size in sizes] == ["124M", "1.56B", "1T", "1T", "7"]
    assert isinstance(from_parameters(1e9), ModelShape)
