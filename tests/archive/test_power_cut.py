"""A power cut at any call of a pack or an unpack: a file under its own name is whole; what was reported is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import read_safetensors, small_checkpoint
from power_cuts import Disk, JournalBackend, images

from tierstore.archive.opening import open_archive
from tierstore.archive.packing import PackOptions, pack
from tierstore.archive.reading import verify
from tierstore.archive.sources import INDEX, SINGLE, open_source
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend

pytestmark = pytest.mark.usefixtures("no_leaks")
MEMORY = 2**40
Write = Callable[[Path, Backend], object]


def check_cuts(folder: Path, write: Write, check: Callable[[Path], bool]) -> None:
    """Cuts the power before every change, and after the last.

    Args:
        check: asserts that what is left is whole; returns whether there is anything.
    """
    live = folder / "live"
    write(live, backend := JournalBackend(live))
    found, told = set(), [len(backend.journal)]
    for number, image in enumerate(images(Disk(live, backend.found), backend.journal, told=told)):
        left = image.restore(folder / str(number))
        found.add(is_there := check(left))
        if image.known:
            assert is_there, "it was told to be there, and a power cut has taken it away"
        if not is_there:
            write(left, Backend())
            assert check(left), f"what was left after {image.at} changes is in the way"
    assert found == {True, False}


def places(folder: Path, shape: str) -> tuple[Path, ...]:
    names = {"file": ["p.safetensors"], "shards": ["p"], "stripes": ["p", "q"]}[shape]
    return tuple(folder / name for name in names)


@pytest.mark.parametrize("shape", ["file", "shards", "stripes"])
def test_of_a_pack(tmp_path: Path, shape: str) -> None:
    small_checkpoint(tmp_path / "a", blocks=1)
    source = open_source(tmp_path / "a")
    shards = 1 if shape == "file" else 2

    def write(folder: Path, backend: Backend) -> None:
        for place in places(folder, shape):
            place.parent.mkdir(parents=True, exist_ok=True)
        pack(source, PackOptions(places(folder, shape), shards=shards, memory_bytes=MEMORY), {}, backend=backend)

    def check(folder: Path) -> bool:
        first, *_ = places(folder, shape)
        if not (first if shape == "file" else first / INDEX).exists():
            return False
        assert not verify(open_archive(places(folder, shape)), MEMORY)
        with pytest.raises(ConfigError, match="is there already"):
            write(folder, Backend())
        return True

    check_cuts(tmp_path, write, check)


@pytest.mark.parametrize("shard_bytes", [50_000, 10**9])
def test_of_an_unpack(tmp_path: Path, shard_bytes: int) -> None:
    expected = small_checkpoint(tmp_path / "a", blocks=1)
    pack(open_source(tmp_path / "a"), PackOptions((tmp_path / "p.safetensors",), memory_bytes=MEMORY), {})
    files = open_archive([tmp_path / "p.safetensors"])

    def write(folder: Path, backend: Backend) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        unpack(files, UnpackOptions(folder / "out", shard_bytes, MEMORY), backend=backend)

    def check(folder: Path) -> bool:
        out = folder / "out"
        if not (out / SINGLE).exists() and not (out / INDEX).exists():
            return False
        assert read_safetensors(*out.glob("*.safetensors")) == expected
        return True

    check_cuts(tmp_path, write, check)
