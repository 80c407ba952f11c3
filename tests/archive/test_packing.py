"""What is packed comes back bit for bit, from one file or many, whatever the dtype, the name and the codec."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.numpy
from checkpoints import every_dtype, packed, random_tensor, read_safetensors, small_checkpoint, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.archive import flow, publish
from tierstore.archive.choosing import measure
from tierstore.archive.opening import open_archive
from tierstore.archive.packing import PackOptions, pack, plan_groups
from tierstore.archive.reading import verify
from tierstore.archive.sources import INDEX, SINGLE, open_source
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.config import Codec, parse_size
from tierstore.errors import BudgetError, ConfigError, FormatError, StorageError, StorageFull

pytestmark = pytest.mark.usefixtures("no_leaks")
CODECS = [codec for codec in Codec if codec is not Codec.AUTO]
MEMORY = 2**40  # counts the whole process, which other tests have filled with more than a pack takes


def unpacked(destination: Path, *packs: Path, **options: Any) -> Any:
    written = unpack(open_archive(packs), UnpackOptions(destination, memory_bytes=MEMORY, **options))
    return read_safetensors(*(path for path in written if path.suffix == ".safetensors"))


@pytest.mark.parametrize("codec", CODECS)
def test_every_dtype_comes_back(tmp_path: Path, codec: Codec) -> None:
    tensors = every_dtype()
    packed(write_safetensors(tmp_path / "a", tensors), tmp_path / "p.safetensors", codec=codec, memory_bytes=MEMORY)
    assert unpacked(tmp_path / "out", tmp_path / "p.safetensors") == tensors


def test_a_pack_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    tensors = small_checkpoint(tmp_path / "a")
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    with safetensors.safe_open(tmp_path / "p.safetensors", "np") as opened:
        assert set(opened.keys()) >= set(tensors)
        assert opened.get_slice("h.1.w").get_shape() == [60, 70]
        assert opened.get_tensor("wte").tobytes() == tensors["wte"][2]
        assert opened.metadata()["format"] == "pt"
    packed(tmp_path / "a", tmp_path / "q.safetensors", codec=Codec.LZ4_BITSHUFFLE, memory_bytes=MEMORY)
    with safetensors.safe_open(tmp_path / "q.safetensors", "np") as opened:
        assert all(opened.get_slice(name).get_dtype() == "U8" for name in opened.keys())  # noqa: SIM118
    assert (tmp_path / "q.safetensors").stat().st_size < (tmp_path / "p.safetensors").stat().st_size


def test_groups_stand_in_execution_order(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a", blocks=11)
    found = packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    assert [group.name for group in found.groups] == ["embeddings", *(f"h.{i}" for i in range(11)), "norm"]
    begins = [chunk.offset for file in open_archive([tmp_path / "p.safetensors"]) for _, _, chunk in
              file.archive.chunks(file.header.data_start)]  # fmt: skip
    assert begins == sorted(begins)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
        | st.sampled_from(["__pad__0", "__chunks__0", "h.1.w", "h.¹.w", "../x", "0.0", "a\nb", "h.\0.w", "\x1b[31m"]),
        unique=True, max_size=6,
    ),
    codec=st.sampled_from(CODECS),
    chunk_bytes=st.sampled_from([4096, 16384]),
    shards=st.integers(1, 3),
    memory_bytes=st.just(MEMORY),
)  # fmt: skip
def test_any_names_and_any_cut_come_back(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], codec: Codec, chunk_bytes: int, shards: int,
    memory_bytes: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("names")
    tensors = {name: random_tensor("U8", (1700 * seed,), seed) for seed, name in enumerate(names)}
    tensors |= {f"{name}!": ("U8", (30000,), bytes(30000)) for name in names}
    write_safetensors(folder / "a", tensors)
    groups, _ = plan_groups(open_source(folder / "a"), {}, chunk_bytes)
    options: dict[str, Any] = {"codec": codec, "chunk_bytes": chunk_bytes, "memory_bytes": memory_bytes}
    with pytest.raises(ConfigError, match=rf"--shards 100 is too many: .* there are {len(groups)}; at most"):
        packed(folder / "a", folder / "p", shards=100, **options)
    packed(folder / "a", folder / "p", shards=min(shards, max(len(groups), 1)), **options)
    assert unpacked(folder / "out", folder / "p", shard_bytes=6000) == tensors
    assert not verify(open_archive([folder / "p"]), MEMORY)


def test_a_group_is_spread_over_directories_that_are_all_needed(tmp_path: Path) -> None:
    tensors = small_checkpoint(tmp_path / "a")
    found = packed(tmp_path / "a", tmp_path / "x", tmp_path / "y", shards=4, memory_bytes=MEMORY)
    assert [path.parent.name for path in found.files] == ["x", "y", "x", "y"]
    positions = [[group.position % 2 for group in one.groups] for one in found.archives]
    assert len({tuple(row) for row in positions}) > 1, "consecutive groups lie on different disks"
    assert unpacked(tmp_path / "out", tmp_path / "x", tmp_path / "y") == tensors
    with pytest.raises(FormatError, match="give all directories"):
        open_archive([tmp_path / "x"])
    with pytest.raises(FormatError, match="holds no pack"):
        open_archive([tmp_path / "y"])
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / SINGLE).hardlink_to(found.files[0])
    with pytest.raises(FormatError, match="z holds 1 of the 4 files of a pack"):
        open_archive([tmp_path / "z"])
    for file in found.files[:2]:
        with pytest.raises(FormatError, match="is one of 4 files; give the directory that holds the index of them"):
            open_archive([file])


def test_one_pack_in_two_runs_is_the_same_to_the_byte(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    for name in ("p", "q"):
        packed(tmp_path / "a", tmp_path / f"{name}.safetensors", codec=Codec.LZ4, memory_bytes=MEMORY)
    assert (tmp_path / "p.safetensors").read_bytes() == (tmp_path / "q.safetensors").read_bytes()


def test_a_sharded_checkpoint_is_one_source(tmp_path: Path) -> None:
    tensors = small_checkpoint(tmp_path / "a")
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    assert unpacked(tmp_path / "shards", tmp_path / "p.safetensors", shard_bytes=100000) == tensors
    source = open_source(tmp_path / "shards")
    assert source.kind == "safetensors checkpoint in 4 shards"
    assert (tmp_path / "shards" / INDEX).is_file()
    packed(tmp_path / "shards", tmp_path / "again.safetensors", memory_bytes=MEMORY)
    assert unpacked(tmp_path / "whole", tmp_path / "again.safetensors") == tensors
    assert (tmp_path / "whole" / SINGLE).is_file()


def test_an_existing_pack_is_refused_and_replaced_only_when_asked(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    tensors = small_checkpoint(tmp_path / "b", blocks=5)
    for destination, options in ((tmp_path / "p.safetensors", {}), (tmp_path / "p", {"shards": 2})):
        packed(tmp_path / "a", destination, memory_bytes=MEMORY, **options)
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match="is there already; give another destination, or --overwrite"):
            packed(tmp_path / "b", destination, memory_bytes=MEMORY, **options)
        packed(tmp_path / "b", destination, memory_bytes=MEMORY, overwrite=True, **options)
        assert len(list(tmp_path.rglob("*"))) == len(before), "the files of the old one are gone"
        assert unpacked(tmp_path / f"out-{destination.name}", destination) == tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def foreign(folder: Path, blocks: int = 4) -> dict[str, bytes]:
    """Makes a sharded checkpoint of somebody else, with Hugging Face's file names; returns its files."""
    small_checkpoint(folder.with_name("of " + folder.name), blocks=blocks)
    packed(folder.with_name("of " + folder.name), folder.with_name(folder.name + ".safetensors"), memory_bytes=MEMORY)
    unpacked(folder, folder.with_name(folder.name + ".safetensors"), shard_bytes=100000)
    return contents(folder)


