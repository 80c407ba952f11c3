"""Peak resident memory of `tierstore train`, and its bound: `python tests/apps/peak_memory.py 1.5b 320MiB 256MiB`.

The model is a preset or a `config.json`. One process measures what imports and compiled kernels take, including the
parts of libraries that a pass uses, and what a pass takes in plain torch on top of weights and gradients. Another
process measures the peak of the command until its engine is made, and until its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SEQUENCE = 64


def status(field: str) -> int:
    """A memory figure of this process in bytes: `VmRSS` now, its parts `RssAnon` and `RssFile`, `VmHWM` at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _plain(model: str, dtype: str, sequence: str) -> dict[str, int]:
    base = _imported(dtype)
    imported = base + status("RssFile")
    activations = _activations(model, dtype, int(sequence))
    used = base + status("RssFile")  # includes the parts of libraries that are used
    return {"imported": imported, "base": used, "activations": activations}


def _imported(dtype: str) -> int:
    from transformers.models.gpt2 import GPT2LMHeadModel  # noqa: F401  # what presets are made of

    from tierstore.apps import train  # noqa: F401
    from tierstore.kernels import warm_up

    warm_up({dtype})
    return status("RssAnon")


def _activations(name: str, dtype: str, sequence: int) -> int:
    import torch

    from tierstore.apps import assembly, presets
    from tierstore.apps.heap import prepare_heap
    from tierstore.apps.options import Precision, TrainOptions

    prepare_heap()
    configuration = presets.prepare(assembly._configuration(TrainOptions(**_chosen(name))), dropout=0)
    with torch.device("meta"):  # any values will do: to initialize weights takes seconds
        model = presets.build(configuration, Precision(dtype))
    model.to_empty(device="cpu").tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    warm = torch.ones(256, 256, dtype=model.dtype)
    torch.nn.functional.linear(warm, warm)  # loads the libraries behind it
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    tokens = torch.randint(0, 256, (1, sequence))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    model(input_ids=tokens, labels=tokens).loss.backward()
    return status("VmHWM") - before - gradients


def _chosen(model: str) -> dict[str, Any]:
    """The option for a model."""
    from tierstore.apps.options import Preset

    return {"config": Path(model)} if model.endswith(".json") else {"preset": Preset(model)}


def _train(model: str, dtype: str, sequence: str, gpu: str, cpu: str, folder: str, steps: str) -> dict[str, int]:
    from rich.console import Console

    from tierstore.apps import train
    from tierstore.apps.options import Precision, TrainOptions
    from tierstore.apps.report import Reporter
    from tierstore.config import parse_size
    from tierstore.train.engine import Engine

    peaks: dict[str, int] = {}

    def make_engine(**arguments: object) -> Engine:
        engine = Engine(**arguments)  # type: ignore[arg-type]
        peaks["built"] = status("VmHWM")
        return engine

    options = TrainOptions(
        **_chosen(model), gpu_memory=parse_size(gpu), cpu_memory=parse_size(cpu), nvme=(Path(folder) / "store",),
        dtype=Precision(dtype), batch=1, sequence=int(sequence), steps=int(steps), evaluate=1,
    )  # fmt: skip
    train.train(options, Reporter(Console(stderr=True)), make_engine)
    return peaks | {"trained": status("VmHWM"), "budgets": options.gpu_memory + options.cpu_memory}


def _said(arguments: list[str]) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, timeout=600).stdout.decode()


def measure(
    model: str,
    gpu: str,
    cpu: str,
    folder: Path,
    dtype: str = "bf16",
    steps: int = 3,
    run: Callable[[list[str]], str] = _said,
) -> dict[str, int]:
    """All figures in bytes; `bound` is that of the trained model, `bound_built` that of the built one.

    Args:
        run: runs this file with these arguments in a process of its own, and returns what it prints.
    """
    figures: dict[str, int] = {}
    asked = [model, dtype, str(_SEQUENCE)]
    for arguments in (["plain", *asked], ["train", *asked, gpu, cpu, str(folder), str(steps)]):
        figures |= json.loads(run([__file__, *arguments]))
    room = figures["budgets"] + 128 * 2**20
    figures["bound_built"] = room + figures["imported"]
    figures["bound"] = room + figures["base"] + figures["activations"]
    return figures


if __name__ == "__main__":
    parts = {"plain": _plain, "train": _train}
    if sys.argv[1] in parts:
        print(json.dumps(parts[sys.argv[1]](*sys.argv[2:])))
    else:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            for name, nbytes in measure(*sys.argv[1:4], Path(folder)).items():
                print(f"{name:12} {nbytes / 2**20:6.0f} MiB")
