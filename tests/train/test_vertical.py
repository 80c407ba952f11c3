"""Micro-batches side by side: the same step as one after the other, with every group fetched once per pass."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import WIDTH, Run, disk, next_token_loss, smallest_budgets, tiny, tokens, train_plain
from torch import nn
from torch.nn import functional

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ConfigError
from tierstore.train.engine import Engine
from tierstore.train.vertical import SideBySide

MICRO_BATCHES, STEPS = 3, 2

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


class WithLoss(nn.Module):
    """Returns its loss, so that a micro-batch is a single tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = tiny(**options)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.inner, batch)


def everything_moves(tmp_path: Path, update: str) -> TierConfig:
    """Every group comes from the disk, and the device holds one block at a time."""
    gpu, cpu = smallest_budgets(WithLoss(), nvme=["unused"], update=update)
    return disk(tmp_path, gpu_memory=gpu, cpu_memory=cpu)


def micro_batches() -> list[list[torch.Tensor]]:
    batches = tokens(MICRO_BATCHES * STEPS)
    return [batches[MICRO_BATCHES * step :][:MICRO_BATCHES] for step in range(STEPS)]


def steps_of(tiers: TierConfig, schedule: str = "vertical", model: nn.Module | None = None, **options: Any) -> Run:
    run = Run()
    losses: list[torch.Tensor] = []

    def keep(loss: torch.Tensor) -> torch.Tensor:
        losses.append(loss.detach())
        return loss

    with Engine(model or WithLoss(), tiers, AdamWConfig(lr=1e-3), **options) as engine:
        for batches in micro_batches():
            run.reports.append(engine.train_step(batches, keep, schedule))
        run.losses = [float(loss) for loss in losses]
        run.weights = {name.removeprefix("inner."): weight for name, weight in engine.state_dict().items()}
        run.moved = engine.statistics()["bytes"]
    return run


@pytest.mark.parametrize(("update", "clip"), [("forward", 1.0), ("speculative", 1.0), ("backward", None)])
def test_the_steps_are_those_of_plain_torch(update: str, clip: float | None, tmp_path: Path) -> None:
    expected = train_plain(tiny(), tokens(MICRO_BATCHES * STEPS), accumulate=MICRO_BATCHES, max_grad_norm=clip)
    found = steps_of(everything_moves(tmp_path, update), update=update, max_grad_norm=clip)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=2e-5)


def test_placement_does_not_change_a_bit(tmp_path: Path) -> None:
    in_memory = steps_of(TierConfig(), update="step", max_grad_norm=1.0)
    for update in ("forward", "speculative"):
        steps_of(everything_moves(tmp_path / update, update), update=update, max_grad_norm=1.0).check_equal(in_memory)


def test_all_micro_batches_pass_a_group_while_it_is_there(tmp_path: Path) -> None:
    vertical, visits = visited(tmp_path / "vertical", micro_batches()[0], "vertical")
    horizontal, _ = visited(tmp_path / "horizontal", micro_batches()[0], "horizontal")
    one, visits_of_one = visited(tmp_path / "one", micro_batches()[0][:1], "horizontal")
    assert visits == visits_of_one
    assert vertical == one
    assert horizontal > 1.5 * one


def visited(tmp_path: Path, batches: list[torch.Tensor], schedule: str) -> tuple[int, list[int]]:
    """Bytes read in the second step, and the groups that it visited, in order."""
    with Engine(WithLoss(), everything_moves(tmp_path, "step"), update="step") as engine:
        engine.fix_prefetch_depth(0)
        for _ in range(2):
            before = engine.statistics()["bytes"]["nvme_read"]
            engine.train_step(batches, lambda loss: loss, schedule)
        read = engine.statistics()["bytes"]["nvme_read"] - before
        record = engine.record()
        return read, [group for group, _ in (*record.forward, *record.backward)]


class Recomputing(WithLoss):
    """Its blocks are recomputed in backward."""

    def __init__(self, reentrant: bool, **options: Any) -> None:
        super().__init__(**options)
        for block in self.inner.blocks:
            inside = block.forward
            block.forward = lambda x, inside=inside: torch.utils.checkpoint.checkpoint(
                inside, x, use_reentrant=reentrant
            )


