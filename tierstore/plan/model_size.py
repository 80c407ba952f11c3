"""The size of a language model: its groups of parameters, in the order of its modules, and the flop of its forward.

Scope: counts from the fields of a Hugging Face `config.json`, or from a bare number of parameters.
Not here: bytes (`plan/memory.py`), and models of other architectures (a model that is built is counted exactly).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import ConfigError, advice_on

_ASPECT = 128  # width over depth if only the size of a model is known: GPT-3 175B has 12288 / 96
_VOCABULARY = 50257  # GPT-2's
_LEAST_PARAMETERS, _MOST_PARAMETERS = 10**6, 10**16
_MOST_LAYERS = 10**4


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that move together: one group of the engine.

    Attributes:
        is_block: one of the repeated blocks, whose activations are kept for backward.
    """

    name: str
    parameters: int
    is_block: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder as the planner sees it.

    Attributes:
        parts: in the order of the modules.
        hidden, heads: width of the residual stream; number of attention heads.
        attention_width: heads times their width, nearly always `hidden`.
        context: the most positions of a sequence; None if there is no bound.
        idle_parameters: parameters that a token is not multiplied with: an embedding that is only looked up, experts
            that the router did not choose.
    """

    name: str
    parts: tuple[Part, ...]
    hidden: int
    heads: int
    attention_width: int
    vocabulary: int
    context: int | None
    idle_parameters: int

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def layers(self) -> int:
        return sum(part.is_block for part in self.parts)

    def forward_flop(self, tokens: float, sequence: int) -> float:
        """Floating-point operations of one forward; backward takes twice as many.

        A token multiplies and adds once with every parameter, and with every position of its sequence in the two
        products of attention: a plain block of 12 H^2 parameters takes 24 b s H^2 flop, and 4 b s^2 H for the
        attention.

        Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM"
        (2021), appendix.
        """
        per_token = 2 * (self.parameters - self.idle_parameters) + 4 * sequence * self.attention_width * self.layers
        return tokens * per_token


def streaming_hides_from_tokens(flop_per_s: float, link_bytes_per_s: float, weight_bytes: int = 2) -> float:
    """Tokens per pass from which computing a block takes longer than fetching its weights.

    24 b s H^2 flop against 24 H^2 bytes in 16 bits: `b s >= flop/s / (bytes/s)`, whatever the width.

    Args:
        weight_bytes: bytes of each parameter.
    """
    return flop_per_s / link_bytes_per_s * weight_bytes / 2


def from_parameters(count: float) -> ModelShape:
    """A plausible decoder of exactly so many parameters: blocks of 12 H^2, of the usual width for this size.

    Raises:
        ConfigError: below a million, above 1e16, or not a number.
    """
    if not _LEAST_PARAMETERS <= count <= _MOST_PARAMETERS:  # False for nan
        raise ConfigError(
            f"a model of {count:g} parameters is not one to plan for: give --params from 1e6 to 1e16, as 70e9"
        )
    total = round(count)
    ideal = (total * _ASPECT / 12) ** (1 / 3)
    hidden = max(128, round(ideal / 128) * 128)
    vocabulary = min(_VOCABULARY, total // (4 * hidden))  # so that a tiny model is not all embedding
    block = 12 * hidden**2
    layers = max(1, round((total - vocabulary * hidden) / block))
    each, left = divmod(total - vocabulary * hidden, layers)
    parts = [Part("embedding", vocabulary * hidden + left)]
    parts += [Part(f"block.{index}", each, is_block=True) for index in range(layers)]
    return ModelShape(
        name=f"{size_name(total)} parameters ({layers} layers of width {hidden}, assumed)", parts=tuple(parts),
        hidden=hidden, heads=hidden // 128, attention_width=hidden, vocabulary=vocabulary, context=None,
        idle_parameters=0,
    )  # fmt: skip


def from_config(values: Mapping[str, Any], name: str = "") -> ModelShape:
    """The decoder that a Hugging Face configuration describes, counted as `transformers` would build it.

    Raises:
        ConfigError: another architecture, a model too large to plan for, or a field that is missing or not a positive
            number.
    """
    kind = values.get("model_type")
    if kind not in _COUNTS:
        advice = advice_on(str(kind), _COUNTS)
        raise ConfigError(
            f"model_type {kind!r} cannot be counted from its configuration ({advice}); give its size: --params 7e9"
        )
    shape = _COUNTS[kind](_Fields(values), name or str(kind))
    if shape.parameters > _MOST_PARAMETERS:
        raise ConfigError(f"the configuration describes more than {_MOST_PARAMETERS:g} parameters; check its numbers")
    return shape


def size_name(parameters: float) -> str:
    """A number of parameters as a person says it: `124M`, `1.5B`, `1T`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            return f"{parameters / unit:.3g}{name}" if parameters < 999.5 * unit else f"{parameters / unit:.0f}{name}"
    return f"{parameters:.0f}"


