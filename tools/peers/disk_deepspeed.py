#!/usr/bin/env python3
"""DeepSpeed's aio with a locked buffer of the whole file; the best of its queue depths in each round."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from serve import Missing, Round, serve

_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise Missing("DeepSpeed's aio cannot be built here; it needs a compiler and libaio-dev")
    aio = AsyncIOBuilder().load()
    path, size = options["path"], options["size"]
    handles = {depth: aio.aio_handle(_BLOCK_BYTES, depth, False, True, 1) for depth in options["depths"]}
    owner = next(iter(handles.values()))
    buffer = owner.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))

    def timed(call: Any) -> float:
        start_s = time.perf_counter()
        call(buffer, path, 0)
        return time.perf_counter() - start_s

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        begun_s = time.perf_counter()
        write_s = min(timed(handle.sync_pwrite) for handle in handles.values())
        read_s = min(timed(handle.sync_pread) for handle in handles.values())
        return time.perf_counter() - begun_s, {"read": size / read_s / 1e9, "write": size / write_s / 1e9}

    try:
        yield {"versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__}}, run_round
    finally:
        owner.free_cpu_locked_tensor(buffer)


if __name__ == "__main__":
    serve(contend)
