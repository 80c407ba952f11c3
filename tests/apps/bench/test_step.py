"""bench step: what a step's time is, the rows and their bars, and both sides of the protocol with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from commands import run_program

from tierstore.apps.bench import forecasts, rates, step, step_worker
from tierstore.apps.bench.case import DTYPES, HEATS, Answer, BenchOptions, Contestant, Result
from tierstore.apps.options import TrainOptions
from tierstore.config import MicroBatchSchedule
from tierstore.plan.bandwidth import RATE_NAMES, Activity, BandwidthTable, DirectoryRates, Rate
from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer
from tierstore.plan.step_machine import Machine

FIELDS = {"vocab_size": 512, "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "bos_token_id": 0,
          "eos_token_id": 0}  # fmt: skip
MACHINE = Machine(BandwidthTable(1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, matmul_flop_per_s=1e9))
DRIVERS = Path(__file__).parents[3] / "tools" / "peers"
FREES = """
import ctypes, resource

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page is one fault
for _ in range(11):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(2**26)[::4096] = bytes(2**14)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)  # of the last round
"""


def result(name: str, seconds: float, rss: int = 1000, **figures: float) -> Result:
    is_peer = not name.startswith(("tierstore", "rates"))
    return Result(Contestant(name, (), is_peer), answers=[Answer(seconds, figures, rss)])


@pytest.fixture
def options(tmp_path: Path) -> BenchOptions:
    return BenchOptions(nvme=tmp_path)


def results_of(options: BenchOptions, tmp_path: Path, **found: Result) -> dict[str, Result]:
    contestants = [one for heat in step.heats(options, tmp_path) for one in heat]
    all_of_them = {one.name: Result(one, trouble="missing: not here") for one in contestants}
    return all_of_them | {one.contestant.name: one for one in found.values()}


def test_a_step_lasts_from_one_durable_commit_to_the_next() -> None:
    train = TrainOptions(nvme=(Path("store"),))
    # Step 1 warms up, 2 and 3 are timed, 4 follows; a commit is durable one step later.
    starts_s, ends_s = [0.0, 5.0, 7.0, 9.0, 11.0], [6.0, 8.5, 10.0, 13.0]
    assert step_worker._step_s(train, 2, starts_s, 13.5, ends_s) == pytest.approx((10.0 - 6.0) / 2)


def test_a_step_without_its_commit_is_an_error() -> None:
    train = TrainOptions(nvme=(Path("store"),))
    with pytest.raises(RuntimeError, match="4 steps made 3 commits"):
        step_worker._step_s(train, 2, [0.0, 5.0, 7.0, 9.0, 11.0], 13.5, [6.0, 8.5, 10.0])


def test_a_rare_commit_is_shared_by_the_steps_between_two_of_them() -> None:
    train = TrainOptions(nvme=(Path("store"),), commit_every=50)
    starts_s = [0.0, 5.0, 7.0, 9.0, 11.0]
    assert step_worker._step_s(train, 2, starts_s, 61.0, [61.0]) == pytest.approx(2.0 + 50.0 / 50)


def test_without_a_store_a_step_lasts_until_the_next_one() -> None:
    assert step_worker._step_s(TrainOptions(), 2, [0.0, 5.0, 7.0, 9.0, 11.0], 61.0, []) == pytest.approx(2.0)


def test_every_contestant_has_a_name_of_its_own_and_each_heat_its_rates(options: BenchOptions, tmp_path: Path) -> None:
    heats = step.heats(options, tmp_path)
    names = [one.name for heat in heats for one in heat]
    assert len(set(names)) == len(names)
    for own in step._OWN:
        (heat,) = [heat for heat in heats if own.name in [one.name for one in heat]]
        assert step._rates(own.heat) in [one.name for one in heat]


@pytest.mark.parametrize(("wish", "added"), [({}, True), ({"OMP_WAIT_POLICY": "ACTIVE"}, False)])
def test_all_spin_as_the_commands_have_it_except_plain_torch_as_people_have_it(
    options: BenchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: dict[str, str], added: bool
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in wish.items():
        monkeypatch.setenv(name, value)
    for one in (one for heat in step.heats(options, tmp_path) for one in heat):
        is_asked = one.name not in {step._EXACT_TORCH, *map(step._torch, HEATS)}
        assert ("GOMP_SPINCOUNT" in one.environment) is (is_asked and added), one.name


def test_torch_with_our_heap_keeps_the_memory_that_a_step_frees(options: BenchOptions, tmp_path: Path) -> None:
    contestants = {one.name: one for heat in step.heats(options, tmp_path) for one in heat}
    faults = {name: int(subprocess.run([sys.executable, "-S", "-c", FREES], capture_output=True, text=True, check=True,
                                       env={**os.environ, **contestants[name].environment}).stdout)
              for name in (step._ASKED_TORCH, step._torch("memory"))}  # fmt: skip
    assert faults[step._ASKED_TORCH] < 100 < 10_000 < faults[step._torch("memory")]
    assert contestants[step._ASKED_TORCH].environment["THP_MEM_ALLOC_ENABLE"] == "1"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", [{}, {"curve": True}, {"large": True}])
def test_every_contestant_has_the_memory_that_its_model_needs(
    choice: dict[str, bool], dtype: str, tmp_path: Path
) -> None:
    options = BenchOptions(nvme=tmp_path, dtype=dtype, **choice)
    for own in step._own(options):
        assert forecasts.by_plan(step._as_train_options(own, options), MACHINE) is not None, own.name


def test_a_step_with_rare_commits_is_foretold_with_its_share_of_a_flush(options: BenchOptions) -> None:
    rare, _, none = (step._as_train_options(own, options) for own in step._OWN if own.heat == "memory")
    assert (rare.commit_every, none.nvme) == (50, ())
    share_s = (forecasts.by_plan(rare, MACHINE) or 0) - (forecasts.by_plan(none, MACHINE) or 0)
    assert share_s == pytest.approx(MACHINE.table.durable_seconds(0, 12 * 124_439_808 / 50), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_contestants_train_in_the_dtype_that_is_asked_for(dtype: str, tmp_path: Path) -> None:
    found = {}
    for one in (one for heat in step.heats(BenchOptions(nvme=tmp_path, dtype=dtype), tmp_path) for one in heat):
        given = json.loads(one.argv[-1])
        found[one.name] = given.get("dtype") or given.get("train", {}).get("dtype")
    rates_of_all = {step._rates(heat) for heat in HEATS}
    assert {kind for name, kind in found.items() if name not in rates_of_all} == {dtype}
    assert (step._EXACT_TORCH in found) is (dtype == "bf16")  # in fp32 plain torch is as exact


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_in_memory_have_bars_against_each_torch_beside_them(dtype: str, tmp_path: Path) -> None:
    options = BenchOptions(nvme=tmp_path, dtype=dtype)
    own = next(own for own in step._OWN if own.vs_torch is not None)
    found = results_of(options, tmp_path, ours=result(own.name, 2.0))
    (row,) = [row for row in step._step_rows(options, found) if row.contestant == own.name]
    beside = {name for name in found if name.startswith("torch in memory") and name not in map(step._torch, HEATS)}
    assert {bar.of for bar in row.bars} == {"x torch in memory", *(f"x {name}" for name in beside)}
    assert len(beside) == (2 if dtype == "bf16" else 1)


def test_bytes_of_fp32_have_bars_of_their_own(tmp_path: Path) -> None:
    options = BenchOptions(nvme=tmp_path, dtype="fp32")
    own = step._OWN[0]
    moved = result(own.name, 2.0, bytes_per_parameter=32.0, spilled_per_parameter=4.0)
    moved.facts = {"weights_on_disk": 0.25}
    found = results_of(options, tmp_path, moved=moved)
    (row,) = [row for row in step._bytes_rows(options, found) if row.contestant == own.name]
    # m and v read and written, the weights written: 20 B; a quarter of the weights read twice. Of the 32 moved B four
    # were gradients.
    assert (row.bars[0].bound, row.bars[0].measured) == (20 + 2, 32 - 4)


def test_a_peer_that_is_not_wanted_does_not_start(tmp_path: Path) -> None:
    names = [one.name for heat in step.heats(BenchOptions(nvme=tmp_path, peer=("torch",)), tmp_path) for one in heat]
    assert not [name for name in names if "DeepSpeed" in name]
    assert [name for name in names if "torch" in name]


def test_bars_compare_with_deepspeed_and_with_the_floor(options: BenchOptions, tmp_path: Path) -> None:
    own, _, counted = step._OWN[:3]
    ours = result(own.name, 2.0, rss=300, read_bytes=1e9, written_bytes=1e9, bytes_per_parameter=30.0)
    spilling = result(
        counted.name, 2.0, read_bytes=1e9, written_bytes=1e9, bytes_per_parameter=30.0, spilled_per_parameter=4.0
    )
    spilling.facts = {"weights_on_disk": 0.5}
    found = results_of(
        options, tmp_path, ours=ours, spilling=spilling, theirs=result(step._ALL, 6.0, rss=1000),
        memory=result(step._torch("disk"), 0.5),
        rates=rates_of("disk", 2e9),
    )  # fmt: skip
    steps = [row for row in step._step_rows(options, found) if row.contestant == own.name]
    assert steps[0].floor == pytest.approx(1.0)  # 2 GB at 2 GB/s, longer than the step in memory
    assert {bar.of: bar.is_met for bar in steps[0].bars} == {
        f"x {step._ALL}": True, "of its peak memory": False, "x the floor": False
    }  # fmt: skip
    (moved,) = [row for row in step._bytes_rows(options, found) if row.contestant == counted.name]
    bar = moved.bars[0]
    assert bar.bound == 24.0  # between all weights in CPU memory and all on disk
    assert bar.measured == pytest.approx(26.0)  # spilled gradients do not count


def rates_of(heat: str, *rounds_bytes_per_s: float, shared: float = 1.0) -> Result:
    """Rounds of a disk that reads and writes as fast; and both at once, as a multiple of that."""
    rest = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s", "adam_elements_per_s"), 1e9)
    found = Result(Contestant(step._rates(heat), (), False))
    for rate in rounds_bytes_per_s:
        disk = {"read_bytes_per_s": rate, "write_bytes_per_s": rate, "shared_bytes_per_s": shared * rate}
        found.answers.append(Answer(1.0, {**rest, **disk, "io_threads": 4, "update_threads": 2}, 1000))
    return found


def steps_of(own: step.Own, options: BenchOptions, tmp_path: Path, **found: Result) -> step.Row:
    table = step._step_rows(options, results_of(options, tmp_path, **found))
    return next(row for row in table if row.contestant == own.name)


@pytest.mark.parametrize(
    ("rounds", "shared", "floor"),
    [([2e9], 1.0, 1.0), ([2e9, 1e9, 1e9], 1.0, 1.0), ([2e9], 2.0, 0.5), ([2e9], 0.5, 1.0)],
    ids=["one round", "the best of three", "side by side", "never longer than one after the other"],
)
def test_a_floor_is_what_the_disk_does_at_its_best(
    options: BenchOptions, tmp_path: Path, rounds: list[float], shared: float, floor: float
) -> None:
    own = step._OWN[0]
    ours = result(own.name, 2.0, read_bytes=1e9, written_bytes=1e9)
    found = steps_of(own, options, tmp_path, ours=ours, memory=result(step._torch("disk"), 0.1),
                     rates=rates_of("disk", *rounds, shared=shared))  # fmt: skip
    assert found.floor == pytest.approx(floor)


def test_the_computing_of_a_floor_is_that_of_all_micro_batches(options: BenchOptions, tmp_path: Path) -> None:
    recorder, own, *_ = (one for one in step._OWN if one.heat == "accumulate")
    recorded = result(recorder.name, 1.5, computing_s=0.5)
    recorded.facts = {"recorded": {}}
    recorded.answers.append(Answer(1.5, {"computing_s": 0.7}, 1000))
    ours = result(own.name, 6.0, read_bytes=1e9, written_bytes=1e9)
    found = steps_of(own, options, tmp_path, recorded=recorded, ours=ours, rates=rates_of("accumulate", 2e9))
    assert found.floor == pytest.approx(8 * 0.5)


def test_a_step_below_its_floor_shows_that_the_floor_is_wrong_and_meets_no_bar(
    options: BenchOptions, tmp_path: Path
) -> None:
    own = step._OWN[0]
    ours = result(own.name, 0.9, read_bytes=1e9, written_bytes=1e9)
    found = steps_of(own, options, tmp_path, ours=ours, memory=result(step._torch("disk"), 0.1),
                     rates=rates_of("disk", 2e9))  # fmt: skip
    assert found.floor == pytest.approx(1.0)
    assert (found.trouble or "").startswith("faster than its floor, which was measured too slow")
    assert [bar.is_met for bar in found.bars if bar.of == "x the floor"] == [None]


def test_where_the_file_system_refuses_o_direct_a_step_with_a_store_meets_no_bar(
    options: BenchOptions, tmp_path: Path
) -> None:
    cached = rates_of("memory", 2e9)
    cached.facts = {"is_direct": False}
    troubles = {}
    for own in (one for one in step._OWN if one.heat == "memory"):
        row = steps_of(own, options, tmp_path, ours=result(own.name, 0.5), memory=result(step._torch("memory"), 1.0),
                       rates=cached)  # fmt: skip
        assert [bar.is_met for bar in row.bars if bar.of == "x torch in memory"] == [None if own.stored else True]
        troubles[own.stored] = row.trouble
    assert (troubles[True] or "").startswith("the file system refuses O_DIRECT")
    assert troubles[False] is None


@pytest.mark.parametrize("is_direct", [True, False])
def test_rates_say_whether_they_are_of_the_disk(
    is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = Rate(1e9, 1e9, 1e9)
    directory = DirectoryRates("here", rate, rate, rate, 1, 1, 1, 1, is_direct=is_direct)
    machine = replace(MACHINE, table=replace(MACHINE.table, directories=(directory,)))
    monkeypatch.setattr("tierstore.apps.tune.rates_for", lambda train: lambda: machine)
    with rates.contend({"directory": str(tmp_path), "device": "cpu"}) as (facts, _):
        assert facts["is_direct"] is is_direct


def test_a_machine_has_the_medians_of_all_rounds() -> None:
    """A layer that some rounds left out has the others' median; one that the first measurement left out is dropped."""
    small, large = LayerWork(1.0, 2.0, 3.0, 4.0), LayerWork(1.0, 20.0, 30.0, 40.0)
    layers = [(LayerKind.BLOCK, small), (LayerKind.BLOCK, large), (LayerKind.HEAD, small), (LayerKind.HEAD, large)]
    table = dict.fromkeys(RATE_NAMES[:7], 1e9)
    beside = {rates._beside(Activity.MATMUL, Activity.ADAM): 2.0}
    found = Result(Contestant("rates", (), False))
    seen: list[tuple[float, list[int]]] = [(9.0, [0, 1, 2]), (1.0, [0, 2, 3]), (2.0, [0, 1, 2, 3]), (6.0, [0, 2])]
    for seconds, which in seen:
        timed = (TimedLayer(layers[i][0], "bf16", layers[i][1], seconds + i, seconds) for i in which)
        told = rates._layers_of(replace(MACHINE, table=replace(MACHINE.table, layers=tuple(timed))))
        if not found.facts:
            found.facts = {"layers": json.loads(json.dumps(told))}
            continue
        taken = {rates._pass(layer, name): layer[name] for layer in told for name in rates._PASSES}
        found.answers.append(Answer(1.0, {**table, **taken, **beside, "io_threads": 4, "update_threads": 2}, 1000))
    machine = rates.machine_of(found)
    assert machine is not None
    assert [(one.kind, one.work, one.forward_s, one.backward_s) for one in machine.table.layers] == [
        (LayerKind.BLOCK, small, 2.0, 2.0), (LayerKind.BLOCK, large, 3.0, 2.0), (LayerKind.HEAD, small, 4.0, 2.0)
    ]  # fmt: skip
    assert machine.table.slowdown(Activity.MATMUL, Activity.ADAM) == 2.0
    assert machine.table.slowdown(Activity.ADAM, Activity.MATMUL) == 1.0


