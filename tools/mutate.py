#!/usr/bin/env python3
"""Do the tests bite? Takes one fsync, barrier, checksum, lock or lease out of a copy at a time, and a test must fail.

    python tools/mutate.py [--only PART_OF_A_NAME]... [--list]

Prints a table, and exits 1 if a mutation survived, or if one does not apply any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("tierstore", "tests", "tools", "pyproject.toml", "README.md")
LIMIT_S, LIMIT_OF_ALL_S = 60.0, 600.0
TESTS_FAILED = 1  # pytest's exit status; others are its own troubles


def run_tests(tree: Path, tests: Iterable[str], limit_s: float) -> tuple[int | None, str]:
    """Exit status and output of pytest; no status if it did not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    command += [f"tests/{test}" for test in sorted(set(tests))]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with (tree / "output").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the tests have started, too
        process.wait()
        output.seek(0)
        return status, output.read()


def outcome_of(mutation: Mutation, tree: Path) -> str:
    """`red` if the test failed, else in capitals what it did instead."""
    try:
        (tree / mutation.path).write_text(mutation.of((ROOT / mutation.path).read_text()))
        status, output = run_tests(tree, [mutation.test], LIMIT_S)
    finally:
        shutil.copy2(ROOT / mutation.path, tree / mutation.path)
    if status in (TESTS_FAILED, None):
        return "red" if status else "red, no end"
    return "SURVIVED" if status == 0 else f"NO RESULT:\n{textwrap.indent(output[-2000:], '    ')}\n   "


def line_of(mutation: Mutation, outcome: str) -> str:
    """A row of the table."""
    return f"{mutation.name:40} {mutation.place:50} {outcome:12} {mutation.test}"


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="TEXT", help="mutations with this in their name or place")
    parser.add_argument("--list", action="store_true", help="tell them, and run nothing")
    asked = parser.parse_args()
    chosen = [m for m in MUTATIONS if not asked.only or any(text in f"{m.place} {m.name}" for text in asked.only)]
    if not chosen:
        parser.error("no mutation has that in its name or place; --list tells all")
    for mutation in chosen:
        mutation.of((ROOT / mutation.path).read_text())
    if asked.list:
        for mutation in chosen:
            print(line_of(mutation, ""))
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, tree / name)
        for mutation in chosen:
            outcomes.append(outcome_of(mutation, tree))
            print(line_of(mutation, outcomes[-1]), flush=True)
        status, output = run_tests(tree, (mutation.test for mutation in chosen), LIMIT_OF_ALL_S)
    if status != 0:
        print(f"the tests fail without a mutation, too:\n{output[-2000:]}")
        return 1
    red = sum(outcome.startswith("red") for outcome in outcomes)
    print(f"{red} of {len(outcomes)} mutations turn their test red")
    return 0 if red == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
