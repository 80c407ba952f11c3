"""The arena: where buffers lie, who gets them next, and what is left when it closes."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mappings import asks_for_huge_pages, needs_huge_pages

from tierstore.errors import BudgetError, ClosedError
from tierstore.io.memory import HUGE_PAGE_BYTES, Arena, Lease, Pool, huge_pages

PAGE = 4096
CAPACITY_PAGES = 16


def make_pool(pages: int = CAPACITY_PAGES) -> Pool:
    return Arena(pages * PAGE).pool("test", pages * PAGE)


def take(pool: Pool, pages: int) -> Lease:
    lease = pool.try_reserve(pages * PAGE)
    assert lease is not None
    return lease


@dataclass
class Session:
    """Tasks that ask for memory, in order, and what they got."""

    pool: Pool
    asked: list[asyncio.Future[Lease]] = field(default_factory=list)
    freed: set[int] = field(default_factory=set)

    def held(self) -> dict[int, Lease]:
        return {
            index: task.result()
            for index, task in enumerate(self.asked)
            if index not in self.freed and task.done() and not task.cancelled()
        }

    def check(self) -> None:
        spans = sorted((lease.start, lease.start + len(lease.array)) for lease in self.held().values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(start % PAGE == 0 and end <= self.pool.capacity_bytes for start, end in spans)
        assert sum(end - start for start, end in spans) <= self.pool.used_bytes <= self.pool.capacity_bytes
        waiting = [index for index, task in enumerate(self.asked) if not task.done()]
        granted = [index for index, task in enumerate(self.asked) if task.done() and not task.cancelled()]
        assert not waiting or not granted or max(granted) < min(waiting), "somebody overtook"


operations = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(1, CAPACITY_PAGES * PAGE)),
        st.tuples(st.just("reserve at"), st.integers(0, CAPACITY_PAGES - 1)),
        st.tuples(st.just("reserve last"), st.integers(0, CAPACITY_PAGES - 1)),
        st.tuples(st.just("free"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("free and cancel"), st.integers(0, 30)),
        st.tuples(st.just("turn"), st.just(0)),
    ),
    max_size=40,
)


@given(operations)
@settings(max_examples=200)
def test_any_sequence_keeps_the_pool_right(sequence: list[tuple[str, int]]) -> None:
    async def play() -> None:
        session = Session(make_pool())
        for name, number in sequence:
            if name == "reserve":
                session.asked.append(asyncio.create_task(session.pool.reserve(number)))
                await asyncio.sleep(0)
            if name == "reserve at":
                place = asyncio.create_task(session.pool.reserve_at(number * PAGE, PAGE))
                session.asked.append(place)
                await asyncio.sleep(0)
                assert not place.done() or place.result().start == number * PAGE
            if name == "reserve last" and (last := session.pool.try_reserve_last(2 * PAGE, number * PAGE)) is not None:
                assert last.start >= number * PAGE
                session.asked.append(asyncio.get_running_loop().create_future())
                session.asked[-1].set_result(last)
            if "free" in name and (held := session.held()):
                index = sorted(held)[number % len(held)]
                session.freed.add(index)
                held[index].free()
            if "cancel" in name and session.asked:  # right after a free: granted, and cancelled before it was told
                session.asked[number % len(session.asked)].cancel()
            if name == "turn":
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                session.check()
        for _ in range(2 * len(session.asked) + 1):  # each turn frees all that is held, so somebody moves up
            for index, lease in session.held().items():
                session.freed.add(index)
                lease.free()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert all(task.done() for task in session.asked)
        assert session.pool.used_bytes == 0
        assert session.pool.peak_bytes <= session.pool.capacity_bytes
        take(session.pool, CAPACITY_PAGES).free()  # everything is one piece again

    asyncio.run(play())


def test_a_cancelled_waiter_lets_those_behind_it_go() -> None:
    async def play() -> None:
        pool = make_pool(4)
        first = take(pool, 2)
        large = asyncio.create_task(pool.reserve(4 * PAGE))
        small = asyncio.create_task(pool.reserve(1 * PAGE))
        await asyncio.sleep(0)
        assert pool.try_reserve(PAGE) is None  # it does not overtake those who wait
        assert not small.done()
        large.cancel()
        assert (await small).nbytes == PAGE
        first.free()

    asyncio.run(play())


def test_what_was_granted_to_a_cancelled_waiter_goes_to_the_next() -> None:
    async def play() -> None:
        pool = make_pool(1)
        first = take(pool, 1)
        waiters = [asyncio.create_task(pool.reserve(PAGE)) for _ in range(2)]
        await asyncio.sleep(0)
        first.free()  # granted to the first waiter, which has not run since
        waiters[0].cancel()
        lease = await asyncio.wait_for(waiters[1], 30)
        assert waiters[0].cancelled()
        lease.free()
        assert pool.used_bytes == 0

    asyncio.run(play())


def test_a_grant_is_told_before_the_waiter_has_its_turn() -> None:
    async def play() -> None:
        pool, told = make_pool(1), []
        first = take(pool, 1)
        waiter = asyncio.create_task(pool.reserve(PAGE, lambda: told.append(waiter.done())))
        await asyncio.sleep(0)
        first.free()
        assert told == [False]
        (await waiter).free()

    asyncio.run(play())


def test_a_place_is_waited_for_until_its_last_byte_is_free() -> None:
    async def play() -> None:
        pool = make_pool(4)
        ends = [pool.try_reserve_last(PAGE, 0), pool.try_reserve_last(PAGE, 2 * PAGE)]
        assert [end.start for end in ends if end is not None] == [3 * PAGE, 2 * PAGE]
        assert pool.try_reserve_last(PAGE, PAGE + 1) is None  # there is a free page, but not above that offset
        assert pool.try_reserve_last(8 * PAGE, 0) is None  # nor will there ever be
        place = asyncio.create_task(pool.reserve_at(2 * PAGE, 2 * PAGE))
        for end in ends:
            await asyncio.sleep(0)
            assert not place.done()
            assert pool.try_reserve_last(PAGE, 0) is None  # it does not overtake those who wait
            assert pool.try_reserve_at(0, PAGE) is None
            assert end is not None
            end.free()
        assert (await place).start == 2 * PAGE
        assert pool.try_reserve_at(PAGE, 2 * PAGE) is None
        assert (free := pool.try_reserve_at(PAGE, PAGE)) is not None
        assert free.start == PAGE
        with pytest.raises(BudgetError):
            await pool.reserve_at(3 * PAGE, 2 * PAGE)

    asyncio.run(play())


def test_what_waits_may_have_a_lease_from_elsewhere() -> None:
    async def play() -> None:
        pool, other = make_pool(1), make_pool(2)
        held, lent = take(pool, 1), take(other, 2)
        waiters = [
            asyncio.create_task(pool.reserve(PAGE, elsewhere=lambda: other.try_reserve_last(PAGE, 0)))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        lent.free()
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        pool.look_again()
        assert [(await waiter).start for waiter in waiters] == [PAGE, 0]
        assert (pool.used_bytes, other.used_bytes) == (PAGE, 2 * PAGE)
        held.free()

    asyncio.run(play())


def test_who_waits_may_change_turns() -> None:
    async def play() -> None:
        pool, told = make_pool(1), []
        held = take(pool, 1)

        async def uses(name: str) -> None:
            lease = await pool.reserve(PAGE, who=name)
            told.append(name)
            lease.free()

        tasks = [asyncio.create_task(uses(name)) for name in ("a", "b", "c", "d")]
        await asyncio.sleep(0)
        pool.rearrange({"d": 0, "b": 2, "a": 1})
        held.free()
        await asyncio.gather(*tasks)
        assert told == ["d", "a", "c", "b"]  # who is not named keeps its turn

    asyncio.run(play())


def test_first_fit_and_coalescing_on_both_sides() -> None:
    pool = make_pool(6)
    leases = [take(pool, 2) for _ in range(3)]
    assert [lease.start for lease in leases] == [0, 2 * PAGE, 4 * PAGE]
    leases[0].free()
    leases[2].free()
    assert pool.try_reserve(4 * PAGE) is None  # enough, but in two pieces
    leases[1].free()
    assert take(pool, 6).start == 0
    assert pool.peak_bytes == 6 * PAGE


def test_lease_has_what_was_asked_rounded_up_and_aligned() -> None:
    arena = Arena(3 * PAGE + 1)
    assert arena.capacity_bytes == 4 * PAGE
    lease = arena.pool("a", 2 * PAGE).try_reserve(PAGE + 1)
    assert lease is not None
    assert (lease.nbytes, len(lease.array)) == (PAGE + 1, 2 * PAGE)
    assert lease.array.ctypes.data % HUGE_PAGE_BYTES == 0
    assert lease.array.flags.writeable
    lease.free()
    with pytest.raises(ClosedError, match="was freed"):
        lease.free()
    with pytest.raises(ClosedError, match="was freed"):
        lease.array


def test_pools_do_not_overlap_and_fit_the_arena() -> None:
    arena = Arena(4 * PAGE)
    a, b = take(arena.pool("a", 2 * PAGE), 2), take(arena.pool("b", 2 * PAGE), 2)
    a.array[:], b.array[:] = 1, 2
    assert a.array.sum() == 2 * PAGE
    with pytest.raises(BudgetError, match=r"'c' of 4096 B.*16384 B.*20480 B"):
        arena.pool("c", 1)
    with pytest.raises(ValueError, match="taken"):
        arena.pool("a", 0)


def test_what_can_never_fit_is_refused_at_once() -> None:
    pool = make_pool(2)
    with pytest.raises(BudgetError, match=r"'test' holds 8192 B \(8 KiB\).*12288 B \(12 KiB\)"):
        asyncio.run(pool.reserve(2 * PAGE + 1))
    with pytest.raises(ValueError, match="at least one byte"):
        pool.try_reserve(0)


def test_close_names_leaks_fails_waiters_and_keeps_leased_memory() -> None:
    pinned: list[tuple[str, int, int]] = []

    async def play() -> None:
        arena = Arena(2 * PAGE, lambda *r: pinned.append(("pin", *r)), lambda *r: pinned.append(("unpin", *r)))
        pool = arena.pool("test", 2 * PAGE)
        lease = take(pool, 2)
        waiter = asyncio.create_task(pool.reserve(PAGE))
        await asyncio.sleep(0)
        assert arena.close() == [lease]
        lease.array[:] = 3  # still mapped
        with pytest.raises(ClosedError, match="was closed"):
            await waiter
        with pytest.raises(ClosedError, match="is closed"):
            pool.try_reserve(1)
        assert [call[0] for call in pinned] == ["pin"]
        view = lease.array
        lease.free()
        assert arena.close() == []
        assert arena.close() == []
        assert np.all(view == 3)  # a view keeps the mapping
        with pytest.raises(ClosedError):
            arena.pool("late", 0)

    asyncio.run(play())
    assert [call[0] for call in pinned] == ["pin", "unpin"]
    assert pinned[0][1:] == pinned[1][1:]
    assert pinned[0][2] == 2 * PAGE


def test_memory_is_given_back_to_the_device_before_it_goes() -> None:
    there: list[bool] = []

    def unregister(address: int, nbytes: int) -> None:
        with open("/proc/self/maps") as maps:
            ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        there.append(any(start <= address and address + nbytes <= stop for start, stop in ranges))

    assert Arena(64 * PAGE, lambda address, nbytes: None, unregister).close() == []
    assert there == [True]


def test_a_mapping_that_cannot_be_unregistered_stays() -> None:
    calls: list[int] = []

    def unregister(address: int, nbytes: int) -> None:
        calls.append(address)
        if len(calls) == 1:
            raise OSError("not now")

    arena = Arena(64 * PAGE, lambda address, nbytes: None, unregister)
    with pytest.raises(OSError, match="not now"):
        arena.close()
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    assert any(start <= calls[0] and calls[0] + 64 * PAGE <= stop for start, stop in ranges)
    for _ in range(2):
        assert arena.close() == []
    assert len(calls) == 2


def test_pages_are_touched_lazily() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident_bytes()
    pool = Arena(2**30).pool("test", 2**30)
    lease = pool.try_reserve(2**20)
    assert lease is not None
    lease.array[:] = 1
    assert resident_bytes() - before < 64 * 2**20


@needs_huge_pages
def test_huge_pages_are_asked_for() -> None:
    _, memory = huge_pages(2 * HUGE_PAGE_BYTES + 4096)
    address = memory.ctypes.data
    assert address % HUGE_PAGE_BYTES == 0
    assert all(asks_for_huge_pages(address + offset) for offset in (0, 2 * HUGE_PAGE_BYTES, memory.size - 1))
    assert not memory.any()


def test_neighbours_are_one_to_the_system() -> None:
    """It allows a process some 65,000 mappings, and refuses all after them."""
    before = len(Path("/proc/self/maps").read_text().splitlines())
    kept = [huge_pages(HUGE_PAGE_BYTES)[1] for _ in range(400)]
    assert len(Path("/proc/self/maps").read_text().splitlines()) - before < len(kept) / 2


def test_a_kernel_without_huge_pages_has_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 2**20)  # no advice that the kernel knows
    assert huge_pages(HUGE_PAGE_BYTES)[1].size == HUGE_PAGE_BYTES


def test_what_the_system_does_not_give_is_a_budget_error() -> None:
    with pytest.raises(BudgetError, match=r"gives no 1048576 TiB of CPU memory \(Cannot allocate memory\)"):
        Arena(2**60)
