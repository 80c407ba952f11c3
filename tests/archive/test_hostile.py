"""Crafted checkpoints and packs: each is refused, and none ends the process, runs code or allocates what it claims."""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as distributed
from checkpoints import packed, random_tensor, write_safetensors

from tierstore import load_pack
from tierstore.archive.index import sealed_index
from tierstore.archive.opening import open_archive
from tierstore.archive.publish import Publication
from tierstore.archive.reading import verify
from tierstore.archive.sources import INDEX, open_source
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.errors import FormatError
from tierstore.io.backend import Backend
from tierstore.pack.archive import ARCHIVE_KEY, archive_header
from tierstore.pack.layout import TensorEntry, unused_prefix

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),  # by torch
]
MEMORY = 2**40
DEEP_KEY = b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s."
"""A dictionary whose key is a tuple of a tuple of ...: hashing it overflows the stack of C."""


def torch_file(path: Path, **records: bytes) -> Path:
    """A good file of torch, in which some records are replaced or added."""
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0)}, file)
    with zipfile.ZipFile(file) as good, zipfile.ZipFile(path, "w") as bad:
        for info in good.infolist():
            name = info.filename.split("/", 1)[1]
            bad.writestr(zipfile.ZipInfo(info.filename), records.pop(name.replace(".", "_"), good.read(info)))
        for name, content in records.items():
            bad.writestr(zipfile.ZipInfo(f"archive/{name.replace('_', '.')}"), content)
    return path


def lists_of_lists() -> bytes:
    value: object = [1]
    for _ in range(12):
        value = [value] * 10
    return pickle.dumps(value, 2)


