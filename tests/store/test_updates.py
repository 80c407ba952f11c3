"""What a trip of the update waits for, and what it does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierstore.config import Codec
from tierstore.device.streams import Reached
from tierstore.errors import StorageError
from tierstore.io.backend import Backend
from tierstore.io.memory import Arena
from tierstore.io.workers import Priority, WorkerPool
from tierstore.pack.layout import ChunkSpec
from tierstore.store.marks import Marks
from tierstore.store.rounds import Round, Trip
from tierstore.store.slots import ChunkIO, SlotPack
from tierstore.store.trip_leases import TripLeases
from tierstore.store.updates import UpdatePipeline


class KeptPack:
    """A pack of one chunk, which remembers what is asked of it."""

    def __init__(self, record: str) -> None:
        self.current: Any = [record]
        self.asked: list[tuple[str, Priority, Any]] = []

    is_coded = False

    async def read(self, index: int, array: Any, priority: Priority, *, record: Any, checks: bool) -> bool:
        self.asked.append(("read", priority, record))
        return checks

    async def write(
        self, index: int, array: Any, priority: Priority = Priority.WRITE, *, known: int | None = None
    ) -> None:
        self.asked.append(("write", priority, None))


def pipeline(
    weights_pack: KeptPack, state_pack: KeptPack, *,
    will_go: bool = False, is_owed: bool = False, all_in_memory: bool = False,
) -> UpdatePipeline:  # fmt: skip
    """A pipeline of one chunk with weights in CPU memory and, unless `all_in_memory`, state on the disk."""
    state: Any = {(0, 0): SimpleNamespace(array=np.zeros(40, np.uint8))} if all_in_memory else {}
    nothing: Any = None
    leases: Any = SimpleNamespace(will_go=lambda round_, trip: will_go, is_owed=lambda round_: is_owed)
    groups: Any = [SimpleNamespace(first=0, size=4)]
    placement: Any = SimpleNamespace(
        chunk_elements=4, chunk=lambda group, chunk: (0, 4), trip_bytes=lambda group, chunk: 0,
        weight_bytes=lambda group, chunk: 8, state_bytes=lambda group, chunk: 40,
    )  # fmt: skip
    weights: Any = SimpleNamespace(
        resident=lambda group, chunk: np.zeros(8, np.uint8), is_home_nvme=lambda group: False
    )
    packs: Any = (weights_pack, state_pack)
    on_gpu: Any = ()
    return UpdatePipeline(
        groups, placement, weights, packs, state, on_gpu, leases, nothing, nothing, Marks(), nothing, nothing
    )


LEASE: Any = SimpleNamespace(array=np.zeros(48, np.uint8))


class Begun:
    """A trip of a chunk that a commit still writes; the trip goes as far as it can before that write has ended."""

    def __init__(
        self, previous: Any = None, updates: Any = ("one",), is_decided: bool = False, may_go: bool = False,
        **answers: bool,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.weights, self.state, self.write = KeptPack("weights 1"), KeptPack("state 2"), loop.create_future()
        self.trip = Trip(0, 0, lease=LEASE)
        round_: Any = SimpleNamespace(
            is_decided=is_decided, reads_weights=False, obstacle=lambda trip: None, updates_of=lambda *_: updates,
            may_go=lambda trip: may_go,
        )  # fmt: skip
        work = pipeline(self.weights, self.state, **answers)._read_ahead(round_, self.trip, previous, self.write)
        self.ahead = loop.create_task(work)

    async def go_on(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def test_it_reads_beside_the_write_for_a_commit_and_changes_nothing_before_its_end() -> None:
    async def play() -> None:
        begun = Begun()
        await begun.go_on()
        assert begun.state.asked == [("read", Priority.PREFETCH, None)]
        assert not begun.ahead.done()  # Adam comes next: it would change what is being written
        begun.weights.current[0] = "weights 2"
        begun.write.set_result(None)
        assert await begun.ahead
        assert begun.trip.before == ("weights 2", "state 2")  # where a redo begins: never the weights of step 1

    asyncio.run(play())


@pytest.mark.parametrize(("may_go", "priority"), [(False, Priority.PREFETCH), (True, Priority.UPDATE)])
def test_what_an_update_waits_for_is_read_before_others_are_written(may_go: bool, priority: Priority) -> None:
    async def play() -> None:
        begun = Begun(may_go=may_go)
        begun.write.set_result(None)
        assert await begun.ahead
        assert begun.state.asked == [("read", priority, None)]

    asyncio.run(play())


def test_without_an_update_it_waits_too() -> None:
    """The end of the trip drops the gradient, which may be part of that commit (`delayed`)."""

    async def play() -> None:
        begun = Begun(updates=(), is_decided=True)
        await begun.go_on()
        assert (begun.state.asked, begun.ahead.done()) == ([], False)
        begun.write.set_result(None)
        assert await begun.ahead

    asyncio.run(play())


def test_it_reads_nothing_before_the_trip_of_the_step_before_has_ended() -> None:
    async def play() -> None:
        previous: Any = asyncio.get_running_loop().create_future()
        begun = Begun(previous)
        begun.write.set_result(None)
        await begun.go_on()
        assert begun.state.asked == []
        previous.set_result(None)
        assert await begun.ahead
        assert begun.state.asked

    asyncio.run(play())


@pytest.mark.parametrize("is_over", [True, False])
def test_a_write_that_failed_stops_the_chunk(is_over: bool) -> None:
    async def play() -> None:
        begun = Begun()
        if not is_over:
            await begun.go_on()
        begun.write.set_exception(StorageError("lost"))
        with pytest.raises(StorageError, match="lost"):
            await begun.ahead

    asyncio.run(play())


def test_a_trip_that_is_recalled_does_not_wait_for_the_write() -> None:
    async def play() -> None:
        begun = Begun()
        await begun.go_on()
        begun.trip.recall()
        assert not await begun.ahead  # its memory is free for another one

    asyncio.run(play())


def test_a_trip_whose_gradient_has_come_since_it_was_recalled_goes_on() -> None:
    """Queueing again, behind all later trips, would waste its reads and theirs."""

    async def play() -> None:
        begun = Begun(will_go=True)
        await begun.go_on()
        begun.trip.recall()
        await begun.go_on()
        assert not begun.ahead.done()
        begun.write.set_result(None)
        assert await begun.ahead

    asyncio.run(play())


@pytest.mark.parametrize(("has_memory", "is_owed"), [(True, True), (True, False), (False, True)])
def test_no_trip_is_applied_with_memory_that_one_of_the_step_before_waits_for(has_memory: bool, is_owed: bool) -> None:
    """It would keep that memory until it is written, which is after the commit of that step."""

    async def play() -> None:
        begun = Begun(is_owed=is_owed, all_in_memory=not has_memory)
        begun.write.set_result(None)
        begun.trip.lease = LEASE if has_memory else None
        assert await begun.ahead is not (has_memory and is_owed)

    asyncio.run(play())


def test_a_gate_outlives_a_trip_that_is_recalled_or_cancelled_at_it() -> None:
    async def play() -> None:
        loop = asyncio.get_running_loop()
        coming: list[Any] = [loop.create_future(), loop.create_future()]
        gradients: Any = SimpleNamespace(awaited=lambda group, chunk: coming[0] if coming else None)
        round_ = Round([0], gradients, reads_weights=False, is_lazy=False, keeps_gradients=False, barrier=None)
        packs = KeptPack("weights"), KeptPack("state")
        packs[0].current = packs[1].current = ["record"] * 3
        updates = pipeline(*packs)
        trips = [Trip(0, chunk, loop.create_future(), lease=LEASE) for chunk in range(3)]
        ahead = [loop.create_task(updates._read_ahead(round_, trip, None, None)) for trip in trips]
        for _ in range(5):
            await asyncio.sleep(0)
        trips[0].recall()
        ahead[1].cancel()
        assert not await ahead[0]
        round_.decide_group(0, (), Reached())
        for _ in range(2):  # a second gradient comes while it waits for the first
            for _ in range(5):
                await asyncio.sleep(0)
            assert not ahead[2].done()
            coming.pop(0).set_result(None)
        assert await ahead[2]
        assert ahead[1].cancelled()

    asyncio.run(play())


def test_a_write_for_a_commit_lets_all_else_go_first() -> None:
    weights, state = KeptPack("weights 1"), KeptPack("state 1")
    updates = pipeline(weights, state)
    updates.dirty[0, 0] = (5, 6)
    asyncio.run(updates.write_resident(0, 0))
    assert weights.asked == [("write", Priority.COMMIT, None)]
    assert state.asked == []


@pytest.mark.parametrize(("codec", "expected"), [(Codec.NONE, Priority.COMMIT), (Codec.LZ4, Priority.WRITE)])
def test_what_holds_scratch_memory_does_not_go_last(codec: Codec, expected: Priority, tmp_path: Path) -> None:
    asked: list[Priority] = []

    async def run(link: str, name: str, nbytes: int, priority: Priority, job: Any, *, is_coded: bool) -> None:
        asked.append(priority)
        raise StorageError("that is all")

    io: Any = SimpleNamespace(run=run)
    pack = SlotPack("state", [ChunkSpec("h.0/0", (("m", "F32", 1024),))], [tmp_path], io, codec)
    with pytest.raises(StorageError, match="that is all"):
        asyncio.run(pack.write(0, np.zeros(4096, np.uint8), Priority.COMMIT))
    assert asked == [expected]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_a_digest_that_is_known_is_taken_for_what_is_stored_as_it_is(codec: Codec, tmp_path: Path) -> None:
    async def play() -> tuple[Any, Any]:
        workers = WorkerPool("test", 1)
        arena = Arena(2**17)
        scratch = None if codec is Codec.NONE else arena.pool("codec", 2**16)
        io = ChunkIO(Backend(), workers, scratch, time.monotonic)
        pack = SlotPack("state", [ChunkSpec("h.0/0", (("m", "F32", 4096),))], [tmp_path], io, codec)
        pack.create()
        try:
            array = (await arena.pool("chunk", 2**14).reserve(2**14)).array
            array[:] = 0
            await pack.write(0, array, known=5)
            found = pack.current[0]
            await pack.write(0, array)
            return found, pack.current[0]
        finally:
            pack.close()
            workers.close(5.0)

    known, computed = asyncio.run(play())
    assert known.stored_bytes == computed.stored_bytes
    assert (known.checksum == 5) == (codec is Codec.NONE)
    assert (known.checksum == computed.checksum) == (codec is Codec.LZ4)


def test_a_pack_that_is_opened_again_has_headers_to_write_in_the_files_that_are_open_now(tmp_path: Path) -> None:
    io = ChunkIO(Backend(), WorkerPool("test", 1), None, time.monotonic)
    pack = SlotPack("put-0", [ChunkSpec("h.0/0", (("w", "F32", 1024),))], [tmp_path], io, Codec.NONE, slots=1)
    pack.create()
    pack.close()
    (path,) = pack.paths()
    whole = path.read_bytes()
    path.write_bytes(bytes(4096) + whole[4096:])
    for _ in range(2):
        pack.open([None])
        pack.close()
    pack.open([None])
    pack.datasync()
    pack.close()
    assert path.read_bytes() == whole


class FakeRound(SimpleNamespace):
    """What `TripLeases` asks of a round."""

    __hash__ = object.__hash__
    number = 0


@pytest.mark.parametrize("will_go", [True, False])
def test_a_trip_whose_gradient_is_on_its_way_keeps_its_place(will_go: bool) -> None:
    """Otherwise it would queue again, behind later trips that then read ahead and are recalled."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        starving, granted = (Trip(0, chunk, loop.create_future()) for chunk in (1, 0))

        async def reserve(nbytes: int, granted: Any, elsewhere: Any, who: Any) -> Any:
            asks = FakeRound(may_go=lambda trip: True, opened={0})
            leases._queued[asks] = {0: {starving: None}}  # its gradient came first
            return SimpleNamespace(array=np.zeros(8, np.uint8))

        pool: Any = SimpleNamespace(reserve=reserve)
        leases = TripLeases(pool, pool)
        round_: Any = FakeRound(may_go=lambda trip: False, will_go=lambda trip: will_go)
        assert await leases.reserve(round_, granted, 8) is will_go

    asyncio.run(play())


