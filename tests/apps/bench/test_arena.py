"""Contestants take turns; one that is missing, fails, dies or hangs is reported, and the others go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierstore.apps.bench import arena
from tierstore.apps.bench.arena import contest
from tierstore.apps.bench.case import Contestant, Result

pytestmark = pytest.mark.usefixtures("no_leaks")

SERVED = """
import contextlib, os, subprocess, sys
from tierstore.apps.bench.serve import Missing, serve

@contextlib.contextmanager
def contend(options):
    print("noise of a library")
    {ready}
    def run_round(number):
        with open(options["log"], "a") as log:
            log.write(options["name"] + str(number) + " ")
        {body}
        return 2.0, {{"figure": 10.0 + number}}
    yield {{"versions": {{"toy": "1"}}}}, run_round
    open(options["log"] + options["name"], "w").close()

serve(contend, works_in_child={works_in_child})
"""


CHILD = (
    "subprocess.Popen([sys.executable, '-S', '-c', 'x = bytearray(2**27); print(1, flush=True); input()'],"
    " stdin=subprocess.PIPE, stdout=subprocess.PIPE)"
)


def contestant(
    log: Path, name: str, *, ready: str = "pass", body: str = "pass", timeout_s: float = 60.0,
    works_in_child: bool = False,
) -> Contestant:
    script = SERVED.format(ready=ready, body=body, works_in_child=works_in_child)
    options = json.dumps({"log": str(log), "name": name})
    return Contestant(name, (sys.executable, "-c", script, options), False, round_timeout_s=timeout_s)


def run(*contestants: Contestant, rounds: int = 2) -> dict[str, Result]:
    results = {one.name: Result(one) for one in contestants}
    contest(results, rounds, lambda what, done: None)
    return results


def test_they_take_turns_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    log, said = tmp_path / "log", list[tuple[str, float]]()
    found = {name: Result(contestant(log, name)) for name in "ab"}
    contest(found, 2, lambda what, done: said.append((what, done)))
    assert log.read_text() == "a0 b0 b1 a1 a2 b2 "
    assert [answer.figures["figure"] for answer in found["a"].answers] == [11.0, 12.0]
    assert (found["a"].median("figure"), found["a"].median("seconds"), found["a"].median("other")) == (11.5, 2.0, None)
    assert found["a"].facts == {"versions": {"toy": "1"}}
    assert 2**20 < (found["a"].peak_rss_bytes or 0) < 2**28
    assert said[0] == ("a: starts", 0.0)
    assert said[-1] == ("b: round 2 of 2", 7 / 8)
    assert (tmp_path / "loga").exists()  # it was asked to end, and cleaned up


@pytest.mark.parametrize(
    ("ready", "body", "works_in_child", "is_counted"),
    [
        (f"child = {CHILD}; child.stdout.readline()", "pass", False, True),
        ("pass", f"child = {CHILD}; child.communicate()", True, True),
        ("pass", f"child = {CHILD}; child.communicate()", False, False),
    ],
    ids=["a child that runs", "the work of a round", "a child that has ended"],
)
def test_the_peak_is_that_of_children_too(
    tmp_path: Path, ready: str, body: str, works_in_child: bool, is_counted: bool
) -> None:
    one = contestant(tmp_path / "log", "a", ready=ready, body=body, works_in_child=works_in_child)
    (found,) = run(one, rounds=1).values()
    assert found.trouble is None
    assert ((found.peak_rss_bytes or 0) > 2**27) is is_counted


def test_what_the_host_takes_of_the_cores_is_told_of_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two cores: a round takes two core seconds, of which the host takes 0.1 and 0.5 in the rounds that count.
    seen = iter([(0.0, 10.0), (2.0, 12.0), (2.0, 12.0), (2.1, 14.0), (2.1, 14.0), (2.6, 16.0)])
    monkeypatch.setattr(arena, "_core_seconds", lambda: next(seen))
    (found,) = run(contestant(tmp_path / "log", "a")).values()
    assert [answer.stolen for answer in found.answers] == pytest.approx([0.05, 0.25])


def test_seconds_of_cores_pass_with_the_clock() -> None:
    (stolen_s, passed_s), start_s = arena._core_seconds(), time.monotonic()
    while time.monotonic() < start_s + 0.2:
        pass
    (now_stolen_s, now_passed_s), took_s = arena._core_seconds(), time.monotonic() - start_s
    assert 0 <= now_stolen_s - stolen_s <= now_passed_s - passed_s
    assert now_passed_s - passed_s == pytest.approx(took_s * (os.cpu_count() or 1), rel=0.6)


@pytest.mark.parametrize(
    ("ready", "body", "trouble", "answers"),
    [
        ("raise Missing('no toys here')", "pass", "missing: no toys here", 0),
        ("import no_such_package", "pass", "missing: No module named 'no_such_package'", 0),
        ("sys.exit('no')", "pass", "failed: it ended with exit code 1; last words: noise of a library | no", 0),
        ("pass", "if number == 2: raise ValueError('bad luck')", "failed: ValueError: bad luck", 1),
        ("pass", "if number == 1: os.kill(os.getpid(), 9)", "failed: it ended by signal 9; last words: noise", 0),
        ("pass", "os.write(answers_fd, b'nonsense\\n')", "failed: its answer is no JSON object: b'nonsense'", 0),
    ],
)  # fmt: skip
def test_trouble_is_told_and_the_others_go_on(
    tmp_path: Path, ready: str, body: str, trouble: str, answers: int
) -> None:
    body = body.replace("answers_fd", "3")  # the first that serve() opens
    found = run(contestant(tmp_path / "log", "bad", ready=ready, body=body), contestant(tmp_path / "log", "good"))
    assert found["good"].trouble is None
    assert len(found["good"].answers) == 2
    assert (found["bad"].trouble or "").startswith(trouble)
    assert len(found["bad"].answers) == answers


def test_what_cannot_be_started_is_told() -> None:
    found = run(
        Contestant("gone", ("/no/such/python",), True), Contestant("none", ("x",), True, missing="no driver"), rounds=1
    )
    assert [found[name].trouble for name in ("gone", "none")] == [
        "failed: cannot be started: No such file or directory", "missing: no driver",
    ]  # fmt: skip


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    start = "child = subprocess.Popen(['sleep', '600'])"
    body = f"{start}; open(options['log'] + 'pid', 'w').write(str(child.pid)); child.wait()"
    found = run(contestant(tmp_path / "log", "bad", body=body, timeout_s=1.0), rounds=1)
    assert (found["bad"].trouble or "").startswith("failed: no answer within 1 s; last words: noise of a library")
    assert_ended(int((tmp_path / "logpid").read_text()))


def test_an_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    pids = list[int]()

    def tell(what: str, done: float) -> None:
        if what == "a: round 1 of 1":
            pids.append(int((tmp_path / "pid").read_text()))
            raise KeyboardInterrupt

    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    with pytest.raises(KeyboardInterrupt):
        contest({"a": Result(contestant(tmp_path / "log", "a", body=body))}, 1, tell)
    assert_ended(pids[0])


def test_contestants_end_with_the_process_that_is_killed_while_it_asks(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    start = "child = subprocess.Popen(['sleep', '600'])"
    body = f"{start}; print(os.getpid(), child.pid, file=open({str(pids)!r}, 'a'), flush=True); child.wait()"
    one = contestant(tmp_path / "log", "a", body=body)
    asks = (
        "from tierstore.apps.bench import arena, case\n"
        f"one = case.Contestant('a', {one.argv!r}, False)\n"
        "arena.contest({'a': case.Result(one)}, 1, lambda what, done: None)\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", asks])
    try:
        deadline_s = time.monotonic() + 60.0
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert asking.poll() is None
            assert time.monotonic() < deadline_s
            os.sched_yield()
    finally:
        asking.kill()
        asking.wait()
    for pid in map(int, pids.read_text().split()):
        assert_ended(pid)


def test_an_interrupt_leaves_what_was_answered(tmp_path: Path) -> None:
    def tell(what: str, done: float) -> None:
        if what == "a: round 2 of 2":
            raise KeyboardInterrupt

    found = {"a": Result(contestant(tmp_path / "log", "a"))}
    with pytest.raises(KeyboardInterrupt):
        contest(found, 2, tell)
    assert [answer.figures["figure"] for answer in found["a"].answers] == [11.0]
    assert found["a"].trouble is None


def assert_ended(pid: int) -> None:
    """Waits until the process is gone, or a zombie that its new parent has yet to reap."""
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        os.sched_yield()
    pytest.fail(f"process {pid} goes on")
