"""Power cuts at random instants of training a model of several groups: what is left opens, and goes on exactly."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from crash.claims import Findings
from power_cuts import JournalBackend, StoreDisk, images
from resuming import DISK, State, Way, check_resumes, expected_states, opened
from tensor_stores import QuickBackend

BEGIN, END, STEPS = 2, 4, 5
BATCH = 8  # cuts of one journal
SIZE = {"blocks": 4, "width": 96}
WAYS = {
    "forward": Way("forward", **SIZE),
    "forward, state on disk": Way("forward", cpu_memory=DISK, **SIZE),
    "every second step": Way("forward", commit_every=2, cpu_memory=DISK, **SIZE),
    "backward, state on disk": Way("backward", cpu_memory=DISK, **SIZE),
    "speculative, state on disk": Way("speculative", cpu_memory=DISK, **SIZE),
    "forward, state on the GPU tier": Way("forward", state_on_gpu=True, **SIZE),
    "delayed, bf16": Way("delayed", dtype=torch.bfloat16, cpu_memory=DISK, **SIZE),
}


def cut_once(way: Way, expected: list[State], closed: Path, folder: Path, draw: random.Random, cuts: int) -> list[int]:
    """Go on with a store for two steps, cut the power at some instants, and resume each; the steps that were found."""
    live = shutil.copytree(closed, folder / "live")
    backend = JournalBackend(live)
    with opened(way, live, backend) as run:
        run.until(END)
    instants = draw.sample(range(len(backend.journal) + 1), min(cuts, len(backend.journal)))
    found = []
    disk = StoreDisk(live, backend.found)
    for image in images(disk, backend.journal, instants=instants, seed=draw.randrange(2**32), draws=1):
        left = image.restore(folder / "left")
        step = check_resumes(way, left, expected, backend=QuickBackend())
        assert step >= image.known, f"the cut after {image.at} changes lost step {image.known}"
        found.append(step)
        shutil.rmtree(left)
        if len(found) == cuts:
            break
    shutil.rmtree(live)
    return found


def cut(count: int, seed: int, root: Path, advance: Callable[[], object]) -> Findings:
    """Make `count` cuts, shared by all ways to train."""
    torch.set_num_threads(1)
    found, draw = Findings("power cuts"), random.Random(seed)
    left, broken, total = count, "", 0
    for number, (name, way) in enumerate(WAYS.items()):
        share = -(-left // (len(WAYS) - number))
        left -= share
        steps: list[int] = []
        try:
            if share:
                with opened(way, root / "closed") as run:
                    run.until(BEGIN)
                expected = expected_states(way, root / "expected", STEPS)
            while len(steps) < share:
                cuts = min(BATCH, share - len(steps))
                steps += (new := cut_once(way, expected, root / "closed", root, draw, cuts))
                for _ in new:
                    advance()
        except Exception as error:
            broken = f"{name}: {type(error).__name__}: {error}"
            break
        finally:
            for folder in ("closed", "expected", "live", "left"):
                shutil.rmtree(root / folder, ignore_errors=True)
        total += len(steps)
        opened_at = ", ".join(f"{steps.count(step)} at step {step}" for step in sorted(set(steps)))
        found.rows.append((name, f"{len(steps)} cuts: {opened_at}"))
    found.claim(
        "what is left is the newest durable generation or a newer one, whole, and goes on to the same weights",
        not broken, broken or f"{total} cuts",
    )  # fmt: skip
    found.figures = {"cuts": total}
    return found
