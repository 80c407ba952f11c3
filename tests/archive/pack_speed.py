#!/usr/bin/env python3
"""Speed of packs against fio and safetensors, cold, in interleaved rounds on one file system; medians, peak memory.

    python tests/archive/pack_speed.py DIR [--size 4GiB] [--rounds 5] [--memory 1GiB]

Scope: pack -> memory, verify, checkpoint -> pack. Each task, ours or theirs, runs in a process of its own, after the
file was dropped from the page cache. `load_file` maps the file: its tensors are touched once, page by page, as a model
would. A virtual machine may have given free memory back to its host, and gets it again at a third of a GB/s (measured):
each process therefore touches as much memory as the file has, and frees it, before the clock starts.
fio reuses its buffers, but a load needs new memory, which the kernel zeroes first: so plain reads into new memory are
measured, too. Packing reads and writes one disk at once, so fio does the same; the ratio to the slower of fio's reads
and writes alone is printed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tierstore.config import parse_size
from tierstore.measure.fio import Fio, Shape, find_fio

_SHAPES = (Shape("1M", 64, huge=True), Shape("16M", 16, huge=True), Shape("1M", 8, huge=True))
_SECONDS = 3.0


def forget(path: Path) -> None:
    """Drops the file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def ours(task: str, *paths: str, memory: str) -> dict[str, Any]:
    """Runs one task in a new process: seconds without imports, and peak memory of the process."""
    command = [sys.executable, __file__, "--task", task, "--memory", memory, *paths]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def warm_memory(nbytes: int) -> None:
    """Makes the memory ready that this process gets next; resets the peak of the process."""
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        room.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, nbytes, 4096):
            room[at] = 1
    Path("/proc/self/clear_refs").write_text("5")


def run_task(task: str, paths: list[str], memory_bytes: int) -> None:
    """Runs the task in the new process, and prints its figures."""
    tasks = {"load": _load, "load_file": _load_file, "new": _read_new, "verify": _verify, "pack": _pack}
    work = tasks[task](paths, memory_bytes)
    warm_memory(Path(paths[0]).stat().st_size * 5 // 4)
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    del kept  # frees what was loaded after the clock stopped
    peak_bytes = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    sys.stdout.write(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes}))


def _load(paths: list[str], memory_bytes: int) -> Any:
    from tierstore.archive.loading import load_pack

    return lambda: load_pack(paths[0])


def _read_new(paths: list[str], memory_bytes: int) -> Any:
    """Nothing but direct reads into new memory, by as many threads as ours."""
    from concurrent.futures import ThreadPoolExecutor

    from tierstore.archive.flow import THREADS
    from tierstore.archive.packing import CHUNK_BYTES

    size = Path(paths[0]).stat().st_size // CHUNK_BYTES * CHUNK_BYTES

    def work() -> Any:
        room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(room)
        descriptor = os.open(paths[0], os.O_RDONLY | os.O_DIRECT)
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda at: os.preadv(descriptor, [view[at : at + CHUNK_BYTES]], at),
                             range(0, size, CHUNK_BYTES)))  # fmt: skip
        os.close(descriptor)
        return view

    return work


def _load_file(paths: list[str], memory_bytes: int) -> Any:
    import torch
    from safetensors.torch import load_file

    def work() -> Any:
        tensors = load_file(paths[0])
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8)[::4096].sum()
        return tensors

    return work


def _verify(paths: list[str], memory_bytes: int) -> Any:
    from tierstore.archive.opening import open_archive
    from tierstore.archive.reading import verify

    return lambda: verify(open_archive([Path(paths[0])]), memory_bytes)


def _pack(paths: list[str], memory_bytes: int) -> Any:
    from tierstore.archive.packing import PackOptions, pack
    from tierstore.archive.sources import open_source

    options = PackOptions((Path(paths[1]),), memory_bytes=memory_bytes, overwrite=True)
    return lambda: pack(open_source(Path(paths[0])), options, {})


