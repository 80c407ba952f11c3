"""`tierstore train` under torchrun, as a person runs it: killed, interrupted, resumed with another number of ranks.

Most ranks are forks, which need not import anything: forks of torchrun's agent, or, where no rank is killed, forks
that have torchrun's variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import psutil
import pytest
import torch
from commands import forked, launched
from crews import all_fail, differ, given, one_fails, one_is_lost, trained
from ranks import call, run_in_turn, run_ranks
from torch.distributed import HashStore, TCPStore
from typer.testing import CliRunner

import tierstore
from tierstore.apps import crew
from tierstore.apps.crew import Crew
from tierstore.apps.data import Batches, read_corpus
from tierstore.apps.launch import Launch
from tierstore.apps.options import TrainOptions
from tierstore.apps.stopping import StopRequest
from tierstore.apps.train import _OF_A_RANK
from tierstore.cli import app
from tierstore.errors import ConfigError

ROOT = Path(__file__).parents[2]
TINY = {"model_type": "gpt2", "vocab_size": 256, "n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
WAITING_S = 60  # for processes; far more than they need
STEPS = 10
RANKS = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def folder(disk_path: Path) -> Path:
    (disk_path / "config.json").write_text(json.dumps(TINY))
    (disk_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return disk_path


@pytest.fixture
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def arguments(folder: Path, name: str, *options: str, steps: int = STEPS) -> list[str]:
    """Arguments of a run with the store `name` and lines in `name.jsonl`."""
    return [
        "train", "--config", f"{folder}/config.json", "--data", f"{folder}/text", "--nvme", f"{folder}/{name}",
        "--json", f"{folder}/{name}.jsonl", "--gpu-memory", "4MiB", "--cpu-memory", "8MiB", "--dtype", "fp32",
        "--batch", "4", "--accumulate", "2", "--sequence", "32", "--evaluate", "3", "--steps", str(steps),
        "--threads", "1", *options,
    ]  # fmt: skip


def together(given: list[str], folder: Path) -> tuple[list[int | None], str]:
    """Runs two ranks, neither of which is killed; returns the exit code of each, and what the first one says.

    The second rank is a fork, the first one a whole interpreter, which ends by itself.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps it
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}",
              "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    places = [common | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(2)]
    with forked(given, folder / "output", folder / "errors", places[1]) as second:
        first = subprocess.run(
            [sys.executable, "-m", "tierstore.cli", *given], cwd=ROOT, env=os.environ | places[0], timeout=WAITING_S,
            capture_output=True, text=True,
        )  # fmt: skip
        second.join(WAITING_S)
    assert [first.stderr, (folder / "output").read_text(), (folder / "errors").read_text()] == ["", "", ""]
    return [first.returncode, second.exitcode], first.stdout


def alone(given: list[str]) -> str:
    """One rank, in this process."""
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    return result.output


def losses(folder: Path, name: str) -> dict[int, float]:
    """Losses by step; checks that a step with two lines has the same loss in both."""
    found: dict[int, float] = {}
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def wait_for(run: BaseProcess, folder: Path, name: str, words: str) -> None:
    """Waits until a file in the folder contains `words`."""
    end_s = time.monotonic() + WAITING_S
    while not ((folder / name).exists() and words in (folder / name).read_text()):
        run.join(0.01)
        is_over = not run.is_alive() or time.monotonic() > end_s
        assert not is_over, f"no {words} yet: {(folder / 'errors').read_text()}"


def held_out(output: str) -> list[float]:
    (row,) = [line for line in output.splitlines() if "held-out loss" in line]
    return [float(number) for number in re.findall(r"\d+\.\d+", row)]


