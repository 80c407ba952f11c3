"""Removing a store: all of it, and only it.

Scope: which files of a directory are those of a store; removing them under its lock.
Not here: asking the user whether to remove it (`cli/`).
Owner: a `StoreLock` for as long as files are removed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.io.backend import Backend
from tierstore.pack.layout import listed
from tierstore.store.directories import end_store_making, holds_snapshots, identity_of, mark_unfinished
from tierstore.store.lock import StoreLock
from tierstore.store.manifest_files import Manifests
from tierstore.store.names import MANIFEST, SNAPSHOTS, UNFINISHED, holds_data, is_a_lock, is_of_a_store, marks_a_store


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """A directory of a store.

    Attributes:
        files: names and sizes in bytes of the store's files, in the order of removal: manifests first.
        others: names of what no store made; that stays, and so does the directory.
    """

    path: Path
    files: dict[str, int]
    others: tuple[str, ...]

    @property
    def file_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def holds_data(self) -> bool:
        """Whether it holds packs or generations, of a store in this directory alone or in others too."""
        return any(map(holds_data, self.files))


def look(directories: Sequence[Path], backend: Backend | None = None) -> list[StoreDirectory]:
    """What would be removed; nothing is changed.

    Raises:
        ConfigError: a directory is not one of a store, or not all directories of the store are given.
        StorageError: a directory cannot be read.
    """
    backend = backend or Backend()
    if len({os.path.realpath(path) for path in directories}) < len(directories):
        raise ConfigError("a directory is listed twice; nothing was removed")
    found = [_look(path, backend) for path in directories]
    for one in found:
        if not one.files:
            raise _no_store(one)
    if not _are_identified(found):
        _check_by_manifests(found, backend)
    return found


def _are_identified(found: Sequence[StoreDirectory]) -> bool:
    """Whether identities show that these are all directories of one store; False if none has an identity.

    Raises:
        ConfigError: identities show that they are not, or are missing in some of them.
    """
    full = [one for one in found if one.holds_data]  # the others have nothing to lose
    identities = {one.path: identity_of(one.path) for one in found}
    known = next((identity for one in full if (identity := identities[one.path])), None)
    if known is None:
        return False
    for one in full:
        identity = identities[one.path]
        if identity is None:
            raise _silent(one)
        if identity.store != known.store:
            raise ConfigError(f"{full[0].path} and {one.path} belong to different stores; nothing was removed")
    if len({one.directory for one in identities.values() if one and one.store == known.store}) < known.directories:
        raise _striped(full[0], known.directories)
    return True


def _check_by_manifests(found: Sequence[StoreDirectory], backend: Backend) -> None:
    """Check directories without identity: of a store of one directory, or not finished, or made by an older release.

    Raises:
        ConfigError: they are not, or may not be, all directories of one store.
    """
    count = _count(found[0].path, backend)
    if count is not None and count > len(found):
        raise _striped(found[0], count)
    if count is not None and count < len(found):
        raise ConfigError(
            f"the store in {found[0].path} has {count} of the {len(found)} directories; give those of one store only"
        )
    for one in found:
        if not any(map(marks_a_store, one.files)):  # packs alone, of a store whose manifests are in another directory
            raise _no_store(one) if count is None else _silent(one)


def _striped(one: StoreDirectory, count: int) -> ConfigError:
    return ConfigError(
        f"the store in {one.path} is striped over {count} directories; give all of them; if one is lost, so is the "
        "store: remove the others yourself"
    )


def _silent(one: StoreDirectory) -> ConfigError:
    return ConfigError(
        f"{one.path} has no readable file 'identity', which names its store: an older release made it, or that file is "
        "damaged; resume the store with all its directories once, and delete it then; nothing was removed"
    )


def _no_store(one: StoreDirectory) -> ConfigError:
    return ConfigError(f"{one.path} is not a store: {_shown([*one.files, *one.others])}; nothing was removed")


def _count(first: Path, backend: Backend) -> int | None:
    """Over how many directories the store is striped; None if no readable manifest says so."""
    manifests = Manifests(first, backend)
    with contextlib.suppress(FormatError, StorageError):
        for number in manifests.numbers()[:1]:
            return int(manifests.manifest_here(number)["layout"]["directories"])
    return None


def _look(path: Path, backend: Backend) -> StoreDirectory:
    if path.is_symlink():
        raise ConfigError(f"{path} is a link to {os.path.realpath(path)}; give that directory")
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    names = [name for name in backend.names(path) if not is_a_lock(name)]  # `StoreLock` removes those itself
    files = {name: (path / name).lstat().st_size for name in names if is_of_a_store(name) and _is_file(path / name)}
    ordered = sorted(files, key=lambda name: (not name.startswith("manifest-"), name))
    others = tuple(name for name in names if name not in files and not _holds_nothing(path / name))
    return StoreDirectory(path, {name: files[name] for name in ordered}, others)


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()  # no store makes a link


def _shown(names: Sequence[str]) -> str:
    return f"it holds {listed(names, 3)}" if names else "it is empty"


def remove(
    directories: Sequence[Path], backend: Backend | None = None, *, only_unfinished: bool = False
) -> list[StoreDirectory]:
    """Remove a store, and its directories if nothing else is in them and the system lets them go.

    A kill in between leaves the last generation whole, or none; another call can remove what is left.

    Args:
        only_unfinished: refuse a store that is not marked as unfinished, or holds a generation.

    Returns:
        What was there.

    Raises:
        ConfigError, StorageError: as `look`, or the store is refused; nothing was changed.
        StoreLocked: a process uses the store; nothing was changed.
        StorageError: the system refused; what is left can be removed later.
    """
    backend = backend or Backend()
    _refuse_finished(look(directories, backend), only_unfinished)
    lock = StoreLock(directories)
    try:
        found = look(directories, backend)
        _refuse_finished(found, only_unfinished)
        mark_unfinished(directories, backend)  # so that what a kill leaves is known as needed by nobody
        for is_first in (True, False):
            for directory in found:
                for name in directory.files:
                    if name.startswith("manifest-") == is_first and holds_data(name):
                        backend.remove(directory.path / name)
                backend.sync_directory(directory.path)
        end_store_making(directories, backend)
    finally:
        lock.release()
    for directory in found:
        if not directory.others:
            for path in (directory.path / SNAPSHOTS, directory.path):
                with contextlib.suppress(OSError):  # the system keeps a mount point, and "."; a parent may be read-only
                    path.rmdir()
            if directory.path.parent.name == SNAPSHOTS and Manifests(directory.path.parent.parent, backend).numbers():
                with contextlib.suppress(OSError):  # it holds other snapshots
                    directory.path.parent.rmdir()
    return found


def _refuse_finished(found: Sequence[StoreDirectory], only_unfinished: bool) -> None:
    names = {name for one in found for name in one.files}
    if only_unfinished and (UNFINISHED not in names or any(map(MANIFEST.fullmatch, names))):
        raise ConfigError(f"{found[0].path} holds a finished store; nothing was removed")


def _holds_nothing(path: Path) -> bool:
    """Whether this is a directory for snapshots, and holds none any more."""
    return holds_snapshots(path) and not os.listdir(path)
