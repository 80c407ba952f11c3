"""What `tools/fuzz.py` searches: everything that reads a file, good inputs for it, and how they are changed.

An input of most targets is a file. That of a chunk begins with its codec, the bytes of an element and of its content;
that of a manifest with its length, and the captured state stands behind it. Checksums are made right after each change,
for nobody finds a fault behind one otherwise.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 255, 4095, 4096, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 0.5,
    -0.0, "", ".", "..", "../x", "/etc/passwd", "\0", "\ud800", "ÿ" * 300, "none", "lz4", "U8", "F4", "F32", [], {},
    [[]], "0123456789abcdef", "__metadata__", "__pad__", "__chunks__" + "_" * 5000, [2**62, 4], [0, -1], {"$tuple": []},
)  # fmt: skip

Mutate = Callable[[bytes], bytes]


class Failure(Exception):
    """An input did what no file may do."""


@dataclass(frozen=True)
class Target:
    """Something that reads files.

    Attributes:
        read: reads the input, in a folder of its own.
        seeds: good inputs by name, made in a folder.
        change: an input like another one, its checksums right; the last argument changes bytes blindly.
    """

    read: Callable[[bytes, Path], None]
    seeds: Callable[[Path], dict[str, bytes]]
    change: Callable[[bytes, random.Random, Mutate], bytes]


# --- changing inputs by their structure -----------------------------------------------------------------------------


def changed_json(value: Any, rng: random.Random) -> Any:
    """The same tree with one or a few places changed."""
    places: list[tuple[tuple[Any, ...], Any]] = [((), value), *_places(value, ())]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path, old = rng.choice(places)
        kind = rng.randrange(6)
        new: Any
        if kind == 0 and type(old) is int:
            new = old + rng.choice((-1, 1, -4096, 4096, old))
        elif kind == 1 and isinstance(old, list) and old:
            new = old * rng.choice((2, 3)) if rng.random() < 0.5 else old[:-1]
        elif kind == 2 and isinstance(old, dict) and old:
            key = rng.choice(list(old))
            new = {other: item for other, item in old.items() if other != key}
            if rng.random() < 0.5:
                new[rng.choice(["x", "", "..", "$tuple", key + "_"])] = old[key]
        elif kind == 3:
            new = rng.choice(places)[1]
        else:
            new = rng.choice(ODD)
        value = _with(value, path, new)
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key), item
        yield from _places(item, (*path, key))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict) and path[0] in value:
        return {**value, path[0]: _with(value[path[0]], path[1:], new)}
    if isinstance(value, list) and isinstance(path[0], int) and path[0] < len(value):
        return [*value[: path[0]], _with(value[path[0]], path[1:], new), *value[path[0] + 1 :]]
    return value  # changed away meanwhile


def text_of(value: Any, rng: random.Random, **options: Any) -> bytes:
    """JSON, now and then with a key twice, or nested deep."""
    text = json.dumps(value, **options)
    if rng.random() < 0.03:
        text = re.sub(r'("\w+": ?[\w"]+),', r"\1,\1,", text, count=1)
    if rng.random() < 0.01:
        text = text.replace("[", "[" * rng.choice((300, 2000)), 1)
    return text.encode("utf-8", "surrogatepass")


def blind(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Bytes cut or changed anywhere."""
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else mutate(data)


# --- packs ----------------------------------------------------------------------------------------------------------


def read_pack(data: bytes, folder: Path) -> None:
    import numpy as np

    from tierstore.alignment import padded
    from tierstore.archive.gather import OpenFiles
    from tierstore.archive.opening import check_header, open_archive, placed_chunks
    from tierstore.archive.reading import read_content
    from tierstore.archive.sources import open_source
    from tierstore.errors import FormatError
    from tierstore.io.backend import Backend

    path = folder / "a.safetensors"
    with contextlib.suppress(FormatError):
        open_source(path)
    files = open_archive([path])
    check_header(files[0])
    room = np.empty(0, np.uint8)
    with OpenFiles(Backend()) as opened:
        for placed in placed_chunks(files)[:8]:
            nbytes = padded(placed.chunk.stored_bytes)
            if len(room) < nbytes + 4096:
                room = np.empty(nbytes + 4096, np.uint8)
            buffer = room[-room.ctypes.data % 4096 :][:nbytes]
            read_content(opened, placed, buffer, np.empty(placed.chunk.content_bytes, np.uint8))


