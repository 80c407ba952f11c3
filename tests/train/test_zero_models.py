"""What must work with several ranks: models, loops, schedules, wrong use."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zero_models
from ranks import call, run_in_turn, run_ranks
from safetensors.torch import load_file
from torch import nn

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:The .grad attribute")]

MANY = ["CalledTwice", "CheckpointedTwice", "SomeFrozen", "Tied", "Unused", "LayersRecomputeParts"]
MORE = ["Checkpointed", "OwnParameters", "Buffers", "Growing", "SkippingTogether", "SkippingRecomputed", "Routed"]
STEPS = 3
CLIPPED: dict[str, Any] = {"steps": STEPS, "max_grad_norm": 0.1}


def check(kind: str, clip: float | None, found: list[dict[str, Any]]) -> None:
    """The results are those of plain torch with the ranks' batches one after the other, and the same at all ranks."""
    expected = zero_models.plain(kind, len(found), steps=STEPS, clip=clip)
    losses = [loss for step in zip(*(rank["losses"] for rank in found)) for loss in step]
    assert np.allclose(losses, expected["losses"], rtol=1e-5, atol=0), kind
    for name, gradient in found[0]["gradients"].items():
        assert np.abs(gradient - expected["gradients"].get(name, 0.0)).max() <= 1e-6, (kind, name)
    for name, weight in found[0]["weights"].items():
        assert "running" in name or np.array_equal(weight, found[1]["weights"][name]), (kind, name)
        assert name not in expected["unused"] or np.array_equal(weight, expected["weights"][name]), (kind, name)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By kind: what each rank tells with everything on disk, as little memory as it needs, and late kernels."""
    calls = [call(kind, str(tmp_path_factory.mktemp(kind)), **CLIPPED, has_gradients=True) for kind in MANY]
    return dict(zip(MANY, run_in_turn(2, zero_models.train_late, calls)))


@pytest.fixture(scope="module")
def in_memory() -> dict[str, list[dict[str, Any]]]:
    options: dict[str, Any] = CLIPPED | {"has_gradients": True, "memory": ("64MiB", "64MiB")}
    return dict(zip(MORE, run_in_turn(2, zero_models.train, [call(kind, **options) for kind in MORE])))


@pytest.mark.parametrize("kind", MANY)
def test_losses_are_those_of_plain_torch(kind: str, on_disk: dict[str, Any]) -> None:
    check(kind, 0.1, on_disk[kind])
    check_memory(kind, on_disk[kind])


def check_memory(kind: str, ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["bytes"]["nvme_read"] > 0
    if kind != "CheckpointedTwice":  # no module announces a gradient that waits for another checkpoint
        assert all(rank["peak"]["gpu"] <= rank["budgets"][0] for rank in ranks), kind


def test_losses_under_other_schedules_are_those_of_plain_torch(tmp_path: Path) -> None:
    kinds = {"CalledTwice": ("backward", None), "SomeFrozen": ("speculative", 0.1)}
    calls = [
        call(kind, str(tmp_path / kind), STEPS, update=update, max_grad_norm=clip)
        for kind, (update, clip) in kinds.items()
    ]
    for (kind, (_, clip)), ranks in zip(kinds.items(), run_in_turn(2, zero_models.train, calls)):
        check(kind, clip, ranks)
        check_memory(kind, ranks)


def test_gradients_that_come_late_at_one_rank_are_added(tmp_path: Path) -> None:
    """Memory is short in the first step, so groups are reduced before all their gradients have come."""
    plenty = {"memory": ("64MiB", "64MiB")}
    calls = [
        call("EitherWay", str(tmp_path / name), zero=2, **CLIPPED, **memory)
        for name, memory in {"tight": {}, "plenty": plenty}.items()
    ]
    found, expected = run_in_turn(2, zero_models.train, calls)
    check("EitherWay", 0.1, found)
    assert np.allclose(found[0]["norms"], expected[0]["norms"], rtol=1e-6, atol=0)


def test_ranks_may_have_other_numbers_of_micro_batches_than_before() -> None:
    """The ranks then know different things of their graphs, but still meet equally often."""
    model = zero_models.make("Stack").eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    expected = []
    for step in zero_models.uneven_batches():
        for mine in step:
            for batch in mine:
                (model(batch).square().mean() / len(mine) / len(step)).backward()
        expected.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    for found in run_in_turn(2, zero_models.uneven, [call(zero) for zero in (0, 3)]):
        assert np.allclose(found, [expected] * 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", MORE)
def test_losses_of_more_models_are_those_of_plain_torch(kind: str, in_memory: dict[str, Any]) -> None:
    check(kind, 0.1, in_memory[kind])


def test_reductions_follow_the_order_of_backward(in_memory: dict[str, Any]) -> None:
    """What is registered last is used first, and its gradient comes last."""
    first, last = in_memory["OwnParameters"]
    assert first["order"] == last["order"]
    assert sorted(first["order"], reverse=True) != first["order"]


def test_stages_are_one(on_disk: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, and on a device whose kernels are late; up to stage 2 ranks may skip different blocks."""
    memory: dict[str, Any] = {"memory": ("32MiB", "32MiB")}
    places = [(None, 0, kind) for kind in ("Unused", "Skipping")]
    places += [(str(tmp_path / kind), 2, kind) for kind in ("CheckpointedTwice", "Skipping")]
    calls = [call(kind, place, zero=zero, **CLIPPED, **memory) for place, zero, kind in places]
    for (_, _, kind), found in zip(places, run_in_turn(2, zero_models.train_late, calls)):
        if kind == "Skipping":
            check(kind, 0.1, found)
            continue
        assert found[0]["norms"] == on_disk[kind][0]["norms"]
        assert same(found[0], on_disk[kind][0])


