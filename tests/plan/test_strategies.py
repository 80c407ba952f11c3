"""Strategies: bytes per tier as the engine places them, seconds by phase, wear, and what would help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.apps import presets
from tierstore.apps.options import Precision, Preset
from tierstore.apps.preset_sizes import PRESET_FIELDS
from tierstore.config import Tier, TierConfig, UpdateSchedule
from tierstore.plan.advice import changes, cheapest, tokens_per_s
from tierstore.plan.bandwidth import RATE_NAMES, Activity, BandwidthTable, Slowdown
from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer
from tierstore.plan.machine import NODES, Node, node_called, rates_of
from tierstore.plan.memory import Job, Layout, activation_bytes, group_needs
from tierstore.plan.model_size import from_config, from_parameters
from tierstore.plan.placement import Kind
from tierstore.plan.step_time import DRAG_BESIDE_COMPUTING, Link, Work, compute_s, phases_of, step_work
from tierstore.plan.strategies import USABLE, Option, Situation, Strategy, fastest, options_of, request_of, simplest
from tierstore.plan.tiers import place
from tierstore.train.budgets import request_for
from tierstore.train.engine import Engine

MIB = 2**20
TINY = {"model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 2, "vocab_size": 1000, "n_positions": 64}
ONE_LINK = Node(
    name="one link", gpus=8, gpu_bytes=80e9, flop_per_s=400e12, cpu_bytes=2e12, nvme_bytes=30e12,
    rates=rates_of(read=28e9, write=28e9, link=32e9, memory=400e9), links=1, disks=4, peer_bytes_per_s=300e9,
    endurance_bytes=10e15, network_bytes_per_s=50e9,
)  # fmt: skip


def situation(parameters: float = 500e9, schedule: UpdateSchedule = UpdateSchedule.SPECULATIVE) -> Situation:
    job = Job(from_parameters(parameters), batch=8, checkpointing=True)
    return Situation(job, Layout(gpus=8), ONE_LINK, schedule)


@pytest.mark.parametrize("schedule", [UpdateSchedule.BACKWARD, UpdateSchedule.FORWARD, UpdateSchedule.DELAYED])
@pytest.mark.parametrize(("gpu", "cpu"), [(2 * MIB, 4 * MIB), (8 * MIB, 8 * MIB), (64 * MIB, 64 * MIB)])
def test_the_plan_asks_for_what_the_engine_asks_for(schedule: UpdateSchedule, gpu: int, cpu: int) -> None:
    groups = group_needs(Job(from_config(TINY), sequence=64), Layout())
    node = replace(NODES["rtx-4090"], cpu_bytes=cpu / USABLE)
    here = Situation(Job(from_config(TINY), sequence=64), Layout(), node, schedule)
    tiers = TierConfig(
        gpu_memory=gpu, cpu_memory=here.cpu_budget_bytes, nvme=(Path("x"),), state_on_gpu=True
    )
    assert request_of(here, groups, gpu) == request_for(groups, tiers, schedule, None)


def test_bytes_per_tier_are_those_that_the_engine_then_has(tmp_path: Path) -> None:
    """The engine of the real model, within the plan's budgets, holds what the plan says, kind by kind."""
    transformers = pytest.importorskip("transformers")
    fields = {name: value for name, value in TINY.items() if name != "model_type"}
    model = presets.build(transformers.GPT2Config(**fields), Precision.BF16)
    job = Job(from_config(TINY), sequence=64)
    node = replace(NODES["rtx-4090"], gpu_bytes=(activation_bytes(job, Layout()) + 2 * MIB) / USABLE,
                   cpu_bytes=6 * MIB / USABLE)  # fmt: skip
    here = Situation(job, Layout(), node, UpdateSchedule.FORWARD)
    (option,) = options_of(here, [Strategy.ENGINE])
    tiers = TierConfig(gpu_memory=here.gpu_budget_bytes, cpu_memory=here.cpu_budget_bytes, nvme=(tmp_path / "store",))
    with Engine(model, tiers, update="forward") as engine:
        usage = {(row.kind, row.tier): row.bytes for row in engine.placement.usage()}
    assert option.bytes == usage
    assert {tier for _, tier in usage} == set(Tier)  # a split that uses all three


