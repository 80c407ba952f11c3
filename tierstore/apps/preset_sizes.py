"""The presets, as the fields of a Hugging Face configuration.

Scope: numbers only, so that a plan is made without importing what builds the models.
Not here: the models (`apps/presets.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierstore.apps.options import Preset


def _gpt2(vocabulary: int, layers: int, width: int, heads: int, context: int) -> Mapping[str, Any]:
    ends = {"bos_token_id": 0, "eos_token_id": 0} if vocabulary == 256 else {}
    sizes = {"vocab_size": vocabulary, "n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": context}
    return {"model_type": "gpt2", **sizes, **ends}


PRESET_FIELDS: Mapping[Preset, Mapping[str, Any]] = {
    # The GPT-2 family. Source of 124m, 350m and 1.5b: Radford et al., "Language Models are Unsupervised Multitask
    # Learners" (2019), table 2. 25m reads bytes: 25.5 million parameters.
    Preset.P25M: _gpt2(256, 8, 512, 8, 256),
    Preset.P124M: _gpt2(50257, 12, 768, 12, 1024),
    Preset.P350M: _gpt2(50257, 24, 1024, 16, 1024),
    Preset.P1_5B: _gpt2(50257, 48, 1600, 25, 1024),
    # Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), the 7B model.
    Preset.P7B: {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
    },
}  # fmt: skip
