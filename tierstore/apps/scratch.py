"""Scratch directories among a person's files: removed when the run ends or, if it was killed, when the next one begins.

Scope: making, locking and removing them, and the directory in which they are. Not here: what runs keep there.

[Note: whose it is] Each directory holds a lock file, locked by its run; the lock ends with the process, however that
ends. A directory gets its final name only after its file is locked, so that no other run finds it unlocked. Where files
cannot be locked, no directory counts as left behind. (The directory itself is not locked, because publishing files in
it does that.)
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
def made(directory: Path) -> Iterator[None]:
    """The directory exists in the block. If it was made for that, as 0700, it is removed at the end unless it is in use
    by then, and so are its parents."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # somebody else uses it now
                path.rmdir()


@contextlib.contextmanager
def scratch(where: Path, prefix: str) -> Iterator[Path]:
    """A directory in `where` for this run, removed at the end with all that it holds; leave its lock file alone."""
    path = where / f"{prefix}{secrets.token_hex(8)}"
    unnamed = where / f"{path.name}.new"
    with contextlib.ExitStack() as stack:
        for one in (path, unnamed):  # before they are made, because a signal may come in between
            stack.callback(_remove, one)
        unnamed.mkdir(mode=0o700)
        stack.enter_context(_locked(unnamed, os.O_CREAT))
        unnamed.rename(path)
        yield path


def clear_scratch(where: Path, prefix: str) -> list[Path]:
    """Removes the directories that killed runs have left in `where`; returns their paths."""
    ours = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{16}}")
    gone = []
    for path in sorted(where.iterdir()):
        if ours.fullmatch(path.name) and not path.is_symlink() and _is_left(path):
            _remove(path)
            gone += [] if path.exists() else [path]
    return gone


def _remove(directory: Path) -> None:
    """Remove as much as possible, the lock file last: the next run finds what an interrupted removal leaves."""
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
    except OSError:  # it has gone meanwhile, is another user's, or is not one of ours
        return False


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[bool]:
    """Hold the directory's lock in the block, which gets whether it could be taken. See [Note: whose it is]."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        has_lock = False
        with contextlib.suppress(OSError):
            has_lock = takes_lock(descriptor, is_needed=True)
        yield has_lock
    finally:
        os.close(descriptor)
