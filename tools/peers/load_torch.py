#!/usr/bin/env python3
"""torch.load of a cold file of tensors."""

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
    import torch

    path = options["path"]
    size = os.path.getsize(path)

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        forget(path)
        touch_memory(size)
        start_s = time.perf_counter()
        tensors = torch.load(path, weights_only=True)
        seconds = time.perf_counter() - start_s
        del tensors
        return seconds, {"read": size / seconds / 1e9}

    yield {"versions": {"torch": torch.__version__}}, run_round


if __name__ == "__main__":
    serve(contend)