def test_500_billion_parameters_on_one_link() -> None:
    options = {option.strategy: option for option in options_of(situation())}
    chosen = options[Strategy.WEIGHTS_NVME]
    assert chosen.fits
    moved = chosen.read_bytes + chosen.written_bytes
    assert moved == pytest.approx(26 * 500e9, rel=1e-3)
    assert moved / 28e9 == pytest.approx(464, abs=1)
    assert chosen.bytes[Kind.STATE, Tier.NVME] == pytest.approx(5e12, rel=1e-3)  # the master adds 2 B of residual
    forward = chosen.phases[0]
    assert forward.links_s[Link.DISKS] == pytest.approx(1e12 / 28e9, rel=2e-3)  # except for a group that stays
    assert forward.links_s[Link.H2D] == pytest.approx(31.25, rel=1e-3)
    assert chosen.phases[1].links_s[Link.D2H] == pytest.approx(31.25, rel=1e-3)
    assert chosen.step_s == pytest.approx(464.3, rel=0.01)
    assert chosen.bottleneck is Link.DISKS
    assert simplest(options.values()) is chosen
    assert fastest(options.values()) is options[Strategy.ENGINE]


def test_what_does_not_fit_says_where() -> None:
    nothing, on_cpu, *_ = options_of(situation())
    assert nothing.problems == ("each GPU would hold 1.03 TB, 72 GB can be used",)
    assert len(on_cpu.problems) == 2
    assert on_cpu.problems[1].startswith("CPU memory of a node would hold 7 TB, 1.8 TB")
    small = replace(situation(), node=replace(ONE_LINK, nvme_bytes=10e12))
    last = options_of(small, [Strategy.ALL_NVME])[0]
    assert last.problems == ("the disks of a node would hold 13 TB, 10 TB can be used",)
    short = replace(situation(), node=replace(ONE_LINK, nvme_bytes=last.taken[Tier.NVME] - 1000))
    (told,) = options_of(short, [Strategy.ALL_NVME])[0].problems
    assert told.endswith(f" {last.taken[Tier.NVME]:,.0f} B, {last.taken[Tier.NVME] - 1000:,.0f} B can be used")


def test_a_small_model_needs_no_offload() -> None:
    options = options_of(situation(1e9))
    assert simplest(options) is fastest(options) is options[0]
    assert options[0].efficiency > 0.9
    assert options[0].wear_days(1e15) is None


def test_where_the_update_hides() -> None:
    work = {"forward": Work(compute_s=1, read_bytes=28e9), "backward": Work(compute_s=2),
            "update": Work(read_bytes=2 * 28e9)}  # fmt: skip
    seconds = {
        schedule: [phase.seconds for phase in phases_of(work, ONE_LINK, schedule)] for schedule in UpdateSchedule
    }
    assert seconds[UpdateSchedule.STEP] == [1, 2, 2]
    assert seconds[UpdateSchedule.FORWARD] == seconds[UpdateSchedule.AUTO] == [3, 2]
    assert seconds[UpdateSchedule.BACKWARD] == seconds[UpdateSchedule.SPECULATIVE] == [1, 2]
    assert seconds[UpdateSchedule.DELAYED] == [3]


def test_a_commit_is_written_where_the_disks_are_idle() -> None:
    work = {"forward": Work(compute_s=1, read_bytes=28e9), "backward": Work(compute_s=2),
            "update": Work(read_bytes=28e9)}  # fmt: skip
    for schedule in UpdateSchedule:
        plain_s = sum(phase.seconds for phase in phases_of(work, ONE_LINK, schedule))
        for written_s in (0.5, 9.0):  # the disks read for two seconds anyway
            phases = phases_of(work | {"commit": Work(written_bytes=written_s * 28e9)}, ONE_LINK, schedule)
            assert sum(phase.seconds for phase in phases) == pytest.approx(max(plain_s, 2 + written_s))
            assert sum(phase.links_s[Link.DISKS] for phase in phases) == pytest.approx(2 + written_s)
    busy = {name: Work(read_bytes=28e9) for name in ("forward", "backward", "update")}
    phases = phases_of(busy | {"commit": Work(written_bytes=28e9)}, ONE_LINK, UpdateSchedule.STEP)
    assert sum(phase.seconds for phase in phases) == pytest.approx(4)