class _Fields:
    """Fields of a configuration, checked as they are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"the configuration says {name} = {value!r}; it must be a whole number of at least 1")
        return value

    def layers(self, name: str, default: int | None = None) -> int:
        count = self.number(name, default)
        if count > _MOST_LAYERS:
            raise ConfigError(f"the configuration says {name} = {count}; a plan is for at most {_MOST_LAYERS} layers")
        return count

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"the configuration says {name} = {value!r}; it must be true or false")
        return value


def _gpt2(fields: _Fields, name: str) -> ModelShape:
    hidden, layers, heads = fields.number("n_embd", 768), fields.layers("n_layer", 12), fields.number("n_head", 12)
    vocabulary, context = fields.number("vocab_size", 50257), fields.number("n_positions", 1024)
    inner = fields.number("n_inner", 4 * hidden)
    attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
    block = attention + 2 * hidden * inner + inner + hidden + 4 * hidden
    is_tied = fields.flag("tie_word_embeddings", True)
    parts = [Part("transformer.wte", vocabulary * hidden), Part("transformer.wpe", context * hidden)]
    parts += [Part(f"transformer.h.{index}", block, is_block=True) for index in range(layers)]
    parts += [Part("transformer.ln_f", 2 * hidden)]
    parts += [] if is_tied else [Part("lm_head", vocabulary * hidden)]
    idle = context * hidden + (0 if is_tied else vocabulary * hidden)
    return ModelShape(name, tuple(parts), hidden, heads, hidden, vocabulary, context, idle)


def _llama(fields: _Fields, name: str) -> ModelShape:
    everywhere = fields.flag("attention_bias", False)
    return _gated(fields, name, qkv_bias=everywhere, output_bias=everywhere, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: _Fields, name: str) -> ModelShape:
    return _gated(fields, name)


def _qwen2(fields: _Fields, name: str) -> ModelShape:
    return _gated(fields, name, qkv_bias=True)


def _mixtral(fields: _Fields, name: str) -> ModelShape:
    return _gated(
        fields, name, experts=fields.number("num_local_experts", 8), chosen=fields.number("num_experts_per_tok", 2)
    )


def _gated(
    fields: _Fields, name: str, *, qkv_bias: bool = False, output_bias: bool = False, mlp_bias: bool = False,
    experts: int = 0, chosen: int = 0,
) -> ModelShape:  # fmt: skip
    """Llama-like: grouped-query attention, a gated MLP (or a router and `experts` of them), two norms without bias."""
    hidden, layers = fields.number("hidden_size"), fields.layers("num_hidden_layers")
    inner, heads = fields.number("intermediate_size"), fields.number("num_attention_heads")
    key_heads = fields.number("num_key_value_heads", heads)
    width = fields.number("head_dim", max(1, hidden // heads))
    vocabulary, context = fields.number("vocab_size"), fields.number("max_position_embeddings", 4096)
    queried, keyed = heads * width, key_heads * width
    attention = hidden * (queried + 2 * keyed) + queried * hidden
    attention += (queried + 2 * keyed if qkv_bias else 0) + (hidden if output_bias else 0)
    expert = 3 * hidden * inner + (2 * inner + hidden if mlp_bias else 0)
    block = attention + 2 * hidden + (experts * (expert + hidden) if experts else expert)
    parts = [Part("model.embed_tokens", vocabulary * hidden)]
    parts += [Part(f"model.layers.{index}", block, is_block=True) for index in range(layers)]
    parts += [Part("model.norm", hidden)]
    is_tied = fields.flag("tie_word_embeddings", False)
    parts += [] if is_tied else [Part("lm_head", vocabulary * hidden)]
    idle = (0 if is_tied else vocabulary * hidden) + layers * max(experts - chosen, 0) * expert
    return ModelShape(name, tuple(parts), hidden, heads, queried, vocabulary, context, idle)


_COUNTS = {"gpt2": _gpt2, "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "mixtral": _mixtral}
