"""Ordinary checkpoints: read as transformers wrote them, written as transformers reads them, and never by half."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import packed
from faults import EIO, FaultyBackend
from power_cuts import Disk, JournalBackend, images
from safetensors.torch import load_file, save_file
from torch import nn

from tierstore.archive.dtypes import TORCH_DTYPES
from tierstore.archive.publish import Publication
from tierstore.archive.sources import INDEX, PARTIAL, SINGLE
from tierstore.config import Codec
from tierstore.errors import (
    CheckpointWarning,
    ChecksumMismatch,
    ConfigError,
    DoneButFor,
    FormatError,
    StorageError,
    StorageFull,
)
from tierstore.io.backend import Backend, BlockFile, Traffic
from tierstore.train.checkpoints import CheckpointSource, TensorOut, write_checkpoint
from tierstore.train.materialize import deferred

pytestmark = pytest.mark.usefixtures("no_leaks")
transformers.utils.logging.disable_progress_bar()  # its bars leave a thread behind

_SMALL = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 50, "num_attention_heads": 4}
_GPT2 = {
    "n_layer": 2,
    "n_embd": 48,
    "n_head": 4,
    "vocab_size": 97,
    "n_positions": 33,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
State = dict[str, torch.Tensor]


def gpt2(**changes: object) -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2 | changes))


def mixtral() -> transformers.MixtralForCausalLM:
    config = transformers.MixtralConfig(**_SMALL, num_key_value_heads=2, vocab_size=97, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def loaded(directory: Path, build: Callable[[], nn.Module]) -> tuple[nn.Module, State, CheckpointSource]:
    """A meta model, its parameters from a checkpoint, and their source."""
    model, source = deferred(build, checkpoint=directory)
    assert isinstance(source, CheckpointSource)
    values = {name: torch.full(parameter.shape, torch.nan).view(-1) for name, parameter in model.named_parameters()}
    assert source.names() == values.keys()
    for name, offset, piece in source.stream():
        assert torch.isnan(values[name][offset : offset + piece.numel()]).all()
        values[name][offset : offset + piece.numel()] = piece
    return model, {name: values[name].view(parameter.shape) for name, parameter in model.named_parameters()}, source


def assert_same(values: State, model: nn.Module) -> None:
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


def outs(state: State, pieces: int = 3) -> Iterator[TensorOut]:
    for name, tensor in state.items():
        parts = tensor.detach().reshape(-1).tensor_split(pieces)
        yield TensorOut(name, tuple(tensor.shape), tensor.dtype, (part for part in parts))


# Reading.


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
@pytest.mark.parametrize("build", [gpt2, mixtral])
def test_reads_what_transformers_wrote(build: Callable[[], nn.Module], shard: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    original = build()
    original.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() == (shard == "100KB")
    model, values, source = loaded(tmp_path, build)
    assert_same(values, original)
    assert source.unexpected == ()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_reads_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    original = gpt2().bfloat16()
    original.save_pretrained(tmp_path)
    monkeypatch.setattr("tierstore.train.checkpoint_files.PIECE_ELEMENTS", 1000)
    _, values, _ = loaded(tmp_path, gpt2)
    assert_same({name: value.bfloat16() for name, value in values.items()}, original)
    assert max(piece.numel() for _, _, piece in CheckpointSource(tmp_path, gpt2()).stream()) == 1000


def test_all_files_are_closed_also_when_the_system_refuses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    close, closed = BlockFile.close, set()

    def refused(file: BlockFile) -> None:
        close(file)
        closed.add(file.path)
        raise OSError(errno.EIO, "close")

    monkeypatch.setattr(BlockFile, "close", refused)
    with pytest.raises(OSError, match="close"):
        list(CheckpointSource(tmp_path, gpt2()).stream())
    assert closed == set(tmp_path.glob("model-*.safetensors"))
    assert len(closed) > 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    state = plain_state()
    state["body.0.weight"] = state["body.0.weight"].to(dtype)
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(FormatError, match=r"1 tensors: body\.0\.weight: (I8|U8|BOOL|F8_E4M3) .* cannot be trained"):
        loaded(tmp_path, Plain)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_quantized_weights_are_refused_where_tensors_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    state = load_file(tmp_path / SINGLE)
    experts = [name for name in state if ".experts." in name]
    assert len(experts) > 2
    save_file(state | {name: state[name].to(dtype) for name in experts}, tmp_path / SINGLE)
    with pytest.raises(FormatError, match=rf"experts.*: {dtype} converted, and quantized"):
        loaded(tmp_path, mixtral)


def test_the_prefix_of_the_base_model_may_be_there_or_not(tmp_path: Path) -> None:
    torch.manual_seed(1)
    head = gpt2()
    base = transformers.GPT2Model(head.config)
    base.load_state_dict(head.transformer.state_dict())
    base.save_pretrained(tmp_path / "base")
    head.save_pretrained(tmp_path / "head")
    _, values, _ = loaded(tmp_path / "base", gpt2)
    assert_same(values, head)
    _, values, _ = loaded(tmp_path / "head", lambda: transformers.GPT2Model(head.config))
    assert_same(values, base)


class Plain(nn.Module):
    """A model without transformers: a prefix of its own, a tied weight, buffers of both kinds."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("shared", torch.ones(2, 1).expand(2, 3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def plain_state() -> State:
    torch.manual_seed(2)
    state = {name: torch.randn(value.shape).to(value.dtype) for name, value in Plain().state_dict().items()}
    state["body.1.num_batches_tracked"] = torch.tensor(41)
    return state


