"""Publication of files that appear whole or not at all: one, or several with an index that names them.

Scope: temporary names, room on the disks, leftovers of a killed writer, renames and the index.
Not here: what the files hold (`packing.py`, `unpacking.py`, `train/checkpoints.py`).
Owner: a `Publication` holds a lock on each of its temporary files until it is closed.

[Note: publication] Everything is written as `NAME.partial` and fsynced. A single file is then renamed. With several,
the index is written as `INDEX.partial` and fsynced with its name, the files are renamed, the directories are fsynced,
and the index is renamed last: without it there is no checkpoint. Readers prefer a single file to an index: so a new
index is in place before an old single file is removed, and a new single file before an old index. An index that another
one replaces is kept as `old-INDEX.partial` until the files that only it names are removed. An index that a single file
replaces is removed after its files. So whatever interrupts this, one whole checkpoint is there, if there was one.
A killed writer leaves `.partial` files, which are not locked any more. It may also leave files that `INDEX` does not
name, but that `INDEX.partial` names (if their own `.partial` is gone) or, beside an `INDEX`, `old-INDEX.partial`. The
next writer of a whole checkpoint into the directory removes all of these. One writer at a time looks for leftovers,
locks `.partial` files, or renames files.
File names of a pack contain the identity of its content, so files of two packs collide only if their content is equal;
such a pack is refused, as an export is, if a file of its name is there that no index in the first directory names.
Nothing else is ever removed or overwritten except, with `overwrite`, the checkpoint in the first directory; a
checkpoint in another one of the directories is refused.
With `overwrite`, that checkpoint's files are known by name alone: where an equal pack shares one of the other
directories, a file of it there has such a name, too, and may be removed or replaced.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tierstore.archive.sources import INDEX, PARTIAL, SINGLE, small_file, weight_files
from tierstore.config import format_size
from tierstore.errors import ConfigError, DoneButFor, StorageError, StorageFull, TierstoreError
from tierstore.io.backend import Backend, storage_errors
from tierstore.io.directories import why_no_directory
from tierstore.io.files import is_at, locked_file, takes_lock

_OLD_INDEX = f"old-{INDEX}{PARTIAL}"
_TURN_S, _POLL_S = 60.0, 0.02
_OF_A_PACK = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")
_SHARD = re.compile(r"model-([0-9a-f]{8}-)?(?P<number>\d{5}-of-\d{5})\.safetensors")
_LEFTOVER = re.compile(rf"(model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE)}){re.escape(PARTIAL)}")


class Publication(contextlib.ExitStack):
    """The writing of one checkpoint.

    Args:
        destination: a file, or the directories over which `files` files are striped; the index is in the first one.
        overwrite: True: an existing checkpoint may be replaced, if nobody else is writing one there. False: writers of
            different files may work side by side, and the last one is refused. None: as False, but the message does not
            mention the option.
    """

    def __init__(
        self, destination: Path | Sequence[Path], files: int, backend: Backend, *, overwrite: bool | None = None
    ) -> None:
        super().__init__()
        self._backend = backend
        self._overwrite = overwrite
        self._locks: list[int] = []
        self.single = destination if isinstance(destination, Path) else None
        self._is_checkpoint = self.single is None or self.single.name == SINGLE
        self.directories = [destination.parent] if isinstance(destination, Path) else list(destination)
        if isinstance(destination, Path):
            self.temporaries = [_partial(destination)]
        else:
            self.temporaries = [self._directory(i) / _temporary(f"{i + 1:05d}-of-{files:05d}") for i in range(files)]

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
        with turn(self.directories[0], self._backend):
            self._refuse_existing()  # a writer before this one may have made it meanwhile
            self._clear_leftovers()
            for path in self.temporaries:
                self._locks.append(self._lock(path))
                self.callback(self._discard_ours, path, self._locks[-1])
        with self._backend.calling("room on the disk", self.directories[0]):
            check_room(dict(zip(self.temporaries, sizes)))
        for path, size in zip(self.temporaries, sizes):
            self._backend.truncate(path, 0)
            if size:
                self._backend.allocate(path, size)

    def commit(self, names: Sequence[str] = (), index: bytes = b"") -> list[Path]:
        """Make the written files the checkpoint; the bytes of each file are durable already.

        Args:
            names: final names of the files of `index`, in the order of `temporaries`; a single file needs neither.

        Returns:
            The files.

        Raises:
            ConfigError: what is there now must not be replaced; nothing was changed.
            StorageError: the system refused; nothing was changed.
            DoneButFor: the files are the checkpoint, but perhaps not durable, or the old one is not all removed.
        """
        with turn(self.directories[0], self._backend):
            self._refuse_existing()
            with self._backend.calling("inspection", self.directories[0]):
                if not all(map(is_at, self.temporaries, self._locks)):
                    place = self.directories[0]
                    raise ConfigError(
                        f"{place} was moved or replaced while it was written, or another process writes there, and its "
                        "file system has no locks; give another destination"
                    )
            return self._commit(names, index) if self.single is None else self._commit_one(self.single)

    def _commit_one(self, single: Path) -> list[Path]:
        self._backend.replace(self.temporaries[0], single)
        with self._after_the_rename():
            self._backend.sync_directory(single.parent)
            if self._is_checkpoint:
                index = single.parent / INDEX
                self._retire(self._named(index) - {single}, index)
        return [single]

    def _commit(self, names: Sequence[str], index: bytes) -> list[Path]:
        first = self.directories[0]
        old, old_index, new_index = self._named(first / INDEX), first / _OLD_INDEX, _partial(first / INDEX)
        finals = [self._directory(number) / name for number, name in enumerate(names)]
        with self._backend.calling("inspection", first):
            for final in finals:
                if final.exists() and final not in old:  # an equal pack that shares this directory may need it
                    raise ConfigError(f"{final} is there already, and no index here names it; give another destination")
        made = [new_index]
        try:
            self._backend.write_file(new_index, index)
            if old - set(finals):
                made.append(old_index)
                self._backend.write_file(old_index, small_file(first / INDEX))
            self._backend.sync_directory(first)  # no file may get its final name before this
            for temporary, final in zip(self.temporaries, finals):
                if final not in old:
                    made.append(final)
                self._backend.replace(temporary, final)
            for directory in self.directories:
                self._backend.sync_directory(directory)
            self._backend.replace(new_index, first / INDEX)
        except BaseException:
            if os.path.lexists(new_index):  # otherwise it is in place, and names these files
                for path in reversed(made):
                    self._discard(path)
            raise
        with self._after_the_rename():
            self._backend.sync_directory(first)
            self._retire([first / SINGLE, *(old - set(finals))], old_index)
        return finals

    @contextlib.contextmanager
    def _after_the_rename(self) -> Iterator[None]:
        """In this block the written files have their final names: an error becomes `DoneButFor`."""
        try:
            yield
        except StorageError as error:
            place, single = self.single or self.directories[0], self.directories[0] / SINGLE
            is_hidden = self.single is None and os.path.lexists(single)
            hides = f"; as long as {single} is there, it is what is read" if is_hidden else ""
            raise DoneButFor(f"all that was written to {place} is there and whole, but {error}{hides}") from error

    def _retire(self, paths: Iterable[Path], index: Path) -> None:
        """Remove replaced files and, once that is durable, the index that names them: nothing else tells of them."""
        gone = [path for path in dict.fromkeys(paths) if os.path.lexists(path)]
        for path in gone:
            self._backend.remove(path)
        for directory in dict.fromkeys(path.parent for path in gone):
            self._backend.sync_directory(directory)
        self._remove(index)

    def _refuse_existing(self) -> None:
        first, *others = self.directories
        # A directory holds one checkpoint; files of other names may stand beside it.
        places = [self.single] if self.single and not self._is_checkpoint else [first / INDEX, first / SINGLE]
        with self._backend.calling("inspection", first):
            for path in places:
                if path.is_dir():
                    raise ConfigError(f"{path} is a directory; a file was to be written")
                if os.path.lexists(path) and not self._overwrite:
                    option = "" if self._overwrite is None else ", or --overwrite to replace it"
                    raise ConfigError(f"{path} is there already; give another destination{option}")
            for path in (directory / name for directory in others for name in (INDEX, SINGLE)):
                if path.exists():
                    held = f"{path.parent} holds a checkpoint of its own, {path.name}"
                    raise ConfigError(f"{held}; give another destination")
            for directory in self.directories:
                if reason := why_no_directory(directory):
                    raise ConfigError(f"cannot write to {directory}: {reason}")

    def _make_directory(self, directory: Path) -> None:
        """Makes a directory and its missing parents; those that are empty in the end are removed again."""
        with self._backend.calling("inspection", directory):
            missing = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(missing):  # before they are made, which may fail half way; the deepest is removed first
            self.callback(_remove_empty, path)
        self._backend.make_directories(directory)

    def _clear_leftovers(self) -> None:
        """See [Note: publication]."""
        left = set(self.temporaries)
        if self._is_checkpoint:
            first = self.directories[0]
            current, unpublished = self._named(first / INDEX), self._named(_partial(first / INDEX))
            with self._backend.calling("inspection", first):
                unpublished = set(filter(_was_renamed, unpublished))
            replaced = self._named(first / _OLD_INDEX) - {first / SINGLE} if current else set()
            for index, named in ((_partial(first / INDEX), unpublished), (first / _OLD_INDEX, replaced)):
                self._retire(named - current, index)  # a link counts as a file, wherever it leads
            for directory in self.directories:
                left.update(directory / name for name in self._backend.names(directory) if _LEFTOVER.fullmatch(name))
        for path in sorted(left):
            if self._is_abandoned(path):
                self._remove(path)

    def _named(self, index: Path) -> set[Path]:
        """Files that an index names: in its directory, and those of a pack in any of the directories.

        Directories that it names are left out: no writer has made them.
        """
        with self._backend.calling("inspection", index, is_ending=True):  # the files are to be removed
            try:
                names = weight_files(index) if index.exists() else set()
            except TierstoreError:  # the kill has cut the index short: then nothing was renamed
                return set()
            ours = {directory / name for directory in self.directories for name in names if _OF_A_PACK.fullmatch(name)}
            return {path for path in ours | {index.parent / name for name in names} if not path.is_dir()}

    def _lock(self, path: Path) -> int:
        with self._backend.calling("lock", path):
            descriptor = locked_file(path, 0o666)
        if descriptor is None:
            raise _busy(path)
        self.callback(os.close, descriptor)
        return descriptor

    def _is_abandoned(self, path: Path) -> bool:
        with self._backend.calling("lock", path):
            if path.is_symlink() or not path.exists():
                return path.is_symlink()  # no writer's, and not followed
            descriptor = locked_file(path, 0o666)
            if descriptor is not None:
                os.close(descriptor)
        if descriptor is None and self._overwrite:
            raise _busy(path)
        return descriptor is not None

    def _discard(self, path: Path) -> None:
        with contextlib.suppress(StorageError):  # the first error is the one to tell
            self._remove(path)

    def _discard_ours(self, path: Path, descriptor: int) -> None:
        """Removes our temporary file; once that has another name, a file of this name is the next writer's."""
        with contextlib.suppress(StorageError):
            with self._backend.calling("inspection", path, is_ending=True):
                is_ours = is_at(path, descriptor)
            if is_ours:
                self._backend.remove(path)

    def _remove(self, path: Path) -> None:
        if os.path.lexists(path):
            self._backend.remove(path)


