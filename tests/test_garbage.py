"""The collector of cycles rests for a while, and not longer."""

from __future__ import annotations

import gc

import pytest

from tierstore.garbage import loading, no_garbage_collection


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
    before: list[object] = [[]]
    assert any(one is before for one in gc.get_objects())
    with loading():
        kept: list[object] = [[]]
    assert not any(one is kept or one is before for one in gc.get_objects())
