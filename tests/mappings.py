"""What the system knows of a process's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)


def asks_for_huge_pages(address: int) -> bool:
    """Whether this process has advised huge pages for the mapping at this address."""
    is_its = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, last = line.split()[0].partition("-")
        if dash:
            is_its = int(first, 16) <= address < int(last, 16)
        elif is_its and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")
