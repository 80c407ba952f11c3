"""The error tree: every exception that tierstore raises on purpose; and what it warns of under a name of its own.

Scope: classes, what is told of an error that others raise, and of a name that there is not. Messages say what, where,
    numbers with units, and what to do.
Not here: what an `OSError` becomes (see `io/block_file.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection


class TierstoreError(Exception):
    """Base of all errors raised by tierstore."""


class ConfigError(TierstoreError, ValueError):
    """An option has a value that cannot work; nothing was changed."""


class FormatError(TierstoreError):
    """A file does not hold what its format says."""


class ChecksumMismatch(FormatError):
    """Bytes read differ from the bytes written."""


class Truncated(FormatError):
    """A file ends before its declared content does."""


class StorageError(TierstoreError):
    """The operating system refused a file operation."""


class StorageFull(StorageError):
    """No space is left on the device (ENOSPC, EDQUOT)."""


class DoneButFor(StorageError):
    """All that was to be written is there, whole; what failed came after that."""


class ShortTransfer(StorageError):
    """A read or write moved fewer bytes than asked and cannot go on."""


class BudgetError(TierstoreError):
    """A memory budget is too small, and the message names the smallest that fits; or the machine has no room for it."""


class StoreLocked(TierstoreError):
    """Another process uses the store."""


class ClosedError(TierstoreError):
    """The object was closed, or belongs to the parent of a forked process."""


class Timeout(TierstoreError, TimeoutError):
    """A wait passed its deadline; the message says what was in flight."""


class RankLost(TierstoreError):
    """Another rank died or stopped answering; the message says which, and what was waited for."""


class GraphError(TierstoreError):
    """The model did in this step what the chosen update schedule cannot follow exactly."""


class UnusedOptionWarning(UserWarning):
    """An option is not what the store of a resumed run was made with, and the run goes on with that of the store."""


class CheckpointWarning(UserWarning):
    """A checkpoint has tensors that the model has no place for; is it that of this model?"""


class MachineWarning(UserWarning):
    """The machine is not what the run needs: memory that budgets allow is not free, or a store is in memory."""


class Abandoned(KeyboardInterrupt):
    """Ctrl-C, and a thread that changes nothing computes on: end the process without the end of the interpreter."""


def first_line(error: BaseException) -> str:
    """What the error of another library says, as a part of a sentence: its first line, at most 200 characters."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def advice_on(name: str, known: Collection[str], are: str = "known are") -> str:
    """What to write for a name that there is not: the one that is like it, else all that there are."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{are} {', '.join(known)}"
