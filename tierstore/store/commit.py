"""Generations: the manifest that makes a step permanent, recovery on open, and the lock of a store.

Scope: what a manifest says and how it is published, read and verified; who may use a directory.
Not here: chunk data (`slots.py`); what the captured state means (`train/`).

[Note: the barrier] A generation is published in this order: every chunk written, every file fdatasynced, the captured
state written and fsynced, the manifest written, fsynced and renamed, the directory fsynced. Only when the last of them
has returned may a byte of the generation before be overwritten. A failed fsync is never retried: the kernel may have
dropped the dirty pages, so that generation is abandoned and the error raised.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy

from tierstore.errors import ChecksumMismatch, ConfigError, FormatError, StorageError, StoreLocked
from tierstore.io.backend import Backend
from tierstore.io.files import read_bytes, write_atomic
from tierstore.pack import tree
from tierstore.pack.codecs import checksum_bytes
from tierstore.pack.strict_json import parse_json
from tierstore.store.slots import ChunkRecord

FORMAT_VERSION = 1
_MANIFEST = re.compile(r"manifest-(\d{12})\.json")
_OURS = re.compile(r"lock|(manifest|captured)-\d{12}\..*|(weights|state|gradients1?|put-\d+)\.[ab]\.safetensors")


@dataclass(frozen=True)
class Generation:
    """One committed state of the whole store.

    Attributes:
        number: counts commits from 0.
        layout: what the packs look like; a store opens only for an equal one.
        records: per pack, the record of each chunk.
        captured: everything else that is needed to begin the next step.
    """

    number: int
    layout: Mapping[str, Any]
    records: Mapping[str, Sequence[ChunkRecord | None]]
    captured: Any


class StoreLock:
    """Exclusive use of the directories of a store, by flock: it ends with the process, however that ends."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._descriptors: list[int] = []
        try:
            for directory in directories:
                self._descriptors.append(self._lock(directory / "lock"))
        except BaseException:
            self.release()
            raise

    @staticmethod
    def _lock(path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreLocked(
                f"the store {path.parent} is in use by process {owner}; stop it, or choose another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def release(self) -> None:
        """Give the directories back; twice is fine."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def claim_directory(path: Path) -> None:
    """Make a store directory (0700), or accept one that holds nothing but a store.

    Raises:
        ConfigError: it holds files that no store made; nothing was changed.
        StorageError: it cannot be made or written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        strangers = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
    except OSError as error:
        raise StorageError(f"cannot use {path} as a store: {error.strerror or error}") from None
    if strangers:
        raise ConfigError(f"{path} is not a store: it holds {strangers[0]!r}; give an empty or a new directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StorageError(f"cannot use {path} as a store: no permission to write")


class Manifests:
    """The manifests of a store, in its first directory. The last two are kept."""

    def __init__(self, directory: Path, backend: Backend) -> None:
        self.directory = directory
        self._backend = backend

    def numbers(self) -> list[int]:
        """Numbers of the committed generations that are still there, newest first."""
        found = (_MANIFEST.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted((int(match[1]) for match in found if match), reverse=True)

    async def publish(self, generation: Generation) -> None:
        """Write, fsync and rename. See [Note: the barrier]: chunks are durable before this is called."""
        state, arrays = tree.encode(generation.captured)
        captured = safetensors.numpy.save(arrays)
        body = {
            "format": "tierstore",
            "version": FORMAT_VERSION,
            "generation": generation.number,
            "layout": generation.layout,
            "records": {kind: _rows(records) for kind, records in generation.records.items()},
            "captured": state,
            "captured_bytes": len(captured),
            "captured_checksum": _digest(captured),
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        await write_atomic(self._captured(generation.number), captured, backend=self._backend)
        await write_atomic(
            self._manifest(generation.number), data + b"\n" + _digest(data).encode(), backend=self._backend
        )
        for number in self.numbers()[2:]:
            self._manifest(number).unlink(missing_ok=True)
            self._captured(number).unlink(missing_ok=True)

    async def read(self, number: int) -> Generation:
        """Read one generation.

        Raises:
            FormatError: it is not a manifest of this version, or damaged.
        """
        path = self._manifest(number)
        data, _, digest = (await read_bytes(path)).rpartition(b"\n")
        if _digest(data).encode() != digest:
            raise ChecksumMismatch(f"the manifest {path} is damaged; go back one with resume='previous'")
        body = parse_json(data, str(path))
        if body.get("format") != "tierstore" or body.get("version") != FORMAT_VERSION:
            raise FormatError(
                f"{path} has format {body.get('format')!r} version {body.get('version')!r}; "
                f"this release reads tierstore version {FORMAT_VERSION}"
            )
        captured = await read_bytes(self._captured(number))
        if len(captured) != body["captured_bytes"] or _digest(captured) != body["captured_checksum"]:
            raise ChecksumMismatch(f"{self._captured(number)} is damaged; go back one with resume='previous'")
        return Generation(
            number=body["generation"],
            layout=body["layout"],
            records={kind: _records(rows) for kind, rows in body["records"].items()},
            captured=tree.decode(body["captured"], safetensors.numpy.load(captured)),
        )

    def _manifest(self, number: int) -> Path:
        return self.directory / f"manifest-{number:012d}.json"

    def _captured(self, number: int) -> Path:
        return self.directory / f"captured-{number:012d}.safetensors"


def _digest(data: bytes) -> str:
    return f"{checksum_bytes(data):016x}"


def _rows(records: Sequence[ChunkRecord | None]) -> list[list[Any] | None]:
    return [None if r is None else [r.slot, r.stored_bytes, f"{r.checksum:016x}"] for r in records]


def _records(rows: Sequence[Sequence[Any] | None]) -> list[ChunkRecord | None]:
    return [None if row is None else ChunkRecord(int(row[0]), int(row[1]), int(row[2], 16)) for row in rows]
