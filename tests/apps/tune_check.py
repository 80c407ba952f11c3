"""`tune --measure` on the 124M preset at several budgets, with rates of the same run: predictions and measurements.

python tests/apps/tune_check.py DIR 512MiB 800MiB 1500MiB 4GiB [--rounds 3] [--steps 3]

Every round measures the rates (about two seconds, disks and cores), records one step, and runs some steps of each
depth. A line per budget says how far the prediction is off, and how far the chosen depth is from the best measured one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tierstore.apps import tune_views
from tierstore.apps.options import Preset, TrainOptions
from tierstore.apps.tune import TuneOptions, rates_for, run
from tierstore.config import parse_size
from tierstore.plan.step_machine import Machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("budgets", nargs="+")
    parser.add_argument("--gpu-memory", default="256MiB")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    for budget in given.budgets:
        train = TrainOptions(
            preset=Preset.P124M, gpu_memory=parse_size(given.gpu_memory), cpu_memory=parse_size(budget),
            nvme=(given.directory / "store",), batch=1, sequence=64,
        )  # fmt: skip
        options = TuneOptions(
            train=train, measure=True, depths=tuple(given.depths), rounds=given.rounds, steps=given.steps
        )
        seen: list[Machine] = []
        measured = rates_for(train)

        def rates(seen: list[Machine] = seen, measured: Callable[[], Machine] = measured) -> Machine:
            seen.append(measured())
            return seen[-1]

        outcome = run(options, rates, lambda text: print(text, file=sys.stderr))
        Console(width=120).print(tune_views.as_table(outcome))
        print(tune_views.as_words(outcome))
        best = min(outcome.measured.values(), key=lambda one: one.seconds)
        real = outcome.measured[outcome.tuning.choice.depth]
        figures = {
            "cpu_memory": budget,
            "compute_s": [round(outcome.record.forward_s, 3), round(outcome.record.backward_s, 3),
                          round(outcome.record.between_s, 3)],
            "disk_gb_per_s": [[round(rate / 1e9, 2) for rate in (one.table.read_bytes_per_s,
                               one.table.write_bytes_per_s, one.table.shared_bytes_per_s)] for one in seen],
            "depth": outcome.tuning.choice.depth,
            "off": [round(outcome.tuning.choice.forecasts[d].seconds / one.seconds - 1, 3)
                    for d, one in outcome.measured.items()],
            "choice_slower_by": round(real.seconds / best.seconds - 1, 3),
            "spread": round((real.high - real.low) / statistics.median([real.seconds]), 3),
        }  # fmt: skip
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
