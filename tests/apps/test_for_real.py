"""The train command as a process of its own: the real engine, a real disk, real kills.

Processes are forks of one that has imported everything; a whole interpreter trains in `test_ranks.py`.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import commands
import peak_memory
import pytest
import torch
from typer.testing import CliRunner

from tierstore.cli import app

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
LARGE = TINY | {"vocab_size": 4096, "n_layer": 8, "n_embd": 768, "n_head": 12}
"""Weights of 228 MiB, four times that with gradients and state: a copy of the weights would exceed the memory bound."""
WAITING_S = 60  # for a process; far more than it needs


@pytest.fixture
def folder(disk_path: Path) -> Iterator[Path]:
    (disk_path / "config.json").write_text(json.dumps(TINY))
    (disk_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    threads = torch.get_num_threads()  # runs in this process set it
    yield disk_path
    torch.set_num_threads(threads)


def command(folder: Path, name: str, *options: str, steps: int = 12) -> list[str]:
    """Arguments of a run with the store `name` and lines in `name.jsonl`."""
    return [
        "train", "--config", f"{folder}/config.json", "--data", f"{folder}/text", "--nvme", f"{folder}/{name}",
        "--json", f"{folder}/{name}.jsonl", "--gpu-memory", "400KiB", "--cpu-memory", "1400KiB", "--dtype", "fp32",
        "--batch", "2", "--sequence", "32", "--dropout", "0.1", "--steps", str(steps), "--lr", "0.003",
        "--threads", "1", *options,
    ]  # fmt: skip


def forked(folder: Path, name: str, *options: str, steps: int = 12) -> AbstractContextManager[BaseProcess]:
    """The run as a forked process, which prints to the files `output` and `errors`."""
    return commands.forked(command(folder, name, *options, steps=steps), folder / "output", folder / "errors")


def here(folder: Path, name: str, *options: str, steps: int = 12) -> Any:
    """The same run in this process, for checks that need no process of their own."""
    return CliRunner().invoke(app, command(folder, name, *options, steps=steps))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_person_trains_is_killed_goes_on_and_exports(folder: Path) -> None:
    with forked(folder, "whole", "--trace", f"{folder}/trace.json") as process:
        process.join(WAITING_S)
    assert process.exitcode == 0, (folder / "errors").read_text()
    assert "held-out loss" in (folder / "output").read_text()
    expected = lines(folder, "whole")
    assert [line["step"] for line in expected] == list(range(1, 13))
    assert expected[-1]["loss"] < 0.8 * expected[0]["loss"]
    _check_trace(folder / "trace.json")

    for last_line in (3, 8):  # killed when the line is there: before, within or after the commit of its step
        resume = ["--resume", "auto"]
        with forked(folder, "killed", *resume) as process:
            _wait_for_line(process.pid, folder / "killed.jsonl", last_line)
            process.kill()
    with forked(folder, "killed", "--resume", "must", "--export", f"{folder}/out") as process:
        process.join(WAITING_S)
    assert process.exitcode == 0, (folder / "errors").read_text()
    losses: dict[int, float] = {}
    for line in lines(folder, "killed"):
        assert losses.setdefault(line["step"], line["loss"]) == line["loss"]  # twice is fine, when it is the same
    assert losses == {line["step"]: line["loss"] for line in expected}

    exported = here(folder, "whole", "--resume", "must", "--export", f"{folder}/reference")
    assert "nothing to train" in exported.stdout
    _check_equal_models(folder / "out", folder / "reference")


def _wait_for_line(pid: int, path: Path, count: int) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        while not (path.exists() and f'"step": {count},' in path.read_text()):
            ended, _, _ = select.select([descriptor], [], [], 0.01)
            assert not ended, f"ended before step {count}"
    finally:
        os.close(descriptor)


def _check_trace(path: Path) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    expected = {"step", "acquire", "h2d", "reduce", "d2h", "update", "commit", "nvme read", "nvme write"}
    assert expected <= tracks
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"gpu tier: weight bytes", "cpu tier: bytes"}


def _check_equal_models(first: Path, second: Path) -> None:
    from transformers import AutoModelForCausalLM

    found, expected = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (first, second))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_an_interrupt_ends_after_a_committed_step(folder: Path) -> None:
    with forked(folder, "run", steps=10**6) as process:
        assert process.pid is not None
        _wait_for_line(process.pid, folder / "run.jsonl", 3)
        locked = here(folder, "run", "--resume", "auto")
        assert (locked.exit_code, str(process.pid) in locked.stderr) == (1, True), locked.stderr
        os.kill(process.pid, signal.SIGINT)
        process.join(WAITING_S)
    assert process.exitcode == 128 + signal.SIGINT
    said = (folder / "errors").read_text()
    assert "Traceback" not in said
    assert said.startswith("tierstore: stopping after this step; Ctrl-C again stops at once\n")
    last = lines(folder, "run")[-1]["step"]
    assert "nothing to train" in here(folder, "run", "--resume", "must", steps=last).stdout


def test_a_second_interrupt_says_its_sentence_and_nothing_else(folder: Path) -> None:
    with forked(folder, "run", steps=10**6) as process:
        _wait_for_line(process.pid, folder / "run.jsonl", 3)
        # Both signals wait when the process continues, so the second comes before the step's end.
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            os.kill(process.pid, number)
        process.join(WAITING_S)
    assert process.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert (folder / "errors").read_text() == (
        "tierstore: stopping after this step; Ctrl-C again stops at once\n"
        "tierstore: interrupted at once; the store holds the last committed step: go on with --resume auto\n"
    )
    last = lines(folder, "run")[-1]["step"]
    assert f"step {last + 1}/{last + 1}" in here(folder, "run", "--resume", "must", steps=last + 1).stdout


def test_a_run_whose_reader_has_left_goes_on_to_its_end(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    given = command(folder, "run", "--export", f"{folder}/out")
    with commands.forked(given, folder / "pipe", folder / "pipe") as process:
        with (folder / "pipe").open() as reader:
            assert reader.readline()
        process.join(WAITING_S)
    assert process.exitcode == 0
    assert len(lines(folder, "run")) == 12
    assert (folder / "out" / "model.safetensors").is_file()


def test_the_smallest_budgets_in_the_message_work(folder: Path) -> None:
    refused = here(folder, "run", "--gpu-memory", "1KiB", "--cpu-memory", "1KiB", steps=2)
    assert refused.exit_code == 2
    smallest = [words.split()[0] for words in refused.stderr.split("the smallest that fits is ")[1:]]
    assert len(smallest) == 2, refused.stderr
    assert here(folder, "run", "--gpu-memory", smallest[0], "--cpu-memory", smallest[1], steps=2).exit_code == 0


def test_resident_memory_is_bounded(disk_path: Path) -> None:
    def said(arguments: list[str]) -> str:
        ended = commands.run_program(arguments, disk_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    model = disk_path / "large.json"
    model.write_text(json.dumps(LARGE))
    # Not bf16: where a processor does not multiply it, torch takes half a minute for 64 tokens.
    figures = peak_memory.measure(str(model), "64MiB", "64MiB", disk_path, "fp32", steps=2, run=said)
    assert figures["built"] < figures["bound_built"], figures
    assert figures["trained"] < figures["bound"], figures


def test_another_schedule_goes_on_from_a_delayed_run_that_reached_its_end(folder: Path) -> None:
    assert here(folder, "run", "--update", "delayed", steps=3).exit_code == 0
    after = here(folder, "run", "--update", "forward", "--resume", "must", steps=5)
    assert after.exit_code == 0, after.output
    assert "resumed after step 3" in after.output
    assert [line["step"] for line in lines(folder, "run")] == [1, 2, 3, 4, 5]
