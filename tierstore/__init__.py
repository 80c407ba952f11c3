"""tierstore: train models whose state does not fit in memory.

Scope: the public names. Each is imported from its module at first use, so that `import tierstore` stays quick: torch
alone takes seconds to import.
Not here: the implementations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.archive.loading import load_pack
    from tierstore.config import (
        AdamWConfig,
        Codec,
        Durability,
        MicroBatchSchedule,
        Resume,
        Tier,
        TierConfig,
        UpdateSchedule,
        format_size,
        parse_size,
    )
    from tierstore.errors import TierstoreError
    from tierstore.store.tensors import TensorStore
    from tierstore.trace import Tracer
    from tierstore.train.cpu_adam import CPUAdam
    from tierstore.train.data_parallel.collective_costs import fit_cost_model
    from tierstore.train.data_parallel.overlap import OverlapProfiler
    from tierstore.train.data_parallel.reducer import GradientReducer
    from tierstore.train.engine import Engine
    from tierstore.train.loading import PrefetchingLoader
    from tierstore.train.materialize import deferred
    from tierstore.train.report import StepReport

__version__: str

__all__ = [
    "AdamWConfig",
    "CPUAdam",
    "Codec",
    "Durability",
    "Engine",
    "GradientReducer",
    "MicroBatchSchedule",
    "OverlapProfiler",
    "PrefetchingLoader",
    "Resume",
    "StepReport",
    "TensorStore",
    "Tier",
    "TierConfig",
    "TierstoreError",
    "Tracer",
    "UpdateSchedule",
    "deferred",
    "fit_cost_model",
    "format_size",
    "load_pack",
    "parse_size",
]

_HOME = {
    "AdamWConfig": "config",
    "CPUAdam": "train.cpu_adam",
    "Codec": "config",
    "Durability": "config",
    "Engine": "train.engine",
    "GradientReducer": "train.data_parallel.reducer",
    "MicroBatchSchedule": "config",
    "OverlapProfiler": "train.data_parallel.overlap",
    "PrefetchingLoader": "train.loading",
    "Resume": "config",
    "StepReport": "train.report",
    "TensorStore": "store.tensors",
    "Tier": "config",
    "TierConfig": "config",
    "TierstoreError": "errors",
    "Tracer": "trace",
    "UpdateSchedule": "config",
    "deferred": "train.materialize",
    "fit_cost_model": "train.data_parallel.collective_costs",
    "format_size": "config",
    "load_pack": "archive.loading",
    "parse_size": "config",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("tierstore")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
