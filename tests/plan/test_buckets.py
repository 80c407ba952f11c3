"""The bucket timeline: the acceptance figures, uneven layers, in-flight limits, and what must hold for any step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.plan.buckets import (
    BucketEvent,
    Gradient,
    Layer,
    Timeline,
    backward,
    best_bucket_bytes,
    candidate_caps,
    form_buckets,
    sweep,
    timeline,
)
from tierstore.plan.cost_model import CostModel

MB, MS = 10**6, 1e-3
REFERENCE = CostModel(200e-6, 12e9)
EQUAL = backward([Layer(25 * MB, 3 * MS)] * 48)


def run(gradients: tuple[Gradient, ...], cap_bytes: float, model: CostModel = REFERENCE, **options: object) -> Timeline:
    buckets = form_buckets([gradient.nbytes for gradient in gradients], cap_bytes)
    return timeline(gradients, buckets, model, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layers", "milliseconds"), [(1, 146.3), (2, 148.4), (4, 152.5), (8, 160.9), (16, 177.5), (48, 244.2)]
)
def test_the_reference_interconnect(layers: int, milliseconds: float) -> None:
    step = run(EQUAL, layers * 25 * MB)
    assert len(step.events) == 48 / layers
    assert round(step.seconds / MS, 1) == milliseconds


def test_the_reference_interconnect_without_overlap() -> None:
    step = run(EQUAL, 25 * MB, overlap=False)
    assert round(step.seconds / MS, 1) == 253.6
    assert step.hidden_share == pytest.approx(0)
    assert step.exposed_s == pytest.approx(step.communication_s)


def test_by_hand_with_uneven_layers_and_compute() -> None:
    # alpha 1 s, 1 B/s: three buckets of 2, 3 and 1 B, ready at 1, 2 and 7 s.
    gradients = backward([Layer(2, 1), Layer(0, 0.5), Layer(3, 0.5), Layer(1, 5)])
    step = timeline(gradients, [[0], [1, 2], [3]], CostModel(1, 1))
    assert step.compute_s == 7
    assert step.events == (
        BucketEvent(0, 2, 1, 1, 4),
        BucketEvent(1, 3, 2, 4, 8),  # waits for the channel
        BucketEvent(2, 1, 7, 8, 10),
    )
    assert (step.seconds, step.communication_s, step.exposed_s) == (10, 9, 3)
    assert step.hidden_share == pytest.approx(1 - 3 / 9)
    assert [event.exposed_s(step.compute_s) for event in step.events] == [0, 1, 2]


@pytest.mark.parametrize(
    ("limit", "starts", "ends"),
    [
        (1, [1, 4, 8], [4, 8, 10]),
        (2, [1, 2, 4], [4, 7, 8]),  # bucket 1 pays its alpha beside the bytes of bucket 0; 2 starts when 0 is done
        (3, [1, 2, 3], [4, 7, 8]),
    ],
)
def test_in_flight_limits_by_hand(limit: int, starts: list[float], ends: list[float]) -> None:
    gradients = (Gradient(2, 1), Gradient(3, 2), Gradient(1, 3))
    step = timeline(gradients, [[0], [1], [2]], CostModel(1, 1), max_in_flight=limit)
    assert [event.start_s for event in step.events] == starts
    assert [event.end_s for event in step.events] == ends


def test_a_bucket_is_not_launched_before_an_earlier_one() -> None:
    # The first bucket's gradients come last: the second waits for it although the channel is free.
    gradients = (Gradient(1, 5), Gradient(1, 1))
    step = timeline(gradients, [[0], [1]], CostModel(0, 1), max_in_flight=2)
    assert [event.start_s for event in step.events] == [5, 5]
    assert [event.end_s for event in step.events] == [6, 7]


def test_launches_are_paid_by_the_compute() -> None:
    step = timeline((Gradient(1, 1), Gradient(1, 2)), [[0], [1]], CostModel(0, 10, launch_s=0.25))
    assert step.compute_s == 2.5
    assert [event.ready_s for event in step.events] == [1, 2.25]


def test_a_collective_on_the_computing_cores_hides_nothing() -> None:
    # Computing stops at 1 s for 2 s, goes on to 4 s, and the second bucket follows it.
    step = timeline((Gradient(2, 1), Gradient(1, 2)), [[0], [1]], CostModel(0, 1, cores=1.0))
    assert [(event.ready_s, event.start_s, event.end_s) for event in step.events] == [(1, 1, 3), (4, 4, 5)]
    assert (step.compute_s, step.slowed_s, step.seconds, step.hidden_share) == (2, 2, 5, 0)
    # On half of the cores: beside each second of the first bucket, half a second of compute is done.
    step = timeline((Gradient(2, 1), Gradient(1, 2)), [[0], [1]], CostModel(0, 1, cores=0.5))
    assert [event.ready_s for event in step.events] == [1, 3]
    assert (step.seconds, step.hidden_share) == (4, pytest.approx(1 / 3))


def test_compute_may_go_on_after_the_last_gradient() -> None:
    step = timeline((Gradient(1, 1),), [[0]], CostModel(0, 1), compute_s=3)
    assert (step.seconds, step.exposed_s, step.hidden_share) == (3, 0, 1)


@pytest.mark.parametrize(
    ("sizes", "cap", "first", "lengths"),
    [
        ([1, 1, 1, 1, 1], 2, None, [2, 2, 1]),
        ([3, 1, 1], 2, None, [1, 2]),
        ([1, 3, 1], 2, None, [2, 1]),  # the gradient that reaches the cap still belongs to the bucket
        ([1, 1, 1, 1, 1], 2, 1, [1, 2, 2]),
        ([0, 0], 5, None, [2]),
        ([], 5, None, []),
    ],
)
def test_buckets_by_cap(sizes: list[int], cap: int, first: int | None, lengths: list[int]) -> None:
    assert [len(one) for one in form_buckets(sizes, cap, first)] == lengths


def test_nothing_to_reduce() -> None:
    step = timeline((), (), REFERENCE, compute_s=1)
    assert (step.seconds, step.communication_s, step.hidden_share) == (1, 0, 1)
    assert best_bucket_bytes((), REFERENCE) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Layer(-1, 0), "layer"),
        (lambda: Layer(1, math.nan), "layer"),
        (lambda: Gradient(1, -1), "gradient"),
        (lambda: form_buckets([1], 0), "at least one byte"),
        (lambda: timeline(EQUAL, (), REFERENCE, max_in_flight=0), "in flight"),
        (lambda: timeline(EQUAL, (), REFERENCE, compute_s=0), "compute cannot end"),
        (lambda: CostModel(-1, 1), "alpha"),
        (lambda: CostModel(0, 0), "alpha"),
        (lambda: CostModel(math.inf, 1), "alpha"),
        (lambda: REFERENCE.smallest_bytes(1), "efficiency"),
    ],
)
def test_what_cannot_be(call: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call()  # type: ignore[operator]


def test_the_smallest_bucket_of_an_efficiency() -> None:
    assert REFERENCE.smallest_bytes(0.9) == pytest.approx(21.6 * MB)
    assert REFERENCE.efficiency(REFERENCE.smallest_bytes(0.8)) == pytest.approx(0.8)


def test_the_sweep_shows_both_ends() -> None:
    # 2 ms of alpha: small buckets pay it 48 times, one large bucket cannot start before the end.
    rows = sweep(EQUAL, CostModel(2 * MS, 12e9), [layers * 25 * MB for layers in (1, 2, 4, 8, 16, 48)])
    assert [row.buckets for row in rows] == [48, 24, 12, 6, 3, 1]
    milliseconds = [row.seconds / MS for row in rows]
    best = milliseconds.index(min(milliseconds))
    assert 0 < best < 5
    assert milliseconds[:best] == sorted(milliseconds[:best], reverse=True)
    assert milliseconds[best:] == sorted(milliseconds[best:])
    assert all(row.serial_s >= row.seconds for row in rows)


def test_the_best_bucket_of_the_reference() -> None:
    # The size of a layer is the largest cap that makes each layer a bucket.
    assert best_bucket_bytes(EQUAL, REFERENCE) == 25 * MB


def test_of_equally_good_buckets_the_larger() -> None:
    # Compute goes on long enough to hide anything.
    assert best_bucket_bytes(EQUAL, REFERENCE, compute_s=10) == 48 * 25 * MB
    near = best_bucket_bytes(EQUAL, REFERENCE, slack=0.02)
    assert near > 25 * MB
    assert run(EQUAL, near).seconds <= 1.02 * run(EQUAL, 25 * MB).seconds


LAYERS = st.lists(st.builds(Layer, st.integers(0, 1000), st.floats(0, 10)), max_size=12).map(tuple)
MODELS = st.builds(CostModel, st.floats(0, 5), st.floats(1, 1000), st.just(0.0), st.sampled_from([0.0, 0.5, 1.0]))
CAPS = st.integers(1, 3000)
LIMITS = st.integers(1, 4)
ROUNDING = 1e-9


@given(LAYERS, MODELS, CAPS, LIMITS)
def test_a_step_lies_between_the_ideal_and_the_serial_one(
    layers: tuple[Layer, ...], model: CostModel, cap: int, limit: int
) -> None:
    gradients = backward(layers)
    step = run(gradients, cap, model, max_in_flight=limit)
    serial = run(gradients, cap, model, max_in_flight=limit, overlap=False)
    wire_s = sum(layer.nbytes for layer in layers) / model.beta_bytes_per_s
    assert step.seconds >= max(step.compute_s, step.communication_s, wire_s) - ROUNDING
    if limit == 1 or not model.cores:  # else only the serial run may overlap fixed costs: no compute lies between
        assert step.seconds <= serial.seconds + ROUNDING
    assert serial.seconds <= step.compute_s + sum(model.seconds(event.nbytes) for event in step.events) + ROUNDING
    assert -ROUNDING <= step.hidden_share <= 1


@given(LAYERS, MODELS, CAPS, LIMITS)
def test_sums(layers: tuple[Layer, ...], model: CostModel, cap: int, limit: int) -> None:
    step = run(backward(layers), cap, model, max_in_flight=limit)
    assert step.compute_s == pytest.approx(sum(layer.compute_s for layer in layers))
    assert sum(event.nbytes for event in step.events) == sum(layer.nbytes for layer in layers)
    # Nothing is idle between the end of the compute and the end of the step.
    computed_s = step.compute_s + step.slowed_s
    assert step.seconds == pytest.approx(computed_s + step.exposed_s)
    beside_s = step.communication_s - step.exposed_s
    assert step.slowed_s == pytest.approx(model.cores * beside_s, abs=ROUNDING)
    if limit == 1:
        assert step.communication_s == pytest.approx(sum(model.seconds(event.nbytes) for event in step.events))
        assert step.exposed_s == pytest.approx(sum(event.exposed_s(computed_s) for event in step.events))
    for event in step.events:
        assert event.start_s >= event.ready_s
        assert event.end_s >= event.start_s + model.seconds(event.nbytes) - ROUNDING
    for event in step.events:
        in_flight = [other for other in step.events if other.start_s <= event.start_s < other.end_s]
        assert len(in_flight) <= limit


@given(LAYERS, MODELS, CAPS, LIMITS, st.floats(0, 3))
@example((Layer(1, 0), Layer(1, 1), Layer(0, 0)), CostModel(1, 217, cores=1.0), 1, 2, 0.1)  # two ready at one moment
def test_nothing_gets_faster_by_a_worse_interconnect(
    layers: tuple[Layer, ...], model: CostModel, cap: int, limit: int, more: float
) -> None:
    gradients = backward(layers)
    seconds = run(gradients, cap, model, max_in_flight=limit).seconds
    for worse in (
        replace(model, alpha_s=model.alpha_s + more),
        replace(model, beta_bytes_per_s=model.beta_bytes_per_s / (1 + more)),
        replace(model, launch_s=more),
        replace(model, cores=min(1.0, model.cores + more)),
    ):
        assert run(gradients, cap, worse, max_in_flight=limit).seconds >= seconds - ROUNDING
    assert run(gradients, cap, model, max_in_flight=limit + 1).seconds <= seconds + ROUNDING


@given(LAYERS, MODELS, LIMITS)
def test_no_candidate_beats_the_best(layers: tuple[Layer, ...], model: CostModel, limit: int) -> None:
    gradients = backward(layers)
    best = best_bucket_bytes(gradients, model, max_in_flight=limit)
    if len(form_buckets([layer.nbytes for layer in layers], best)) > 1:
        looser = form_buckets([layer.nbytes for layer in layers], best + 1)
        assert looser != form_buckets([layer.nbytes for layer in layers], best)
    best_s = run(gradients, best, model, max_in_flight=limit).seconds
    caps = candidate_caps([layer.nbytes for layer in layers])
    assert list(caps) == sorted(set(caps))
    assert all(best_s <= run(gradients, cap, model, max_in_flight=limit).seconds + ROUNDING for cap in caps)