def test_recomputation_finds_the_same_random_numbers(tmp_path: Path) -> None:
    found = []
    for model in (WithLoss(dropout=0.3), Recomputing(False, dropout=0.3), Recomputing(True, dropout=0.3)):
        torch.manual_seed(7)
        found.append(steps_of(everything_moves(tmp_path / str(len(found)), "forward"), model=model, update="forward"))
    plain, *recomputed = found
    for run in recomputed:
        assert run.losses == pytest.approx(plain.losses, rel=1e-5)
        norms = [report.grad_norm for report in run.reports]
        assert norms == pytest.approx([report.grad_norm for report in plain.reports], rel=1e-5)


def test_the_random_numbers_after_it_are_the_same_again() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        first, second = SideBySide([lambda: float(torch.rand(()))] * 2).run()
        draws.append((first, second, float(torch.rand(()))))
        assert len(set(draws[-1])) == 3
    assert draws[0] == draws[1]


def test_the_number_of_micro_batches_may_change_from_step_to_step(tmp_path: Path) -> None:
    norms = []
    for schedule in ("horizontal", "vertical"):
        torch.manual_seed(0)
        tiers = everything_moves(tmp_path / schedule, "backward")
        with Engine(Recomputing(True), tiers, update="backward") as engine:
            steps = (engine.train_step(tokens(count), lambda loss: loss, schedule) for count in (4, 4, 3, 1, 4))
            norms += [report.grad_norm for report in steps]
    assert norms[:5] == pytest.approx(norms[5:], rel=1e-3)


def test_what_torch_keeps_per_thread_is_that_of_the_caller() -> None:
    seen: list[tuple[torch.dtype, bool, torch.device]] = []

    class Seeing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            seen.append((y.dtype, torch.is_autocast_cache_enabled(), torch.get_default_device()))
            return y

    with (
        Engine(Seeing(WIDTH, 8), TierConfig()) as engine,
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.device("meta"),
    ):
        batches = [torch.ones(2, WIDTH, device="cpu")] * 2
        engine.train_step(batches, lambda y: y.float().square().sum(), "vertical")
    assert seen == [(torch.bfloat16, False, torch.device("meta"))] * 2


@pytest.mark.parametrize("schedule", ["horizontal", "vertical"])
@pytest.mark.parametrize("update", ["forward", "backward"])
def test_a_loss_may_read_weights_and_call_modules(update: str, schedule: str, tmp_path: Path) -> None:
    def penalized(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        block, norm = model.get_submodule("inner.blocks.0"), model.get_submodule("inner.norm")
        spread = norm(block(torch.linspace(-1, 1, WIDTH).expand(1, 2, WIDTH))).pow(3).mean()
        return loss + spread + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())

    steps, batches = 2, tokens(2 * MICRO_BATCHES)
    expected = train_plain(
        WithLoss(), batches, lambda model, batch: penalized(model, model(batch)), accumulate=MICRO_BATCHES
    )
    model = WithLoss()
    with Engine(model, everything_moves(tmp_path, update), AdamWConfig(lr=1e-3), update=update) as engine:
        for step in range(steps):
            given = batches[step * MICRO_BATCHES :][:MICRO_BATCHES]
            report = engine.train_step(given, lambda loss: penalized(model, loss), schedule)
            assert report.grad_norm is None or report.grad_norm == pytest.approx(expected.norms[step], rel=1e-4)
        for name, weight in engine.state_dict().items():
            torch.testing.assert_close(weight, expected.weights[name], rtol=1e-3, atol=2e-5)


def test_each_loss_is_one_number(tmp_path: Path) -> None:
    with Engine(WithLoss(), TierConfig()) as engine, pytest.raises(ConfigError, match="a loss is one real number"):
        engine.train_step(tokens(2), lambda loss: loss.expand(3), "vertical")