def test_two_ranks_train_lose_one_go_on_and_are_interrupted(folder: Path, own_threads: None) -> None:
    one = alone(arguments(folder, "one"))
    codes, two = together(arguments(folder, "two", "--export", f"{folder}/out"), folder)
    assert codes == [0, 0]
    assert "2 ranks, ZeRO stage 3, 2 of 4 samples each" in two
    expected = losses(folder, "two")
    assert expected == pytest.approx(losses(folder, "one"), rel=1e-5)
    assert held_out(two) == pytest.approx(held_out(one), abs=2e-3)
    assert (folder / "out" / "model.safetensors").exists()

    given = arguments(folder, "parts", "--resume", "auto", steps=10**6)
    with launched(given, folder / "output", folder / "errors", ranks=2, restarts=1) as run:
        assert run.pid is not None
        wait_for(run, folder, "parts.jsonl", '"step": 2,')
        _, second = psutil.Process(run.pid).children()
        second.kill()
        wait_for(run, folder, "output", "resumed after step")
        wait_for(run, folder, "parts.jsonl", '"step": 5,')
        os.kill(run.pid, signal.SIGINT)
        run.join(WAITING_S)
        assert run.exitcode
    errors = (folder / "errors").read_text()
    assert f'File "{Path(tierstore.__file__).parent}' not in errors  # only the agent prints tracebacks
    lost, *said = re.findall(r"^tierstore: (.*)$", errors, re.MULTILINE)
    assert re.match("rank 0 of 2 waited for .*, and rank 1 does not answer: it has died or is stuck", lost)
    (last,) = [int(number) for number in re.findall("stopped by SIGINT after step ([0-9]+)", " ".join(said))]
    kept = f"stopped by SIGINT after step {last} of 1000000; it is committed: go on with --resume auto"
    assert said == ["stopping after this step; Ctrl-C again stops at once", kept]
    found = losses(folder, "parts")
    assert list(found) == list(range(1, last + 1))
    assert all(found[step] == loss for step, loss in expected.items() if step <= last)

    output = alone(arguments(folder, "parts", "--resume", "must", steps=last + 3))
    assert f"resumed after step {last}" in output
    assert f"step {last + 3}/{last + 3}" in output
    found = {step: loss for step, loss in losses(folder, "parts").items() if step in expected}
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)


@pytest.mark.parametrize(
    ("function", "sentences"),
    [
        (one_fails, ["rank 1: no space left", ""]),
        (all_fail, ["no such file", ""]),
        (differ, ["steps is 4 at rank 1 and 3 at rank 0; give all ranks the same", ""]),
        (one_is_lost, ["rank 0 stops, for rank 1 has failed", "rank 1: no space left"]),
    ],
)
def test_a_failure_is_said_once(function: Any, sentences: list[str]) -> None:
    assert run_ranks(2, function) == sentences


def test_ranks_with_another_export_or_model_are_told_before_they_train(folder: Path) -> None:
    """Ranks are on several machines. All take part in an export; other numbers of heads have the same shapes."""
    other = folder / "other.json"
    other.write_text(json.dumps(TINY | {"n_head": 4}))
    found = run_in_turn(2, given, [call(str(folder), {"export": folder / "out"}), call(str(folder), {"config": other})])
    assert found == [
        ["whether to --export is True at rank 1 and False at rank 0; give all ranks the same", ""],
        ["n_head of the model is 4 at rank 1 and 2 at rank 0; give all ranks the same", ""],
    ]


def test_a_stop_that_one_rank_hears_ends_all_after_the_same_step(folder: Path) -> None:
    calls = [call(str(folder), "whole", 5), call(str(folder), "parts", 5, stop_at=3), call(str(folder), "parts", 5)]
    whole, stopped, resumed = run_in_turn(2, trained, calls)
    assert whole[0]["draw"] != whole[1]["draw"]  # each rank has dropout of its own
    assert [(rank["stopped_by"], rank["last"]) for rank in stopped] == [(signal.SIGINT, 3)] * 2
    assert resumed[0]["losses"] == whole[0]["losses"]
    assert [rank["draw"] for rank in resumed] == [rank["draw"] for rank in whole]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--batch", "6"], "--batch 6 cannot be divided among 4 ranks: it counts the samples of all of them; give a "
                           "multiple of 4, such as 8"),
        (["--zero", "0", "--nvme", "x"], "--zero 0 keeps everything at every rank, and a store keeps every byte once"),
        (["--device", "cuda:1"], "2 ranks cannot share --device cuda:1: give --device cuda, and each takes the GPU of "
                                 "its local rank"),
        (["--options", "no-such-file"], "cannot read the options no-such-file"),
    ],
)  # fmt: skip
def test_options_that_ranks_cannot_use(given: list[str], sentence: str) -> None:
    first = CliRunner().invoke(app, ["train", *given], env={**RANKS, "LOCAL_RANK": "0"})
    assert (first.exit_code, first.stderr.startswith(f"tierstore: {sentence}")) == (2, True), first.stderr
    second = CliRunner().invoke(app, ["train", *given], env=RANKS)
    assert (second.exit_code, second.stderr) == (2, "")


def test_a_rank_knows_its_place() -> None:
    launch = Launch.of(RANKS)
    assert launch == Launch(1, 4, 1, 2)
    assert launch.options(TrainOptions(device="cuda", threads=3)).device == "cuda:1"
    assert Launch.of({}) == Launch.of({"RANK": "0"}) == Launch()
    assert Launch().options(TrainOptions(batch=3)) == TrainOptions(batch=3)
    with pytest.raises(ConfigError, match=r"RANK=one, WORLD_SIZE=4, LOCAL_RANK=1.*start several ranks with torchrun"):
        Launch.of({**RANKS, "RANK": "one"})
    for name, value in (("RANK", "4"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "5")):
        with pytest.raises(ConfigError, match=rf"{name}={value}.*start several ranks with torchrun"):
            Launch.of({**RANKS, name: value})


