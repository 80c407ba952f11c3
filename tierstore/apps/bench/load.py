"""A cold pack into memory: `load_pack` against safetensors, torch.load and fio's reads.

Scope: contestants and rows; `contend` is our own side.
Not here: the peers' sides (`tools/peers/load_*.py`, `tools/peers/disk_fio.py`).
The file leaves the page cache before each round, and memory is touched once before the clock starts: a virtual machine
may have given it back to its host.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierstore.apps.bench.case import (
    Bar,
    BenchOptions,
    Case,
    Contestant,
    Results,
    Row,
    best_median,
    ours,
    peer,
    ratio,
    row_of,
)
from tierstore.apps.bench.cold import forget, touch_memory
from tierstore.apps.bench.disk import FIO_SETTINGS, fio_of, make_file
from tierstore.apps.bench.serve import Round
from tierstore.config import format_size

_OURS, _SAFETENSORS, _TORCH = "tierstore load_pack", "safetensors load_file", "torch.load"
_TENSOR_BYTES = 2**24  # 4096 x 2048 of bf16; --size is a multiple


def heats(options: BenchOptions, scratch: Path) -> list[list[Contestant]]:
    """One heat; fio in the settings that `disk` has."""
    packed, pickled = str(_packed(scratch)), str(_pickled(scratch))
    contestants = [ours(_OURS, "load", path=packed)]
    if options.wants("safetensors"):
        contestants.append(peer(_SAFETENSORS, "load_safetensors", options.peer_python, path=packed))
    if options.wants("torch"):
        contestants.append(peer(_TORCH, "load_torch", options.peer_python, path=pickled))
    if options.wants("fio"):
        contestants += [fio_of(*setting, options, verbs=("read",), path=packed, size=options.size)
                        for setting in FIO_SETTINGS]  # fmt: skip
    return [contestants]


def rows(options: BenchOptions, results: Results) -> Sequence[Row]:
    """Bytes of the file per second."""
    floor, own = best_median(results, "fio", "read"), best_median(results, _OURS, "read")
    bars = [
        Bar(0.95, "of fio's best read", ratio(own, floor)),
        Bar(1.3, "x safetensors.torch.load_file", ratio(own, best_median(results, _SAFETENSORS, "read"))),
    ]
    return [
        row_of(result, "read", f"load {format_size(options.size)}, cold", "GB/s", floor=floor,
               floor_of="fio's best read", bars=bars if name == _OURS else ())
        for name, result in results.items()
    ]  # fmt: skip


def prepare(options: BenchOptions, scratch: Path) -> None:
    """Makes a checkpoint of random bf16 tensors, its pack, and the same for torch.load; then removes the checkpoint."""
    from tierstore.archive.packing import PackOptions, pack
    from tierstore.archive.sources import open_source

    checkpoint = scratch / "checkpoint.safetensors"
    make_checkpoint(checkpoint, options.size)
    pack(open_source(checkpoint), PackOptions((_packed(scratch),)), {})
    if options.wants("torch"):
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(checkpoint), _pickled(scratch))
    checkpoint.unlink()


def make_checkpoint(path: Path, size_bytes: int) -> None:
    """A safetensors file of so many bytes of tensors, in blocks of four, written piece by piece."""
    raw = path.with_suffix(".raw")
    make_file(raw, size_bytes)
    entries = {
        f"model.layers.{index // 4}.mlp.part_{index % 4}.weight": {
            "dtype": "BF16", "shape": [4096, 2048],
            "data_offsets": [index * _TENSOR_BYTES, (index + 1) * _TENSOR_BYTES],
        }
        for index in range(size_bytes // _TENSOR_BYTES)
    }  # fmt: skip
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out, raw.open("rb") as data:
        out.write(len(header).to_bytes(8, "little") + header)
        while part := data.read(2**26):
            out.write(part)
    raw.unlink()


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Our own side; every byte is verified."""
    import torch

    from tierstore.archive.loading import load_pack

    path = Path(options["path"])
    size = path.stat().st_size

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        forget(str(path))
        touch_memory(size)
        start_s = time.perf_counter()
        tensors = load_pack(path)
        seconds = time.perf_counter() - start_s
        del tensors
        return seconds, {"read": size / seconds / 1e9}

    yield {"versions": {"torch": torch.__version__}}, run_round


def _packed(scratch: Path) -> Path:
    return scratch / "pack.safetensors"


def _pickled(scratch: Path) -> Path:
    return scratch / "checkpoint.pt"


CASE = Case(
    "load", heats, rows, disk_bytes=lambda options: 3 * options.size + 2**26, prepare=prepare, reads=("size",)
)