def test_a_forward_that_fails_fails_the_step_and_no_other(tmp_path: Path) -> None:
    class Moody(WithLoss):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if self.fails_at == int(batch[0, 0]):
                functional.linear(batch, batch, batch)  # a RuntimeError of torch, in the middle of the others
            return super().forward(batch)

    batches = tokens(MICRO_BATCHES)
    model = Moody()
    with Engine(model, everything_moves(tmp_path, "forward"), update="forward") as engine:
        model.fails_at = int(batches[2][0, 0])
        with pytest.raises(RuntimeError):
            engine.train_step(batches, lambda loss: loss, "vertical")
        model.fails_at = -1
        report = engine.train_step(batches, lambda loss: loss, "vertical")
    model = WithLoss()
    with Engine(model, everything_moves(tmp_path / "again", "forward"), update="forward") as engine:
        assert engine.train_step(batches, lambda loss: loss, "vertical").grad_norm == report.grad_norm


def test_a_schedule_that_does_not_exist_is_refused() -> None:
    with (
        Engine(WithLoss(), TierConfig()) as engine,
        pytest.raises(ConfigError, match="schedule must be one of horizontal, vertical, not 'diagonal'"),
    ):
        engine.train_step(tokens(2), lambda loss: loss, "diagonal")


# --- taking turns ---------------------------------------------------------------------------------------------------


def walk(side: Callable[[], SideBySide[str]], name: str, places: Sequence[str], events: list[str]) -> Callable[[], str]:
    def job() -> str:
        for place in places:
            side().meet(place)
            events.append(f"{name}{place}")
        return name

    return job


def side_by_side(*walks: tuple[str, Sequence[str]]) -> tuple[list[str], SideBySide[str]]:
    events: list[str] = []
    made: list[SideBySide[str]] = []
    made.append(SideBySide([walk(lambda: made[0], name, places, events) for name, places in walks]))
    return events, made[0]


def test_all_pass_a_place_before_one_goes_on() -> None:
    events, side = side_by_side(("a", "112"), ("b", "112"), ("c", "112"))
    assert side.run() == ["a", "b", "c"]
    assert events == ["a1", "a1", "b1", "b1", "c1", "c1", "a2", "b2", "c2"]


def test_one_that_goes_another_way_holds_nobody_up() -> None:
    events, side = side_by_side(("a", "123"), ("b", ""), ("c", "13"))
    assert side.run() == ["a", "b", "c"]
    assert events == ["a1", "c1", "a2", "c3", "a3"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_failure_ends_all_of_them(error: type[BaseException]) -> None:
    went_on: list[str] = []
    ended: list[str] = []

    def job(name: str) -> Callable[[], None]:
        def run() -> None:
            try:
                side.meet("1")
                side.meet("2")
                went_on.append(name)
                raise error(name)
            finally:
                ended.append(name)

        return run

    side: SideBySide[None] = SideBySide([job("a"), job("b"), job("c")])
    with pytest.raises(error, match="a"):
        side.run()
    assert went_on == ["a"]
    assert ended == ["a", "b", "c"]


def test_an_interrupt_waits_for_the_one_that_runs() -> None:
    main, ended = threading.main_thread(), threading.Event()

    def job() -> None:
        signal.pthread_kill(main.ident, signal.SIGINT)
        for _ in range(200):  # long after the main thread was woken
            torch.randn(100, 100) @ torch.randn(100, 100)
        ended.set()

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            SideBySide([job]).run()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ended.is_set()


def test_without_a_thread_for_each_none_is_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    _, side = side_by_side(("a", "12"), ("b", "12"), ("c", "12"), ("d", "12"))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        side.run()
    for thread in begun:
        thread.join(10.0)
        assert not thread.is_alive()


def test_a_failure_leaves_nothing_alive() -> None:
    held = torch.zeros(1)
    alive = weakref.ref(held)

    def job(value: torch.Tensor) -> None:
        raise ValueError(value.shape)

    side = SideBySide([partial(job, held)] * 2)
    del held
    gc.disable()
    try:
        with pytest.raises(ValueError):
            side.run()
        del side
        assert alive() is None
    finally:
        gc.enable()
