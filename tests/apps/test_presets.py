from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tierstore.apps import presets
from tierstore.apps.options import Precision, Preset
from tierstore.errors import ConfigError

TINY_LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32,
              "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def _write(path: Path, values: object) -> Path:
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("preset", "millions"),
    [(Preset.P25M, 25.5), (Preset.P124M, 124.4), (Preset.P350M, 354.8), (Preset.P1_5B, 1557.6), (Preset.P7B, 6738.4)],
)
def test_sizes(preset: Preset, millions: float) -> None:
    with torch.device("meta"):
        model = presets.build(presets.preset_configuration(preset), Precision.BF16)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_default_preset_reads_bytes() -> None:
    configuration = presets.preset_configuration(Preset.P25M)
    assert presets.vocabulary_size(configuration) == 256
    assert presets.context_length(configuration) == 256


def test_dropout_is_what_is_asked_everywhere() -> None:
    configuration = presets.prepare(presets.preset_configuration(Preset.P25M), dropout=0.25)
    assert (configuration.resid_pdrop, configuration.embd_pdrop, configuration.attn_pdrop) == (0.25, 0.25, 0.25)
    with torch.device("meta"):
        model = presets.build(configuration, Precision.FP32)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}
    assert presets.prepare(presets.preset_configuration(Preset.P124M), dropout=0.0).resid_pdrop == 0.0


def test_any_causal_lm_configuration(tmp_path: Path) -> None:
    configuration = presets.file_configuration(_write(tmp_path / "config.json", TINY_LLAMA))
    model = presets.build(presets.prepare(configuration, dropout=0.0), Precision.FP32)
    tokens = torch.arange(8)[None]
    assert model(input_ids=tokens, labels=tokens).loss.ndim == 0


def test_code_named_by_a_configuration_is_not_run(tmp_path: Path) -> None:
    values = {**TINY_LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    configuration = presets.file_configuration(_write(tmp_path / "config.json", values))
    assert type(presets.build(configuration, Precision.FP32)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the configuration"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ('{"model_type": "wombat"}', "'wombat', which transformers does not know"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "refuses the configuration"),
    ],
)
def test_a_bad_configuration_is_one_sentence(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        presets.file_configuration(path)
    assert "\n" not in str(caught.value)


def test_an_architecture_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    configuration = presets.file_configuration(_write(tmp_path / "config.json", {"model_type": "resnet"}))
    with pytest.raises(ConfigError, match="no causal language model can be built from this ResNetConfig"):
        presets.build(configuration, Precision.FP32)
    with pytest.raises(ConfigError, match="ResNetConfig has no vocab_size"):
        presets.vocabulary_size(configuration)