def pack_seeds(folder: Path) -> dict[str, bytes]:
    import numpy as np
    from safetensors.numpy import save

    from tierstore.archive.packing import PackOptions, pack
    from tierstore.archive.sources import open_source
    from tierstore.config import Codec

    tensors = {"h.0.w": np.arange(3000, dtype=np.float32), "h.0.b": np.zeros((5, 7), np.int16), "e": np.zeros((0, 3))}
    plain = save(tensors, {"format": "pt"})
    seeds = {"plain": plain, "empty": save({})}
    (folder / "plain.safetensors").write_bytes(plain)
    for codec in (Codec.NONE, Codec.LZ4, Codec.LZ4_BITSHUFFLE, Codec.ZSTD_BITSHUFFLE):
        source, path = open_source(folder / "plain.safetensors"), folder / f"{codec.value}.safetensors"
        codecs = dict.fromkeys(("F32", "I16", "F64"), codec)
        pack(source, PackOptions((path,), chunk_bytes=8192, memory_bytes=2**40), codecs)
        seeds[codec.value] = path.read_bytes()
    return seeds


def change_pack(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    length = int.from_bytes(data[:8], "little")
    try:
        body = json.loads(data[8 : 8 + length])
        metadata = body.get("__metadata__", {})
        table = json.loads(metadata["tierstore"]) if "tierstore" in metadata else None
    except (ValueError, AttributeError, TypeError):
        return blind(data, rng, mutate)
    content, which = data[8 + length :], rng.random()
    if which < 0.5 and table is not None:
        table = changed_json(table, rng)
    elif which < 0.8:
        body = changed_json(body, rng)
    elif which < 0.95:
        content = mutate(content)
    else:
        return blind(data, rng, mutate)
    if table is not None and rng.random() < 0.9:
        _repair_table(table, content)
    if isinstance(body, dict) and isinstance(body.get("__metadata__"), dict):
        if table is not None and "tierstore" in body["__metadata__"]:
            body["__metadata__"]["tierstore"] = text_of(table, rng, ensure_ascii=False).decode(errors="replace")
        _repair_seal(body)
    text = text_of(body, rng, ensure_ascii=False, separators=(",", ":"))
    length = max(length, -(-(8 + len(text)) // 4096) * 4096 - 8) if table is not None else len(text)
    return length.to_bytes(8, "little") + text.ljust(length) + content


def _repair_table(table: Any, content: bytes) -> None:
    from tierstore.pack.codecs import checksum_bytes

    offset = 0
    with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
        for group in table["groups"]:
            for chunk in group["chunks"]:
                end = offset + -(-chunk[0] // 4096) * 4096
                chunk[1] = f"{checksum_bytes(content[offset:end]):016x}"
                offset = end


def _repair_seal(body: dict[str, Any]) -> None:
    from tierstore.pack.layout import SEAL_KEY, TensorEntry, header_seal

    with contextlib.suppress(Exception):  # nothing that could be sealed
        entries = [
            TensorEntry(name, item["dtype"], tuple(item["shape"]), *item["data_offsets"])
            for name, item in body.items()
            if name != "__metadata__"
        ]
        entries.sort(key=lambda entry: (entry.begin, entry.end, entry.name))
        body["__metadata__"][SEAL_KEY] = header_seal(entries, body["__metadata__"])


# --- chunks: codec, bytes of an element, content length, what is stored --------------------------------------------

_CHUNK = struct.Struct("<BBI")
_GUARD = 4096


def read_chunk(data: bytes, folder: Path) -> None:
    import numpy as np

    from tierstore.config import Codec
    from tierstore.pack.codecs import codec_for

    if len(data) < _CHUNK.size:
        return
    kind, item_bytes, content_bytes = _CHUNK.unpack_from(data)
    codecs = [codec for codec in Codec if codec is not Codec.AUTO]
    content_bytes %= 2**22
    stored = np.frombuffer(data, np.uint8)[_CHUNK.size :]
    room = np.full(content_bytes + 2 * _GUARD, 0xA5, np.uint8)
    try:
        codec_for(codecs[kind % len(codecs)], item_bytes or 1).decode(stored, room[_GUARD : _GUARD + content_bytes])
    finally:
        if (room[:_GUARD] != 0xA5).any() or (room[_GUARD + content_bytes :] != 0xA5).any():
            raise Failure("bytes were written beside the destination")


def chunk_seeds(folder: Path) -> dict[str, bytes]:
    import numpy as np

    from tierstore.config import Codec
    from tierstore.pack.codecs import codec_for

    seeds = {}
    contents = {"zeros": np.zeros(70000, np.uint8), "few": np.arange(70000, dtype=np.uint8) // 7}
    for number, codec in enumerate(codec for codec in Codec if codec is not Codec.AUTO):
        for name, content in contents.items():
            room = np.empty_like(content)
            stored = codec_for(codec, 4).encode(content, room)
            seeds[f"{codec.value}-{name}"] = _CHUNK.pack(number, 4, len(content)) + room[:stored].tobytes()
    return seeds


def change_chunk(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    data = blind(data, rng, mutate) if rng.random() < 0.5 else data[:6] + mutate(data[6:])
    if len(data) >= 38 and rng.random() < 0.7:  # lengths of a blosc2 frame: of what it gives, and of itself
        size, frame = _CHUNK.unpack_from(data)[2] % 2**22, bytearray(data[6:])
        frame[4:8], frame[12:16] = size.to_bytes(4, "little"), len(frame).to_bytes(4, "little")
        data = data[:6] + bytes(frame)
    return data


# --- manifests: length, JSON, the captured state --------------------------------------------------------------------


def read_manifest(data: bytes, folder: Path) -> None:
    from tierstore.errors import FormatError
    from tierstore.store import manifest
    from tierstore.store.entries import recorded_entries
    from tierstore.store.verification import chunks_of, packs_of
    from tierstore.train.capture import check_captured, with_tensors

    length = int.from_bytes(data[:4], "little")
    text, captured = data[4 : 4 + length], data[4 + length :]
    number = re.search(rb'"generation": ?(\d{1,12})\b', text)
    body = manifest.read_manifest(
        text + b"\n" + manifest.digest(text).encode(), int(number[1]) if number else 0, "manifest"
    )
    generation = manifest.read_generation(body, captured, "captured")
    if not generation.layout["groups"]:
        recorded_entries(generation)
        return
    directories = [folder / f"{i}" for i in range(min(4, generation.layout["directories"]))]
    for kind, pack in packs_of(generation, directories).items():
        if len(pack) < 100:
            with contextlib.suppress(FormatError):  # its files are not there
                pack.check(generation.records[kind])
    chunks_of(generation, directories)
    check_captured(generation.captured)
    with_tensors(generation.captured["registered"])


def manifest_seeds(folder: Path) -> dict[str, bytes]:
    from tierstore.store.manifest import Generation, texts_of
    from tierstore.store.slots import ChunkRecord
    from tierstore.train import capture

    group = {"name": "h.0", "dtype": "bf16", "trainable": True, "parameters": [["h.0.w", [30, 50]], ["h.0.b", [0]]]}
    codecs = {kind: ["lz4", "smaller"] for kind in ("weights", "state")}
    layout = {"codecs": codecs, "chunk_elements": 1000, "directories": 2, "codec": "auto",
              "groups": [group, {**group, "name": "e", "dtype": "fp32", "trainable": False}]}  # fmt: skip
    record = ChunkRecord(1, 2000, 2**63)
    rows: list[ChunkRecord | None] = [record, ChunkRecord(0, 1000, 1), None, record]
    records = {"weights": rows, "state": rows}
    captured = {
        "step": 3, "steps": {"h.0.w": 3}, "loss_scale": [1.0, 0], "optimizer": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        "scheduler": None, "registered": {"data": {"position": 5, "odd": {1: {2}}}}, "buffers": {}, "pending": None,
        "random": capture.random_states(),
    }  # fmt: skip
    tensors: dict[str, Any] = {"kind": "tensors", "codec": "none", "chunk_bytes": 8192, "directories": 1, "groups": []}
    entry = {"name": "h.0", "tier": "nvme", "pack": "put-0", "tensors": [["w", "float32", [50, 60]]]}
    training = Generation(3, layout, records, captured)
    named = Generation(0, tensors, {"put-0": [ChunkRecord(0, 8192, 5), record]}, {"entries": [entry]})
    seeds = {}
    for name, generation in (("training", training), ("named", named)):
        text, arrays = texts_of(generation)
        seeds[name] = _framed(text.rpartition(b"\n")[0], arrays)
    return seeds


def _framed(text: bytes, captured: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text + captured


def change_manifest(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    from tierstore.store.manifest import digest

    length = int.from_bytes(data[:4], "little")
    text, captured, which = data[4 : 4 + length], data[4 + length :], rng.random()
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return blind(data, rng, mutate)
    if which < 0.75:
        body = changed_json(body, rng)
    elif which < 0.95:
        captured = change_pack(captured, rng, mutate)
    else:
        text = mutate(text)
    if isinstance(body, dict) and rng.random() < 0.95:
        body["captured_bytes"], body["captured_checksum"] = len(captured), digest(captured)
    return _framed(text_of(body, rng) if which < 0.95 else text, captured)


# --- the index of a checkpoint --------------------------------------------------------------------------------------


def read_index(data: bytes, folder: Path) -> None:
    from tierstore.archive.index import check_index
    from tierstore.archive.opening import open_archive
    from tierstore.archive.sources import open_source
    from tierstore.errors import FormatError

    with contextlib.suppress(FormatError):
        check_index(data, "index")
    with contextlib.suppress(FormatError):
        open_archive([folder])
    open_source(folder)


def index_seeds(folder: Path) -> dict[str, bytes]:
    from tierstore.archive.index import sealed_index

    plain = {"metadata": {"total_size": 12}, "weight_map": {"a": "one.safetensors"}}
    sealed = sealed_index({"a": "one.safetensors"}, ["one.safetensors"], 12)
    return {"plain": json.dumps(plain).encode(), "sealed": sealed}


def change_index(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    from tierstore.archive.index import sealed_index

    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return blind(data, rng, mutate)
    if rng.random() < 0.05:
        return blind(data, rng, mutate)
    body = changed_json(body, rng)
    with contextlib.suppress(Exception):
        if rng.random() < 0.5:
            return sealed_index(body["weight_map"], body["metadata"]["files"], body["metadata"]["total_size"])
    return text_of(body, rng)


# --- files of torch -------------------------------------------------------------------------------------------------


def read_torch(data: bytes, folder: Path) -> None:
    from tierstore.archive.sources import open_source

    source = open_source(folder / "a.pt")
    for tensor in source.tensors.values():
        for piece in tensor.pieces:
            if not 0 <= piece.begin <= piece.begin + piece.nbytes <= len(data):
                raise Failure(f"{piece} is not in a file of {len(data)} B")


def torch_seeds(folder: Path) -> dict[str, bytes]:
    import torch

    whole = torch.arange(60.0).view(6, 10)
    states = {
        "plain": {"a": whole, "b": whole.t(), "c": whole[1:3], "d": torch.zeros(0, 3), "e": torch.ones(()).bfloat16()},
        "nested": {"epoch": 3, "model": {"w": torch.nn.Parameter(whole)}, "state": [{"x": (1, 2.5, None)}, "text"]},
        "sparse": {"a": whole.to_sparse()},
    }
    seeds = {}
    for name, state in states.items():
        file = io.BytesIO()
        torch.save(state, file)
        seeds[name] = file.getvalue()
    return seeds


def change_torch(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Records changed and the archive written anew, with right checksums; or bytes anywhere."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # whatever zipfile makes of it
        return blind(data, rng, mutate)
    if not records or rng.random() < 0.1:
        return blind(data, rng, mutate)
    at = 0 if rng.random() < 0.7 else rng.randrange(len(records))
    name, content = records[at]
    which = rng.random()
    if which < 0.8:
        records[at] = (name, changed_pickle(content, rng, mutate) if name.endswith(".pkl") else mutate(content))
    elif which < 0.9:
        records.insert(rng.randrange(len(records)), (rng.choice(["archive/DATA.PKL", "../x", "/x", name]), content))
    else:
        del records[at]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for record in records:
            archive.writestr(zipfile.ZipInfo(record[0]), record[1])
    return out.getvalue()


def changed_pickle(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Opcodes repeated, taken out or put in; or bytes anywhere."""
    import pickletools

    if rng.random() < 0.4:
        return mutate(data)
    try:
        starts = [position or 0 for _, _, position in pickletools.genops(data)]
    except Exception:  # damaged already
        return mutate(data)
    first, second = sorted((rng.choice(starts), rng.choice(starts)))
    piece = rng.choice((
        data[first:second], bytes([rng.choice(b")]}\x85\x86\x87Natlu0be2()R\x81\x8f")]) * rng.choice((1, 2, 300)),
        b"r" + struct.pack("<I", rng.choice((0, 300, 2**32 - 1))), b"\x8a\x08" + rng.randbytes(8), b"J\xff\xff\xff\x7f",
        b"",
    ))  # fmt: skip
    return data[:first] + piece + data[rng.choice((first, second)) :]


# --- distributed checkpoints: the metadata --------------------------------------------------------------------------


def read_distributed(data: bytes, folder: Path) -> None:
    from tierstore.archive.sources import open_source

    open_source(folder)


def distributed_seeds(folder: Path) -> dict[str, bytes]:
    return {"plain": (distributed_checkpoint(folder) / ".metadata").read_bytes()}


def distributed_checkpoint(folder: Path) -> Path:
    """Saves a small one."""
    import warnings

    import torch
    from torch.distributed.checkpoint import state_dict_saver

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save({"w": torch.ones(3, 4), "epoch": 1}, checkpoint_id=folder / "saved", no_dist=True)
    return folder / "saved"


def change_distributed(data: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    return changed_pickle(data, rng, mutate)


TARGETS = {
    "pack": Target(read_pack, pack_seeds, change_pack),
    "chunk": Target(read_chunk, chunk_seeds, change_chunk),
    "manifest": Target(read_manifest, manifest_seeds, change_manifest),
    "index": Target(read_index, index_seeds, change_index),
    "torch": Target(read_torch, torch_seeds, change_torch),
    "distributed": Target(read_distributed, distributed_seeds, change_distributed),
}
FILES = {
    "pack": "a.safetensors", "index": "model.safetensors.index.json", "torch": "a.pt", "distributed": ".metadata",
}  # fmt: skip
"""Where an input stands in the folder in which it is read."""