def test_a_sync_goes_on_where_the_disks_are_idle_and_takes_no_core() -> None:
    work = {"forward": Work(compute_s=1), "backward": Work(compute_s=2),
            "update": Work(read_bytes=28e9, written_bytes=28e9)}  # fmt: skip
    both_ways = (Activity.MATMUL, Activity.READ), (Activity.READ, Activity.MATMUL)
    rates = replace(ONE_LINK.rates, slowdowns=tuple(Slowdown(*pair, 2.0) for pair in both_ways))
    seconds = {
        (sync, schedule): [phase.seconds for phase in phases_of(work, node, schedule)]
        for sync in (None, 14e9, 7e9)
        for node in (replace(ONE_LINK, rates=replace(rates, sync_bytes_per_s=sync)),)
        for schedule in (UpdateSchedule.FORWARD, UpdateSchedule.BACKWARD)
    }
    # The disks transfer for two seconds. Disks and computing slow each other to half, so that nothing is hidden.
    assert seconds[None, UpdateSchedule.FORWARD] == pytest.approx([3, 2])
    assert seconds[None, UpdateSchedule.BACKWARD] == pytest.approx([1, 4])
    for schedule in (UpdateSchedule.FORWARD, UpdateSchedule.BACKWARD):
        assert sum(seconds[14e9, schedule]) == pytest.approx(5)  # two seconds of syncs, and the disks idle for three
        assert sum(seconds[7e9, schedule]) == pytest.approx(2 + 4)


@pytest.mark.parametrize(("strategy", "moved"), [(Strategy.ALL_CPU, 0), (Strategy.WEIGHTS_NVME, 12)])
@pytest.mark.parametrize("every", [1, 4, 50])
def test_what_steps_write_over_before_a_commit_is_synced_once(strategy: Strategy, moved: int, every: int) -> None:
    """As in the step model: all steps between two commits write the same slot."""
    here = replace(situation(100e9, UpdateSchedule.STEP), commit_every=every)
    here = replace(here, node=replace(ONE_LINK, rates=replace(ONE_LINK.rates, sync_bytes_per_s=14e9)))
    (option,) = options_of(here, [strategy])
    assert option.written_bytes == pytest.approx((moved or 12 / every) * 100e9, rel=1e-3)
    assert sum(phase.syncing_s for phase in option.phases) == pytest.approx(12 * 100e9 / 14e9 / every, rel=1e-3)


def test_an_update_after_the_step_hides_behind_nothing() -> None:
    job = Job(from_parameters(7e9), batch=1)
    here = Situation(job, Layout(), NODES["dgx-h100"].with_gpus(1), UpdateSchedule.STEP, commit_every=1000)
    (option,) = options_of(here, [Strategy.STATE_CPU])
    # 14 GB to the GPU and back at 64 GB/s, then 7e9 updates of 26 B at 614.4 GB/s.
    assert [phase.seconds for phase in option.phases] == pytest.approx([0.2188, 0.2188, 0.2962], rel=1e-3)
    (beside,) = options_of(replace(here, schedule=UpdateSchedule.FORWARD), [Strategy.STATE_CPU])
    assert beside.step_s < option.step_s


def test_of_several_micro_batches_one_pass_hides_the_update() -> None:
    work = {"forward": Work(compute_s=4), "backward": Work(compute_s=8), "update": Work(read_bytes=5 * 28e9)}
    single = {"forward": Work(compute_s=1), "backward": Work(compute_s=2), "update": Work(read_bytes=5 * 28e9)}
    seconds = {
        schedule: [phase.seconds for phase in phases_of(work, ONE_LINK, schedule, single)]
        for schedule in UpdateSchedule
    }
    assert seconds[UpdateSchedule.FORWARD] == seconds[UpdateSchedule.AUTO] == [5, 3, 8]
    assert seconds[UpdateSchedule.BACKWARD] == seconds[UpdateSchedule.SPECULATIVE] == [4, 6, 5]
    assert seconds[UpdateSchedule.STEP] == [4, 8, 5]


def test_six_micro_batches_by_hand() -> None:
    job = Job(from_parameters(7e9), batch=1, accumulate=6, checkpointing=True)
    here = Situation(job, Layout(), replace(NODES["rtx-4090"], nvme_bytes=0.0), UpdateSchedule.FORWARD)
    option = options_of(here, [Strategy.STATE_CPU])[0]
    # 7e9 updates of 26 B at 89.6 GB/s; five more forwards and six backwards at 82.5e12 flop/s.
    assert [phase.seconds for phase in option.phases] == pytest.approx([2.031, 5 * 0.375, 6.75], rel=1e-3)
    assert sum(phase.compute_s for phase in option.phases) == pytest.approx(option.compute_s)


