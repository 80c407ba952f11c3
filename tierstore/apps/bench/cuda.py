"""A machine with a GPU: its tests, the link, and steps whose optimizer state lies in CPU memory, or on the GPU.

How long a step with its state in CPU memory computes is measured first, by plain torch with the same micro-batches on
the same GPU: the engine's own time without its waits would not show that the GPU waits for launches.

Scope: contestants and rows of `bench all --device cuda`, made to end within 8 minutes on one GPU.
Not here: the cases that need none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierstore.apps.bench.case import (
    ROOT,
    Bar,
    BenchOptions,
    Case,
    Contestant,
    Results,
    Row,
    ours,
    peer,
    ratio,
    row_of,
)
from tierstore.apps.bench.serve import Missing, Round
from tierstore.apps.options import Preset
from tierstore.apps.preset_sizes import PRESET_FIELDS
from tierstore.cores import available_cores

_TESTS, _LINK = "pytest -m gpu", "link"
_TESTS_TIMEOUT_S = 240.0
_START_TIMEOUT_S, _ROUND_TIMEOUT_S = _TESTS_TIMEOUT_S + 60.0, 60.0
_LINES = 25  # of what failing tests have printed
_COPY_BYTES, _COPIES = 2**25, 32
_COPY_S = 0.5
_COMPUTED = 4
_STEPS = 2  # of a round, after one that does not count
_SEQUENCE = 1024
_IN_CPU_MEMORY = {"state_on_gpu": False}  # gpu_memory holds weights, gradients and what is in flight
_MODELS: dict[str, dict[str, Any]] = {
    "124m": {"preset": "124m", "gpu_memory": "1GiB", "cpu_memory": "4GiB", "batch": 16, "micro_batches": 8},
    "1.5b": {"preset": "1.5b", "gpu_memory": "8GiB", "cpu_memory": "32GiB", "batch": 8, "micro_batches": 16},
}
_ON_GPU = "124m, all on the GPU"
_ON_GPU_MODEL = {"preset": "124m", "gpu_memory": "4GiB", "cpu_memory": "1GiB", "batch": 16, "micro_batches": 1,
                 "state_on_gpu": True}  # fmt: skip
_PLAIN = {"torch": False, "torch, state in fp32": True}


def heats(options: BenchOptions, scratch: Path) -> list[list[Contestant]]:
    """Tests first; then link and steps, a heat each, because they share one GPU's memory."""
    steps = [[_soon(_step_name(name), what="step", **given, **_IN_CPU_MEMORY)] for name, given in _MODELS.items()]
    beside = [_soon(_step_name(_ON_GPU), what="step", **_ON_GPU_MODEL)]
    fields = {name: value for name, value in PRESET_FIELDS[Preset.P124M].items() if name != "model_type"}
    given: dict[str, Any] = {"device": "cuda", "steps": _STEPS, "batch": _ON_GPU_MODEL["batch"], "dtype": "bf16",
                             "sequence": _SEQUENCE, "fields": fields}  # fmt: skip
    if options.wants("torch"):
        beside += [peer(name, "step_torch", options.peer_python, fp32_state=kept, **given)
                   for name, kept in _PLAIN.items()]  # fmt: skip
    return [[_soon(_TESTS, what="tests")], [_soon(_LINK, what="link")], *steps, beside]


def _soon(name: str, **options: Any) -> Contestant:
    """A part of `contend`, with short timeouts, so that one that hangs does not take the time of the others."""
    return replace(ours(name, "cuda", **options), start_timeout_s=_START_TIMEOUT_S, round_timeout_s=_ROUND_TIMEOUT_S)


