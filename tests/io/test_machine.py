"""How much memory may be taken: limits of the machine and of control groups of both versions, several processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tierstore.errors import BudgetError
from tierstore.io import machine
from tierstore.io.machine import MemoryClaim, boot_id, claim_memory, memory_limits, refuse_impossible, shortage

MACHINE_BYTES = 10**12
OWN = "0::/a/b\n"
OWN_OF_VERSION_1 = "5:cpu:/a\n4:hugetlb,memory:/a/b\n0::/\n"


@pytest.fixture(autouse=True)
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with `MACHINE_BYTES` of memory, half of it free, and no control groups yet."""
    memory = SimpleNamespace(total=MACHINE_BYTES, available=MACHINE_BYTES // 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path / "groups"


def limit(file: Path, text: str, own: str = OWN) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")
    machine._OWN_GROUPS.write_text(own)


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({}, MACHINE_BYTES),
        ({"memory.max": "max", "a/memory.max": "max", "a/b/memory.max": "2000"}, 2000),
        ({"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),
        ({"other/memory.max": "1000"}, MACHINE_BYTES),
    ],
)
def test_memory_is_what_control_groups_allow(limits: dict[str, str], found: int, groups: Path) -> None:
    for name, text in limits.items():
        limit(groups / name, text)
    assert min(memory_limits().values()) == found


@pytest.mark.parametrize("name", ["memory/a/b", "memory/a", "memory"])  # the last as a container sees it
def test_control_groups_of_the_first_version_count_too(name: str, groups: Path) -> None:
    limit(groups / "memory.max", "max", OWN_OF_VERSION_1)
    limit(groups / name / "memory.limit_in_bytes", "3000", OWN_OF_VERSION_1)
    assert min(memory_limits().values()) == 3000


def test_a_system_that_tells_nothing_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BOOT", tmp_path / "none")
    assert boot_id()
    assert memory_limits() == {boot_id(): MACHINE_BYTES}


def test_the_machine_comes_first_and_no_two_groups_are_one(groups: Path) -> None:
    for name in ("a", "a/b"):
        limit(groups / name / "memory.max", "1000")
    assert next(iter(memory_limits())) == boot_id()
    assert len(memory_limits()) == 3


def test_all_that_a_limit_has_is_not_too_much() -> None:
    refuse_impossible([claim_memory(MACHINE_BYTES)], "it")
    with pytest.raises(BudgetError, match=r"it takes 931 GiB of CPU memory, and the machine.* allows 931 GiB for all"):
        refuse_impossible([claim_memory(MACHINE_BYTES + 1)], "it")


def test_a_limit_counts_for_those_who_are_under_it(groups: Path) -> None:
    """Two processes in containers of their own, and two in one."""
    limit(groups / "a" / "b" / "memory.max", "1000")
    limits = {boot_id(): MACHINE_BYTES, f"{boot_id()} of another group": 1000}
    mine, other = claim_memory(700), MemoryClaim(limits, 700, 0)
    refuse_impossible([mine, other], "it")
    with pytest.raises(BudgetError, match=r"1.37 KiB of CPU memory, and the machine, .* group, allows 1000 B"):
        refuse_impossible([mine, mine], "it")
    elsewhere = MemoryClaim({"another machine": MACHINE_BYTES}, MACHINE_BYTES, 0)
    refuse_impossible([mine, elsewhere], "it")
    with pytest.raises(BudgetError, match=r"1.37 KiB of CPU memory"):  # in all processes, also on the other machine
        refuse_impossible([elsewhere, other, other], "it")


def test_what_is_not_free_now_is_told() -> None:
    half = MACHINE_BYTES // 2
    elsewhere = MemoryClaim({"another machine": MACHINE_BYTES}, MACHINE_BYTES, 0)
    assert shortage([claim_memory(half), elsewhere]) is None
    assert shortage([claim_memory(half + 100, given_back_bytes=100)]) is None
    told = shortage([claim_memory(half), claim_memory(2**30)])
    assert told is not None
    assert told.startswith("467 GiB of CPU memory will be taken, and 466 GiB are free now")


@pytest.mark.parametrize(
    ("name", "used", "prefix", "own"),
    [
        ("a/memory.max", "memory.current", "", OWN),
        ("memory/a/memory.limit_in_bytes", "memory.usage_in_bytes", "total_", OWN_OF_VERSION_1),
    ],
)
def test_what_others_in_a_control_group_use_is_not_free(
    name: str, used: str, prefix: str, own: str, groups: Path
) -> None:
    limit(groups / name, "1000", own)
    assert shortage([claim_memory(1000)]) is None  # it tells nothing of its use
    folder = (groups / name).parent
    (folder / used).write_text("700\n")
    (folder / "memory.stat").write_text(f"{prefix}active_file 100\n{prefix}inactive_file 200\nanon 400\n")
    assert shortage([claim_memory(500), claim_memory(150, given_back_bytes=50)]) is None
    elsewhere = MemoryClaim({boot_id(): MACHINE_BYTES}, 1000, 0)
    told = shortage([claim_memory(601), elsewhere])
    assert told is not None
    assert told.startswith("601 B of CPU memory will be taken, and 600 B are free now")
