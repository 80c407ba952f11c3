"""ZeRO 0 to 3: of two ranks the same bits at every stage, and to rounding those of one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from sharing import look, norm_of_wide, step_inside, train, view


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_stages_and_stores_are_one(tmp_path: Path) -> None:
    expected, *others = (
        run_ranks(2, train, None, 3, zero=stage, memory={"gpu_memory": "32MiB", "cpu_memory": "64MiB"})
        for stage in (0, 1)
    )
    for stage in (2, 3):
        memory = {"gpu_memory": "32MiB" if stage < 3 else "3MiB", "cpu_memory": "2500KiB"}
        others.append(run_ranks(2, train, str(tmp_path / f"{stage}"), 3, zero=stage, memory=memory))
        assert others[-1][0]["bytes"]["nvme_read"] > 0
    for found in others:
        assert all(same(rank["weights"], expected[0]["weights"]) for rank in found)
        assert found[0]["norms"] == expected[0]["norms"]


def test_schedules_are_one(tmp_path: Path) -> None:
    step, delayed = (run_ranks(1, train, None, 3, update=update, max_grad_norm=None) for update in ("step", "delayed"))
    for update in ("step", "backward", "speculative", "forward", "delayed"):
        found = run_ranks(2, train, str(tmp_path / update), 3, update=update, max_grad_norm=None)
        expected = (delayed if update == "delayed" else step)[0]["weights"]
        for name, weight in found[0]["weights"].items():
            assert np.allclose(weight, expected[name], atol=1e-3), (update, name)
    left = run_ranks(1, look, str(tmp_path / "delayed"), {"gpu_memory": "4MiB", "cpu_memory": "24MiB"})
    assert same(left[0], found[0]["weights"])


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """What one rank alone told of five steps."""
    return run_ranks(1, train, None, 5)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_as_one(ranks: int, one: dict[str, Any], tmp_path: Path) -> None:
    found = run_ranks(ranks, train, str(tmp_path), 5)
    for name, gradient in one["gradients"].items():
        assert np.abs(gradient - found[0]["gradients"][name]).max() <= 1e-6
    losses = np.mean([rank["losses"] for rank in found], axis=0)
    assert np.allclose(losses, one["losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (4, 3)])
def test_a_store_opens_on_any_number_of_ranks(before: int, after: int, one: dict[str, Any], tmp_path: Path) -> None:
    """What is opened is equal bit for bit. It goes on to rounding as one rank does that never stopped."""
    memory = {"gpu_memory": "10MiB", "cpu_memory": "4MiB"}  # the grid of one rank is coarse for four
    written = run_ranks(before, train, str(tmp_path), 2, memory=memory)
    options = {"start": 2, "resume": "must", "seed": 1, "memory": memory, "looks": True}
    resumed = run_ranks(after, train, str(tmp_path), 2, **options)
    assert all(rank["begun_at"] == 2 for rank in resumed)
    assert all(same(rank["found"], written[0]["weights"]) for rank in resumed)
    losses = np.mean([rank["losses"] for rank in resumed], axis=0)
    assert np.allclose(losses, one["losses"][2:4], rtol=1e-5, atol=0)
    assert not list(tmp_path.glob("lock*"))


@pytest.fixture(scope="module")
def without_view() -> list[list[float]]:
    """The losses of each rank, which are the same at every stage, under every schedule and with any memory."""
    return [losses for losses, _ in run_ranks(2, view, "8MiB", False, zero=2, update="backward")]


@pytest.mark.parametrize(
    ("zero", "memory", "update"), [(2, "8MiB", "backward"), (3, "3MiB", "step"), (3, "3MiB", "backward")]
)  # all weights are 4.7 MiB
def test_a_view_that_somebody_holds_of_weights_shows_them(
    zero: int, memory: str, update: str, without_view: list[list[float]]
) -> None:
    with_view = run_ranks(2, view, memory, True, zero=zero, update=update)
    assert [losses for losses, _ in with_view] == without_view
    assert all(shows for _, shows in with_view)


def test_groups_of_many_blocks_have_one_norm_in_all_stages() -> None:
    """The first one, too, and where nobody has a part."""
    stages = [run_ranks(2, norm_of_wide, options) for options in ({"zero": 0}, {"zero": 3}, {"nodes": 2})]
    alone = norm_of_wide(0, 1, {})
    assert all(np.isclose(norm, alone, rtol=1e-6, atol=0) for stage in stages for norm in stage)
    assert len({norm for stage in stages for norm in stage}) == 1


def test_a_step_inside_of_gathered_is_the_same_at_each_rank() -> None:
    losses = [rank["losses"] for rank in run_ranks(2, train, None, 3, model={"blocks": 6}, max_grad_norm=None)]
    assert np.allclose(run_ranks(2, step_inside), losses, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """The losses of each of four ranks on two nodes, in five steps."""
    return [rank["losses"] for rank in run_ranks(4, train, str(tmp_path_factory.mktemp("hybrid")), 5, nodes=2)]


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The stores after three of these steps, to be copied, and what each rank told."""
    stores = tmp_path_factory.mktemp("half way")
    return stores, run_ranks(4, train, str(stores), 3, nodes=2)


def test_hybrid_sharding(
    hybrid: list[list[float]], half_way: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Two nodes of two ranks: each node has a whole store of its own, and any of them is enough."""
    stores, found = half_way
    shutil.copytree(stores, tmp_path, dirs_exist_ok=True)
    for rank in found[1:]:
        assert same(rank["weights"], found[0]["weights"])
        assert rank["norms"] == found[0]["norms"]
    for node, ranks in (("0", 1), ("1", 2)):
        opened = run_ranks(ranks, look, str(tmp_path / node), {"gpu_memory": "10MiB", "cpu_memory": "4MiB"})
        assert same(opened[0], found[0]["weights"])
    resumed = run_ranks(4, train, str(tmp_path), 2, start=3, nodes=2, resume="must")
    assert [rank["losses"] for rank in resumed] == [losses[3:] for losses in hybrid]


def test_nodes_go_on_from_the_newest_generation_that_all_have(
    hybrid: list[list[float]], half_way: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """A node was killed after the other had published: what that one has more is given up."""
    shutil.copytree(half_way[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "1" / "manifest-000000000003.json").unlink()
    resumed = run_ranks(4, train, str(tmp_path), 2, start=2, nodes=2, resume="must")
    assert [rank["begun_at"] for rank in resumed] == [2, 2, 2, 2]
    assert [rank["losses"] for rank in resumed] == [losses[2:4] for losses in hybrid]
