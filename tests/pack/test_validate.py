"""Hostile files: each is refused with its numbers, none crashes, hangs or allocates what it claims."""

from __future__ import annotations

import builtins
import io
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tierstore.errors import ChecksumMismatch, FormatError, StorageError, Truncated
from tierstore.pack.layout import Extent, TensorSpec, lay_out
from tierstore.pack.validate import Header, parse_header, read_header


def info(dtype: Any = "U8", shape: Any = (4,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = info()
TEXT = json.dumps(GOOD).encode()
HOSTILE: dict[str, tuple[bytes, str]] = {
    "not text": (pack(b"\xff\xfe{}"), "not UTF-8 at byte 0"),
    "not json": (pack(b"{oops"), "not valid JSON"),
    "empty header": (pack(b""), "not valid JSON"),
    "a list": (pack([]), "a JSON list, not an object"),
    "deep lists": (pack(b"[" * 100_000), "nested too deep"),
    "deep objects": (pack(b'{"a":' * 100_000), "nested too deep"),
    "deep shape": (pack(b'{"a":{"shape":' + b"[" * 50_000 + b"]" * 50_000 + b"}}"), "nested too deep"),
    "duplicate tensor": (pack(b'{"a":' + TEXT + b',"a":' + TEXT + b"}", b"1234"), "'a' stands twice"),
    "duplicate field": (pack(b'{"a":{"dtype":"U8","dtype":"U8","shape":[]}}'), "'dtype' stands twice"),
    "nan": (pack(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'), "NaN is not JSON"),
    "long integer": (pack(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'), "5000 digits"),
    "metadata list": (pack({"__metadata__": []}), "__metadata__ is a list"),
    "metadata number": (pack({"__metadata__": {"k": 1}}), r"__metadata__\['k'\] is a int"),
    "metadata surrogate": (pack(b'{"__metadata__":{"k":"\\ud800"}}'), "surrogate"),
    "tensor number": (pack({"a": 1}), "'a' is a int"),
    "missing field": (pack({"a": {"dtype": "U8", "shape": [0]}}), "missing .'data_offsets'"),
    "unknown field": (pack({"a": {**GOOD, "extra": 1}}), "unknown .\"'extra'\""),
    "unknown dtype": (pack({"a": info("F31")}, b"1234"), "unknown dtype 'F31'"),
    "dtype list": (pack({"a": info(["U8"])}, b"1234"), "dtype is a list"),
    "shape text": (pack({"a": info(shape="4")}, b"1234"), "shape is a str"),
    "shape bool": (pack({"a": info(shape=[True], end=1)}, b"1"), "shape holds a bool"),
    "shape float": (pack({"a": info(shape=[4.0])}, b"1234"), "shape holds a float"),
    "shape null": (pack({"a": info(shape=[None])}, b"1234"), "shape holds a NoneType"),
    "negative": (pack({"a": info(shape=[-2, -2])}, b"1234"), "shape holds -2"),
    "too large": (pack({"a": info(shape=[2**63])}, b"1234"), "9223372036854775808, not within"),
    "overflow to 4": (pack({"a": info("F32", [2**62 + 1], 0, 4)}, b"1234"), "takes 18446744073709551620 B"),
    "product overflow": (pack({"a": info(shape=[2**32, 2**32], end=0)}), r"more than 2\*\*63 elements"),
    "many dimensions": (pack({"a": info(shape=[2**62] * 65)}, b"1234"), "65 dimensions"),
    "three offsets": (pack({"a": {**GOOD, "data_offsets": [0, 4, 4]}}, b"1234"), "holds 3 numbers"),
    "backwards": (pack({"a": info(begin=4, end=0)}, b"1234"), "begin at 4, after their end 0"),
    "negative offset": (pack({"a": info(begin=-4, end=0)}, b"1234"), "holds -4"),
    "wrong size": (pack({"a": info(end=5)}, b"12345"), r"takes 4 B, but its offsets \[0, 5\] span 5 B"),
    "hole at start": (pack({"a": info(begin=1, end=5)}, b"12345"), "begins at 1 and leaves a hole"),
    "hole": (pack({"a": info(), "b": info(begin=5, end=9)}, b"1" * 9), "hole after 'a', which ends at 4"),
    "overlap": (pack({"a": info(), "b": info(begin=2, end=6)}, b"1" * 6), "begins at 2 and overlaps 'a'"),
    "same bytes": (pack({"a": info(), "b": info()}, b"1" * 4), "overlaps 'a'"),
    "trailing": (pack({"a": info()}, b"12345"), "1 B after the end of the data at byte"),
    "surrogate in name": (pack({"a\ud800": info()}, b"1234"), "surrogate"),
    "header bomb": ((2**63).to_bytes(8, "little") + b"{}", "9223372036854775808 B is over the limit"),
    "header just over": ((100_000_001).to_bytes(8, "little") + b"{}", "100000001 B is over the limit"),
}  # fmt: skip
SHORT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 B, shorter than the 8 B"),
    "seven bytes": (b"1234567", "7 B, shorter than the 8 B"),
    "header past the end": (
        (99_999_999).to_bytes(8, "little") + b"{}",
        "ends at byte 100000007, but the file has 10 B",
    ),
    "data past the end": (pack({"a": info()}, b"123"), r"ends at byte \d+, but the file has \d+ B"),
    "data far past the end": (pack({"a": info(shape=[2**60], end=2**60)}, b"123"), "but the file has"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused(case: str, tmp_path: Path) -> None:
    blob, message = HOSTILE[case]
    (tmp_path / "x").write_bytes(blob)
    with pytest.raises(FormatError, match=message) as caught:
        read_header(tmp_path / "x")
    assert str(caught.value).startswith(str(tmp_path / "x"))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("case", SHORT)
def test_short_file_is_truncated(case: str, tmp_path: Path) -> None:
    blob, message = SHORT[case]
    (tmp_path / "x").write_bytes(blob)
    with pytest.raises(Truncated, match=message):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("case", [*HOSTILE, *SHORT])
def test_nothing_is_accepted_here_that_the_library_refuses(case: str, tmp_path: Path) -> None:
    """The other way round is allowed: the library takes duplicate keys, for one."""
    blob = (HOSTILE | SHORT)[case][0]
    (tmp_path / "x").write_bytes(blob)
    try:
        with safe_open(tmp_path / "x", "np"):
            pass
    except SafetensorError:
        with pytest.raises(FormatError):
            read_header(tmp_path / "x")


def test_a_claimed_size_allocates_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((99_999_999).to_bytes(8, "little") + b"{" * 100)
    tracemalloc.start()
    try:
        with pytest.raises(Truncated):
            read_header(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", FormatError), ("", StorageError), ("absent", StorageError)):
        with pytest.raises(error, match=str(tmp_path)):
            read_header(tmp_path / name)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(HOSTILE["not json"][0])
    before = len(os.listdir("/proc/self/fd"))
    for name in ("x", "", "absent"):
        with pytest.raises((FormatError, StorageError)):
            read_header(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_foreign_files_are_read(tmp_path: Path) -> None:
    """Null metadata, leading spaces, unaligned data, zero-size tensors and scalars: all legal."""
    content = {
        "__metadata__": None,
        "z": info("F32", (0,), 1, 1),
        "a": info("U8", (), 0, 1),
        "y": info("F32", (0, 3), 0, 0),
    }
    (tmp_path / "x").write_bytes(pack(b"  " + json.dumps(content).encode() + b"   ", b"1"))
    header = read_header(tmp_path / "x")
    assert list(header.entries) == ["y", "a", "z"]
    assert header.metadata == {}
    with safe_open(tmp_path / "x", "np") as file:
        assert set(file.keys()) == set(header.entries)


def test_zero_dimension_after_an_overflow_is_refused_as_the_library_does() -> None:
    blob = pack({"a": info(shape=[2**62, 4, 0], end=0)})
    with pytest.raises(FormatError, match="elements"):
        parse_header(blob, len(blob), "x")


SMALL = lay_out(
    [
        Extent("e", (TensorSpec("w", "F32", (5,)), TensorSpec("v", "BF16", (2, 2)))),
        Extent("f", (TensorSpec("b", "U8", (9,)),)),
    ],
    {"k": "v"},
)
SEALED = lay_out([Extent("e", (TensorSpec("w", "F32", (5,)),))], {"k": "v"}, seal=True)


def test_truncation_at_every_byte() -> None:
    blob = SMALL.header + bytes(SMALL.file_bytes - SMALL.data_start)
    assert parse_header(SMALL.header, len(blob), "x").metadata["k"] == "v"
    for length in range(len(blob)):
        with pytest.raises(Truncated):
            parse_header(blob[:length], length, "x")
        with pytest.raises(FormatError):  # the size is honest, but the end could not be read
            parse_header(SMALL.header[: length % len(SMALL.header)], len(blob), "x")


def outcome(head: bytes, file_bytes: int) -> Header | None:
    try:
        return parse_header(head, file_bytes, "x")
    except FormatError:
        return None


def test_random_mutations_parse_or_raise() -> None:
    """Any error except a FormatError fails the test; a header that parses must meet the invariants."""
    generator = random.Random(5)
    text_end = 8 + len(SMALL.header[8:].rstrip())
    parsed = 0
    for _ in range(6000):
        head = bytearray(SMALL.header)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(text_end)
            head[at] = generator.choice([generator.randrange(256), *b'"{}[]:,0189-.eE \\'])
        header = outcome(bytes(head), SMALL.file_bytes)
        if header is not None:
            parsed += 1
            assert_invariants(header)
    assert parsed > 10  # names and metadata may change without harm


def test_mutations_of_a_sealed_header_never_go_unnoticed() -> None:
    original = parse_header(SEALED.header, SEALED.file_bytes, "x")
    text_end = 8 + len(SEALED.header[8:].rstrip())
    for at in range(text_end):
        for bit in range(8):
            head = bytearray(SEALED.header)
            head[at] ^= 1 << bit
            changed = outcome(bytes(head), SEALED.file_bytes)
            # A flipped bit in the name of the seal itself leaves an unsealed header, whose metadata shows it.
            assert changed in (None, original) or changed.metadata.keys() != original.metadata.keys(), (at, bit)


def test_a_changed_sealed_header_is_a_checksum_mismatch() -> None:
    with pytest.raises(ChecksumMismatch, match="changed after it was sealed"):
        parse_header(SEALED.header.replace(b'"w"', b'"W"'), SEALED.file_bytes, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
ODD = st.one_of(JSON, st.sampled_from([0, 1, 4, 2**62, 2**63, -1, "U8", "F32", "F4"]))
NEARLY = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__", "", "\0"]),
    st.fixed_dictionaries({
        "dtype": st.sampled_from(["U8", "F32", "F4"]) | ODD,
        "shape": st.lists(st.integers(0, 4) | ODD, max_size=3) | ODD,
        "data_offsets": st.tuples(st.integers(0, 8), st.integers(0, 8)) | ODD,
    }) | ODD,
    max_size=3,
)  # fmt: skip


@settings(max_examples=150)
@given(NEARLY, st.integers(0, 12))
def test_any_json_parses_or_raises(content: Any, data_bytes: int) -> None:
    text = json.dumps(content).encode()
    header = outcome(pack(text), 8 + len(text) + data_bytes)
    if header is not None:
        assert_invariants(header)


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 80))
def test_any_bytes_parse_or_raise(blob: bytes, file_bytes: int) -> None:
    outcome(blob, file_bytes)
    outcome(len(blob).to_bytes(8, "little") + blob, len(blob) + 8)


def assert_invariants(header: Header) -> None:
    position = 0
    for entry in header.entries.values():
        assert entry.begin == position <= entry.end
        assert all(size >= 0 for size in entry.shape)
        position = entry.end
    assert header.data_start + position == header.file_bytes


class ShortReads(io.FileIO):
    """A file of which each system call reads at most five bytes."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(5 if size is None or size < 0 else min(size, 5))

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:5])


def test_a_short_read_is_not_the_end_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_short(path: str, mode: str, buffering: int = -1, opener: Any = None) -> Any:
        raw = ShortReads(path, mode, opener=opener)
        return io.BufferedReader(raw) if buffering else raw

    path = tmp_path / "a.safetensors"
    path.write_bytes(pack({"a": GOOD}, b"1234"))
    monkeypatch.setattr(builtins, "open", open_short)
    assert list(read_header(path).entries) == ["a"]
