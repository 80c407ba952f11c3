"""Groups, requests, and what holds for every placement, for the tests of the planner."""

from __future__ import annotations

from hypothesis import strategies as st

from tierstore.alignment import ALIGNMENT
from tierstore.config import Tier
from tierstore.plan.placement import BLOCK, GroupNeed, Placement, Request

MIB = 2**20
STATE_BYTES = {"bf16": 10, "fp16": 12, "fp32": 8}
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def need(elements: int, dtype: str = "bf16", trainable: bool = True, name: str = "h") -> GroupNeed:
    return GroupNeed(name, elements, WEIGHT_BYTES[dtype], STATE_BYTES[dtype] if trainable else 0, trainable)


def request(groups: tuple[GroupNeed, ...], cpu_bytes: int, gpu_bytes: int = 2**36, **options: object) -> Request:
    settings_ = {"nvme": True, "gradients": "held", **options}
    return Request(groups, gpu_bytes, cpu_bytes, **settings_)  # type: ignore[arg-type]


groups_of = st.lists(
    st.builds(
        need,
        elements=st.integers(0, 6 * BLOCK) | st.integers(1, 2000),
        dtype=st.sampled_from(sorted(STATE_BYTES)),
        trainable=st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(tuple)
options_of = st.fixed_dictionaries(
    {
        "nvme": st.booleans(),
        "gradients": st.sampled_from(["held", "streamed", "doubled"]),
        "chunk_bytes": st.none() | st.integers(65536, 4 * MIB),
        "read_weights_with_state": st.booleans(),
        "workers": st.integers(1, 6),
        "micro_batches": st.integers(1, 8),
        "updates_on_gpu": st.booleans(),
    }
)


def check(placement: Placement, asked: Request) -> None:
    """Homes, pools and budgets agree."""
    pools = placement.pools
    on_gpu_bytes = 0
    for size in (pools.resident, pools.gradients, pools.spill, pools.update, pools.weights, pools.device):
        assert size >= 0
        assert size % ALIGNMENT == 0
    assert pools.total_bytes <= asked.cpu_bytes
    copies = 2 if asked.gradients == "doubled" else 1
    resident = gradients = 0
    for group, spec in enumerate(asked.groups):
        assert placement.state_resident_chunks[group] <= placement.chunk_count(group)
        chunks = placement.chunks(group)
        assert [start for start, _ in chunks] == list(range(0, spec.elements, placement.chunk_elements))
        assert sum(stop - start for start, stop in chunks) == spec.elements
        for chunk in range(len(chunks)):
            weights = placement.weight_bytes(group, chunk)
            if placement.weights_home[group] is Tier.CPU:
                resident += weights
            else:
                assert weights <= pools.weights
            if not spec.trainable:
                assert placement.trip_bytes(group, chunk) == 0
                assert placement.gradient_bytes(group, chunk) == 0
                continue
            if placement.is_updated_on_gpu(group):
                assert placement.weights_home[group] is Tier.CPU
                assert placement.trip_bytes(group, chunk) == placement.is_state_resident(group, chunk) == 0
                assert placement.state_bytes(group, chunk) <= pools.device
                on_gpu_bytes += placement.state_bytes(group, chunk) + weights
                continue
            if placement.is_state_resident(group, chunk):
                resident += placement.state_bytes(group, chunk)
            assert placement.trip_bytes(group, chunk) <= pools.update
            if placement.gradient_home[group] is Tier.NVME:
                assert placement.gradient_bytes(group, chunk) <= pools.spill
                if asked.gradients == "streamed":
                    assert placement.gradient_bytes(group, chunk) <= pools.gradients
            else:
                gradients += copies * placement.gradient_bytes(group, chunk)
    assert pools.update <= sum(
        placement.trip_bytes(group, chunk)
        for group in range(len(asked.groups))
        for chunk in range(placement.chunk_count(group))
    )
    assert resident == pools.resident
    assert gradients <= pools.gradients
    if asked.gradients != "streamed":
        assert gradients == pools.gradients
    if on_gpu_bytes:  # then all weights are on the GPU, too
        assert asked.updates_on_gpu
        assert asked.gradients != "doubled"
        assert sum(spec.device_bytes for spec in asked.groups) <= placement.gpu_weight_bytes
    update_bytes = on_gpu_bytes + placement.gpu_apart_bytes
    assert placement.gpu_weight_bytes + placement.gpu_gradient_bytes + update_bytes == asked.gpu_bytes
    assert placement.gpu_bytes == asked.gpu_bytes
    if not asked.nvme:
        assert Tier.NVME not in {*placement.weights_home, *placement.gradient_home}
        assert pools.spill == pools.update == pools.weights == 0
