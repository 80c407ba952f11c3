"""fio on the measured file, for comparison.

Scope: running fio, and reading the rate that it reports.
Not here: when (`survey.py` runs it in turn with our own reads and writes).
Owner: a run owns its process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierstore.alignment import ALIGNMENT
from tierstore.errors import ConfigError, StorageError


@dataclass(frozen=True, slots=True)
class Shape:
    """How fio is asked to work.

    Attributes:
        depth: transfers that a single thread has in flight, with libaio; several threads have one each, with pwrite and
            pread.
        huge: its buffers ask for huge pages, as our arena does; through a setting of glibc's malloc, because fio's own
            settings need root.
    """

    block: str
    depth: int
    huge: bool = False
    threads: int = 1

    def __str__(self) -> str:
        how = f"{self.block} x {self.depth}" if self.threads == 1 else f"{self.block}, {self.threads} threads"
        return f"{how}{', huge pages' if self.huge else ''}"


SHAPES = (
    *(Shape(block, depth, huge) for huge in (False, True) for block, depth in (("1M", 64), ("16M", 16), ("256k", 32))),
    Shape("32M", 1, huge=True, threads=8),
)
"""The usual shapes, and those that were faster (fio 3.33, 2-core virtual machine with one virtual disk; ordinary pages
cost fio a fifth of its rate)."""
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_GRACE_S = 60.0


def find_fio() -> str:
    """Where fio is.

    Raises:
        ConfigError: it is not installed.
    """
    found = shutil.which("fio")
    if found is None:
        raise ConfigError("fio is not installed here, so there is nothing to compare with; install it (on Debian and "
                          "Ubuntu: apt install fio), or leave --against away")  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Fio:
    """One way to read or write a file by fio, with O_DIRECT if the file has it."""

    program: str
    path: Path
    size_bytes: int
    verb: Literal["read", "write"]
    shape: Shape
    direct: bool = True

    async def run(self, seconds: float) -> float:
        """Bytes per second that fio reports."""
        return await asyncio.to_thread(self._run, seconds)

    def _run(self, seconds: float) -> float:
        shape = self.shape
        share_bytes = self.size_bytes // shape.threads // ALIGNMENT * ALIGNMENT
        engine = "libaio" if shape.threads == 1 else "psync"
        command = [
            self.program, "--name=probe", f"--filename={self.path}", f"--size={share_bytes}", f"--rw={self.verb}",
            f"--bs={shape.block}", f"--iodepth={shape.depth}", f"--ioengine={engine}",
            "--thread", "--group_reporting", f"--numjobs={shape.threads}", f"--offset_increment={share_bytes}",
            f"--direct={int(self.direct)}", "--time_based", f"--runtime={int(seconds * 1000)}ms",
            "--output-format=json",
        ]  # fmt: skip
        environment = os.environ | (_HUGE_PAGES if self.shape.huge else {})
        try:
            text = subprocess.run(
                command, capture_output=True, check=True, timeout=seconds + _GRACE_S, env=environment
            ).stdout
            return float(json.loads(text)["jobs"][0][self.verb]["bw_bytes"])
        except subprocess.CalledProcessError as error:
            said = " ".join((error.stderr or error.stdout).decode(errors="replace").split())
            raise StorageError(f"fio could not {self.verb} {self.path}: {said[:300]}") from error
        except (subprocess.TimeoutExpired, OSError, ValueError, LookupError, TypeError) as error:
            raise StorageError(f"fio gave no rate for {self.path}: {error}") from error
