"""ZeRO 0 to 3: two ranks give the same bits at every stage, and up to rounding the values of one rank."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import call, run_in_turn, run_ranks
from sharing import (
    ask_for_memory,
    break_a_change_off,
    change,
    change_wrongly,
    fill_without_room,
    litter,
    look,
    norm_of_wide,
    step_inside,
    train,
    view,
)  # fmt: skip

from tierstore.train import filling, partition
from tierstore.train.filling import Piece


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_stages_and_stores_are_one(tmp_path: Path) -> None:
    calls = [call(None, 3, zero=stage, memory={"gpu_memory": "32MiB", "cpu_memory": "64MiB"}) for stage in (0, 1)]
    for stage, gpu_memory in ((2, "32MiB"), (3, "3MiB")):
        memory = {"gpu_memory": gpu_memory, "cpu_memory": "2500KiB"}
        calls.append(call(str(tmp_path / f"{stage}"), 3, zero=stage, memory=memory))
    expected, *others = run_in_turn(2, train, calls)
    assert all(found[0]["bytes"]["nvme_read"] > 0 for found in others[1:])
    for found in others:
        assert all(same(rank["weights"], expected[0]["weights"]) for rank in found)
        assert found[0]["norms"] == expected[0]["norms"]


def test_schedules_are_one(tmp_path: Path) -> None:
    updates = ("step", "backward", "speculative", "forward", "delayed")
    alone = [call(None, 3, update=update, max_grad_norm=None) for update in ("step", "delayed")]
    (step,), (delayed,) = run_in_turn(1, train, alone)
    calls = [call(str(tmp_path / update), 3, update=update, max_grad_norm=None) for update in updates]
    for update, found in zip(updates, run_in_turn(2, train, calls)):
        expected = (delayed if update == "delayed" else step)["weights"]
        for name, weight in found[0]["weights"].items():
            assert np.allclose(weight, expected[name], atol=1e-3), (update, name)
    left = run_ranks(1, look, str(tmp_path / "delayed"), {"gpu_memory": "4MiB", "cpu_memory": "24MiB"})
    assert same(left[0], found[0]["weights"])


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_snapshot_is_of_all_ranks(nodes: int, tmp_path: Path) -> None:
    found = run_ranks(2 * nodes, train, str(tmp_path), 4, kept_at=2, **({"nodes": nodes} if nodes > 1 else {}))
    assert len({rank["kept"] for rank in found}) == nodes
    for rank in found:
        assert not same(rank["kept weights"], rank["weights"])
        left = run_ranks(1, look, rank["kept"], {"gpu_memory": "4MiB", "cpu_memory": "24MiB"})
        assert same(left[0], found[0]["kept weights"])


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """The results of one rank alone in four steps."""
    return run_ranks(1, train, None, 4)[0]


def test_ranks_are_as_one(one: dict[str, Any], tmp_path: Path) -> None:
    found = run_ranks(4, train, str(tmp_path), 3)
    for name, gradient in one["gradients"].items():
        assert np.abs(gradient - found[0]["gradients"][name]).max() <= 1e-6
    losses = np.mean([rank["losses"] for rank in found], axis=0)
    assert np.allclose(losses, one["losses"][:3], rtol=1e-5, atol=0)


def test_a_store_opens_on_any_number_of_ranks(one: dict[str, Any], tmp_path: Path) -> None:
    """It opens with weights that are equal bit for bit, and goes on as one rank that never stopped, up to rounding."""
    memory = {"gpu_memory": "10MiB", "cpu_memory": "4MiB"}  # the chunks that suit one rank are large for four
    written = run_ranks(1, train, str(tmp_path), 1, memory=memory)
    for start, ranks in ((1, 4), (2, 3), (3, 1)):
        options = {"start": start, "resume": "must", "seed": 1, "memory": memory, "looks": True}
        resumed = run_ranks(ranks, train, str(tmp_path), 1, **options)
        assert all(rank["begun_at"] == start for rank in resumed)
        assert all(same(rank["found"], written[0]["weights"]) for rank in resumed)
        assert np.isclose(np.mean([rank["losses"] for rank in resumed]), one["losses"][start], rtol=1e-5, atol=0)
        assert not list(tmp_path.glob("lock*"))
        written = resumed


def test_a_view_that_somebody_holds_of_weights_shows_them() -> None:
    """The losses are the same at every stage, under every schedule and with any memory; all weights are 4.7 MiB."""
    without = call("8MiB", False, zero=2, update="backward")
    options = [("8MiB", 2, "backward"), ("3MiB", 3, "step"), ("3MiB", 3, "backward")]
    calls = [call(memory, True, zero=zero, update=update) for memory, zero, update in options]
    expected, *with_view = run_in_turn(2, view, [without, *calls])
    for found in with_view:
        assert [losses for losses, _ in found] == [losses for losses, _ in expected]
        assert all(shows for _, shows in found)


def test_views_in_garbage_keep_nothing_at_one_rank_that_others_drop() -> None:
    calls = [call("32MiB", is_tidy=False), call("2800KiB", is_tidy=False), call("2800KiB", is_tidy=True)]
    expected, *found = run_in_turn(2, litter, calls)
    assert found == [expected, expected]


def test_views_in_garbage_are_no_lack_of_room() -> None:
    assert litter(0, 1, "1MiB", is_tidy=False) == litter(0, 1, "32MiB", is_tidy=False)


def test_groups_of_many_blocks_have_one_norm_in_all_stages() -> None:
    """Already in the first step, and also where each rank keeps everything."""
    stages = run_in_turn(2, norm_of_wide, [call({"zero": 0}), call({"zero": 3}), call({"nodes": 2})])
    alone = norm_of_wide(0, 1, {})
    assert all(np.isclose(norm, alone, rtol=1e-6, atol=0) for stage in stages for norm in stage)
    assert len({norm for stage in stages for norm in stage}) == 1


def test_a_step_inside_of_gathered_is_the_same_at_each_rank() -> None:
    losses = [rank["losses"] for rank in run_ranks(2, train, None, 2, model={"blocks": 6}, max_grad_norm=None)]
    assert np.allclose(run_ranks(2, step_inside), losses, rtol=1e-6, atol=0)


@dataclass(frozen=True)
class Hybrid:
    """Four ranks on two nodes.

    Attributes:
        losses: of each rank, in three steps.
        half_way: what each rank told after two of these steps.
        stores: as they were then, to be copied.
    """

    losses: list[list[float]]
    half_way: list[dict[str, Any]]
    stores: Path


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    stores = tmp_path_factory.mktemp("half way")
    calls = [call(str(tmp_path_factory.mktemp("hybrid")), 3, nodes=2), call(str(stores), 2, nodes=2)]
    whole, half_way = run_in_turn(4, train, calls)
    return Hybrid([rank["losses"] for rank in whole], half_way, stores)


def test_hybrid_sharding(hybrid: Hybrid, tmp_path: Path) -> None:
    """Two nodes of two ranks: each node has a whole store of its own, and any of them is enough."""
    found = hybrid.half_way
    shutil.copytree(hybrid.stores, tmp_path, dirs_exist_ok=True)
    for rank in found[1:]:
        assert same(rank["weights"], found[0]["weights"])
        assert rank["norms"] == found[0]["norms"]
    for node, ranks in (("0", 1), ("1", 2)):
        opened = run_ranks(ranks, look, str(tmp_path / node), {"gpu_memory": "10MiB", "cpu_memory": "4MiB"})
        assert same(opened[0], found[0]["weights"])
    resumed = run_ranks(4, train, str(tmp_path), 1, start=2, nodes=2, resume="must")
    assert [rank["losses"] for rank in resumed] == [losses[2:] for losses in hybrid.losses]


def test_nodes_go_on_from_the_newest_generation_that_all_have(hybrid: Hybrid, tmp_path: Path) -> None:
    """One node was killed after the other had published a generation: the other gives that generation up."""
    shutil.copytree(hybrid.stores, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1" / "manifest-000000000002.json").unlink()
    resumed = run_ranks(4, train, str(tmp_path), 2, start=1, nodes=2, resume="must")
    assert [rank["begun_at"] for rank in resumed] == [1, 1, 1, 1]
    assert [rank["losses"] for rank in resumed] == [losses[1:] for losses in hybrid.losses]


def test_weights_that_ranks_change_differently_are_those_of_the_first() -> None:
    stages = ({"zero": 0}, {"zero": 1}, {"zero": 3}, {"nodes": 2})
    calls = [call("gathered", **options) for options in stages]
    calls += [call("loaded", **options) for options in stages[::2]]
    calls += [call("0", **options) for options in stages[1::2]]  # only this rank makes a change
    calls += [call("1", **options) for options in stages]
    calls += [call("gathered", zero=3, default=dtype) for dtype in (torch.float64, torch.bfloat16)]
    expected = {"gathered": [1.0], "loaded": [1.0], "0": [1.0], "1": [9.0]}
    for found, ((how,), options) in zip(run_in_turn(2, change, calls), calls):
        assert found == [[expected[how]] * 2] * 2, (how, options)


UNLIKE = {
    "shapes of a state": "FormatError: rank 1: 1 tensors do not fit the model: 0.weight (3, 4), expected (4, 3)",
    "no state": "ConfigError: rank 1: load_state_dict() takes tensors by name, not NoneType",
    "data": "ConfigError: rank 1: parameter 0.weight was given data of torch.float32 (3, 4)",
    "a name": "ConfigError: rank 1: the model has no parameter or module 'none'",
    "others": "ConfigError: what gathered() is to bring: '1' at rank 1, and not at rank 0",
    "newcomers": "GraphError: rank 1: parameter extra.weight came into the model after",
    "for reading": "ConfigError: modify of gathered() is False at rank 1 and True at rank 0",
}
"""What rank 1 does differently when weights are changed, and how all ranks are told."""


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_change_that_one_rank_makes_otherwise_is_refused_at_all_of_them(zero: int) -> None:
    first, second = run_ranks(2, change_wrongly, zero=zero)
    assert first.keys() == second.keys() == UNLIKE.keys() - ({"for reading"} if zero == 0 else set())
    for what in first:
        assert first[what].startswith(UNLIKE[what])
        assert second[what].startswith(UNLIKE[what].replace("rank 1: ", ""))
        assert (first[what][-4:], second[what][-4:]) == ("; []", "; []")  # no weight has changed


@pytest.mark.parametrize(("where", "error"), [("gathered", "KeyError"), ("forward", "GraphError")])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_change_that_is_broken_off_is_undone_or_nothing_is_trained(zero: int, where: str, error: str) -> None:
    """A rank does not know then whether the others have broken off, too, so it asks them for nothing."""
    for told in run_ranks(2, break_a_change_off, where, zero=zero):
        assert told[0] == "loss 6.00"
        assert told[1].startswith("loss 5.99" if zero == 0 else f"a change of weights was broken off by {error}")


def test_small_pieces_of_initial_weights_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, never more than one large piece at once; the rest of a tensor does not keep all of its memory."""
    for module in (filling, partition):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 8)
    sizes = [3, 5, 1, 20, 0, 4, 4, 8]
    values = torch.arange(float(sum(sizes))).split(sizes)
    pieces = (Piece(str(number), 0, one) for number, one in enumerate(values))
    found = list(partition._handfuls(pieces))
    assert [[len(piece.values) for piece in handful] for handful in found] == [[3, 5], [1], [8], [8], [4, 4], [4], [8]]
    assert [piece[:2] for piece in found[3]] == [("3", 8)]
    assert found[4][0].values.untyped_storage().nbytes() == found[4][0].values.nbytes
    assert torch.equal(torch.cat([piece.values for handful in found for piece in handful]), torch.cat(values))


def test_what_ranks_of_a_machine_take_together_is_refused_at_all_of_them() -> None:
    for told in run_ranks(2, ask_for_memory):
        assert all("a run with these budgets takes" in one for one in told)


def test_a_rank_that_cannot_keep_its_weights_ends_all_before_more_are_made() -> None:
    (first, made), (last, _) = run_ranks(2, fill_without_room)
    assert (first, last) == ("rank 1: the disk is full", "the disk is full")
    assert made <= 2
