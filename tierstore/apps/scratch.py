"""Directories of a run's own among a person's files: gone when it ends, or, if it was killed, when the next one begins.

Scope: making, locking and removing them. Not here: what runs keep there.

[Note: whose it is] The lock of a file in it ends with the process that has it, however that ends. A directory gets its
name when that is locked already, so that nobody finds it between. Where files cannot be locked nothing is taken for
left. (The directory itself is locked by what is published in it.)
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tierstore.io.files import takes_lock

_LOCK = ".lock"


@contextlib.contextmanager
def scratch(where: Path, prefix: str) -> Iterator[Path]:
    """A directory there for this run, removed at the end with all that it holds; its lock is not to be touched."""
    path = where / f"{prefix}{secrets.token_hex(8)}"
    unnamed = where / f"{path.name}.new"
    with contextlib.ExitStack() as stack:
        for one in (path, unnamed):  # before they are made: a signal may come between
            stack.callback(_remove, one)
        unnamed.mkdir(mode=0o700)
        stack.enter_context(_locked(unnamed, os.O_CREAT))
        unnamed.rename(path)
        yield path


def clear_scratch(where: Path, prefix: str) -> list[Path]:
    """Removes what runs have left there that were killed, and says which directories those were."""
    ours = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{16}}")
    gone = []
    for path in sorted(where.iterdir()):
        if ours.fullmatch(path.name) and not path.is_symlink() and _is_left(path):
            _remove(path)
            gone += [] if path.exists() else [path]
    return gone


def _remove(directory: Path) -> None:
    """As far as it goes, the lock last: what is broken off is found by the next run."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _is_left(path: Path) -> bool:
    try:
        with _locked(path) as has_lock:
            return has_lock
    except OSError:  # it has gone meanwhile, or is another user's, or nothing of ours
        return False


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[bool]:
    """While it is so; or False. See [Note: whose it is]."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        has_lock = False
        with contextlib.suppress(OSError):
            has_lock = takes_lock(descriptor, is_needed=True)
        yield has_lock
    finally:
        os.close(descriptor)