@contextlib.contextmanager
def turn(directory: Path, backend: Backend) -> Iterator[None]:
    """In this block the caller alone changes what belongs to the checkpoint in a directory.

    Blocks: until other writers have ended their blocks, for a minute at most.

    Raises:
        ConfigError: it takes longer.
    """
    until_s = time.monotonic() + _TURN_S
    with backend.calling("lock", directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            with backend.calling("lock", directory):  # each time, so that work that was given up stops here
                if takes_lock(descriptor):
                    break
            if time.monotonic() > until_s:
                raise _busy(directory)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _busy(path: Path) -> ConfigError:
    return ConfigError(f"another process writes to {path}; wait for it, or give another destination")


def check_room(sizes: Mapping[Path, int]) -> None:
    """Checks that the disks have room for these files, whose directories exist.

    Raises:
        StorageFull: the message says which disk has how much too little.
    """
    needed: dict[int, int] = defaultdict(int)
    where: dict[int, Path] = {}
    for path, size in sizes.items():
        with storage_errors("looking at", path.parent):
            device = os.stat(path.parent).st_dev
        needed[device] += size
        where[device] = path.parent
    for device, size in needed.items():
        free = free_bytes(where[device])
        if size > free:
            raise StorageFull(
                f"the disk of {where[device]} is too small: {size} B ({format_size(size)}) are needed, {free} B "
                f"({format_size(free)}) are free; nothing was written"
            )


def free_bytes(directory: Path) -> int:
    """Free bytes on the disk of a directory."""
    return shutil.disk_usage(directory).free


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _temporary(number: str) -> str:
    return f"model-{number}.safetensors{PARTIAL}"


def _was_renamed(path: Path) -> bool:
    """Whether a killed writer has given its file this name; otherwise a file of this name is somebody else's."""
    match = _SHARD.fullmatch(path.name)
    return match is not None and not path.with_name(_temporary(match["number"])).exists()


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