@pytest.mark.parametrize(("gpu_bytes", "ranks", "passes"), [(32e9, 1, 1), (16e9, 1, 6), (32e9, 2, 6)])
def test_gradients_of_micro_batches_leave_a_roomy_gpu_once(gpu_bytes: float, ranks: int, passes: int) -> None:
    """With several ranks the gradients of each micro-batch are reduced, and leave the GPU each time."""
    here = situation(7e9, UpdateSchedule.STEP)
    here = replace(here, job=replace(here.job, accumulate=6), layout=Layout(gpus=ranks))
    request = request_of(here, group_needs(here.job, Layout()), int(gpu_bytes))
    placement = place(replace(request, updates_on_gpu=False))
    work = step_work(here.job, here.layout, here.node, placement, here.schedule, 1.0)
    assert work["backward"].d2h_bytes == pytest.approx(ranks * passes * 14e9, rel=0.1)  # 16 GB keep those of three


def test_fp32_weights_are_updated_at_their_own_rate() -> None:
    job = Job(from_parameters(1e9), "fp32")
    node = NODES["rtx-4090"]
    measured = replace(node, rates=replace(node.rates, adam_fp32_elements_per_s=node.rates.adam_elements_per_s / 2))
    slow, other = (
        options_of(Situation(replace(job, dtype=dtype), Layout(), measured), [Strategy.STATE_CPU])[0]
        for dtype in ("fp32", "bf16")
    )
    assert slow.work["update"].optimizer_s == pytest.approx(2 * other.work["update"].optimizer_s)


@pytest.mark.parametrize(
    "layout", [Layout(), *(Layout(*count, zero=zero) for count in ((2, 1), (1, 2)) for zero in (0, 3)),
               Layout(gpus=4, tensor=2), Layout(nodes=2, pipeline=2)],
)  # fmt: skip
def test_cores_update_as_much_whether_the_state_is_called_offloaded_or_not(layout: Layout) -> None:
    job = Job(from_config(PRESET_FIELDS[Preset.P124M]), batch=4, sequence=256)
    node = replace(NODES["laptop"].with_gpus(layout.gpus), rates=CORES)
    nothing, offloaded = options_of(Situation(job, layout, node), [Strategy.NOTHING, Strategy.ALL_CPU])
    # Each rank's part of an offloaded group is rounded up to whole blocks.
    assert nothing.work["update"].optimizer_s == pytest.approx(offloaded.work["update"].optimizer_s, rel=0.03)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])  # timed, and only known by its flop/s
def test_ranks_of_a_node_without_a_gpu_share_its_cores(dtype: str) -> None:
    job = Job(from_config(PRESET_FIELDS[Preset.P124M]), dtype, batch=8, sequence=256)
    node = replace(NODES["laptop"], rates=CORES)
    one, sharing, apart = (
        sum(compute_s(job, layout, node.with_gpus(layout.gpus)))
        for layout in (Layout(), Layout(gpus=4), Layout(nodes=4))
    )
    assert sharing == pytest.approx(4 * apart)
    assert sharing >= 0.999 * one


BLOCK_WORK, HEAD_WORK = LayerWork(1.0, 7e6, 5e4, 9e8), LayerWork(1.0, 4e7, 3e6, 5e9)
CORES = replace(
    NODES["laptop"].rates,
    adam_elements_per_s=1e9,
    layers=(TimedLayer(LayerKind.BLOCK, "bf16", BLOCK_WORK, 0.007, 0.02),
            TimedLayer(LayerKind.HEAD, "bf16", HEAD_WORK, 0.03, 0.1)),
    slowdowns=tuple(Slowdown(*pair, 2.0) for one in (Activity.ADAM, Activity.H2D, Activity.D2H)
                    for pair in ((one, Activity.MATMUL), (Activity.MATMUL, one))),
)  # fmt: skip


def on_cores(rates: BandwidthTable = CORES, *, cpu_bytes: float = 4e9, nvme: bool = True, **changes: Any) -> Option:
    """GPT-2 124M on a machine that computes, copies and updates with the same cores."""
    job = Job(from_config(PRESET_FIELDS[Preset.P124M]), sequence=64)
    node = replace(NODES["laptop"], rates=rates, gpu_bytes=2e9, cpu_bytes=cpu_bytes, nvme_bytes=1e12 if nvme else 0.0)
    return options_of(replace(Situation(job, Layout(), node), **changes), [Strategy.ENGINE])[0]


