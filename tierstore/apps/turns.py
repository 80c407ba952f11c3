"""How long a thread keeps the interpreter while others wait for it: a setting of the process, made by commands.

Scope: the setting. Not here: how many threads there are, and what they do.
"""

from __future__ import annotations

import sys

_SHORT_S = 1e-4


def take_short_turns(device: str) -> None:
    """If the model is computed on a GPU, have Python's threads take turns of 0.1 ms instead of 5 ms.

    The thread that launches kernels releases the interpreter with each launch, then waits until the thread that took
    the interpreter gives it back; the GPU waits, too. A step of GPT-2 124M, 16 x 1024, took 0.142 and 0.141 s instead
    of 0.164 and 0.177 with its state on the GPU, and 0.152 and 0.137 instead of 0.159 and 0.145 with it in CPU memory
    (one H100, 16 cores, in turns, 2026-11-27). On a CPU nothing was gained.
    """
    if device != "cpu":
        sys.setswitchinterval(_SHORT_S)
