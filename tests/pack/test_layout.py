"""Packs are safetensors files that the library itself accepts, with all tensors where the layout says."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from tierstore.errors import FormatError
from tierstore.pack.layout import (
    ALIGNMENT,
    DTYPE_BITS,
    PAD_KEY,
    ChunkSpec,
    Extent,
    Layout,
    TensorEntry,
    TensorSpec,
    build_header,
    capacity_pack,
    lay_out,
    padded,
    slot_pack,
)
from tierstore.pack.validate import parse_header, read_header

EXTENTS = (
    Extent(
        "a", (TensorSpec("a.half", "F16", (3, 5)), TensorSpec("a.wide", "F32", (7,)), TensorSpec("a.b", "BF16", ()))
    ),
    Extent("b", (TensorSpec("b.full", "F64", (512,)),)),
    Extent("c", (TensorSpec("c.empty", "F32", (0, 4)), TensorSpec("c.bytes", "U8", (4097,)))),
)
NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "U8": "u1", "I16": "<i2", "I64": "<i8"}


def write(path: Path, layout: Layout, seed: int = 0) -> bytes:
    data = np.random.default_rng(seed).integers(0, 64, layout.file_bytes - layout.data_start, dtype=np.uint8).tobytes()
    path.write_bytes(layout.header + data)
    return data


def test_library_reads_what_the_layout_says(tmp_path: Path) -> None:
    layout = lay_out(EXTENTS, {"note": "für später"})
    data = write(tmp_path / "x.safetensors", layout)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"note": "für später", PAD_KEY: "__pad__"}
        assert set(file.keys()) == {entry.name for entry in layout.entries}
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        for entry in layout.entries:
            if entry.dtype in NUMPY:
                expected = np.frombuffer(data[entry.begin : entry.end], NUMPY[entry.dtype]).reshape(entry.shape)
                np.testing.assert_array_equal(file.get_tensor(entry.name), expected)


def test_torch_loads_a_pack_with_bf16(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    layout = lay_out(EXTENTS)
    data = write(tmp_path / "x.safetensors", layout)
    loaded = load_torch(tmp_path / "x.safetensors")
    entry = next(entry for entry in layout.entries if entry.name == "a.b")
    assert loaded["a.b"].dtype == torch.bfloat16
    assert loaded["a.b"].view(torch.int16).item() == int.from_bytes(
        data[entry.begin : entry.end], "little", signed=True
    )


def test_offsets_are_the_ones_computed_by_hand() -> None:
    layout = lay_out(EXTENTS)
    assert layout.data_start % ALIGNMENT == 0
    assert [(e.name, e.begin, e.end) for e in layout.entries] == [
        ("a.wide", 0, 28), ("a.half", 28, 58), ("a.b", 58, 60), ("__pad__0", 60, 4096),
        ("b.full", 4096, 8192),
        ("c.empty", 8192, 8192), ("c.bytes", 8192, 12289), ("__pad__1", 12289, 16384),
    ]  # fmt: skip
    spans = [(span.offset - layout.data_start, span.padded_bytes) for span in layout.spans.values()]
    assert spans == [(0, 4096), (4096, 4096), (8192, 8192)]
    assert layout.file_bytes == layout.data_start + 16384


def test_pads_have_names_that_no_tensor_has() -> None:
    extent = Extent("e", (TensorSpec("__pad__0", "U8", (1,)), TensorSpec("__pad___1", "U8", (1,))))
    layout = lay_out([extent])
    header = parse_header(layout.header, layout.file_bytes, "x")
    assert len(header.entries) == 3
    assert set(header.tensors) == {"__pad__0", "__pad___1"}


def test_every_dtype_of_the_table_is_read_by_the_library(tmp_path: Path) -> None:
    layout = lay_out([Extent("e", tuple(TensorSpec(f"t.{dtype}", dtype, (8,)) for dtype in DTYPE_BITS))])
    write(tmp_path / "x.safetensors", layout)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert {f"t.{dtype}" for dtype in DTYPE_BITS} < set(file.keys())


def test_slot_pack_keeps_the_order_of_sections(tmp_path: Path) -> None:
    chunks = [
        ChunkSpec("h.0/state/0", (("exp_avg", "F32", 1000), ("exp_avg_sq", "F32", 1000), ("residual", "I16", 1000))),
        ChunkSpec("h.0/state/1", (("exp_avg", "F32", 3), ("exp_avg_sq", "F32", 3), ("residual", "I16", 3))),
    ]
    layout = slot_pack(chunks)
    data = write(tmp_path / "x.safetensors", layout)
    loaded = load_file(tmp_path / "x.safetensors")
    span = layout.spans["h.0/state/1"]
    assert span.padded_bytes == 4096
    raw = data[span.offset - layout.data_start :][:30]
    assert loaded["h.0/state/1.exp_avg_sq"].tobytes() == raw[12:24]
    assert loaded["h.0/state/1.residual"].tobytes() == raw[24:]
    assert layout.spans["h.0/state/0"].padded_bytes == padded(10_000)


def test_slot_pack_refuses_a_section_that_is_not_aligned() -> None:
    with pytest.raises(FormatError, match=r"'c\.m' of F32 would start at byte 2"):
        slot_pack([ChunkSpec("c", (("r", "I16", 1), ("m", "F32", 1)))])


def test_capacity_pack_holds_whole_pages(tmp_path: Path) -> None:
    layout = capacity_pack([ChunkSpec("c/0", (("m", "F32", 1025),)), ChunkSpec("c/1", (("m", "F32", 1),))])
    write(tmp_path / "x.safetensors", layout)
    loaded = load_file(tmp_path / "x.safetensors")
    assert {name: array.shape for name, array in loaded.items()} == {"c/0": (8192,), "c/1": (4096,)}
    assert [span.padded_bytes for span in layout.spans.values()] == [8192, 4096]


def test_a_header_is_as_long_as_it_is_asked_to_be_or_refused() -> None:
    layout = lay_out(EXTENTS, {"k": "v" * 5000}, seal=True)
    header = parse_header(
        build_header(layout.entries, {"k": "v"}, data_start=layout.data_start, seal=True), layout.file_bytes, "x"
    )
    assert header.data_start == layout.data_start
    assert header.metadata["k"] == "v"
    with pytest.raises(FormatError, match=f"does not end at byte {layout.data_start}"):
        build_header(layout.entries, {"k": "x" * 10_000}, data_start=layout.data_start, seal=True)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([TensorSpec("a", "F31", (1,))], "unknown dtype 'F31'"),
        ([TensorSpec("a", "U8", (-1,))], "negative"),
        ([TensorSpec("a", "U8", (2**62, 4))], r"more than 2\*\*63 elements"),
        ([TensorSpec("a", "F4", (3,))], "not a whole number of bytes"),
        ([TensorSpec("a", "U8", (1,)), TensorSpec("a", "U8", (1,))], "stand twice"),
        ([TensorSpec("__metadata__", "U8", (1,))], "__metadata__"),
        ([TensorSpec("a\ud800", "U8", (1,))], "surrogate"),
    ],
)
def test_what_cannot_be_written_is_refused(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        lay_out([Extent("e", tuple(specs))])


def test_a_header_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.pack.layout.MAX_HEADER_BYTES", 4000)
    with pytest.raises(FormatError, match="over the limit of safetensors"):
        lay_out([Extent("e", (TensorSpec("a", "U8", (1,)),))])


def test_a_hole_is_refused() -> None:
    with pytest.raises(FormatError, match="leaves a hole after 'a', which ends at 1"):
        build_header([TensorEntry("a", "U8", (1,), 0, 1), TensorEntry("b", "U8", (1,), 2, 3)], {})


def test_names_survive(tmp_path: Path) -> None:
    names = ["", "ünï", "a b", 'quo"te\\', "\u2028", "日本", "\U0001f600"]
    layout = lay_out([Extent("e", tuple(TensorSpec(name, "U8", (2,)) for name in names))])
    write(tmp_path / "x.safetensors", layout)
    assert set(read_header(tmp_path / "x.safetensors").tensors) == set(names)
    assert set(names) < set(load_file(tmp_path / "x.safetensors"))


def test_twenty_thousand_chunks_take_seconds_at_most() -> None:
    sections = (("exp_avg", "F32", 65537), ("exp_avg_sq", "F32", 65537), ("residual", "I16", 65537))
    begin = time.perf_counter()
    layout = slot_pack([ChunkSpec(f"h.{i // 50}/state/{i % 50}", sections) for i in range(20_000)])
    header = parse_header(layout.header, layout.file_bytes, "x")
    assert time.perf_counter() - begin < 20  # about 1 s; quadratic behaviour would take minutes
    assert len(header.entries) == 80_000


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["U8", "F16", "F32", "F64"]), st.lists(st.integers(0, 40), max_size=3)),
            max_size=5,
        ),
        max_size=6,
    )
)
def test_any_layout_is_aligned_and_read_back_equal(shape_lists: list[list[tuple[str, list[int]]]]) -> None:
    extents = [
        Extent(str(i), tuple(TensorSpec(f"{i}.{j}", dtype, tuple(shape)) for j, (dtype, shape) in enumerate(items)))
        for i, items in enumerate(shape_lists)
    ]
    layout = lay_out(extents, seal=True)
    header = parse_header(layout.header, layout.file_bytes, "x")
    assert set(header.entries.values()) == set(layout.entries)
    for span, extent in zip(layout.spans.values(), extents, strict=True):
        assert span.offset % ALIGNMENT == 0
        content_bytes = sum(DTYPE_BITS[t.dtype] // 8 * math.prod(t.shape) for t in extent.tensors)
        assert span.padded_bytes == padded(content_bytes)
        for tensor in extent.tensors:
            entry = header.entries[tensor.name]
            assert span.offset <= layout.data_start + entry.begin
            assert layout.data_start + entry.end <= span.offset + content_bytes
            assert entry.begin % (DTYPE_BITS[tensor.dtype] // 8) == 0