def test_cores_that_compute_and_update_take_turns() -> None:
    plain = on_cores(nvme=False)
    work = plain.work
    adam_s = 124_439_808 / 1e9
    copied_s = (work["forward"].h2d_bytes + work["backward"].d2h_bytes) / 16e9
    assert work["update"].optimizer_s == pytest.approx(adam_s)
    assert plain.step_s == pytest.approx(plain.compute_s + adam_s + copied_s)
    free = on_cores(replace(CORES, slowdowns=()), nvme=False)  # Adam has a phase of its own even so
    assert free.step_s == pytest.approx(plain.compute_s + adam_s)


def test_norms_of_gradients_take_their_time_in_backward() -> None:
    counted = on_cores(replace(CORES, norm_elements_per_s=2e9), nvme=False)
    assert counted.work["backward"].optimizer_s == pytest.approx(124_439_808 / 2e9)
    assert counted.step_s == pytest.approx(on_cores(nvme=False).step_s + 124_439_808 / 2e9)


def test_a_commit_of_what_lives_in_memory_is_written_beside_the_step() -> None:
    plain, rare = on_cores(nvme=False), on_cores(commit_every=50)
    assert on_cores().written_bytes == pytest.approx(12 * 124_439_808, rel=0.01)
    assert rare.step_s == pytest.approx(plain.step_s, rel=1e-6)
    slow_disk = replace(CORES, write_bytes_per_s=1e9, shared_bytes_per_s=1e9)
    assert on_cores(slow_disk).step_s == pytest.approx(DRAG_BESIDE_COMPUTING * on_cores().written_bytes / 1e9)
    cached = replace(slow_disk, sync_bytes_per_s=0.5e9)
    all_s = on_cores().written_bytes * (1 / 1e9 + 1 / 0.5e9)
    assert on_cores(cached).step_s == pytest.approx(DRAG_BESIDE_COMPUTING * all_s)


@pytest.mark.parametrize("schedule", [UpdateSchedule.FORWARD, UpdateSchedule.STEP])
def test_an_update_after_backward_reads_in_backward_what_its_pool_holds(schedule: UpdateSchedule) -> None:
    option = on_cores(cpu_bytes=0.6e9, schedule=schedule)
    assert option.placement is not None
    pool = option.placement.pools.update
    assert 0 < pool < option.work["update"].read_bytes

    def parts(size: int) -> dict[str, Work]:
        placement = replace(option.placement, pools=replace(option.placement.pools, update=size))
        job, node = Job(from_config(PRESET_FIELDS[Preset.P124M]), sequence=64), replace(NODES["laptop"], rates=CORES)
        return step_work(job, Layout(), node, placement, schedule, 1.0)

    none = parts(0)
    assert option.work == none | {
        "backward": none["backward"] + Work(read_bytes=pool), "update": none["update"] - Work(read_bytes=pool),
    }  # fmt: skip
    assert parts(2**40)["update"].read_bytes == 0
    assert parts(2**40)["backward"].read_bytes == none["backward"].read_bytes + none["update"].read_bytes


def times_as_fast(table: BandwidthTable, disk: float, links: float, compute: float) -> BandwidthTable:
    factors = {"read": 1, "write": 1, "shared": 1, "sync": 1, "h2d": links, "d2h": links}
    rates = {name: rate * factors.get(name.split("_")[0], compute) for name in RATE_NAMES
             if (rate := getattr(table, name)) is not None}  # fmt: skip
    layers = tuple(replace(one, forward_s=one.forward_s / compute, backward_s=one.backward_s / compute)
                   for one in table.layers)  # fmt: skip
    return replace(table, **rates, layers=layers).scaled(disk=disk)


