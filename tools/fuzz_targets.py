"""What `tools/fuzz.py` searches: everything that reads a file, good inputs for it, and how they are changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import fuzz_formats as formats
import fuzz_torch
from fuzz_changes import Mutate


@dataclass(frozen=True)
class Target:
    """Something that reads files.

    Attributes:
        read: reads the input, in a folder of its own.
        seeds: good inputs by name, made in a folder.
        change: makes a changed input with right checksums; its last argument changes bytes blindly.
    """

    read: Callable[[bytes, Path], None]
    seeds: Callable[[Path], dict[str, bytes]]
    change: Callable[[bytes, random.Random, Mutate], bytes]


TARGETS = {
    "pack": Target(formats.read_pack, formats.pack_seeds, formats.change_pack),
    "chunk": Target(formats.read_chunk, formats.chunk_seeds, formats.change_chunk),
    "manifest": Target(formats.read_manifest, formats.manifest_seeds, formats.change_manifest),
    "index": Target(formats.read_index, formats.index_seeds, formats.change_index),
    "torch": Target(fuzz_torch.read_torch, fuzz_torch.torch_seeds, fuzz_torch.change_torch),
    "distributed": Target(fuzz_torch.read_distributed, fuzz_torch.distributed_seeds, fuzz_torch.change_distributed),
}
FILES = {
    "pack": "a.safetensors", "index": "model.safetensors.index.json", "torch": "a.pt", "distributed": ".metadata",
}  # fmt: skip
"""The name of an input's file in the folder in which it is read."""
