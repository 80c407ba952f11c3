from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fake_engine import FakeEngine, FakeStore
from rich.console import Console

from tierstore.apps import assembly
from tierstore.apps import train as application
from tierstore.apps.crew import Crew
from tierstore.apps.launch import Launch
from tierstore.apps.metrics import StepLog
from tierstore.apps.options import FreedMemory, Precision, TrainOptions
from tierstore.apps.outputs import write_configuration
from tierstore.apps.recipe import parameter_groups
from tierstore.apps.report import Reporter
from tierstore.apps.stopping import STOPS, StopRequest
from tierstore.config import Durability, MicroBatchSchedule, Resume
from tierstore.errors import ConfigError, DoneButFor, StorageError, StorageFull, UnusedOptionWarning

TINY_GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32,
             "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


@pytest.fixture(autouse=True)
def plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine takes a model that is in memory."""
    monkeypatch.setattr(assembly, "deferred", lambda build, checkpoint: (build(), None))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Fails a test that leaves other signal handlers than it found."""
    nohup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGHUP, nohup)


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., TrainOptions]:
    (tmp_path / "config.json").write_text(json.dumps(TINY_GPT2))
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 50)

    def make(**changes: Any) -> TrainOptions:
        values: dict[str, Any] = {
            "config": tmp_path / "config.json", "data": tmp_path / "text", "nvme": (tmp_path / "store",),
            "dtype": Precision.FP32, "batch": 2, "sequence": 16, "steps": 5, "lr": 0.01,
            "dropout": 0.1, "evaluate": 4, "json": tmp_path / "steps.jsonl",
        }  # fmt: skip
        return TrainOptions(**{**values, **changes})

    return make


def run(
    options: TrainOptions, store: FakeStore | None = None, crew: Crew | None = None, **fake: Any
) -> tuple[Any, FakeEngine, str]:
    """Outcome, engine and output of one run with the fake engine; leaving at once raises `Killed`."""
    engines: list[FakeEngine] = []

    def make_engine(**arguments: Any) -> FakeEngine:
        engines.append(FakeEngine(**arguments, store=FakeStore() if store is None else store, **fake))
        return engines[0]

    output = io.StringIO()
    with StopRequest(leave=_killed) as stop:
        outcome = application.train(options, Reporter(Console(file=output, width=100)), make_engine, stop, crew)
    return outcome, engines[0], output.getvalue()


def test_freed_memory_is_returned_until_the_engine_is_made_and_then_as_asked(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def make_engine(**arguments: Any) -> FakeEngine:
        made.append("engine")
        return FakeEngine(**arguments, store=FakeStore())

    monkeypatch.setattr(application, "prepare_heap", lambda: made.append("return"))

    def serve_steps(wish: FreedMemory, **known: bool) -> AbstractContextManager[None]:
        made.append((wish, known))
        return contextlib.nullcontext()

    monkeypatch.setattr(application, "serve_steps", serve_steps)
    asked = options(steps=1, evaluate=0, freed_memory=FreedMemory.KEEP)
    application.train(asked, Reporter(Console(file=io.StringIO())), make_engine)
    assert made == ["return", "engine", (FreedMemory.KEEP, {"updates_in_memory": False})]


def test_a_second_signal_that_overtakes_the_first_does_not_speak_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []

    class Overtaken(StopRequest):
        is_overtaken = False

        def announce(self) -> None:
            if not self.is_overtaken:
                self.is_overtaken = True
                self._handle(signal.SIGTERM, None)
            super().announce()

    with Overtaken(leave=left.append) as stop, stop.wished("nothing is lost"):
        stop._handle(signal.SIGINT, None)
    assert left == [128 + signal.SIGTERM]
    assert capfd.readouterr().err == (
        "tierstore: stopping after this step; Ctrl-C again stops at once\n"
        "tierstore: interrupted at once; nothing is lost\n"
    )


def _killed(code: int) -> None:
    raise Killed(code)


def lines(options: TrainOptions) -> list[dict[str, Any]]:
    assert options.json is not None
    return [json.loads(line) for line in options.json.read_text().splitlines()]


def test_a_run_learns_and_reports(options: Callable[..., TrainOptions]) -> None:
    outcome, engine, output = run(options(steps=8))
    assert outcome.stopped_by is None
    assert outcome.totals.held_out_after < outcome.totals.held_out_before - 0.1
    assert outcome.totals.bytes["nvme_read"] == 8 * 10**9
    assert "weights" in output
    assert "step 8/8" in output
    assert "held-out loss, nats per byte" in output
    assert "disk read 1.00 GB/s" in output
    assert "efficiency 60%" in output
    assert engine.calls[-2:] == ["evaluate", "close"]


def test_a_filesystem_without_direct_io_is_named_once(options: Callable[..., TrainOptions]) -> None:
    _, _, output = run(options(steps=2), buffered=["/a/b"])
    assert output.count("note: no O_DIRECT in /a/b: I/O is buffered") == 1


def test_state_that_is_not_on_the_gpu_is_told_once(options: Callable[..., TrainOptions]) -> None:
    _, _, output = run(options(steps=2), not_on_gpu="Triton is not installed")
    told = "note: no optimizer state lives on the GPU: Triton is not installed"
    assert " ".join(output.split()).count(told) == 1


def test_the_lines_say_everything(options: Callable[..., TrainOptions]) -> None:
    chosen = options(steps=3, warmup=2)
    run(chosen)
    records = lines(chosen)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["lr"][0] for record in records] == [0.005, 0.01, 0.01]
    for record in records:
        assert record["tokens"] == 2 * 15
        assert record["peak_rss_bytes"] > 0
        assert set(record) == {"step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "seconds", "bytes",
                               "peak_bytes", "peak_rss_bytes", "prefetch_depth", "schedule"}  # fmt: skip


