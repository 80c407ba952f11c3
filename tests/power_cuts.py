"""A disk that forgets what was not fsynced, and one that watches what a committed generation needs.

Scope: `JournalBackend` does every call on a real directory and writes down what it changes; `Disk` goes through such a
journal and knows which bytes and names are durable; `images` are what a power cut between any two calls could leave.
`StoreDisk` also knows the generations of a store. The page cache outlives a killed process, so a kill cannot test what
is tested with these.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.io.backend import Backend

SECTOR = 512
_MANIFEST = re.compile(r"manifest-(\d+)\.json")


@dataclass(frozen=True)
class Change:
    """One call that changed bytes or names, or made them durable.

    Attributes:
        at_ns: when, on the clock that all processes of a machine share.
        data: what was written; for a sync, all that the file holds, because it may be written without the backend.
        source: the name that a rename took away.
        names: for the sync of a directory, the files in it.
    """

    at_ns: int
    kind: str
    path: Path
    offset: int = 0
    data: bytes | None = None
    source: Path | None = None
    names: tuple[Path, ...] = ()


class JournalBackend(Backend):
    """Does every call on a real directory, one at a time, and writes it down.

    A file that is made or written without the backend becomes known by its own sync or its directory's.

    Args:
        turns: a file that the backends of several processes lock, so that they make one call at a time among them.

    Attributes:
        found: the files that were there when the backend was made; they count as durable.
    """

    def __init__(self, root: Path, turns: Path | None = None) -> None:
        super().__init__()
        self.journal: list[Change] = []
        self.found = {path: path.read_bytes() for path in root.rglob("*.*") if path.is_file()}
        self._lock = threading.Lock()
        self._turns = turns

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock, contextlib.ExitStack() as stack:
            if self._turns is not None:
                fcntl.flock(stack.enter_context(self._turns.open("a")), fcntl.LOCK_EX)
            yield

    def _note(self, kind: str, path: Path, **more: Any) -> None:
        self.journal.append(Change(time.monotonic_ns(), kind, path, **more))

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        with self._turn():
            descriptor = super()._call_open(path, flags, mode)
            if flags & os.O_CREAT:
                self._note("create", path, data=b"" if flags & os.O_TRUNC else None)
            return descriptor

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        with self._turn():
            written = super()._call_pwrite(descriptor, view, offset, path)
            self._note("write", path, offset=offset, data=bytes(view[:written]))
            return written

    def _call_allocate(self, descriptor: int, offset: int, size_bytes: int, path: Path) -> None:
        with self._turn():
            super()._call_allocate(descriptor, offset, size_bytes, path)
            self._note("write", path, offset=offset, data=bytes(size_bytes))

    def _call_copy_range(self, source: int, target: int, nbytes: int, offset: int, path: Path) -> int:
        with self._turn():
            moved = super()._call_copy_range(source, target, nbytes, offset, path)
            self._note("write", path, offset=offset, data=path.read_bytes()[offset : offset + moved])
            return moved

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        with self._turn():
            super()._call_fdatasync(descriptor, path)
            self._note("sync", path, data=path.read_bytes())

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        with self._turn():
            super()._call_fsync(descriptor, path)
            if path.is_dir():
                self._note("sync names", path, names=tuple(entry for entry in path.iterdir() if entry.is_file()))
            else:
                self._note("sync", path, data=path.read_bytes())

    def _call_replace(self, source: Path, destination: Path) -> None:
        with self._turn():
            super()._call_replace(source, destination)
            self._note("rename", destination, source=source)

    def _call_unlink(self, path: Path) -> None:
        with self._turn():
            super()._call_unlink(path)
            self._note("unlink", path)

    def _call_mkdir(self, path: Path, mode: int) -> None:
        with self._turn():
            super()._call_mkdir(path, mode)
            self._note("mkdir", path)


@dataclass(eq=False)
class _File:
    """Bytes as of the last sync, and the writes since."""

    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def after_cut(self, draw: random.Random | None) -> bytes:
        """The durable bytes, and of the writes since: none, all, some, some sectors, or all with one of them torn."""
        content = bytearray(self.durable)
        fate = draw.choice(("nothing", "all", "writes", "sectors", "torn")) if draw and self.pending else "nothing"
        torn = draw.randrange(len(self.pending)) if draw and fate == "torn" else None
        for number, (offset, data) in enumerate(self.pending if draw and fate != "nothing" else ()):
            kept = [(0, len(data))]
            if number == torn:
                middle = draw.randrange(0, len(data) + 1, SECTOR)
                kept = [draw.choice(((0, middle), (middle, len(data))))]
            elif fate == "writes":
                kept = kept * draw.randrange(2)
            elif fate == "sectors":
                kept = [(start, start + SECTOR) for start in range(0, len(data), SECTOR) if draw.random() < 0.5]
            for start, stop in kept:
                _put(content, offset + start, data[start:stop])
        return bytes(content)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


@dataclass
class _Names:
    """The names in a directory as of its last sync, and what has changed since: (name that went, name that came)."""

    durable: dict[Path, _File] = field(default_factory=dict)
    pending: list[tuple[Path | None, Path | None, _File]] = field(default_factory=list)

    def after_cut(self, draw: random.Random | None) -> dict[Path, _File]:
        """The durable names, with some of the changes since."""
        names, keeps = dict(self.durable), draw.choice((0.0, 0.5, 1.0)) if draw else 0.0
        for gone, come, file in self.pending if draw else ():
            if draw.random() < keeps:
                if gone is not None:
                    names.pop(gone, None)
                if come is not None:
                    names[come] = file
        return names


class Disk:
    """What is durable below `root` after a number of changes, and what is not yet."""

    def __init__(self, root: Path, found: Mapping[Path, bytes]) -> None:
        self.root = root
        self._files: dict[Path, _File] = {}
        self._names: dict[Path, _Names] = defaultdict(_Names)
        self._new_directories: dict[Path, None] = {}
        for path, content in found.items():
            self._files[path] = self._names[path.parent].durable[path] = _File(content)

    def apply(self, change: Change) -> None:
        """Take in the next change."""
        path = change.path
        match change.kind:
            case "create":
                file = self._file(path)
                if change.data is not None:
                    file.durable, file.pending = b"", []
            case "write":
                self._file(path).pending.append((change.offset, change.data or b""))
            case "sync":
                file = self._file(path)
                file.durable, file.pending = change.data or b"", []
            case "sync names":
                self._names[path] = _Names({name: self._file(name) for name in change.names})
                self._new_directories = {new: None for new in self._new_directories if new.parent != path}
            case "rename":
                assert change.source is not None
                file = self._files[path] = self._file(change.source)
                del self._files[change.source]
                self._names[path.parent].pending.append((change.source, path, file))
            case "unlink":
                self._names[path.parent].pending.append((path, None, self._files.pop(path, _File())))
            case "mkdir":
                self._new_directories[path] = None

    def _file(self, path: Path) -> _File:
        if path not in self._files:
            self._files[path] = _File()
            self._names[path.parent].pending.append((None, path, self._files[path]))
        return self._files[path]

    def after_cut(self, draw: random.Random | None) -> dict[Path, bytes]:
        """Files, by their paths below `root`; if `draw` is None, only what is durable."""
        lost = {new for new in self._new_directories if draw is None or draw.random() < 0.5}
        names = [item for directory in self._names.values() for item in directory.after_cut(draw).items()]
        return {
            path.relative_to(self.root): file.after_cut(draw)
            for path, file in names
            if path.is_relative_to(self.root) and lost.isdisjoint(path.parents)
        }

    @property
    def known(self) -> int:
        """How much this disk itself knows to be durable; see `Image`."""
        return 0


@dataclass(frozen=True)
class Image:
    """What a power cut leaves.

    Attributes:
        at: the number of changes before it.
        known: what was known to be durable by then: the step of a store's newest generation, or how many times a
            caller had been told that something is there.
    """

    at: int
    known: int
    files: dict[Path, bytes]

    def restore(self, folder: Path) -> Path:
        """Write the files into a new or an empty directory, and return it."""
        folder.mkdir(exist_ok=True)
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        return folder


def images(
    disk: Disk,
    journal: Sequence[Change],
    *,
    instants: Collection[int] | None = None,
    told: Sequence[int] = (),
    draws: int = 1,
    seed: int = 0,
) -> Iterator[Image]:
    """What power cuts leave before, between and after all changes; equal images only once.

    A cut after several writes may leave what a cut between them leaves, so only the last of them has draws.

    Args:
        instants: numbers of changes before the cut; None: all.
        told: the numbers of changes after which a caller was told that something is there.
        draws: how many images of each instant, besides the one of what is durable alone.
    """
    draw, seen = random.Random(seed), set()
    for at in range(len(journal) + 1):
        if at:
            disk.apply(journal[at - 1])
        is_between = [change.kind for change in journal[max(at - 1, 0) : at + 1]] == ["write", "write"]
        for chosen in (None, *[draw] * (0 if is_between else draws)) if instants is None or at in instants else ():
            known = disk.known + sum(at >= end for end in told)
            image = Image(at, known, disk.after_cut(chosen))
            identity = (image.known, hash(frozenset(image.files.items())))
            if identity not in seen:
                seen.add(identity)
                yield image


class StoreDisk(Disk):
    """Knows which generation of a store is durable, and what it needs.

    The newest manifest found at the start counts as one whose name is not durable: a process that was killed between
    its rename and the fsync of the directory leaves it so.

    Attributes:
        generation: the newest one that is durable; `step`: how many steps it has.
        overwritten: writes to chunks that this generation needs.
    """

    def __init__(self, root: Path, found: Mapping[Path, bytes]) -> None:
        super().__init__(root, found)
        self.generation = self.step = -1
        self.overwritten: list[str] = []
        self._needed: set[tuple[str, int]] = set()
        newest = sorted(path for path in self._files if _MANIFEST.fullmatch(path.name))[-1:]
        for path in newest:
            self._names[path.parent].pending.append((None, path, self._names[path.parent].durable.pop(path)))
        self._see_manifests()

    def apply(self, change: Change) -> None:
        if change.kind == "write" and (change.path.name, change.offset) in self._needed:
            self.overwritten.append(f"{change.offset} of {change.path.name}, which generation {self.generation} needs")
        super().apply(change)
        if change.kind.startswith("sync"):
            self._see_manifests()

    @property
    def known(self) -> int:
        """The step of the newest generation that is durable."""
        return self.step

    def _see_manifests(self) -> None:
        """Note what the newest durable manifest needs: the places of its chunks (codec none, one directory)."""
        for path, file in [item for names in self._names.values() for item in names.durable.items()]:
            match = _MANIFEST.fullmatch(path.name)
            if match and int(match[1]) > self.generation:
                self.generation = int(match[1])
                body = json.loads(file.durable.rpartition(b"\n")[0])
                self.step = body["captured"]["step"]
                self._needed = {place for kind, rows in body["records"].items() for place in self._places(kind, rows)}

    def _places(self, kind: str, rows: list[list[int] | None]) -> list[tuple[str, int]]:
        """Files and offsets of the chunks of one kind. A chunk has only its stored length, so chunks are adjacent."""
        pack = next(file for path, file in self._files.items() if path.name.startswith(f"{kind}.") and file.durable)
        offset = 8 + int.from_bytes(pack.durable[:8], "little")  # the headers of both slots are equal
        found = []
        for row in rows:
            if row is not None:
                found.append((f"{kind}.{'ab'[row[0]]}.safetensors", offset))
                offset += row[1]
        return found


def overwritten(disk: StoreDisk, journal: Sequence[Change]) -> list[str]:
    """The writes of a whole journal to chunks that the newest durable generation of the moment needed."""
    for change in journal:
        disk.apply(change)
    return disk.overwritten
