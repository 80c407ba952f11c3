"""Whether files can be made in a directory, as far as the system says without trying.

Scope: sentences for the user, without slow imports. Not here: making files.
Owner: no state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tierstore.caller import warn_caller
from tierstore.errors import MachineWarning

_MOUNTS = Path("/proc/self/mountinfo")


def why_no_directory(path: Path) -> str | None:
    """Why a directory cannot be made at this path or, if there is one, not be written to; None if nothing is known.

    Raises:
        OSError: the path cannot be examined.
    """
    there = nearest(path)
    if there.is_dir():
        return why_not_writable(there)
    return f"{there} is a link to no directory" if there.is_symlink() else f"{there} is not a directory"


def nearest(path: Path) -> Path:
    """The path itself or, if it does not exist, its nearest parent that does."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))


def why_in_memory(path: Path) -> str | None:
    """A warning if files of this directory, or of one made at this path, are kept in memory; None on a disk."""
    try:
        device, mounts = os.stat(nearest(path)).st_dev, _MOUNTS.read_bytes()
    except OSError:  # reported where it matters
        return None
    for line in mounts.splitlines():
        before, _, kind = line.partition(b" - ")
        if before.split()[2] == b"%d:%d" % (os.major(device), os.minor(device)):
            system = kind.split()[0].decode()
            if system in ("tmpfs", "ramfs"):
                return (
                    f"{path} is in memory ({system}): files there save no memory, and are lost when the machine stops; "
                    "give a directory on a disk"
                )
    return None


def reasons_in_memory(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """What `why_in_memory` says of the paths that are in memory; the texts are for warnings, as `MachineWarning`."""
    return [reason for reason in map(why_in_memory, map(Path, paths)) if reason is not None]


def warn_of_memory(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Warn of directories whose files are kept in memory."""
    for reason in reasons_in_memory(paths):
        warn_caller(reason, MachineWarning)


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be made in a directory, as far as the system says without trying; None if nothing is known."""
    if os.access(directory, os.W_OK | os.X_OK):
        return None
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"the file system of {directory} is read-only"
    return f"no permission to write in {directory}"