@pytest.mark.parametrize("tied", ["embed.weight", "head.weight"])
def test_buffers_tied_names_and_extras(tied: str, tmp_path: Path) -> None:
    state = plain_state()
    names = state.keys() - {"embed.weight", "head.weight"}
    stored = {name.removeprefix("body."): state[name].contiguous() for name in names}
    stored |= {tied: state["embed.weight"].clone(), "extra": torch.zeros(2)}
    save_file(stored, tmp_path / SINGLE)
    with pytest.warns(CheckpointWarning, match="the checkpoint in .* holds 'extra', for which the model has no"):
        model, values, source = loaded(tmp_path, Plain)
    assert torch.equal(values["embed.weight"], state["embed.weight"])
    assert torch.equal(values["body.0.bias"], state["body.0.bias"])
    assert torch.equal(model.table, state["table"])
    assert torch.equal(model.shared, state["shared"])
    assert torch.equal(model.body[1].running_var, state["body.1.running_var"])
    assert model.body[1].num_batches_tracked == 41
    assert source.unexpected == ("extra",)


@pytest.mark.parametrize("when", ["before it is looked at", "after"])
def test_a_model_that_is_converted_gets_its_buffers_all_the_same(when: str, tmp_path: Path) -> None:
    """Converting a model makes new buffers in place of those that the source has seen."""
    state = {name: value.contiguous().clone() for name, value in plain_state().items()}
    save_file(state, tmp_path / SINGLE)
    model, source = deferred(Plain, checkpoint=tmp_path)
    if when == "after":
        source.names()
    model.bfloat16()
    assert {piece.name for piece in source.stream()} == {name for name, _ in model.named_parameters()}
    found = model.get_buffer("table")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, state["table"].bfloat16())


def test_a_tied_weight_stored_twice_is_taken_under_its_own_name(tmp_path: Path) -> None:
    state = {name: value.contiguous().clone() for name, value in plain_state().items()}
    save_file(state | {"head.weight": torch.zeros(7, 5)}, tmp_path / SINGLE)
    _, values, source = loaded(tmp_path, Plain)  # which warns of nothing
    assert torch.equal(values["embed.weight"], state["embed.weight"])
    assert source.unexpected == ()


def test_missing_and_misshapen_tensors_are_told_together(tmp_path: Path) -> None:
    original = gpt2(n_positions=12)
    state = {name: value.clone() for name, value in original.state_dict().items() if "h.1." not in name}
    del state["lm_head.weight"]
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(FormatError) as caught:
        CheckpointSource(tmp_path, gpt2()).names()
    message = str(caught.value)
    assert "does not fit the model, 13 tensors" in message
    assert "transformer.wpe.weight: [12, 48] in the checkpoint, [33, 48] in the model" in message
    assert "transformer.h.1.ln_1.weight: missing, [48] in the model" in message
    assert message.endswith("and 8 more")


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    mixtral().save_pretrained(tmp_path)
    state = load_file(tmp_path / SINGLE)
    name = next(name for name in state if "experts.2.w1" in name)
    del state[name]
    save_file(state, tmp_path / SINGLE)
    with pytest.raises(FormatError, match=r"gate_up_proj"):
        list(CheckpointSource(tmp_path, mixtral()).stream())


