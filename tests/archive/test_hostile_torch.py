"""Small files of torch and distributed checkpoints that would take far more than their size if they were believed."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as distributed
from test_hostile import torch_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import metadata
from torch.serialization import skip_data

from tierstore.archive import distributed as ours
from tierstore.archive import torch_files
from tierstore.archive.sources import INDEX, open_source
from tierstore.archive.torch_files import load_without_data
from tierstore.errors import FormatError

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"),  # by torch
]
SPARSE_BYTES = 2**38  # a file of holes, larger than the memory of most machines


def lists_of_nothing() -> bytes:
    value: list[Any] = []
    for _ in range(12):
        value = [value] * 10
    return pickle.dumps(value, 2)


def long_names() -> bytes:
    """A dictionary in a dictionary in ...: the innermost name is 90 times as long as the key that they share."""
    key = "k" * 300_000
    value: Any = 1
    for _ in range(90):
        value = {key: value}
    return pickle.dumps(value, 2)


@pytest.mark.parametrize("data", [lists_of_nothing(), long_names()], ids=["lists of nothing", "long names"])
def test_what_a_pickle_multiplies_is_counted(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds more values, or longer names, than its pickle"):
        open_source(torch_file(tmp_path / "a.pt", data_pkl=data))


def test_views_of_one_element_are_not_more_pieces_than_the_file_explains(tmp_path: Path) -> None:
    base = torch.zeros(4)
    torch.save({f"{i}": base[:1].expand(60000 + i) for i in range(3)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"180003 pieces or more, too many for \d+ B; save them with \.contiguous"):
        open_source(tmp_path / "a.pt")
    torch.save({"a": base[:1].expand(60000), "b": base.view(2, 2).t()}, tmp_path / "b.pt")
    assert len(open_source(tmp_path / "b.pt").tensors["a"].pieces) == 60000


def test_records_that_are_the_same_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a zip archive may name one large pickle a thousand times: no pickle is read."""
    path = torch_file(tmp_path / "a.pt")
    whole = path.read_bytes()
    end = whole.rindex(b"PK\5\6")
    entries, size, begin = struct.unpack("<HII", whole[end + 10 : end + 20])
    directory, one = whole[begin : begin + size], b""
    while b"data.pkl" not in one:
        length = 46 + sum(struct.unpack("<HHH", directory[28:34]))
        one, directory = directory[:length], directory[length:]
    head = one[:28] + struct.pack("<HHH", len("archive/0.pkl"), 0, 0) + one[34:46]
    again = b"".join(head + f"archive/{i}.pkl".encode() for i in range(9))
    counts = struct.pack("<HHII", entries + 9, entries + 9, size + len(again), begin)
    path.write_bytes(whole[:end] + again + whole[end : end + 8] + counts + whole[end + 20 :])
    monkeypatch.setattr(torch_files, "check_pickle", lambda *_: pytest.fail("a pickle was read"))
    with pytest.raises(FormatError, match="two records of the archive overlap"):
        open_source(path)


def sparse(path: Path, head: bytes = b"", tail: bytes = b"") -> Path:
    path.write_bytes(head)
    os.truncate(path, SPARSE_BYTES)
    with path.open("ab") as file:
        file.write(tail)
    return path


@pytest.mark.parametrize("name", [INDEX, ".metadata", "pytorch_model.bin.index.json", "config.json"])
def test_a_file_of_holes_is_not_read_whole(name: str, tmp_path: Path) -> None:
    if name == "config.json":
        torch_file(tmp_path / "pytorch_model.bin")
    sparse(tmp_path / name)
    with pytest.raises(FormatError, match="B, which no such file needs"):
        open_source(tmp_path)


@pytest.mark.parametrize(("is_64_bit", "leads_there"), [(False, True), (True, True), (True, False)])
def test_nor_is_a_directory_of_holes(is_64_bit: bool, leads_there: bool, tmp_path: Path) -> None:
    size, tail = 2**32 - 2, b""
    if is_64_bit:
        size, record = 2**32 - 1, b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, 2**39, 0)
        tail = record + b"PK\6\7" + struct.pack("<IQI", 0, SPARSE_BYTES if leads_there else 0, 1)
    tail += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, size, 0, 0)
    with pytest.raises(FormatError, match=r"is not a file of torch\.save"):
        open_source(sparse(tmp_path / "a.pt", tail=tail))


def test_a_file_of_more_than_32_bits_is_read(tmp_path: Path) -> None:
    with FakeTensorMode():
        tensors = {name: torch.empty(2**32 + 5, dtype=torch.uint8) for name in "ab"}
    with skip_data(materialize_fake_tensors=True):
        torch.save(tensors, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size > 2**33
    source = open_source(tmp_path / "a.pt")
    assert [tensor.spec.shape for tensor in source.tensors.values()] == [(2**32 + 5,)] * 2


def test_nor_is_a_pickle_of_holes(tmp_path: Path) -> None:
    size = 2**31
    local = b"PK\3\4" + struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 0, 0, size, size, 8, 0) + b"data.pkl"
    central = b"PK\1\2" + struct.pack("<HHHHHHIIIHHHHHII", 20, 20, 0, 0, 0, 0, 0, size, size, 8, 0, 0, 0, 0, 0, 0)
    path = tmp_path / "a.pt"
    path.write_bytes(local)
    os.truncate(path, len(local) + size)
    with path.open("ab") as file:
        file.write(central + b"data.pkl" + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 54, len(local) + size, 0))
    assert zipfile.is_zipfile(path)
    with pytest.raises(FormatError, match=f"a pickle of {size} B"):
        open_source(path)


# --- distributed checkpoints ----------------------------------------------------------------------------------------