def test_what_looks_before_the_step_reads_no_weights_of_after_it() -> None:
    """A rank without a part of small groups has no update of its own that waits for the kernels that read them."""
    memory = ("64MiB", "64MiB")
    ways = [(3, "forward"), (1, "step")]
    calls = [call("Small", None, zero=z, update=u, memory=memory, steps=STEPS, evaluates=True) for z, u in ways]
    run_in_turn(2, zero_models.train_late, calls)


def test_ranks_that_go_different_ways_may_look_between_steps() -> None:
    """Prefetch follows the order of no single rank."""
    for one, other in run_in_turn(2, zero_models.looks_in, [call(zero) for zero in (1, 2)]):
        assert one[2:7] == other[2:7]
        assert one[9] == other[9]


def same(one: dict[str, Any], other: dict[str, Any], *but: str) -> bool:
    """Whether losses and weights are equal bit for bit, except the weights named in `but`."""
    names = one["weights"].keys() - set(but)
    return one["losses"] == other["losses"] and all(
        np.array_equal(one["weights"][name], other["weights"][name]) for name in names
    )


def test_a_slow_disk_at_one_rank_changes_nothing(in_memory: dict[str, Any], tmp_path: Path) -> None:
    """Which groups are gathered, and in which order, does not depend on timing."""
    options: dict[str, Any] = CLIPPED | {"update": "speculative", "slow_s": 0.005, "codec": "lz4", "directories": 2}
    calls = [call("Checkpointed", str(tmp_path / f"{depth}"), prefetch_depth=depth, **options) for depth in (0, 3)]
    for found in run_in_turn(2, zero_models.train, calls):
        assert all(same(one, other) for one, other in zip(found, in_memory["Checkpointed"]))


def test_what_a_loop_does(tmp_path: Path) -> None:
    """Accumulation, dropout, evaluation, looking and changing between steps; resumed exactly, exported."""
    calls = [
        call(str(tmp_path / "plain"), [3]),
        call(str(tmp_path / "other"), [3], zero=1, durability="none"),
        call(str(tmp_path / "resumed"), [2, 1], commit_every=3),
    ]
    plain, other, resumed = run_in_turn(2, zero_models.loop, calls)
    assert plain[0]["masks"] != plain[1]["masks"]
    for mine, *others in zip(plain, other, resumed):
        assert same(mine, others[0])
        assert same(mine, others[1], "calls")  # evaluation after a step is no part of its generation
        assert all(mine[what] == one[what] for one in others for what in ("masks", "seen", "rates", "counter"))
    exported = load_file(tmp_path / "other" / "out" / "model.safetensors")
    assert all(np.array_equal(value.numpy(), plain[0]["weights"][name]) for name, value in exported.items())