def test_any_alignment(tmp_path: Path) -> None:
    values = torch.randn(5, 3, dtype=torch.float64)
    header = json.dumps({"weight": {"dtype": "F64", "shape": [5, 3], "data_offsets": [0, 120]}}).encode() + b" "
    header += b" " * ((1 - len(header)) % 8)
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    (_, _, piece), *rest = CheckpointSource(tmp_path, nn.Linear(3, 5, bias=False)).stream()
    assert torch.equal(piece.view(5, 3), values)
    assert not rest


# Packs.


@pytest.mark.parametrize(("codec", "shards"), [(Codec.NONE, 1), (Codec.LZ4_BITSHUFFLE, None), (Codec.NONE, 3)])
def test_a_pack_is_read_as_the_checkpoint_that_it_was_made_of(
    codec: Codec, shards: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    original = gpt2().bfloat16()
    original.save_pretrained(tmp_path / "a")
    place = tmp_path / "p" if shards is not None else tmp_path / "p" / SINGLE
    packed(tmp_path / "a", place, codec=codec, shards=shards, chunk_bytes=4096)
    _, values, source = loaded(tmp_path / "p", gpt2)
    assert_same({name: value.bfloat16() for name, value in values.items()}, original)
    assert source.unexpected == ()


@pytest.mark.parametrize("chunk_bytes", [4096, 2**20])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_BITSHUFFLE])
def test_each_chunk_of_a_pack_is_read_once(
    codec: Codec, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpt2().bfloat16().save_pretrained(tmp_path / "a")
    chunks = sum(
        len(group.chunks)
        for group in packed(tmp_path / "a", tmp_path / "p", codec=codec, chunk_bytes=chunk_bytes).groups
    )
    monkeypatch.setattr("tierstore.train.checkpoint_files.PIECE_ELEMENTS", 1000)
    read, reads = BlockFile.read_into, []

    def counted(file: BlockFile, *arguments: object, **options: object) -> None:
        reads.append(file.path)
        read(file, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockFile, "read_into", counted)
    loaded(tmp_path / "p", gpt2)
    assert len(reads) == chunks


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4_BITSHUFFLE])
def test_no_damaged_byte_of_a_pack_becomes_a_weight(codec: Codec, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "a")
    (pack,) = packed(tmp_path / "a", tmp_path / "p", codec=codec).files
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match=r"damaged: the chunk at byte .*ln_f"):
        loaded(tmp_path / "p", gpt2)


