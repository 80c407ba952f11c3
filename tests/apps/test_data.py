from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tierstore.apps import data
from tierstore.apps.data import Batches, Corpus, Windows, held_out_batches, read_corpus
from tierstore.errors import ConfigError, StorageError

TEXT = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
CORPUS = Corpus(TEXT, TEXT[:300], "noise", "1")


def _batches(**changes: object) -> Batches:
    return Batches(CORPUS, **{"length": 16, "batch": 3, "seed": 5, **changes})


def test_the_standard_library_is_text_with_a_held_out_part_of_other_files() -> None:
    corpus = read_corpus(None)
    assert 2**20 < len(corpus.training) + len(corpus.held_out) <= 8 * 2**20
    assert 0.01 < len(corpus.held_out) / len(corpus.training) < 0.2
    assert corpus.fingerprint == read_corpus(None).fingerprint
    assert b"import unittest\n\nclass Test" not in corpus.training.tobytes()


def test_a_file_is_split_at_its_tail(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(200)))
    corpus = read_corpus(tmp_path / "text")
    assert corpus.training.tobytes() == bytes(range(190))
    assert corpus.held_out.tobytes() == bytes(range(190, 200))


def test_a_directory_is_split_by_files_and_hidden_ones_are_left_out(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index:02}").write_bytes(bytes([index]))
    (tmp_path / ".hidden").write_bytes(b"xxxxx")
    (tmp_path / ".folder").mkdir()
    (tmp_path / ".folder" / "file").write_bytes(b"xxxxx")
    corpus = read_corpus(tmp_path)
    assert corpus.held_out.tobytes() == bytes([19, 39])
    assert corpus.training.tobytes() == bytes(set(range(40)) - {19, 39})


def test_a_few_files_are_split_at_the_tail(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 50)
    (tmp_path / "b").write_bytes(b"b" * 50)
    corpus = read_corpus(tmp_path)
    assert (len(corpus.training), corpus.held_out.tobytes()) == (95, b"bbbbb")


@pytest.mark.parametrize(("sizes", "read"), [((150, 1), 100), ((60, 50, 1), 60), ((60, 40), 100), ((60, 40, 1), 100)])
def test_of_a_directory_so_much_is_read_also_of_one_large_file(
    sizes: tuple[int, ...], read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "DIRECTORY_CAP_BYTES", 100)
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_bytes(bytes(size))
    corpus = read_corpus(tmp_path)
    assert corpus.nbytes == read
    assert corpus.description == ("" if read == sum(sizes) else f"the first {read} B of ") + str(tmp_path)


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty directory"])
def test_nothing_to_read_is_a_config_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "empty directory" else tmp_path / "text"
    if kind == "empty file":
        path.touch()
    with pytest.raises(ConfigError, match=str(path)):
        read_corpus(path)


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("pipe")])
def test_what_cannot_be_read_at_any_place_is_no_text(path: Path, tmp_path: Path) -> None:
    path = tmp_path / path
    if path.name == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"--data {path} is not a regular file"):
        read_corpus(path)


def test_a_file_of_the_standard_library_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, mode: str) -> IO[bytes]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(ConfigError, match="cannot read the source of Python's standard library: Input/output error"):
        read_corpus(None)


def test_a_window_depends_on_seed_and_index_alone() -> None:
    windows = Windows(TEXT, 16, seed=1)
    backwards = [windows[index] for index in reversed(range(50))][::-1]
    assert all(torch.equal(windows[index], backwards[index]) for index in range(50))
    assert not torch.equal(windows[0], Windows(TEXT, 16, seed=2)[0])
    assert len({tuple(window.tolist()) for window in backwards}) > 45


def test_windows_reach_both_ends_of_the_text() -> None:
    text = np.arange(20, dtype=np.uint8)
    starts = {int(Windows(text, 18, seed=0)[index][0]) for index in range(100)}
    assert starts == {0, 1, 2}


def test_text_shorter_than_a_sample_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="has 10 bytes, fewer than one sample of 16"):
        Windows(TEXT[:10], 16, seed=0)