def test_a_line_is_on_the_disk_before_its_commit(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options()
    synced, seen = [0], []
    sync = StepLog.sync

    def noted(log: StepLog) -> None:
        there = lines(chosen)[-1]["step"]
        sync(log)
        synced.append(there)

    monkeypatch.setattr(StepLog, "sync", noted)
    run(chosen, before_commit=lambda step: seen.append((step, synced[-1])))
    assert seen == [(step, step) for step in (1, 2, 3, 4, 5)]


def test_accumulation_gives_the_step_of_one_large_batch(options: Callable[..., TrainOptions]) -> None:
    whole, parts = options(batch=4, dropout=0.0, nvme=()), options(batch=2, accumulate=2, dropout=0.0, nvme=())
    run(whole)
    expected = [record["loss"] for record in lines(whole)]
    whole.json.unlink()
    _, engine, _ = run(parts)
    assert [record["loss"] for record in lines(parts)] == pytest.approx(expected, rel=1e-5)
    step = engine.calls.index("horizontal")
    assert engine.calls[step : step + 6] == ["horizontal", "forward", "backward", "forward", "backward", "step"]


def test_micro_batches_go_side_by_side_if_that_is_asked_for(options: Callable[..., TrainOptions]) -> None:
    _, engine, _ = run(options(accumulate=2, micro_batches=MicroBatchSchedule.VERTICAL))
    assert "vertical" in engine.calls
    assert "horizontal" not in engine.calls


@pytest.mark.parametrize("killed_at", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    options: Callable[..., TrainOptions], tmp_path: Path, killed_at: int, workers: int
) -> None:
    whole = options(json=tmp_path / "whole", nvme=(), warmup=3)
    run(whole)

    def kill(step: int) -> None:
        if step == killed_at:
            raise Killed

    chosen = options(resume=Resume.AUTO, warmup=3, workers=workers)
    store = FakeStore()
    with pytest.raises(Killed):
        run(chosen, store, before_commit=kill)
    torch.manual_seed(99)  # a new process has another generator state
    run(chosen, store)
    losses = [(record["step"], record["loss"]) for record in lines(chosen)]
    assert sorted(set(losses)) == [(record["step"], record["loss"]) for record in lines(whole)]
    assert [step for step, _ in losses].count(killed_at) == 2  # once before the kill, once after, and equal


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_ends_the_run_after_a_committed_step(
    options: Callable[..., TrainOptions], number: signal.Signals
) -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)

    store = FakeStore()
    outcome, engine, _ = run(options(), store, before_commit=interrupt)
    assert outcome.stopped_by is number
    assert (outcome.totals.last_step, store["step"]) == (2, 2)
    assert engine.calls[-2:] == ["flush", "close"]


