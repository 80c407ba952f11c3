"""Text as bytes: a corpus with a held-out part, and batches that resume at the exact sample.

Scope: reading files, the split, the order of samples, the loader and its position.
Not here: tokenizers (a byte is a token), the model.
Owner: `Batches` owns its loader and worker processes; the training thread owns `Batches`.
"""

from __future__ import annotations

import os
import signal
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from tierstore.apps.stopping import STOPS
from tierstore.config import format_size
from tierstore.errors import ConfigError, StorageError

STANDARD_LIBRARY_CAP_BYTES = 8 * 2**20
DIRECTORY_CAP_BYTES = 256 * 2**20
_HELD_OUT_EVERY = 20  # one file of 20, or the last twentieth of a single file
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text and held-out text, as bytes.

    Attributes:
        description: what it is, for a person.
        fingerprint: tells corpora apart: lengths, and xxh3 of both ends of the training text.
    """

    training: Bytes
    held_out: Bytes
    description: str
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """The bytes of both parts."""
        return len(self.training) + len(self.held_out)


def read_corpus(path: Path | None) -> Corpus:
    """Reads the text of a file, of a directory, or (None) of the running Python's standard library.

    A file is mapped, not read, and its last twentieth is held out; of the files of a directory, in sorted
    order, every twentieth is held out. Hidden files, and folders of tests and installed packages, are left out.

    Raises:
        ConfigError: nothing to read there.
    """
    what = f"--data {path}" if path is not None else "the source of Python's standard library"
    try:
        if path is None:
            root = Path(sysconfig.get_paths()["stdlib"])
            files = (file for file in _walk(root) if file.suffix == ".py")
            return _from_files(files, STANDARD_LIBRARY_CAP_BYTES, what)
        if path.is_dir():
            return _from_files(_walk(path), DIRECTORY_CAP_BYTES, str(path))
        if not path.exists():
            raise ConfigError(f"no such file or directory: --data {path}")
        if not path.is_file():
            raise ConfigError(f"--data {path} is not a regular file: its text is read at any place, so write it to one")
        if path.stat().st_size == 0:
            raise ConfigError(f"--data {path} is empty")
        return _split_tail(np.memmap(path, dtype=np.uint8, mode="r"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {what}: {error.strerror}") from None


def _walk(root: Path) -> Iterator[Path]:
    """Regular files below `root`, in the same order on every machine; hidden ones and folders of tests left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file():
                yield file


def _from_files(files: Iterable[Path], cap_bytes: int, name: str) -> Corpus:
    training: list[bytes] = []
    held_out: list[bytes] = []
    size_bytes = 0
    for index, file in enumerate(files):
        room_bytes = cap_bytes - size_bytes
        with file.open("rb") as opened:
            text = opened.read(min(os.fstat(opened.fileno()).st_size, room_bytes) + 1)
        is_over = len(text) > room_bytes
        if not (is_over and size_bytes):  # only the first file is cut
            size_bytes += len(text[:room_bytes])
            (held_out if index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 else training).append(text[:room_bytes])
        if is_over:
            name = f"the first {format_size(size_bytes)} of {name}"
            break
    if not size_bytes:
        raise ConfigError(f"no text in {name}; give a file or a directory with --data")
    if not held_out:
        return _split_tail(_as_bytes(training), name)
    return _corpus(_as_bytes(training), _as_bytes(held_out), name)


def _split_tail(text: Bytes, name: str) -> Corpus:
    held_out = len(text) // _HELD_OUT_EVERY
    return _corpus(text[: len(text) - held_out], text[len(text) - held_out :], name)


