"""The index of a pack of several files, as Hugging Face reads one, with a checksum of its own.

Scope: its text, made from the tables of the files and parsed. Not here: where it is written (`publish.py`).
Owner: none; pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tierstore.errors import ChecksumMismatch, FormatError
from tierstore.pack.archive import Archive
from tierstore.pack.checked import file_name_of, list_of
from tierstore.pack.codecs import checksum_bytes
from tierstore.pack.strict_json import parse_json

_SEAL = "tierstore.xxh3"


def archive_index(archives: Sequence[Archive], sizes: Sequence[int]) -> tuple[list[str], bytes]:
    """Names of the files of a finished archive, and its index; `sizes` are the bytes of data in each file."""
    count = len(archives)
    names = [f"model-{one.identity[:8]}-{one.shard + 1:05d}-of-{count:05d}.safetensors" for one in archives]
    files = {entry.name: name for one, name in zip(archives, names) for entry in one.tensors}
    return names, sealed_index(files, names, sum(sizes))


def sealed_index(files: Mapping[str, str], names: Sequence[str], total_bytes: int) -> bytes:
    """An index from tensors to files; `names` are the names of all files, including those that hold no tensor."""
    metadata: dict[str, Any] = {"total_size": total_bytes, "files": list(names)}
    body = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
    metadata[_SEAL] = f"{checksum_bytes(_text(body)):016x}"
    return _text(body)


def is_of_pack(index: Any) -> bool:
    """Whether the parsed text of an index says, rightly or not, that a pack is what it names."""
    metadata = index.get("metadata") if isinstance(index, dict) else None
    return isinstance(metadata, dict) and (_SEAL in metadata or "files" in metadata)


def check_index(data: bytes, source: str) -> list[str]:
    """The files of an index.

    Raises:
        ChecksumMismatch: a byte of it differs from what was written.
        FormatError: it names something other than files in its directory, or is the index of an ordinary checkpoint.
    """
    body = parse_json(data, source)
    metadata = body.get("metadata") if isinstance(body, dict) else None
    if isinstance(body, dict) and "weight_map" in body and not is_of_pack(body):
        raise FormatError(f"{source} is the index of an ordinary checkpoint; make a pack of it by `tierstore pack`")
    seal = metadata.pop(_SEAL, None) if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or seal != f"{checksum_bytes(_text(body)):016x}":
        raise ChecksumMismatch(f"{source} was changed after it was written; pack again")
    metadata[_SEAL] = seal
    if _text(body) != data:
        raise ChecksumMismatch(f"{source} was changed after it was written; pack again")
    return [file_name_of(name, f"{source}: a file") for name in list_of(metadata.get("files"), f"{source}: files")]


def _text(body: Any) -> bytes:
    return (json.dumps(body, indent=1) + "\n").encode()
