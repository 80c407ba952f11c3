"""What the machine allows, as contestants of their own: they take turns with what is measured against them.

Scope: memory. Not here: rates for the planner (`measure/`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from tierstore.apps.bench.serve import Round

_TRIAD_ELEMENTS = 2**26
_TRIAD_PASSES = 5


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """The floor that `what` names."""
    with {"memory": _memory}[options["what"]](options) as found:
        yield found


@contextlib.contextmanager
def _memory(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """STREAM's triad a = b + s c on all cores."""
    import torch

    a, b, c = (torch.ones(_TRIAD_ELEMENTS) for _ in range(3))

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        start_s = time.perf_counter()
        for _ in range(_TRIAD_PASSES):
            torch.add(b, c, alpha=0.5, out=a)
        seconds = time.perf_counter() - start_s
        return seconds, {"triad_gb_per_s": _TRIAD_PASSES * 16 * _TRIAD_ELEMENTS / seconds / 1e9}

    yield {"versions": {"torch": torch.__version__}}, run_round