async def fio(program: str, path: Path, *verbs: Literal["read", "write"], shape: Shape) -> list[float]:
    """Rates of several fio runs at once; a write goes to a file of its own."""
    runs = []
    for verb in verbs:
        target = path if verb == "read" else path.with_suffix(".fio")
        runs.append(Fio(program, target, path.stat().st_size, verb, shape).run(_SECONDS))
    return list(await asyncio.gather(*runs))


def make_checkpoint(path: Path, size_bytes: int) -> None:
    """F16 blocks of a Llama of width 4096; random bits."""
    from safetensors.numpy import save_file

    generator, tensors, left, block = np.random.default_rng(0), {}, size_bytes, 0
    shapes = {"mlp.up_proj": (11008, 4096), "self_attn.q_proj": (4096, 4096), "input_layernorm": (4096,)}
    while left > 0:
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            tensors[f"model.layers.{block}.{name}.weight"] = (
                generator.integers(0, 2**16, count, dtype=np.uint16).view(np.float16).reshape(shape)
            )
            left -= 2 * count
        block += 1
    save_file(tensors, path)


def measure(folder: Path, size_bytes: int, rounds: int, memory: str) -> None:
    """Runs all rounds, and prints the table."""
    checkpoint, packed = folder / "checkpoint.safetensors", folder / "pack.safetensors"
    make_checkpoint(checkpoint, size_bytes)
    size = checkpoint.stat().st_size
    program = find_fio()
    rates: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = defaultdict(int)
    for number in range(rounds):
        shape = _SHAPES[number % len(_SHAPES)]

        def timed(name: str, task: str, *paths: Path) -> None:
            forget(paths[0])
            result = ours(task, *map(str, paths), memory=memory)
            rates[name].append(size / result["seconds"])
            peaks[name] = max(peaks[name], result["peak_bytes"])

        packed.unlink(missing_ok=True)  # to free the blocks of an old pack takes a third of a second per GiB
        os.sync()
        timed("pack", "pack", checkpoint, packed)
        for name, verbs in (("write", ["write"]), ("read", ["read"]), ("both", ["read", "write"])):
            for one, rate in zip(verbs, asyncio.run(fio(program, packed, *verbs, shape=shape))):  # type: ignore[arg-type]
                rates[f"fio {one}" if name != "both" else f"fio {one}, at once"].append(rate)
        timed("load_pack", "load", packed)
        timed("reads, new memory", "new", packed)
        timed("load_file", "load_file", packed)
        timed("verify", "verify", packed)
    print(f"{size} B, {rounds} rounds, --memory {memory}")
    for name, values in rates.items():
        listed = " ".join(f"{rate / 1e9:.2f}" for rate in values)
        peak = f"  peak {peaks[name] / 2**20:.0f} MiB" if name in peaks else ""
        print(f"  {name:18} {statistics.median(values) / 1e9:6.2f} GB/s  [{listed}]{peak}")
    median = {name: statistics.median(values) for name, values in rates.items()}
    best = max(rates["fio read"])
    together = min(median["fio read, at once"], median["fio write, at once"])
    print(f"load_pack / fio's best read      {max(rates['load_pack']) / best:.3f}  (medians "
          f"{median['load_pack'] / median['fio read']:.3f})")  # fmt: skip
    print(f"load_pack / reads into new memory {median['load_pack'] / median['reads, new memory']:.3f}")
    print(f"load_pack / load_file            {median['load_pack'] / median['load_file']:.3f}")
    print(f"pack / slower of both at once    {median['pack'] / together:.3f}")
    print(f"pack / min(read, write) alone    {median['pack'] / min(median['fio read'], median['fio write']):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--task")
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="1GiB")
    given = parser.parse_args()
    if given.task:
        run_task(given.task, given.paths, parse_size(given.memory))
        return
    folder = Path(given.paths[0]) / "pack_speed"
    folder.mkdir(parents=True)
    try:
        measure(folder, parse_size(given.size), given.rounds, given.memory)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
