"""A file for the user that is either written completely or stays as it was.

Scope: one open file. Not here: files that must survive a power cut, and are synced (`io/files.py`).
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
    """The bytes written in this block become the file if the block ends without an error.

    Raises:
        OSError: as `open` and `write` do.
    """
    path = Path(path)
    is_pipe = path.exists() and not path.is_file()  # or a device; the realpath of /dev/stdout may be no file's name
    target = path if is_pipe else Path(os.path.realpath(path))  # a symbolic link stays one
    if is_pipe or not os.access(target.parent, os.W_OK):
        with open(target, "wb") as file:  # a pipe, or a file in a directory where no new file can be made
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
