"""The simulator: closed forms, and properties of every order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.plan.simulate import Link, Simulation, Span, Track, Visit, run_steps, simulate


def layers(count: int, nbytes: int = 80, compute_s: float = 0.05, other_bytes: int = 0) -> tuple[Visit, ...]:
    return tuple(Visit(group, nbytes, compute_s, other_bytes) for group in range(count))


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_slow_equal_layers_take_the_transfer_time_at_any_depth(depth: int) -> None:
    run = simulate(layers(24), 80 * (depth + 1), depth, 1000.0)
    assert run.loads == (1,) * 24
    assert run.seconds / 24 == pytest.approx(0.080)
    assert run.stall_s / 24 == pytest.approx(0.030)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_fast_equal_layers_hide_their_transfers(depth: int) -> None:
    run = simulate(layers(24, compute_s=0.1), 80 * (depth + 1), depth, 1000.0)
    assert run.seconds == pytest.approx(2.4)
    assert run.stall_s == pytest.approx(0.0, abs=1e-9)


def test_a_third_buffer_does_not_raise_the_rate_of_a_shared_link() -> None:
    """Folklore says it does. With 50 ms of computing and 80 ms of transfer, a layer takes 80 ms from depth 1 on."""
    times = {depth: simulate(layers(24), 80 * (depth + 1), depth, 1000.0).seconds / 24 for depth in range(9)}
    assert times.pop(0) == pytest.approx(0.130)
    assert list(times.values()) == pytest.approx([0.080] * 8)
    assert simulate(layers(24), 160, 1, 2 * 1000.0).seconds / 24 == pytest.approx(0.050)  # a second disk does raise it


def test_links_in_series_work_side_by_side_on_different_groups() -> None:
    # A quarter of each group from the disk (20 ms), the rest from other ranks (60 ms): the slower link bounds.
    route = (Link(1000.0, share=0.25), Link(1000.0, share=0.75))
    runs = {depth: simulate(layers(24), 80 * (depth + 1), depth, route) for depth in (1, 2)}
    assert runs[1].link_s == pytest.approx(24 * 0.06)
    assert runs[1].seconds / 24 == pytest.approx(0.065)  # 60 and 70 ms in turns: a fetch is asked for too late
    assert runs[2].seconds / 24 == pytest.approx(0.060)  # so here a third buffer helps: there are two links
    first = simulate(layers(1), 80, 1, route, warm_up_steps=0)
    assert first.timeline[:2] == (Span(Track.LINK, 0, 0.0, 0.02), Span(Track.LINK, 0, 0.02, 0.08, 1))


def test_jitter_repeats_and_depth_absorbs_some_of_it() -> None:
    def mean_s(depth: int, seed: int = 7) -> float:
        runs = run_steps(layers(24, compute_s=0.08), 80 * (depth + 1), depth, 1000.0, jitter=0.5, seed=seed)
        return sum(run.seconds for run in itertools.islice(runs, 1, 31)) / 30

    assert mean_s(1) == mean_s(1) != mean_s(1, seed=8)
    assert mean_s(1) > 1.05 * mean_s(4) > 1.05 * 24 * 0.08


def test_without_prefetch_transfer_and_compute_take_turns() -> None:
    run = simulate(layers(10), 80, 0, 1000.0)
    assert run.seconds == pytest.approx(10 * (0.05 + 0.08))
    assert run.link_s == pytest.approx(10 * 0.08)


def test_everything_resident_is_fetched_once() -> None:
    first = simulate(layers(10), 800, 2, 1000.0, warm_up_steps=0)
    later = simulate(layers(10), 800, 2, 1000.0)
    assert first.loads == (1,) * 10
    assert (sum(later.loads), later.stall_s, later.seconds) == (0, 0.0, pytest.approx(0.5))


def test_the_turn_of_a_step_reuses_what_is_resident() -> None:
    there_and_back = tuple(Visit(group, 80, 0.1) for group in (*range(10), *range(8, -1, -1)))
    run = simulate(there_and_back, 240, 1, 1e9)
    # Three groups are still there at either turn; only those between are fetched in both passes.
    assert run.loads == (1, 1, 1, 2, 2, 2, 2, 1, 1, 1)


def test_other_traffic_shares_the_link() -> None:
    hidden = simulate(layers(10, compute_s=0.2, other_bytes=100), 160, 1, 1000.0)
    assert hidden.seconds == pytest.approx(2.0)
    bound = simulate(layers(10, compute_s=0.05, other_bytes=100), 160, 1, 1000.0)
    assert bound.link_s == pytest.approx(10 * 0.18)
    assert bound.seconds == pytest.approx(bound.link_s)


def test_the_timeline_is_literal() -> None:
    run = simulate(layers(2, nbytes=10, compute_s=1.0), 10, 1, 10.0, warm_up_steps=0)
    assert run.timeline == (
        Span(Track.LINK, 0, 0.0, 1.0),
        Span(Track.COMPUTE, 0, 1.0, 2.0),
        Span(Track.LINK, 1, 2.0, 3.0),
        Span(Track.COMPUTE, 1, 3.0, 4.0),
    )


def test_impossible_orders_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one visit"):
        simulate((), 10, 1, 1.0)
    with pytest.raises(ConfigError, match="8 B in one visit and 9"):
        simulate((Visit(0, 8, 1.0), Visit(0, 9, 1.0)), 10, 1, 1.0)
    with pytest.raises(ConfigError, match="negative"):
        Visit(0, -1, 1.0)
    with pytest.raises(ConfigError, match="positive rate"):
        simulate(layers(1), 80, 1, 0.0)
    with pytest.raises(ConfigError, match="at least one link"):
        simulate(layers(1), 80, 1, ())
    with pytest.raises(ConfigError, match="jitter"):
        next(run_steps(layers(1), 80, 1, 1.0, jitter=-0.1))


@st.composite
def runs(draw: st.DrawFn, most_warm_up: int = 3) -> tuple[tuple[Visit, ...], int, Simulation]:
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    groups = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=16))
    visit = st.tuples(st.sampled_from([0.0, 0.01, 0.25]), st.integers(0, 40))
    order = tuple(Visit(group, sizes[group], *draw(visit)) for group in groups)
    capacity = draw(st.integers(max(sizes), sum(sizes)))
    depth, warm_up = draw(st.integers(0, 5)), draw(st.integers(0, most_warm_up))
    links = draw(st.sampled_from([(Link(100.0),), (Link(100.0, share=0.25), Link(50.0, share=0.75))]))
    return order, capacity, simulate(order, capacity, depth, links, warm_up_steps=warm_up)


@settings(max_examples=200)
@given(case=runs())
def test_what_holds_for_every_order(case: tuple[tuple[Visit, ...], int, Simulation]) -> None:
    _, capacity, run = case
    assert run.peak_bytes <= capacity
    assert run.stall_s >= -1e-9
    assert run.seconds == pytest.approx(run.compute_s + run.stall_s)
    fetches = [span for span in run.timeline if span.track is Track.LINK and span.group is not None]
    assert sum(run.loads) == sum(span.link == 0 for span in fetches)
    for lane in ((Track.COMPUTE, 0), (Track.LINK, 0), (Track.LINK, 1)):
        spans = [span for span in run.timeline if (span.track, span.link) == lane]
        assert all(span.end_s >= span.start_s for span in spans)
        assert all(after.start_s >= before.end_s - 1e-9 for before, after in itertools.pairwise(spans))


@settings(max_examples=100)
@given(case=runs(most_warm_up=0))
def test_a_group_is_on_the_device_before_it_is_computed(case: tuple[tuple[Visit, ...], int, Simulation]) -> None:
    _, _, run = case  # from an empty device
    there_s: dict[int | None, float] = {}  # when each group has passed the last link for the first time
    last = max(span.link for span in run.timeline)
    for span in run.timeline:
        if span.track is Track.LINK and span.group is not None and span.link == last:
            there_s.setdefault(span.group, span.end_s)
    for span in run.timeline:
        assert span.track is Track.LINK or there_s[span.group] <= span.start_s + 1e-9


@settings(max_examples=100)
@given(case=runs())
def test_a_group_is_not_fetched_while_it_is_computed(case: tuple[tuple[Visit, ...], int, Simulation]) -> None:
    order, _, run = case
    computed = [span for span in run.timeline if span.track is Track.COMPUTE]
    assert [span.group for span in computed] == [visit.group for visit in order]
    for fetch in (span for span in run.timeline if span.track is Track.LINK and span.group is not None):
        assert all(
            fetch.end_s <= span.start_s + 1e-9 or fetch.start_s >= span.end_s - 1e-9
            for span in computed
            if span.group == fetch.group
        )


@settings(max_examples=50)
@given(case=runs())
def test_a_run_repeats_exactly(case: tuple[tuple[Visit, ...], int, Simulation]) -> None:
    order, capacity, _ = case
    assert simulate(order, capacity, 2, 100.0) == simulate(order, capacity, 2, 100.0)