def test_a_checkpoint_of_somebody_else_is_never_touched(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    before, other = foreign(tmp_path / "b"), foreign(tmp_path / "c", blocks=5)
    assert INDEX in before
    assert len(before) > 3
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    packed(tmp_path / "a", tmp_path / "p", memory_bytes=MEMORY, shards=2)
    pack_before = contents(tmp_path / "p")
    for write in (
        lambda: packed(tmp_path / "a", tmp_path / "b" / SINGLE, memory_bytes=MEMORY),
        lambda: packed(tmp_path / "a", tmp_path / "b", memory_bytes=MEMORY),
        lambda: packed(tmp_path / "a", tmp_path / "p", tmp_path / "b", memory_bytes=MEMORY, overwrite=True),
        lambda: packed(tmp_path / "a", tmp_path / "b", tmp_path / "c", memory_bytes=MEMORY, overwrite=True),
        lambda: unpacked(tmp_path / "b", tmp_path / "p.safetensors"),
        lambda: unpacked(tmp_path / "b" / SINGLE, tmp_path / "p.safetensors"),
        lambda: unpacked(tmp_path / "b", tmp_path / "p.safetensors", shard_bytes=100000),
        lambda: unpacked(tmp_path / "p", tmp_path / "p"),
    ):
        with pytest.raises(ConfigError, match=r"is there already|a checkpoint of its own"):
            write()
        assert (contents(tmp_path / "b"), contents(tmp_path / "c")) == (before, other)
        assert contents(tmp_path / "p") == pack_before


def test_unpack_names_no_option_that_it_does_not_have(tmp_path: Path) -> None:
    before = foreign(tmp_path / "b")
    packed(tmp_path / "b", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    with pytest.raises(ConfigError, match=r"is there already; give another destination$"):
        unpacked(tmp_path / "b", tmp_path / "p.safetensors")
    assert contents(tmp_path / "b") == before


def test_a_link_to_what_is_not_there_is_not_written_over(tmp_path: Path) -> None:
    foreign(tmp_path / "b")
    link = tmp_path / "p.safetensors"
    link.symlink_to(tmp_path / "not mounted" / "p.safetensors")
    with pytest.raises(ConfigError, match="is there already; give another"):
        packed(tmp_path / "b", link, memory_bytes=MEMORY)
    assert link.is_symlink()


def test_files_that_no_index_names_are_not_written_over(tmp_path: Path) -> None:
    before = foreign(tmp_path / "b")
    (tmp_path / "b" / INDEX).unlink()
    del before[INDEX]
    with pytest.raises(ConfigError, match="is there already; give another"):
        unpacked(tmp_path / "b", tmp_path / "b.safetensors", shard_bytes=100000)
    assert contents(tmp_path / "b") == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shards": 1, "destinations": (Path("a"), Path("b"))}, "--shards 1 is fewer than the 2 destinations"),
        ({"destinations": (Path("a"), Path("./a"))}, "a destination is given twice"),
        ({"destinations": (Path("a"), Path("b/../a"))}, "a destination is given twice"),
        ({"destinations": (Path("a.pt"),)}, "a pack is a name ending in .safetensors, or directories, not a.pt"),
        ({"destinations": (Path("a.safetensors"),), "shards": 2}, "2 files do not go into a.safetensors"),
    ],
)
def test_destinations_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackOptions(**values)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint(tmp_path / "a")
    monkeypatch.setattr(publish, "free_bytes", lambda path: 1000)
    with pytest.raises(StorageFull, match=r"too small: \d+ B \(.* KiB\) are needed, 1000 B \(1000 B\) are free"):
        packed(tmp_path / "a", tmp_path / "new" / "p", memory_bytes=MEMORY)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_more_files_than_may_be_open_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a", blocks=30)
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    packed(tmp_path / "a", tmp_path / "many", shards=30, memory_bytes=MEMORY)
    files, many = open_archive([tmp_path / "p.safetensors"]), open_archive([tmp_path / "many"])
    before = sorted(tmp_path.rglob("*"))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, usual[1]))
    try:
        with pytest.raises(ConfigError, match=rf"61 files at once, .* may open {few} in all: .* by `ulimit -n`"):
            packed(tmp_path / "a", tmp_path / "p", shards=30, memory_bytes=MEMORY)
        with pytest.raises(ConfigError, match=r"files at once, .* write fewer files"):
            unpack(files, UnpackOptions(tmp_path / "out", 80000, MEMORY))
        for target in ("out.pt", "out.safetensors", "out"):  # no number of files to write is small enough
            with pytest.raises(ConfigError, match=r"\d+ files at once, .* by `ulimit -n`$"):
                unpack(many, UnpackOptions(tmp_path / target, 80000, MEMORY))
        assert sorted(tmp_path.rglob("*")) == before
        packed(tmp_path / "a", tmp_path / "p", shards=10, memory_bytes=MEMORY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_a_coded_pack_asks_for_the_room_that_it_is_expected_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write_safetensors(tmp_path / "a", {"x": ("U8", (10**6,), bytes(10**6))}))
    options = PackOptions((tmp_path / "p.safetensors",), memory_bytes=MEMORY)
    (rates,) = measure(source, options.chunk_bytes, (Codec.LZ4,))["U8"]
    assert rates.ratio > 100
    monkeypatch.setattr(publish, "free_bytes", lambda path: 20000)
    with pytest.raises(StorageFull, match="too small"):
        pack(source, options, {"U8": Codec.LZ4})
    pack(source, options, {"U8": Codec.LZ4}, ratios={"U8": rates.ratio})
    assert not verify(open_archive(options.destinations), MEMORY)


