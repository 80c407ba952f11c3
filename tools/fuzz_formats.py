"""Targets of `tools/fuzz.py` in the formats of tierstore: packs, their chunks, manifests and indices.

For most targets an input is a file. The input of a chunk begins with its codec, the bytes of an element and the bytes
of its content; that of a manifest begins with its length, and the captured state follows it. Each change repairs the
checksums, because otherwise no input would get past them.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
from pathlib import Path
from typing import Any

from fuzz_changes import Failure, Mutate, blind, changed_json, text_of

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


# --- chunks: codec, bytes of an element, content length, what is stored ---------------------------------------------


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
    if len(data) >= 38 and rng.random() < 0.7:  # lengths in a blosc2 frame: of its content, and of itself
        size, frame = _CHUNK.unpack_from(data)[2] % 2**22, bytearray(data[6:])
        frame[4:8], frame[12:16] = size.to_bytes(4, "little"), len(frame).to_bytes(4, "little")
        data = data[:6] + bytes(frame)
    return data


# --- manifests: length, JSON, the captured state --------------------------------------------------------------------


def read_manifest(data: bytes, folder: Path) -> None:
    from tierstore.errors import FormatError
    from tierstore.store import manifest
    from tierstore.store.verification import chunks_of, is_of_tensors, packs_of
    from tierstore.train.capture import check_captured, with_tensors

    length = int.from_bytes(data[:4], "little")
    text, captured = data[4 : 4 + length], data[4 + length :]
    number = re.search(rb'"generation": ?(\d{1,12})\b', text)
    body = manifest.read_manifest(
        text + b"\n" + manifest.digest(text).encode(), int(number[1]) if number else 0, "manifest"
    )
    generation = manifest.read_generation(body, captured, "captured")
    directories = [folder / f"{i}" for i in range(min(4, generation.layout["directories"]))]
    packs = packs_of(generation, directories)
    for kind, pack in packs.items():
        try:
            pack.slots.check(generation.records[kind])
        except FormatError as error:
            if "is missing" not in str(error):  # there are no files
                raise
    chunks_of(generation, packs)
    if is_of_tensors(generation):
        return
    check_captured(generation.captured)
    with_tensors(generation.captured["registered"])


def manifest_seeds(folder: Path) -> dict[str, bytes]:
    from tierstore.store.manifest import Generation, captured_text, manifest_text
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
    named = Generation(0, tensors, {"put-0": [ChunkRecord(0, 8192, 5), ChunkRecord(0, 4096, 7)]}, {"entries": [entry]})
    seeds = {}
    for name, generation in (("training", training), ("named", named)):
        noted, arrays = captured_text(generation.captured)
        text = manifest_text(generation.number, generation.layout, generation.records, noted)
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
