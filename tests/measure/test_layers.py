"""Timed layers: which ones are timed, the median of rounds, and gradients that do not stay."""

from __future__ import annotations

import itertools

import pytest

from tierstore.measure import layers
from tierstore.plan.layers import LayerKind


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_SHAPES", ((64, 4), (128, 8)))
    monkeypatch.setattr(layers, "_HEAD_SHAPES", ((64, 4),))
    monkeypatch.setattr(layers, "_VOCABULARY", 32)


@pytest.mark.usefixtures("one_thread")
def test_every_layer_is_timed_by_the_median_of_its_rounds() -> None:
    # Three readings a run: forward takes 1 us, backward 1, 2, 4, ... us round by round; the first does not count. The
    # first run of each kind, its own warm-up, takes 9 s, longer than the limit.
    warm_ups = iter([True, False, False, True, False])
    backward_s = (9.0 if next(warm_ups, False) else 1e-6 * 2.0 ** (max(n - 2, 0) // 3) for n in itertools.count())
    ticks = (tick for seconds in backward_s for tick in (0.0, 1e-6, 1e-6 + seconds))
    found = layers.time_layers(["bf16"], 3, 1.0, clock=lambda: next(ticks))
    assert [one.kind for one in found] == [LayerKind.BLOCK, LayerKind.BLOCK, LayerKind.HEAD]
    for one in found:
        assert (one.dtype, one.forward_s, one.backward_s) == ("bf16", pytest.approx(1e-6), pytest.approx(4e-6))


@pytest.mark.usefixtures("one_thread")
def test_a_layer_that_would_take_too_long_is_not_run() -> None:
    small, large, _ = layers.layers(["bf16"])
    ratio = large.work.flop / small.work.flop
    for share, count in ((0.9, 3), (1.1, 2)):  # of the limit, which the larger block takes if it is as slow per flop
        run_s = share * 0.5 / ratio
        runs: list[str] = []
        ticks = itertools.cycle((0.0, run_s / 2, run_s))
        found = layers.time_layers(["bf16"], 2, 0.5, runs.append, lambda ticks=ticks: next(ticks))
        assert (len(found), len(runs)) == (count, 3 * count + 2)
        assert {one.kind for one in found} == set(LayerKind)


def test_small_layers_that_are_slow_for_their_size_leave_no_large_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_HEAD_SHAPES", ((64, 4), (128, 8)))
    found = layers.layers(["bf16"])

    def run(layer: layers.Layer) -> tuple[float, float]:
        is_large = layer.work.flop > 1e6
        return 0.0, layer.work.flop * (1e-9 if is_large else 1e-6)

    sizes = [layer.work.flop for layer in found]
    assert [size > 1e6 for size in sizes] == [False, True, False, False]
    assert layers._short_enough(found, 1e-6 * sizes[1], run) == found
    assert layers._short_enough(found, 1e-9 * sizes[3] / 2, run) == [found[0], found[2]]


def test_work_is_counted() -> None:
    small, _, head = layers.layers(["fp32"])
    parameters = sum(leaf.numel() for leaf in small.leaves) - 4 * 64  # all but the input
    assert small.work.parameters == parameters == 12 * 64**2 + 13 * 64
    assert small.work.flop == 2 * 4 * parameters + 4 * 4 * 4 * 64
    assert (head.work.parameters, head.work.elements) == (32 * 64 + 2 * 64, 4 * 32)


@pytest.mark.usefixtures("one_thread")
def test_gradients_are_made_and_do_not_stay() -> None:
    made = []
    for layer in layers.layers(["bf16"]):
        for leaf in layer.leaves:
            leaf.register_post_accumulate_grad_hook(lambda leaf: made.append(leaf.grad.isfinite().all().item()))
        layer.run(lambda: 0.0)
        assert all(leaf.grad is None for leaf in layer.leaves)
    assert made == [True] * (13 + 13 + 3)
