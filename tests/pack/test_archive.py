"""The table of an archive pack comes back as it was written, and a hostile one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import Codec
from tierstore.errors import FormatError
from tierstore.pack.archive import (
    ARCHIVE_KEY,
    Archive,
    ArchiveGroup,
    archive_header,
    chunk_count,
    read_archive,
)
from tierstore.pack.layout import TensorSpec, back_to_back
from tierstore.pack.validate import Header, parse_header

CHUNK = 8192


def archive(*sizes: int, codec: Codec = Codec.NONE, stored: int | None = None) -> Archive:
    groups = []
    for position, size in enumerate(sizes):
        tensors = back_to_back([TensorSpec(f"t{position}", "F16", (size,)), TensorSpec(f"e{position}", "F16", (0,))])
        lengths = [min(CHUNK, 2 * size - at * CHUNK) for at in range(chunk_count(2 * size, CHUNK))]
        chunks = tuple((stored or length, 7 * length) for length in lengths)
        groups.append(ArchiveGroup(f"g{position}", position, codec, 2, tensors, chunks))
    return Archive("0123456789abcdef", 0, 1, CHUNK, "by hand", tuple(groups), {"tied": "t0"} if sizes else {})


def header(one: Archive, metadata: dict[str, str] | None = None) -> Header:
    head = archive_header(one, metadata or {})
    return parse_header(head, len(head) + sum(group.stored_bytes for group in one.groups), "p")


@given(
    st.lists(st.integers(0, 20000), max_size=5),
    st.sampled_from([Codec.NONE, Codec.LZ4, Codec.ZSTD_BITSHUFFLE]),
    st.integers(1, 2**64 - 1),
)
def test_round_trip(sizes: list[int], codec: Codec, checksum: int) -> None:
    one = archive(*sizes, codec=codec)
    groups = tuple(
        replace(group, chunks=tuple((stored, checksum) for stored, _ in group.chunks)) for group in one.groups
    )
    one = replace(one, groups=groups)
    assert read_archive(header(one, {"format": "pt", "order": "2"}), "p") == one


@given(st.integers(1, 20000), st.integers(1, 4096))
def test_the_header_of_shorter_chunks_fits_where_that_of_raw_ones_was_planned(size: int, stored: int) -> None:
    planned_bytes = len(archive_header(archive(size, size, codec=Codec.LZ4), {}))
    shorter = archive(size, size, codec=Codec.LZ4, stored=min(stored, 2 * size % CHUNK or CHUNK))
    assert len(archive_header(shorter, {}, planned_bytes)) == planned_bytes


def test_a_file_without_a_table_is_none() -> None:
    plain = header(archive(10))
    assert read_archive(replace(plain, metadata={}), "p") is None


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *keys, last = [int(key) if key.isdecimal() else key for key in path.split("/")]
        at: Any = body
        for key in keys:
            at = at[key]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("version", 2), "an archive of version 2; this release reads version 1"),
        (
            _set("groups/0/codec", "auto"),
            "group 'g0' has the codec 'auto', which this release does not know; it knows none, lz4",
        ),
        (_set("groups/0/codec", "zip"), "group 'g0' has the codec 'zip', which this release does not know"),
        (_set("groups/0/codec", "lz4"), "is not where the table of chunks says"),
        (_set("groups/0/chunks", []), "has 0 chunks of 8192 B"),
        (_set("groups/0/chunks/0/0", 100), "a chunk of group 'g0' is 100, not a number of 8192 to 8192"),
        (_set("groups/0/chunks/0/0", 2**70), "does not fit 64 bits"),
        (_set("groups/0/chunks/0/0", True), "a chunk of group 'g0' is True"),
        (_set("groups/0/chunks/0", [1]), "is 1 values, not 2"),
        (_set("groups/0/chunks/0/1", "xyz"), "'xyz' is not 16 hexadecimal digits"),
        (_set("groups/0/tensors/0/2", [9000, 2**62]), "more than 2\\*\\*63 elements"),
        (_set("groups/0/tensors/0/1", "F17"), "unknown dtype 'F17'"),
        (_set("groups/1/tensors/0/0", "other"), "'other' is not where the table of chunks says"),
        (_set("groups/0/name", "a\nb"), "holds a control character"),
        (_set("groups/0/tensors", []), "group 'g0' has no tensors"),
        (_set("groups/1/position", 0), "the groups are not in their order"),
        (_set("groups/1/tensors/0/0", "t0"), "1 tensors stand in two groups"),
        (_set("groups", {}), "groups is a dict, not a list"),
        (_set("chunk_bytes", 8193), "not a multiple of 4096"),
        (_set("chunk_bytes", 2**30), "chunk_bytes is 1073741824, not a number of 4096 to"),
        (_set("shard", 1), "shard is 1, not a number of 0 to 0"),
        (_set("shards", 0), "shards is 0"),
        (_set("archive", "0123"), "not 16 hexadecimal digits"),
        (_set("aliases", {"x": "nothing"}), "the alias 'x' is a tensor itself, or 'nothing', its target"),
        (_set("more", 1), r"is not an object of version, archive.*: 'more' is not known"),
    ],
)
def test_a_table_that_is_wrong_is_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    good = header(archive(9000, 10))
    body = json.loads(good.metadata[ARCHIVE_KEY])
    change(body)
    with pytest.raises(FormatError, match=message):
        read_archive(replace(good, metadata=good.metadata | {ARCHIVE_KEY: json.dumps(body)}), "p")


@pytest.mark.parametrize("text", ["", "null", "[1]", "{", '{"version": 1}', '{"version": 1, "version": 1}'])
def test_what_is_no_table_is_refused(text: str) -> None:
    good = header(archive(10))
    with pytest.raises(FormatError, match="p: "):
        read_archive(replace(good, metadata={ARCHIVE_KEY: text}), "p")
