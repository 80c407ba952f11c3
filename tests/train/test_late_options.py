"""Learning rates and their kin that a loop sets between backward and `step()`, where torch's loops set them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import disk, next_token_loss, tiny, tokens

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ConfigError
from tierstore.train.engine import Engine

STEPS = 7
pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def warm_up(step: int) -> float:
    """A learning rate of its own for each step."""
    return 1e-3 * (step + 2)


def late(step: int) -> float:
    """A rate that changes once updates are applied in backward."""
    return 1e-3 if step < 4 else 3e-3


def losses_of(
    path: Path, rate: Callable[[int], float], first: int = 0, last: int = STEPS, tiers: TierConfig | None = None,
    **options: Any,
) -> tuple[list[float], list[Any]]:  # fmt: skip
    """Losses and reported learning rates; the rate of a step is set after its backward."""
    losses, reported = [], []
    resume = "must" if first else "never"
    with Engine(tiny(), tiers or disk(path), AdamWConfig(lr=1e-3), resume=resume, **options) as engine:
        for step, batch in list(enumerate(tokens(last)))[first:]:
            loss = next_token_loss(engine, batch)
            engine.backward(loss)
            engine.optimizer.param_groups[0]["lr"] = rate(step)
            reported.append(engine.step().lr)
            losses.append(loss.item())
    return losses, reported


@pytest.mark.parametrize("rate", [warm_up, late])
def test_a_speculation_is_redone(rate: Callable[[int], float], tmp_path: Path) -> None:
    expected = losses_of(tmp_path / "forward", rate, update="forward", max_grad_norm=1e6)
    assert losses_of(tmp_path / "speculative", rate, update="speculative", max_grad_norm=1e6) == expected
    assert expected[1] == [[rate(step)] for step in range(STEPS)]


def test_what_nobody_asked_for_waits_for_step(tmp_path: Path) -> None:
    """Also after a resume, bit for bit."""
    expected = losses_of(tmp_path / "forward", warm_up, update="forward")
    assert losses_of(tmp_path / "auto", warm_up) == expected
    parts = [losses_of(tmp_path / "cut", warm_up, *steps) for steps in ((0, 4), (4, STEPS))]
    assert [a + b for a, b in zip(*parts)] == list(expected)


@pytest.mark.parametrize("update", ["backward", "auto"])
def test_what_the_gpu_updates_has_waited_anyway(update: str, tmp_path: Path) -> None:
    tiers = TierConfig(gpu_memory="64MiB", cpu_memory="8MiB", state_on_gpu=True, timeout_s=20.0)
    expected = losses_of(tmp_path, late, update="forward")
    assert losses_of(tmp_path, late, update=update, tiers=tiers) == expected


@pytest.mark.parametrize("update", ["backward", "auto"])
def test_what_was_applied_with_another_rate_is_refused(update: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lr of parameter_groups\[0\] was set after backward\(\) had applied"):
        losses_of(tmp_path, late, update=update)
    with Engine(tiny(), disk(tmp_path), resume="must") as engine:
        assert engine.step_count == 4


def test_setting_it_back_is_the_step_that_it_was(tmp_path: Path) -> None:
    batches, weights = tokens(4), []
    for is_tried in (False, True):
        with Engine(tiny(), disk(tmp_path / str(is_tried)), AdamWConfig(lr=1e-3), update="backward") as engine:
            for batch in batches:
                engine.backward(next_token_loss(engine, batch))
                if is_tried and engine.step_count == 2:
                    engine.optimizer.param_groups[0]["weight_decay"] = 0.5
                    with pytest.raises(ConfigError, match="weight_decay of"):
                        engine.step()
                    engine.optimizer.param_groups[0]["weight_decay"] = AdamWConfig().weight_decay
                engine.step()
            weights.append(engine.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_before_backward_it_may_be_set(tmp_path: Path) -> None:
    with Engine(tiny(), disk(tmp_path), update="backward") as engine:
        for step, batch in enumerate(tokens(4)):
            loss = next_token_loss(engine, batch)
            engine.optimizer.param_groups[0]["lr"] = warm_up(step)
            engine.backward(loss)
            assert engine.step().lr == [warm_up(step)]


@pytest.mark.parametrize("name", ["maximize", "amsgrad"])
def test_what_an_update_does_not_know_is_refused_also_when_it_is_set_later(name: str) -> None:
    with Engine(tiny(blocks=1), TierConfig()) as engine:
        loss = next_token_loss(engine, tokens(1)[0])
        engine.optimizer.param_groups[0][name] = True
        with pytest.raises(ConfigError, match=rf"{name}=True is not supported \(in parameter_groups\[0\]\)"):
            engine.backward(loss)
        engine.optimizer.param_groups[0][name] = False
        engine.backward(loss)
        engine.step()


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
def test_a_number_that_is_set_later_may_be_text_as_in_a_config(name: str) -> None:
    states = []
    for kind in (float, str):
        with Engine(tiny(blocks=1), TierConfig()) as engine:
            engine.optimizer.param_groups[0][name] = kind(0.125)
            engine.backward(next_token_loss(engine, tokens(1)[0]))
            engine.step()
            states.append(engine.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("name", ["max_grad_norm", "update", "loss_scale", "commit_every"])
def test_an_argument_of_the_engine_that_is_set_later_is_refused(name: str) -> None:
    """Else it would silently change nothing."""
    with Engine(tiny(blocks=1), TierConfig()) as engine:
        with pytest.raises(ConfigError, match=f"{name} is an argument of Engine"):
            setattr(engine, name, 1.0)
        engine.own = 1
