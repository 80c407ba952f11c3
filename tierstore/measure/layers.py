"""Layers of a decoder, computed on the CPU: the seconds of forward and of backward.

Scope: a block and a head of several sizes, and their times.
Not here: what follows for a model (`plan/layers.py`), the device's large products (`links.py`).

Operations are those of GPT-2, in its order. Gradients go to new memory each time, because an engine takes them away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer

_HEAD_WIDTH = 64
_SHAPES = ((256, 32), (256, 256), (768, 32), (768, 256), (768, 1024))  # hidden, tokens
_HEAD_SHAPES = _SHAPES[:4]
_VOCABULARY = 16384
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Dtypes of the weights, the most used first."""
_SCALE = 0.02  # of weights, so that activations keep about their size


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer on some tokens.

    Attributes:
        leaves: tensors whose gradients backward makes.
    """

    kind: LayerKind
    dtype: str
    work: LayerWork
    forward: Callable[[], torch.Tensor]
    leaves: Sequence[torch.Tensor]

    def run(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Runs both passes, and returns the seconds of each."""
        begun_s = clock()
        result = self.forward()
        middle_s = clock()
        torch.autograd.backward(result, torch.ones_like(result))
        ended_s = clock()
        for leaf in self.leaves:
            leaf.grad = None
        return middle_s - begun_s, ended_s - middle_s


def time_layers(
    dtypes: Sequence[str],
    rounds: int,
    longest_s: float,
    tell: Callable[[str], None] = lambda name: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[TimedLayer, ...]:
    """Median times over so many rounds, of all layers that do not take too long, after a round that does not count.

    All layers run on the calling thread, as in a training loop: memory that a new thread touches for the first time
    costs more than the computing.

    Args:
        longest_s: limit for both passes over a layer. Where torch has no fast products of a dtype (bf16 on a processor
            with AVX2 alone: 1.2 Gflop/s), the largest layer would take a minute; the smallest is timed however long it
            takes.
    """

    def run(layer: Layer) -> tuple[float, float]:
        tell(f"{layer.kind.value} of a model")
        return layer.run(clock)

    found = _short_enough(layers(dtypes), longest_s, run)
    seen: list[list[tuple[float, float]]] = [[] for _ in found]
    for _ in range(rounds):
        for layer, times in zip(found, seen):
            times.append(run(layer))
    return tuple(
        TimedLayer(one.kind, one.dtype, one.work, *(statistics.median(each) for each in zip(*times)))
        for one, times in zip(found, seen)
    )


def _short_enough(
    found: Sequence[Layer], longest_s: float, run: Callable[[Layer], tuple[float, float]]
) -> Sequence[Layer]:
    """Runs each layer once, except those that would take too long even at the shortest time per flop seen so far.

    The shortest, because the time per flop falls with the size: that of small layers would leave out all large ones.
    The smallest layer of a kind runs twice: the first backward of a process takes half a second to begin, whatever it
    computes.
    """
    kept: list[Layer] = []
    least_s: dict[str, float] = {}  # per flop, by dtype
    for layer in found:
        is_smallest = (layer.kind, layer.dtype) not in {(one.kind, one.dtype) for one in kept}
        if is_smallest:
            run(layer)
        if is_smallest or least_s[layer.dtype] * layer.work.flop <= longest_s:
            flop_s = sum(run(layer)) / layer.work.flop
            least_s[layer.dtype] = min(flop_s, least_s.get(layer.dtype, flop_s))
            kept.append(layer)
    return kept


def layers(dtypes: Sequence[str]) -> Sequence[Layer]:
    """Every layer that may be timed; of a kind and dtype the smaller ones come first."""
    found = [_block(dtype, *shape) for dtype in dtypes for shape in _SHAPES]
    return [*found, *(_head(dtype, *shape) for dtype in dtypes for shape in _HEAD_SHAPES)]


def _block(dtype: str, hidden: int, tokens: int) -> Layer:
    sizes = {
        "norm_1": (hidden,), "shift_1": (hidden,), "qkv": (3 * hidden, hidden), "qkv_bias": (3 * hidden,),
        "out": (hidden, hidden), "out_bias": (hidden,), "norm_2": (hidden,), "shift_2": (hidden,),
        "up": (4 * hidden, hidden), "up_bias": (4 * hidden,), "down": (hidden, 4 * hidden), "down_bias": (hidden,),
    }  # fmt: skip
    w = _parameters(sizes, dtype)
    inputs = torch.randn(1, tokens, hidden, device="cpu").to(DTYPES[dtype]).requires_grad_()

    def forward() -> torch.Tensor:
        normed = functional.layer_norm(inputs, (hidden,), w["norm_1"], w["shift_1"])
        qkv = functional.linear(normed, w["qkv"], w["qkv_bias"]).view(1, tokens, 3, -1, _HEAD_WIDTH)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        kept = inputs + functional.linear(mixed.transpose(1, 2).reshape(inputs.shape), w["out"], w["out_bias"])
        normed = functional.layer_norm(kept, (hidden,), w["norm_2"], w["shift_2"])
        wide = functional.linear(normed, w["up"], w["up_bias"])
        wide = 0.5 * wide * (1 + torch.tanh(0.79788456 * (wide + 0.044715 * torch.pow(wide, 3))))  # GELU, op by op
        return kept + functional.linear(wide, w["down"], w["down_bias"])

    parameters = sum(one.numel() for one in w.values())
    flop = 2.0 * tokens * parameters + 4.0 * tokens * tokens * hidden
    work = LayerWork(1.0, float(parameters), float(tokens * hidden), flop)
    return Layer(LayerKind.BLOCK, dtype, work, forward, [inputs, *w.values()])


def _head(dtype: str, hidden: int, tokens: int) -> Layer:
    w = _parameters({"table": (_VOCABULARY, hidden), "norm": (hidden,), "shift": (hidden,)}, dtype)
    ids = torch.arange(tokens, device="cpu")

    def forward() -> torch.Tensor:
        inputs = functional.embedding(ids, w["table"])
        normed = functional.layer_norm(inputs, (hidden,), w["norm"], w["shift"])
        return functional.cross_entropy(functional.linear(normed, w["table"]).float(), ids)

    parameters = sum(one.numel() for one in w.values())
    work = LayerWork(1.0, float(parameters), float(tokens * _VOCABULARY), 2.0 * tokens * parameters)
    return Layer(LayerKind.HEAD, dtype, work, forward, list(w.values()))


def _parameters(sizes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, torch.Tensor]:
    values = {name: _SCALE * torch.randn(size, device="cpu") for name, size in sizes.items()}
    return {name: value.to(DTYPES[dtype]).requires_grad_() for name, value in values.items()}