def saved(folder: Path, tensor: torch.Tensor | None = None) -> metadata.Metadata:
    distributed.save({"w": torch.ones(3, 4) if tensor is None else tensor}, checkpoint_id=folder, no_dist=True)
    found: metadata.Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def changed(folder: Path, change: Callable[[Any, Any], None]) -> None:
    """Saves a checkpoint, and changes its metadata and the entry of `w` in it."""
    found = saved(folder)
    change(found, found.state_dict_metadata["w"])
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def named(found: Any, name: Any) -> None:
    ((index, info),) = found.storage_data.items()
    found.storage_data = {dataclasses.replace(index, fqn=name): info}
    found.state_dict_metadata = {name: found.state_dict_metadata["w"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found, _: named(found, 5), "a name is a int, not text"),
        (lambda found, _: named(found, "\ud800"), "is not valid Unicode"),
        (lambda found, _: named(found, "__metadata__"), "no tensor can be named"),
        (lambda _, w: setattr(w, "size", torch.Size([2**62, 4])), r"more than 2\*\*63 elements"),
        (lambda _, w: setattr(w, "size", [3.0, 4]), "the size of 'w' is 3.0, not a number"),
        (lambda _, w: setattr(w, "size", [True, 12]), "the size of 'w' is True, not a number"),
        (lambda _, w: setattr(w, "chunks", []), "the parts of 'w' are not its 48 B"),
        (lambda _, w: setattr(w.chunks[0], "sizes", [3, 4.0]), "a size is 4.0, not a number"),
        (lambda found, _: [setattr(i, "offset", -1) for i in found.storage_data.values()], "stands is -1, not a num"),
        (lambda found, _: [setattr(i, "length", 2**70) for i in found.storage_data.values()], "not a number of"),
    ],
)
def test_fields_of_another_kind_are_refused(change: Callable[[Any, Any], None], message: str, tmp_path: Path) -> None:
    changed(tmp_path, change)
    with pytest.raises(FormatError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "attribute", "of"),
    [
        ("pathlib", "PosixPath", "__fspath__", PurePosixPath),
        ("torch.distributed.checkpoint.metadata", "Metadata", "state_dict_metadata", metadata.Metadata),
        ("torch.serialization", "_get_layout", "__doc__", torch.serialization._get_layout),
        ("torch", "Size", "numel", torch.Size),
        ("collections", "OrderedDict", "items", dict),
    ],
)
def test_what_a_pickle_names_stays_as_it_is(module: str, name: str, attribute: str, of: Any, tmp_path: Path) -> None:
    """Unpickling may set attributes; those of a class would stay as long as the process runs."""
    before = getattr(of, attribute, None)
    saved(tmp_path)
    text = attribute.encode()
    state = b"(N}X" + struct.pack("<I", len(text)) + text + b"ctorch\nSize\nst"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + f"c{module}\n{name}\n".encode() + state + b"b.")
    with pytest.raises(FormatError):
        open_source(tmp_path)
    assert getattr(of, attribute, None) is before or getattr(of, attribute) == before


def test_one_part_in_many_tensors_is_looked_at_once_and_not_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = saved(tmp_path)
    file = io.BytesIO()
    torch.save(torch.zeros(1).expand(60000), file)
    (tmp_path / "__0_0.distcp").write_bytes(file.getvalue())
    ((_, info),) = found.storage_data.items()
    info = dataclasses.replace(info, offset=0, length=len(file.getvalue()))
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([60000]))
    w = dataclasses.replace(found.state_dict_metadata["w"], size=torch.Size([60000]), chunks=[chunk])
    found.state_dict_metadata = {f"{i}": w for i in range(3)}
    found.storage_data = {metadata.MetadataIndex(f"{i}", torch.Size([0])): info for i in range(3)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    looks = []
    monkeypatch.setattr(ours, "load_without_data", lambda *rest: looks.append(1) or load_without_data(*rest))
    with pytest.raises(FormatError, match="180000 pieces or more, too many for"):
        open_source(tmp_path)
    assert len(looks) == 1


def test_a_part_of_holes_is_not_as_many_pieces_as_it_has_rows(tmp_path: Path) -> None:
    rows = 2**31
    found = saved(tmp_path)
    with FakeTensorMode():
        column = torch.empty(rows, 1, dtype=torch.uint8)
    with skip_data(materialize_fake_tensors=True):
        torch.save(column, tmp_path / "__0_0.distcp")
    size = torch.Size([rows, 1])
    w = found.state_dict_metadata["w"]
    w.size, w.properties.dtype = torch.Size([rows, 2]), torch.uint8
    ((_, info),) = found.storage_data.items()
    info = dataclasses.replace(info, offset=0, length=(tmp_path / "__0_0.distcp").stat().st_size)
    places = [torch.Size([0, 0]), torch.Size([0, 1])]
    w.chunks = [metadata.ChunkStorageMetadata(place, size) for place in places]
    found.storage_data = {metadata.MetadataIndex("w", place): info for place in places}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(FormatError, match="cut into more than 1048576 pieces"):
        open_source(tmp_path)


def test_long_lists_of_small_values_are_no_attack(tmp_path: Path) -> None:
    """Flags of a byte each under a long name, and one dictionary that many places share."""
    seen = {"train_dataloader.sampler.state_dict.very_long_component_name.mask_of_seen": [True] * 50_000}
    shared: dict[str, Any] = {f"option_{number}": number for number in range(9)}
    for number, held in enumerate((seen, {"groups": [shared] * 10_000})):
        path = tmp_path / f"{number}.pt"
        torch.save({"w": torch.ones(2)} | held, path)
        assert set(open_source(path).tensors) == {"w"}
