"""Models from a name, a configuration file, or a local checkpoint; never from the network.

Scope: Hugging Face configurations and the construction of a causal language model from one.
Not here: the sizes of presets (`apps/preset_sizes.py`), and where the built weights are put (`train/materialize.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tierstore.apps.options import Precision, Preset
from tierstore.apps.preset_sizes import PRESET_FIELDS
from tierstore.errors import ConfigError, first_line
from tierstore.garbage import loading

_BEGIN_AFTER_PADDING = {
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"
}  # fmt: skip
"""Causal LMs of `transformers` whose first position is the number of their padding token + 1."""
_TORCH_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}


def preset_configuration(preset: Preset) -> Any:
    """The `transformers` configuration of a preset."""
    fields = dict(PRESET_FIELDS[preset])
    return _transformers().CONFIG_MAPPING[fields.pop("model_type")](**fields)


def file_configuration(path: Path) -> Any:
    """The configuration in a `config.json`, of any architecture that `transformers` knows as a causal LM.

    Code that the file points to is never run.

    Raises:
        ConfigError: no such file, not JSON, an unknown architecture, or values that it refuses.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the configuration {path} is not JSON: {error}") from None
    if not isinstance(values, Mapping) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"the configuration {path} names no model_type, so its architecture is unknown")
    transformers = _transformers()
    kind = values["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"the configuration {path} has model_type {kind!r}, which transformers does not know")
    plain = {key: value for key, value in values.items() if key != "auto_map"}
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(plain)
    except Exception as error:  # the classes validate with their own exceptions, which have no common base
        raise ConfigError(f"transformers refuses the configuration {path}: {first_line(error)}") from None


def prepare(configuration: Any, *, dropout: float) -> Any:
    """Sets what training needs on a configuration: the dropout everywhere, no cache for generation; returns it."""
    _set_dropout(configuration, dropout)
    configuration.use_cache = False
    configuration.loss_type = "ForCausalLM"
    return configuration


def _set_dropout(configuration: Any, dropout: float) -> None:
    """Set every rate of dropout, also in the configurations of parts; each architecture names its rates differently.

    Those of whole layers ("layerdrop") stay.
    """
    values = vars(configuration)
    for name, value in values.items():
        if hasattr(value, "get_text_config"):
            _set_dropout(value, dropout)
        elif ("dropout" in name or name.endswith("pdrop")) and type(value) in (int, float):
            values[name] = dropout  # not by setattr: some configurations declare that a rate is an int


def described(configuration: Any) -> dict[str, Any]:
    """What a configuration says of the model, by names for a person; not where it is from."""
    origin = ("_name_or_path", "transformers_version")
    return {f"{key} of the model": value for key, value in configuration.to_dict().items() if key not in origin}


def build(configuration: Any, precision: Precision) -> nn.Module:
    """A causal language model with new weights, on the current default device (which may be meta).

    Raises:
        ConfigError: the architecture is no causal language model, or its sizes do not fit together.
    """
    transformers = _transformers()
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            configuration, dtype=_TORCH_DTYPES[precision], trust_remote_code=False
        )
    except Exception as error:  # the classes validate with their own exceptions, which have no common base
        name = type(configuration).__name__
        raise ConfigError(f"no causal language model can be built from this {name}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{type(model).__name__} is not a torch module")
    return model


def context_length(configuration: Any) -> int | None:
    """Positions that the model can tell apart; None when the configuration sets no bound."""
    text = _text(configuration)
    value = getattr(text, "max_position_embeddings", None)
    if not isinstance(value, int) or value <= 0:
        return None
    return value - ((text.pad_token_id or 0) + 1 if text.model_type in _BEGIN_AFTER_PADDING else 0)


def vocabulary_size(configuration: Any) -> int:
    """Number of token ids.

    Raises:
        ConfigError: the configuration has none.
    """
    value = getattr(_text(configuration), "vocab_size", None)
    if not isinstance(value, int):
        raise ConfigError(f"{type(configuration).__name__} has no vocab_size: it is not a language model")
    return value


def _text(configuration: Any) -> Any:
    return configuration.get_text_config() if hasattr(configuration, "get_text_config") else configuration


@functools.cache
def _transformers() -> ModuleType:
    try:
        with loading():
            import transformers
            from transformers import PreTrainedModel  # noqa: F401  # most of what a model needs, loaded when asked for
    except ImportError:
        raise ConfigError(
            "models come from the package transformers, which is not installed: pip install 'tierstore[transformers]'"
        ) from None
    module: ModuleType = transformers
    module.logging.set_verbosity_error()
    return module
