"""An engine with one budget for both tiers, on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sharing
from ranks import call, run_in_turn, run_ranks
from runs import Run, disk, tiny, tokens, train

from tierstore.config import TierConfig
from tierstore.errors import BudgetError
from tierstore.train.engine import Engine


@pytest.fixture(scope="module")
def expected() -> Run:
    """Four steps with room for everything."""
    return train(tiny(), tokens(4), TierConfig(gpu_memory="8MiB", cpu_memory="64MiB"), max_grad_norm=1.0)


@pytest.mark.parametrize("memory", ["smallest", "5MiB", "64MiB"])
def test_it_trains_as_with_two_budgets(memory: str, expected: Run, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="cpu_memory of 1 B is too small") as refusal:
        Engine(tiny(), disk(tmp_path, cpu_memory=1), max_grad_norm=1.0)
    assert "gpu_memory" not in str(refusal.value)
    if memory == "smallest":
        memory = re.findall(r"fits is (\d+) B", str(refusal.value))[0]
    train(tiny(), tokens(4), disk(tmp_path, cpu_memory=memory), max_grad_norm=1.0).check_equal(expected)


def test_a_store_goes_on_with_one_budget_or_two(expected: Run, tmp_path: Path) -> None:
    two, one = ({"gpu_memory": "2MiB", "cpu_memory": "3MiB"}, {"cpu_memory": "5MiB"})
    losses = []
    for batches, memory in zip((tokens(4)[:1], tokens(4)[1:3], tokens(4)[3:]), (two, one, two)):
        run = train(tiny(), batches, disk(tmp_path, **memory), max_grad_norm=1.0, resume="auto")
        losses += run.losses
    assert losses == expected.losses
    assert all(weight.equal(run.weights[name]) for name, weight in expected.weights.items())


def test_a_gpu_tier_that_is_told_holds_what_was_to_be_read(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as refusal:
        Engine(tiny(blocks=6), disk(tmp_path, cpu_memory=1), max_grad_norm=1.0)
    least = re.findall(r"fits is (\d+) B", str(refusal.value))[0]
    tiers = disk(tmp_path, cpu_memory=least)
    with (
        Engine(tiny(blocks=6), tiers, max_grad_norm=1.0) as engine,
        pytest.raises(BudgetError) as refusal,
        engine.gathered("blocks"),
    ):
        pass
    gpu_memory = re.findall(r"give a gpu_memory of (\d+) B", str(refusal.value))[0]
    tiers = disk(tmp_path, cpu_memory=least, gpu_memory=gpu_memory)
    with Engine(tiny(blocks=6), tiers, max_grad_norm=1.0, resume="must") as engine, engine.gathered("blocks"):
        assert engine.model.blocks[5].up.weight.abs().max() > 0


def test_no_memory_beside_it_is_taken() -> None:
    with Engine(tiny(), TierConfig(cpu_memory="16MiB"), update="step") as engine:
        placement = engine.placement
    assert placement.gpu_weight_bytes >= sum(need.device_bytes for need in placement.groups)
    taken = placement.gpu_weight_bytes + placement.gpu_gradient_bytes + placement.pools.total_bytes
    assert taken <= 16 * 2**20


def test_ranks_train_as_with_two_budgets(tmp_path: Path) -> None:
    model = {"blocks": 5}
    two = call(None, 3, model=model, memory={"gpu_memory": "4MiB", "cpu_memory": "24MiB"})
    one = [call(f"{tmp_path}/{m}", 3, model=model, memory={"cpu_memory": m}) for m in ("4500KiB", "24MiB")]
    expected, *others = run_in_turn(3, sharing.train, [two, *one])
    for found in others:
        assert [rank["losses"] for rank in found] == [rank["losses"] for rank in expected]
        assert [rank["norms"] for rank in found] == [rank["norms"] for rank in expected]


def test_ranks_with_unequal_memory_have_equal_gpu_tiers(tmp_path: Path) -> None:
    """The order of fetches depends on the size of the GPU tier, and must be the same at all ranks."""
    memories = {"less": ["4500KiB", "4500KiB"], "more": ["24MiB", "24MiB"], "unequal": ["24MiB", "4500KiB"]}
    calls = [call(f"{tmp_path}/{name}", memory) for name, memory in memories.items()]
    less, more, unequal = run_in_turn(2, sharing.divide, calls)
    assert less[0] < more[0]
    assert unequal == less


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_the_smallest_memory_that_ranks_are_told_fits(codec: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="smallest that fits is") as refused:
        run_ranks(2, sharing.divide, f"{tmp_path}/none", ["1", "1"], codec=codec)
    least = str(max(map(int, re.findall(r"fits is (\d+) B", str(refused.value)))))  # the ranks' parts are not equal
    assert run_ranks(2, sharing.divide, f"{tmp_path}/least", [least, least], codec=codec)[0] > 0
