"""Functions run by several processes, the ranks of one gloo group: a fast start, and no rank outlives its test.

A function to run is in a module that a new process can import: a helper of the tests, not a test module. It takes
`rank, ranks` before its own arguments. Ranks meet at a TCP store that this process keeps, as torchrun does.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.context
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its result, or the traceback of its error, or neither of them if it was killed."""

    value: Any = None
    error: str | None = None
    is_finished: bool = False
    after_s: float = 0.0


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120.0,
    wait_s: float = 60.0,
    enter: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Any]:
    """The results of `function(rank, ranks, *arguments, **options)`, by rank.

    Args:
        timeout_s: the group's, for every collective.
        wait_s: for the whole run.
        enter: what each rank does first, before it meets the others.

    Raises:
        AssertionError: ranks failed; with the tracebacks of all that did.
    """
    outcomes = outcomes_of(
        ranks, partial(function, **options), *arguments, timeout_s=timeout_s, wait_s=wait_s, enter=enter
    )
    failed = [f"rank {rank}:\n{one.error or 'was killed'}" for rank, one in enumerate(outcomes) if not one.is_finished]
    assert not failed, "\n".join(failed)
    return [one.value for one in outcomes]


def call(*arguments: Any, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call, for `run_in_turn`."""
    return arguments, options


def run_in_turn(
    ranks: int, function: Callable[..., Any], calls: Sequence[Any], wait_s: float = 120.0
) -> list[list[Any]]:
    """As `run_ranks`, but the same ranks make several calls, one after another: the results by call and rank.

    The first engine of a process takes half as long again as the next ones, and the next ones do not depend on what it
    leaves behind.

    Args:
        calls: what `call` returns, for each of them.
    """
    return [list(found) for found in zip(*run_ranks(ranks, _in_turn, function, calls, wait_s=wait_s))]


def _in_turn(rank: int, ranks: int, function: Callable[..., Any], calls: Sequence[Any]) -> list[Any]:
    found = []
    for arguments, options in calls:
        try:
            found.append(function(rank, ranks, *arguments, **options))
        except BaseException as error:
            error.add_note(f"called with {arguments} and {options}")
            raise
    return found


def outcomes_of(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 120.0,
    wait_s: float = 60.0,
    grace_s: float = 20.0,
    stopped: Collection[int] = (),
    enter: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """How every rank ended; ranks may fail, and may kill or stop themselves.

    Args:
        grace_s: for the others, once one has returned.
        stopped: ranks that stop themselves, and never end: nobody waits for them.
    """
    from torch.distributed import TCPStore

    context = fork_server()
    outcomes = [Outcome() for _ in range(ranks)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, ends = [], {}
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            given = (rank, ranks, store.port, timeout_s, wait_s + grace_s, theirs, function, arguments, enter)
            process = context.Process(target=_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends[ours] = rank
        begin = time.monotonic()  # the first start of all waits for the server, which imports for ten seconds
        deadline = begin + wait_s
        while not set(stopped).issuperset(ends.values()) and (left_s := deadline - time.monotonic()) > 0:
            for end in wait(list(ends), left_s):
                rank = ends.pop(end)
                outcomes[rank] = _received(end, time.monotonic() - begin)
                if outcomes[rank].is_finished:
                    deadline = min(deadline, time.monotonic() + grace_s)
    finally:
        for process in processes:
            process.join(0 if ends else 10.0)
            process.kill()
            process.join()
        for end in ends:
            end.close()
    return outcomes


def fork_server() -> multiprocessing.context.ForkServerContext:
    """A context whose processes are forks of a server that has loaded what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    with pytest.MonkeyPatch.context() as patch:
        tests = Path(__file__).parent  # the server does not get sys.path; the package is the one beside the tests
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tests, tests / "train", tests.parent))))
        forkserver.ensure_running()
    return context


def _received(end: Connection, after_s: float) -> Outcome:
    with end:
        try:
            value, error = end.recv()
        except EOFError:
            return Outcome(after_s=after_s)
    return Outcome(value, error, error is None, after_s)


def _rank(
    rank: int, ranks: int, port: int, timeout_s: float, ends_in_s: float, end: Connection, function: Any,
    arguments: Any, enter: Any,
) -> None:  # fmt: skip
    import torch
    from torch import distributed

    signal.alarm(math.ceil(ends_in_s) + 10)  # if the test itself was killed, nobody else ends this process
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        if enter is not None:
            enter(rank)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        end.send((function(rank, ranks, *arguments), None))
        end.close()
        with contextlib.suppress(RuntimeError):  # a rank has gone
            distributed.barrier()  # the others may need what this one keeps
    except BaseException:
        end.send((None, traceback.format_exc()))
    os._exit(0)  # threads of a group that has lost a rank may never end
