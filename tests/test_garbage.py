"""The collector of cycles rests for a while, and not longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tierstore.garbage import loading, no_garbage_collection


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    assert gc.isenabled()
    if gc.get_freeze_count() != frozen:
        gc.unfreeze()
        gc.freeze()


@pytest.mark.parametrize("rest", [no_garbage_collection, loading])
@pytest.mark.parametrize("error", [None, ImportError, KeyboardInterrupt])
def test_it_goes_on_after_it_however_it_ends(rest: type, error: type[BaseException] | None) -> None:
    def work() -> None:
        with rest():
            assert not gc.isenabled()
            with rest():
                pass
            assert not gc.isenabled()
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    assert gc.isenabled()


def test_one_that_rested_before_rests_on() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_loaded_is_passed_over() -> None:
    with loading():
        kept: list[object] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= 1000
    assert not any(one is kept for one in gc.get_objects())
