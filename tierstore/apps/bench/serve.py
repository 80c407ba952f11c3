"""The side of a contestant: it gets ready, then runs a round for each line that it receives.

Scope: JSON lines on stdin and the first stdout. The same code serves our own workers and, linked from `tools/peers/`,
    drivers in the peers' Python, which knows nothing of tierstore: standard library only.
Not here: the side that asks (`arena.py`).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# A number of the round goes in; what was timed (seconds), and figures by name, come out.
Round = Callable[[int], "tuple[float, dict[str, float]]"]
Contend = Callable[["dict[str, Any]"], AbstractContextManager["tuple[dict[str, Any], Round]"]]
_LOOK_S = 0.2


def peak_rss_bytes() -> int:
    """Of this process and the children it has; that of getrusage would include the peak of what started this one."""
    kib = 0
    for path in ["/proc/self/status", *(f"/proc/{pid}/status" for pid in _children())]:
        with contextlib.suppress(OSError), open(path) as status:
            kib += sum(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return kib * 1024


def _children() -> list[str]:
    """Those that run; each thread lists the ones that it has started."""
    found = []
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path) as children:  # a thread may end meanwhile
            found += children.read().split()
    return found


class Missing(Exception):
    """Something that this contestant needs is missing; the message says what."""


def serve(contend: Contend, *, works_in_child: bool = False) -> None:
    """Answers until stdin ends.

    Args:
        contend: called with the options of the command line; gives facts (`versions` among them), and a round.
        works_in_child: a round is the work of a child that ends with it; the largest one counts in the peak, too.
    """
    _end_with(os.getppid())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not count as an answer

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        with contend(json.loads(sys.argv[-1])) as (facts, run_round):
            tell(ready=facts)
            for line in sys.stdin:
                try:
                    seconds, figures = run_round(json.loads(line)["round"])
                except Exception as error:
                    tell(error=f"{type(error).__name__}: {error}")
                    raise
                ended_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss if works_in_child else 0
                tell(seconds=seconds, figures=figures, peak_rss=peak_rss_bytes() + ended_kib * 1024)
    except (Missing, ModuleNotFoundError) as error:
        tell(missing=str(error))


def _end_with(asker: int) -> None:
    """If the process that asks is killed, this one ends at once, with its children, wherever it is.

    Otherwise it would see the end of stdin only after its round, which may take minutes and which nobody waits for.
    """

    def watch() -> None:
        stdin = select.poll()
        stdin.register(0, 0)
        stdin.poll()  # until the other end is closed
        while os.getppid() == asker:  # alive, it asks for an orderly end
            time.sleep(_LOOK_S)
        with contextlib.suppress(OSError):  # the arena has made this process a group of its own
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="tierstore-asker", daemon=True).start()
