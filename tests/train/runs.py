"""Runs of tiny models for the tests of training: by the engine, and by plain torch that knows nothing of it."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # else the first optimizer imports it, and the garbage collector searches all its objects
from torch import nn
from torch.nn import functional

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import BudgetError
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

VOCABULARY = 64
WIDTH = 96

Batch = Any
LossOf = Callable[[Any, Batch], torch.Tensor]


class Block(nn.Module):
    """A transformer block with dropout; at WIDTH 96 it has 1.7 blocks of 65536 elements."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias: the gradient of the keys' bias is rounding errors only, which Adam makes large.
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm_in(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        x = x + self.dropout(self.project(self.dropout(scores.softmax(-1)) @ v))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm_out(x)))))


class TinyModel(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, dropout: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Ways(nn.Module):
    """Layers, of which each call takes those that it is told, in that order."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor, way: Sequence[int]) -> torch.Tensor:
        for index in way:
            x = x + self.layers[index](x).tanh()
        return x


def tiny(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> TinyModel:
    """The same model for the same arguments."""
    torch.manual_seed(seed)
    return TinyModel(**options).to(dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype of torch, until the end of the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def tokens(steps: int, shape: tuple[int, int] = (2, 4), vocabulary: int = VOCABULARY) -> list[torch.Tensor]:
    """One batch of tokens a step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, shape, generator=generator) for _ in range(steps)]


def next_token_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch).float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


@dataclass
class Run:
    """What a run leaves: a loss per micro-batch, reports or norms of gradients, and the fp32 weights at its end."""

    losses: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def check_equal(self, other: Run) -> None:
        """Bit for bit."""
        assert self.losses == other.losses
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name
        assert [r.grad_norm for r in self.reports] == [r.grad_norm for r in other.reports]


def worst_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference of two series of losses."""
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected))


def smallest_budgets(model: nn.Module, **options: Any) -> tuple[int, int]:
    """The smallest GPU and CPU budgets, as the error about too small ones names them."""
    tiers = {name: options.pop(name) for name in list(options) if name in TierConfig.model_fields}
    with pytest.raises(BudgetError) as refusal:
        Engine(model, TierConfig(**(tiers | {"gpu_memory": 1, "cpu_memory": 1})), **options)
    gpu, cpu = re.findall(r"the smallest that fits is (\d+) B", str(refusal.value))
    return int(gpu), int(cpu)


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    tiers: TierConfig,
    loss_of: LossOf = next_token_loss,
    *,
    optimizer: AdamWConfig | None = None,
    accumulate: int = 1,
    is_vertical: bool = False,
    seed: int = 7,
    after: Callable[[Engine, int], None] | None = None,
    **options: Any,
) -> Run:
    """Train by the engine; the random numbers of dropout begin at `seed`.

    Args:
        accumulate: micro-batches per step.
        is_vertical: the micro-batches of a step go through the model side by side.
        after: called with the engine and the step, after every step.
    """
    run = Run()
    with Engine(model, tiers, optimizer or AdamWConfig(lr=1e-3), **options) as engine:
        torch.manual_seed(seed)
        for begin in range(0, len(batches), accumulate) if is_vertical else ():
            run.reports.append(_step_side_by_side(engine, batches[begin : begin + accumulate], loss_of, run.losses))
            if after is not None:
                after(engine, len(run.reports))
        for position, batch in enumerate(batches if not is_vertical else ()):
            is_last = (position + 1) % accumulate == 0
            with nullcontext() if is_last else engine.no_sync():
                loss = loss_of(engine, batch)
                engine.backward(loss / accumulate)
            run.losses.append(loss.item())
            if is_last:
                run.reports.append(engine.step())
                if after is not None:
                    after(engine, len(run.reports))
        run.weights = engine.state_dict()
        run.moved = engine.statistics()["bytes"]
    return run


def _step_side_by_side(engine: Engine, batches: Sequence[Batch], loss_of: LossOf, losses: list[float]) -> StepReport:
    inputs: list[Any] = []
    for batch in batches:
        with suppress(StopIteration):
            loss_of(lambda given: next(iter(inputs.append(given) or ())), batch)  # what it gives to the model
    own = threading.local()
    found: dict[int, float] = {}

    def loss_of_output(output: Any) -> torch.Tensor:
        loss = loss_of(lambda _: output, batches[own.place])
        found[own.place] = loss.item()
        return loss

    def enter(module: nn.Module, given: tuple[Any]) -> None:
        own.place = next(place for place, one in enumerate(inputs) if one is given[0])

    handle = engine.model.register_forward_pre_hook(enter)
    try:
        return engine.train_step(inputs, loss_of_output, "vertical")
    finally:
        handle.remove()
        losses += [found[place] for place in range(len(batches))]


def train_plain(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_of: LossOf = next_token_loss,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    seed: int = 7,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Run:
    """The same loop in plain torch: AdamW, clip_grad_norm_ and a scheduler."""
    run = Run()
    trainable = [p for p in model.parameters() if p.requires_grad]
    make = make_optimizer or (lambda _: torch.optim.AdamW(trainable, lr=1e-3, weight_decay=1e-2, foreach=True))
    optimizer = make(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    torch.manual_seed(seed)
    for position, batch in enumerate(batches):
        loss = loss_of(model, batch)
        (loss / accumulate).backward()
        run.losses.append(loss.item())
        if (position + 1) % accumulate == 0:
            limit = math.inf if max_grad_norm is None else max_grad_norm
            for parameter in trainable:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.resolve_neg()  # torch does not clip a lazily negated one
            run.norms.append(float(nn.utils.clip_grad_norm_(trainable, limit)))
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def disk(tmp_path: Path, **options: Any) -> TierConfig:
    """Tiers with a store in a directory of its own; waits fail after 20 s."""
    return TierConfig(**({"nvme": [tmp_path / "store"], "timeout_s": 20.0} | options))
