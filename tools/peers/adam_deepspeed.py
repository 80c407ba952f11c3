#!/usr/bin/env python3
"""DeepSpeedCPUAdam on one large fp32 parameter: alone, and with bf16 gradients in and bf16 weights out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from serve import Round, serve


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    count, passes = options["params"], options["passes"]
    parameter = torch.nn.Parameter(torch.randn(count))
    gradient = parameter.grad = torch.full((count,), 1e-2)
    gradient_bf16, weight_bf16 = gradient.bfloat16(), torch.zeros(count, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01, fp32_optimizer_states=True)

    def with_casts() -> None:
        gradient.copy_(gradient_bf16)
        optimizer.step()
        weight_bf16.copy_(parameter.detach())

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        begun_s, rates = time.perf_counter(), {}
        for name, step in (("bf16", with_casts), ("fp32", optimizer.step)):
            start_s = time.perf_counter()
            for _ in range(passes):
                step()
            rates[name] = count * passes / (time.perf_counter() - start_s) / 1e9
        return time.perf_counter() - begun_s, rates

    yield {"versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__}}, run_round


if __name__ == "__main__":
    serve(contend)
