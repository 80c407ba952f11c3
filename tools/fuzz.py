#!/usr/bin/env python3
"""Whatever a file holds, it is read or refused with a FormatError: a coverage-guided search for one that is not.

    python tools/fuzz.py pack|chunk|manifest|index|torch|distributed [--seconds 60] [--seed 1]
    python tools/fuzz.py pack --replay FILE...

A failure is any other error, more than a second, far more memory than the input has bytes, a file opened for writing, a
process started. It is written below `tests/corpus/TARGET`, where a test replays it from then on. The search is that of
libFuzzer, by atheris (`pip install atheris`); inputs are changed by their structure, and their checksums repaired.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_changes import Failure
from fuzz_targets import FILES, TARGETS, Target
from fuzz_torch import distributed_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "corpus"
INSTRUMENTED = ["tierstore", "zipfile", "pickletools"]
LIMIT_S, SPARE_BYTES, SPARE_FACTOR = 1.0, 16 * 2**20, 64
ADDRESS_SPACE_BYTES = 2**30  # beside what is mapped when the search begins
MOST_BYTES = 2**17  # of an input
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FORBIDDEN = re.compile(r"os\.(remove|rename|mkdir|rmdir|truncate|chmod|link|symlink|system|exec|fork|posix_spawn)"
                       r"|subprocess\.Popen|socket\.connect|shutil\..*|ctypes\.dlopen")  # fmt: skip


_watched: list[list[str]] = []  # a hook cannot be removed: it records in the last list here, if any
_is_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if FORBIDDEN.fullmatch(event) or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
        _watched[-1].append(f"{event}{arguments!r:.200}")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Fails if the block opens a file for writing, changes a directory or starts a process."""
    global _is_hooked
    if not _is_hooked:
        sys.addaudithook(_hook)
        _is_hooked = True
    seen: list[str] = []
    _watched.append(seen)
    try:
        yield
    finally:
        _watched.pop()
    if seen:
        raise Failure(f"it did {seen[0]}")


def try_input(target: Target, data: bytes, folder: Path, *, is_measured: bool) -> str:
    """Reads one input; returns the FormatError's sentence, or an empty one.

    Args:
        is_measured: look at the memory, too, which takes time.

    Raises:
        Failure, or any other error that reading raised: neither may happen.
    """
    from tierstore.errors import FormatError

    refusal, start = "", time.perf_counter()
    if is_measured:
        tracemalloc.start()
    try:
        with watched(), contextlib.suppress(KeyboardInterrupt):
            try:
                target.read(data, folder)
            except FormatError as error:
                refusal = str(error)
        peak = tracemalloc.get_traced_memory()[1] if is_measured else 0
    finally:
        tracemalloc.stop()
    seconds = time.perf_counter() - start
    if seconds > LIMIT_S:
        raise Failure(f"it took {seconds:.1f} s")
    if peak > SPARE_BYTES + SPARE_FACTOR * len(data):
        raise Failure(f"{peak} B were allocated for {len(data)} B")
    if len(refusal) > 4000:
        raise Failure(f"the refusal has {len(refusal)} characters: {refusal[:200]}")
    return refusal


@dataclass(frozen=True)
class Place:
    """A folder in which the inputs of one target are read, one after the other.

    Attributes:
        seeds: good inputs; all have been read once, so that everything is imported.
    """

    name: str
    folder: Path
    seeds: dict[str, bytes]

    @classmethod
    def make(cls, name: str, folder: Path) -> Place:
        import numpy as np
        from safetensors.numpy import save

        from tierstore.errors import FormatError

        if name == "index":
            (folder / "one.safetensors").write_bytes(save({"a": np.zeros(3, np.float32)}))
        if name == "distributed":
            for path in distributed_checkpoint(folder).iterdir():
                path.rename(folder / path.name)
        (folder / "made").mkdir()
        place = cls(name, folder, TARGETS[name].seeds(folder / "made"))
        for data in place.seeds.values():
            with contextlib.suppress(FormatError):
                place._put(data)
                TARGETS[name].read(data, folder)
        return place

    def _put(self, data: bytes) -> None:
        if self.name in FILES:
            (self.folder / FILES[self.name]).write_bytes(data)

    def read(self, data: bytes, *, is_measured: bool = False) -> str:
        """See `try_input`."""
        self._put(data)
        return try_input(TARGETS[self.name], data, self.folder, is_measured=is_measured)


def replay(name: str, inputs: Mapping[str, bytes]) -> dict[str, str]:
    """The refusal of each input by its name, and of each seed.

    Raises:
        Failure, or any other error; its note names the input.
    """
    refusals = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Place.make(name, Path(folder))
        for key, data in (place.seeds | dict(inputs)).items():
            try:
                refusals[key] = place.read(data, is_measured=True)
            except Exception as error:
                error.add_note(f"the input was {name} {key}")
                raise
    return refusals


def search(name: str, seconds: int, seed: int, folder: Path) -> None:
    """Does not return: libFuzzer ends the process, with a status of 0 if nothing was found."""
    try:
        import atheris
    except ImportError:
        raise SystemExit("the search is done by atheris, which is not there: pip install atheris") from None
    import torch.distributed.checkpoint  # noqa: F401, before the rest, for most of torch is not what is searched
    from torch._weights_only_unpickler import Unpickler

    Unpickler.load = atheris.instrument_func(Unpickler.load)  # type: ignore[method-assign]
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        place = Place.make(name, folder)
    (folder / "seeds").mkdir()
    for key, data in place.seeds.items():
        (folder / "seeds" / key).write_bytes(data)
    mapped = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE_BYTES, resource.RLIM_INFINITY))
    (CORPUS / name).mkdir(parents=True, exist_ok=True)

    def one(data: bytes) -> None:
        place.read(data)

    def change(data: bytes, most_bytes: int, number: int) -> bytes:
        rng = random.Random(number)

        def mutate(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, max(len(part) + 64, 256)))

        try:
            return TARGETS[name].change(data, rng, mutate)[:most_bytes]
        except Exception:  # too odd already to have a structure
            return mutate(data)[:most_bytes]

    options = [
        f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={MOST_BYTES}", "-rss_limit_mb=0", "-timeout=10",
        f"-artifact_prefix={CORPUS / name}/", "-len_control=0", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(folder / "seeds"), str(CORPUS / name)], one, custom_mutator=change)
    atheris.Fuzz()


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", nargs="+", type=Path, metavar="FILE", help="read these, and search nothing")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if asked.replay:
        for file, refusal in replay(asked.target, {str(file): file.read_bytes() for file in asked.replay}).items():
            print(f"{file}: {refusal or 'read'}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        search(asked.target, asked.seconds, asked.seed, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