class Shared(nn.Module):
    """Two blocks that hold the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        table = torch.zeros(4)
        for block in self.blocks:
            block.register_buffer("table", table)


def test_names_that_share_a_tensor_have_it_in_a_pack_too(tmp_path: Path) -> None:
    original = Shared()
    original.blocks[0].table += torch.arange(4.0)
    torch.save(original.state_dict(), tmp_path / "a.pt")
    packed(tmp_path / "a.pt", tmp_path / "p")
    model, values, _ = loaded(tmp_path / "p", Shared)
    assert_same(values, original)
    assert all(torch.equal(block.table, torch.arange(4.0)) for block in model.blocks)


def test_of_a_pack_that_is_striped_all_files_must_be_in_the_directory(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "a")
    packed(tmp_path / "a", tmp_path / "p", tmp_path / "q")
    with pytest.raises(FormatError, match="or, where only one can be named, unpack it first"):
        CheckpointSource(tmp_path / "p", gpt2()).names()


def _index(directory: Path, content: object) -> None:
    (directory / INDEX).write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds neither"),
        ([], "no weight_map"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({"weight_map": {"a": "../b.safetensors"}}, "not a plain file name"),
        ({"weight_map": {"a": "part"}}, "lacks 1 tensors"),
    ],
)
def test_bad_indexes(content: object, message: str, tmp_path: Path) -> None:
    save_file({"b": torch.zeros(2)}, tmp_path / "part")
    if content is not None:
        _index(tmp_path, content)
    with pytest.raises(FormatError, match=message):
        CheckpointSource(tmp_path, nn.Linear(2, 2)).names()


def test_a_missing_shard(tmp_path: Path) -> None:
    _index(tmp_path, {"weight_map": {"a": "absent"}})
    with pytest.raises(FormatError, match=r"absent is missing: model\.safetensors\.index\.json names it"):
        CheckpointSource(tmp_path, nn.Linear(2, 2)).names()


def test_buffers_on_meta_are_refused(tmp_path: Path) -> None:
    save_file({name: value.clone().contiguous() for name, value in plain_state().items()}, tmp_path / SINGLE)
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(ConfigError, match="deferred"):
        CheckpointSource(tmp_path, model).names()


# Writing.


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 50_000])
@pytest.mark.parametrize("build", [gpt2, mixtral])
def test_transformers_reads_what_is_written(
    build: Callable[[], nn.Module], max_shard_bytes: int, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    original = build()
    original.config.save_pretrained(tmp_path)
    write_checkpoint(tmp_path, outs(dict(original.named_parameters())), max_shard_bytes=max_shard_bytes)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (shards == [SINGLE]) == (max_shard_bytes > 10**9)
    again, info = type(original).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same({name: parameter.detach() for name, parameter in again.named_parameters()}, original)
    _, values, _ = loaded(tmp_path, build)
    assert_same(values, original)
    assert not list(tmp_path.glob(".*"))


def test_dtypes_and_their_order(tmp_path: Path) -> None:
    state = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "wide": torch.randn(3, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }
    shaped = TensorOut("shaped", (2, 2), torch.float16, [torch.ones(1, 3).half(), torch.full((1,), 2.0).half()])
    write_checkpoint(tmp_path / "new" / "place", [*outs(state, 1), shaped])
    found = load_file(tmp_path / "new" / "place" / SINGLE)
    assert found.keys() == {*state, "shaped"}
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in state.items())
    assert torch.equal(found["shaped"], torch.tensor([[1, 1], [1, 2]], dtype=torch.float16))


def test_what_is_lazily_conjugate_or_negative_is_written_as_it_reads(tmp_path: Path) -> None:
    mirror = torch.tensor([1 + 2j, -3j]).conj()
    assert (mirror.is_conj(), mirror.imag.is_neg()) == (True, True)
    write_checkpoint(tmp_path, outs({"mirror": mirror, "part": mirror.imag}, 1))
    found = load_file(tmp_path / SINGLE)
    assert found["mirror"].tolist() == [1 - 2j, 3j]
    assert found["part"].tolist() == [-2.0, 3.0]


class Odd(nn.Module):
    """A buffer of every dtype that a file can hold."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        for name, dtype in TORCH_DTYPES.items():
            self.register_buffer(name, torch.full((48,), fill, dtype=torch.uint8).view(dtype).view(2, -1))


def test_buffers_of_every_dtype_come_back(tmp_path: Path) -> None:
    original, again = Odd(1), Odd(0)
    write_checkpoint(tmp_path, outs(original.state_dict(), 1))
    source = CheckpointSource(tmp_path, again)
    assert not list(source.stream())
    for found in (load_file(tmp_path / SINGLE), again.state_dict()):
        assert {name: value.dtype for name, value in found.items()} == TORCH_DTYPES
        for name, value in original.state_dict().items():
            assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_pairs_of_small_floats_are_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, outs({"weight": torch.zeros(3, 5, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, 1))
    with pytest.raises(FormatError, match=r"weight: F4 in the checkpoint, and quantized"):
        CheckpointSource(tmp_path, nn.Linear(5, 3, bias=False)).names()


def test_shards_and_index(tmp_path: Path) -> None:
    state = {name: torch.full((25,), float(place)) for place, name in enumerate("abcd")} | {"e": torch.zeros(90)}
    write_checkpoint(tmp_path, outs(state), max_shard_bytes=200)
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    file = "model-0000{}-of-00003.safetensors".format
    assert index["weight_map"] == {"a": file(1), "b": file(1), "c": file(2), "d": file(2), "e": file(3)}
    assert index["metadata"] == {"total_size": 760}
    assert load_file(tmp_path / file(2))["d"][0] == 3


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([TensorOut("a", (2,), torch.float32, [torch.zeros(2)])] * 2, ConfigError, "'a' is to be written twice"),
        ([TensorOut("a", (2,), torch.complex128, [])], FormatError, "cannot hold"),
        ([TensorOut("a", (2,), torch.float32, [torch.zeros(1)])], FormatError, "1 elements were given"),
        ([TensorOut("a", (2,), torch.float32, [torch.zeros(1), torch.zeros(2)])], FormatError, "3 elements"),
        (
            [TensorOut("a", (2,), torch.float32, [torch.zeros(2).half()])],
            FormatError,
            "float16 was given for .*float32",
        ),
    ],
)
def test_bad_tensors_change_nothing(
    tensors: Iterable[TensorOut], error: type[Exception], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, outs({"old": torch.ones(3)}))
    with pytest.raises(error, match=message):
        write_checkpoint(tmp_path, tensors)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert load_file(tmp_path / SINGLE)["old"].sum() == 3


