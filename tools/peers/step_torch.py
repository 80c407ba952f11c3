#!/usr/bin/env python3
"""A GPT-2 training step of plain torch, everything in memory: fused AdamW, clipping."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from serve import Round, serve


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    device, steps = options["device"], options["steps"]
    config = GPT2Config(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False, **options["fields"])
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (options["batch"], options["sequence"]), generator=generator)
    tokens = tokens.to(device)
    model = GPT2LMHeadModel(config).bfloat16().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        step()
        begun_s = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - begun_s) / steps, {}

    yield {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}, run_round


if __name__ == "__main__":
    serve(contend)