def test_who_starves_is_sought_among_those_that_may_be_applied() -> None:
    """The search runs for each trip, while nearly all waiting trips are of groups that backward has not reached."""

    async def play() -> None:
        arena, loop = Arena(4096), asyncio.get_running_loop()
        pool = arena.pool("update", 4096)
        leases, asked = TripLeases(pool, arena.pool("gradients", 0)), list[int]()

        def may_go(trip: Trip) -> bool:
            asked.append(trip.group)
            return False

        round_: Any = FakeRound(will_go=lambda trip: True, may_go=may_go, opened={7}, free_above=lambda trip: None)
        held = pool.try_reserve(4096)
        assert held is not None
        waiting = [
            loop.create_task(leases.reserve(round_, Trip(group, 0, loop.create_future()), 4096)) for group in range(50)
        ]
        await asyncio.sleep(0)
        leases.recall()
        assert asked == [7]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        leases.recall()
        assert asked == [7]
        held.free()

    asyncio.run(play())


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_place_that_was_granted_goes_back_to_the_gradient_that_waits_for_it(is_waited_for: bool) -> None:
    """Nobody recalls a trip that has not had its turn yet."""

    async def play() -> None:
        arena = Arena(2 * 4096)
        own, gradients = arena.pool("update", 4096), arena.pool("gradients", 4096)
        leases, trip = TripLeases(own, gradients), Trip(0, 0, asyncio.get_running_loop().create_future())
        round_: Any = FakeRound(will_go=lambda trip: False, may_go=lambda trip: False, free_above=lambda trip: 0)
        held, before = own.try_reserve(4096), gradients.try_reserve(4096)
        assert held is not None
        assert before is not None
        reserved = asyncio.create_task(leases.reserve(round_, trip, 4096))
        await asyncio.sleep(0)
        before.free()
        gradient = asyncio.create_task(gradients.reserve_at(0, 4096)) if is_waited_for else None
        own.look_again()  # granted; the gradient asks before the trip has its turn
        assert await reserved is not is_waited_for
        leases.give_back(trip)
        if gradient is not None:
            (await gradient).free()
        held.free()

    asyncio.run(play())
