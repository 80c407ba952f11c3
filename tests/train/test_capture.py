"""What a generation holds beside weights and moments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import Way, opened

from tierstore.train.capture import plain, with_tensors

WAY = Way()

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


class Holder:
    """A state that is changed in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"array": np.zeros(3), "tensor": torch.zeros(3), "list": [0], "pair": (1, 2.5)}

    def count(self) -> None:
        self.state["array"] += 1
        self.state["tensor"] += 1
        self.state["list"][0] += 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def test_what_is_captured_is_a_copy() -> None:
    holder = Holder()
    captured = plain(holder.state_dict())
    holder.count()
    found = with_tensors(captured)
    assert not found["array"].any()
    assert not found["tensor"].any()
    assert found["list"] == [0]
    assert found["pair"] == (1, 2.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool])
def test_tensors_come_back_as_they_were(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.5], [-2.0, float("inf")]]).to(dtype)
    found = with_tensors(plain({"nested": [tensor]}))["nested"][0]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_registered_before_and_after_the_engine_was_made(tmp_path: Path) -> None:
    early, late = Holder(), Holder()
    with opened(WAY, tmp_path, registered={"early": early}) as run:
        run.engine.register("late", late)
        for _ in range(2):
            run.step()
            early.count()
            late.count()
    again, later = Holder(), Holder()
    with opened(WAY, tmp_path, registered={"early": again}) as run:
        assert again.state["list"] == [1]
        assert later.state["list"] == [0]
        run.engine.register("late", later)
        assert later.state["list"] == [1]
        assert later.state["tensor"].tolist() == [1, 1, 1]


def test_what_one_run_does_not_register_the_next_one_still_finds(tmp_path: Path) -> None:
    with opened(WAY, tmp_path, registered={"data": Holder()}) as run:
        run.engine._registered["data"].count()  # type: ignore[attr-defined]
        run.step()
    with opened(WAY, tmp_path, registered={}) as run:
        run.step()
    holder = Holder()
    with opened(WAY, tmp_path, registered={"data": holder}) as run:
        assert run.engine.step_count == 2
        assert holder.state["list"] == [1]