def test_what_is_missing_is_a_row(options: BenchOptions, tmp_path: Path) -> None:
    table = step.rows(options, results_of(options, tmp_path))
    assert {row.trouble for row in table} == {"missing: not here"}
    assert step._ALL in {row.contestant for row in table}


def converse(program: list[str], given: dict[str, Any], folder: Path, rounds: int = 2) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"round": number}) + "\n" for number in range(rounds))
    ended = run_program([*program, json.dumps(given)], folder, lines)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


WORKER = ["-m", "tierstore.apps.bench.worker", "step_worker"]


def tiny(tmp_path: Path, **options: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS | {"model_type": "gpt2"}))
    return {"config": str(tmp_path / "config.json"), "batch": 1, "sequence": 16, "gpu_memory": "1MiB",
            "cpu_memory": "4MiB", "nvme": [str(tmp_path / "store")], "evaluate": 0, **options}  # fmt: skip


def test_our_own_steps_are_measured_and_predicted(tmp_path: Path) -> None:
    train = tiny(tmp_path)
    ready, *answers = converse(WORKER, {"train": train, "steps": 2}, tmp_path)
    assert not (tmp_path / "store").exists()
    assert [answer["seconds"] > 0 for answer in answers] == [True, True]
    figures = answers[-1]["figures"]
    # State fits in CPU memory and is written for the commit of each step: 12 B for a parameter, and padding.
    assert 12 <= figures["bytes_per_parameter"] < 12.5
    measured = {name: figures[name] for name in ("computing_s", "trial_computing_s", "trial_step_s")}
    assert min(measured.values()) > 0
    told = {"computing_s": 0.5, "trial_computing_s": 0.4, "trial_step_s": 0.6}  # as on a machine that nobody else uses
    own = Result(Contestant("own", (), False), ready["ready"], [Answer(answers[-1]["seconds"], figures | told, 1)])
    options = TrainOptions(**step_worker.options_of_object(train, "test"))
    record = forecasts.computing(own, own, options, MACHINE)
    # No update beside it makes computing faster, but steps of the trial were faster: the record is scaled to them.
    assert 0.95 * 0.4 < record.forward_s + record.backward_s < 1.001 * 0.5
    assert forecasts.by_tune(record, options, MACHINE, 1) > 0.25
    # 6 flop a parameter and token, of 0.13M parameters and 16 tokens.
    assert (forecasts.by_plan(options, MACHINE) or 0) > 0.01


