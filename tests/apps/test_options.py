from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierstore.apps.options import Precision, Preset, TrainOptions, options_of_object
from tierstore.config import Durability, Resume, UpdateSchedule
from tierstore.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": Preset.P25M, "config": Path("x")}, "--preset and --config exclude each other"),
        ({"config": Path("x"), "checkpoint": Path("y")}, "--config and --checkpoint exclude each other"),
        ({"batch": 0}, "--batch must be at least 1, not 0"),
        ({"commit_every": 0}, "--commit-every must be at least 1, not 0"),
        ({"workers": -1}, "--workers must be at least 0, not -1"),
        ({"sequence": 1}, "--sequence must be at least 2, not 1"),
        ({"threads": 0}, "--threads must be at least 1, not 0"),
        ({"lr": float("nan")}, "--lr must be a number that is not negative, not nan"),
        ({"clip": -1.0}, "--clip must be a number that is not negative, not -1.0"),
        ({"weight_decay": float("inf")}, "--weight-decay must be a number"),
        ({"dropout": 1.0}, "--dropout must be at least 0 and below 1, not 1.0"),
        ({"seed": 2**63}, "--seed must be at most 9223372036854775807, not 9223372036854775808"),
        ({"threads": 100000}, "--threads must be at most 1024, not 100000"),
        ({"workers": 100000}, "--workers must be at most 1024, not 100000"),
        ({"update": UpdateSchedule.BACKWARD}, "--update backward applies gradients too early for clipping or fp16"),
        ({"update": UpdateSchedule.BACKWARD, "clip": 0.0, "dtype": Precision.FP16}, "give --clip 0 and another"),
        ({"update": UpdateSchedule.SPECULATIVE}, "the last committed step: it needs --nvme DIR$"),
        ({"update": UpdateSchedule.SPECULATIVE, "nvme": (Path("x"),), "commit_every": 2}, "needs --commit-every 1$"),
        ({"update": UpdateSchedule.SPECULATIVE, "nvme": (Path("x"),), "durability": Durability.NONE},
         "needs --durability commit$"),
        ({"resume": Resume.MUST}, "--resume must needs the store to resume from: give its --nvme DIR"),
    ],
)
def test_what_cannot_work_is_one_sentence(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        TrainOptions(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"nvme": (Path("x"),)}, None),
        ({"nvme": (Path("x"),), "durability": Durability.NONE}, "nothing is kept with --durability none"),
        ({"durability": Durability.NONE}, "nothing is kept without --nvme"),
    ],
)
def test_what_is_kept(values: dict[str, Any], why: str | None) -> None:
    assert TrainOptions(**values).why_nothing_is_kept == why


def test_no_clipping_is_none() -> None:
    assert TrainOptions(clip=0.0).max_grad_norm is None
    assert TrainOptions().max_grad_norm == 1.0


def test_paths_of_a_file_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = options_of_object({"nvme": ["~/run1"], "export": "~/out", "data": "/text"}, "file")
    assert found == {"nvme": (Path("/home/me/run1"),), "export": Path("/home/me/out"), "data": Path("/text")}
