"""Files of torch are packed without loading them, and come back as they were; code in a file is not run."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from checkpoints import packed, read_safetensors

from tierstore import load_pack
from tierstore.archive.distributed import _runs
from tierstore.archive.dtypes import TORCH_DTYPES
from tierstore.archive.opening import open_archive
from tierstore.archive.packing import PackOptions, pack
from tierstore.archive.sources import INDEX, open_source
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.config import Codec
from tierstore.errors import ChecksumMismatch, ConfigError, FormatError

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),  # by torch
]
MEMORY = 2**40


def state_dict() -> dict[str, torch.Tensor]:
    tied = torch.randn(300, 64)
    return {
        "wte.weight": tied,
        "lm_head.weight": tied,
        "h.0.w": torch.randn(50, 60).bfloat16(),
        "h.0.columns": torch.randn(50, 60).t(),
        "h.0.strided": torch.arange(10)[::2],
        "h.0.part": torch.randn(10, 4)[3:],
        "h.0.channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "h.1.zeros": torch.zeros(200, 200, dtype=torch.float16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_BITSHUFFLE])
def test_a_state_dict_comes_back(tmp_path: Path, codec: Codec) -> None:
    tensors = state_dict()
    torch.save(tensors, tmp_path / "a.pt")
    source = open_source(tmp_path / "a.pt")
    assert source.aliases == {"lm_head.weight": "wte.weight"}
    packed(tmp_path / "a.pt", tmp_path / "p.safetensors", codec=codec, memory_bytes=MEMORY)
    loaded = load_pack(tmp_path / "p.safetensors")
    assert equal(loaded, tensors)
    assert loaded["wte.weight"].data_ptr() == loaded["lm_head.weight"].data_ptr()

    (written,) = unpack(open_archive([tmp_path / "p.safetensors"]), UnpackOptions(tmp_path / "b.pt", 1, MEMORY))
    back = torch.load(written, weights_only=True)
    assert equal(back, tensors)
    assert back["wte.weight"].data_ptr() == back["lm_head.weight"].data_ptr()
    (flat,) = unpack(open_archive([tmp_path / "p.safetensors"]), UnpackOptions(tmp_path / "c.safetensors", 1, MEMORY))
    assert read_safetensors(flat)["lm_head.weight"] == read_safetensors(flat)["wte.weight"]


def test_every_dtype_of_torch_comes_back(tmp_path: Path) -> None:
    tensors = {name: torch.randint(0, 2, (48,), dtype=torch.uint8).view(dtype) for name, dtype in TORCH_DTYPES.items()}
    torch.save(tensors, tmp_path / "a.pt")
    packed(tmp_path / "a.pt", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    (written,) = unpack(open_archive([tmp_path / "p.safetensors"]), UnpackOptions(tmp_path / "b.bin", 1, MEMORY))
    for found in (load_pack(tmp_path / "p.safetensors"), torch.load(written, weights_only=True)):
        assert {name: one.dtype for name, one in found.items()} == TORCH_DTYPES
        assert all(torch.equal(one.view(torch.uint8), tensors[name].view(torch.uint8)) for name, one in found.items())


def test_nested_values_keep_their_names_and_what_is_no_tensor_is_told(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "model": {"w": torch.ones(3)}, "moments": [torch.zeros(2)]}, tmp_path / "a.pt")
    source = open_source(tmp_path / "a.pt")
    assert (sorted(source.tensors), source.left_out) == (["model.w", "moments.0"], ("epoch",))
    assert source.nested == ("model", "moments")
    torch.save({"a.b": torch.ones(3), "a": torch.zeros(2), "c": 3}, tmp_path / "flat.pt")
    assert open_source(tmp_path / "flat.pt").nested == ()


def test_what_lies_below_a_key_has_its_own_names(tmp_path: Path) -> None:
    tied, head = torch.randn(4, 3), torch.ones(3)
    torch.save(
        {
            "model": {"w": tied, "head": {"w": tied, "b": head}},
            "model_ema": {"w": torch.zeros(2), "b": head, "again": tied, "last": tied, "steps": 7},
            "epoch": 3,
        },
        tmp_path / "a.pt",
    )
    source = open_source(tmp_path / "a.pt")
    expected = {
        "model": {"w": tied, "head.w": tied, "head.b": head},
        "model.head": {"w": tied, "b": head},
        "model_ema": {"w": torch.zeros(2), "b": head, "again": tied, "last": tied},
    }
    for key, tensors in expected.items():
        pack(source.below(key), PackOptions((tmp_path / f"{key}.safetensors",), memory_bytes=MEMORY), {})
        assert equal(load_pack(tmp_path / f"{key}.safetensors"), tensors)
    assert source.nested == ("model", "model_ema")
    found = source.below("model_ema")
    assert (found.aliases, found.left_out, found.nested) == ({"last": "again"}, ("steps",), ())
    assert source.below("model.").tensors == source.below("model").tensors
    with pytest.raises(ConfigError, match=r"a.pt lies below 'mode'; some do below 'model_ema' \(4\), 'model' \(3\)"):
        source.below("mode")
    with pytest.raises(ConfigError, match=r"no tensor of .* lies below 'w'$"):
        source.below("model").below("head").below("w")


def test_shards_with_an_index(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "one.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "two.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "one.bin", "b": "two.bin"}}')
    packed(tmp_path, tmp_path / "p.safetensors", memory_bytes=MEMORY)
    assert equal(load_pack(tmp_path / "p.safetensors"), {"a": torch.ones(3), "b": torch.zeros(3)})


def test_an_index_that_names_what_is_missing_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    torch.save({"a": torch.ones(3), "step": 3, "extra": (1, torch.ones(2)), "none": {}}, tmp_path / "one.bin")
    named = dict.fromkeys(["a", "b", "step", "extra", "none"], "one.bin")
    index.write_text(json.dumps({"weight_map": named}))
    with pytest.raises(FormatError, match=r"one.bin lacks 1 tensors that the index puts there: 'b'"):
        open_source(tmp_path)
    index.write_text('{"weight_map": {"a": "one.bin", "b": "two.bin"}}')
    with pytest.raises(FormatError, match=r"two.bin is missing: pytorch_model.bin.index.json names it"):
        open_source(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"a.pt: not a regular file"):
        open_source(tmp_path / "a.pt")
    distributed.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "d", no_dist=True)
    (part,) = (tmp_path / "d").glob("*.distcp")
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(FormatError, match=r"distcp: not a regular file"):
        open_source(tmp_path / "d")


class Code:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_with_code_in_it_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    trap = Code(tmp_path / "ran")
    torch.save({"a": torch.ones(3), "b": trap}, tmp_path / "a.pt")
    told = r"more than tensors \(posix\.system\), and loading it could run code: refused; save its state_dict alone"
    with pytest.raises(FormatError, match=told):
        open_source(tmp_path / "a.pt")
    distributed.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "d", no_dist=True)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(trap))
    with pytest.raises(FormatError, match=r"could run code: refused \(it names posix.system\)"):
        open_source(tmp_path / "d")
    assert not (tmp_path / "ran").exists()


def test_torch_files_that_cannot_be_packed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for content, message in (
        (b"no zip", "is not a file of torch.save, or it is truncated"),
        (_saved({"a": torch.ones(9)})[:-100], "is not a file of torch.save, or it is truncated"),
        (_saved({"epoch": 3}), "holds no tensors"),
        (_saved({"a": torch.randn(400, 400).t()}), "is not contiguous: 160000 pieces of 4 B; save it with .contiguous"),
    ):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=message):
            open_source(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda dense: dense.to_sparse(), "tensor 'a' of .*a.pt is sparse, which a safetensors file cannot hold"),
        (lambda dense: dense.to_sparse_csr(), "tensor 'a' of .*a.pt is sparse, "),
        (lambda dense: dense.to_sparse_csc(), "tensor 'a' of .*a.pt is sparse, "),
        (lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "tensor 'a' of .*a.pt is quantized, "),
        (lambda dense: dense.to("meta"), "tensor 'a' of .*a.pt is on the meta device, without values, "),
        (lambda dense: torch.nested.nested_tensor([dense, dense[:2]]), "tensor 'a' of .*a.pt is nested, "),
        (lambda dense: dense.to(torch.complex128), "tensor '(y.)?a' of .*a.pt has dtype torch.complex128, which a "),
        (
            lambda dense: torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "tensor '(y.)?a' is two 4-bit floats without a dimension, .*; save it with .reshape",
        ),
        (lambda dense: (1j * dense).conj(), "'(y.)?a' of .*a.pt is a conjugate or negative of its bytes; "),
        (lambda dense: torch._neg_view(dense), "'(y.)?a' of .*a.pt is a conjugate or negative of its bytes; "),
    ],
    ids=["coo", "csr", "csc", "quantized", "meta", "nested", "complex128", "one pair", "conjugate", "negative"],
)
@pytest.mark.filterwarnings("ignore")  # of torch: these kinds of tensor are beta, or deprecated
def test_a_tensor_that_no_pack_holds_is_named(
    make: Callable[[torch.Tensor], torch.Tensor], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = torch.nn.Parameter(torch.ones(3))
    odd = make(torch.eye(4))
    for value in ({"first": first, "a": odd}, {"x": {"a": first}, "y": {"a": odd}, "_rebuild_qtensor": first}):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(FormatError, match=message):
            open_source(tmp_path / "a.pt")
    assert "Traceback" not in capfd.readouterr().err


def test_an_empty_tensor_is_no_conjugate_of_its_bytes(tmp_path: Path) -> None:
    torch.save({"a": torch.empty(0, 3, dtype=torch.complex64).conj(), "b": torch.ones(3)}, tmp_path / "a.pt")
    packed(tmp_path / "a.pt", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    assert load_pack(tmp_path / "p.safetensors")["a"].shape == (0, 3)


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_distributed_checkpoint_comes_back(tmp_path: Path) -> None:
    tensors = state_dict()
    distributed.save({"model": tensors, "epoch": 3}, checkpoint_id=tmp_path / "d", no_dist=True)
    source = open_source(tmp_path / "d")
    assert source.left_out == ("epoch",)
    packed(tmp_path / "d", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    assert equal(load_pack(tmp_path / "p.safetensors"), {f"model.{name}": one for name, one in tensors.items()})


def test_a_part_of_another_dtype_than_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    """As many bytes: read as what they are not, they would be other numbers."""
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float16)):
        distributed.save({"w": torch.ones(3, dtype=dtype)}, checkpoint_id=tmp_path / name, no_dist=True)
    (part,) = (tmp_path / "b").glob("*.distcp")
    part.replace(tmp_path / "a" / part.name)
    with pytest.raises(FormatError, match=r"distcp: what stands at offset 0 is not the part of 'w'"):
        open_source(tmp_path / "a")


class _MembersByName(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_distributed_checkpoint_of_another_python_comes_back(protocol: int, tmp_path: Path) -> None:
    distributed.save(state_dict(), checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    with open(file, "wb") as rewritten:
        _MembersByName(rewritten, protocol).dump(metadata)
    assert b"getattr" in file.read_bytes()
    assert set(open_source(tmp_path).tensors) == set(state_dict())


@pytest.mark.parametrize("boxes", [[(0, 3), (3, 7)], [(0, 7)]], ids=["rows", "whole"])
def test_parts_of_ranks_are_joined(tmp_path: Path, boxes: list[tuple[int, int]]) -> None:
    whole = torch.arange(7 * 4 * 6).view(7, 4, 6)
    found = torch.zeros(whole.numel(), dtype=torch.int64)
    for first, last in boxes:
        for low, high in ((0, 2), (2, 6)):
            part = whole[first:last, :, low:high].contiguous().view(-1)
            for run in _runs((7, 4, 6), (first, 0, low), (last - first, 4, high - low), 8):
                begin, at, count = (nbytes // 8 for nbytes in run)
                found[begin : begin + count] = part[at : at + count]
    assert torch.equal(found.view(7, 4, 6), whole)


def test_only_some_names_are_loaded(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "a.pt")
    packed(tmp_path / "a.pt", tmp_path / "p", shards=2, memory_bytes=MEMORY)
    assert list(load_pack(tmp_path / "p", ["lm_head.weight", "scalar"])) == ["lm_head.weight", "scalar"]
    assert list(load_pack(tmp_path / "p", "scalar")) == ["scalar"]
    assert load_pack(str(tmp_path / "p"), []) == {}
    with pytest.raises(ConfigError, match="holds no tensor 'scale'; it holds 10 others"):
        load_pack([tmp_path / "p"], ["scale"])


def test_a_damaged_chunk_is_not_loaded(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "a.pt")
    (path,) = packed(tmp_path / "a.pt", tmp_path / "p.safetensors", memory_bytes=MEMORY).files
    placed = open_archive([path])[0].chunks()[0]
    data = bytearray(path.read_bytes())
    data[placed.chunk.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match=f"group {placed.group.name}"):
        load_pack(path)
    assert load_pack(path, ["scalar"])["scalar"] == 3


def test_large_tensors_are_in_place_and_keep_their_memory(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10**6), "b": torch.arange(10**6)}, tmp_path / "a.pt")
    packed(tmp_path / "a.pt", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    tensors = load_pack(tmp_path / "p.safetensors")
    assert tensors["a"].untyped_storage().nbytes() == 8 * 10**6, "a storage of its own size"
    assert tensors["b"].data_ptr() - tensors["a"].data_ptr() == 8 * 10**6, "one memory of the group"
    del tensors["a"]
    tensors["b"] += 1
    assert torch.equal(tensors["b"], torch.arange(10**6) + 1)


def test_unpacking_into_shards_is_as_hugging_face_reads_it(tmp_path: Path) -> None:
    torch.save(state_dict(), tmp_path / "a.pt")
    packed(tmp_path / "a.pt", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    unpack(open_archive([tmp_path / "p.safetensors"]), UnpackOptions(tmp_path / "out", 60000, MEMORY))
    assert (tmp_path / "out" / INDEX).is_file()
    source = open_source(tmp_path / "out")
    assert source.metadata == {"format": "pt"}
    assert sorted(source.tensors) == sorted(state_dict())
