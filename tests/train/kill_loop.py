"""Kills a training process again and again, resumes it, and compares every step with an uninterrupted run.

    python tests/train/kill_loop.py --kills 30 [--variant NAME]... [--seed N] [--moments] [--directory DIR]

A parent that computes nothing imports everything once and forks a child per run, so a kill costs well under a second.
The child kills itself inside its n-th system call on the store, a write being cut in the middle; with `--moments` half
of the kills come from the parent after a random time. All draws are seeded.

What a step leaves in the log (loss, norm, rate, data position, random states) is written before its commit, so after
kills a step may stand there twice, equal, but never not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import FaultyBackend

from tierstore.apps.data import Batches, Corpus
from tierstore.config import AdamWConfig, TierConfig
from tierstore.kernels import warm_up
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

STEPS = 8
LIMIT_S = 120.0


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    update: str
    commit_every: int = 1
    workers: int = 0
    dtype: torch.dtype = torch.float32
    cpu_memory: str = "3MiB"
    codec: str = "none"
    directories: int = 1


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("forward", "forward"),
        Variant("forward-workers", "forward", workers=2, dtype=torch.bfloat16),
        Variant("forward-3", "forward", commit_every=3, directories=2),
        Variant("backward", "backward"),
        Variant("backward-3", "backward", commit_every=3, dtype=torch.bfloat16, cpu_memory="64MiB"),
        Variant("speculative", "speculative"),
        Variant("speculative-lz4", "speculative", cpu_memory="16MiB", codec="lz4", directories=2),
    )
}


class KillingBackend(FaultyBackend):
    """Ends its process by SIGKILL inside the call number `kill_at`; a write has then reached the disk in part."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__()
        self.kill_at = kill_at

    def _is_due(self, kind: str) -> bool:
        with self._fault_lock:
            self.calls.append(kind)
            return len(self.calls) - 1 == self.kill_at

    def _step(self, kind: str, path: Path) -> None:
        if self._is_due(kind):
            os.kill(os.getpid(), signal.SIGKILL)

    def _move(self, kind: str, view: memoryview, path: Path, call: Callable[[memoryview], int]) -> int:
        if self._is_due(kind):
            if kind == "pwrite" and len(view) > 4096:
                call(view[: len(view) // 2 // 4096 * 4096])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(view)


def make_model(dtype: torch.dtype) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=96, n_head=4, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dtype)


def digest_of_random_states() -> str:
    name, keys, *rest = np.random.get_state()
    states = (random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist())
    return xxhash.xxh3_64_hexdigest(repr(states).encode())


def make_engine(variant: Variant, folder: Path, batches: Batches, backend: KillingBackend) -> Engine:
    tiers = TierConfig(
        gpu_memory="1MiB", cpu_memory=variant.cpu_memory, codec=variant.codec, timeout_s=30.0,
        nvme=[folder / f"store{n}" for n in range(variant.directories)],
    )  # fmt: skip
    return Engine(
        make_model(variant.dtype), tiers, AdamWConfig(lr=1e-2, weight_decay=0.1), update=variant.update,
        max_grad_norm=None if variant.update == "backward" else 0.5, commit_every=variant.commit_every, resume="auto",
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        registered={"data": batches}, backend=backend,
    )  # fmt: skip


def train(variant: Variant, folder: Path, kill_at: int | None) -> None:
    """Train to the last step, resuming what is there. Leaves `log`, and at the end `weights.pt` and `calls`."""
    random.seed(1)
    np.random.seed(2)
    text = np.random.default_rng(3).integers(0, 256, 20_000, dtype=np.uint8)
    batches = Batches(Corpus(text, text, "noise", "noise"), length=17, batch=2, seed=4, workers=variant.workers)
    backend = KillingBackend(kill_at)
    engine = make_engine(variant, folder, batches, backend)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loss = torch.zeros(())

    def write_line(report: StepReport) -> None:
        line = {
            "step": report.step, "loss": loss.item(), "norm": report.grad_norm, "lr": report.lr,
            "position": batches.position, "random": digest_of_random_states(),
        }  # fmt: skip
        os.write(log, (json.dumps(line) + "\n").encode())

    engine.on_step(write_line)
    with engine:
        while engine.step_count < STEPS:
            tokens = batches.next()
            # Python's and numpy's generators matter to the losses, too.
            tokens[0, 0] = (random.randrange(256) + np.random.randint(256)) % 256
            logits = engine(input_ids=tokens).logits.float()
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        weights = engine.state_dict()
    batches.close()
    torch.save(weights, folder / "weights.pt")
    (folder / "calls").write_text(str(len(backend.calls)))


def in_child(work: Callable[[], None], folder: Path, kill_after_s: float | None = None) -> bool:
    """Whether a forked child that runs `work` came to its end; False: it was killed.

    Raises:
        RuntimeError: it failed, or did not end; with its traceback.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            (folder / "error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    descriptor = os.pidfd_open(child)
    ended, _, _ = select.select([descriptor], [], [], LIMIT_S if kill_after_s is None else kill_after_s)
    os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if not ended and kill_after_s is None:
        raise RuntimeError(f"a run did not end within {LIMIT_S} s")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise RuntimeError((folder / "error").read_text() if (folder / "error").exists() else f"status {status}")
    return True


@dataclass
class Outcome:
    """What the kills of one variant came to."""

    variant: str
    kills: int = 0
    runs: int = 0
    laps: int = 0
    steps_repeated: int = 0
    lines_at_kills: list[int] = field(default_factory=list)


def read_log(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(reference: Path, folder: Path, outcome: Outcome) -> None:
    """Compare the log and the final weights of a run with those of the uninterrupted one."""
    expected = {line["step"]: line for line in read_log(reference)}
    lines = read_log(folder)
    for line in lines:
        if line != expected[line["step"]]:
            raise RuntimeError(f"{outcome.variant}: a step differs:\n  {line}\n  {expected[line['step']]}")
    if missing := expected.keys() - {line["step"] for line in lines}:
        raise RuntimeError(f"{outcome.variant}: steps {sorted(missing)} are not in the log")
    ours, theirs = (torch.load(path / "weights.pt") for path in (folder, reference))
    for name, weight in theirs.items():
        if not torch.equal(weight, ours[name]):
            raise RuntimeError(f"{outcome.variant}: {name} differs after {outcome.kills} kills")
    outcome.steps_repeated += len(lines) - len(expected)


def run_variant(variant: Variant, kills: int, seed: int, root: Path, with_moments: bool = False) -> Outcome:
    """Kill so many times and compare; a run that ends before the last kill begins again with an empty store."""
    draw, outcome = random.Random(f"{variant.name} {seed}"), Outcome(variant.name)
    reference = root / f"{variant.name}-reference"
    reference.mkdir(parents=True)
    in_child(partial(train, variant, reference, None), reference)
    calls = int((reference / "calls").read_text())
    while outcome.kills < kills:
        outcome.laps += 1
        folder = root / f"{variant.name}-{outcome.laps}"
        folder.mkdir()
        is_over = False
        while not is_over:
            at: int | None = draw.randrange(calls // 3) if outcome.kills < kills else None
            after_s = None
            if at is not None and with_moments and draw.random() < 0.5:
                at, after_s = None, draw.uniform(0.05, 1.0)
            is_over = in_child(partial(train, variant, folder, at), folder, after_s)
            outcome.runs += 1
            if not is_over:
                outcome.kills += 1
                outcome.lines_at_kills.append(len(read_log(folder)))
        check(reference, folder, outcome)
        shutil.rmtree(folder)
    shutil.rmtree(reference)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30, help="per variant")
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moments", action="store_true", help="half of the kills at random times, by the parent")
    parser.add_argument("--directory", type=Path, help="where the stores are; default: a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)  # no threads before a fork
    warm_up({"fp32", "bf16"})
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for name in options.variant or VARIANTS:
            outcome = run_variant(VARIANTS[name], options.kills, options.seed, Path(folder), options.moments)
            print(
                f"{name}: {outcome.kills} kills in {outcome.runs} runs, {outcome.laps} laps of {STEPS} steps, "
                f"{outcome.steps_repeated} steps repeated: all equal",
                flush=True,
            )


if __name__ == "__main__":
    main()
