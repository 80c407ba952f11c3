"""`tierstore plan`: the worked numbers of the command, JSON, the picture, and what cannot be asked."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tierstore.apps.options import Precision, Preset
from tierstore.apps.plan import PlanOptions, plan, situation_of
from tierstore.apps.plan_report import sentences
from tierstore.cli import app
from tierstore.config import Tier, UpdateSchedule, format_decimal, parse_size
from tierstore.errors import ConfigError
from tierstore.plan.advice import cheapest
from tierstore.plan.bandwidth import Activity, DirectoryRates, Rate, Sizes, Slowdown
from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer
from tierstore.plan.machine import NODES
from tierstore.plan.memory import activation_bytes
from tierstore.plan.placement import Kind
from tierstore.plan.strategies import USABLE

PNG = b"\x89PNG\r\n\x1a\n"
ONE_LINK = ["--nvme-read", "28GB", "--nvme-write", "28GB/s", "--link", "32GB", "--links", "1"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def test_70_billion_parameters_over_one_link() -> None:
    result = run("--params", "70e9", "--dtype", "fp16", *ONE_LINK)
    assert result.exit_code == 0, result.output
    assert ["weights", "CPU", "to", "GPU", "140", "GB", "4.375"] in rows(result.output)


def test_175_billion_parameters() -> None:
    found = rows(run("--params", "175B", "--dtype", "fp16").output)
    assert ["weights", "2", "350", "GB", "43.8", "GB"] in found
    assert ["gradients", "2", "350", "GB", "43.8", "GB"] in found
    assert next(row for row in found if row[:3] == ["fp32", "master,", "momentum,"])[-4:-1] == ["CPU", "2.1", "TB"]


def test_500_billion_parameters_over_one_link() -> None:
    output = run("--params", "500e9", "--checkpointing", *ONE_LINK).output
    seconds = {" ".join(row[:-3]): (" ".join(row[-3:-1]), row[-1]) for row in rows(output) if len(row) > 4}
    assert seconds["weights NVMe to CPU"] == ("1 TB", "35.71")
    assert seconds["weights CPU to GPU"] == ("1 TB", "31.25")
    assert seconds["gradients GPU to CPU"] == ("1 TB", "31.25")
    assert seconds["fp32 master, momentum, variance NVMe to CPU"] == ("6 TB", "214.3")
    assert seconds["a step with all on NVMe, 26 B per parameter NVMe"] == ("13 TB", "464.3")
    told = " ".join(output.split())
    assert "simplest that fits: state, weights on NVMe" in told
    assert "cheapest change that helps: --batch" in told
    assert "they are worn after" in told
    assert "…" not in output  # nothing is cut off in 80 columns


def test_json_holds_all_figures(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run("--preset", "124m", "--machine", "laptop", "--json", str(path)).exit_code == 0
    found = json.loads(path.read_text())
    assert found["model"]["parameters"] == 124_439_808
    assert found["components"]["weights"] == 2 * 124_439_808
    assert len(found["strategies"]) == 8
    assert found["simplest"] == "nothing offloaded"
    written_s = 12 * 124_439_808 / NODES["laptop"].rates.write_bytes_per_s  # of the commit: nothing else moves
    disks_s = sum(phase["links_s"]["disks"] for phase in found["strategies"][-1]["phases"])
    assert disks_s == pytest.approx(written_s, rel=0.01)
    assert found["machine"]["source"] == NODES["laptop"].source


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    for update in ("auto", "step"):
        assert run("--params", "13B", "--machine", "rtx-4090", "--update", update, "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(PNG)


def test_a_plot_says_by_its_name_what_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.foo"
    result = run("--params", "13B", "--plot", str(path))
    assert result.exit_code == 2
    assert "a plot is a .png or .svg file" in result.stderr
    assert not path.exists()


def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "[red].json"
    path.write_text('{"model_type": "gpt2", "n_layer": 2, "n_positions": 512}')
    here = situation_of(PlanOptions(config=path))
    assert (here.job.shape.layers, here.job.sequence, here.job.batch) == (2, 512, 8)
    assert run("--config", str(path)).output.startswith("gpt2 of [red].json: ")


def test_gpus_spread_over_nodes() -> None:
    layouts = [
        situation_of(PlanOptions(params="1T", gpus=gpus, nodes=nodes)).layout
        for gpus, nodes in ((512, None), (8, 64), (4, None), (16, 2), (None, 3))
    ]
    assert [(layout.nodes, layout.gpus) for layout in layouts] == [(64, 8), (64, 8), (1, 4), (2, 16), (3, 8)]


def test_figures_of_a_machine_of_ones_own() -> None:
    asked = PlanOptions(
        params="7e9", gpus=2, gpu_memory=10**10, cpu_memory=10**11, nvme_capacity=10**12, nvme_read=10**9, link=10**10,
        links=1, flops=1e14, endurance=10**15, disks=3,
    )  # fmt: skip
    node = situation_of(asked).node
    assert (node.gpus, node.links, node.disks) == (2, 1, 3)
    assert (node.gpu_bytes, node.cpu_bytes, node.nvme_bytes, node.endurance_bytes) == (10**10, 10**11, 10**12, 10**15)
    rates = node.rates
    assert (rates.read_bytes_per_s, rates.write_bytes_per_s, rates.shared_bytes_per_s) == pytest.approx((1e9, 1e9, 1e9))
    assert (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s, node.flop_per_s) == (1e10, 1e10, 1e14)


def test_measured_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(NODES["laptop"].rates.scaled(disk=0.5).to_json()))
    assert situation_of(PlanOptions(params="7e9", bandwidth=path)).node.rates.read_bytes_per_s == 3.5e9
    assert "flop/s are those of the data sheet of dgx-h100" in plan(PlanOptions(params="7e9", bandwidth=path)).notes[0]
    assert situation_of(PlanOptions(params="7e9", bandwidth=path)).layout.gpus == 1  # this machine, not a named one
    assert situation_of(PlanOptions(params="7e9", bandwidth=path, machine="dgx-h100")).layout.gpus == 8
    assert plan(PlanOptions(params="7e9", bandwidth=path)).notes[-1] == (
        "these rates do not tell all sizes: those of a dgx-h100 are taken for --gpu-memory, --cpu-memory, "
        "--nvme-capacity"
    )


def test_sizes_of_the_machine_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    sizes = Sizes(cpu_bytes=64 * 10**9, nvme_bytes=10**12, gpu_bytes=16 * 10**9)
    path.write_text(json.dumps(replace(NODES["laptop"].rates, sizes=sizes).to_json()))
    asked = PlanOptions(params="7e9", bandwidth=path)
    node = situation_of(asked).node
    assert (node.cpu_bytes, node.nvme_bytes, node.gpu_bytes) == (64e9, 1e12, 16e9)
    assert (node.name, node.endurance_bytes) == ("machine of rates.json", 0.0)
    assert not any("sizes" in note for note in plan(asked).notes)
    asked_less = situation_of(replace(asked, cpu_memory=10**9, nvme_capacity=10**10, gpu_memory=10**8)).node
    assert (asked_less.cpu_bytes, asked_less.nvme_bytes, asked_less.gpu_bytes) == (1e9, 1e10, 1e8)
    named = situation_of(replace(asked, machine="dgx-h100")).node
    assert named.cpu_bytes == NODES["dgx-h100"].cpu_bytes
    path.write_text(json.dumps(replace(NODES["laptop"].rates, sizes=replace(sizes, gpu_bytes=None)).to_json()))
    assert situation_of(asked).node.gpu_bytes == NODES["dgx-h100"].gpu_bytes
    assert "those of a dgx-h100 are taken for --gpu-memory" in plan(asked).notes[-1]
    with pytest.raises(ConfigError, match="--disks needs --machine"):
        plan(replace(asked, disks=2))


def timed_layers(seconds: float = 1.0) -> tuple[TimedLayer, ...]:
    """Each layer and pass takes `seconds`, whatever its size."""
    kinds = itertools.product(LayerKind, ("bf16", "fp32"), (1.0, 2.0))
    return tuple(TimedLayer(*of, LayerWork(n, 1.0, 1.0, 1.0), n * seconds, n * seconds) for *of, n in kinds)


def test_what_was_not_measured_is_no_named_machine(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    rate = Rate(1e9, 1e9, 1e9)
    two = tuple(DirectoryRates(f"/{name}", rate, rate, rate, 2**20, 1, 2**20, 1) for name in "ab")
    for directories, disks in ((two, 2), ((), 1)):
        path.write_text(json.dumps(replace(NODES["laptop"].rates, directories=directories).to_json()))
        found = plan(PlanOptions(params="7e9", bandwidth=path))
        node = found.situation.node
        assert (node.disks, node.peer_bytes_per_s, node.network_bytes_per_s, node.source) == (disks, 0, 0, "measured")
        assert not any("links between" in note for note in found.notes)
        more = next(change for change in found.changes if change.text.startswith("one more disk"))
        assert more.text == f"one more disk ({disks + 1} a node)"
        assert more.gain == pytest.approx((disks + 1) / disks, rel=1e-3)  # the step waits for the disks
    several = plan(PlanOptions(params="7e9", bandwidth=path, gpus=2))
    assert any("have no links between GPUs or nodes" in note for note in several.notes)
    assert not any("nodes" in change.text for change in several.changes)


def test_products_of_fp32_are_slower_where_those_of_16_bits_are_known(tmp_path: Path) -> None:
    dtypes = (Precision.BF16, Precision.FP32)
    half, full = (situation_of(PlanOptions(params="7e9", dtype=dtype)).node for dtype in dtypes)
    assert full.flop_per_s == half.flop_per_s / 2
    assert full.name == half.name
    notes = [plan(PlanOptions(params="7e9", dtype=dtype)).notes for dtype in dtypes]
    assert ["TF32" in " ".join(found) for found in notes] == [False, True]
    assert situation_of(PlanOptions(params="7e9", dtype=Precision.FP32, flops=1e14)).node.flop_per_s == 1e14
    path = tmp_path / "rates.json"
    for layers, share in ((timed_layers(), 1.0), ((), 0.5)):  # the rate of a CPU is measured in fp32
        table = replace(NODES["laptop"].rates, layers=layers, matmul_flop_per_s=3e10)
        path.write_text(json.dumps(table.to_json()))
        node = situation_of(PlanOptions(params="7e9", bandwidth=path, dtype=Precision.FP32)).node
        assert node.flop_per_s == share * 3e10


def test_weights_hide_behind_layers_as_they_were_timed(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=timed_layers(0.001)).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, dtype=Precision.FP32, batch=1, sequence=64)
    found = plan(asked)
    (told,) = [one for one in sentences(found) if one.startswith("weights streamed")]
    taken_s = 4 * found.situation.job.shape.parameters / NODES["laptop"].rates.h2d_bytes_per_s
    needed = 64 * taken_s / (0.001 * 13)  # twelve blocks and a head for 64 tokens
    assert needed == pytest.approx(153, abs=1)
    assert f"behind computing from {needed:,.0f} tokens" in told
    for nodes, zero, share in ((1, 3, 1), (2, 3, 1), (2, 0, 2)):  # with ZeRO 0 each node streams all weights
        more = plan(replace(asked, nodes=nodes, batch=nodes, zero=zero, accumulate=4))
        assert any(f"behind computing from {share * needed:,.0f} tokens" in one for one in sentences(more))
    with pytest.raises(ConfigError, match="--flops is that of a GPU, and these rates are of a machine without: give"):
        plan(replace(asked, flops=1e12))


def test_copies_of_ranks_without_a_gpu_share_the_memory_of_their_machine(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=timed_layers()).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, batch=8, sequence=64)
    links = [situation_of(replace(asked, gpus=8, **more)).node.links for more in ({}, {"links": 3})]
    assert links == [1, 3]
    given = situation_of(replace(asked, gpus=8, flops=1e14, gpu_memory=10**10)).node
    assert (given.links, given.computes_on_cpu) == (8, False)  # eight GPUs in this machine


def test_ranks_without_a_gpu_do_not_compute_faster_together_than_one(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=timed_layers()).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, dtype=Precision.FP16, batch=8, sequence=64)  # not timed
    node = situation_of(asked).node
    tokens = node.flop_per_s / node.rates.h2d_bytes_per_s  # computing and streaming a parameter: 2 flop, 2 B
    for ranks, zero, share in ((1, 3, 1), (8, 3, 1), (8, 0, 8)):  # with ZeRO 0 each rank streams all weights
        told = " ".join(sentences(plan(replace(asked, gpus=ranks, zero=zero))))
        assert f"behind computing from {share * tokens:,.0f} tokens" in told


def test_a_cpu_that_is_slow_in_16_bits_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    slow = {"fp32": 1, "bf16": 20}
    layers = [replace(one, forward_s=slow[one.dtype] * one.forward_s, backward_s=slow[one.dtype] * one.backward_s)
              for one in timed_layers()]  # fmt: skip
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=tuple(layers)).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, cpu_memory=4 * 10**9, sequence=64)
    change = cheapest(plan(asked).changes)
    assert change is not None
    assert (change.text, change.gain) == ("--dtype fp32", pytest.approx(20, rel=0.1))
    assert not any("--dtype" in one.text for one in plan(replace(asked, dtype=Precision.FP32)).changes)


SIZE = re.compile(r"--(gpu-memory|cpu-memory|nvme-capacity) (\S+)")


@pytest.mark.parametrize(
    "asked",
    [
        PlanOptions(preset=Preset.P7B, machine="rtx-4090", nvme_capacity=0, cpu_memory=64 * 10**9),
        PlanOptions(preset=Preset.P7B, machine="rtx-4090", nvme_capacity=10**11, checkpointing=True, gpu_memory=10**8),
        PlanOptions(preset=Preset.P7B, machine="rtx-4090", checkpointing=True, gpu_memory=2 * 10**9, cpu_memory=10**6),
        PlanOptions(params="70e9", machine="laptop", checkpointing=True),
    ],
)
def test_what_is_said_to_fit_fits_and_less_does_not(asked: PlanOptions) -> None:
    found = plan(asked)
    assert found.fastest is None
    changes = [change.text for change in found.changes if SIZE.match(change.text)]
    assert changes
    for text in changes:
        sizes = {name.replace("-", "_"): parse_size(size) for name, size in SIZE.findall(text)}
        assert text == " and ".join(f"--{name.replace('_', '-')} {format_decimal(size).replace(' ', '')}"
                                    for name, size in sizes.items())  # fmt: skip
        assert plan(replace(asked, **sizes)).options[-1].fits, text
        for name, size in sizes.items():
            assert not plan(replace(asked, **sizes | {name: int(0.98 * size)})).options[-1].fits, name
    told = " ".join(sentences(found))
    assert f"cheapest change that makes it fit: {found.changes[0].text}: " in told
    if asked.nvme_capacity == 0:  # everything in memory, or with disks
        assert [text.partition(" ")[0] for text in changes] == ["--cpu-memory", "--nvme-capacity"]


def test_weights_stay_on_gpus_that_do_not_share_them() -> None:
    asked = PlanOptions(params="7e9", machine="dgx-h200", gpus=2, zero=2, checkpointing=True, sequence=64)
    for found in (plan(asked), plan(replace(asked, gpu_memory=4 * 10**9))):
        for option in found.options[1:-1]:
            assert option.taken[Tier.GPU] > 14e9, option.strategy
    assert not any(option.fits for option in found.options)


def test_layers_that_were_timed_say_how_long_computing_takes(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    work = LayerWork(1.0, 1.0, 1.0, 1.0)  # a second for each layer and pass, whatever its size
    timed = tuple(TimedLayer(kind, "bf16", replace(work, layers=n), n, 2 * n) for kind in LayerKind for n in (1.0, 2.0))
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=timed).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, gpus=1, gpu_memory=10**10, cpu_memory=10**10,
                        nvme_capacity=10**12)  # fmt: skip
    found = plan(asked)
    assert not found.notes
    assert found.options[-1].compute_s == pytest.approx(3 * (12 + 1), rel=1e-6)
    other_dtype = plan(replace(asked, dtype=Precision.FP16))  # not timed, so it is the data sheet's
    assert "flop/s are those of the data sheet of dgx-h100" in other_dtype.notes[0]
    for other in (replace(asked, machine="laptop"), replace(asked, flops=1e14)):
        assert plan(other).options[-1].compute_s < 1


def test_of_a_machine_that_computes_on_the_cpu_one_memory_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    timed = tuple(TimedLayer(kind, "bf16", LayerWork(1.0, 1.0, 1.0, 1.0), 1.0, 1.0) for kind in LayerKind)
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=timed).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, gpus=1, cpu_memory=2 * 10**9, sequence=64)
    found = plan(asked)
    option, node = found.options[-1], found.situation.node
    assert option.fits
    weights = 2 * 124_439_808
    assert option.bytes[Kind.WEIGHTS, Tier.GPU] == pytest.approx(weights, rel=1e-3)
    assert USABLE * (node.gpu_bytes + node.cpu_bytes) == pytest.approx(0.9 * asked.cpu_memory)
    activations = activation_bytes(found.situation.job, found.situation.layout)
    assert USABLE * node.gpu_bytes > weights + activations
    with_two = plan(replace(asked, gpu_memory=10**9)).situation.node
    assert (with_two.gpu_bytes, with_two.cpu_bytes) == (10**9, 2 * 10**9)
    plain = plan(replace(asked, cpu_memory=8 * 10**9)).options[0]
    assert plain.fits, "nothing offloaded: the same memory"
    twice = next(change for change in found.changes if change.text.startswith("twice the CPU memory"))
    assert twice.text == "twice the CPU memory (4 GB a node)"
    assert not any("GPU" in change.text for change in found.changes)
    given = ("--preset", "124m", "--bandwidth", str(path), "--gpus", "1", "--cpu-memory", "2GB")
    answer = CliRunner().invoke(app, ["plan", *given, "--json", str(tmp_path / "plan.json")])
    assert answer.exit_code == 0, answer.output
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [layer["kind"] for layer in written["machine"]["rates"]["layers"]] == [one.value for one in LayerKind]


def test_a_machine_by_name_is_not_slowed_as_the_cores_that_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    timed = tuple(TimedLayer(kind, "bf16", LayerWork(1.0, 1.0, 1.0, 1.0), 1.0, 1.0) for kind in LayerKind)
    beside_disk = Slowdown(Activity.ADAM, Activity.READ, 1.5)
    shared = (beside_disk, Slowdown(Activity.MATMUL, Activity.ADAM, 2.0), Slowdown(Activity.ADAM, Activity.MATMUL, 2.0))
    table = replace(NODES["laptop"].rates, slowdowns=shared)
    for layers, kept in ((timed, (beside_disk,)), ((), shared)):
        path.write_text(json.dumps(replace(table, layers=layers).to_json()))
        node = situation_of(PlanOptions(params="7e9", bandwidth=path, machine="rtx-4090")).node
        assert (node.rates.layers, node.rates.slowdowns) == ((), kept)


def test_too_little_of_one_memory_is_told_whole(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    timed = tuple(TimedLayer(kind, "bf16", LayerWork(1.0, 1.0, 1.0, 1.0), 1.0, 1.0) for kind in LayerKind)
    path.write_text(json.dumps(replace(NODES["laptop"].rates, layers=timed).to_json()))
    asked = PlanOptions(preset=Preset.P124M, bandwidth=path, gpus=1, cpu_memory=10**8, sequence=1024)
    found = plan(asked)
    assert not any(option.fits for option in found.options)
    told = re.fullmatch(
        r"CPU memory of a node would hold (\S+) ([MG])B, of which activations take .*; 90 MB can be used",
        found.options[-1].problems[0],
    )
    assert told is not None
    needed = float(told[1]) * {"M": 1e6, "G": 1e9}[told[2]]
    assert plan(replace(asked, cpu_memory=int(1.01 * needed / USABLE))).options[-1].fits
    assert not plan(replace(asked, cpu_memory=int(0.98 * needed / USABLE))).options[-1].fits
    assert any(change.text == "--checkpointing" for change in plan(replace(asked, cpu_memory=10**9)).changes)


def test_measured_flops_are_those_of_a_machine_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({**NODES["laptop"].rates.to_json(), "matmul_flop_per_s": 3e13}))
    flops = {
        machine: situation_of(PlanOptions(params="7e9", bandwidth=path, machine=machine)).node.flop_per_s
        for machine in (None, "laptop")
    }
    assert flops == {None: 3e13, "laptop": NODES["laptop"].flop_per_s}
    found = plan(PlanOptions(params="7e9", bandwidth=path))
    assert not any("flop/s" in note for note in found.notes)


def test_every_strategy_commits_where_there_are_disks() -> None:
    asked = PlanOptions(params="7e9", gpus=1)
    found = plan(asked)
    on_cpu, split = found.options[1], found.options[-1]
    more = {
        kind: sum(split.bytes.get((kind, tier), 0) - on_cpu.bytes.get((kind, tier), 0) for tier in Tier)
        for kind in (Kind.WEIGHTS, Kind.STATE)  # not gradients: more of them are in transit where a GPU has spare room
    }
    assert more[Kind.STATE] == 0 < more[Kind.WEIGHTS] <= 32 * 2**20  # one chunk
    assert split.bytes[Kind.STATE, Tier.GPU] > split.bytes[Kind.STATE, Tier.CPU] > 0  # what fits the GPU is there
    # The commit bounds: 12 B per parameter at 8 x 3.8 GB/s.
    assert split.step_s == pytest.approx(on_cpu.step_s)
    assert split.step_s == pytest.approx(7e9 * 12 / (8 * 3.8e9), rel=1e-3)
    assert "for a commit every step" in found.notes[0]
    rare, without = plan(replace(asked, commit_every=50)), plan(replace(asked, nvme_capacity=0))
    for other in (rare, without):
        for option in (1, -1):
            assert other.options[option].step_s == pytest.approx(without.options[option].step_s)
        assert other.options[-1].step_s < 0.6 * other.options[1].step_s  # the GPU updates more than half
    assert not (*rare.notes, *without.notes)
    change = cheapest(found.changes)
    assert change is not None
    assert change.text == "--commit-every 50 (a kill then loses up to 50 steps)"
    assert change.gain == pytest.approx(split.step_s / rare.options[-1].step_s)
    assert not any("--commit-every" in change.text for change in (*rare.changes, *without.changes))
    assert "for a commit every 2 steps" in plan(replace(asked, commit_every=2)).notes[0]


@pytest.mark.parametrize(("params", "machine"), [("7e9", "rtx-4090"), ("30e9", "dgx-h100")])
def test_a_plan_that_guesses_advises_nothing_that_it_refuses(params: str, machine: str) -> None:
    asked = PlanOptions(params=params, machine=machine, update=UpdateSchedule.SPECULATIVE)
    found = plan(asked)
    told = " ".join(sentences(found))
    assert "for a commit every step" in told  # so it would be faster to commit less often
    assert "memory for state lowers that" in told
    assert "--update forward with --commit-every N commits less often" in told
    assert "--update forward with --nvme-capacity 0 plans without a store" in told
    for option in ("--commit-every", "--nvme-capacity"):  # never without another --update
        assert told.count(option) == told.count(f"--update forward with {option} ") == 1
    assert not any("--commit-every" in change.text for change in found.changes)
    forward = plan(replace(asked, update=UpdateSchedule.FORWARD, commit_every=50))
    assert forward.fastest is not None
    assert found.fastest is not None
    assert forward.fastest.step_s < 0.5 * found.fastest.step_s


def test_what_a_pipeline_waits_for() -> None:
    output = run("--params", "7e9", "--pipeline-parallel", "8").output
    assert "12% of the time computing; it waits for the bubble of the pipeline" in " ".join(output.split())
    assert "…" not in output


def test_no_disks_no_strategy_on_them() -> None:
    found = plan(PlanOptions(params="7e9", machine="rtx-4090", nvme_capacity=0, checkpointing=True))
    assert [option.fits for option in found.options][3:7] == [False] * 4
    assert found.fastest is not None


def test_one_gpu_is_not_several() -> None:
    assert " 1 GPU, ZeRO " in " ".join(run("--params", "7e9", "--gpus", "1").output.split())


def test_nothing_fits_and_why() -> None:
    told = " ".join(run("--params", "1T", "--gpus", "8").output.split())
    assert "alone take 264 GB of each GPU, where 72 GB can be used: --checkpointing or a shorter --sequence" in told
    told = " ".join(run("--params", "30B", "--machine", "laptop", "--nvme-capacity", "0").output.split())
    assert "nothing fits" in told
    told = " ".join(run("--params", "30B", "--machine", "laptop", "--checkpointing", "--batch", "999").output.split())
    assert "can be used: a smaller --batch and more --accumulate or a shorter --sequence" in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "which model? give --params 70e9"),
        (["--params", "7e9", "--preset", "124m"], "--params and --preset exclude each other"),
        (["--params", "many"], "not a number of parameters: 'many'"),
        (["--params", "7"], "give --params from 1e6"),
        (["--params", "1e400"], "give --params from 1e6"),
        (["--params", "7e9", "--machine", "cray"], "no machine is called 'cray'"),
        (["--params", "7e9", "--gpus", "12"], "--gpus 12 is no multiple of the 8"),
        (["--params", "7e9", "--gpus", "0"], "--gpus must be at least 1, not 0"),
        (["--params", "7e9", "--batch", "9"], "--batch 9 cannot be divided among 8"),
        (["--params", "7e9", "--zero", "4"], "ZeRO stage is 0 to 3"),
        (["--params", "7e9", "--commit-every", "0"], "--commit-every must be at least 1"),
        (["--params", "7e9", "--tensor-parallel", "3"], "8 GPUs cannot be divided"),
        (["--params", "7e9", "--flops", "-1"], "--flops must be from 1e+06 to 1e+20, not -1"),
        (["--params", "7e9", "--flops", "0"], "--flops must be from"),
        (["--params", "7e9", "--flops", "inf"], "--flops must be from"),
        (["--params", "7e9", "--flops", "nan"], "--flops must be from"),
        (["--params", "7e9", "--link", "0"], "--link must be above 0, not 0"),
        (["--params", "7e9", "--cpu-memory", "0"], "--cpu-memory must be above 0, not 0"),
        (["--params", "7e9", "--gpus", "1" * 400], "--gpus must be at most 1000000"),
        (["--params", "7e9", "--batch", "8" + "0" * 330], "--batch must be at most 1000000000"),
        (["--params", "7e9", "--accumulate", "0"], "--accumulate must be at least 1, not 0"),
        (["--params", "1e30"], "give --params from 1e6 to 1e16"),
        (["--params", "7e9", "--gpu-memory", "8GX"], "not a size: '8GX'"),
        (["--config", "no/such.json"], "cannot read the configuration no/such.json"),
        (["--params", "7e9", "--update", "speculative", "--commit-every", "50"], "needs disks and --commit-every 1"),
        (["--params", "7e9", "--update", "speculative", "--nvme-capacity", "0"], "needs disks and --commit-every 1"),
        (["--params", "7e9", "--write", "x"], "--write belongs to --deepspeed"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, sentence in (("[]", "must be a JSON object, not list"), ('{"a": 1} x', "not valid JSON")):
        path.write_text(text)
        result = run("--config", str(path))
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert sentence in result.stderr


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    result = run("--params", "7e9", "--json", str(tmp_path / "no" / "file"))
    assert result.exit_code == 2
    assert "cannot write --json" in result.stderr
    assert not result.stdout


def test_batches_default_to_one_sample_a_rank() -> None:
    assert situation_of(PlanOptions(params="7e9", tensor_parallel=4)).job.batch == 2
    with pytest.raises(ConfigError, match="cannot be divided among 8"):
        situation_of(PlanOptions(params="7e9", batch=4))
