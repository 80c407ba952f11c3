"""Weights and names that a user changes or reads between steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resuming import Way, opened

from tierstore.errors import ConfigError

WAY = Way()
NAME = "blocks.0.up.weight"

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def test_a_parameter_that_is_given_new_data_keeps_it_and_is_still_trained(tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        parameter = run.engine.model.get_parameter(NAME)
        run.step()
        with run.engine.gathered([NAME], modify=True):
            parameter.data = torch.full_like(parameter, 0.5)
        assert run.engine.state_dict()[NAME].eq(0.5).all()
        run.step()
        after = run.engine.state_dict()[NAME]
        assert not after.eq(0.5).all()
        with run.engine.gathered([NAME]):
            assert torch.equal(parameter, after)


@pytest.mark.parametrize("new", [torch.zeros(3), torch.zeros(128, 32, dtype=torch.bfloat16)], ids=["shape", "dtype"])
def test_new_data_that_does_not_fit_is_refused(new: torch.Tensor, tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        before, parameter = run.engine.state_dict()[NAME], run.engine.model.get_parameter(NAME)
        with (
            pytest.raises(ConfigError, match=f"{NAME} was given data of {new.dtype} .* it is torch.float32 .128, 32."),
            run.engine.gathered([NAME], modify=True),
        ):
            parameter.data = new
        assert torch.equal(run.engine.state_dict()[NAME], before)
        run.until(2)
        assert not torch.equal(run.engine.state_dict()[NAME], before)