def itself() -> bytes:
    value: list[object] = []
    value.append(value)
    return pickle.dumps(value, 2)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({"byteorder": b"big"}, "another byte order"),
        ({"data_pkl": DEEP_KEY}, "nests tuples deeper than 100"),
        ({"DATA_PKL": DEEP_KEY}, "stands twice"),
        ({"data_pkl": lists_of_lists()}, "holds more values, or longer names, than its pickle"),
        ({"data_pkl": itself()}, "nested deeper than 100"),
        ({"data_pkl": b"\x80\x02]r\xff\xff\xff\xff."}, "memo 4294967295 in a pickle of 9 B"),
        ({"data_pkl": b""}, "the pickle in it is damaged"),
        ({"data/0": b"short"}, "reaches beyond its record of 5 B; damaged"),
    ],
)
def test_a_torch_file_that_torch_cannot_bear(records: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        open_source(torch_file(tmp_path / "a.pt", **records))


def test_a_torch_file_that_readers_of_zip_see_differently(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "a.pt")
    whole = path.read_bytes()
    for data in (whole + b"behind it", b"before it" + whole):
        path.write_bytes(data)
        with pytest.raises(FormatError, match="is not a"):
            open_source(path)


def test_a_torch_file_cut_at_every_byte(tmp_path: Path) -> None:
    whole = torch_file(tmp_path / "a.pt").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        with pytest.raises(FormatError):
            open_source(tmp_path / "a.pt")


def test_a_pickle_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    distributed.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    whole = (tmp_path / ".metadata").read_bytes()
    for data, message in (
        (DEEP_KEY, "nests tuples deeper than 100"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "memo 4294967295"),
        (whole.replace(b"__0_0.distcp", b"../_0.distcp"), "'../_0.distcp' is not a plain file name"),
        (b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR.", "could run code: refused"),
        (b"\x80\x02cbuiltins\ngetattr\n(ctorch\nSize\nX\x03\x00\x00\x00mrotR.", "more than members of enumerations"),
    ):
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(FormatError, match=re.escape(message)):
            open_source(tmp_path)


@pytest.mark.parametrize("name", ["..", "", "../m.safetensors", "/etc/passwd", "a\0b", "x" * 300, ".", "a\nb"])
def test_an_index_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="is not a plain file name"):
        open_source(tmp_path)
    (tmp_path / INDEX).write_bytes(sealed_index({"a": name}, [name], 12))
    with pytest.raises(FormatError, match="is not a plain file name"):
        open_archive([tmp_path])


def test_an_index_does_not_say_what_is_removed(tmp_path: Path) -> None:
    """Replacing a checkpoint removes its weights, and nothing else that its index names."""
    for name in ("thesis.txt", "old.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "thesis.txt", "b": "old.safetensors"}}))
    with Publication([tmp_path], 1, Backend(), overwrite=True) as publication:
        publication.begin([10])
        publication.commit(["model-00000000-00001-of-00001.safetensors"], sealed_index({}, [], 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00000000-00001-of-00001.safetensors", INDEX, "thesis.txt",
    ]  # fmt: skip


def test_a_pack_cut_at_every_byte(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"w": random_tensor("F16", (5,))})
    (path,) = packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY).files
    whole = path.read_bytes()
    for length in reversed(range(len(whole))):
        with path.open("r+b") as file:
            file.truncate(length)
        with pytest.raises(FormatError):
            open_archive([path])


@pytest.mark.parametrize("kept", ["names", "order"])
def test_files_that_are_good_alone_and_not_together(kept: str, tmp_path: Path) -> None:
    """The second file of a pack claims names or places of the first one: its bytes would overwrite the other's."""
    write_safetensors(tmp_path / "a", {"w": random_tensor("F16", (5,)), "v": random_tensor("F16", (50000,))})
    packed(tmp_path / "a", tmp_path / "x", tmp_path / "y", memory_bytes=MEMORY)
    one, other = open_archive([tmp_path / "x", tmp_path / "y"])
    table = replace(one.archive, shard=1)
    if kept == "order":
        groups = [replace(group, tensors=renamed(group.tensors)) for group in table.groups]
        table = replace(table, groups=tuple(groups), aliases={})
    header = archive_header(table, {}, one.header.data_start)
    other.path.write_bytes(header + one.path.read_bytes()[len(header) :])
    message = "stands in two files" if kept == "names" else "two groups are number 0 in the order"
    with pytest.raises(FormatError, match=message):
        open_archive([tmp_path / "x", tmp_path / "y"])


def renamed(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    return tuple(replace(entry, name=entry.name + "2") for entry in tensors)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes", "message"),
    [
        ("F4", (4, 1), 2, "rows of 1 4-bit floats; torch needs an even number"),
        ("F4", (0, 3), 0, "rows of 3 4-bit floats"),
        ("F32", (0, 2**62, 2**62), 0, "which torch cannot make"),
    ],
)
def test_shapes_that_torch_cannot_make(
    dtype: str, shape: tuple[int, ...], nbytes: int, message: str, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "a", {"w": (dtype, shape, bytes(nbytes))})
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    with pytest.raises(FormatError, match=message):
        load_pack(tmp_path / "p.safetensors")
    with pytest.raises(FormatError, match=message):
        unpack(open_archive([tmp_path / "p.safetensors"]), UnpackOptions(tmp_path / "out.pt", memory_bytes=MEMORY))
    assert not (tmp_path / "out.pt").exists()


def test_minus_zero_is_no_number_of_bytes(tmp_path: Path) -> None:
    """The safetensors library refuses -0, so nobody else could read the file."""
    text = b'{"w":{"dtype":"F32","shape":[-0,3],"data_offsets":[0,0]}}'
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(FormatError, match="-0 is not an integer"):
        open_source(tmp_path / "a.safetensors")


@pytest.mark.parametrize("target", ["there", "absent"])
def test_what_is_written_beside_a_pack_follows_no_link(target: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "there").write_text("mine")
    (tmp_path / "out" / f"{INDEX}.partial").symlink_to(tmp_path / target)
    with Publication([tmp_path / "out"], 1, Backend()) as publication:
        publication.begin([10])
        publication.commit(["model-00000000-00001-of-00001.safetensors"], sealed_index({}, [], 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "there"]
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "out" / INDEX).is_symlink()


def test_chunks_that_claim_more_than_they_give(tmp_path: Path) -> None:
    """A group whose table claims 2 TiB in two small chunks is refused when the pack is opened."""
    from tierstore.config import Codec

    write_safetensors(tmp_path / "a", {"w": ("F16", (9000,), bytes(18000))})
    (path,) = packed(tmp_path / "a", tmp_path / "p.safetensors", codec=Codec.LZ4, memory_bytes=MEMORY).files
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    body = json.loads(whole[8 : 8 + length])
    table = json.loads(body["__metadata__"][ARCHIVE_KEY])
    table["groups"][0]["tensors"][0][2] = [2**40]
    body["__metadata__"] = {ARCHIVE_KEY: json.dumps(table)}
    path.write_bytes(struct.pack("<Q", length) + json.dumps(body).encode().ljust(length) + whole[8 + length :])
    with pytest.raises(FormatError, match="of 2199023255552 B has 2 chunks of 16384 B"):
        open_archive([path])


def test_a_name_of_underscores_takes_no_time() -> None:
    assert unused_prefix("__pad__", ["__pad__" + "_" * 10**6, "__pad__x"]) == "__pad__" + "_" * (10**6 + 1)
    assert unused_prefix("__pad__", ["__pad__x"]) == "__pad___"
    assert unused_prefix("__pad__", ["w"]) == "__pad__"


@pytest.mark.parametrize("link", ["pack", "directory"])
def test_a_pack_may_be_a_link_for_it_is_only_read(link: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"w": random_tensor("F16", (5,))})
    (path,) = packed(tmp_path / "a", tmp_path / "d" / "model.safetensors", memory_bytes=MEMORY).files
    (tmp_path / "link").symlink_to(path if link == "pack" else path.parent)
    assert not verify(open_archive([tmp_path / "link"]), MEMORY)


SOURCES = sorted((Path(__file__).parents[2] / "tierstore").rglob("*.py"))


UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_no_pickle_anywhere() -> None:
    """No pickle may name what it likes: torch loads weights only, and one unpickler takes plain records only."""
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in UNPICKLERS, path
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in UNPICKLERS:
                used.setdefault(path.name, set()).add(ast.unparse(node))
            elif isinstance(node, ast.Call):
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                assert "allow_pickle" not in keywords, path
                if isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec", "__import__"), path
                elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "torch.load":
                    assert ast.unparse(keywords["weights_only"]) == "True", path
    assert used == {
        "torch_files.py": {"pickle.UnpicklingError"},
        "distributed.py": {"pickle.UnpicklingError", "pickle.Unpickler"},
    }
