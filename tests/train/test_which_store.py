"""Which directories several ranks may name, and which generations of their stores belong to one run."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import Outcome, outcomes_of, run_ranks
from sharing import drawn, placed, train, train_apart, train_replicas

from tierstore.config import Durability, Resume
from tierstore.store.manifest import digest
from tierstore.store.manifest_files import COMMIT
from tierstore.store.names import UNFINISHED
from tierstore.train import opening, partition

STEPS = 2
TRAIN = partial(train, model={"blocks": 1})
TRAIN_NODES = partial(TRAIN, nodes=2, resume="auto")


def nodes(directory: Path, steps: int = STEPS, **options: Any) -> list[dict[str, Any]]:
    """Two nodes of one rank, each with a whole store of its own."""
    length = {"until": steps} if steps else {"steps": 0}
    return run_ranks(2, TRAIN_NODES, str(directory), **length, **options)


def refusals(directory: Path, resume: str = "auto") -> list[str]:
    """The last line of the error of each node."""
    return [last_line(one) for one in outcomes_of(2, partial(TRAIN_NODES, resume=resume), str(directory))]


def last_line(outcome: Outcome) -> str:
    return (outcome.error or "nothing was refused").splitlines()[-1]


def forget_commits(store: Path) -> None:
    """Make the manifests as an older release wrote them."""
    for path in store.glob("manifest-*.json"):
        body = json.loads(path.read_bytes().rpartition(b"\n")[0])
        del body["captured"][COMMIT]
        data = json.dumps(body).encode()
        path.write_bytes(data + b"\n" + digest(data).encode())


def test_stores_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    """Their generations have the same numbers."""
    for seed, name in enumerate("ab"):
        nodes(tmp_path / name, seed=seed)
    shutil.rmtree(tmp_path / "a" / "1")
    (tmp_path / "b" / "1").rename(tmp_path / "a" / "1")
    for said in refusals(tmp_path / "a"):
        assert "no generation in common (by number, at rank 0 1, 2; rank 1 1, 2): they are of" in said
        assert "copy the directories of the one to go on from to all other nodes" in said


def test_a_node_that_went_on_alone(tmp_path: Path) -> None:
    """A node that repeats a step alone goes back to the generation that both have; after more steps there is none."""
    nodes(tmp_path)
    run_ranks(1, TRAIN, str(tmp_path / "0"), until=STEPS, resume="previous")
    assert [rank["begun_at"] for rank in nodes(tmp_path)] == [STEPS - 1] * 2
    run_ranks(1, TRAIN, str(tmp_path / "0"), until=STEPS + 2, resume="auto")
    assert all("rank 0 3, 4; rank 1 1, 2" in said for said in refusals(tmp_path))
    shutil.rmtree(tmp_path / "1")  # a new disk
    for resume in ("auto", "previous"):
        assert all("rank 0 3, 4; rank 1 none" in said for said in refusals(tmp_path, resume=resume))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    one, other = nodes(tmp_path, STEPS + 3)
    assert one["begun_at"] == STEPS + 2
    assert all((other["weights"][name] == weight).all() for name, weight in one["weights"].items())


@pytest.mark.parametrize("tells_rank", [True, False])
def test_the_ranks_of_a_copied_store_draw_numbers_of_their_own(tells_rank: bool, tmp_path: Path) -> None:
    begun = run_ranks(4, drawn, str(tmp_path), 2, tells_rank)
    assert run_ranks(4, drawn, str(tmp_path), 2) == begun
    shutil.rmtree(tmp_path / "1")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    copied = run_ranks(4, drawn, str(tmp_path), 2)
    assert copied[:2] == begun[:2]
    assert len({*copied}) == (4 if tells_rank else 2)


def test_stores_of_an_older_release_open(tmp_path: Path) -> None:
    nodes(tmp_path)
    for node in "01":
        forget_commits(tmp_path / node)
    assert [rank["begun_at"] for rank in nodes(tmp_path, STEPS + 1)] == [STEPS] * 2


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of a run that has made no step."""
    directory = tmp_path_factory.mktemp("begun")
    nodes(directory, steps=0)
    return directory


