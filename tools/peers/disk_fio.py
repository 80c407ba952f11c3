#!/usr/bin/env python3
"""fio in one setting, once over a whole file in each direction; needs no more than Python and fio."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from serve import Missing, Round, serve


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    program = shutil.which("fio")
    if program is None:
        raise Missing("fio is not installed (on Debian and Ubuntu: apt install fio)")

    def run_once(verb: str) -> tuple[float, float]:
        command = [
            program, "--name=bench", f"--filename={options['path']}", f"--size={options['size']}", f"--rw={verb}",
            f"--bs={options['block']}", f"--ioengine={options['engine']}", f"--iodepth={options['depth']}",
            "--direct=1", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"fio could not {verb}: {' '.join((done.stderr or done.stdout).split())[:300]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][verb]
        return job["runtime"] / 1e3, job["bw_bytes"] / 1e9

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        runs = {verb: run_once(verb) for verb in options["verbs"]}
        return sum(seconds for seconds, _ in runs.values()), {verb: rate for verb, (_, rate) in runs.items()}

    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
    yield {"versions": {"fio": version.removeprefix("fio-")}}, run_round


if __name__ == "__main__":
    serve(contend, works_in_child=True)
