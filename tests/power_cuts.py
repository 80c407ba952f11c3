"""A disk that forgets what was not fsynced, and one that watches what a committed generation needs.

Scope: `ForgetfulBackend` does every call on a real directory and remembers which bytes and names are durable; at chosen
calls it takes images of what a power cut could leave then. A killed process keeps the page cache, so a kill cannot test
what this does.
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

PAGE = 4096
_MANIFEST = re.compile(r"manifest-(\d+)\.json")


@dataclass
class _File:
    """Bytes as of the last sync, and the writes since."""

    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def after_cut(self, draw: random.Random) -> bytes:
        """The durable bytes, and any pages of what was written since."""
        content, keeps = bytearray(self.durable), draw.choice((0.0, 0.5, 1.0))
        for offset, written in self.pending:
            for start in range(0, len(written), PAGE):
                if draw.random() < keeps:
                    page = written[start : start + PAGE]
                    content.extend(bytes(max(0, offset + start + len(page) - len(content))))
                    content[offset + start : offset + start + len(page)] = page
        return bytes(content)


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
    """Remembers what is durable below `root`, one call at a time.

    Files that are there already are durable, but for the newest manifest's name: a process that was killed between
    its rename and the fsync of the directory leaves it so.

    Args:
        cuts: indices of calls before which an image is taken.

    Attributes:
        overwritten: writes to what the newest durable generation needs.
    """

    def __init__(self, root: Path, cuts: Collection[int] = (), seed: int = 0) -> None:
        super().__init__()
        self.root = root
        self.cuts = cuts
        self.images: list[Image] = []
        self.overwritten: list[str] = []
        self._draw = random.Random(seed)
        self._files: dict[Path, _File] = {}
        self._durable_names: dict[Path, dict[Path, _File]] = defaultdict(dict)
        self._needed: set[tuple[str, int]] = set()
        self._generation = -1
        for path in root.glob("*/*.*"):
            self._files[path] = _File(path.read_bytes())
        manifests = sorted(path for path in self._files if _MANIFEST.fullmatch(path.name))
        for path in self._files.keys() - set(manifests[-1:]):
            self._durable_names[path.parent][path] = self._files[path]
        self._see_manifests()

    def _cut(self, kind: str) -> None:
        """Called under the lock, before every call."""
        if len(self.calls) in self.cuts:
            names = self._files if self._draw.random() < 0.5 else dict(self._all_durable())
            files = {path.relative_to(self.root): file.after_cut(self._draw) for path, file in names.items()}
            for marker in self.root.glob("*/unfinished"):
                files[marker.relative_to(self.root)] = b""
            self.images.append(Image(len(self.calls), self._generation, files))
        self.calls.append(kind)

    def _all_durable(self) -> list[tuple[Path, _File]]:
        return [item for names in self._durable_names.values() for item in names.items()]

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        with self._fault_lock:
            self._cut("open")
            descriptor = os.open(path, flags, mode)
            if flags & os.O_CREAT:
                file = self._files.setdefault(path, _File())
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
            if (path.name, offset) in self._needed:
                place = f"{offset} of {path.name}"
                self.overwritten.append(f"call {len(self.calls)} at {place}: generation {self._generation} needs it")
            self._files[path].pending.append((offset, bytes(view)))
            return os.pwritev(descriptor, [view], offset)

    def _sync(self, kind: str, path: Path, call: Callable[[], None]) -> None:
        with self._fault_lock:
            self._cut(kind)
            call()
            if path.is_dir():
                self._durable_names[path] = {name: file for name, file in self._files.items() if name.parent == path}
                self._see_manifests()
            else:
                self._files[path].durable, self._files[path].pending = path.read_bytes(), []

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._sync("fdatasync", path, lambda: os.fdatasync(descriptor))

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self._sync("fsync", path, lambda: os.fsync(descriptor))

    def _call_allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        with self._fault_lock:
            self._cut("allocate")
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._files[path].pending.append((0, bytes(size_bytes)))

    def _call_replace(self, source: Path, destination: Path) -> None:
        with self._fault_lock:
            self._cut("replace")
            os.replace(source, destination)
            self._files[destination] = self._files.pop(source)

    def _call_unlink(self, path: Path) -> None:
        with self._fault_lock:
            self._cut("unlink")
            os.unlink(path)
            self._files.pop(path, None)

    def _call_list(self, path: Path) -> list[str]:
        return os.listdir(path)  # changes nothing: no instant of its own

    def _see_manifests(self) -> None:
        """What the newest manifest that is durable needs: the places of its chunks (codec none, one directory)."""
        for path, file in self._all_durable():
            match = _MANIFEST.fullmatch(path.name)
            if match and int(match[1]) > self._generation:
                self._generation = int(match[1])
                body = json.loads(file.durable.rpartition(b"\n")[0])
                self._needed = {place for kind, rows in body["records"].items() for place in _places(kind, rows, path)}


def _places(kind: str, rows: list[list[int] | None], manifest: Path) -> list[tuple[str, int]]:
    """Files and offsets of the chunks of one kind. Each is as long as it is stored, so they follow one another."""
    with (manifest.parent / f"{kind}.a.safetensors").open("rb") as pack:
        offset = 8 + int.from_bytes(pack.read(8), "little")
    found = []
    for row in rows:
        if row is not None:
            found.append((f"{kind}.{'ab'[row[0]]}.safetensors", offset))
            offset += row[1]
    return found
