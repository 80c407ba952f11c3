"""A power cut while two ranks write one store: both go on from the last durable generation, or a newer whole one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from journals import go_on, make_engine, record, states
from power_cuts import StoreDisk, images
from ranks import run_ranks
from tensor_stores import QuickBackend

BEGIN, END, STEPS, GO_ON = 1, 3, 4, 3

pytestmark = pytest.mark.usefixtures("one_thread")


def test_at_any_instant_of_both(tmp_path: Path) -> None:
    """Cuts around every change of either rank, when one may have synced and the other not; a few of them go on."""
    (expected, weights), (expected_1, _) = run_ranks(2, states, STEPS)
    folder = tmp_path / "run"
    folder.mkdir()
    run_ranks(2, record, str(folder), BEGIN)
    (found, first), (_, second) = run_ranks(2, record, str(folder), END)
    journal = sorted(first + second, key=lambda change: change.at_ns)
    assert {change.kind for change in second} >= {"write", "sync"}
    left = list(images(StoreDisk(folder, found), journal))
    begun = []
    for number, image in enumerate(left):  # one rank can open the store of two
        with make_engine(image.restore(tmp_path / str(number)), {"backend": QuickBackend()}) as engine:
            begun.append(engine.step_count)
            assert engine.step_count >= image.known, f"the cut after {image.at} changes lost a published generation"
            for name, weight in engine.state_dict().items():
                assert (weight.numpy() == weights[engine.step_count][name]).all(), (image.at, name)
    assert {begun[0], begun[-1]} == {BEGIN - 1, END}

    chosen = random.Random(0).sample(range(len(left)), GO_ON)
    folders = [str(left[number].restore(tmp_path / f"on {number}")) for number in chosen]
    for told, losses in zip(run_ranks(2, go_on, folders, STEPS), (expected, expected_1)):
        assert told == [(begun[number], losses[begun[number] :]) for number in chosen]