def test_speculation_is_right_when_the_rounds_begin(tmp_path: Path) -> None:
    train = tiny(tmp_path, update="speculative", clip=1e4)
    ready, *answers = converse(WORKER, {"train": train, "steps": 2}, tmp_path)
    assert "recorded" not in ready["ready"]  # updates inside backward: these passes are not the model's computing alone
    assert [answer["figures"]["speculated"] for answer in answers] == [2, 2]
    assert "computing_s" not in answers[-1]["figures"]
    assert answers[-1]["figures"]["trial_step_s"] > 0
    assert ready["ready"]["schedule"] == "speculative"


def test_speculation_is_foretold_by_a_trial_of_speculation() -> None:
    """The first of a heat that speculates makes the trial for the others that do; one with a record makes its own."""
    options = BenchOptions(heat="disk")
    answered = [Answer(1.0, {}, 1)]
    found = {
        own.name: Result(Contestant(own.name, (), False), {} if "update" in own.options else {"recorded": {}}, answered)
        for own in step._own(options)
    }
    found[step._own(options)[-1].name].facts["recorded"] = {}  # that of `forward`
    speculative = [own for own in step._own(options) if own.options.get("update") == "speculative"]
    assert len(speculative) > 1
    for own in step._own(options):
        recorder, _ = step._recorder(own, options, found)
        tried = step._tried(own, recorder, options, found)
        assert tried is (speculative[0] if own in speculative else own)


