"""Every bad option gives one clear sentence as ConfigError, and sizes are exact."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import AdamWConfig, Codec, TierConfig, format_decimal, format_size, parse_size
from tierstore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0), (7, 7), ("7", 7), ("7B", 7), ("1kB", 1000), ("1KiB", 1024), ("8GiB", 8 * 2**30), ("8 gib", 8 * 2**30),
        (" 1.5MiB ", 3 * 2**19), ("2TB", 2 * 10**12), ("0.5TiB", 2**39), ("9007199254740993", 2**53 + 1),
        ("0.1KiB", 102),
    ],
)  # fmt: skip
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "not a size"), ("8 GB x", "not a size"), ("1e3", "not a size"), ("-1GiB", "not a size"),
        ("8XB", "not a size"),
        ("GiB", "not a size"), (True, "not a size"), (1.5, "not a size"), (None, "not a size"), (-1, "negative"),
        ("9" * 400, "8 EiB"), (2**63, "8 EiB"), ("8388608TiB", "8 EiB"),
    ],
)  # fmt: skip
def test_what_is_not_a_size(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_size(value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1.46 * 2**30, "1.46 GiB"), (1000 * 2**20, "1000 MiB"),
     (999.5 * 2**20, "1000 MiB"), (5000 * 2**40, "5000 TiB"), (-2048, "-2 KiB")],
)  # fmt: skip
def test_sizes_as_text(size: float, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2.1e12, "2.1 TB"), (999.9e9, "1 TB"), (56.1e15, "56.1 PB"),
     (2500e15, "2500 PB")],
)  # fmt: skip
def test_sizes_as_sold(size: float, text: str) -> None:
    assert format_decimal(size) == text
    assert parse_size("10PB") == 10**16


@given(st.integers(0, 2**62))
def test_a_printed_size_is_read_back_within_its_digits(size: int) -> None:
    assert math.isclose(parse_size(format_size(size)), size, rel_tol=0.01)


@given(st.text(max_size=12) | st.from_regex(r"\s*\d{1,30}(\.\d{1,9})?\s*[kKmMgGtT]?i?[bB]?", fullmatch=True))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert 0 <= parse_size(text) < 2**63


def test_without_a_gpu_one_budget_is_for_both_tiers() -> None:
    for tiers, is_one, gpu_bytes, memory_bytes in (
        (TierConfig(), True, None, 2**30),
        (TierConfig(cpu_memory="3GiB", gpu_memory=None), True, None, 3 * 2**30),
        (TierConfig(gpu_memory="256MiB"), False, 2**28, 2**28 + 2**30),
        (TierConfig(device="cuda"), False, 2**30, 2**31),
        (TierConfig(state_on_gpu=True), False, 2**30, 2**31),
    ):
        assert (tiers.is_one_memory, tiers.memory_bytes) == (is_one, memory_bytes)
        assert is_one or tiers.gpu_budget_bytes == gpu_bytes


def test_the_defaults_are_valid() -> None:
    tiers = TierConfig(gpu_memory="8GiB", nvme=["/mnt/a", Path("/mnt/b")], codec="lz4", chunk_bytes="32MiB")
    assert (tiers.gpu_memory, tiers.chunk_bytes, tiers.codec) == (8 * 2**30, 2**25, Codec.LZ4)
    assert tiers.nvme == (Path("/mnt/a"), Path("/mnt/b"))
    assert AdamWConfig() == AdamWConfig(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decoupled=True)


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: TierConfig(gpu_memory="much"),
     "TierConfig.gpu_memory: not a size: 'much'; write a number of bytes or text such as '8GiB' or '512MiB'"),
    (lambda: TierConfig(gpu_memory="9" * 400),
     "TierConfig.gpu_memory: a size of 8 EiB or more does not exist; check its digits and unit"),
    (lambda: TierConfig(cpu_memory=-1), "TierConfig.cpu_memory: a size cannot be negative: -1"),
    (lambda: TierConfig(gpu_mem="8GiB"), "TierConfig.gpu_mem: there is no such option; did you mean gpu_memory?"),
    (lambda: AdamWConfig(q=1),
     "AdamWConfig.q: there is no such option; the options are lr, betas, eps, weight_decay, decoupled"),
    (lambda: TierConfig(nvme="/mnt"), "TierConfig.nvme: must be a list (got '/mnt')"),
    (lambda: TierConfig(bandwidth=3),
     "TierConfig.bandwidth: give the file that tierstore probe --json wrote, or a BandwidthTable (got 3)"),
    (lambda: TierConfig(nvme=["/mnt", ""]), "TierConfig.nvme.1: an empty path is not a directory"),
    (lambda: TierConfig(nvme=["/a", "/a/"]), "TierConfig: a directory is listed twice in nvme"),
    (
        lambda: TierConfig(nvme=["/a/b", "/a"]),
        "TierConfig: a directory in nvme lies in another one, which holds nothing but a store",
    ),
    (lambda: TierConfig(device="tpu"), "TierConfig: device must be 'cpu', 'cuda' or 'cuda:N', not 'tpu'"),
    (lambda: TierConfig(device="cuda:256"), "TierConfig: device must be 'cpu', 'cuda' or 'cuda:N', not 'cuda:256'"),
    (lambda: TierConfig(codec="zip"), "TierConfig.codec: must be 'none', 'lz4', 'lz4-bitshuffle', "
     "'zstd-bitshuffle' or 'auto' (got 'zip')"),
    (lambda: TierConfig(chunk_bytes="64MiB"),
     "TierConfig.chunk_bytes: must be less than or equal to 32 MiB (got '64MiB')"),
    (lambda: TierConfig(chunk_bytes=1), "TierConfig.chunk_bytes: must be greater than or equal to 64 KiB (got 1)"),
    (lambda: TierConfig(io_threads=0), "TierConfig.io_threads: must be greater than or equal to 1 (got 0)"),
    (lambda: TierConfig(timeout_s=math.inf), "TierConfig.timeout_s: must be a finite number (got inf)"),
    (lambda: AdamWConfig(lr=math.inf), "AdamWConfig.lr: must be a finite number (got inf)"),
    (lambda: AdamWConfig(lr=-1), "AdamWConfig.lr: must be greater than or equal to 0 (got -1)"),
    (lambda: AdamWConfig(betas=(0.9, 1.0)), "AdamWConfig.betas.1: must be less than 1 (got 1.0)"),
    (lambda: AdamWConfig(betas=(0.9,)), "AdamWConfig.betas.1: is missing"),
    (lambda: AdamWConfig(betas=0.9), "AdamWConfig.betas: must be a list (got 0.9)"),
    (lambda: TierConfig(codec=None, io_threads=100),
     "TierConfig.codec: must be 'none', 'lz4', 'lz4-bitshuffle', 'zstd-bitshuffle' or 'auto' (got None); "
     "TierConfig.io_threads: must be less than or equal to 64 (got 100)"),
    (lambda: setattr(AdamWConfig(), "lr", 1.0),
     "AdamWConfig.lr cannot be changed after construction; make another one"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(BAD)))
def test_each_bad_option_gives_one_sentence(index: int) -> None:
    make, sentence = BAD[index]
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == sentence
    assert caught.value.__cause__ is None


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError):
        AdamWConfig(eps=-1)


def test_a_path_begins_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell expands `~`; but a shell leaves it alone after a `=`, as in `--nvme=~/run1`."""
    monkeypatch.setenv("HOME", "/home/me")
    tiers = TierConfig(nvme=["~/run1", "/a/~", "/b/~root"], bandwidth="~/rates.json")
    assert tiers.nvme == (Path("/home/me/run1"), Path("/a/~"), Path("/b/~root"))
    assert tiers.bandwidth == Path("/home/me/rates.json")


def test_without_a_home_a_path_cannot_begin_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no passwd entry."""

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ConfigError, match="~/run1: there is no home directory here"):
        TierConfig(nvme=["~/run1"])
