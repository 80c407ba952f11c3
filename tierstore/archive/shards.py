"""The files of an ordinary safetensors checkpoint that is to be written: which tensors are where, and the index.

Scope: tensors cut into files, headers, the index, as Hugging Face lays them out.
Not here: writing their data (`unpacking.py`, `train/checkpoints.py`), when files appear (`publish.py`), packs.
Owner: none; plain records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.pack.layout import DTYPE_BITS, TensorSpec, back_to_back, build_header, tensor_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """A file: its header, and the offset of each tensor."""

    header: bytes
    places: Mapping[str, int]
    file_bytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> Shard:
        # Wider dtypes first, so that every tensor is aligned.
        entries = back_to_back(sorted(specs, key=lambda spec: -DTYPE_BITS[spec.dtype]))
        header = build_header(entries, metadata)
        places = {entry.name: len(header) + entry.begin for entry in entries}
        return cls(header, places, len(header) + (entries[-1].end if entries else 0))


def shards_of(specs: Iterable[TensorSpec], metadata: Mapping[str, str], most_bytes: int | None) -> list[Shard]:
    """Tensors in this order, cut into files of at most `most_bytes`, unless one tensor is larger; at least one file.

    Args:
        most_bytes: None: one file.
    """
    parts: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        nbytes = tensor_bytes(spec.name, spec.dtype, spec.shape)
        if most_bytes is not None and parts[-1] and size + nbytes > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(spec)
        size += nbytes
    return [Shard.of(part, metadata) for part in parts]


def index_of(shards: Sequence[Shard], names: Sequence[str]) -> bytes:
    """The index as Hugging Face writes it; `names` are the names of the files."""
    total_bytes = sum(shard.file_bytes - len(shard.header) for shard in shards)
    files = {tensor: name for shard, name in zip(shards, names) for tensor in shard.places}
    body = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(body, indent=2) + "\n").encode()