@settings(max_examples=25)
@given(
    faster=st.fixed_dictionaries({name: st.floats(1.0, 8.0) for name in ("disk", "links", "compute")}),
    cpu_bytes=st.sampled_from([0.6e9, 1.2e9, 4e9]), commit_every=st.sampled_from([1, 50]),
    schedule=st.sampled_from([one for one in UpdateSchedule if one is not UpdateSchedule.DELAYED]),
)  # fmt: skip
def test_no_faster_machine_has_a_longer_step(
    faster: dict[str, float], cpu_bytes: float, commit_every: int, schedule: UpdateSchedule
) -> None:
    here = {"cpu_bytes": cpu_bytes, "commit_every": commit_every, "schedule": schedule}
    slow, fast = on_cores(CORES, **here), on_cores(times_as_fast(CORES, **faster), **here)
    assert slow.phases
    assert fast.step_s <= slow.step_s * (1 + 1e-9)


def test_wear() -> None:
    chosen = options_of(situation(), [Strategy.WEIGHTS_NVME])[0]
    assert chosen.written_bytes == pytest.approx(6e12, rel=1e-3)
    days = chosen.wear_days(10e15)
    assert days == pytest.approx(10e15 / 6e12 * chosen.step_s / 86400, rel=1e-3)
    rare = options_of(replace(situation(), commit_every=4), [Strategy.STATE_NVME_WEIGHTS_CPU])[0]
    always = options_of(situation(), [Strategy.STATE_NVME_WEIGHTS_CPU])[0]
    assert always.written_bytes - rare.written_bytes == pytest.approx(0.75 * 1e12, rel=1e-3)


def test_micro_batches_and_ranks_multiply_what_they_must() -> None:
    here = situation()
    four = replace(here, job=replace(here.job, accumulate=4))
    one, many = (options_of(each, [Strategy.WEIGHTS_NVME])[0] for each in (here, four))
    assert many.compute_s == pytest.approx(4 * one.compute_s)
    assert many.work["update"].read_bytes == one.work["update"].read_bytes
    assert many.work["forward"].read_bytes == pytest.approx(4 * one.work["forward"].read_bytes, rel=0.01)
    two = replace(here, layout=Layout(nodes=2, gpus=8), job=replace(here.job, batch=16))
    halved = options_of(two, [Strategy.WEIGHTS_NVME])[0]
    assert halved.written_bytes == pytest.approx(one.written_bytes / 2, rel=1e-3)


def test_the_cheapest_change_helps_as_it_says() -> None:
    here = situation()
    now = fastest(options_of(here))
    assert now is not None
    found = changes(here, now)
    change = cheapest(found)
    assert change is not None
    assert change.text.startswith("--batch ")
    larger = replace(here, job=replace(here.job, batch=int(change.text.split()[1])))
    again = fastest(options_of(larger))
    assert again is not None
    assert change.gain == pytest.approx(tokens_per_s(larger, again) / tokens_per_s(here, now))
    assert {"one more disk (5 a node)", "twice the nodes (2)"} <= {one.text for one in found}


def test_checkpointing_makes_it_fit() -> None:
    here = situation(70e9)
    kept = replace(here, job=replace(here.job, checkpointing=False, batch=64))
    assert fastest(options_of(kept)) is None
    change = cheapest(changes(kept, None))
    assert change is not None
    assert (change.text, change.gain) == ("--checkpointing", None)


def test_tensor_and_pipeline_degrees_wait() -> None:
    job = Job(from_parameters(20e9), batch=8, checkpointing=True)
    plain, tensor, staged = (
        options_of(Situation(job, layout, NODES["dgx-h100"]), [Strategy.NOTHING])[0]
        for layout in (Layout(gpus=8), Layout(gpus=8, tensor=8), Layout(gpus=8, pipeline=4))
    )
    assert sum(phase.sync_s for phase in plain.phases) == 0
    assert sum(phase.sync_s for phase in tensor.phases) > 0
    assert (tensor.bottleneck, staged.bottleneck) == (Link.SUMS, Link.BUBBLE)
    assert staged.efficiency == pytest.approx(1 / 4, rel=0.01)  # one micro-batch goes through four stages


@pytest.mark.parametrize("name", NODES)
def test_nodes_are_plausible(name: str) -> None:
    node = node_called(name)
    assert node.source
    assert node.gpu_bytes < node.cpu_bytes < node.nvme_bytes * node.gpus
    assert node.with_disks(2 * node.disks).rates.read_bytes_per_s == 2 * node.rates.read_bytes_per_s


def test_an_unknown_node() -> None:
    with pytest.raises(ValueError, match=r"no machine is called 'dgx-h10': did you mean dgx-h100\?"):
        node_called("dgx-h10")