def test_a_coded_pack_may_take_more_than_was_expected(tmp_path: Path) -> None:
    tensors = {"x": random_tensor("U8", (10**6,))}
    source = open_source(write_safetensors(tmp_path / "a", tensors))
    options = PackOptions((tmp_path / "p.safetensors",), memory_bytes=MEMORY, chunk_bytes=2**16)
    pack(source, options, {"U8": Codec.LZ4}, ratios={"U8": 1000.0})
    assert not verify(open_archive(options.destinations), MEMORY)
    assert unpacked(tmp_path / "b.safetensors", *options.destinations) == tensors


def test_memory_that_is_too_small_is_said_with_what_would_do(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    with pytest.raises(BudgetError, match=r"--memory 1 MiB is too small: .* give at least"):
        packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=2**20)


@given(rss_bytes=st.integers(2**20, 2**40), job_bytes=st.integers(4096, 2**26))
def test_the_memory_that_is_advised_is_enough(rss_bytes: int, job_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=rss_bytes))
        patch.setattr(flow, "psutil", SimpleNamespace(Process=lambda: process))
        with pytest.raises(BudgetError) as refused:
            flow.room(1, 1, job_bytes)
        advised_bytes = parse_size(str(refused.value).partition("give at least ")[2])
        assert flow.room(advised_bytes, 1, job_bytes).threads == 1


