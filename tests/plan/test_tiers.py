"""Placement from budgets: homes, pools, chunks, and the smallest budgets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from placements import MIB, check, groups_of, need, options_of, request

from tierstore.alignment import ALIGNMENT, padded
from tierstore.config import Tier
from tierstore.errors import BudgetError, ConfigError
from tierstore.plan import tiers
from tierstore.plan.placement import BLOCK, MAX_CHUNK_BYTES, GroupNeed, Kind, Pools
from tierstore.plan.tiers import place, smallest_budgets
from tierstore.plan.working_set import pools_of


@settings(max_examples=150)
@given(
    groups=groups_of,
    options=options_of,
    spare=st.integers(0, 64 * MIB) | st.integers(0, 20 * ALIGNMENT),
    spare_on_gpu=st.just(0) | st.integers(0, 32 * MIB),
)
def test_every_placement_fits_and_covers_every_lease(
    groups: tuple[GroupNeed, ...], options: dict[str, object], spare: int, spare_on_gpu: int
) -> None:
    gpu_bytes = smallest_budgets(request(groups, 0, **options)).gpu_bytes + spare_on_gpu
    cpu_bytes = smallest_budgets(request(groups, 0, gpu_bytes, **options)).cpu_bytes + spare
    asked = request(groups, cpu_bytes, gpu_bytes, **options)
    check(place(asked), asked)


@settings(max_examples=150)
@given(
    groups=groups_of,
    options=options_of,
    part=st.floats(0.0, 1.1),
    chunk_bytes=st.none() | st.just(65536),
    blocks=st.none() | st.integers(1, 6),
)
@example(groups=(need(4 * BLOCK),), options={}, part=1.05, chunk_bytes=65536, blocks=None)
def test_what_the_gpu_updates_is_beside_all_weights(
    groups: tuple[GroupNeed, ...], options: dict[str, object], part: float, chunk_bytes: int | None, blocks: int | None
) -> None:
    """Also if a chunk is larger than asked for: a chunk is at least one block, and an existing store keeps its size."""
    chunk_elements = None if blocks is None else blocks * BLOCK
    options = options | {"updates_on_gpu": True, "chunk_bytes": chunk_bytes, "chunk_elements": chunk_elements}
    least = smallest_budgets(request(groups, 0, **options)).gpu_bytes
    gpu_bytes = least + int(part * sum(need.device_bytes + need.update_bytes for need in groups))
    asked = request(groups, 2**36, gpu_bytes, **options)
    check(place(asked), asked)


@pytest.mark.parametrize(
    ("room", "expected"),
    [(11, []), (12, [0]), (35, [0, 3]), (36, [0, 3, 4]), (47, [0, 3, 4]), (48, [0, 2]), (60, [0, 2, 3])],
)
def test_the_gpu_updates_the_first_groups_that_fit_beside_all_weights(room: int, expected: list[int]) -> None:
    """To update a group there takes 12 B more per element; the third group is three times as large."""
    groups = (need(BLOCK), need(BLOCK, trainable=False), need(3 * BLOCK), need(BLOCK), need(BLOCK))
    gpu_bytes = (14 + 12 + 6 + room) * BLOCK  # all weights, two of the largest gradient, and the weights of a chunk
    placement = place(request(groups, 2**30, gpu_bytes, updates_on_gpu=True))
    found = [group for group in range(5) if placement.is_updated_on_gpu(group)]
    assert found == expected


def test_a_step_fills_of_the_gpu_tier_what_there_is_of_the_model() -> None:
    """Besides weights: the largest gradient, which is not that of the frozen group, and what the GPU updates."""
    groups = (need(BLOCK), need(5 * BLOCK, trainable=False), need(3 * BLOCK))
    few, enough = place(request(groups, 2**30, 20 * BLOCK)), place(request(groups, 2**30, 2**30))
    assert few.gpu_weight_bytes < 18 * BLOCK < enough.gpu_weight_bytes
    assert few.gpu_filled_bytes == few.gpu_weight_bytes + 6 * BLOCK
    assert enough.gpu_filled_bytes == (18 + 6) * BLOCK
    updated = place(request(groups, 2**30, 2**30, updates_on_gpu=True))
    assert updated.gpu_filled_bytes == (18 + 6 + 4 * 12 + 6) * BLOCK


@pytest.mark.parametrize("gradients", ["held", "streamed"])
def test_hundreds_of_groups_take_no_more_tries_than_a_few(gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (need(30 * BLOCK), *[need(BLOCK), need(2 * BLOCK)] * 150)
    tries = 0

    def counted(*arguments: Any) -> Pools:
        nonlocal tries
        tries += 1
        return pools_of(*arguments)

    monkeypatch.setattr(tiers, "pools_of", counted)
    gpu_bytes = smallest_budgets(request(groups, 0, gradients=gradients)).gpu_bytes
    cpu_bytes = {"held": 800, "streamed": 400}[gradients] * 2 * BLOCK
    placement = place(request(groups, cpu_bytes, gpu_bytes, gradients=gradients))
    assert 50 < placement.weights_home.count(Tier.CPU) < len(groups) - 50
    assert tries < 250


def test_weights_alone_need_cpu_memory_where_the_gpu_updates() -> None:
    groups = (need(10 * BLOCK),) * 3
    least = smallest_budgets(request(groups, 0, 2**30, updates_on_gpu=True, nvme=False)).cpu_bytes
    assert least == 3 * 20 * BLOCK + 10 * BLOCK  # and the state of one chunk in transit
    assert place(request(groups, least, 2**30, updates_on_gpu=True, nvme=False)).updates_in_memory
    assert smallest_budgets(request(groups, 0, 2**30, nvme=False)).cpu_bytes == 3 * 140 * BLOCK
    # With a disk even the weights need no CPU memory; then the GPU updates nothing.
    less = smallest_budgets(request(groups, 0, 2**30, updates_on_gpu=True)).cpu_bytes
    assert less < least
    assert Tier.GPU not in place(request(groups, less, 2**30, updates_on_gpu=True)).gradient_home


def test_where_cpu_memory_holds_not_all_weights_the_gpu_updates_fewer_groups() -> None:
    groups = (need(40 * BLOCK),) * 12
    counts = []
    for mib in (100, 60, 40, 20):
        placement = place(request(groups, mib * MIB, 2**30, updates_on_gpu=True, chunk_bytes=2 * MIB))
        counts.append(sum(placement.is_updated_on_gpu(group) for group in range(12)))
        assert list(map(placement.is_updated_on_gpu, range(counts[-1]))) == [True] * counts[-1], "the first ones"
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 12
    assert 0 < counts[-1] < counts[1] < 12


@settings(max_examples=100)
@given(groups=groups_of, options=options_of)
def test_the_smallest_budgets_work_and_one_page_less_fails(
    groups: tuple[GroupNeed, ...], options: dict[str, object]
) -> None:
    gpu_bytes = smallest_budgets(request(groups, 0, **options)).gpu_bytes
    smallest = smallest_budgets(request(groups, 0, gpu_bytes, **options))
    asked = request(groups, smallest.cpu_bytes, smallest.gpu_bytes, **options)
    check(place(asked), asked)
    if smallest.cpu_bytes:
        with pytest.raises(BudgetError, match=rf"cpu_memory.* {smallest.cpu_bytes} B"):
            place(request(groups, smallest.cpu_bytes - ALIGNMENT, smallest.gpu_bytes, **options))
    if smallest.gpu_bytes:
        with pytest.raises(BudgetError, match=rf"gpu_memory.* {smallest.gpu_bytes} B"):
            place(request(groups, smallest.cpu_bytes, smallest.gpu_bytes - 1, **options))


def test_smallest_cpu_budget_on_disk_is_one_block_of_each_pool() -> None:
    groups = (need(100 * BLOCK),) * 3
    # staging 2 B, trip 10 + 2 + 2 B, spill 2 B per element of one block
    assert smallest_budgets(request(groups, 0)).cpu_bytes == BLOCK * (2 + 14 + 2)
    # and 2 B more for a streamed gradient in transit, which is spilled only if it cannot be used at once
    assert smallest_budgets(request(groups, 0, gradients="streamed")).cpu_bytes == BLOCK * (2 + 14 + 2 + 2)


def test_smallest_budget_of_one_small_group_is_everything_resident() -> None:
    assert smallest_budgets(request((need(1000),), 0)).cpu_bytes == padded(10000) + 2 * padded(2000)


def test_smallest_gpu_budget_is_the_acquired_groups_and_one_gradient() -> None:
    groups = (need(BLOCK), need(3 * BLOCK), need(5 * BLOCK, trainable=False))
    assert smallest_budgets(request(groups, 0)).gpu_bytes == 2 * 5 * BLOCK + 2 * 3 * BLOCK
    assert smallest_budgets(request(groups, 0, acquired_bytes=2 * 8 * BLOCK)).gpu_bytes == 2 * 8 * BLOCK + 2 * 3 * BLOCK


def test_without_nvme_the_error_names_what_everything_needs() -> None:
    groups = (need(10 * BLOCK, "fp32"),) * 2
    everything = 2 * 10 * BLOCK * (4 + 8 + 4)
    with pytest.raises(BudgetError, match=f"{everything} B .*nvme"):
        place(request(groups, everything - ALIGNMENT, nvme=False))
    assert place(request(groups, everything, nvme=False)).pools.resident == 2 * 10 * BLOCK * 12


def test_plenty_of_memory_keeps_everything_in_it() -> None:
    groups = (need(100 * BLOCK), need(7, trainable=False), need(3 * BLOCK + 1))
    placement = place(request(groups, 2**31))
    assert set(placement.weights_home) == set(placement.gradient_home) == {Tier.CPU}
    assert placement.state_resident_chunks == (placement.chunk_count(0), 0, placement.chunk_count(2))
    assert placement.pools.update == placement.pools.spill == placement.pools.weights == 0
    assert placement.chunk_elements == MAX_CHUNK_BYTES // 10 // BLOCK * BLOCK


def test_without_a_disk_there_are_fewer_chunks_and_most_of_one_size() -> None:
    groups = (need(300 * BLOCK), *(need(469 * BLOCK - 7) for _ in range(48)))
    plenty = 2**35
    placement = place(request(groups, plenty, plenty, nvme=False))
    counts = [placement.chunk_count(group) for group in range(len(groups))]
    assert 150 < sum(counts) < 250
    first, *_, last = placement.chunks(1)
    assert first[1] - first[0] - (last[1] - last[0]) < 4 * BLOCK
    assert sum(place(request(groups, plenty, plenty)).chunk_count(g) for g in range(len(groups))) > 400
    assert place(request(groups, plenty, plenty, nvme=False, chunk_bytes=MIB)).chunk_elements * 10 <= MIB
    few = (need(10 * BLOCK),) * 8
    assert place(request(few, plenty, plenty, nvme=False)).chunk_elements == 10 * BLOCK


def test_chunks_are_larger_where_the_gpu_has_room_for_all_and_none_leaves_it_for_that() -> None:
    groups = (need(300 * BLOCK), *(need(3 * BLOCK) for _ in range(100)))
    all_bytes = 600 * BLOCK * (2 + 10 + 2)
    on_gpu, counts = [], []
    for gpu_bytes in range(all_bytes // 2, 3 * all_bytes // 2, 3 * MIB):
        placement = place(request(groups, 2**35, gpu_bytes, nvme=False, updates_on_gpu=True))
        on_gpu.append(sum(g.elements for g, home in zip(groups, placement.gradient_home) if home is Tier.GPU))
        counts.append(placement.chunk_count(0))
    assert on_gpu == sorted(on_gpu)
    assert on_gpu[0] < on_gpu[-1] == 600 * BLOCK
    assert (counts[0], counts[-1]) == (6, 2)
    assert place(request(groups, 2**35, 2 * all_bytes, updates_on_gpu=True)).chunk_count(0) == 6, "for a disk"


def test_what_weights_leave_of_a_gpu_is_for_gradients() -> None:
    groups = (need(10 * BLOCK),) * 8
    weights = 8 * 2 * 10 * BLOCK
    budgets = range(weights, 4 * weights, MIB)
    rooms = [place(request(groups, 2**30, gpu_bytes)).gpu_gradient_bytes for gpu_bytes in budgets]
    assert rooms == sorted(rooms)
    assert rooms[0] <= weights // 4
    assert weights < rooms[-1] < 2 * weights, "all of them, and one more that is being made"
    one = place(request(groups, 2**30, 3 * weights, is_one_memory=True))
    assert one.gpu_gradient_bytes == rooms[0], "copies within one memory save nothing"


def test_memory_goes_to_gradients_then_weights_then_state() -> None:
    groups = tuple(need(64 * BLOCK, name=f"h.{index}") for index in range(16))
    model = 16 * 64 * BLOCK
    counts = []
    for cpu_bytes in (64 * MIB, 2 * model, 3 * model, 5 * model, 9 * model):
        placement = place(request(groups, cpu_bytes, gpu_bytes=2 * 6 * 64 * BLOCK))
        counts.append(
            (
                placement.gradient_home.count(Tier.CPU),
                placement.weights_home.count(Tier.CPU),
                sum(placement.state_resident_chunks),
            )
        )
    for (gradients, weights, state), (more_gradients, more_weights, more_state) in itertools.pairwise(counts):
        assert (gradients, weights, state) < (more_gradients, more_weights, more_state)
    for gradients, weights, state in counts:
        assert not weights or gradients == 16
        assert not state or weights == 16


@pytest.mark.parametrize("is_forward", [True, False])
def test_state_is_kept_of_groups_that_are_updated_soonest(is_forward: bool) -> None:
    """With updates in forward the first groups; in backward the first, which forward waits for, and then the last."""
    groups = (need(64 * BLOCK),) * 8
    for memory in (350 * MIB, 390 * MIB):
        asked = request(groups, memory, gpu_bytes=2 * 6 * 64 * BLOCK, read_weights_with_state=is_forward)
        placement = place(asked)
        kept, whole = list(placement.state_resident_chunks), placement.chunk_count(0)
        assert kept[0] == whole
        assert kept[1:] == sorted(kept[1:], reverse=is_forward)
        assert sum(0 < count < whole for count in kept) <= 1
    assert 1 < sum(count == whole for count in kept) < 8


def test_room_for_small_gradients_takes_none_from_weights_that_all_fit() -> None:
    groups = tuple(need(BLOCK, name=f"h.{index}") for index in range(64))
    all_weights, largest = 64 * 2 * BLOCK, 2 * BLOCK
    for spare in (2 * largest, 3 * largest, 20 * largest, 60 * largest):
        placement = place(request(groups, 2**31, gpu_bytes=all_weights + spare))
        assert placement.gpu_weight_bytes >= all_weights
        assert placement.gpu_gradient_bytes >= 2 * largest
    assert placement.gpu_gradient_bytes > 2 * largest
    less = place(request(groups, 2**31, gpu_bytes=all_weights // 2))
    assert 2 * largest <= less.gpu_gradient_bytes <= all_weights // 2 // 8
    frozen = tuple(need(BLOCK, trainable=False) for _ in range(64))
    assert place(request(frozen, 2**31, gpu_bytes=all_weights)).gpu_gradient_bytes == 0


@pytest.mark.parametrize("is_forward", [True, False])
def test_weights_that_the_device_holds_wait_for_state(is_forward: bool) -> None:
    groups = (need(64 * BLOCK),) * 8
    options = {"read_weights_with_state": is_forward}
    all_on_device = place(request(groups, 300 * MIB, **options))
    streamed_through = place(request(groups, 300 * MIB, gpu_bytes=2 * 6 * 64 * BLOCK, **options))
    assert all_on_device.weights_stay
    assert not streamed_through.weights_stay
    assert all_on_device.weights_home.count(Tier.CPU) == 0
    assert sum(all_on_device.state_resident_chunks) > sum(streamed_through.state_resident_chunks)


def test_delayed_gradients_save_half_as_much_so_weights_come_first() -> None:
    groups = (need(64 * BLOCK),) * 8
    placement = place(request(groups, 60 * MIB, gpu_bytes=2 * 6 * 64 * BLOCK, gradients="doubled"))
    assert placement.weights_home.count(Tier.CPU) > 0
    assert placement.gradient_home.count(Tier.CPU) == 0


def test_gradients_that_are_added_to_come_first() -> None:
    groups = (need(64 * BLOCK),) * 8
    options = {"gpu_bytes": 2 * 6 * 64 * BLOCK, "read_weights_with_state": True}
    homes = {}
    for passes in (1, 8):
        placement = place(request(groups, 100 * MIB, micro_batches=passes, **options))
        homes[passes] = (placement.gradient_home.count(Tier.CPU), placement.weights_home.count(Tier.CPU))
    assert homes[1][1] == 8 > homes[1][0], "one pass: a weight is read three times, a gradient moves twice"
    assert homes[8][0] == 8 > homes[8][1]


def test_streamed_gradients_that_are_added_to_are_worth_memory() -> None:
    groups = (need(64 * BLOCK),) * 8
    homes = {}
    for passes in (1, 2):  # the GPU has room for seven groups: two for gradients, two for weights in transit
        asked = request(groups, 100 * MIB, gpu_bytes=2 * 7 * 64 * BLOCK, gradients="streamed", micro_batches=passes)
        placement = place(asked)
        homes[passes] = (placement.gradient_home.count(Tier.CPU), placement.weights_home.count(Tier.CPU))
    assert homes[1] == (0, 8)
    assert homes[2][0] == 8 > homes[2][1], "a pass writes a gradient and reads it, and fetches only some of the weights"


@pytest.mark.parametrize("gradients", ["held", "streamed"])
def test_weights_come_before_state_as_long_as_some_are_fetched(gradients: str) -> None:
    groups = (need(64 * BLOCK),) * 16
    placement = place(request(groups, 400 * MIB, gpu_bytes=2 * 15 * 64 * BLOCK, gradients=gradients))
    assert placement.weights_home.count(Tier.CPU) == 16


@pytest.mark.parametrize("cpu_mib", [8, 16, 64, 256, 1024, 4096])
def test_chunks_shrink_until_four_trips_fit(cpu_mib: int) -> None:
    groups = (need(500 * BLOCK),) * 20
    placement = place(request(groups, cpu_mib * MIB, gpu_bytes=2 * 3 * 500 * BLOCK))
    largest_trip = max(placement.trip_bytes(group, 0) for group in range(20))
    assert placement.pools.update >= 4 * largest_trip
    assert placement.chunk_elements % BLOCK == 0
    if cpu_mib >= 4096:  # where the trips of all workers take little memory even with the largest chunks
        assert placement.chunk_elements * 10 > MAX_CHUNK_BYTES - 10 * BLOCK
    elif cpu_mib == 1024:  # larger chunks would take memory from state, so that more bytes move
        assert 16 * MIB - 10 * BLOCK < placement.chunk_elements * 10 <= 16 * MIB
    else:
        assert placement.chunk_elements < MAX_CHUNK_BYTES // 10 // BLOCK * BLOCK


def test_chunk_bytes_bounds_the_largest_kind_but_never_below_a_block() -> None:
    groups = (need(100 * BLOCK, "fp16"),)
    assert place(request(groups, 2**31, chunk_bytes=2**16)).chunk_elements == BLOCK
    assert place(request(groups, 2**31, chunk_bytes=3 * 12 * BLOCK + 5)).chunk_elements == 3 * BLOCK


def test_streamed_gradients_get_whole_groups_when_there_is_room() -> None:
    groups = (need(64 * BLOCK),) * 8
    one = 64 * BLOCK * 2
    placement = place(request(groups, 256 * MIB, gpu_bytes=2 * 6 * 64 * BLOCK, gradients="streamed"))
    assert placement.pools.gradients >= 2 * one


def test_gpu_budget_doubles_the_gradient_only_when_weights_lack_nothing() -> None:
    groups = (need(10 * BLOCK),) * 10
    one = 20 * BLOCK
    assert place(request(groups, 2**30, gpu_bytes=4 * one)).gpu_gradient_bytes == one
    assert place(request(groups, 2**30, gpu_bytes=5 * one)).gpu_gradient_bytes == 2 * one
    assert place(request(groups, 2**30, gpu_bytes=5 * one)).gpu_weight_bytes == 3 * one


def test_usage_counts_every_byte_once_per_home() -> None:
    groups = (need(3 * BLOCK), need(1000, "fp32"), need(2 * BLOCK, trainable=False))
    placement = place(request(groups, 6 * MIB, gpu_bytes=13 * BLOCK))
    rows = {(row.kind, row.tier): row.bytes for row in placement.usage()}
    below_gpu = (Tier.CPU, Tier.NVME)
    assert sum(rows.get((Kind.STATE, tier), 0) for tier in below_gpu) == 30 * BLOCK + padded(8000)
    assert sum(rows.get((Kind.WEIGHTS, tier), 0) for tier in below_gpu) == 10 * BLOCK + padded(4000)
    assert sum(rows.get((Kind.GRADIENTS, tier), 0) for tier in below_gpu) == 6 * BLOCK + padded(4000)
    assert rows[Kind.WEIGHTS, Tier.GPU] <= placement.gpu_weight_bytes
    assert all(row.bytes and row.groups for row in placement.usage())


def test_a_frozen_group_has_no_state() -> None:
    with pytest.raises(ConfigError, match="frozen"):
        GroupNeed("h", 10, 2, 10, trainable=False)
    with pytest.raises(ConfigError, match="impossible"):
        GroupNeed("h", -1, 2, 10, trainable=True)


def test_a_chunk_that_does_not_exist_is_an_index_error() -> None:
    placement = place(request((need(3 * BLOCK),), 2**30))
    with pytest.raises(IndexError, match="1 chunks"):
        placement.chunk(0, 1)
