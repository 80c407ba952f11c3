from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

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


TINY = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 40}  # fmt: skip
OTHER_NAMES: list[dict[str, Any]] = [
    TINY | {"model_type": "biogpt"},
    TINY | {"model_type": "bert", "is_decoder": True},
    TINY | {"model_type": "roberta", "is_decoder": True, "attention_probs_dropout_prob": 0.2},
    TINY | {"model_type": "gpt_neo", "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    {"model_type": "mpt", "vocab_size": 256, "d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 32},
]  # fmt: skip


@pytest.mark.parametrize("values", OTHER_NAMES, ids=lambda values: values["model_type"])
def test_dropout_is_found_by_the_many_names_that_it_has(tmp_path: Path, values: dict[str, Any]) -> None:
    given = presets.file_configuration(_write(tmp_path / "config.json", values))
    tokens = torch.arange(8)[None]

    def trained(dropout: float) -> tuple[set[float], set[float]]:
        """The rates in the model, and what it computes twice."""
        model = presets.build(presets.prepare(copy.deepcopy(given), dropout=dropout), Precision.FP32).train()
        rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        return rates, {model(input_ids=tokens, labels=tokens).loss.item() for _ in range(2)}

    rates, found = trained(0.0)
    assert (rates | {0.0}, len(found)) == ({0.0}, 1)
    rates, found = trained(0.25)
    assert (rates | {0.25}, len(found)) == ({0.25}, 2)


@pytest.mark.parametrize("kind", ["roberta", "camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta",
                                  "xlm-roberta-xl", "xmod", "bert"])  # fmt: skip
def test_a_model_runs_at_its_context_and_not_beyond(tmp_path: Path, kind: str) -> None:
    """Positions of most of these begin after the number of their padding."""
    values = TINY | {"model_type": kind, "is_decoder": True, "pad_token_id": 3, "default_language": "en_XX"}
    given = presets.file_configuration(_write(tmp_path / "config.json", values))
    model, context = presets.build(given, Precision.FP32), presets.context_length(given)
    assert context is not None
    model(input_ids=torch.full((1, context), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, context + 1), 7))


def test_only_rates_are_set_to_the_dropout() -> None:
    configuration = presets.preset_configuration(Preset.P25M)
    configuration.classifier_dropout, configuration.has_dropout, configuration.layerdrop = None, True, 0.1
    presets.prepare(configuration, dropout=0.25)
    assert (configuration.classifier_dropout, configuration.has_dropout, configuration.layerdrop) == (None, True, 0.1)


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
