"""A disk that forgets what was not fsynced, and one that watches what a committed generation needs.

Scope: `ForgetfulBackend` does every call on a real directory and remembers which bytes and names are durable; at chosen
calls it takes images of what a power cut could leave then. `StoreBackend` knows the generations of a store, too. A
killed process keeps the page cache, so a kill cannot test what these do.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from faults import FaultyBackend

SECTOR = 512
_MANIFEST = re.compile(r"manifest-(\d+)\.json")


@dataclass(eq=False)
class _File:
    """Bytes as of the last sync, and the writes since."""

    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def after_cut(self, draw: random.Random) -> bytes:
        """The durable bytes, and any sectors of what was written since."""
        content, keeps = bytearray(self.durable), draw.choice((0.0, 0.5, 1.0))
        for offset, written in self.pending if keeps else ():
            content.extend(bytes(max(0, offset + len(written) - len(content))))
            for start in range(0, len(written), SECTOR if keeps < 1.0 else len(written)):
                stop = start + SECTOR if keeps < 1.0 else len(written)
                if draw.random() < keeps:
                    content[offset + start : offset + min(stop, len(written))] = written[start:stop]
        return bytes(content)


@dataclass
class _Names:
    """The names in a directory as of its last sync, and what has changed since: (name that went, name that came)."""

    durable: dict[Path, _File] = field(default_factory=dict)
    pending: list[tuple[Path | None, Path | None, _File]] = field(default_factory=list)

    def after_cut(self, draw: random.Random) -> dict[Path, _File]:
        """The durable names, and any of the changes since."""
        names, keeps = dict(self.durable), draw.choice((0.0, 0.5, 1.0))
        for gone, come, file in self.pending:
            if draw.random() < keeps:
                if gone is not None:
                    names.pop(gone, None)
                if come is not None:
                    names[come] = file
        return names


@dataclass(frozen=True)
class Image:
    """What a power cut leaves, and the last generation that was known to be durable before it."""

    at: int
    generation: int
    files: dict[Path, bytes]

    def restore(self, folder: Path) -> None:
        """Write it into an empty directory."""
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


class ForgetfulBackend(FaultyBackend):
    """Remembers what is durable below `root`, one call at a time. What is there already is durable.

    A file that is made or written past the backend is known from its own sync or its directory's.

    Args:
        cuts: indices of calls before which an image is taken.
    """

    def __init__(self, root: Path, cuts: Collection[int] = (), seed: int = 0) -> None:
        super().__init__()
        self.root = root
        self.cuts = cuts
        self.images: list[Image] = []
        self.generation = -1
        self._draw = random.Random(seed)
        self._files: dict[Path, _File] = {}
        self._names: dict[Path, _Names] = defaultdict(_Names)
        for path in root.rglob("*.*"):
            if path.is_file():
                self._files[path] = self._names[path.parent].durable[path] = _File(path.read_bytes())

    def image(self) -> Image:
        """What a cut leaves now."""
        names = [item for directory in self._names.values() for item in directory.after_cut(self._draw).items()]
        files = {path.relative_to(self.root): file.after_cut(self._draw) for path, file in names}
        return Image(len(self.calls), self.generation, files)

    def _cut(self, kind: str) -> None:
        """Called under the lock, before every call."""
        if len(self.calls) in self.cuts:
            self.images.append(self.image())
        self.calls.append(kind)

    def _change(self, gone: Path | None, come: Path | None, file: _File) -> None:
        path = come or gone
        assert path is not None
        self._names[path.parent].pending.append((gone, come, file))

    def _file(self, path: Path) -> _File:
        if path not in self._files:
            self._files[path] = _File()
            self._change(None, path, self._files[path])
        return self._files[path]

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        with self._fault_lock:
            self._cut("open")
            descriptor = os.open(path, flags, mode)
            if flags & os.O_CREAT:
                file = self._file(path)
                if flags & os.O_TRUNC:
                    file.durable, file.pending = b"", []
            return descriptor

    def _call_close(self, descriptor: int, path: Path) -> None:
        with self._fault_lock:
            self._cut("close")
            os.close(descriptor)

    def _move(self, kind: str, view: memoryview, path: Path, call: Callable[[memoryview], int]) -> int:
        with self._fault_lock:
            self._cut(kind)
            return call(view)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        with self._fault_lock:
            self._cut("pwrite")
            self._file(path).pending.append((offset, bytes(view)))
            return os.pwritev(descriptor, [view], offset)

    def _sync(self, kind: str, path: Path, call: Callable[[], None]) -> None:
        with self._fault_lock:
            self._cut(kind)
            call()
            if path.is_dir():
                for there in path.iterdir():
                    if there.is_file():
                        self._file(there)
                self._names[path] = _Names({name: file for name, file in self._files.items() if name.parent == path})
            else:
                file = self._file(path)
                file.durable, file.pending = path.read_bytes(), []

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._sync("fdatasync", path, lambda: os.fdatasync(descriptor))

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self._sync("fsync", path, lambda: os.fsync(descriptor))

    def _call_allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        with self._fault_lock:
            self._cut("allocate")
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._file(path).pending.append((0, bytes(size_bytes)))

    def _call_replace(self, source: Path, destination: Path) -> None:
        with self._fault_lock:
            self._cut("replace")
            os.replace(source, destination)
            file = self._files[destination] = self._file(source)
            del self._files[source]
            self._change(source, destination, file)

    def _call_unlink(self, path: Path) -> None:
        with self._fault_lock:
            self._cut("unlink")
            os.unlink(path)
            self._change(path, None, self._files.pop(path, _File()))

    def _call_list(self, path: Path) -> list[str]:
        return os.listdir(path)  # changes nothing: no instant of its own


class StoreBackend(ForgetfulBackend):
    """Knows which generation of a store is durable, and what it needs.

    The newest manifest that is there already has no durable name: a process that was killed between its rename and the
    fsync of the directory leaves it so.

    Attributes:
        overwritten: writes to what the newest durable generation needs.
    """

    def __init__(self, root: Path, cuts: Collection[int] = (), seed: int = 0) -> None:
        super().__init__(root, cuts, seed)
        self.overwritten: list[str] = []
        self._needed: set[tuple[str, int]] = set()
        newest = sorted(path for path in self._files if _MANIFEST.fullmatch(path.name))[-1:]
        for path in newest:
            self._change(None, path, self._names[path.parent].durable.pop(path))
        self._see_manifests()

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        if (path.name, offset) in self._needed:
            place = f"{offset} of {path.name}"
            self.overwritten.append(f"call {len(self.calls)} at {place}: generation {self.generation} needs it")
        return super()._call_pwrite(descriptor, view, offset, path)

    def _sync(self, kind: str, path: Path, call: Callable[[], None]) -> None:
        super()._sync(kind, path, call)
        with self._fault_lock:
            self._see_manifests()

    def _see_manifests(self) -> None:
        """What the newest manifest that is durable needs: the places of its chunks (codec none, one directory)."""
        for path, file in [item for names in self._names.values() for item in names.durable.items()]:
            match = _MANIFEST.fullmatch(path.name)
            if match and int(match[1]) > self.generation:
                self.generation = int(match[1])
                body = json.loads(file.durable.rpartition(b"\n")[0])
                self._needed = {place for kind, rows in body["records"].items() for place in _places(kind, rows, path)}


def _places(kind: str, rows: list[list[int] | None], manifest: Path) -> list[tuple[str, int]]:
    """Files and offsets of the chunks of one kind. Each is as long as it is stored, so they follow one another."""
    with next(manifest.parent.glob(f"{kind}.?.safetensors")).open("rb") as pack:  # the headers of both are equal
        offset = 8 + int.from_bytes(pack.read(8), "little")
    found = []
    for row in rows:
        if row is not None:
            found.append((f"{kind}.{'ab'[row[0]]}.safetensors", offset))
            offset += row[1]
    return found
