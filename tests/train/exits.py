"""Ends processes that train without closing their engine: run by `test_clean.py`.

Each case is a forked child that leaves by the ordinary end of the interpreter. The parent prints a line of JSON with
the child's exit status and what the child wrote to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from resuming import DISK, MEMORY, Run, Way, open_run, opened

from tierstore.errors import MachineWarning

WAYS = {"memory": Way(cpu_memory=MEMORY), "disk": Way("backward", cpu_memory=DISK, blocks=2, width=96)}


def in_the_middle_of_a_step(run: Run) -> None:
    run.until(3)
    run.engine.backward(run.engine(run.position.next()).square().mean())


def by_an_exception(run: Run) -> None:
    run.until(3)
    raise SystemExit(7)


def by_another_thread(run: Run) -> None:
    run.until(3)
    threading.Thread(target=run.until, args=(4,)).start()


# Few, because an interpreter that has imported torch takes long to end.
CASES = (
    ("memory", by_an_exception), ("memory", by_another_thread), ("disk", in_the_middle_of_a_step),
)  # fmt: skip
kept: list[Run] = []


def main(root: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", MachineWarning)  # which comes where the directory of tests is in memory
    with opened(WAYS["memory"], root / "first") as run:
        run.until(1)  # so that what is imported and loaded on first use is there before the forks
    gc.freeze()  # else each child's collector looks through all of torch at the end, for over a second
    children, start_s = {}, time.monotonic()
    for name, case in CASES:
        folder = root / f"{name}-{case.__name__}"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT), 2)
            kept.append(open_run(WAYS[name], folder))
            case(kept[0])
            return
        children[child] = folder
    while children:
        child, status = os.wait()
        folder, seconds = children.pop(child), time.monotonic() - start_s
        line = {"case": folder.name, "status": os.waitstatus_to_exitcode(status), "s": seconds}
        print(json.dumps(line | {"stderr": (folder / "stderr").read_text()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