def test_warming_up_ends_with_the_first_right_guess_or_with_an_error() -> None:
    def stepper(norms: Iterable[float]) -> step_worker.Stepper:
        engine = SimpleNamespace(_parts=SimpleNamespace(driver=SimpleNamespace(is_speculating=False)))
        given = iter(norms)

        def train_step(batches: object, schedule: str) -> SimpleNamespace:
            norm = next(given)
            engine._parts.driver.is_speculating = norm != 0.5  # 0.5 is a step in which speculation rests
            return SimpleNamespace(grad_norm=norm)

        engine.train_step = train_step
        return step_worker.Stepper(engine, [], MicroBatchSchedule.HORIZONTAL, clip=1.0)  # type: ignore[arg-type]

    left = iter([2.0, 0.5, 0.5, 0.9, 0.8])
    stepper(left).warm_speculation()
    assert list(left) == [0.8]
    with pytest.raises(RuntimeError, match="speculation rests: gradients of 100 steps were clipped"):
        stepper([2.0] * 100).warm_speculation()


def test_the_loop_s_lag_is_that_of_rounds_and_between_them_nothing_ticks() -> None:
    class Loop:
        now_s = 0.0
        timers: ClassVar[list[Callable[[], None]]] = []

        def time(self) -> float:
            return self.now_s

        def call_soon_threadsafe(self, call: Callable[..., None], *given: Any) -> None:
            call(*given)

        def call_at(self, due_s: float, call: Callable[..., None], *given: Any) -> None:
            self.timers.append(lambda: call(*given))

        def pass_time(self, seconds: float) -> int:
            """All timers that wait are called that much later."""
            self.now_s += seconds
            due, self.timers[:] = self.timers[:], []
            for call in due:
                call()
            return len(due)

    loop = Loop()
    lag = step_worker.LoopLag(SimpleNamespace(_parts=SimpleNamespace(runtime=SimpleNamespace(loop=loop))))  # type: ignore[arg-type]
    assert loop.pass_time(1.0) == 0
    for late_s in (0.001, 0.003):
        lag.begin()
        ticks = [loop.pass_time(step_worker._TICK_S + late_s) for _ in range(3)]
        assert sum(ticks) >= 3
        assert lag.take_ms() == pytest.approx(1e3 * late_s)
    assert [loop.pass_time(1.0), loop.pass_time(1.0)] == [1, 0]


def test_what_speculates_is_foretold_from_what_another_recorded(options: BenchOptions, tmp_path: Path) -> None:
    recorder = result("tierstore, 1280MiB, forward, memory kept", 1.0, computing_s=0.5)
    recorder.facts = {"recorded": {}}
    found = results_of(options, tmp_path, recorder=recorder)
    speculative = next(own for own in step._OWN if own.options.get("update") == "speculative")
    assert step._recorder(speculative, options, found)[1] is recorder


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_takes_steps(dtype: str, tmp_path: Path) -> None:
    given = {"device": "cpu", "steps": 2, "fields": FIELDS, "batch": 1, "sequence": 16, "dtype": dtype}
    ready, *answers = converse([str(DRIVERS / "step_torch.py")], given, tmp_path)
    assert "torch" in ready["ready"]["versions"]
    assert [answer["seconds"] > 0 for answer in answers] == [True, True]


def test_rates_of_no_round_are_no_machine() -> None:
    assert rates.machine_of(Result(Contestant("rates", (), False))) is None
