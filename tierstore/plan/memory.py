"""How much memory a training run takes: by component, by GPU, with and without activation checkpointing.

Scope: bytes per parameter, ZeRO shares, tensor and pipeline degrees, activations.
Not here: on which tier the bytes live (`plan/tiers.py`, `plan/strategies.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.plan.model_size import ModelShape, Part
from tierstore.plan.placement import BLOCK, GroupNeed


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes per parameter of each component.

    Attributes:
        master, momentum, variance: of the optimizer, in fp32; fp32 weights are their own master.
        state: of the optimizer as tierstore keeps it: the weights and 16 bits of residual are the master of bf16
            weights.
    """

    weights: int
    gradients: int
    master: int
    momentum: int
    variance: int
    state: int

    @property
    def total(self) -> int:
        """All of them: 16 in mixed precision, as usually counted."""
        return self.weights + self.gradients + self.optimizer

    @property
    def optimizer(self) -> int:
        return self.master + self.momentum + self.variance


# Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020), section 3.1.
PARAMETER_BYTES: Mapping[str, ParameterBytes] = {
    "bf16": ParameterBytes(2, 2, 4, 4, 4, state=10),
    "fp16": ParameterBytes(2, 2, 4, 4, 4, state=12),
    "fp32": ParameterBytes(4, 4, 0, 4, 4, state=8),
}


class Attention(enum.Enum):
    """What attention keeps for backward: no matrix of size s x s, or three per head."""

    FUSED = "fused"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    Attributes:
        batch: samples of a micro-batch, over all GPUs together.
        accumulate: micro-batches per step.
    """

    shape: ModelShape
    dtype: str = "bf16"
    batch: int = 1
    sequence: int = 2048
    accumulate: int = 1
    checkpointing: bool = False
    attention: Attention = Attention.FUSED

    def __post_init__(self) -> None:
        if self.dtype not in PARAMETER_BYTES:
            raise ConfigError(f"dtype is one of {', '.join(PARAMETER_BYTES)}, not {self.dtype!r}")
        for name in ("batch", "sequence", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.shape.context is not None and self.sequence > self.shape.context:
            raise ConfigError(f"--sequence {self.sequence} is longer than the model's context of {self.shape.context}")

    @property
    def bytes(self) -> ParameterBytes:
        """Bytes per parameter of each component."""
        return PARAMETER_BYTES[self.dtype]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence * self.accumulate


_PARTS = {"tensor": "-parallel parts", "pipeline": " stages"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How GPUs share a model: `nodes` x `gpus` = `tensor` x `pipeline` x data-parallel ranks.

    Attributes:
        gpus: of each node.
        zero: ZeRO stage, what data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 weights too.
    """

    nodes: int = 1
    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 3

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "tensor", "pipeline"):
            if (degree := getattr(self, name)) < 1:
                raise ConfigError(f"the number of {name}{_PARTS.get(name, '')} must be at least 1, not {degree}")
        if not 0 <= self.zero <= 3:
            raise ConfigError(f"the ZeRO stage is 0 to 3, not {self.zero}")
        if self.count % (self.tensor * self.pipeline):
            raise ConfigError(
                f"{self.count} GPUs cannot be divided into tensor x pipeline = {self.tensor} x {self.pipeline} parts: "
                f"give a number of GPUs that {self.tensor * self.pipeline} divides"
            )
        if self.gpus % self.tensor:
            raise ConfigError(
                f"--tensor-parallel {self.tensor} does not divide the {self.gpus} GPUs of a node: tensor parallelism "
                "across nodes would wait for the network in every layer"
            )

    @property
    def count(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.count // (self.tensor * self.pipeline)

    def shares(self, stage: int) -> int:
        """Among how many ranks the component of this ZeRO stage is shared out."""
        return self.data if self.zero >= stage else 1


@dataclass(frozen=True, slots=True)
class GpuBytes:
    """What one GPU holds when nothing is offloaded, without activations."""

    weights: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state


def components(job: Job) -> Mapping[str, int]:
    """Bytes of the whole model: each component once."""
    count, each = job.shape.parameters, job.bytes
    return {
        "weights": count * each.weights,
        "gradients": count * each.gradients,
        "fp32 master": count * each.master,
        "momentum": count * each.momentum,
        "variance": count * each.variance,
    }


def gpu_bytes(job: Job, layout: Layout) -> GpuBytes:
    """Bytes of one GPU of the fullest stage: total / (tensor x pipeline x ZeRO share of the component)."""
    count, each = sum(part.parameters for part in stage_parts(job.shape, layout)), job.bytes
    return GpuBytes(
        weights=count * each.weights / layout.shares(3),
        gradients=count * each.gradients / layout.shares(2),
        state=count * each.optimizer / layout.shares(1),
    )


def stage_parts(shape: ModelShape, layout: Layout) -> tuple[Part, ...]:
    """Groups of the fullest pipeline stage, for one of its tensor-parallel parts."""
    blocks = [part for part in shape.parts if part.is_block]
    if layout.pipeline > len(blocks):
        raise ConfigError(f"--pipeline-parallel {layout.pipeline} is more than the model has layers: {len(blocks)}")
    parts = shape.parts
    if layout.pipeline > 1:
        first = next(index for index, part in enumerate(parts) if part.is_block)
        ends = parts[:first], parts[first + len(blocks) :]
        fullest = max(ends, key=lambda end: sum(part.parameters for part in end))
        parts = (*fullest, *blocks[: -(-len(blocks) // layout.pipeline)])
    return tuple(Part(part.name, -(-part.parameters // layout.tensor), part.is_block) for part in parts)


def group_needs(job: Job, layout: Layout) -> tuple[GroupNeed, ...]:
    """The groups of one rank as the engine has them placed; with several ranks, each keeps whole blocks of elements.

    For a single rank they are exactly the engine's. With several, a rank's part is rounded to blocks, where the engine
    rounds to chunks.
    """
    ranks, each = layout.shares(1), job.bytes
    needs = []
    for part in stage_parts(job.shape, layout):
        kept = min(part.parameters, -(-part.parameters // (ranks * BLOCK)) * BLOCK)
        whole_bytes = part.parameters * each.weights if ranks > 1 else None
        needs.append(GroupNeed(part.name, kept, each.weights, each.state, True, whole_bytes))
    return tuple(needs)


def activation_bytes(job: Job, layout: Layout) -> float:
    """Activations of one GPU at their peak.

    A block keeps `s b h (34 + 5 a s / h)` bytes in 16 bits, without the second term if attention is fused; `t` tensor
    parts keep `s b h (10 + 24 / t + 5 a s / (h t))` each. With checkpointing a block keeps its input, `2 s b h`, and
    one block at a time has all its activations. In a pipeline, the first stage holds those of min(stages,
    micro-batches) micro-batches. Without a pipeline the loss adds fp32 logits, `4 s b v / t`. Gated blocks, as in
    Llama, count as GPT's.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), equations 1 to 4
    and section 4.3.
    """
    shape, t = job.shape, layout.tensor
    samples = job.batch / layout.data
    unit = job.sequence * samples * shape.hidden * job.bytes.weights / 2
    scores = 5 * shape.heads * job.sequence / (shape.hidden * t) if job.attention is Attention.EAGER else 0.0
    block = unit * (10 + 24 / t + scores)
    in_flight = -(-shape.layers // layout.pipeline) * min(layout.pipeline, job.accumulate)
    logits = 4 * job.sequence * samples * shape.vocabulary / t if layout.pipeline == 1 else 0.0
    if job.checkpointing:
        return in_flight * 2 * unit + block + logits
    return in_flight * block + logits