def test_held_out_batches_are_the_same_at_every_call_and_within_the_text() -> None:
    first = list(held_out_batches(TEXT, 100, 8, 3))
    assert [tuple(batch.shape) for batch in first] == [(3, 100), (3, 100), (2, 100)]
    assert all(map(torch.equal, first, held_out_batches(TEXT, 100, 8, 3)))
    assert first[0][0].tolist() == TEXT[:100].tolist()
    assert first[-1][-1].tolist() == TEXT[-100:].tolist()


def test_held_out_batches_of_little_text() -> None:
    assert [tuple(batch.shape) for batch in held_out_batches(TEXT[:50], 100, 8, 3)] == [(1, 50)]
    assert list(held_out_batches(TEXT[:1], 100, 8, 3)) == []


def test_batches_resume_at_the_exact_sample() -> None:
    whole = _batches()
    expected = [whole.next() for _ in range(6)]
    first = _batches()
    for _ in range(2):
        first.next()
    second = _batches()
    second.next()
    second.load_state_dict(first.state_dict())
    assert second.position == 6
    assert second.notes == []
    assert all(torch.equal(second.next(), batch) for batch in expected[2:])


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    first, second = _batches(), _batches(batch=2)
    rows = torch.cat([first.next(), first.next()])
    second.load_state_dict({**first.state_dict(), "position": 3})
    assert torch.equal(torch.cat([second.next(), second.next()])[:3], rows[3:])


def test_other_data_are_noted() -> None:
    batches = _batches(seed=6)
    batches.load_state_dict(_batches().state_dict())
    assert len(batches.notes) == 1
    assert batches.notes[0].startswith("not as in the stored run: the seed; training goes on")


def test_a_batch_larger_than_the_text_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="--batch 100000000000 samples of 16 bytes are more than the training text"):
        _batches(batch=10**11)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EOFError(), "EOFError"),
        (ConnectionResetError(104, "Connection reset by peer"), "[Errno 104] Connection reset by peer"),
        (RuntimeError("Caught RuntimeError in worker 0.\nTraceback:\nRuntimeError: no shm"), "RuntimeError: no shm"),
    ],
)
def test_a_worker_that_ends_is_told_by_the_next_batch_and_nowhere_else(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loader:
        def __iter__(self) -> Loader:
            signal.signal(signal.SIGCHLD, lambda *_: pytest.fail("in the middle of a step"))  # as torch does
            return self

        def __next__(self) -> torch.Tensor:
            signal.raise_signal(signal.SIGCHLD)
            raise error

    batches = _batches(workers=1)
    monkeypatch.setattr(batches, "_loader", Loader)
    with pytest.raises(StorageError, match=rf"^a process of --workers ended: {re.escape(said)}; .* --resume auto$"):
        batches.next()


def test_the_position_counts_what_was_handed_out_not_what_workers_prefetched() -> None:
    serial, parallel = _batches(), _batches(workers=2)
    try:
        expected = [serial.next() for _ in range(5)]
        assert all(torch.equal(parallel.next(), batch) for batch in expected[:3])
        assert parallel.state_dict() == {**serial.state_dict(), "position": 9}
        resumed = _batches(workers=2)
        resumed.load_state_dict(parallel.state_dict())
        assert all(torch.equal(resumed.next(), batch) for batch in expected[3:])
        resumed.close()
    finally:
        parallel.close()


def test_loading_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    batches = _batches()
    batches.next()
    batches.load_state_dict(batches.state_dict())
    batches.next()
    assert torch.equal(torch.get_rng_state(), before)


def test_windows_work_with_an_ordinary_loader() -> None:
    loader = DataLoader(Windows(TEXT, 16, seed=0), batch_size=2, sampler=[4, 1, 2, 3])
    first, _ = loader
    assert torch.equal(first, torch.stack([Windows(TEXT, 16, seed=0)[4], Windows(TEXT, 16, seed=0)[1]]))