def rows(options: BenchOptions, results: Results) -> Sequence[Row]:
    """Tests, GB/s of the link, share of a step in which the model computes."""
    table = [row_of(results[_TESTS], "seconds", "tests marked gpu", "s")]
    link = results[_LINK]
    for way in ("h2d", "d2h"):
        pinned = link.median(f"{way} pinned")
        bar = Bar(0.9, "of the pinned copy rate", ratio(link.median(way), pinned))
        table.append(row_of(link, way, way, "GB/s", floor=pinned, floor_of="torch's copies of pinned memory",
                            bars=[bar]))  # fmt: skip
    for name, given in _MODELS.items():
        result = results[_step_name(name)]
        work = f"GPT-2 {name}, bf16, {given['micro_batches']} micro-batches of {given['batch']} x {_SEQUENCE}, "\
               "optimizer state in CPU memory: step"  # fmt: skip
        bar = Bar(0.9, "of the step computes", ratio(result.median("compute"), result.median("step")))
        table.append(row_of(result, "step", work, "s", floor=result.median("compute"),
                            floor_of="plain torch's forward and backward", bars=[bar]))  # fmt: skip
    result, work = results[_step_name(_ON_GPU)], f"GPT-2 {_ON_GPU}, bf16, {_ON_GPU_MODEL['batch']} x {_SEQUENCE}: step"
    plain = [results[name] for name in _PLAIN if name in results]
    bars = [Bar(1.03, f"x {one.contestant.name}", ratio(result.median("step"), one.median("seconds")), at_most=True)
            for one in plain]  # fmt: skip
    return [*table, row_of(result, "step", work, "s", bars=bars), *(row_of(one, "seconds", work, "s") for one in plain)]


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """The part that `what` names.

    Raises:
        Missing: no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise Missing("no CUDA device here")
    facts = {"versions": {"torch": torch.__version__}, "gpu": torch.cuda.get_device_name()}
    with {"tests": _tests, "link": _link, "step": _step}[options["what"]](options) as run_round:
        yield facts, run_round


@contextlib.contextmanager
def _tests(options: dict[str, Any]) -> Iterator[Round]:
    """Run once, at the start; every round repeats how long it took."""
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    if not files:
        raise Missing(f"no tests in {ROOT}: they come with the repository")
    # Warnings of other libraries are not errors here.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default", *files]
    if importlib.util.find_spec("xdist") and (cores := available_cores()) > 3:
        command += ["-p", "xdist", "-n", str(min(8, cores // 2))]
    begun_s, failure = time.perf_counter(), ""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=printed, stderr=printed, timeout=_TESTS_TIMEOUT_S)
            if done.returncode:
                failure = f"pytest ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"pytest did not end within {_TESTS_TIMEOUT_S:g} s"
        seconds = time.perf_counter() - begun_s
        printed.seek(0)
        if failure:
            raise RuntimeError(" | ".join([failure, *printed.read().strip().splitlines()[-_LINES:]]))
    yield lambda number: (seconds, {})


@contextlib.contextmanager
def _link(options: dict[str, Any]) -> Iterator[Round]:
    """Copies as the engine makes them, and torch's own between pinned memory and the device."""
    import torch

    from tierstore.device.streams import open_device
    from tierstore.measure import links
    from tierstore.measure.memory import arena_memory

    device = open_device("cuda")
    with arena_memory(4 * _COPY_BYTES, "tierstore-bench", device) as (runtime, memory):
        loads = {"h2d": links.h2d(device, memory[: 2 * _COPY_BYTES]),
                 "d2h": links.d2h(device, memory[2 * _COPY_BYTES :])}  # fmt: skip
        there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

        def pinned(to: torch.Tensor, source: torch.Tensor) -> float:
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            for _ in range(_COPIES):
                to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            return _COPIES * _COPY_BYTES / (time.perf_counter() - begun_s) / 1e9

        def run_round(number: int) -> tuple[float, dict[str, float]]:
            begun_s = time.perf_counter()
            rates = {way: runtime.call(load.run, _COPY_S) / 1e9 for way, load in loads.items()}
            rates |= {"h2d pinned": pinned(there, here), "d2h pinned": pinned(here, there)}
            return time.perf_counter() - begun_s, rates

        yield run_round


@contextlib.contextmanager
def _step(options: dict[str, Any], device: str = "cuda", sequence: int = _SEQUENCE) -> Iterator[Round]:
    """A few steps of a preset, each with the update of the one before it; nothing on a disk."""
    import torch

    from tierstore import AdamWConfig, Engine, TierConfig
    from tierstore.apps import presets
    from tierstore.apps.options import Precision
    from tierstore.apps.turns import take_short_turns

    take_short_turns(device)
    configuration = presets.prepare(presets.preset_configuration(Preset(options["preset"])), dropout=0.0)
    torch.manual_seed(0)
    with torch.device(device):  # a GPU makes weights within a second
        model = presets.build(configuration, Precision.BF16)
        tokens = torch.randint(0, presets.vocabulary_size(configuration), (options["batch"], sequence))
    count, batch = options["micro_batches"], {"input_ids": tokens, "labels": tokens}
    compute_s = count * _compute_seconds(model, batch)
    model.cpu()
    given = {name: options[name] for name in ("gpu_memory", "cpu_memory", "state_on_gpu")}
    tiers = TierConfig(device=device, nvme=(), accumulation_steps=count, **given)
    with Engine(model, tiers, AdamWConfig(lr=1e-4, weight_decay=0.01), max_grad_norm=1.0) as engine:

        def run_round(number: int) -> tuple[float, dict[str, float]]:
            engine.train_step([batch] * count)  # to get going: the next step hides its update
            begun_s = time.perf_counter()
            for _ in range(_STEPS):
                engine.train_step([batch] * count)
            seconds = time.perf_counter() - begun_s
            engine.flush()
            return seconds, {"compute": compute_s, "step": seconds / _STEPS}

        yield run_round


def _compute_seconds(model: Any, batch: dict[str, Any]) -> float:
    """Seconds of forward and backward by plain torch: the least of a few runs, because the first one loads kernels."""
    found = []
    for _ in range(_COMPUTED):
        begun_s = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        loss.item()  # on a GPU this waits until backward has ended
        model.zero_grad()
        found.append(time.perf_counter() - begun_s)
    return min(found)


def _step_name(preset: str) -> str:
    return f"tierstore {preset}"


CASE = Case("cuda", heats, rows, reads=("device",))