def test_half_precision(tmp_path: Path) -> None:
    """An overflow at one rank counts at all ranks; all stages have the same norms."""
    options: dict[str, Any] = {"max_grad_norm": 0.5, "overflow_at": 1, "memory": ("16MiB", "32MiB")}
    kinds = [{"dtype": dtype, "zero": zero} for dtype in ("bfloat16", "float16") for zero in (3, 1)]
    calls = [call("Stack", f"{tmp_path}/{number}", STEPS, **kind, **options) for number, kind in enumerate(kinds)]
    found = run_in_turn(2, zero_models.train, calls)
    for dtype, three, one in (("bfloat16", *found[:2]), ("float16", *found[2:])):
        assert three[0]["skipped"] == three[1]["skipped"] == [False, dtype == "float16", False]
        assert repr(one[0]["norms"]) == repr(three[0]["norms"])
        assert dtype == "bfloat16" or same(one[0], three[0])


def test_engines_one_after_another(tmp_path: Path) -> None:
    for told in run_ranks(2, zero_models.one_after_another, 6, str(tmp_path)):
        assert set(told["groups"]) == {1}
        for left in (told["threads"], told["descriptors"]):
            assert left[-1] <= left[2]  # what is made only once was made by the first engines


def test_an_engine_that_is_refused_at_once_leaves_no_thread() -> None:
    for (no_device, *first), (lost, *second) in run_ranks(2, zero_models.refused_at_once):
        assert "cuda:99" in no_device
        assert lost == "a rank did not come"
        assert first == second == [[]]


def test_engines_of_some_ranks() -> None:
    """Process groups of other ranks change nothing."""
    first, second, third = run_ranks(3, zero_models.of_some)
    assert second[:2] == third[:2]
    assert first[:2] == second[2:4]
    assert first[2:] == second[4:] == third[2:]


def test_a_group_is_not_split_off_one_that_has_other_ranks() -> None:
    """NCCL would wait for all ranks of the default group."""
    assert run_ranks(2, zero_models.of_bound) == [([], "cuda:7")] * 2


def test_buffers_that_no_store_keeps_come_from_the_first_rank(tmp_path: Path) -> None:
    """Also when a run is resumed, where each rank gets its own of the others."""
    calls = [call(str(tmp_path)), call(str(tmp_path)), call(str(tmp_path), width=3)]
    new, resumed, other = run_in_turn(2, zero_models.begins_with, calls)
    assert new == [([[10.0, 10.0], [20.0, 20.0]], "")] * 2
    assert resumed == [([[10.0, 10.0], [float(rank)] * 2], "") for rank in range(2)]
    for _, said in other:
        assert said.startswith("the buffers of the model: 'table torch.float32 (3,)' at rank 1, and not at rank 0")


