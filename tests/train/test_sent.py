"""What ranks send each other, and by which backend."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runs import tiny
from sharing import objects_told

from tierstore.config import TierConfig
from tierstore.errors import ConfigError
from tierstore.train import partition
from tierstore.train.ranks import is_nccl


def test_weights_are_sent_as_they_are_and_only_told_of_as_objects() -> None:
    """A view is pickled with the whole tensor behind it, and a gather of objects brings one from every rank."""
    expected = tiny().state_dict()
    for told, weights in run_ranks(2, objects_told):
        assert max(told) < 2**14
        assert all(np.array_equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("backend", "expected"), [("nccl", True), ("gloo", False), (None, False)])
def test_a_group_may_have_a_backend_for_each_device(backend: str | None, expected: bool) -> None:
    def backend_of(device: torch.device) -> SimpleNamespace:
        if backend is None or device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: backend)

    assert is_nccl(SimpleNamespace(_get_backend=backend_of), torch.device("cuda")) is expected
    assert not is_nccl(SimpleNamespace(_get_backend=backend_of), torch.device("cpu"))


@pytest.mark.parametrize(
    ("zero", "backend", "connections", "is_refused"),
    [(3, "nccl", "1", True), (None, "nccl", "1", True), (2, "nccl", "1", False), (3, "gloo", "1", False),
     (3, "nccl", "8", False)],
)  # fmt: skip
def test_one_queue_of_a_gpu_is_refused_where_gathers_run_beside_reductions(
    zero: int | None, backend: str, connections: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: backend))
    monkeypatch.setattr(partition, "Ranks", lambda *_, **__: SimpleNamespace(group=group, count=2, close=lambda: None))
    monkeypatch.setattr(partition, "Partition", lambda *_: "made")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    refusal = pytest.raises(ConfigError, match=r"=1 gives a GPU one queue .*: unset it, or use zero=2")
    with refusal if is_refused else contextlib.nullcontext():
        assert partition.partition_of(zero, group, None, TierConfig(device="cuda")) == "made"  # type: ignore[arg-type, comparison-overlap]
