"""What the machine's memory allows, as a contestant: it takes turns with what is measured against it.

Scope: `contend`. Not here: rates for the planner (`measure/`); a disk's floor is fio (`disk.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tierstore.apps.bench.serve import Round

_ELEMENTS, _PASSES = 2**26, 5


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """STREAM's triad a = b + s c, counting also the read of `a` into the cache before its write; and a = s a, in place.

    Adam reads nearly all that it writes, so it wastes no such read: the triad understates what Adam may reach, and the
    faster of the two is its floor. No options.
    """
    import torch

    a, b, c = (torch.ones(_ELEMENTS) for _ in range(3))
    kinds: dict[str, tuple[int, Callable[[], object]]] = {
        "triad": (16, lambda: torch.add(b, c, alpha=0.5, out=a)),
        "in place": (8, lambda: a.mul_(1.0)),
    }

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        begun_s, rates = time.perf_counter(), {}
        for name, (bytes_per_element, run) in kinds.items():
            start_s = time.perf_counter()
            for _ in range(_PASSES):
                run()
            rates[name] = _PASSES * bytes_per_element * _ELEMENTS / (time.perf_counter() - start_s) / 1e9
        return time.perf_counter() - begun_s, rates

    yield {"versions": {"torch": torch.__version__}}, run_round
