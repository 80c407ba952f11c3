#!/usr/bin/env python3
"""safetensors.torch.load_file of a cold file; it maps the file, so its tensors are touched once, as a model would."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from cold import forget, touch_memory
from serve import Round, serve


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    import safetensors
    import torch
    from safetensors.torch import load_file

    path = options["path"]
    size = os.path.getsize(path)

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        forget(path)
        touch_memory(size)
        start_s = time.perf_counter()
        tensors = load_file(path)
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8)[::4096].sum()
        seconds = time.perf_counter() - start_s
        del tensors
        return seconds, {"read": size / seconds / 1e9}

    yield {"versions": {"safetensors": safetensors.__version__, "torch": torch.__version__}}, run_round


if __name__ == "__main__":
    serve(contend)
