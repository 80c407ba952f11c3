"""What ranks run in tests of costs and profiles."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest

from tierstore.errors import ConfigError
from tierstore.train.collective_costs import fit_cost_model


def fitted(rank: int, ranks: int, reduce: str) -> dict[str, Any]:
    fit = fit_cost_model(reduce=reduce, sizes_bytes=(1 << 12, 1 << 16, 1 << 20), repeats=3)  # type: ignore[arg-type]
    return asdict(fit)


def refused(rank: int, ranks: int) -> None:
    for options in ({"sizes_bytes": (4096,)}, {"sizes_bytes": (4, 4096)}, {"repeats": 0}):
        with pytest.raises(ConfigError, match="a fit needs two sizes"):
            fit_cost_model(**options)  # type: ignore[arg-type]


def fitted_by_ticks(rank: int, ranks: int) -> tuple[float, list[float]]:
    ticks = itertools.count(step=rank + 1)
    fit = fit_cost_model(sizes_bytes=(1 << 12, 1 << 16), repeats=1, clock=lambda: float(next(ticks)))
    return fit.model.launch_s, [one.seconds for one in fit.timings]