def _as_bytes(pieces: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def _corpus(training: Bytes, held_out: Bytes, name: str) -> Corpus:
    digest = xxhash.xxh3_64(training[:65536].tobytes())
    digest.update(training[-65536:].tobytes())
    fingerprint = f"{len(training)}-{len(held_out)}-{digest.hexdigest()}"
    return Corpus(training, held_out, name, fingerprint)


class Windows(Dataset[torch.Tensor]):
    """Samples of `length` bytes, at pseudo-random offsets that depend on (seed, index) alone.

    The counter of a Philox generator is the index, so any sample is found at once, in any process, without a
    permutation in memory. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    Offsets are drawn with replacement.

    Raises:
        ConfigError: the text is shorter than one sample.
    """

    def __init__(self, text: Bytes, length: int, seed: int) -> None:
        if len(text) < length:
            raise ConfigError(
                f"the training text has {len(text)} bytes, fewer than one sample of {length}; "
                f"give more text with --data or a smaller --sequence"
            )
        self._text = text
        self._length = length
        self._seed = seed

    def __getitem__(self, index: int) -> torch.Tensor:
        """Shapes: int64 [length]."""
        raw = np.random.Philox(key=self._seed, counter=index).random_raw()
        return _tokens(self._text, int(raw) % (len(self._text) - self._length + 1), self._length)


def held_out_batches(text: Bytes, length: int, samples: int, batch: int) -> Iterator[torch.Tensor]:
    """Evenly spaced samples of the held-out text, in batches; the same ones at every call.

    Shapes: int64 [at most batch, length]. A text shorter than one sample is one short sample; fewer than two
    bytes are none.
    """
    if len(text) < 2:
        return
    length = min(length, len(text))
    samples = max(1, min(samples, len(text) // length))
    starts = np.linspace(0, len(text) - length, samples).astype(np.int64)
    for first in range(0, samples, batch):
        yield torch.stack([_tokens(text, int(start), length) for start in starts[first : first + batch]])


def _tokens(text: Bytes, start: int, length: int) -> torch.Tensor:
    return torch.from_numpy(text[start : start + length].astype(np.int64))


class _Onward(Sampler[list[int]]):
    """The samples of this rank, micro-batch by micro-batch from sample `first` on, without an end.

    The ranks take equal parts of every micro-batch, so that together they see the same samples as one rank would.
    """

    def __init__(self, first: int, batch: int, rank: int, ranks: int) -> None:
        self._part = batch // ranks
        self._next = first + rank * self._part
        self._batch = batch

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield list(range(self._next, self._next + self._part))
            self._next += self._batch


class Batches:
    """Micro-batches, with a position that counts the samples handed out, not those a worker has prefetched.

    The position is in samples of all ranks, so that a run may be resumed with another batch size and on another number
    of ranks. It is a part of each generation: the engine asks for it when a step returns.

    Args:
        batch: samples per micro-batch, those of all ranks.
        rank, ranks: which part of each micro-batch these are; `ranks` divides `batch`.

    Attributes:
        notes: what a person should know about the state that was loaded.

    Raises:
        ConfigError: the text is shorter than one sample, or than all samples of a micro-batch together.
    """

    def __init__(self, corpus: Corpus, *, length: int, batch: int, seed: int, workers: int = 0,
                 pin_memory: bool = False, rank: int = 0, ranks: int = 1) -> None:  # fmt: skip
        self._windows = Windows(corpus.training, length, seed)
        if batch * length > len(corpus.training):
            raise ConfigError(
                f"--batch {batch} samples of {length} bytes are more than the training text, which has "
                f"{len(corpus.training)}; give a smaller --batch or --sequence, or more text with --data"
            )
        self._identity = {"corpus": corpus.fingerprint, "seed": seed, "sequence": length}
        self._batch = batch
        self._rank, self._ranks = rank, ranks
        self._workers = workers
        self._pin_memory = pin_memory
        self._position = 0
        self._iterator: Iterator[torch.Tensor] | None = None
        self.notes: list[str] = []

    @property
    def position(self) -> int:
        """Samples handed out since the first step, to all ranks together."""
        return self._position

    def next(self) -> torch.Tensor:
        """This rank's part of the next micro-batch. Shapes: int64 [batch / ranks, length].

        Raises:
            StorageError: a worker process has ended.
        """
        try:
            if self._iterator is None:
                usual = signal.getsignal(signal.SIGCHLD)
                self._iterator = iter(self._loader())
                if signal.getsignal(signal.SIGCHLD) != usual:
                    signal.signal(signal.SIGCHLD, usual)  # torch's raises wherever a step is; `next` notices, too
            batch = next(self._iterator)
        except (EOFError, OSError, RuntimeError) as error:
            if not self._workers:
                raise
            what = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise StorageError(
                f"a process of --workers ended: {what}; the system ends one if memory, or /dev/shm, is full: make room "
                "or give fewer --workers; a store goes on with --resume auto"
            ) from error
        self._position += self._batch
        return batch

    def _loader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(
            self._windows,
            batch_sampler=_Onward(self._position, self._batch, self._rank, self._ranks),
            num_workers=self._workers,
            pin_memory=self._pin_memory,
            worker_init_fn=_ignore_stops,
            # A loader draws a seed for its workers when it starts. Without a generator of its own that draw would
            # come from torch's global one, and a resumed run would see other dropout masks.
            generator=torch.Generator().manual_seed(0),
        )

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the data."""
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at a saved position; `notes` says if data, seed or length differ from the saved ones."""
        self.close()
        self._position = int(state["position"])
        words = {"corpus": "the training text", "seed": "the seed", "sequence": "the sequence length"}
        changed = [words[key] for key, value in self._identity.items() if state.get(key) != value]
        if changed:
            self.notes.append(
                f"not as in the stored run: {', '.join(changed)}; training goes on with what is given now, "
                f"at sample {self._position}"
            )

    def close(self) -> None:
        """Stops the worker processes; the next batch starts new ones. Twice is fine."""
        self._iterator = None


def _ignore_stops(worker: int) -> None:
    # A stop may reach the whole process group: a worker that died of it would fail the step in flight.
    del worker
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
