"""What the engine itself takes per group and pass: steps of many very small groups, with and without the engine.

Scope: `contend`. The groups do not all fit on the GPU tier, so each is fetched, acquired and released; they compute
    almost nothing, so the time that the engine's passes take beyond those of the bare model is its own. Updates run
    between passes here, so their time is not counted. The floor is what torch takes for as many hooks that do nothing:
    on every saved tensor, and on every gradient.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tierstore.apps.assembly import assemble, engine_arguments
from tierstore.apps.bench.serve import Round
from tierstore.apps.bench.step_worker import SameTokens
from tierstore.apps.options import Precision, TrainOptions
from tierstore.device.spans import TORCH_DTYPES
from tierstore.train.engine import Engine

_BLOCKS, _VOCABULARY, _SEQUENCE, _STEPS = 96, 256, 8, 5
_WIDTH = {"bf16": 160, "fp32": 112}  # a group is 0.6 MB, too large to be copied directly on the loop
_MODEL = {"model_type": "gpt2", "vocab_size": _VOCABULARY, "n_layer": _BLOCKS, "n_head": 1, "n_positions": _SEQUENCE,
          "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Options: `directory`, for the configuration of the model; `dtype`."""
    dtype = Precision(options["dtype"])
    width = _WIDTH[dtype.value]
    config = Path(options["directory"]) / "tiny-groups.json"
    config.write_text(json.dumps(_MODEL | {"n_embd": width}), encoding="utf-8")
    block_bytes = TORCH_DTYPES[dtype.value].itemsize * (12 * width**2 + 13 * width)
    train = TrainOptions(
        config=config, dtype=dtype, batch=1, sequence=_SEQUENCE, gpu_memory=_BLOCKS * block_bytes, cpu_memory=2**30,
        evaluate=0,
    )  # fmt: skip
    parts, bare = assemble(train), assemble(train)
    for one in (parts, bare):
        one.batches.close()
    model = bare.model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = SameTokens(1, _SEQUENCE, _VOCABULARY).next()
    with Engine(**(engine_arguments(train, parts) | {"registered": {}})) as engine:
        groups = len(engine.placement.groups)

        def by_engine() -> float:
            began_s = time.perf_counter()
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            seconds = time.perf_counter() - began_s
            engine.step()
            engine.flush()  # the update is no part of a pass
            return seconds

        def by_torch() -> float:
            began_s = time.perf_counter()
            model(input_ids=tokens, labels=tokens).loss.backward()
            seconds = time.perf_counter() - began_s
            model.zero_grad()
            return seconds

        def by_hooks() -> float:
            handles = [p.register_post_accumulate_grad_hook(_take) for p in model.parameters()]  # type: ignore[no-untyped-call]
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                seconds = by_torch()
            for handle in handles:
                handle.remove()
            return seconds

        def run_round(number: int) -> tuple[float, dict[str, float]]:
            engine_s, torch_s, hooks_s = _in_turn(by_engine, by_torch, by_hooks)
            us = 1e6 / (2 * groups)
            return engine_s, {"us_per_group_and_pass": us * (engine_s - torch_s), "hooks_us": us * (hooks_s - torch_s)}

        yield {"groups": groups}, run_round


def _same(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _take(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _in_turn(*steps: Callable[[], float]) -> list[float]:
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(_STEPS):
        for kept, step in zip(seconds, steps):
            kept.append(step())
    return [statistics.median(kept) for kept in seconds]
