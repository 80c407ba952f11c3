"""Small checkpoints for the tests of packs: any dtype, as bytes, without torch.

Scope: writing safetensors files and reading them back as (dtype, shape, bytes) by name; packing in small chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tierstore.archive.packing import Packed, PackOptions, pack
from tierstore.archive.sources import open_source
from tierstore.config import Codec
from tierstore.pack.layout import DTYPE_BITS, TensorSpec, back_to_back, tensor_bytes
from tierstore.pack.validate import read_header

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    data = np.random.default_rng(seed).integers(0, 256, tensor_bytes("x", dtype, shape), dtype=np.uint8)
    return dtype, shape, data.tobytes()


def write_safetensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
    """Writes any dtype, also those that the library does not know; the header is not padded, as in files of others."""
    entries = back_to_back([TensorSpec(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])
    body = {
        entry.name: {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.begin, entry.end]}
        for entry in entries
    }
    text = json.dumps(({"__metadata__": dict(metadata)} if metadata else {}) | body).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
    return path


def read_safetensors(*paths: Path) -> Tensors:
    found: Tensors = {}
    for path in paths:
        header, data = read_header(path), path.read_bytes()
        for name, entry in header.tensors.items():
            begin = header.data_start + entry.begin
            found[name] = (entry.dtype, entry.shape, data[begin : begin + entry.end - entry.begin])
    return found


def every_dtype() -> Tensors:
    """Of each dtype of safetensors a random tensor, zeros and an empty tensor; of whole bytes also a scalar."""
    tensors: Tensors = {}
    for seed, dtype in enumerate(DTYPE_BITS):
        tensors[f"h.{seed}.{dtype}"] = random_tensor(dtype, (3, 8 + seed, 4), seed)
        tensors[f"h.{seed}.zeros"] = (dtype, (128, 128), bytes(tensor_bytes("x", dtype, (128, 128))))
        tensors[f"h.{seed}.empty"] = (dtype, (0, 4), b"")
        if DTYPE_BITS[dtype] % 8 == 0:
            tensors[f"{dtype}.scalar"] = random_tensor(dtype, (), seed)
    return tensors


def packed(
    source: Path, *destinations: Path, codec: Codec = Codec.NONE, chunk_bytes: int = 16384, **options: object
) -> Packed:
    """Packs in small chunks."""
    checkpoint = open_source(source)
    codecs = {tensor.spec.dtype: codec for tensor in checkpoint.tensors.values()}
    options = {"memory_bytes": 2**33, **options}  # this process may have taken much for other tests
    return pack(checkpoint, PackOptions(destinations, chunk_bytes=chunk_bytes, **options), codecs)  # type: ignore[arg-type]


def small_checkpoint(path: Path, blocks: int = 3) -> Tensors:
    """Compressible and random tensors of two dtypes in a few blocks; written to `path`."""
    tensors: Tensors = {"wte": random_tensor("F32", (40, 50)), "ln_f": ("F32", (50,), bytes(200))}
    for block in range(blocks):
        tensors[f"h.{block}.w"] = random_tensor("BF16", (60, 70), block)
        tensors[f"h.{block}.zeros"] = ("BF16", (60, 700), bytes(84000))
    write_safetensors(path, tensors, {"format": "pt"})
    return tensors