def test_a_full_disk_is_found_before_the_values_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked = []

    def pieces() -> Iterator[torch.Tensor]:
        asked.append(True)
        yield torch.zeros(1)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFull, match=r"allocation of 4100 B .*ENOSPC"):
        write_checkpoint(tmp_path, [TensorOut("one", (1,), torch.float32, pieces())])
    assert not asked
    assert not list(tmp_path.iterdir())


class Killed(BaseException):
    pass


class Mortal(Backend):
    """Raises `Killed` after `calls` renames, removals and syncs: at the next one, for a kill also at all later ones."""

    def __init__(self, calls: int, *, is_kill: bool) -> None:
        super().__init__()
        self.left = calls
        self.is_kill = is_kill

    def _tick(self) -> None:
        self.left -= 1
        if self.left == -1 or (self.is_kill and self.left < 0):
            raise Killed

    def _call_replace(self, source: Path, destination: Path) -> None:
        self._tick()
        super()._call_replace(source, destination)

    def _call_unlink(self, path: Path) -> None:
        self._tick()
        super()._call_unlink(path)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self._tick()
        super()._call_fsync(descriptor, path)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._tick()
        super()._call_fdatasync(descriptor, path)


def read_back(directory: Path) -> dict[str, float] | None:
    """First value by name, as a reader finds them; None where there is no checkpoint."""
    if (directory / SINGLE).exists():
        return {name: float(value[0]) for name, value in load_file(directory / SINGLE).items()}
    if not (directory / INDEX).exists():
        return None
    files = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    return {name: float(load_file(directory / file)[name][0]) for name, file in files.items()}


@pytest.mark.parametrize("is_kill", [True, False])
@pytest.mark.parametrize(
    ("old_bytes", "new_bytes"), [(100, 100), (100, 10**6), (10**6, 100), (10**6, 10**6), (60, 100), (100, 60)]
)
def test_what_ends_a_write_leaves_the_old_checkpoint_or_the_new_one(
    old_bytes: int, new_bytes: int, is_kill: bool, tmp_path: Path
) -> None:
    """The next write removes all that a kill has left; an error leaves no other files."""
    old, new = ({name: torch.full((15,), value) for name in "abc"} for value in (1.0, 2.0))
    expected = [dict.fromkeys("abc", value) for value in (1.0, 2.0)]
    files = {60: 4, 100: 4, 10**6: 1}
    outcomes = []
    for calls in range(100):
        directory = tmp_path / str(calls)
        write_checkpoint(directory, outs(old), max_shard_bytes=old_bytes)
        (directory / "model-00007-of-00007.safetensors").write_bytes(b"of somebody")
        with contextlib.suppress(Killed):
            backend = Mortal(calls, is_kill=is_kill)
            write_checkpoint(directory, outs(new), max_shard_bytes=new_bytes, backend=backend)
            break
        outcomes.append(read_back(directory))
        if outcomes[-1] == expected[0] and not is_kill and not (directory / SINGLE).exists():
            assert len(list(directory.glob("m*"))) == files[old_bytes] + 1
        write_checkpoint(directory, outs(new), max_shard_bytes=new_bytes)
        assert len(names := sorted(path.name for path in directory.iterdir())) == files[new_bytes] + 1, (calls, names)
        assert read_back(directory) == expected[1]
    assert 2 < len(outcomes) < 100  # the last write was not ended
    assert read_back(directory) == expected[1]
    assert all(outcome in expected for outcome in outcomes)
    assert expected[0] in outcomes
    assert len(list(directory.glob("m*"))) == files[new_bytes] + 1


