"""A file for somebody to read that is written whole, or stays as it was.

Scope: one open file. Not here: what must survive a power cut (`io/files.py`), and is synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """What is written in here is the file, if nothing ends it before.

    Raises:
        OSError: as `open` and `write` do.
    """
    path = Path(path)
    is_pipe = path.exists() and not path.is_file()  # or a device; that of this process's output leads to no name
    target = path if is_pipe else Path(os.path.realpath(path))  # a link stays one
    if is_pipe or not os.access(target.parent, os.W_OK):
        with open(target, "wb") as file:  # a pipe, or a directory that takes no new file
            yield file
        return
    new = target.with_name(f".{target.name[:32]}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    try:
        with open(new, "xb") as file:
            yield file
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