@pytest.mark.parametrize("local_count", [2, 1])
def test_machines_with_different_numbers_of_ranks_are_refused_on_each(local_count: int) -> None:
    """Each machine would count the machines in its own way, and their ranks would wait for each other elsewhere."""
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local_count)}
    said = rf"{local_count} of the 3 ranks are on this machine, one of 2: give torchrun the same --nproc-per-node"
    with pytest.raises(ConfigError, match=said):
        Launch.of({**place, "GROUP_WORLD_SIZE": "2"})
    assert Launch.of({**RANKS, "GROUP_WORLD_SIZE": "2"}).nodes == 2
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launch.of({**alone, "GROUP_WORLD_SIZE": "2"}).nodes == 1  # of a run that has started this one


def test_an_uneven_number_of_ranks_is_refused_also_without_the_number_of_machines() -> None:
    with pytest.raises(ConfigError, match="2 of the 3 ranks are on this machine: give torchrun the same"):
        Launch.of({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


def test_paths_may_differ_between_ranks() -> None:
    """Ranks are on several machines."""
    paths = {name for name, kind in get_type_hints(TrainOptions).items() if "Path" in str(kind)}
    assert paths - {*_OF_A_RANK} == set()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_together_see_what_one_sees(folder: Path, ranks: int) -> None:
    corpus = read_corpus(folder / "text")
    one = Batches(corpus, length=8, batch=4, seed=1)
    several = [Batches(corpus, length=8, batch=4, seed=1, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(2):
        assert torch.equal(torch.cat([own.next() for own in several]), one.next())
    assert {own.position for own in several} == {8}
    alone = Batches(corpus, length=8, batch=4, seed=1)
    alone.load_state_dict(several[-1].state_dict())
    assert torch.equal(alone.next(), one.next())


def test_the_first_rank_speaks_of_a_signal_and_only_when_all_agree(capfd: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []
    for rank in (1, 0):
        with StopRequest(left.append, rank=rank, ranks=2) as stop, stop.wished("all is kept"):
            signal.raise_signal(signal.SIGINT)
            assert (stop.signal_number, capfd.readouterr().err) == (signal.SIGINT, "")
            stop.announce()
            signal.raise_signal(signal.SIGINT)
    assert left == [130, 130]
    assert capfd.readouterr().err == (
        "tierstore: stopping after this step; Ctrl-C again stops at once\ntierstore: interrupted at once; all is kept\n"
    )


def test_a_rank_that_fails_is_not_cut_short_by_the_launcher() -> None:
    left: list[int] = []
    with StopRequest(left.append, rank=0, ranks=2) as stop:
        with pytest.raises(ConfigError), stop.wished("all is kept"):
            raise ConfigError("no such thing")
        signal.raise_signal(signal.SIGTERM)
        assert left == []
        signal.raise_signal(signal.SIGTERM)
        assert left == [143]


def test_ranks_that_are_started_again_do_not_meet_those_before_them() -> None:
    """torchrun keeps one store over all starts."""
    store, names = HashStore(), []
    store.set("asks/2", "a rank that has died")
    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            first = threads.submit(crew._name_of_start, store, Launch(0, 3))
            assert store.get("for/a rank that has died")
            others = [threads.submit(crew._name_of_start, store, Launch(rank, 3)) for rank in (1, 2)]
            names += [{one.result(WAITING_S) for one in (first, *others)}]
    assert [len(both) for both in names] == [1, 1]
    assert names[0] != names[1]


def test_one_rank_needs_no_group() -> None:
    crew = Crew()
    assert crew.exchange("nothing", 3) == [3]
    assert crew.all_succeed("nothing", lambda: 4) == 4
    assert crew.sentence(ConfigError("no such\n thing")) == "no such thing"


@pytest.mark.parametrize("fails", [False, True])
def test_collectives_of_a_run_that_fails_are_aborted(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some may wait for a rank that is gone, if the engine could not be closed."""
    ended = []
    monkeypatch.setattr(crew, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(crew, "_name_of_start", lambda *_: "start")
    monkeypatch.setattr(crew.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(crew, "Ranks", lambda **_: SimpleNamespace(exchange=lambda *_: [], close=lambda: None))
    monkeypatch.setattr(crew, "end_groups", lambda groups, is_whole: ended.append((groups, is_whole)))
    with contextlib.suppress(KeyboardInterrupt), crew.joined(Launch(0, 2, 0, 2), "cpu"):
        if fails:
            raise KeyboardInterrupt
    assert ended == [([None], not fails)]
