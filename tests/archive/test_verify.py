"""Every flipped byte of a pack is found; the damaged chunk and its tensors are named."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from checkpoints import packed, random_tensor, small_checkpoint, write_safetensors
from faults import Fault, FaultyBackend

from tierstore.archive.opening import check_header, open_archive
from tierstore.archive.packing import Packed
from tierstore.archive.reading import verify
from tierstore.archive.sources import INDEX
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.config import Codec
from tierstore.errors import ChecksumMismatch, FormatError, StorageError, TierstoreError

MEMORY = 2**40
EMFILE = Fault(errno.EMFILE)


def is_caught(path: Path) -> bool:
    """Whether opening the pack or verifying it finds damage."""
    try:
        return bool(verify(open_archive([path]), MEMORY))
    except FormatError:
        return True


def test_every_byte_of_the_header_is_covered(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"h.0.w": random_tensor("F16", (5,)), "b": random_tensor("F32", (7,), 1)})
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    path = tmp_path / "p.safetensors"
    whole = path.read_bytes()
    text = whole[: int.from_bytes(whole[:8], "little") + 8].rstrip()
    # The blanks at the end are all alike, so some are enough. A blank becomes a newline, which JSON accepts as well.
    for at in [*range(len(text)), *range(len(text), int.from_bytes(whole[:8], "little") + 8, 101)]:
        mask = 0x20 ^ 0x0A if whole[at] == 0x20 else 1 << at % 8
        _flip(path, at, mask)
        with pytest.raises(TierstoreError):
            check_header(open_archive([path])[0])
        _flip(path, at, mask)
    check_header(open_archive([path])[0])


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_BITSHUFFLE])
def test_every_byte_of_data_and_pads_is_covered(tmp_path: Path, codec: Codec) -> None:
    tensors = {"h.0.w": random_tensor("F16", (50,)), "h.0.z": ("F16", (9000,), bytes(18000))}
    write_safetensors(tmp_path / "a", tensors)
    packed(tmp_path / "a", tmp_path / "p.safetensors", codec=codec, memory_bytes=MEMORY)
    path = tmp_path / "p.safetensors"
    assert not verify(open_archive([path]), MEMORY)
    (file,) = open_archive([path])
    chunks = file.chunks()
    covered = sum(-(-placed.chunk.stored_bytes // 4096) * 4096 for placed in chunks)
    assert file.header.data_start + covered == file.header.file_bytes, "no byte is in no chunk"
    # Chunks are hashed whole, so some bytes of each page are enough, among them the first and the last of the data.
    for at in [*range(file.header.data_start, file.header.file_bytes, 997), file.header.file_bytes - 1]:
        _flip(path, at)
        assert is_caught(path), at
        _flip(path, at)
    assert not verify(open_archive([path]), MEMORY)


def test_damage_is_told_by_file_offset_group_and_tensors(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    found = packed(tmp_path / "a", tmp_path / "p", shards=2, memory_bytes=MEMORY)
    placed = open_archive([tmp_path / "p"])[1].chunks()[0]
    _flip(found.files[1], placed.chunk.offset + 9)
    (damage,) = verify(open_archive([tmp_path / "p"]), MEMORY)
    assert (damage.path, damage.offset) == (found.files[1], placed.chunk.offset)
    assert (damage.group, list(damage.tensors)) == (placed.group.name, placed.tensors())
    with pytest.raises(ChecksumMismatch, match=f"group {placed.group.name}: '{placed.tensors()[0]}'"):
        unpack(open_archive([tmp_path / "p"]), UnpackOptions(tmp_path / "out", memory_bytes=MEMORY))
    assert not (tmp_path / "out").exists(), "nothing is left of it"


def test_what_the_disk_cannot_read_is_damage_and_the_rest_is_read(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    files = open_archive([tmp_path / "p.safetensors"])
    chunks = files[0].chunks()
    first, last = chunks[0], chunks[-1]
    _flip(first.file.path, first.chunk.offset)

    class Worn(FaultyBackend):
        def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
            if offset == last.chunk.offset:
                raise OSError(errno.EIO, "Input/output error")
            return super()._call_pread(descriptor, view, offset, path)

    flipped, unread = verify(files, MEMORY, backend=(backend := Worn()))
    assert (flipped.offset, unread.offset) == (first.chunk.offset, last.chunk.offset)
    assert list(unread.tensors) == last.tensors()
    assert "Input/output error" in unread.message
    assert backend.calls.count("pread") == len(chunks) - 1


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    with pytest.raises(StorageError, match="Too many open files"):
        verify(open_archive([tmp_path / "p.safetensors"]), MEMORY, backend=FaultyBackend(EMFILE, kinds=("open",)))


def test_every_byte_of_the_index_is_covered(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"h.0.w": random_tensor("F16", (5,)), "h.1.w": random_tensor("F16", (7,), 1)})
    packed(tmp_path / "a", tmp_path / "p", shards=2, memory_bytes=MEMORY)
    index = tmp_path / "p" / INDEX
    for at in range(index.stat().st_size):
        _flip(index, at)
        with pytest.raises(FormatError):
            open_archive([tmp_path / "p"])
        _flip(index, at)
    open_archive([tmp_path / "p"])
    index.write_text(index.read_text().replace("\n", " "))  # means the same
    with pytest.raises(ChecksumMismatch, match="was changed after it was written"):
        open_archive([tmp_path / "p"])


def test_a_truncated_pack_and_one_of_another_archive_are_refused(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    small_checkpoint(tmp_path / "b", blocks=2)
    one: Packed = packed(tmp_path / "a", tmp_path / "p", shards=2, memory_bytes=MEMORY)
    other: Packed = packed(tmp_path / "b", tmp_path / "q", shards=2, memory_bytes=MEMORY)
    one.files[1].write_bytes(other.files[1].read_bytes())
    with pytest.raises(FormatError, match=r"is file 2 of 2 of archive .*, not file 2 of 2 of"):
        open_archive([tmp_path / "p"])
    one.files[1].write_bytes(other.files[1].read_bytes()[:-4096])
    with pytest.raises(FormatError, match="but the file has"):
        open_archive([tmp_path / "p"])


def _flip(path: Path, at: int, mask: int | None = None) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (mask or 1 << at % 8)]))
