"""The step model: closed forms that it must meet, and the bytes of the plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import TierConfig, UpdateSchedule
from tierstore.errors import ConfigError, FormatError
from tierstore.plan import step_model, tuning
from tierstore.plan.bandwidth import Activity, BandwidthTable
from tierstore.plan.costs import StepPattern, step_traffic
from tierstore.plan.placement import GroupNeed, Placement
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_model import StepForecast, StepPolicy, forecast
from tierstore.plan.step_record import StepRecord
from tierstore.plan.step_store import Store
from tierstore.plan.tiers import place, smallest_budgets
from tierstore.plan.tuning import USUAL_DEPTH, Candidate, Regime, calibrated, tune
from tierstore.train.budgets import request_for

MIB = 2**20
LAYERS = 8
ELEMENTS = 8 * 65536  # 1 MiB of bf16 weights, 5 MiB of state
RATES = BandwidthTable(100 * MIB, 100 * MIB, 100 * MIB, 1e12, 1e12, 1e12, 1e12)
EXACT = [UpdateSchedule.STEP, UpdateSchedule.FORWARD, UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE]


def record(seconds: float = 0.01, between_s: float = 0.0, layers: int = LAYERS) -> StepRecord:
    groups = tuple(GroupNeed(f"h.{i}", ELEMENTS, 2, 10, True) for i in range(layers))
    there = tuple((group, seconds) for group in range(layers))
    back = tuple((group, 2 * seconds) for group in reversed(range(layers)))
    return StepRecord(groups, there, back, tuple(reversed(range(layers))), between_s)


def placed(
    cpu_memory: int, schedule: UpdateSchedule, gpu_memory: int = 6 * MIB, *, nvme: bool = True,
    chunk: int | None = None, layers: int = LAYERS,
) -> Placement:  # fmt: skip
    tiers = TierConfig(
        gpu_memory=gpu_memory, cpu_memory=cpu_memory, nvme=["x"] if nvme else [], chunk_bytes=chunk, io_threads=2
    )
    return place(request_for(record(layers=layers).groups, tiers, schedule, None))


def step(
    placement: Placement, schedule: UpdateSchedule, depth: int = 1, seconds: float = 0.01, **options: Any
) -> StepForecast:
    machine = options.pop("machine", Machine(RATES, io_threads=2, sync_s=0.0))
    return forecast(record(seconds), placement, machine, StepPolicy(depth, schedule, **options))


@pytest.mark.parametrize("schedule", EXACT)
def test_what_fits_in_memory_takes_the_time_of_its_computing(schedule: UpdateSchedule) -> None:
    found = step(placed(256 * MIB, schedule, 64 * MIB, nvme=False), schedule, commits=False)
    assert found.seconds == pytest.approx(24 * 0.01, rel=1e-3)
    assert (found.read_bytes, found.written_bytes) == (0, 0)


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("cpu_memory", [12, 30, 50, 100])
def test_bytes_are_those_of_the_plan(schedule: UpdateSchedule, cpu_memory: int) -> None:
    placement = placed(cpu_memory * MIB, schedule, gpu_memory=64 * MIB)  # the device holds all weights
    found = step(placement, schedule)
    reads_weights = schedule in (UpdateSchedule.STEP, UpdateSchedule.FORWARD)
    plan = step_traffic(placement, StepPattern((0,) * LAYERS, read_weights_with_state=reads_weights))
    assert found.read_bytes == pytest.approx(plan.read_bytes, rel=0.02)
    assert found.written_bytes == pytest.approx(plan.written_bytes, rel=0.02)


@settings(max_examples=10)
@given(
    extra=st.integers(0, 64), schedule=st.sampled_from(EXACT), depth=st.integers(0, 8),
    seconds=st.sampled_from([0.0, 0.003, 0.05]), commit_every=st.integers(1, 2),
)  # fmt: skip
def test_what_holds_for_every_step(
    extra: int, schedule: UpdateSchedule, depth: int, seconds: float, commit_every: int
) -> None:
    tiers = TierConfig(gpu_memory=6 * MIB, cpu_memory=2**40, nvme=["x"], chunk_bytes=2 * MIB)
    least = smallest_budgets(request_for(record().groups, tiers, schedule, None)).cpu_bytes
    placement = placed(least + extra * MIB, schedule, chunk=2 * MIB)
    found = step(placement, schedule, depth, seconds, commit_every=commit_every)
    again = step(placement, schedule, depth, seconds, commit_every=commit_every)
    assert found == again
    assert found.cpu_peak_bytes <= placement.pools.total_bytes
    assert found.gpu_peak_bytes <= 6 * MIB
    assert found.disk_s <= found.seconds * 1.001
    assert found.slowed_s == pytest.approx(0.0, abs=1e-6)  # this machine slows nothing
    moved_s = (found.read_bytes + found.written_bytes) / (100 * MIB)  # some of it after the last step
    assert found.seconds >= max(0.999 * 24 * seconds, 0.95 * moved_s)


def test_a_step_with_everything_inside_is_the_sum_of_its_parts() -> None:
    """`step` computes, then reads what did not fit ahead, updates and writes: nothing of the writes is hidden."""
    placement = placed(30 * MIB, UpdateSchedule.STEP, gpu_memory=64 * MIB)  # more memory hides more of a commit
    found = step(placement, UpdateSchedule.STEP, seconds=0.01)
    written_s = found.written_bytes / (100 * MIB)
    assert found.seconds >= 24 * 0.01 + 0.9 * written_s
    assert found.seconds <= 24 * 0.01 + 1.1 * (found.read_bytes / (100 * MIB) + written_s)


def test_a_later_update_hides_under_the_next_forward() -> None:
    times = {s: step(placed(30 * MIB, s, gpu_memory=64 * MIB), s, seconds=0.05).seconds for s in EXACT}
    assert times[UpdateSchedule.FORWARD] < times[UpdateSchedule.STEP]
    assert times[UpdateSchedule.BACKWARD] < times[UpdateSchedule.FORWARD]


def test_what_backward_leaves_is_updated_as_the_next_forward_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = placed(13 * MIB // 2, UpdateSchedule.SPECULATIVE, gpu_memory=64 * MIB)  # little memory is lent
    found = step(placement, UpdateSchedule.SPECULATIVE, seconds=0.03)
    monkeypatch.setattr(Store, "rearrange", lambda *_: None)
    as_they_came = step(placement, UpdateSchedule.SPECULATIVE, seconds=0.03)
    assert found.seconds < 0.95 * as_they_came.seconds
    assert found.stall_s < 0.8 * as_they_came.stall_s


def both_ways(slower: float) -> dict[tuple[Activity, Activity], float]:
    return {(Activity.MATMUL, Activity.ADAM): slower, (Activity.ADAM, Activity.MATMUL): slower}


def test_what_runs_beside_each_other_is_slower_as_measured() -> None:
    slower = {
        (Activity.MATMUL, Activity.WRITE): 1.5, (Activity.MATMUL, Activity.READ): 1.25,
        (Activity.MATMUL, Activity.ADAM): 2.0, (Activity.WRITE, Activity.MATMUL): 1.1,
        (Activity.ADAM, Activity.READ): 1.25,
    }  # fmt: skip
    speeds = Machine(RATES, 4, 2, slower).speeds
    assert speeds({"compute": 1})["compute"] == 1
    assert speeds({"compute": 1, "write": 4})["compute"] == pytest.approx(1 / 1.5)
    assert speeds({"compute": 1, "write": 1, "read": 1})["compute"] == pytest.approx(1 / 1.375)
    assert speeds({"compute": 1, "write": 2, "adam": 1, "checksum": 3})["compute"] == pytest.approx(1 / 2.5)
    assert 2 * speeds({"compute": 1, "write": 2})["write"] == pytest.approx(RATES.write_bytes_per_s / 1.1)
    assert 2 * speeds({"adam": 2, "read": 2})["adam"] == pytest.approx(RATES.adam_elements_per_s / 1.25)
    copying = Machine(RATES, 4, 2, {(Activity.MATMUL, Activity.D2H): 3.0, (Activity.D2H, Activity.MATMUL): 1.5}).speeds
    assert copying({"compute": 1, "d2h": 2})["compute"] == pytest.approx(1 / 3)
    assert 2 * copying({"compute": 1, "d2h": 2})["d2h"] == pytest.approx(RATES.d2h_bytes_per_s / 1.5)
    assert 2 * speeds({"read": 2, "adam": 2})["read"] == pytest.approx(RATES.read_bytes_per_s)


def test_a_faster_disk_and_no_contention_are_faster() -> None:
    placement = placed(30 * MIB, UpdateSchedule.FORWARD)
    slow = step(placement, UpdateSchedule.FORWARD)
    fast = step(placement, UpdateSchedule.FORWARD, machine=Machine(RATES.scaled(disk=2), io_threads=2, sync_s=0.0))
    assert fast.seconds < 0.7 * slow.seconds
    cores = BandwidthTable(1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 30e6)
    alone, beside = (
        step(placement, UpdateSchedule.BACKWARD, machine=Machine(cores, 2, 2, both_ways(slowed)), seconds=0.02)
        for slowed in (1.0, 2.0)
    )
    assert beside.seconds > 1.05 * alone.seconds
    assert beside.slowed_s > 0.01 > alone.slowed_s


def test_a_disk_that_caches_writes_stands_still_while_they_are_synced() -> None:
    """Where the disk bounds each step, and each step commits, the sync of what it writes makes the step longer."""
    placement = placed(30 * MIB, UpdateSchedule.BACKWARD)
    caching = Machine(replace(RATES, sync_bytes_per_s=200 * MIB), io_threads=2, sync_s=0.0)
    at_once, synced = (
        step(placement, UpdateSchedule.BACKWARD, seconds=0.0, **options) for options in ({}, {"machine": caching})
    )
    assert at_once.written_bytes == synced.written_bytes > 0
    more_s = synced.seconds - at_once.seconds
    assert more_s == pytest.approx(at_once.written_bytes / (200 * MIB), rel=0.15)
    assert synced.disk_s <= synced.seconds * 1.001
    assert caching.speeds({"read": 1, "sync": 1})["read"] == pytest.approx(0.01 * caching.speeds({"read": 1})["read"])


def test_what_steps_write_over_before_a_commit_is_synced_once() -> None:
    placement = placed(30 * MIB, UpdateSchedule.STEP)
    slot_bytes = LAYERS * ELEMENTS * (2 + 10)
    rates = (RATES, replace(RATES, sync_bytes_per_s=200 * MIB))
    more_s = {}
    for every in (1, 4):
        options: dict[str, Any] = {"seconds": 0.0, "commit_every": every}
        at_once, synced = (
            step(placement, UpdateSchedule.STEP, machine=Machine(one, io_threads=2, sync_s=0.0), **options)
            for one in rates
        )
        more_s[every] = every * (synced.seconds - at_once.seconds)
    assert more_s[1] == pytest.approx(slot_bytes / (200 * MIB), rel=0.15)
    assert more_s[4] == pytest.approx(more_s[1], rel=0.15)


def test_what_has_no_model_is_refused() -> None:
    placement = placed(30 * MIB, UpdateSchedule.FORWARD)
    with pytest.raises(ConfigError, match="'delayed' has no model"):
        step(placement, UpdateSchedule.DELAYED)
    other = StepRecord(record().groups[:1], ((0, 1.0),), (), ())
    with pytest.raises(ConfigError, match="different models"):
        forecast(other, placement, Machine(RATES), StepPolicy(1, UpdateSchedule.STEP))
    with pytest.raises(ConfigError, match="slower must be at least 1"):
        Machine(RATES, slower=both_ways(0.5))
    with pytest.raises(ConfigError, match="a thread each"):
        Machine(RATES, io_threads=0)


def test_a_record_survives_its_file() -> None:
    for one in (record(0.125, 0.5), replace(record(), contention=0.5, drag=1.5, acquired_bytes=3 * MIB)):
        assert StepRecord.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, 2**62])
def test_other_sizes_are_no_record(value: Any) -> None:
    with pytest.raises(FormatError, match="not a recorded step"):
        StepRecord.from_json(record().to_json() | {"acquired_bytes": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("version", 2), ("groups", [1]), ("groups", []), ("forward", [[0, -1.0]]), ("forward", [[99, 1.0]]),
     ("backward", "no"), ("completed", None), ("between_s", "long"), ("between_s", 10**400),
     ("forward", [[0, "inf"]]), ("forward", [[0, "1"]]), ("forward", [[0, math.inf]]), ("backward", [[0, math.nan]]),
     ("backward", [[0, 10**5000]]), ("backward", [[0.5, 1.0]]), ("completed", [0.5]), ("completed", []),
     ("completed", [0] * LAYERS), ("completed", [0, *range(LAYERS)]), ("between_s", True)],
)  # fmt: skip
def test_other_objects_are_no_record(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match="recorded step"):
        StepRecord.from_json(record().to_json() | {key: value})
    with pytest.raises(FormatError, match="recorded step"):
        StepRecord.from_json({other: found for other, found in record().to_json().items() if other != key})


@pytest.mark.parametrize(
    ("key", "value"),
    [("elements", 1.5), ("elements", True), ("elements", 1e308), ("weight_bytes", 2.5), ("state_bytes", "10"),
     ("trainable", 1), ("trainable", [1]), ("whole_bytes", "x"), ("whole_bytes", -1), ("name", 5)],
)  # fmt: skip
def test_groups_of_other_sizes_are_no_record(key: str, value: Any) -> None:
    found = json.loads(json.dumps(record().to_json()))
    found["groups"][0][key] = value
    with pytest.raises(FormatError, match="not a recorded step"):
        StepRecord.from_json(found)


def test_gradients_that_never_come_are_named_and_not_the_budgets() -> None:
    placement = placed(30 * MIB, UpdateSchedule.FORWARD)
    with pytest.raises(ConfigError, match=r"no gradients of group 3 \('h.3'\)"):
        forecast(replace(record(), completed=(7, 6, 5, 4, 2, 1, 0)), placement, Machine(RATES), StepPolicy(1, EXACT[0]))


def test_times_are_finite() -> None:
    with pytest.raises(ConfigError, match="finite"):
        record(math.nan)
    with pytest.raises(ConfigError, match="finite"):
        record(0.1, math.inf)


@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("seconds", [0.001, 0.05])
def test_rare_commits_are_weighed_instead_of_run(
    schedule: UpdateSchedule, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = placed(60 * MIB, schedule)
    weighed = step(placement, schedule, seconds=seconds, commit_every=12)
    often, seldom = (step(placement, schedule, seconds=seconds, commit_every=every) for every in (1, 10**6))
    monkeypatch.setattr(step_model, "_LONGEST_PERIOD", 12)
    exact = step(placement, schedule, seconds=seconds, commit_every=12)
    assert weighed.seconds == pytest.approx(exact.seconds, rel=0.01)
    assert weighed.written_bytes == pytest.approx(exact.written_bytes, rel=0.01)
    assert seldom.seconds <= weighed.seconds * 1.0001 <= often.seconds * 1.0002  # rounding of sums
    assert seldom.written_bytes < weighed.written_bytes < often.written_bytes


def test_a_typical_record_has_the_medians_of_those_that_went_the_same_way() -> None:
    other_way = StepRecord(record().groups, ((0, 9.0),), (), ())
    found = StepRecord.typical([other_way, record(1.0, 1.0), record(2.0, 5.0), record(7.0, 2.0)])
    assert found == record(2.0, 2.0)


class TestTuning:
    def candidates(self, *schedules: UpdateSchedule, cpu_memory: int = 30 * MIB) -> list[Candidate]:
        return [Candidate(schedule, placed(cpu_memory, schedule)) for schedule in schedules]

    def test_the_first_stays_unless_another_is_clearly_faster(self) -> None:
        both = self.candidates(UpdateSchedule.STEP, UpdateSchedule.FORWARD)
        faster = tune(record(0.05), both, Machine(RATES, io_threads=2))
        assert faster.choice.candidate is both[1]
        assert faster.others[0][0] is both[0]
        same = tune(record(0.05), [both[1], both[1]], Machine(RATES, io_threads=2))
        assert same.choice.candidate is both[1]

    def test_the_depth_is_the_smallest_from_1_on_that_is_as_good_as_the_best(self) -> None:
        found = tune(record(), self.candidates(UpdateSchedule.FORWARD), Machine(RATES, io_threads=2)).choice
        best = min(one.seconds for one in found.forecasts)
        assert len(found.forecasts) == 9
        assert found.best.seconds <= 1.01 * best
        assert found.depth >= 1
        assert all(one.seconds > 1.01 * best for one in found.forecasts[1 : found.depth])

    def test_a_slow_disk_bounds_and_the_words_say_what_would_help(self) -> None:
        found = tune(record(0.008), self.candidates(UpdateSchedule.FORWARD), Machine(RATES, io_threads=2))
        assert found.regime is Regime.BANDWIDTH_BOUND
        assert "no depth hides it; a second SSD would make it" in found.reason
        assert found.two_disks.seconds < 0.6 * found.choice.best.seconds
        assert found.reason.endswith("times the batch would hide it")

    def test_a_fast_disk_does_not(self) -> None:
        machine = Machine(RATES.scaled(disk=1000), io_threads=2)
        found = tune(record(0.05), self.candidates(UpdateSchedule.BACKWARD), machine)
        assert found.regime is Regime.COMPUTE_BOUND
        assert found.batch_factor == 1.25

    def test_computing_that_an_update_slows_waits_for_nothing(self) -> None:
        cores = BandwidthTable(1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 30e6)
        machine = Machine(cores, 2, 2, both_ways(3.0))
        found = tune(record(0.05), self.candidates(UpdateSchedule.BACKWARD), machine)
        step = found.choice.best
        assert step.slowed_s > 0.1 * step.seconds
        assert step.waiting_s + step.slowed_s + record(0.05).compute_s == pytest.approx(step.seconds)
        assert (found.regime, found.batch_factor) == (Regime.COMPUTE_BOUND, 1.25)
        assert found.reason.endswith(
            " s a step, 1.44 s are computing (0.24 s of that for what goes on beside it), the disks work 0.00 s, and "
            "what they do is hidden; faster disks or deeper prefetch gain nothing"
        )

    @pytest.mark.parametrize("schedule", [UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE])
    def test_waits_for_gradients_are_no_computing(self, schedule: UpdateSchedule) -> None:
        """Backward waits until gradients have left the device, and those wait for the disk."""
        one = Candidate(schedule, placed(50 * MIB, schedule, gpu_memory=64 * MIB))
        found = tune(record(0.016), [one], Machine(RATES, io_threads=2))
        step = found.choice.best
        assert step.slowed_s == pytest.approx(0.0, abs=1e-6)
        assert step.waiting_s == pytest.approx(step.seconds - record(0.016).compute_s)
        assert found.two_disks.seconds < 0.8 * step.seconds
        assert found.regime is Regime.BANDWIDTH_BOUND

    def test_of_what_was_taken_before_all_is_told_as_it_is_now(self) -> None:
        both = self.candidates(UpdateSchedule.STEP, UpdateSchedule.FORWARD)
        machine = Machine(RATES, io_threads=2)
        found = tune(record(0.05), both, machine, taken=(both[0], 7))
        assert (found.choice.candidate, found.choice.depth) == (both[0], 7)
        assert found.two_disks.seconds < found.choice.forecasts[7].seconds == found.choice.best.seconds
        policy = StepPolicy(USUAL_DEPTH, UpdateSchedule.FORWARD)
        assert found.others == ((both[1], forecast(record(0.05), both[1].placement, machine, policy)),)

    @pytest.mark.parametrize(("contention", "drag"), [(0.0, 1.3), (2.0, 0.8)])
    def test_what_a_recorded_step_shows_of_contention_and_drag_is_found_again(
        self, contention: float, drag: float
    ) -> None:
        short, placement = record(layers=4), placed(15 * MIB, UpdateSchedule.FORWARD, layers=4)
        slower = {(Activity.MATMUL, Activity.READ): 1.5, (Activity.MATMUL, Activity.WRITE): 1.5}
        machine = Machine(RATES, io_threads=2, slower=slower)
        policy = StepPolicy(USUAL_DEPTH, UpdateSchedule.FORWARD)
        seen = forecast(replace(short, contention=contention, drag=drag), placement, machine, policy)
        found = calibrated(short, placement, machine, policy, seen.computing_s, seen.seconds)
        assert forecast(found, placement, machine, policy).seconds == pytest.approx(seen.seconds, rel=0.01)
        assert found.contention == pytest.approx(contention, abs=0.02)
        assert found.drag == pytest.approx(drag, abs=0.02)

    def test_the_whole_step_is_met_even_where_contention_and_drag_change_each_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def seen(one: StepRecord, *_: object) -> SimpleNamespace:
            computing_s = 1 + one.contention * one.drag
            return SimpleNamespace(computing_s=computing_s, seconds=one.drag * computing_s)

        monkeypatch.setattr(tuning, "forecast", seen)
        given = (placed(15 * MIB, UpdateSchedule.FORWARD), Machine(RATES), StepPolicy(1, UpdateSchedule.FORWARD))
        assert seen(calibrated(record(), *given, 2.2, 3.75)).seconds == pytest.approx(3.75, rel=0.01)

    def test_the_argument_that_came_closest_is_taken_where_a_function_jumps(self) -> None:
        def grows(argument: float) -> float:
            return argument - 0.2 if argument <= 1.5 else argument + 0.1

        assert grows(tuning._where(grows, 1.32, 0.25, 4.0)) == pytest.approx(1.3)

    def test_steps_beside_which_nothing_ran_do_not_tell_of_contention(self) -> None:
        short, placement = record(layers=4), placed(15 * MIB, UpdateSchedule.FORWARD, layers=4)
        policy = StepPolicy(USUAL_DEPTH, UpdateSchedule.FORWARD)
        machine = Machine(RATES, io_threads=2)
        found = calibrated(short, placement, machine, policy, 99.0, 0.5)
        assert found == replace(short, drag=found.drag)
        for step_s in (0.0, 99.0):
            assert calibrated(short, placement, machine, policy, 99.0, step_s) == short

    def test_steps_that_computed_faster_than_the_record_are_of_another_minute(self) -> None:
        (usual,) = self.candidates(UpdateSchedule.STEP)
        policy = StepPolicy(USUAL_DEPTH, UpdateSchedule.STEP)
        machine = Machine(RATES, io_threads=2)
        seen = forecast(record().scaled(0.7), usual.placement, machine, policy)
        found = calibrated(record(), usual.placement, machine, policy, seen.computing_s, 99.0)
        assert forecast(found, usual.placement, machine, policy).seconds == pytest.approx(seen.seconds, rel=0.01)

    def test_nothing_to_choose_from(self) -> None:
        with pytest.raises(ConfigError, match="nothing to choose from"):
            tune(record(), [], Machine(RATES))
