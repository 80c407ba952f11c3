"""A store of named tensors for tests: small, quick, and checked for leaks.

Scope: `opened`, blocks of one value, what must hold when nothing runs.
Not here: the tests (see `tests/store/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import torch

from tierstore import TensorStore, Tier, TierConfig
from tierstore.io.backend import Backend

CHUNK = 65536
PAGE = 4096
TIERS = list(Tier)


class QuickBackend(Backend):
    """Does not wait for the disk: at most the process is killed in these tests, and the page cache outlives that."""

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        pass

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        pass


def config(path: Path | None, **options: Any) -> TierConfig:
    defaults: dict[str, Any] = {
        "nvme": [path / "store"] if path is not None else [],
        "gpu_memory": 8 * CHUNK,
        "cpu_memory": 16 * CHUNK,
        "chunk_bytes": CHUNK,
        "io_threads": 2,
        "timeout_s": 30.0,
    }
    return TierConfig(**{**defaults, **options})


@contextlib.asynccontextmanager
async def opened(path: Path | None, **options: Any) -> AsyncIterator[TensorStore]:
    extra = {key: options.pop(key) for key in ("resume", "backend") if key in options}
    extra.setdefault("backend", QuickBackend())
    async with TensorStore.open(config(path, **options), **extra) as store:
        yield store


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def block(value: float, elements: int = CHUNK // 4) -> dict[str, torch.Tensor]:
    """One chunk, unless asked otherwise."""
    return {"w": torch.full((elements,), float(value))}


async def value_of(store: TensorStore, name: str) -> float:
    """The value of a `block`, all elements of which must be equal."""
    async with store.acquire(name) as tensors:
        low, high = tensors["w"].min().item(), tensors["w"].max().item()
        assert low == high, f"{name} is torn: {low} to {high}"
        return low


async def settled(store: TensorStore) -> None:
    """Wait for the loads and removals that nobody else waits for."""
    while store._owner._tasks:
        await asyncio.wait(set(store._owner._tasks))


def assert_at_rest(store: TensorStore) -> None:
    """Only homes, and idle copies on the device, take memory: no buffer is lent, no copy in use, no job running."""
    homes = store._homes
    assert store._arena is not None
    for name, pool in store._arena._pools.items():
        if name != "resident":
            assert pool.used_bytes == 0, f"{name} has {pool.used_bytes} B out"
    usage = store.usage()
    padded = sum(-(-e.layout.nbytes // PAGE) * PAGE for e in store._entries.values() if e.home is Tier.CPU)
    assert homes.resident.used_bytes == padded
    copies = {e.copy for e in store._entries.values() if e.copy is not None}
    assert usage[Tier.GPU].used_bytes == sum(copy.nbytes for copy in copies)
    assert all(copy.users == 0 and copy.modifiers == 0 for copy in copies)
    assert all(e.jobs == 0 and not e.lock.locked() for e in store._entries.values())


def pack_files(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "store").iterdir() if entry.name.startswith("put-"))


def named_files(path: Path) -> list[str]:
    """The packs that the manifests of the last two generations name: exactly these files should be there."""
    manifests = [json.loads(file.read_text().splitlines()[0]) for file in (path / "store").glob("manifest-*.json")]
    return sorted({f"{kind}.a.safetensors" for manifest in manifests for kind in manifest["records"]})


def flip(path: Path, text: str) -> str:
    """Damage the first byte of data of the newest pack that holds `text` in its header."""
    for file in sorted(path.glob("put-*"), key=lambda file: int(file.name[4:].split(".")[0]), reverse=True):
        data = bytearray(file.read_bytes())
        start = int.from_bytes(data[:8], "little") + 8
        if text.encode() in data[:start]:
            data[start] ^= 1
            file.write_bytes(data)
            return file.name
    raise AssertionError(f"no pack holds {text}")
