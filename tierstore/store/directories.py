"""The directories of a store: made or accepted, told apart, and marked until they hold a generation.

Scope: which directories a store may use; removing the files of a store that was never finished.
Not here: their lock (`lock.py`), packs (`slots.py`), manifests (`manifest_files.py`); removing a store (`removal.py`).
Owner: none; the caller holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.io.backend import Backend
from tierstore.io.directories import why_not_writable
from tierstore.pack.checked import number_of, object_of, text_of
from tierstore.pack.strict_json import parse_json
from tierstore.store.manifest_files import Manifests, unusable
from tierstore.store.names import IDENTITY, MANIFEST, PACK, SNAPSHOTS, UNFINISHED, holds_data, is_of_a_store

_MOST_IDENTITY_BYTES = 1000


def claim_directory(path: Path, backend: Backend) -> None:
    """Make a store directory (0700), or accept one that holds nothing but a store.

    Directories above it are made too; the name of each new one is durable on return.

    Raises:
        ConfigError: it holds files that no store made; nothing was changed.
        StorageError: it cannot be made or written.
    """
    try:
        backend.make_directories(path, 0o700)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is not a directory")
        strangers = [name for name in backend.names(path) if not (is_of_a_store(name) or holds_snapshots(path / name))]
    except (OSError, StorageError) as error:
        raise unusable(path, error) from error
    if strangers:
        raise ConfigError(f"{path} is not a store: it holds {strangers[0]!r}; give an empty or a new directory")
    if reason := why_not_writable(path):
        raise StorageError(f"cannot use {path} as a store: {reason}")


def holds_snapshots(path: Path) -> bool:
    """Whether this is the directory of a store's snapshots, each of which is a store of its own."""
    return path.name == SNAPSHOTS and path.is_dir() and not path.is_symlink()


@dataclass(frozen=True, slots=True)
class Identity:
    """Which store a directory belongs to, and its position among the directories of that store.

    Each directory of a striped store holds it as a file, made before any pack. Packs alone do not tell: those of two
    stores of one model have the same names and sizes and perhaps the same chunks.
    """

    store: str
    directory: int
    directories: int


def identity_of(directory: Path) -> Identity | None:
    """A directory's identity; None in a store of one directory or of an older release, or if the file is damaged."""
    path = directory / IDENTITY
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            values = object_of(parse_json(file.read(_MOST_IDENTITY_BYTES), str(path)), Identity.__slots__, str(path))
        store, number, count = values
        count = number_of(count, 2, 2**16, f"{path}: directories")
        return Identity(text_of(store, f"{path}: store"), number_of(number, 0, count - 1, f"{path}: directory"), count)
    except (OSError, FormatError):
        return None


def refuse_mixed(directories: Sequence[Path]) -> None:
    """Refuse directories whose identities or manifests show that they are of different stores.

    Raises:
        ConfigError: names two such directories.
    """
    known = [(directory, one.store) for directory in directories if (one := identity_of(directory))]
    others = [directory for directory, store in known if store != known[0][1]]
    others += [directory for directory in directories[1:] if _begins_a_store(directory)]
    if others:
        raise ConfigError(
            f"{directories[0]} and {others[0]} belong to different stores: give all directories of one store, in their "
            "order"
        )


def _begins_a_store(directory: Path) -> bool:
    """Whether this is the first directory of a store, which has the manifests."""
    with contextlib.suppress(OSError):
        return any(map(MANIFEST.fullmatch, os.listdir(directory)))
    return False


def _identify(directories: Sequence[Path], backend: Backend) -> None:
    """Write the identities that are missing in a striped store: of the store that the others name, or of a new one."""
    known = [identity_of(directory) for directory in directories]
    store = next((one.store for one in known if one is not None), secrets.token_hex(16))
    for number, directory in enumerate(directories if len(directories) > 1 else ()):
        if known[number] is None:
            identity = Identity(store, number, len(directories))
            backend.write_file(directory / IDENTITY, json.dumps(asdict(identity)).encode(), 0o600)
            backend.sync_directory(directory)


def mark_unfinished(directories: Sequence[Path], backend: Backend) -> None:
    """Mark these directories: no generation needs the packs that they hold, unless there is a manifest."""
    for directory in directories:
        backend.make_empty(directory / UNFINISHED)
        backend.sync_directory(directory)


def part_of_a_store(names: Sequence[str]) -> str | None:
    """The first name of a manifest; in a directory without the mark also of a pack, which a generation may need."""
    kinds = (MANIFEST,) if UNFINISHED in names else (MANIFEST, PACK)
    return next((name for name in names if any(kind.fullmatch(name) for kind in kinds)), None)


def begin_store(directories: Sequence[Path], backend: Backend) -> None:
    """Mark directories as those of a store that holds no generation yet, and remove what such a store has left there.

    The mark tells packs that nobody needs from packs of a store whose manifests are elsewhere because its directories
    were given in another order, or not all of them.

    Raises:
        ConfigError: one holds packs or manifests of a store; nothing was changed.
        StorageError: the system refused; all packs that are still there are marked.
    """
    if numbers := Manifests(directories[0], backend).numbers():
        raise ConfigError(
            f"{directories[0]} holds generation {numbers[0]} of a run that has just begun there; go on with it "
            "by resume='auto', or choose another directory"
        )
    found = {directory: backend.names(directory) for directory in directories}
    for directory, names in found.items():
        if (part := part_of_a_store(names)) is not None:
            first = "it" if directory == directories[0] else directories[0]
            raise ConfigError(
                f"{directory} holds {part} of a store, but {first}, the first directory given, holds none of its "
                "manifests; give all directories of that store in their order, or other directories"
            )
    mark_unfinished(directories, backend)  # before any pack is made: unmarked packs might be another store's
    for directory, names in found.items():
        for name in names:
            if holds_data(name) or name == IDENTITY:  # the identity of a store that had other directories
                backend.remove(directory / name)
    _identify(directories, backend)


def end_store_making(directories: Sequence[Path], backend: Backend) -> None:
    """Take away the mark of `begin_store`: the store holds a generation, or nothing, and then its identity goes, too.

    The directories of a store with a generation get the identity if they have none: older releases wrote none.
    """
    names = [UNFINISHED]  # last: while the mark is there, the rest can be removed
    if Manifests(directories[0], backend).numbers():
        _identify(directories, backend)
    else:
        names.insert(0, IDENTITY)
    for directory in directories:
        if gone := [directory / name for name in names if (directory / name).exists()]:
            for path in gone:
                backend.remove(path)
            backend.sync_directory(directory)  # or the mark might return beside packs that a generation needs