def lose_first(stores: Path, *, is_marked: bool = True) -> None:
    """As if node 1 was killed before it published generation 0, and node 0 afterwards."""
    for node in "01" if is_marked else "1":
        (stores / node / UNFINISHED).touch()
    manifest = stores / "1" / "manifest-000000000000.json"
    manifest.rename(f"{manifest}.tmp")


@pytest.mark.parametrize("has_files", [True, False])
def test_a_run_that_was_killed_while_nodes_published_the_first_generation(
    has_files: bool, begun: Path, tmp_path: Path
) -> None:
    """There is nothing to go on from, and nothing to lose."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    lose_first(tmp_path)
    if not has_files:  # publishing failed, and the node took away what it had made
        shutil.rmtree(tmp_path / "1")
    one, other = nodes(tmp_path, seed=1)
    assert one["begun_at"] == other["begun_at"] == 0
    assert one["losses"] == nodes(tmp_path / "new", seed=1)[0]["losses"]
    assert [rank["begun_at"] for rank in nodes(tmp_path, STEPS + 1)] == [STEPS] * 2


def test_only_what_no_run_has_finished_is_given_up(begun: Path, tmp_path: Path) -> None:
    for name, resume, is_marked in (("told", "must", True), ("whole", "auto", False), ("later", "auto", True)):
        stores = tmp_path / name
        shutil.copytree(begun, stores)
        lose_first(stores, is_marked=is_marked)
        if name == "later":  # as if a removal of this store was cut short
            (stores / "0" / "manifest-000000000000.json").rename(stores / "0" / "manifest-000000000001.json")
        before = sorted(path.name for path in (stores / "0").iterdir())
        number = 1 if name == "later" else 0
        assert all(f"rank 0 {number}; rank 1 none" in said for said in refusals(stores, resume=resume)), name
        assert sorted(path.name for path in (stores / "0").iterdir()) == before


def test_the_ranks_of_a_machine_name_the_same_directories(tmp_path: Path) -> None:
    """Otherwise each store would hold only a part. Where nothing is kept of a store, each rank may name its own."""
    run_ranks(2, train_apart, str(tmp_path), durability="none")
    for outcome in outcomes_of(2, train_apart, str(tmp_path)):
        said = last_line(outcome)
        assert f"nvme is {tmp_path}/1 at rank 1 and {tmp_path}/0 at rank 0" in said
        assert "give all ranks of a machine the same directories" in said


def test_a_store_is_of_one_machine(tmp_path: Path) -> None:
    for outcome in outcomes_of(2, partial(train_apart, has_hosts=True), str(tmp_path)):
        assert "ranks 0 and 1 are on two machines" in last_line(outcome)
        assert "device_mesh=init_device_mesh" in last_line(outcome)


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_replicas_on_one_machine_have_stores_of_their_own(durability: str, tmp_path: Path) -> None:
    """In one store they would write over each other."""
    for outcome in outcomes_of(2, partial(train_replicas, durability=durability), str(tmp_path / "one"), 1):
        said = last_line(outcome)
        assert f"nvme is {tmp_path}/one at ranks 0 and 1, which device_mesh makes two replicas" in said
        assert "give each replica directories of its own" in said
    assert not (tmp_path / "one").exists()


def test_containers_of_one_machine_may_name_their_volumes_alike(tmp_path: Path) -> None:
    assert run_ranks(4, placed, str(tmp_path)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    (tmp_path / "there").mkdir()
    to_come, there = (partition._identity(tmp_path / name) for name in ("to come", "there"))
    assert to_come == partition._identity(tmp_path) != there


def test_a_store_that_goes_before_it_is_locked_holds_nothing(tmp_path: Path) -> None:
    found = iter([[3], []])
    manifests = SimpleNamespace(directory=tmp_path, numbers=lambda *, missing_ok: next(found))
    options = SimpleNamespace(durability=Durability.COMMIT, resume=Resume.NEVER)
    lock = SimpleNamespace(add=lambda directories: None)
    assert opening._numbers(manifests, options, lock) == []  # type: ignore[arg-type]
