"""Contestants as processes, asked in turns: A B C, C B A, A B C, ...

Scope: starting, asking, ending them; one that dies or errs is reported and the others go on.
Not here: what they do (`serve.py` is their side), what follows from the answers (the cases).
Owner: `contest` ends every process that it starts, with its children. See measure/loads.py [Note: in turn].
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import IO, Any, cast

import psutil

from tierstore.apps.bench.case import Answer, Contestant, Result, Results

Tell = Callable[[str, float], None]
_CLOSE_S = 30.0
_SAID_LINES = 3
_TICK_S = 0.01  # of the kernel's clock
_HEARD = {"PYTHONUNBUFFERED": "1"}  # so that its last words are there even if it is killed


class _Lost(Exception):
    """A contestant that will not answer any more, and why."""


def contest(results: Results, rounds: int, tell: Tell) -> None:
    """Fill the results of contestants, round by round. Round 0 warms up and does not count.

    Args:
        results: without answers yet; after an interrupt those in them are valid.
        tell: called before each start and each round of a contestant, with what begins and the share done so far.
    """
    total, begun = len(results) * (rounds + 2), 0

    def tell_of(what: str) -> None:
        nonlocal begun
        tell(what, begun / total)
        begun += 1

    with contextlib.ExitStack() as ended:
        running: list[tuple[Result, _Process]] = []
        for name, result in results.items():
            tell_of(f"{name}: starts")
            try:
                running.append((result, ended.enter_context(_started(result))))
            except _Lost as error:
                result.trouble = str(error)
        for number in range(rounds + 1):
            for result, process in running if number % 2 == 0 else running[::-1]:
                tell_of(f"{result.contestant.name}: {f'round {number} of {rounds}' if number else 'warm-up'}")
                stolen_s, passed_s = _core_seconds()
                try:
                    answer = process.ask({"round": number}, result.contestant.round_timeout_s)
                except _Lost as error:
                    result.trouble = str(error)
                    process.end(at_once=True)  # it must not run on during another's round
                    continue
                now_stolen_s, now_passed_s = _core_seconds()
                if number:
                    stolen = (now_stolen_s - stolen_s) / max(now_passed_s - passed_s, _TICK_S)
                    result.answers.append(replace(answer, stolen=stolen))
            running = [(result, process) for result, process in running if result.trouble is None]


def _core_seconds() -> tuple[float, float]:
    """Seconds of all cores since the machine started: those that its host took, and all that passed."""
    times = psutil.cpu_times()
    is_within = ("guest", "guest_nice")  # these are counted in user and nice
    passed_s = sum(seconds for name, seconds in times._asdict().items() if name not in is_within)
    return getattr(times, "steal", 0.0), passed_s


def _started(result: Result) -> _Process:
    """The process of a contestant, ready; its facts are kept."""
    process = _Process(result.contestant)
    try:
        result.facts = process.facts(result.contestant.start_timeout_s)
    except BaseException:
        process.end(at_once=True)
        raise
    return process


class _Process:
    """One contestant that runs, in a session of its own: Ctrl-C reaches only this process, which ends it."""

    def __init__(self, contestant: Contestant) -> None:
        if contestant.missing is not None:
            raise _Lost(f"missing: {contestant.missing}")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                contestant.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, bufsize=0,
                start_new_session=True, env={**os.environ, **_HEARD, **contestant.environment},
            )  # fmt: skip
        except OSError as error:
            self._said.close()
            raise _Lost(f"failed: cannot be started: {error.strerror}") from None
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._unread = b""

    def __enter__(self) -> _Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(at_once=kind is not None)

    def end(self, *, at_once: bool) -> None:
        """Ends the contestant, which may clean up first unless `at_once`, with its children. Twice is fine."""
        process = self._process
        if self._stdin.closed:
            return
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            if not at_once:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_CLOSE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too; what it made lies in the scratch directory
            process.wait()
            self._stdout.close()
            self._said.close()

    def facts(self, timeout_s: float) -> dict[str, Any]:
        """What it says of itself once it is ready."""
        answer = self._answer(timeout_s)
        if "missing" in answer:
            raise _Lost(f"missing: {answer['missing']}")
        if not isinstance(answer.get("ready"), dict):
            raise _Lost(f"failed: instead of being ready it said {json.dumps(answer)[:200]}")
        return dict(answer["ready"])

    def ask(self, question: dict[str, Any], timeout_s: float) -> Answer:
        """One round."""
        with contextlib.suppress(OSError):  # it died: the answer will say so
            self._stdin.write(json.dumps(question).encode() + b"\n")
        answer = self._answer(timeout_s)
        try:
            return Answer(float(answer["seconds"]), dict(answer["figures"]), int(answer["peak_rss"]))
        except (KeyError, TypeError, ValueError):
            raise _Lost(f"failed: {answer.get('error', f'it said {json.dumps(answer)[:200]}')}") from None

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        line = self._line(time.monotonic() + timeout_s, timeout_s)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _Lost(f"failed: its answer is no JSON object: {line[:200]!r}")
        return answer

    def _line(self, deadline_s: float, timeout_s: float) -> bytes:
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._stdout], [], [], left_s)[0]:
                raise _Lost(f"failed: no answer within {timeout_s:g} s{self._last_words()}")
            part = os.read(self._stdout.fileno(), 2**16)
            if not part:
                code = self._process.wait()
                how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
                raise _Lost(f"failed: it ended {how}{self._last_words()}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - 4096))
        lines = self._said.read().decode(errors="replace").split("\n")
        last = [line.strip() for line in lines if line.strip()][-_SAID_LINES:]
        return f"; last words: {' | '.join(last)}" if last else ""
