"""The diagnosis: constructed steps that have one thing wrong each, and one that has nothing wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.plan.buckets import BucketEvent, Gradient, Layer, Timeline, backward, form_buckets, timeline
from tierstore.plan.cost_model import CostModel
from tierstore.plan.diagnosis import Diagnosis, MeasuredStep, Pause, PauseKind, Symptom, diagnose, report_lines

MB, MS = 10**6, 1e-3
FORWARD_S, OPTIMIZER_S = 30 * MS, 4 * MS
LINK = CostModel(100e-6, 2e9)  # 2.1 ms for a layer of 4 MB that is computed in 3 ms
LAYERS = [Layer(4 * MB, 3 * MS)] * 24


@dataclass
class Scene:
    """A step that runs as the timeline says, on an interconnect that is `slowdown` times as slow as `link`."""

    layers: Sequence[Layer] = field(default_factory=lambda: LAYERS)
    link: CostModel = LINK
    buckets: Sequence[Sequence[int]] | None = None
    cap_bytes: float = 4 * MB
    slowdown: float = 1.0
    pauses: Sequence[Pause] = ()

    def step(self) -> MeasuredStep:
        gradients = tuple(self._delayed(one) for one in backward(self.layers, FORWARD_S))
        buckets = self.buckets or form_buckets([layer.nbytes for layer in self.layers], self.cap_bytes)
        slow = CostModel(self.link.alpha_s * self.slowdown, self.link.beta_bytes_per_s / self.slowdown)
        run = timeline(gradients, buckets, slow)
        members = tuple(tuple(bucket) for bucket in buckets)
        return MeasuredStep(run.seconds + OPTIMIZER_S, run, gradients, members, tuple(self.pauses))

    def _delayed(self, gradient: Gradient) -> Gradient:
        """The gradient, later by the pauses before it. Pauses are given in the time of the step with its pauses."""
        now_s = gradient.ready_s
        for pause in sorted(self.pauses, key=lambda pause: pause.start_s):
            if pause.start_s < now_s:
                now_s += pause.end_s - pause.start_s
        return Gradient(gradient.nbytes, now_s)


def pauses(kind: PauseKind, count: int, seconds: float, begin_s: float = FORWARD_S + 1.5 * MS) -> list[Pause]:
    every_s = 72 * MS / count + seconds
    return [Pause(kind, begin_s + index * every_s, begin_s + index * every_s + seconds) for index in range(count)]


HEALTHY = Scene()
SCENES = {
    Symptom.STRAY_SYNCHRONIZATION: Scene(pauses=pauses(PauseKind.SYNCHRONIZATION, 4, 3 * MS)),
    Symptom.UNUSED_SEARCH: Scene(pauses=pauses(PauseKind.SEARCH, 1, 6 * MS, begin_s=FORWARD_S)),
    Symptom.HEAVY_HOOK: Scene(pauses=pauses(PauseKind.HOOK, 24, 1 * MS)),
    Symptom.SAME_STREAM: Scene(pauses=pauses(PauseKind.COLLECTIVE, 24, 2.1 * MS)),
    Symptom.READY_ORDER: Scene(buckets=[[index] for index in reversed(range(24))]),
    Symptom.FIRST_BUCKET_LATE: Scene(buckets=[range(12), *([index] for index in range(12, 24))]),
    Symptom.BUCKET_TOO_LARGE: Scene(cap_bytes=32 * MB),
    Symptom.BUCKET_TOO_SMALL: Scene(
        layers=[Layer(MB // 5, 0.3 * MS)] * 240, link=CostModel(400e-6, 2e9), cap_bytes=MB // 5
    ),
    Symptom.COMMUNICATION_BOUND: Scene(link=CostModel(100e-6, 0.7e9)),
    Symptom.COMPUTE_BOUND: Scene(link=CostModel(100e-6, 20e9)),
}


def examine(scene: Scene) -> tuple[Diagnosis, ...]:
    return diagnose(scene.step(), scene.link)


def test_a_healthy_step_has_no_symptom() -> None:
    assert examine(HEALTHY) == ()
    assert report_lines(HEALTHY.step(), ()) == ["nothing to remedy: a step takes 108.1 ms"]


@pytest.mark.parametrize("symptom", Symptom)
def test_each_symptom_alone(symptom: Symptom) -> None:
    found = examine(SCENES[symptom])
    assert [diagnosis.symptom for diagnosis in found] == [symptom]


def test_the_order_is_that_of_readiness_and_not_of_the_list() -> None:
    step = SCENES[Symptom.READY_ORDER].step()
    listed_backwards = replace(
        step,
        gradients=tuple(reversed(step.gradients)),
        buckets=tuple(tuple(23 - member for member in bucket) for bucket in step.buckets),
    )
    assert diagnose(listed_backwards, LINK) == diagnose(step, LINK) != ()


@pytest.mark.parametrize("slowdown", [0.95, 1.3])
@pytest.mark.parametrize("symptom", [Symptom.BUCKET_TOO_LARGE, Symptom.FIRST_BUCKET_LATE, Symptom.READY_ORDER])
def test_the_prediction_is_the_step_that_the_remedy_makes(symptom: Symptom, slowdown: float) -> None:
    # Each remedy leads to the healthy step, on the same slow interconnect, of which the fitted model knows nothing.
    [diagnosis] = examine(replace(SCENES[symptom], slowdown=slowdown))
    healthy_s = replace(HEALTHY, slowdown=slowdown).step().seconds
    assert diagnosis.seconds == pytest.approx(healthy_s, rel=0.04)


@pytest.mark.parametrize(
    ("symptom", "milliseconds"),
    [
        (Symptom.STRAY_SYNCHRONIZATION, 12),
        (Symptom.UNUSED_SEARCH, 6),
        (Symptom.HEAVY_HOOK, 24),
        (Symptom.SAME_STREAM, 50),
    ],
)
def test_what_a_pause_took_is_gained(symptom: Symptom, milliseconds: float) -> None:
    step = SCENES[symptom].step()
    [diagnosis] = diagnose(step, LINK)
    assert step.seconds - diagnosis.seconds == pytest.approx(milliseconds * MS, rel=0.15)


def test_half_the_bytes_are_predicted_by_the_timeline() -> None:
    scene = SCENES[Symptom.COMMUNICATION_BOUND]
    [diagnosis] = examine(scene)
    half = replace(scene, layers=[Layer(2 * MB, 3 * MS)] * 24, cap_bytes=2 * MB).step()
    assert diagnosis.seconds == pytest.approx(half.seconds, rel=0.01)


def test_two_things_wrong_are_both_found_and_predicted_together() -> None:
    scene = replace(SCENES[Symptom.STRAY_SYNCHRONIZATION], cap_bytes=32 * MB)
    first, second = examine(scene)
    assert [first.symptom, second.symptom] == [Symptom.STRAY_SYNCHRONIZATION, Symptom.BUCKET_TOO_LARGE]
    assert second.seconds < first.seconds < scene.step().seconds
    assert second.seconds == pytest.approx(HEALTHY.step().seconds, rel=0.04)


def test_launches_that_fewer_buckets_save_are_part_of_the_prediction() -> None:
    # Any buckets hide the communication: only the time that launches take from the compute can be gained.
    layers = [Layer(MB // 5, 0.3 * MS)] * 240
    link = CostModel(10e-6, 2e9, launch_s=50e-6)
    gradients, buckets = backward(layers, FORWARD_S), tuple((index,) for index in range(240))
    run = timeline(gradients, buckets, link)
    seen = tuple(Gradient(one.nbytes, event.ready_s) for one, event in zip(gradients, run.events))
    [diagnosis] = diagnose(MeasuredStep(run.seconds, run, seen, buckets), link)
    assert diagnosis.symptom is Symptom.BUCKET_TOO_SMALL
    assert run.seconds - diagnosis.seconds == pytest.approx(12 * MS, rel=0.15)  # 240 times 50 us


def test_the_words() -> None:
    step = SCENES[Symptom.BUCKET_TOO_LARGE].step()
    lines = report_lines(step, diagnose(step, LINK))
    assert lines == [
        "a step takes 122.1 ms",
        "bucket too large: 3 buckets of up to 30.5 MiB: the last one is launched when backward ends, and takes 16.1 ms",
        "  -> buckets of 3.81 MiB: 108.1 ms predicted",
    ]


def test_a_step_without_buckets_says_nothing() -> None:
    assert diagnose(MeasuredStep(1.0, Timeline(1.0, ()), (), ()), LINK) == ()


@pytest.mark.parametrize("buckets", [((0,), (0,)), ((0,),), ((0,), (2,))])
def test_buckets_must_fit_their_events_and_gradients(buckets: tuple[tuple[int, ...], ...]) -> None:
    events = tuple(BucketEvent(index, 1, 0, 0, 1) for index in range(2))
    with pytest.raises(ConfigError):
        MeasuredStep(1.0, Timeline(1.0, events), (Gradient(1, 0), Gradient(1, 0)), buckets)


@given(
    st.lists(st.builds(Layer, st.integers(0, 10**7), st.floats(0, 0.01)), min_size=1, max_size=12),
    st.integers(1, 2 * 10**7),
    st.floats(0.2, 5),
    st.builds(CostModel, st.floats(0, 1e-3), st.floats(1e8, 1e11), st.floats(0, 1e-4)),
    st.lists(st.builds(Pause, st.sampled_from(PauseKind), st.floats(0, 0.05), st.floats(0.05, 0.1)), max_size=3),
    st.permutations(range(12)),
)
def test_any_step_has_a_diagnosis_that_never_predicts_less_than_the_compute_left(
    layers: list[Layer], cap: int, slowdown: float, link: CostModel, paused: list[Pause], order: list[int]
) -> None:
    order = [index for index in order if index < len(layers)]
    runs = form_buckets([layers[index].nbytes for index in order], cap)
    buckets = [[order[place] for place in run] for run in runs]
    step = Scene(layers, link, buckets, slowdown=slowdown, pauses=paused).step()
    predicted = [step.seconds, *(diagnosis.seconds for diagnosis in diagnose(step, link))]
    assert predicted == sorted(predicted, reverse=True)
    launches_s = link.launch_s * len(buckets)
    assert predicted[-1] >= sum(layer.compute_s for layer in layers) + OPTIMIZER_S - launches_s - 1e-9