@pytest.mark.parametrize(("nvme", "is_exported"), [({}, False), ({"nvme": ()}, True)])
def test_a_stopped_run_exports_where_nothing_else_is_kept(
    options: Callable[..., TrainOptions], nvme: dict[str, Any], is_exported: bool, tmp_path: Path
) -> None:
    chosen = options(export=tmp_path / "out", **nvme)
    outcome, engine, _ = run(chosen, before_commit=lambda step: os.kill(os.getpid(), signal.SIGINT))
    assert (outcome.stopped_by, outcome.totals.last_step) == (signal.SIGINT, 1)
    assert (engine.calls[-3:] == ["apply pending", "export out", "close"]) == is_exported
    assert ("export out" in engine.calls) == is_exported


def test_a_run_that_was_stopped_before_its_first_step_exports_nothing(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(*_: Any) -> Iterator[torch.Tensor]:
        os.kill(os.getpid(), signal.SIGINT)
        yield torch.ones(2, 16, dtype=torch.int64)

    monkeypatch.setattr(application, "held_out_batches", batches)
    outcome, engine, _ = run(options(nvme=(), export=tmp_path / "out"))
    assert (outcome.stopped_by, outcome.totals.last_step) == (signal.SIGINT, 0)
    assert "export out" not in engine.calls


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_during_the_export_waits_for_its_end(
    signals: int,
    options: Callable[..., TrainOptions],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    export = FakeEngine.export

    def interrupted(self: FakeEngine, directory: Path) -> None:
        for _ in range(signals):
            signal.raise_signal(signal.SIGTERM)
        export(self, directory)

    monkeypatch.setattr(FakeEngine, "export", interrupted)
    with contextlib.nullcontext() if signals == 1 else pytest.raises(Killed, match="143"):
        outcome, engine, said = run(options(steps=1, nvme=(), export=tmp_path / "out"))
        assert outcome.stopped_by is None
        assert engine.calls[-2:] == ["export out", "close"]
        assert "exported to" in said
    told = ["stopping after the export; Ctrl-C again stops at once", "interrupted at once; nothing is kept without"]
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tierstore:")]
    assert len(errors) == signals
    assert all(words in line for words, line in zip(told, errors))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])  # under nohup; in a background job of a script
