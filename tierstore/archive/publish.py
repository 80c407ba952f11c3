"""Files that appear whole, or not at all: one, or several with an index that names them.

Scope: temporary names, room on the disks, leftovers of a killed writer, renames and the index.
Not here: what the files hold (`packing.py`, `unpacking.py`).
Owner: a `Publication` holds a lock on each of its temporary files until it is closed.

[Note: publication] Everything is written as `NAME.partial` and fsynced. One file is then renamed. Of several, the
index is written as `INDEX.partial`, fsynced with its name, the files are renamed, the directories fsynced, and the
index is renamed last: without it there is no checkpoint. An index that is replaced is kept as `old-INDEX.partial`
until the files that it alone names are removed; beside a single file, which is read first, it is removed after them. A
killed writer leaves `.partial` files, which carry no lock any more, and perhaps files that `INDEX` does not name, but
`INDEX.partial` does or, beside an `INDEX`, `old-INDEX.partial`. The next writer of a whole checkpoint into the
directory removes them. Leftovers are looked for, and files renamed, by one writer at a time.
Names of files of a pack hold the identity of their content, so files of two packs never meet. Nothing else is ever
removed or written over but, with `overwrite`, the checkpoint in the first directory: one that stands in another
directory is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tierstore.archive.sources import INDEX, PARTIAL, SINGLE, small_file, weight_files
from tierstore.config import format_size
from tierstore.errors import ConfigError, StorageError, StorageFull, TierstoreError
from tierstore.io.backend import Backend, storage_errors
from tierstore.io.files import is_at, locked_file, takes_lock

_OLD_INDEX = f"old-{INDEX}{PARTIAL}"
_TURN_S, _POLL_S = 60.0, 0.02
_OF_A_PACK = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
_LEFTOVER = re.compile(rf"(model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE)}){re.escape(PARTIAL)}")


class Publication(contextlib.ExitStack):
    """The writing of one checkpoint.

    Args:
        destination: a file, or the directories over which `files` files are striped; the index stands in the first.
        overwrite: None where the person who writes has no such option.
    """

    def __init__(
        self, destination: Path | Sequence[Path], files: int, backend: Backend, *, overwrite: bool | None = None
    ) -> None:
        super().__init__()
        self._backend = backend
        self._overwrite = overwrite
        self.single = destination if isinstance(destination, Path) else None
        self.directories = [destination.parent] if isinstance(destination, Path) else list(destination)
        if isinstance(destination, Path):
            self.temporaries = [_partial(destination)]
        else:
            self.temporaries = [
                self._directory(i) / f"model-{i + 1:05d}-of-{files:05d}.safetensors{PARTIAL}" for i in range(files)
            ]

    def _directory(self, file: int) -> Path:
        return self.directories[file % len(self.directories)]

    def begin(self, sizes: Sequence[int]) -> None:
        """Make the temporary files, at full size.

        Raises:
            ConfigError: the destination is there already, or another process writes it.
            StorageFull: a disk is too small; nothing was written.
        """
        self._refuse_existing()
        for directory in self.directories:
            self._make_directory(directory)
        with self._turn():
            self._refuse_existing()  # what the one before has made
            self._clear_leftovers()
        with self._backend.calling("room on the disk", self.directories[0]):
            check_room(dict(zip(self.temporaries, sizes)))
        for path, size in zip(self.temporaries, sizes):
            self.callback(self._discard_ours, path, self._lock(path))
            self._backend.truncate(path, 0)
            if size:
                self._backend.allocate(path, size)

    def commit(self, names: Sequence[str] = (), index: bytes = b"") -> list[Path]:
        """Make what was written the checkpoint; its bytes are durable already, of each file and in this order.

        Args:
            names: of the files of `index`, final ones.

        Returns:
            The files.
        """
        with self._turn():
            self._refuse_existing()
            return self._commit(names, index) if self.single is None else self._commit_one(self.single)

    def _commit_one(self, single: Path) -> list[Path]:
        self._backend.replace(self.temporaries[0], single)
        self._backend.sync_directory(single.parent)
        if single.name == SINGLE:
            index = single.parent / INDEX
            for path in [*(self._named(index) - {single}), index]:
                self._remove(path)
        return [single]

    def _commit(self, names: Sequence[str], index: bytes) -> list[Path]:
        first = self.directories[0]
        old, old_index = self._named(first / INDEX), first / _OLD_INDEX
        finals = [self._directory(number) / name for number, name in enumerate(names)]
        with self._backend.calling("inspection", first):
            for final in finals:
                if final.exists() and final not in old and not _OF_A_PACK.fullmatch(final.name):
                    raise ConfigError(f"{final} is there already, and no index names it; give another destination")
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard, _partial(first / INDEX))
            self._write(_partial(first / INDEX), index)
            if old - set(finals):
                undo.callback(self._discard, old_index)
                self._write(old_index, small_file(first / INDEX))
            for temporary, final in zip(self.temporaries, finals):
                if final not in old:
                    undo.callback(self._discard, final)
                self._backend.replace(temporary, final)
            for directory in self.directories:
                self._backend.sync_directory(directory)
            self._backend.replace(_partial(first / INDEX), first / INDEX)
            undo.pop_all()
        self._backend.sync_directory(first)
        for path in {*old, first / SINGLE} - set(finals):
            self._remove(path)
        self._remove(old_index)
        return finals

    def _refuse_existing(self) -> None:
        with self._backend.calling("inspection", self.directories[0]):
            self._look_for_others()

    def _look_for_others(self) -> None:
        first, *others = self.directories
        # A directory holds one checkpoint; files of other names may stand beside it.
        is_apart = self.single is not None and self.single.name != SINGLE
        for path in [self.single] if self.single and is_apart else [first / INDEX, first / SINGLE]:
            if path.is_dir():
                raise ConfigError(f"{path} is a directory; a file was to be written")
            if path.exists() and not self._overwrite:
                option = "" if self._overwrite is None else ", or --overwrite to replace it"
                raise ConfigError(f"{path} is there already; give another destination{option}")
        for path in (directory / name for directory in others for name in (INDEX, SINGLE)):
            if path.exists():
                raise ConfigError(f"{path.parent} holds a checkpoint of its own, {path.name}; give another destination")
        for directory in self.directories:
            if directory.exists() and not directory.is_dir():
                raise ConfigError(f"{directory} is not a directory")

    def _make_directory(self, directory: Path) -> None:
        """With those above it; what is empty in the end is removed again."""
        with self._backend.calling("inspection", directory):
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(missing):  # before they are made, for that may end half way; the deepest goes first
            self.callback(_remove_empty, path)
        self._backend.make_directories(directory)

    def _clear_leftovers(self) -> None:
        """See [Note: publication]."""
        first = self.directories[0]
        if self.single is not None and self.single.name != SINGLE:
            return
        current = self._named(first / INDEX)
        unpublished = self._named(_partial(first / INDEX))
        replaced = self._named(first / _OLD_INDEX) - {first / SINGLE} if current else set()
        for index, named in ((_partial(first / INDEX), unpublished), (first / _OLD_INDEX, replaced)):
            for path in named - current:
                self._remove(path)
            self._remove(index)  # a link is one, wherever it leads
        for directory in self.directories:
            for name in self._backend.names(directory):
                path = directory / name
                if _LEFTOVER.fullmatch(name) and path not in self.temporaries and self._is_abandoned(path):
                    self._remove(path)

    def _named(self, index: Path) -> set[Path]:
        """Files that an index names: in its directory, and those of a pack in any of the directories."""
        with self._backend.calling("inspection", index, is_ending=True):  # they are to be removed
            try:
                names = weight_files(index) if index.exists() else set()
            except TierstoreError:  # cut short by the kill: then nothing was renamed
                return set()
        ours = {directory / name for directory in self.directories for name in names if _OF_A_PACK.fullmatch(name)}
        return ours | {index.parent / name for name in names}

    def _lock(self, path: Path) -> int:
        with self._backend.calling("lock", path):
            descriptor = locked_file(path, 0o666)
        if descriptor is None:
            raise ConfigError(f"another process writes {path}; wait for it, or give another destination")
        self.callback(os.close, descriptor)
        return descriptor

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One writer into the first directory at a time; who exports into it, too (`train/checkpoints.py`).

        Blocks: until the one before has renamed its files, for a minute at most.

        Raises:
            ConfigError: it takes longer.
        """
        first, until_s = self.directories[0], time.monotonic() + _TURN_S
        with self._backend.calling("lock", first):
            descriptor = os.open(first, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while not self._has_lock(first, descriptor):
                if time.monotonic() > until_s:
                    raise ConfigError(f"another process writes to {first}; wait for it, or give another destination")
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)

    def _has_lock(self, path: Path, descriptor: int) -> bool:
        with self._backend.calling("lock", path):  # each time: who is given up stops here
            return takes_lock(descriptor)

    def _is_abandoned(self, path: Path) -> bool:
        with self._backend.calling("lock", path):
            descriptor = locked_file(path, 0o666)
            if descriptor is not None:
                os.close(descriptor)
        return descriptor is not None

    def _discard(self, path: Path) -> None:
        with contextlib.suppress(StorageError):  # the first error is the one to tell
            self._remove(path)

    def _discard_ours(self, path: Path, descriptor: int) -> None:
        """Once our file has another name, one of this name is that of the next writer."""
        with contextlib.suppress(StorageError):
            with self._backend.calling("inspection", path, is_ending=True):
                is_ours = is_at(path, descriptor)
            if is_ours:
                self._backend.remove(path)

    def _remove(self, path: Path) -> None:
        if os.path.lexists(path):
            self._backend.remove(path)

    def _write(self, path: Path, data: bytes) -> None:
        calling = self._backend.calling(f"write of {len(data)} B", path)
        with calling, open(path, "wb", opener=_open_itself) as file:
            file.write(data)
            file.flush()
            self._backend.fsync_file(file.fileno(), path)
        self._backend.sync_directory(path.parent)


def check_room(sizes: Mapping[Path, int]) -> None:
    """Whether the disks of these files, whose directories are there, have the room.

    Raises:
        StorageFull: says how much is missing where.
    """
    needed: dict[int, int] = defaultdict(int)
    where: dict[int, Path] = {}
    for path, size in sizes.items():
        with storage_errors("looking at", path.parent):
            device = os.stat(path.parent).st_dev
        # What a killed writer left there is written over.
        needed[device] += size - (path.stat().st_blocks * 512 if path.exists() else 0)
        where[device] = path.parent
    for device, size in needed.items():
        free = free_bytes(where[device])
        if size > free:
            raise StorageFull(
                f"the disk of {where[device]} is too small: {size} B ({format_size(size)}) are needed, {free} B "
                f"({format_size(free)}) are free; nothing was written"
            )


def free_bytes(directory: Path) -> int:
    """What is free on the disk of a directory."""
    return shutil.disk_usage(directory).free


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
