"""The cache of compiled loops: used where it works, and no harm where it does not."""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.config import reload_config

from tierstore.kernels import compile_cache
from tierstore.kernels.compile_cache import compiled


@pytest.fixture
def function(tmp_path: Path) -> Iterator[Callable[[float], float]]:
    """A function in a module of its own, whose cache is `tmp_path / "cache"`."""
    (tmp_path / "loops.py").write_text("def twice(x):\n    return 2.0 * x\n")
    spec = importlib.util.spec_from_file_location("loops", tmp_path / "loops.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
        reload_config()  # as a compilation does, if the environment is another one
        yield module.twice
    reload_config()


def hits(function: Callable[[float], float]) -> int:
    """How often the cache had the function, for a caller that has not compiled it yet."""
    loop: Any = compiled(function)
    assert loop(1.5) == 3.0
    return sum(loop.stats.cache_hits.values())


def test_what_was_compiled_is_read(function: Callable[[float], float]) -> None:
    assert [hits(function), hits(function)] == [0, 1]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [b"", b"not what was written"], ids=["empty", "other bytes"])
def test_what_cannot_be_read_is_compiled_and_replaced(
    suffix: str, left: bytes, function: Callable[[float], float], tmp_path: Path
) -> None:
    hits(function)
    (damaged,) = (tmp_path / "cache").rglob(f"*.{suffix}")
    damaged.write_bytes(left)
    assert [hits(function), hits(function)] == [0, 1]


def test_code_of_another_process_for_other_types_is_not_run(
    function: Callable[[float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes fill an empty cache at once: each takes the first free name, and writes its code there."""
    late: list[Callable[[], None]] = []
    save = IndexDataCacheFile._save_data
    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        patch.setattr(IndexDataCacheFile, "_save_data", lambda *arguments: late.append(partial(save, *arguments)))
        for value in (1.5, 3):
            assert compiled(function)(value) == 2 * value
    for one in reversed(late):  # the last index is of the integer; the last code, under the same name, of the float
        one()
    for expected in (0, 1):
        loop: Any = compiled(function)
        assert loop(3) == 6
        assert sum(loop.stats.cache_hits.values()) == expected


def test_a_full_disk_is_no_error(function: Callable[[float], float], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: IndexDataCacheFile, path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(IndexDataCacheFile, "_open_for_write", full)
    assert [hits(function), hits(function)] == [0, 0]


def test_where_nothing_can_be_written_it_is_told_once(
    function: Callable[[float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_place(function: Callable[[float], float]) -> None:
        raise RuntimeError("cannot cache function 'twice': no locator available")

    monkeypatch.setattr(compile_cache, "_Cache", no_place)
    compile_cache._tell_of_no_cache.cache_clear()
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR") as told:
        assert [hits(function), hits(function)] == [0, 0]
    assert len(told) == 1
    assert told[0].filename == __file__
    compile_cache._tell_of_no_cache.cache_clear()
