"""Timed collectives: with a clock and an interconnect that are known exactly, and on real ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from profiling import fitted, fitted_by_ticks, refused, sent_in_a_fit
from ranks import call, run_in_turn, run_ranks

from tierstore.errors import ConfigError
from tierstore.plan.buckets import Gradient, form_buckets, timeline
from tierstore.plan.cost_model import CostModel, fit_timings
from tierstore.train.data_parallel.collective_costs import SIZES_BYTES, fit_cost_model, time_collectives

LINK = CostModel(300e-6, 2e9, launch_s=20e-6)


class Channel:
    """An interconnect and a clock: collectives run one after the other, each a little slower or faster than the model.

    Not the planner's own timeline, but events as a machine makes them: launches take the caller's time, a collective
    begins when the one before it is done.
    """

    def __init__(self, link: CostModel, noise: float, seed: int = 0) -> None:
        self.now_s = 5.0
        self.launched: list[int] = []
        self._link = link
        self._noise = noise
        self._random = random.Random(seed)
        self._free_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def launch(self, nbytes: int) -> Callable[[], None]:
        self.launched.append(nbytes)
        begin_s = max(self.now_s, self._free_s)
        self.now_s += self._link.launch_s
        factor = 1 + self._random.uniform(-self._noise, self._noise)
        end_s = self._free_s = begin_s + factor * self._link.seconds(nbytes)

        def wait() -> None:
            self.now_s = max(self.now_s, end_s)

        return wait


def test_the_medians_are_those_of_the_channel() -> None:
    channel = Channel(LINK, noise=0.0)
    timings = time_collectives(channel, SIZES_BYTES, 3, channel.clock)
    assert timings.launch_s == pytest.approx(20e-6)
    assert [one.seconds for one in timings.by_size] == pytest.approx([LINK.seconds(size) for size in SIZES_BYTES])
    assert channel.launched == list(SIZES_BYTES) * 5  # in turn, with two rounds to warm up


@pytest.mark.parametrize(("threads", "cores"), [(1, 0.75), (2, 0.375)])
def test_cores_are_the_collectives_share_of_the_threads(
    threads: int, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    channel = Channel(LINK, noise=0.0)
    timings = time_collectives(channel, SIZES_BYTES, 3, channel.clock, lambda: 0.75 * channel.now_s)
    assert timings.cores == pytest.approx(cores)


def test_a_slow_first_round_does_not_count() -> None:
    class Cold(Channel):
        def launch(self, nbytes: int) -> Callable[[], None]:
            if len(self.launched) < 2 * len(SIZES_BYTES):
                self.now_s += 1.0
            return super().launch(nbytes)

    channel = Cold(LINK, noise=0.0)
    timings = time_collectives(channel, SIZES_BYTES, 1, channel.clock)
    assert timings.by_size[0].seconds == pytest.approx(LINK.seconds(SIZES_BYTES[0]))


def test_one_slow_round_does_not_count() -> None:
    class Disturbed(Channel):
        def launch(self, nbytes: int) -> Callable[[], None]:
            if len(self.launched) // len(SIZES_BYTES) == 4:
                self.now_s += 1.0
            return super().launch(nbytes)

    channel = Disturbed(LINK, noise=0.0)
    timings = time_collectives(channel, SIZES_BYTES, 5, channel.clock)
    assert [one.seconds for one in timings.by_size] == pytest.approx([LINK.seconds(size) for size in SIZES_BYTES])


@pytest.mark.parametrize("cap_bytes", [2**20, 2**22, 2**24, 2**28])
def test_the_timeline_with_the_fitted_model_is_within_a_fifth_of_the_steps(cap_bytes: int) -> None:
    channel = Channel(LINK, noise=0.15)
    timings = time_collectives(channel, SIZES_BYTES, 9, channel.clock)
    fit = fit_timings(timings.by_size)
    assert 0 < fit.residual < 0.15
    layers = [(2**20 * (1 + index % 5), 1e-3 * (1 + index % 3)) for index in range(30)]  # 90 MiB, 60 ms
    gradients, now_s = [], 0.0
    for nbytes, compute_s in layers:
        now_s += compute_s
        gradients.append(Gradient(nbytes, now_s))
    buckets = form_buckets([nbytes for nbytes, _ in layers], cap_bytes)
    model = CostModel(fit.model.alpha_s, fit.model.beta_bytes_per_s, timings.launch_s)
    assert timeline(gradients, buckets, model).seconds == pytest.approx(_measured(channel, layers, buckets), rel=0.2)


def _measured(channel: Channel, layers: list[tuple[int, float]], buckets: tuple[range, ...]) -> float:
    """A step as it runs: compute a layer, launch what is full, wait for all at the end."""
    begun_s, waits, full = channel.clock(), [], {bucket[-1]: bucket for bucket in buckets}
    for index, (_, compute_s) in enumerate(layers):
        channel.now_s += compute_s
        if index in full:
            waits.append(channel.launch(sum(layers[member][0] for member in full[index])))
    for wait in waits:
        wait()
    return channel.clock() - begun_s


def test_all_ranks_fit_the_same_model() -> None:
    for first, second in run_in_turn(2, fitted, [call("all_reduce"), call("reduce_scatter")]):
        assert first == second
        assert first["model"]["alpha_s"] >= 0
        assert first["model"]["launch_s"] > 0
        assert first["residual"] <= first["worst_residual"]
        assert [one["nbytes"] for one in first["timings"]] == [1 << 12, 1 << 16, 1 << 20]


def test_messages_are_as_long_as_they_are_counted() -> None:
    assert run_ranks(2, sent_in_a_fit) == [{1 << 12, 1 << 16}] * 2


def test_the_slowest_rank_counts() -> None:
    # On rank 1 every look at the clock is two seconds after the one before.
    assert run_ranks(2, fitted_by_ticks) == [(2.0, [4.0, 4.0])] * 2


def test_another_word_for_the_collective() -> None:
    with pytest.raises(ConfigError, match="reduce must be 'all_reduce' or 'reduce_scatter', not 'reduce-scatter'"):
        fit_cost_model(reduce="reduce-scatter")  # type: ignore[arg-type]


def test_without_a_group() -> None:
    with pytest.raises(ConfigError, match="there is no process group"):
        fit_cost_model()


def test_options_that_fit_nothing() -> None:
    run_ranks(2, refused)
