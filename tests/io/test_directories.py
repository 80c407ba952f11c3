"""What the system says of a directory before anything is made there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tierstore.config import TierConfig
from tierstore.errors import MachineWarning
from tierstore.io import directories, machine
from tierstore.io.directories import why_in_memory
from tierstore.store.tensors import TensorStore
from tierstore.train.engine import Engine


def mount(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the system say that this directory is on a file system of this kind, and others on other ones."""
    device = path.stat().st_dev
    lines = [
        "22 27 0:9999 / /a\\040b rw,relatime shared:1 - tmpfs tmpfs rw",
        f"23 27 {os.major(device)}:{os.minor(device)} / {path} rw - {kind} none rw,size=1k",
    ]
    (folder / "mounts").write_text("\n".join(lines))
    monkeypatch.setattr(directories, "_MOUNTS", folder / "mounts")


@pytest.mark.parametrize(("kind", "is_told"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_what_is_no_disk_is_told(kind: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(tmp_path, kind, monkeypatch, tmp_path)
    for path in (tmp_path, tmp_path / "to be" / "made"):
        reason = why_in_memory(path)
        assert (reason is not None) == is_told
        if reason is not None:
            assert reason.startswith(f"{path} is in memory ({kind}): ")


def test_where_the_system_tells_nothing_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "_MOUNTS", tmp_path / "none")
    assert why_in_memory(tmp_path) is None


def test_no_store_is_in_memory_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(tmp_path, "tmpfs", monkeypatch, tmp_path)
    tiers = TierConfig(gpu_memory="1MiB", cpu_memory="64MiB", nvme=[tmp_path / "store"])
    with pytest.warns(MachineWarning, match=r"store is in memory \(tmpfs\)") as told, Engine(nn.Linear(3, 3), tiers):
        pass
    assert [warning.filename for warning in told] == [__file__]

    async def main() -> None:
        async with TensorStore.open(TierConfig(nvme=[tmp_path / "tensors"])):
            pass

    with pytest.warns(MachineWarning, match=r"tensors is in memory \(tmpfs\)") as told:
        asyncio.run(main())
    assert [warning.filename for warning in told] == [__file__]


def test_no_loop_of_a_caller_asks_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk hangs, the answer may never come."""
    threads: list[threading.Thread] = []

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return function(*args)

        return noted

    monkeypatch.setattr(directories, "why_in_memory", note(why_in_memory))
    monkeypatch.setattr(machine, "memory_limits", note(machine.memory_limits))

    async def main() -> None:
        async with TensorStore.open(TierConfig(nvme=[tmp_path / "tensors"])):
            pass

    asyncio.run(main())
    assert len(threads) == 2
    assert threading.current_thread() not in threads
