"""The note on a dtype that torch multiplies slowly: when it is given, and its factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tierstore.apps import arithmetic
from tierstore.apps.arithmetic import slow_products_notes
from tierstore.apps.options import Precision


def clock(*products_s: float) -> Callable[[], float]:
    """A clock on which the products take these times, one after the other."""

    def readings() -> Iterator[float]:
        for product_s in products_s:
            yield 10.0
            yield 10.0 + product_s

    return readings().__next__


IN_A_ROW = arithmetic._IN_A_ROW


@pytest.fixture(autouse=True)
def _products_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_SIDE", 8)  # the clock decides what they take


@pytest.mark.parametrize("dtype", [Precision.BF16, Precision.FP16])
def test_a_slow_dtype_is_told_with_its_factor(dtype: Precision) -> None:
    slow = [9.0] * (IN_A_ROW - 1) + [6.0]  # the shortest counts: disturbances only make products longer
    (note,) = slow_products_notes(dtype, "cpu", clock(*(slow + [0.5] * IN_A_ROW) * arithmetic._TIMES))
    assert f"takes 12 times as long for products in {dtype.value}" in note
    assert "--dtype fp32" in note


def test_a_dtype_that_is_fast_enough_is_not() -> None:
    assert slow_products_notes(Precision.BF16, "cpu", clock(*([1.2] * IN_A_ROW + [0.5] * IN_A_ROW) * 2)) == []


def test_products_that_others_disturb_are_timed_again() -> None:
    disturbed, quiet, slow = [9.0] * IN_A_ROW, [0.5] * IN_A_ROW, [6.0] * IN_A_ROW
    assert slow_products_notes(Precision.BF16, "cpu", clock(*(disturbed + quiet) * 2, *quiet, *disturbed)) == []
    times = arithmetic._TIMES - 1
    assert slow_products_notes(Precision.BF16, "cpu", clock(*slow, *disturbed, *(slow + quiet) * times)) != []


@pytest.mark.parametrize(("dtype", "device"), [(Precision.FP32, "cpu"), (Precision.BF16, "cuda")])
def test_nothing_is_timed_where_there_is_no_question(dtype: Precision, device: str) -> None:
    assert slow_products_notes(dtype, device, clock()) == []