def test_threads_are_as_many_as_memory_and_jobs_allow() -> None:
    used = flow.psutil.Process().memory_info().rss + flow._SLACK_BYTES
    small = flow.room(used + 2**31, 100, 2**29)
    assert small.threads <= 4
    assert small.queued == 0
    assert flow.room(2**50, 100, 2**20) == flow.Room(flow.THREADS, 2**20, flow.QUEUED)
    few = [flow.room(2**50, jobs, 2**20) for jobs in (0, 1, 3, flow.THREADS + 1)]
    assert [(one.threads, one.queued) for one in few] == [(1, 0), (1, 0), (3, 0), (flow.THREADS, 1)]
    tight = flow.room(used + 2**31, 100, 2**31 // (flow.THREADS + 2))
    assert tight.buffer_bytes <= 2**31


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 B, shorter than the 8 B"),
        (b"not a checkpoint at all", "safetensors"),
        ((10**4).to_bytes(8, "little") + b"{}", "the header ends at byte 10008, but the file has 10 B"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=message):
        open_source(tmp_path / "a.safetensors")


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(FormatError, match="but the file has"):
        open_source(tmp_path / "a")


def test_paths_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no"):
        open_source(tmp_path / "nothing")
    with pytest.raises(FormatError, match=r"holds no checkpoint: none of model.safetensors"):
        open_source(tmp_path)


def test_an_index_that_names_what_is_missing_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor("U8", (3,))})
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}')
    with pytest.raises(FormatError, match=r"lacks 1 tensors that .* puts there: 'b'"):
        open_source(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(FormatError, match=r"gone.safetensors is missing: .* names it"):
        open_source(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../m.safetensors"}}')
    with pytest.raises(FormatError, match="not a plain file name"):
        open_source(tmp_path)


def test_a_pack_is_no_source(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a")
    packed(tmp_path / "a", tmp_path / "p.safetensors", memory_bytes=MEMORY)
    packed(tmp_path / "a", tmp_path / "encoded", codec=Codec.LZ4, memory_bytes=MEMORY)
    packed(tmp_path / "a", tmp_path / "striped", tmp_path / "rest", memory_bytes=MEMORY)
    packed(tmp_path / "a", tmp_path / "one" / "model.safetensors", memory_bytes=MEMORY)
    for place in ("p.safetensors", "encoded", "striped", "one"):
        with pytest.raises(FormatError, match="is a pack; unpack it first"):
            open_source(tmp_path / place)
    names = dict.fromkeys(("wte", "ln_f"), next((tmp_path / "encoded").glob("*.safetensors")).name)
    (tmp_path / "encoded" / INDEX).write_text(json.dumps({"weight_map": names}))  # as another program writes one
    with pytest.raises(FormatError, match="is a pack; unpack it first"):
        open_source(tmp_path / "encoded")
    with pytest.raises(FormatError, match="is an ordinary safetensors file, not a pack"):
        open_archive([tmp_path / "a"])