MAKING = {
    "model": "ConfigError: rank 0 trains another model: parameter enter.bias",
    "options": "ConfigError: commit_every is 3 at rank 1",
    "schedule": "ConfigError: update is 'step' at rank 1 and 'forward' at rank 0",
    "scale": "ConfigError: loss_scale is 2.0 at rank 1 and 1.0 at rank 0",
    "buffers": "ConfigError: the buffers of the model: 'table torch.float32 (3,)' at rank 1, and not at rank 0",
    "groups": "ConfigError: lr of parameter_groups[0] is 0.25 at rank 1 and 0.5 at rank 0",
    "no store": "ConfigError: nvme is 'not given' at rank 1 and 'given' at rank 0",
    "budget": "BudgetError: cpu_memory of 1 B is too small",
    "directory": "StorageError: cannot use",
    "full": "StorageFull: write of",
    "resume must": "ConfigError: resume='must': there is no generation",
    "resume previous": "ConfigError: resume='previous': there is no generation",
}
"""What is wrong at the last rank when the engine is made, and how it is told there."""
UNLIKE = {
    "rate": "ConfigError: lr of parameter_groups[0] is 0.5 at rank 1 and 0.001 at rank 0",
    "rate after backward": "ConfigError: lr of parameter_groups[0] is 0.5 at rank 1 and 0.001 at rank 0",
    "all rates": "ConfigError: lr of parameter_groups[0] was set after backward() had applied",
    "rate of replicas": "ConfigError: lr of parameter_groups[0] is 0.5 at rank 1 and 0.001 at rank 0",
    "forgets": "ConfigError: the number of zero_grad() in this step is 1 at rank 1 and 0 at rank 0",
    "freezes": "ConfigError: what was frozen since the engine was made: 'enter.weight' at rank 1, and not at rank 0",
    "gradient": "GraphError: rank 0 is at the gradient of enter.weight and rank 1 at the gradient norm",
    "gradients": "GraphError: rank 0 is at the gradient of enter.weight and rank 1 at the gradient of head",
}
"""What is not the same at all ranks, and how it is told to all of them."""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By what is wrong: what each rank tells."""
    kinds = {**dict.fromkeys([*MAKING, *UNLIKE, "replicas"], "Short"), "nothing": "Stack", "seed": "Stack"}
    calls = [call(what, str(tmp_path_factory.mktemp("wrong")), kind) for what, kind in kinds.items()]
    return dict(zip(kinds, run_in_turn(2, zero_models.wrong, calls)))


@pytest.mark.parametrize("what", MAKING)
def test_what_is_wrong_at_one_rank_ends_the_making_at_all(what: str, wrong: dict[str, Any]) -> None:
    (first, last), expected = wrong[what], MAKING[what]
    assert last["error"].startswith(expected)
    assert expected[: expected.index(":")] in first["error"]
    assert first["seconds"] < zero_models.TIMEOUT_S / 2
    assert not any(name.startswith("manifest") for name in first["files"] + last["files"])


FAILING = ["loader", "forward", "full later", "other blocks", "unsynced", "broken read", "callback"]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """By what fails at one rank: what each rank tells, and what it tells when they go on."""
    stores = [str(tmp_path_factory.mktemp("failed")) for _ in FAILING]
    calls = [call(what, store) for told in zip(FAILING, stores) for what, store in (told, ("resume auto", told[1]))]
    found = run_in_turn(2, zero_models.wrong, calls)
    return {what: found[2 * place : 2 * place + 2] for place, what in enumerate(FAILING)}


@pytest.mark.parametrize(
    ("what", "told", "own"),
    [
        ("loader", "RankLost: rank 0 of 2 waited for the weights of", "ArithmeticError: a bad file"),
        ("forward", "RankLost: rank 0 of 2 waited for ", "ArithmeticError: a bad layer"),
        ("full later", "", "StorageFull: write of"),
        ("other blocks", "GraphError: rank 0 wants the weights of", "GraphError: rank 1 wants the weights of"),
        ("unsynced", "StorageError: rank 1: fdatasync of", ""),
        ("broken read", "", "StorageError: read of"),
    ],
)
def test_an_error_at_one_rank_reaches_all(what: str, told: str, own: str, failed: dict[str, Any]) -> None:
    """At once, not after a timeout; and all ranks go on from one whole generation."""
    (first, last), resumed = failed[what]
    assert first["error"].startswith(told)
    assert last["error"].startswith(own)
    # The others learn of a failed write by the commit, or because the rank then leaves.
    assert re.search("Storage|Graph", first["error"]) or "rank 1 has left" in first["error"]
    assert max(first["seconds"], last["seconds"]) < zero_models.TIMEOUT_S / 2
    assert resumed[0]["begun_at"] <= first["steps"]
    assert [rank["error"] for rank in resumed] == ["", ""]
    assert resumed[0]["norm"] == resumed[1]["norm"]


def test_a_generation_is_one_step_of_all_ranks(wrong: dict[str, Any], failed: dict[str, Any]) -> None:
    """A rank whose callback has failed leaves that commit out, and its next one is of a later step."""
    (first, last), resumed = failed["callback"]
    said = "ConfigError: the ranks would commit different steps as one generation: step 2 at rank 0, step 3 at rank 1"
    assert last["error"].startswith(said)
    assert first["error"].startswith((said, "RankLost: rank 0 of 2 waited for what generation 3 captures"))
    assert max(first["seconds"], last["seconds"]) < zero_models.TIMEOUT_S / 2
    assert [(rank["error"], rank["begun_at"]) for rank in resumed] == [("", 1), ("", 1)]
    assert wrong["nothing"][0]["norm"] != resumed[0]["norm"] == resumed[1]["norm"]  # of other steps


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_that_are_not_as_one_are_told(what: str, wrong: dict[str, Any]) -> None:
    """All ranks are told at once, and none gets data that belongs to another call."""
    for told in wrong[what]:
        assert told["error"].startswith(UNLIKE[what])
        assert told["steps"] == 1
        assert told["seconds"] < zero_models.TIMEOUT_S / 2


def test_weights_come_from_the_first_rank(wrong: dict[str, Any]) -> None:
    same, other = wrong["nothing"], wrong["seed"]
    assert same[0]["norm"] == same[1]["norm"] == other[0]["norm"] == other[1]["norm"]
    assert other[0]["buffers"] == other[1]["buffers"] == [[0.0, 0.0]]


def test_replicas_have_no_store(wrong: dict[str, Any]) -> None:
    for told in wrong["replicas"]:
        assert told["error"].startswith("ConfigError: zero=0 keeps everything at every rank")