@pytest.mark.parametrize(("old_bytes", "new_bytes"), [(60, 60), (60, 10**6), (10**6, 60)])
def test_a_power_cut_leaves_the_old_checkpoint_or_the_new_one(old_bytes: int, new_bytes: int, tmp_path: Path) -> None:
    backend, expected, told = JournalBackend(tmp_path), [None], []
    for value, shard_bytes in ((1.0, old_bytes), (2.0, new_bytes)):
        tensors = {name: torch.full((15,), value) for name in "abc"}
        write_checkpoint(tmp_path / "new" / "out", outs(tensors), max_shard_bytes=shard_bytes, backend=backend)
        expected.append(dict.fromkeys("abc", value))
        told.append(len(backend.journal))
    seen = []
    for number, image in enumerate(images(Disk(tmp_path, backend.found), backend.journal, told=told, draws=3)):
        found = read_back(image.restore(tmp_path / str(number)) / "new" / "out")
        assert found in expected[image.known : image.known + 2], image.at
        seen.append(found)
    assert all(one in seen for one in expected)


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"model-00001-of-00009.safetensors{PARTIAL}").write_bytes(b"half")
    write_checkpoint(tmp_path, outs({"a": torch.ones(3)}))
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]


@pytest.mark.parametrize("shard_bytes", [10, 10**6])
def test_what_a_killed_write_of_an_older_release_left_is_in_nobodys_way(shard_bytes: int, tmp_path: Path) -> None:
    """That release had renamed one shard, and kept the other one and the indexes in a directory."""
    left, shards = tmp_path / ".checkpoint-unfinished", [f"model-0000{one}-of-00002.safetensors" for one in (1, 2)]
    left.mkdir()
    for path in (tmp_path / shards[0], left / shards[1]):
        path.write_bytes(b"half")
    for name in (INDEX, f"old-{INDEX}"):
        (left / name).write_text(json.dumps({"weight_map": dict(zip("ab", shards))}))
    values = {"a": torch.ones(3), "b": torch.ones(3)}
    for _ in range(2):
        write_checkpoint(tmp_path, outs(values), max_shard_bytes=shard_bytes)
        assert read_back(tmp_path) == {"a": 1.0, "b": 1.0}
        assert (tmp_path / shards[0]).read_bytes() == (left / shards[1]).read_bytes() == b"half"


@pytest.mark.parametrize("shard_bytes", [10, 10**6])
def test_of_two_writers_the_second_is_refused(shard_bytes: int, tmp_path: Path) -> None:
    def pieces() -> Iterator[torch.Tensor]:
        others = {"a": torch.zeros(3), "b": torch.zeros(3)}
        with pytest.raises(ConfigError, match="another process writes to"):
            write_checkpoint(tmp_path, outs(others), max_shard_bytes=shard_bytes)
        yield torch.ones(3)

    write_checkpoint(tmp_path, [TensorOut("a", (3,), torch.float32, pieces())])
    assert read_back(tmp_path) == {"a": 1.0}


def test_where_nothing_can_be_locked_the_second_writer_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second takes the first one's file for a leftover; the first notices, and publishes nothing of the second."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def second() -> Iterator[torch.Tensor]:
        yield torch.full((3,), 2.0)
        with pytest.raises(ConfigError, match="or another process writes there"):
            first.commit()

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Publication(tmp_path / SINGLE, 1, Backend(), overwrite=True) as first:
        first.begin([10])
        write_checkpoint(tmp_path, [TensorOut("a", (3,), torch.float32, second())])
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert read_back(tmp_path) == {"a": 2.0}


