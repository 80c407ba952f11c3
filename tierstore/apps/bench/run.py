"""One run of `tierstore bench`: its cases one after the other.

Scope: room on the disk, a scratch directory, heats, rows. Not here: what a person sees of it (`report.py`).
Owner: the scratch directory is removed at the end of a case, however it ends.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tierstore.apps.bench.arena import Tell, contest
from tierstore.apps.bench.case import BenchOptions, Case, Result, Results, Row
from tierstore.apps.options import Precision, as_option
from tierstore.apps.scratch import clear_scratch, scratch
from tierstore.config import format_size
from tierstore.errors import ConfigError, StorageError, StorageFull

CASES = ("disk", "adam", "step", "load", "reduce")
_LEFT_FREE_BYTES = 2**28
_SCRATCH = ".tierstore-bench-"
_NOT_YET = "missing: its turn has not come"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case, its table, and all answers behind it."""

    name: str
    rows: Sequence[Row]
    results: Results


def cases_of(name: str, device: str = "cpu") -> list[Case]:
    """The case of a name, or all of them for `all`; on CUDA `all` is the one case that needs a GPU, some minutes.

    Raises:
        ConfigError: no such case.
    """
    if name not in (*CASES, "all"):
        raise ConfigError(f"bench knows {', '.join(CASES)} and all, not {name!r}")
    names = (name,) if name != "all" else ("cuda",) if device == "cuda" else CASES
    return [importlib.import_module(f"tierstore.apps.bench.{one}").CASE for one in names]


def refuse_unread(options: BenchOptions, given: Sequence[str], cases: Sequence[Case]) -> None:
    """Refuses an option that would change nothing.

    Args:
        given: the names of the options that were given.

    Raises:
        ConfigError: no case reads it, or compares with that peer.
    """
    for name in options.peer:
        asked = replace(options, peer=(name,))
        contestants = (one for case in cases for heat in case.heats(asked, options.nvme) for one in heat)
        if not any(one.is_peer for one in contestants):
            raise ConfigError(f"--peer {name}: nothing that would run compares with it")
    readers = {name: [case.name for case in cases_of("all") if name in case.reads] for name in given}
    for name, known in readers.items():
        if known and not any(name in case.reads for case in cases):
            raise ConfigError(f"{as_option(name)} is used only by {' and '.join(known)}, which would not run")


def check_room(options: BenchOptions, cases: Sequence[Case]) -> None:
    """Refuses what does not fit, before anything is written.

    Raises:
        StorageFull: says how much is needed, and by which case.
    """
    free_bytes = shutil.disk_usage(options.nvme).free
    for case in cases:
        writes_bytes = case.disk_bytes(options)
        if writes_bytes and free_bytes < writes_bytes + _LEFT_FREE_BYTES:
            raise StorageFull(
                f"bench {case.name} writes {format_size(writes_bytes)} ({writes_bytes} B) in {options.nvme} and leaves "
                f"{format_size(_LEFT_FREE_BYTES)} free, but only {format_size(free_bytes)} ({free_bytes} B) are free; "
                f"give a smaller --size, or --nvme on another disk"
            )


def clear_left(options: BenchOptions) -> list[str]:
    """Removes what killed runs have left on the disk, and says so."""
    return [f"removed {path}, of a run that was killed" for path in clear_scratch(options.nvme, _SCRATCH)]


def notes(options: BenchOptions, cases: Sequence[Case]) -> list[str]:
    """What a person should know before the run."""
    if not any(case.name == "step" for case in cases):
        return []
    from tierstore.apps.arithmetic import slow_products_notes  # imports torch

    return slow_products_notes(Precision(options.dtype), options.device)


def run_case(case: Case, options: BenchOptions, tell: Tell, keep: Callable[[Outcome], None]) -> Outcome:
    """All heats of a case.

    Args:
        keep: called after each heat, also after one that is interrupted, with all that is known by then; contestants of
            later heats are in it as missing.
    """
    with scratch(options.nvme, _SCRATCH) as directory:
        tell(f"{case.name}: makes ready", 0.0)
        try:
            case.prepare(options, directory)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk by a RuntimeError
            raise StorageError(f"bench {case.name} cannot make its files in {options.nvme}: {error}") from error
        heats = [
            [replace(one, round_timeout_s=options.longer * one.round_timeout_s) for one in heat]
            for heat in case.heats(options, directory)
        ]
        results = {one.name: Result(one, trouble=_NOT_YET) for heat in heats for one in heat}
        for index, heat in enumerate(heats):

            def tell_of(what: str, done: float, index: int = index) -> None:
                tell(f"{case.name}: {what}", (index + done) / len(heats))

            taking_turns = {one.name: Result(one) for one in heat}
            results |= taking_turns
            try:
                contest(taking_turns, options.rounds, tell_of)
            except BaseException as error:
                how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed: it ended"
                for one in taking_turns.values():
                    if one.trouble is None and len(one.answers) < options.rounds:
                        one.trouble = f"{how} after {len(one.answers)} of {options.rounds} rounds"
                raise
            finally:
                outcome = Outcome(case.name, case.rows(options, results), results)
                keep(outcome)
        return outcome
