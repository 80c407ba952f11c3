#!/usr/bin/env python3
"""A GPT-2 training step of plain torch, everything in memory: fused AdamW, clipping.

AdamW on bf16 parameters keeps its moments in bf16, too, and rounds away updates of less than 1/512 of a weight.
With the option `fp32_state` weights and moments are also kept in fp32, as tierstore keeps them.
"""

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
    model = GPT2LMHeadModel(config).to(device, {"bf16": torch.bfloat16, "fp32": torch.float32}[options["dtype"]])
    weights = list(model.parameters())
    kept = [weight.detach().float() for weight in weights] if options.get("fp32_state") else weights
    if kept is not weights:
        for exact in kept:
            exact.grad = torch.empty_like(exact)  # once: new memory in each step would cost page faults
    optimizer = torch.optim.AdamW(kept, lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        if kept is not weights:
            torch._foreach_copy_([exact.grad for exact in kept], [weight.grad for weight in weights])
        optimizer.step()
        if kept is not weights:
            torch._foreach_copy_([weight.detach() for weight in weights], kept)
        model.zero_grad()
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