def test_a_signal_that_is_ignored_ends_nothing(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    with StopRequest(leave=_killed) as stop, stop.wished("all"):
        signal.raise_signal(number)
    assert stop.signal_number is None
    assert signal.signal(number, before) is signal.SIG_IGN


ON_A_TERMINAL = """
import signal, sys, threading
from tierstore.apps.stopping import StopRequest

with StopRequest() as stop, stop.wished("all"):
    print("ready", flush=True)
    while stop.signal_number is None:
        threading.Event().wait(0.01)
    print("said to nobody", flush=True)
sys.exit(128 + stop.signal_number)
"""


def test_what_is_said_to_a_terminal_that_has_gone_is_no_error() -> None:
    ours, theirs = os.openpty()
    command, on_it = [sys.executable, "-c", ON_A_TERMINAL], dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen(command, **on_it, start_new_session=True) as process:  # so no other hang-up reaches it
        os.close(theirs)
        said = b""
        while not said.endswith(b"\n"):  # `print` fails if the terminal goes before the end of the line
            said += os.read(ours, 100)
        assert said.startswith(b"ready")
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP


def test_a_second_interrupt_acts_at_once(
    options: Callable[..., TrainOptions], capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            # Not by os.kill: two signals that arrive before Python checks count as one.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    store = FakeStore()
    with pytest.raises(Killed, match="130"):
        run(options(), store, before_commit=interrupt)
    assert store["step"] == 1
    assert capfd.readouterr().err == (
        "tierstore: stopping after this step; Ctrl-C again stops at once\n"
        "tierstore: interrupted at once; the store holds the last committed step: go on with --resume auto\n"
    )


def test_a_signal_in_the_last_step_leaves_out_the_evaluation(options: Callable[..., TrainOptions]) -> None:
    outcome, engine, output = run(options(steps=1), before_commit=lambda step: os.kill(os.getpid(), signal.SIGINT))
    assert outcome.stopped_by is None
    assert engine.calls[-2:] == ["apply pending", "close"]
    assert "training loss" in output


def test_a_signal_is_seen_between_batches_of_the_evaluation(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(*_: Any) -> Iterator[torch.Tensor]:
        yield torch.ones(2, 16, dtype=torch.int64)
        os.kill(os.getpid(), signal.SIGINT)
        yield torch.ones(2, 16, dtype=torch.int64)

    monkeypatch.setattr(application, "held_out_batches", batches)
    outcome, engine, _ = run(options())
    assert (outcome.stopped_by, outcome.totals.last_step) == (signal.SIGINT, 0)
    assert engine.calls == ["flush", "evaluate", "flush", "close"]


def test_a_signal_before_the_loop_promises_nothing(
    options: Callable[..., TrainOptions], capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(**arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)

    with StopRequest(leave=_killed) as stop, pytest.raises(Killed, match="143"):
        application.train(options(), Reporter(Console(file=io.StringIO())), interrupt, stop)
    assert capfd.readouterr().err == "tierstore: interrupted before training began\n"


def test_a_resumed_run_keeps_its_recipe_and_says_so(options: Callable[..., TrainOptions]) -> None:
    store = FakeStore()
    run(options(steps=2, warmup=4), store)
    chosen = options(resume=Resume.AUTO, lr=0.5, weight_decay=0.3, warmup=0)
    for _ in range(2):  # also the second time the store knows what it was made with
        _, engine, output = run(chosen, store)
        assert "note: the store keeps the --lr 0.01 that it was made with; 0.5 is not used\n" in output
        assert "note: the store keeps the --weight-decay 0.1 that it was made with; 0.3 is not used\n" in output
        assert "note: the store keeps the --warmup 4 that it was made with; 0 is not used\n" in output
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert [record["lr"][0] for record in lines(chosen)] == [0.0025, 0.005, 0.0075, 0.01, 0.01]
    assert "note" not in run(options(resume=Resume.AUTO, warmup=4), store)[2]


def test_what_the_recipe_tells_no_warning_tells_again(options: Callable[..., TrainOptions]) -> None:
    def make_engine(**arguments: Any) -> FakeEngine:
        warnings.warn("lr is not used", UnusedOptionWarning, stacklevel=1)
        return FakeEngine(**arguments, store=FakeStore())

    application.train(options(), Reporter(Console(file=io.StringIO())), make_engine)
    with pytest.raises(UnusedOptionWarning):  # an error here (pyproject.toml), also after it
        warnings.warn("lr is not used", UnusedOptionWarning, stacklevel=1)


@pytest.mark.parametrize("changes", [{"nvme": ()}, {"durability": Durability.NONE}])
def test_a_run_that_keeps_nothing_says_so_first(options: Callable[..., TrainOptions], changes: dict[str, Any]) -> None:
    _, _, output = run(options(**changes))
    assert output.startswith("note: nothing is kept with")
    assert "only what --export writes remains" in output


def test_a_run_that_diverges_says_so_once_and_what_to_do(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                engines[0]._model.lm_head.weight.fill_(torch.inf)

    engines: list[FakeEngine] = []
    enter = FakeEngine.__enter__
    monkeypatch.setattr(FakeEngine, "__enter__", lambda self: engines.append(self) or enter(self))
    _, _, output = run(options(), before_commit=diverge)
    assert output.count("note: the loss of step 3 is nan: the run has diverged") == 1
    assert "a lower --lr" in output
    assert "since step 3: the run has diverged" in output


def test_snapshots_are_made_of_steps_that_are_due_and_once(options: Callable[..., TrainOptions]) -> None:
    there = options().nvme[0] / "snapshots" / "step-2"
    _, engine, text = run(options(snapshot_every=2))
    kept = [call for call in engine.calls if call.startswith("snapshot")]
    assert kept == ["snapshot step-2", "snapshot step-4"]
    assert f"taking a snapshot: {there}\n" in text
    there.mkdir(parents=True)
    (there / "manifest-000000000002.json").touch()
    _, engine, text = run(options(snapshot_every=2, json=None, resume=Resume.AUTO))
    assert [call for call in engine.calls if call.startswith("snapshot")] == ["snapshot step-4"]
    assert f"note: {there} is there already, and stays as it is\n" in text
    for error in (StorageFull("no room"), ConfigError("it is another store's")):
        outcome, _, text = run(options(snapshot_every=2, json=None, resume=Resume.AUTO), refuses_snapshots=error)
        assert f"note: step-4 is not kept as a snapshot, training goes on: {error}\n" in text
        assert outcome.totals.last_step == 5


def test_a_finished_run_is_not_trained_again(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    store = FakeStore()
    run(options(), store)
    outcome, engine, output = run(options(resume=Resume.AUTO, export=tmp_path / "out"), store)
    assert outcome.totals.steps == 0
    assert "nothing to train: step 5 of 5 is done already" in output
    assert "export out" in engine.calls


def test_an_export_says_what_was_given_and_takes_along_what_a_checkpoint_has(
    options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    given = {**TINY_GPT2, "attn_pdrop": 0.3, "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(given))
    for name in ("generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    run(options(config=None, checkpoint=tmp_path, export=tmp_path / "out", steps=1))
    out = tmp_path / "out"
    saved = json.loads((out / "config.json").read_text())
    assert saved.items() >= {**given, "dtype": "float32", "architectures": ["GPT2LMHeadModel"]}.items()
    assert "loss_type" not in saved
    assert {path.name for path in out.iterdir()} >= {"generation_config.json", "tokenizer.json", "model.safetensors"}
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_an_export_over_one_of_another_model_has_nothing_of_that_beside_it(
    options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for name, files in (("a", ("tokenizer.json", "vocab.json")), ("b", ("tokenizer.json",))):
        source = tmp_path / name
        source.mkdir()
        (source / "config.json").write_text(json.dumps({**TINY_GPT2, "attn_pdrop": 0.3}))
        for file in files:
            (source / file).write_text(json.dumps(name))
        run(options(config=None, checkpoint=source, export=out, steps=1))
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (out / "tokenizer.json").read_text() == '"b"'
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32", "that of the export, not a copy"


def test_vectors_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    model[0].bias.requires_grad_(False)
    matrices, vectors = parameter_groups(model, 0.1)
    assert [tuple(parameter.shape) for parameter in matrices["params"]] == [(2, 2)]
    assert len(vectors["params"]) == 2
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_what_the_engine_is_given(options: Callable[..., TrainOptions]) -> None:
    _, engine, _ = run(options(clip=0.0, threads=1, commit_every=3))
    arguments = engine.arguments
    assert arguments["max_grad_norm"] is None
    assert arguments["tiers"].update_threads == 1
    assert arguments["commit_every"] == 3
    assert set(arguments["registered"]) == {"data", "recipe"}


@pytest.mark.parametrize(
    ("ranks", "cores", "is_bound", "given", "of_torch", "of_adam"),
    [(1, 64, False, None, [], None), (2, 64, False, None, [32], None), (4, 3, False, None, [1], None),
     (8, 8, True, None, [8], None), (2, 64, False, 32, [32], 32), (1, 64, False, 100, [100], 64)],
)  # fmt: skip
def test_ranks_share_the_cores(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, is_bound: bool,
    given: int | None, of_torch: list[int], of_adam: int | None,
) -> None:  # fmt: skip
    """Unless each is bound to cores of its own. The engine sees that, too."""
    threads: list[int] = []

    def exchange(what: str, mine: Any) -> list[Any]:
        others = (mine[0], {-1}) if is_bound and what == "the cores of the machine" else mine
        return [mine, *[others] * (ranks - 1)]

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    launch = Launch(0, ranks, 0, ranks)
    asked = launch.options(options(threads=given, steps=1, batch=ranks, evaluate=0))
    _, engine, _ = run(asked, crew=Crew(launch, SimpleNamespace(exchange=exchange)))  # type: ignore[arg-type]
    assert (threads, engine.arguments["tiers"].update_threads) == (of_torch, of_adam)


def test_an_empty_evaluation_is_left_out(options: Callable[..., TrainOptions]) -> None:
    outcome, engine, _ = run(options(evaluate=0, steps=1))
    assert outcome.totals.held_out_before is None
    assert "evaluate" not in engine.calls


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_keeps_no_activation_of_a_block(
    options: Callable[..., TrainOptions], checkpointing: bool
) -> None:
    model = assembly.assemble(options(checkpointing=checkpointing)).model
    saved: set[torch.Size] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(8)[None])
    assert (torch.Size([1, 8, 64]) in saved) is not checkpointing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence": 64}, "--sequence 64 is longer than the model's context of 32"),
        ({"trace": Path("/nonexistent/trace")}, "cannot write --trace /nonexistent/trace"),
        ({"export": Path("/dev/null/out")}, "cannot use --export /dev/null/out: /dev/null is not a directory"),
        ({"json": Path("/nonexistent/log")}, "cannot write --json /nonexistent/log"),
        ({"config": None, "checkpoint": Path("/nonexistent")}, "no such directory: --checkpoint /nonexistent"),
        ({"data": Path("/nonexistent")}, "no such file or directory: --data /nonexistent"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_built(
    options: Callable[..., TrainOptions], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        run(options(**changes))
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_read_bytes_is_refused(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps({**TINY_GPT2, "vocab_size": 100}))
    with pytest.raises(ConfigError, match="the model knows 100 token ids; text as bytes needs 256"):
        run(options(config=tmp_path / "small.json"))


def test_an_unusable_path_is_refused_before_anything_is_built(
    options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    store, file = tmp_path / "store", tmp_path / "text"
    for changes, message in (
        ({"trace": tmp_path}, "cannot write --trace .*: it is a directory"),
        ({"json": tmp_path}, "cannot write --json .*: it is a directory"),
        ({"export": file}, "cannot use --export .*/text is not a directory"),
        ({"export": store}, "--export .*/store lies in --nvme .*/store"),
        ({"json": store / "log"}, "--json .* is missing or not writable"),
        ({"json": tmp_path / "old" / "log", "nvme": (tmp_path / "old",)}, "--json .*/old/log lies in --nvme .*/old"),
        ({"nvme": (file,)}, "cannot use --nvme .*/text is not a directory"),
        ({"nvme": (file / "below",)}, "cannot use --nvme .*/below: .*/text is not a directory"),
    ):
        (tmp_path / "old").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=message):
            run(options(**changes))
    assert not (tmp_path / "steps.jsonl").exists()


def test_weights_are_exported_into_a_directory_that_is_there(
    options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    run(options(steps=1, export=tmp_path / "out"))
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("nvme", "error", "says"),
    [
        (True, StorageFull, "store holds the trained weights: make room"),
        (False, StorageFull, "trained weights are lost"),
        (False, ConfigError, "trained weights are lost"),  # another process writes there
        (False, DoneButFor, "trained weights are in .*/out, not all that belongs beside them is"),
    ],
)
def test_an_export_that_fails_says_what_is_left(
    nvme: bool, error: type[Exception], says: str, options: Callable[..., TrainOptions], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(self: FakeEngine, directory: Path) -> None:
        raise error("no room")

    monkeypatch.setattr(FakeEngine, "export", fail)
    if nvme or error is DoneButFor:  # nothing is lost, so nothing waits
        monkeypatch.setattr("time.sleep", pytest.fail)
    else:
        monkeypatch.setattr("tierstore.apps.train._TRIES_FOR_S", 0.0)
    changes: dict[str, Any] = {} if nvme else {"nvme": ()}
    with pytest.raises(StorageError, match=f"no room; the {says}"):
        run(options(steps=1, export=tmp_path / "out", **changes))


@pytest.mark.parametrize("error", [StorageFull, ConfigError])
def test_weights_that_nothing_else_keeps_wait_until_there_is_room_for_them(
    error: type[Exception], options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []
    export = FakeEngine.export

    def fail_twice(self: FakeEngine, directory: Path) -> None:
        tries.append(directory)
        if len(tries) < 3:
            raise error("no room")
        export(self, directory)

    monkeypatch.setattr(FakeEngine, "export", fail_twice)
    monkeypatch.setattr("tierstore.apps.train._TRIES_EVERY_S", 0.0)
    _, _, said = run(options(steps=1, nvme=(), export=tmp_path / "out"))
    assert len(tries) == 3
    assert (tmp_path / "out" / "config.json").exists()
    assert said.count("no room; nothing else keeps the trained weights: put that right") == 1
    assert "Ctrl-C, twice, gives them up" in " ".join(said.split())
    assert "exported to" in said


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_full_disk_for_lines_is_told_and_training_goes_on(
    is_freed: bool, options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, really = [], os.write

    def write(descriptor: int, data: bytes) -> int:
        if data.startswith(b'{"step"'):
            tries.append(data)
            if len(tries) in (2, 3) or (len(tries) > 3 and not is_freed):
                raise OSError(errno.ENOSPC, "full")
        return really(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    chosen = options(steps=4, export=None)
    outcome, _, said = run(chosen)
    said = " ".join(said.split())
    assert outcome.totals.steps == 4
    assert [line["step"] for line in lines(chosen)] == ([1, 2, 3, 4] if is_freed else [1])
    assert said.count("full; training goes on, and lines are written when there is room") == 1
    assert ("full; it lacks the last lines" in said) != is_freed


def test_a_quota_that_only_a_sync_of_the_lines_meets_is_told_and_training_goes_on(
    options: Callable[..., TrainOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:  # as where the file is on another machine
        raise OSError(errno.EDQUOT, "full")

    monkeypatch.setattr(os, "fsync", refuse)
    outcome, _, said = run(options(steps=3, export=None))
    said = " ".join(said.split())
    assert outcome.totals.steps == 3
    assert said.count("full; training goes on, and lines are written when there is room") == 1
    assert "full; it lacks the last lines" in said


def test_a_link_for_a_configuration_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "of another model").write_text("{}")
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "of another model")
    write_configuration(transformers.GPT2Config(n_layer=1), tmp_path / "out")
    assert (tmp_path / "of another model").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_layer"] == 1


def test_a_full_disk_leaves_the_configuration_as_it_was(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(self: Any, directory: Path) -> None:
        (Path(directory) / "config.json").write_text("")
        raise OSError(errno.ENOSPC, "full")

    chosen = options(steps=1, export=tmp_path / "out")
    run(chosen)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "config.json" in before
    monkeypatch.setattr(FakeEngine, "export", lambda self, directory: None)
    monkeypatch.setattr("transformers.PretrainedConfig.save_pretrained", fill)
    with pytest.raises(StorageError, match=r"ENOSPC.*; the trained weights are in .*, not all that belongs"):
        run(options(steps=1, export=tmp_path / "out", resume=Resume.AUTO))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_what_a_kill_left_of_a_configuration_is_gone_after_the_next_export(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any, directory: Path) -> None:
        (Path(directory) / "config.json").write_text("")
        raise KeyboardInterrupt

    out = tmp_path / "out"
    run(options(steps=1, export=out))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "export", lambda self, directory: None)
        patch.setattr("transformers.PretrainedConfig.save_pretrained", interrupt)
        patch.setattr("shutil.rmtree", lambda path, ignore_errors: None)  # a kill removes nothing
        with pytest.raises(KeyboardInterrupt):
            run(options(steps=1, export=out, resume=Resume.AUTO))
    assert {path.name for path in out.iterdir()} > before.keys()
    run(options(steps=1, export=out, resume=Resume.AUTO))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(("free_bytes", "is_told"), [(100, True), (10**12, False)])
def test_little_room_for_an_export_that_is_all_that_remains_is_told_first(
    free_bytes: int, is_told: bool, options: Callable[..., TrainOptions], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rooms = {tmp_path: SimpleNamespace(free=free_bytes)}
    monkeypatch.setattr("shutil.disk_usage", rooms.__getitem__)
    _, _, said = run(options(steps=1, nvme=(), export=tmp_path / "made" / "for" / "it"))
    assert (tmp_path / "made" / "for" / "it" / "config.json").is_file()
    assert ("100 B free" in " ".join(said.split())) == is_told


@pytest.mark.parametrize("resume", [Resume.NEVER, Resume.AUTO])
def test_a_new_run_does_not_take_the_lines_of_another(options: Callable[..., TrainOptions], resume: Resume) -> None:
    chosen = options(steps=1)
    run(chosen)
    before = lines(chosen)
    with pytest.raises(ConfigError, match="holds the lines of another run"):
        run(options(nvme=(chosen.nvme[0].with_name("mistyped"),), resume=resume))
    assert lines(chosen) == before


def test_a_refused_run_leaves_the_lines_of_an_earlier_one(options: Callable[..., TrainOptions]) -> None:
    chosen = options()
    run(chosen)
    before = lines(chosen)

    def refuse(**arguments: Any) -> Any:
        raise ConfigError("the store holds a run")

    with pytest.raises(ConfigError, match="holds a run"):
        application.train(chosen, Reporter(Console(file=io.StringIO())), refuse)
    assert lines(chosen) == before


def test_the_trace_is_written(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    run(options(steps=1, trace=tmp_path / "trace.json"))
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
