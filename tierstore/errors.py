"""The error tree: every exception that tierstore raises on purpose, and its own warning categories.

Scope: the classes; wording for errors of other libraries and for unknown names. Messages say what happened, where, with
    numbers and units, and what to do.
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
    """A file does not follow its format."""


class ChecksumMismatch(FormatError):
    """Bytes read differ from the bytes written."""


class Truncated(FormatError):
    """A file ends before its declared content does."""


class StorageError(TierstoreError):
    """The operating system refused a file operation."""


class StorageFull(StorageError):
    """No space is left on the device (ENOSPC, EDQUOT)."""


class DoneButFor(StorageError):
    """Everything was written and is complete; a later operation failed."""


class ShortTransfer(StorageError):
    """A read or write moved fewer bytes than requested and cannot go on."""


class BudgetError(TierstoreError):
    """A memory budget is too small (the message names the smallest that fits), or the machine has no room for it."""


class StoreLocked(TierstoreError):
    """Another process uses the store."""


class ClosedError(TierstoreError):
    """The object was closed, or belongs to the parent of a forked process."""


class Timeout(TierstoreError, TimeoutError):
    """A wait exceeded its deadline; the message says what was in flight."""


class RankLost(TierstoreError):
    """Another rank died or stopped answering; the message says which one, and what this rank was waiting for."""


class GraphError(TierstoreError):
    """The model did something in this step that the chosen update schedule cannot follow exactly."""


class UnusedOptionWarning(UserWarning):
    """An option differs from the one with which the store of a resumed run was made; the run uses the store's."""


class CheckpointWarning(UserWarning):
    """A checkpoint has tensors that the model has no place for; perhaps it belongs to another model."""


class MachineWarning(UserWarning):
    """The machine does not fit the run: the memory that the budgets allow is not free, or a store is in memory."""


class Abandoned(KeyboardInterrupt):
    """Ctrl-C while a thread that changes nothing still computes: end the process without finalizing the interpreter."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, at most 200 characters, for use within a sentence."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def advice_on(name: str, known: Collection[str], are: str = "known are") -> str:
    """Advice for an unknown name: the known name that resembles it, or else all known names."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{are} {', '.join(known)}"
