from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, FakeStore
from rich.console import Console

from tierstore.apps import presets
from tierstore.apps import train as application
from tierstore.apps.options import Precision, TrainOptions
from tierstore.apps.report import Reporter
from tierstore.config import Resume
from tierstore.errors import ConfigError

TINY_GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32,
             "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


@pytest.fixture(autouse=True)
def plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine takes a model that is in memory."""
    monkeypatch.setattr(
        application, "_deferred", lambda options, configuration: (presets.build(configuration, options.dtype), None)
    )


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A test that breaks the handlers of signals does not break the others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


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


def run(options: TrainOptions, store: FakeStore | None = None, **fake: Any) -> tuple[Any, FakeEngine, str]:
    """Outcome, engine and output of one run with the fake engine."""
    engines: list[FakeEngine] = []

    def make_engine(**arguments: Any) -> FakeEngine:
        engines.append(FakeEngine(**arguments, store=FakeStore() if store is None else store, **fake))
        return engines[0]

    output = io.StringIO()
    outcome = application.train(options, Reporter(Console(file=output, width=100)), make_engine)
    return outcome, engines[0], output.getvalue()


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


def test_a_line_is_on_the_disk_before_its_commit(options: Callable[..., TrainOptions]) -> None:
    chosen = options()
    seen: list[int] = []
    run(chosen, before_commit=lambda step: seen.append(lines(chosen)[-1]["step"]))
    assert seen == [1, 2, 3, 4, 5]


def test_accumulation_gives_the_step_of_one_large_batch(options: Callable[..., TrainOptions]) -> None:
    whole, parts = options(batch=4, dropout=0.0), options(batch=2, accumulate=2, dropout=0.0)
    run(whole)
    expected = [record["loss"] for record in lines(whole)]
    _, engine, _ = run(parts)
    assert [record["loss"] for record in lines(parts)] == pytest.approx(expected, rel=1e-5)
    step = engine.calls.index("no_sync")
    assert engine.calls[step : step + 6] == ["no_sync", "forward", "backward", "forward", "backward", "step"]


@pytest.mark.parametrize("killed_at", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    options: Callable[..., TrainOptions], tmp_path: Path, killed_at: int, workers: int
) -> None:
    whole = options(json=tmp_path / "whole", warmup=3)
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
    if killed_at > 1:
        assert [step for step, _ in losses].count(killed_at) == 2  # once before the kill, once after, and equal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_a_second_interrupt_acts_at_once(options: Callable[..., TrainOptions]) -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            # Not by os.kill: two signals before Python looks are one.
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    store = FakeStore()
    with pytest.raises(KeyboardInterrupt):
        run(options(), store, before_commit=interrupt)
    assert store["step"] == 1


def test_a_signal_in_the_last_step_changes_nothing(options: Callable[..., TrainOptions]) -> None:
    outcome, _, _ = run(options(steps=1), before_commit=lambda step: os.kill(os.getpid(), signal.SIGINT))
    assert outcome.stopped_by is None


def test_a_finished_run_is_not_trained_again(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    store = FakeStore()
    run(options(), store)
    outcome, engine, output = run(options(resume=Resume.AUTO, export=tmp_path / "out"), store)
    assert outcome.totals.steps == 0
    assert "nothing to train: step 5 of 5 is done already" in output
    assert "export out" in engine.calls
    assert (tmp_path / "out" / "config.json").exists()


def test_vectors_do_not_decay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    model[0].bias.requires_grad_(False)
    matrices, vectors = application.parameter_groups(model, 0.1)
    assert [tuple(parameter.shape) for parameter in matrices["params"]] == [(2, 2)]
    assert len(vectors["params"]) == 2
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_what_the_engine_is_given(options: Callable[..., TrainOptions]) -> None:
    _, engine, _ = run(options(clip=0.0, threads=1, commit_every=3))
    arguments = engine.arguments
    assert arguments["max_grad_norm"] is None
    assert arguments["tiers"].update_threads == 1
    assert arguments["commit_every"] == 3
    assert arguments["lr_scheduler"] is None
    assert set(arguments["registered"]) == {"data"}


def test_an_empty_evaluation_is_left_out(options: Callable[..., TrainOptions]) -> None:
    outcome, engine, _ = run(options(evaluate=0, steps=1))
    assert outcome.totals.held_out_before is None
    assert "evaluate" not in engine.calls


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_keeps_no_activation_of_a_block(
    options: Callable[..., TrainOptions], checkpointing: bool
) -> None:
    model = application.assemble(options(checkpointing=checkpointing)).model
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
        ({"export": Path("/nonexistent/out")}, "cannot write --export /nonexistent/out"),
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