def test_what_is_no_shard_of_ours_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    lora, named = tmp_path / "lora.safetensors", tmp_path / "model-00000001-00002-of-00002.safetensors"
    for path in (lora, named):
        path.write_bytes(b"of somebody")
    left = tmp_path / f"model-00002-of-00002.safetensors{PARTIAL}"  # killed before this file was renamed
    left.write_bytes(b"whole")
    index = json.dumps({"weight_map": {"a": lora.name, "b": named.name}})
    (tmp_path / f"{INDEX}{PARTIAL}").write_text(index, encoding="utf-8")
    write_checkpoint(tmp_path, outs({"a": torch.ones(3)}))
    assert lora.read_bytes() == named.read_bytes() == b"of somebody"
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("target", ["there", "absent", "a file"])
def test_a_link_in_its_place_is_not_followed(target: str, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (elsewhere / "mine").write_bytes(b"mine")
    link = {"there": elsewhere, "absent": elsewhere / "new", "a file": elsewhere / "mine"}[target]
    for name in (SINGLE, "model-00001-of-00002.safetensors", INDEX, f"old-{INDEX}"):
        (out / f"{name}{PARTIAL}").symlink_to(link)
    write_checkpoint(out, outs({"a": torch.ones(3)}))
    assert [path.name for path in out.iterdir()] == [SINGLE]
    assert [(path.name, path.read_bytes()) for path in elsewhere.iterdir()] == [("mine", b"mine")]


def test_what_cannot_be_removed_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / f"{SINGLE}{PARTIAL}").mkdir()
    with pytest.raises(StorageError, match=f"{SINGLE}{PARTIAL} failed: Is a directory"):
        write_checkpoint(tmp_path, outs({"a": torch.ones(3)}))
    assert not list((tmp_path / f"{SINGLE}{PARTIAL}").iterdir())


@pytest.mark.parametrize(("old_bytes", "new_bytes"), [(10, 10), (10, 10**6), (10**6, 10)])
def test_who_cannot_remove_the_old_checkpoint_says_that_the_new_one_is_there(
    old_bytes: int, new_bytes: int, tmp_path: Path
) -> None:
    old, new = ({name: torch.full((3,), value) for name in "ab"} for value in (1.0, 2.0))
    write_checkpoint(tmp_path, outs(old), max_shard_bytes=old_bytes)
    backend, says = FaultyBackend(EIO, kinds=("unlink",)), "is there and whole, but removal of .* failed"
    with pytest.raises(DoneButFor, match=says) as caught:
        write_checkpoint(tmp_path, outs(new), max_shard_bytes=new_bytes, backend=backend)
    is_old_read = f"as long as {tmp_path / SINGLE} is there" in str(caught.value)
    assert is_old_read == (old_bytes > new_bytes)
    assert read_back(tmp_path) == dict.fromkeys("ab", 1.0 if is_old_read else 2.0)
    write_checkpoint(tmp_path, outs(new), max_shard_bytes=new_bytes)
    assert read_back(tmp_path) == dict.fromkeys("ab", 2.0)
    assert len(list(tmp_path.iterdir())) == (3 if new_bytes == 10 else 1)


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, outs({"old": torch.ones(3)}))
    monkeypatch.setattr("tierstore.archive.publish.free_bytes", lambda path: 8000)
    with pytest.raises(StorageFull, match=r"8[2-9]\d\d B .* are needed, 8000 B .* are free; nothing was written"):
        write_checkpoint(tmp_path, outs({"a": torch.zeros(20), "b": torch.zeros(20)}), max_shard_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert read_back(tmp_path) == {"old": 1.0}


def test_an_export_is_no_traffic_of_chunks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, outs({"a": torch.ones(3)}), backend=(backend := Backend()))
    assert backend.counters.totals() == Traffic()


def test_pieces_are_not_begun_before_their_turn(tmp_path: Path) -> None:
    asked = []

    def pieces(name: str) -> Iterator[torch.Tensor]:
        for place in range(3):
            asked.append((name, place))
            yield torch.from_numpy(np.full(10, place, np.float32))

    write_checkpoint(tmp_path, [TensorOut(name, (3, 10), torch.float32, pieces(name)) for name in "ab"])
    assert asked == [(name, place) for name in "ab" for place in range(3)]
    assert torch.equal(load_file(tmp_path / SINGLE)["b"][:, 7], torch.arange(3.0))
