"""Whatever order a step takes, and whatever is slow: no trip and no gradient waits for ever for memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierstore.device.streams import Reached
from tierstore.io.memory import Arena, Lease, Pool
from tierstore.store.budget import ByteBudget
from tierstore.store.marks import Marks
from tierstore.store.rounds import ParameterUpdate, Round, Trip
from tierstore.store.trip_leases import TripLeases
from tierstore.store.updates import UpdatePipeline

PAGE = 4096
NOTHING: Any = None
ON_GPU: Any = ()
ALL = (ParameterUpdate(0, 4, NOTHING),)


async def turns(count: int = 40) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class SlowPack:
    """A pack whose reads and writes take as many turns as it is told, or until a future ends."""

    def __init__(self, count: int, turns_of: Callable[[], int]) -> None:
        self.current: Any = ["record"] * count
        self.holds: dict[int, asyncio.Future[None]] = {}
        self._turns_of = turns_of

    async def read(self, index: int, array: Any, priority: Any, *, record: Any, checks: bool) -> bool:
        if index in self.holds:
            await asyncio.shield(self.holds[index])
        await turns(self._turns_of())
        return checks

    async def write(self, index: int, array: Any, *, known: int | None) -> None:
        await turns(self._turns_of())

    hurry = contextlib.nullcontext
    is_coded = True  # so that no digests are made of its bytes


class Gradients:
    """Gradients and their memory: one chunk in each group, which has a place of its own or is spilled.

    Args:
        staging: holds one spilled gradient at a time.
        spilled: groups whose gradients are spilled.
    """

    on_change: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, pool: Pool, sizes: Sequence[int], staging: Pool, spilled: Container[int]) -> None:
        self._pool, self._sizes, self._staging, self._spilled = pool, sizes, staging, spilled
        self._awaited: set[int] = set()
        self._staged: dict[int, Lease] = {}
        self._starts: dict[int, int] = {}
        self._coming: dict[int, asyncio.Future[None]] = {}
        self._short: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self.memory = self

    def arrange(self, order: Sequence[int]) -> None:
        ends = itertools.accumulate(self._sizes[group] for group in order)
        self._starts = {group: end - self._sizes[group] for group, end in zip(order, ends)}

    def end_of_places(self, group: int) -> int:
        return self._starts[group] + self._sizes[group]

    def is_coming(self, group: int, chunk: int) -> bool:
        return group in self._coming

    def is_short_of(self, group: int, chunk: int) -> bool:
        return group in self._short

    def awaited(self, group: int, chunk: int) -> asyncio.Future[None] | None:
        if group in self._coming:
            self._awaited.add(group)
        return self._coming.get(group)

    def let_go(self, group: int, chunk: int) -> None:
        self._awaited.discard(group)
        if group in self._staged:
            self._staged.pop(group).free()

    async def fetch(self, group: int, chunk: int, into: Any) -> Any:
        return None

    def accept(self, group: int) -> Coroutine[Any, Any, None]:
        self._coming[group] = asyncio.get_running_loop().create_future()
        return self._accept(group)

    async def _accept(self, group: int) -> None:
        if group in self._spilled:
            lease = await self._granted(group, self._staging.reserve(PAGE))
            await turns(3)
            if group in self._awaited:
                self._staged[group] = lease
            else:
                lease.free()
        elif group not in self._leases:
            memory = self._pool.reserve_at(self._starts[group], self._sizes[group])
            self._leases[group] = await self._granted(group, memory)
        self._coming.pop(group).set_result(None)
        self.on_change()

    async def _granted(self, group: int, memory: Coroutine[Any, Any, Lease]) -> Lease:
        self._short.add(group)
        asyncio.get_running_loop().call_soon(lambda: self.on_change() if self._short else None)
        try:
            return await memory
        finally:
            self._short.discard(group)

    def drop(self, group: int, chunk: int) -> None:
        self.let_go(group, chunk)
        if group in self._leases:
            self._leases.pop(group).free()


class World:
    """Real trips, leases, rounds and pools; the disk and the workers are told how slow to be.

    Args:
        trip_bytes, gradient_bytes: of each group.
        own_bytes: the memory that trips have besides the places of gradients.
        slowness: how many turns of the loop a read, a write or a kernel takes, asked each time.
        spilled: groups whose gradients go to the disk.
    """

    def __init__(
        self,
        trip_bytes: Sequence[int],
        gradient_bytes: Sequence[int],
        own_bytes: int,
        slowness: Callable[[], int] = lambda: 0,
        spilled: Container[int] = (),
    ) -> None:
        self.groups = range(len(trip_bytes))
        arena = Arena(own_bytes + sum(gradient_bytes) + PAGE)
        self.own = arena.pool("update", own_bytes)
        self.places = arena.pool("gradients", sum(gradient_bytes))
        self.staging = arena.pool("spill", PAGE)
        self.gradients: Any = Gradients(self.places, gradient_bytes, self.staging, spilled)
        self.leases = TripLeases(self.own, self.places)
        self.state_pack = SlowPack(len(self.groups), slowness)
        specs: Any = [
            SimpleNamespace(
                name=str(group), first=0, size=4, item_bytes=1, dtype="fp32",
                need=lambda: SimpleNamespace(state_bytes=1),
            )
            for group in self.groups
        ]  # fmt: skip
        placement: Any = SimpleNamespace(
            chunk_elements=4, chunk_count=lambda group: 1, chunk=lambda group, chunk: (0, 4),
            trip_bytes=lambda group, chunk: trip_bytes[group], weight_bytes=lambda group, chunk: 8,
            state_bytes=lambda group, chunk: trip_bytes[group],
        )  # fmt: skip
        weights: Any = SimpleNamespace(
            resident=lambda group, chunk: np.zeros(8, np.uint8), is_home_nvme=lambda group: False,
            is_valid_on_device=lambda group: True, on_device=lambda group: None, raw_bytes=lambda group, chunk: 4,
            device_offset=lambda group, chunk: 0, announced=self._wait_for_announced, arrived=self._wait_for_arrived,
        )  # fmt: skip

        async def submit(priority: Any, job: Any) -> Any:
            await turns(slowness())
            return None, None

        workers: Any = SimpleNamespace(submit=submit)
        tracer: Any = SimpleNamespace(measure=lambda *_: contextlib.nullcontext())
        packs: Any = (SlowPack(len(self.groups), slowness), self.state_pack)
        self.updates = UpdatePipeline(
            specs, placement, weights, packs, {}, ON_GPU, self.leases, workers, NOTHING, Marks(), self._spawn, tracer
        )  # fmt: skip
        self.tasks: list[asyncio.Task[None]] = []
        self.weights = weights
        self.announced: dict[int, asyncio.Future[None]] = {}
        self.arriving: dict[int, asyncio.Future[None]] = {}

    async def _wait_for_announced(self, group: int) -> None:
        if group in self.announced:
            await asyncio.shield(self.announced[group])

    async def _wait_for_arrived(self, group: int, chunk: int) -> None:
        if group in self.arriving:
            await asyncio.shield(self.arriving[group])

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work, name=name))
        return self.tasks[-1]

    def begin(
        self, order: Sequence[int], barrier: asyncio.Task[None] | None = None, *, is_lazy: bool = False,
        keeps_gradients: bool = True, borrows: bool = True, then: Sequence[int] = (),
    ) -> Round:  # fmt: skip
        round_ = Round(
            order, self.gradients, reads_weights=is_lazy, is_lazy=is_lazy, keeps_gradients=keeps_gradients,
            barrier=barrier, borrows=borrows, then=then,
        )  # fmt: skip
        self.updates.begin(round_)
        return round_

    def gradient(self, round_: Round, group: int, *, is_streaming: bool = True) -> asyncio.Task[None]:
        """The gradient of a group is complete; where updates come in backward, they are decided, too."""
        accepted = self._spawn(self.gradients.accept(group), f"gradient {group}")
        if is_streaming:
            self.updates.decide_group(round_, group, ALL, Reached())
        return accepted

    def decide(self, round_: Round, touched: Sequence[int]) -> None:
        self.updates.decide(round_, dict.fromkeys(touched, ALL))
        if round_.keeps_gradients:
            self.updates.approve(round_)

    def end_of(self, round_: Round) -> asyncio.Task[None]:
        """A commit of the round: it is published when all its trips have ended."""
        return self._spawn(self.updates.round_ended(round_), "commit")

    async def check_all_ends(self) -> None:
        """Everything that was begun ends, and all memory is free."""
        for _ in range(100):
            if all(task.done() for task in self.tasks):
                break
            await turns(100)
        waiting = [task.get_name() for task in self.tasks if not task.done()]
        assert not waiting, f"they wait for ever: {waiting}"
        for task in self.tasks:
            task.result()
        for group in self.groups:
            self.gradients.drop(group, 0)
        assert [pool.used_bytes for pool in (self.own, self.places, self.staging)] == [0, 0, 0]
        assert not [*self.leases._queued, *self.leases._holding, *self.leases._in_places]


def trip_of(round_: Round, group: int) -> Trip:
    return round_.trips_of[group][0]


@contextlib.contextmanager
def one_at_a_time(pool: Pool, count: int) -> Iterator[None]:
    """The memory of `count` trips of a page is taken; free again afterwards."""
    taken = [pool.try_reserve(PAGE) for _ in range(count)]
    yield
    for lease in taken:
        assert lease is not None
        lease.free()


def test_a_trip_whose_gradient_came_after_it_was_recalled_goes_on() -> None:
    """Otherwise it would give its memory back unnoticed by a gradient that waits for the place of a later trip."""

    async def play() -> None:
        world = World([PAGE] * 5, [PAGE] * 5, 2 * PAGE)
        loop = asyncio.get_running_loop()
        written, read = loop.create_future(), loop.create_future()
        world.updates.resident_writes[4, 0] = written  # for a commit, of the part of chunk 4 in CPU memory
        world.state_pack.holds[4] = read
        with one_at_a_time(world.own, 2):  # the step before still writes
            round_ = world.begin([4, 3, 2, 1, 0])
            await turns()
            world.gradient(round_, 1)  # before its turn: trips that read ahead in its place are recalled
            await turns()
            assert trip_of(round_, 4).recalled.done()
        await turns()
        world.gradient(round_, 4)
        await turns()
        late = world.gradient(round_, 2)  # its place is lent to trip 3
        await turns()
        read.set_result(None)
        await turns()
        written.set_result(None)
        await turns(200)
        assert late.done()
        world.decide(round_, [1, 2, 4])
        await world.check_all_ends()

    asyncio.run(play())


@pytest.mark.parametrize("is_published_first", [True, False])
def test_no_trip_is_queued_behind_those_of_the_next_step(is_published_first: bool) -> None:
    """Trips of the next step are written after the commit of the trip's own step, which waits for the trip."""

    async def play() -> None:
        world = World([PAGE] * 4, [PAGE] * 4, 2 * PAGE)
        loop = asyncio.get_running_loop()
        published, read = loop.create_future(), loop.create_future()
        world.updates.resident_writes[2, 0] = published
        barrier = asyncio.create_task(_wait(published))
        world.state_pack.holds[2] = read
        with one_at_a_time(world.own, 2):
            first = world.begin([3, 2, 1, 0], barrier)
            await turns()
            world.gradient(first, 0)
            await turns()
            assert trip_of(first, 2).recalled.done()
        await turns()
        world.gradient(first, 3)
        await turns()
        world.decide(first, [0, 3])
        await turns()
        second = world.begin([0, 3, 2, 1], world.end_of(first))
        await turns()
        read.set_result(None)
        await turns()
        if is_published_first:
            published.set_result(None)
        for group in (0, 3, 1):
            await within(world.updates.settle(group, 0))
        for group in (0, 3, 1):
            world.gradient(second, group)
            await turns()
        if not is_published_first:
            published.set_result(None)
        await turns()
        world.decide(second, [0, 3, 1])
        await world.check_all_ends()

    asyncio.run(play())


async def _wait(future: asyncio.Future[None]) -> None:
    await future


def test_a_trip_gives_way_to_one_of_the_step_before() -> None:
    """Even if it came to the head of the queue first, and was decided before it had its turn."""

    async def play() -> None:
        world = World([PAGE] * 2, [PAGE] * 2, PAGE)
        with one_at_a_time(world.own, 1):
            first = world.begin([0, 1], is_lazy=True, keeps_gradients=False, borrows=False)
            await turns()
            world.decide(first, [0, 1])
            second = world.begin([0, 1], world.end_of(first), is_lazy=True, keeps_gradients=False, borrows=False)
            await turns()
        await turns()
        trip_of(first, 0).recall()  # at its gate, with all memory; it queues again behind the next step
        await turns()
        world.updates.allow_through(1)
        while trip_of(second, 0) not in world.leases._holding:
            await asyncio.sleep(0)
        world.decide(second, [0, 1])
        world.updates.allow_through()
        await world.check_all_ends()

    asyncio.run(play())


def test_a_gradient_does_not_wait_for_trips_that_have_no_place() -> None:
    async def play() -> None:
        world = World([PAGE] * 3, [PAGE] * 3, PAGE)
        published = asyncio.get_running_loop().create_future()
        round_ = world.begin([2, 1, 0], asyncio.create_task(_wait(published)))
        await turns()
        assert list(world.leases._in_places) == [trip_of(round_, 2)]
        world.gradient(round_, 1)
        await turns()
        assert trip_of(round_, 1).applied.done()  # it waits for the commit, in memory of its own
        late = world.gradient(round_, 0)
        await turns()
        assert late.done()
        published.set_result(None)
        world.decide(round_, [1, 0])
        await world.check_all_ends()

    asyncio.run(play())


def test_an_update_comes_after_a_load_that_is_on_its_way() -> None:
    """Otherwise the load would copy the old weights over the new ones."""

    async def play() -> None:
        world = World([PAGE], [PAGE], PAGE)
        world.gradients.arrange([0])
        round_ = world.begin([0], is_lazy=True, keeps_gradients=False, borrows=False)
        world.arriving[0] = asyncio.get_running_loop().create_future()
        await world.gradient(round_, 0, is_streaming=False)
        world.decide(round_, [0])
        world.updates.allow_through()
        await turns()
        assert not trip_of(round_, 0).applied.done()
        world.arriving[0].set_result(None)
        await world.check_all_ends()

    asyncio.run(play())


def test_a_load_that_waits_for_the_step_before_waits_for_this_one_too() -> None:
    async def play() -> None:
        world = World([PAGE], [PAGE], 2 * PAGE)
        loop = asyncio.get_running_loop()
        world.gradients.arrange([0])
        world.weights.is_home_nvme = lambda group: True
        published, read = loop.create_future(), loop.create_future()
        first = world.begin([0], asyncio.create_task(_wait(published)), keeps_gradients=False, borrows=False)
        world.gradient(first, 0)
        await turns()
        world.decide(first, [0])
        assert trip_of(first, 0).applied.done()  # its write waits for the commit
        load = asyncio.create_task(world.updates.settle(0, 0))
        await turns()
        world.state_pack.holds[0] = read
        second = world.begin([0], world.end_of(first), keeps_gradients=False, borrows=False)
        world.gradient(second, 0)
        world.decide(second, [0])
        published.set_result(None)
        await turns()
        assert trip_of(first, 0).task.done()  # type: ignore[union-attr]
        assert not load.done()
        read.set_result(None)
        await within(load)
        assert trip_of(second, 0).applied.done()
        await world.check_all_ends()

    asyncio.run(play())


def test_weights_that_left_the_device_while_their_update_waited_are_read_at_rest() -> None:
    async def play() -> None:
        world = World([2 * PAGE], [PAGE], 2 * PAGE)
        world.gradients.arrange([0])
        is_there, read = [True], []

        async def read_at_rest(group: int, chunk: int, into: Any) -> None:
            read.append(group)

        async def fetch(group: int, chunk: int, into: Any) -> None:
            is_there[0] = False  # dropped by one that asked before this trip was open

        world.weights.is_home_nvme = lambda group: True
        world.weights.is_valid_on_device = lambda group: is_there[0]
        world.weights.read = read_at_rest
        world.gradients.fetch = fetch
        round_ = world.begin([0], keeps_gradients=False, borrows=False)
        world.gradient(round_, 0)
        await turns()
        world.decide(round_, [0])
        await world.check_all_ends()
        assert read == [0]

    asyncio.run(play())


def test_what_backward_has_left_is_updated_as_the_next_forward_needs_it() -> None:
    async def play() -> None:
        world = World([PAGE] * 5, [PAGE] * 5, PAGE)
        world.gradients.arrange([4, 3, 2, 1, 0])
        with one_at_a_time(world.own, 1):  # the step before still writes
            round_ = world.begin([4, 3, 2, 1, 0], borrows=False, then=[0, 1, 2, 3])  # forward does not need the last
            await turns()
            for group in (4, 3, 2, 1, 0):
                world.gradient(round_, group)
            await turns()
            world.decide(round_, [0, 1, 2, 3, 4])
            second = world.begin([4, 3, 2, 1, 0], world.end_of(round_), borrows=False)
        ended: list[int] = []
        for group in world.groups:
            task = trip_of(round_, group).task
            assert task is not None
            task.add_done_callback(lambda _, group=group: ended.append(group))
        await turns(200)
        assert ended == [4, 0, 1, 2, 3]  # the trip that forward does not need keeps its turn
        world.decide(second, [])
        await world.check_all_ends()

    asyncio.run(play())


def test_a_trip_that_gives_way_leaves_its_gradient_on_the_disk() -> None:
    """Else it would keep the staging memory, for which others wait, until the trip has memory again."""

    async def play() -> None:
        world = World([PAGE] * 2, [PAGE] * 2, PAGE, spilled=[1])
        world.gradients.arrange([1, 0])
        with one_at_a_time(world.staging, 1):
            round_ = world.begin([1, 0], borrows=False)
            await turns()
            gradient = world.gradient(round_, 1)
            await turns()
            trip_of(round_, 1).recall()
            await turns()
            assert trip_of(round_, 0).lease is not None
        await gradient
        assert world.staging.used_bytes == 0
        world.gradient(round_, 0)
        await turns()
        world.decide(round_, [0, 1])
        await world.check_all_ends()

    asyncio.run(play())


def test_what_backward_has_left_has_the_places_of_all_gradients() -> None:
    """No gradient comes before the next backward."""

    async def play() -> None:
        world = World([PAGE] * 3, [PAGE] * 3, PAGE)
        with one_at_a_time(world.own, 1):
            round_ = world.begin([2, 1, 0])
            for group in (2, 1, 0):
                await world.gradient(round_, group)
            await turns(200)
            tasks = [trip_of(round_, group).task for group in world.groups]
            assert [task is not None and task.done() for task in tasks] == [False, True, True]
            world.decide(round_, [0, 1, 2])
            await turns(200)
            assert all(task is not None and task.done() for task in tasks)
        await world.check_all_ends()

    asyncio.run(play())


@pytest.mark.parametrize(("moves_places", "own_pages"), [(True, 3), (False, 2)])
def test_an_update_does_not_wait_for_a_load_behind_updates_of_the_next_step(moves_places: bool, own_pages: int) -> None:
    """The load waits for the device memory of a group of the next step. That group's gradient waits for a place that a
    gradient of this step has, or its update for the memory of an update that waits for the commit of this step."""

    async def play() -> None:
        world = World([PAGE] * 3, [PAGE] * 3, own_pages * PAGE)
        device = ByteBudget(1)
        world.gradients.arrange([2, 1, 0])
        read = world.state_pack.holds[0] = asyncio.get_running_loop().create_future()
        first = world.begin([0, 1, 2], is_lazy=True, keeps_gradients=False, borrows=False)  # guesses nothing
        for group in (2, 1, 0):
            await world.gradient(first, group, is_streaming=False)
        world.decide(first, [0, 1, 2])
        order = [1, 0, 2] if moves_places else [1, 2, 0]
        second = world.begin(order, world.end_of(first), borrows=moves_places)
        for group in (1, 2):  # its forward leaves group 0 out
            await within(world.updates.settle(group, 0))
        await device.take(1)
        world.updates.allow_through()
        for group in (1, 2):
            world.gradient(second, group)
            await turns()
        world.announced[0] = asyncio.get_running_loop().create_future()

        async def drop() -> None:
            await world.updates.leave_device(2)
            device.give(1)

        async def load() -> None:
            await device.take(1)
            world.announced.pop(0).set_result(None)
            await world.updates.settle(0, 0)

        world._spawn(drop(), "drop 2")
        world._spawn(load(), "load 0")
        await turns()
        read.set_result(None)
        await turns(500)
        world.decide(second, [1, 2])
        await world.check_all_ends()

    asyncio.run(play())


@pytest.mark.parametrize("mode", ["forward", "step", "speculative"])
@pytest.mark.parametrize("seed", [*range(30), 1033])  # 1033: in `forward`, a trip of the step before starves
def test_steps_in_any_order_end(seed: int, mode: str) -> None:
    draw = random.Random(seed)
    count = draw.randint(3, 8)
    trips = [PAGE * draw.randint(1, 6) for _ in range(count)]
    gradients = [PAGE * draw.randint(1, 4) for _ in range(count)]

    spilled = draw.sample(range(count), draw.choice([0, 0, 1, count]))

    def slowness() -> int:
        return draw.choice([0, 3, 6, 60, 150])

    def some() -> list[int]:
        return draw.sample(range(count), draw.randint(1, count))

    async def play() -> None:
        world = World(trips, gradients, max(trips) * draw.choice([1, 1, 2, 3]), slowness, spilled)
        order = list(reversed(range(count)))
        is_streaming = mode == "speculative"
        world.gradients.arrange(order)
        before: Round | None = None
        barrier: asyncio.Task[None] | None = None
        for _ in range(5):
            if draw.random() < 0.3:
                draw.shuffle(order)
            round_ = world.begin(
                order, barrier, is_lazy=mode == "forward", keeps_gradients=is_streaming, borrows=is_streaming,
                then=some() if is_streaming else (),
            )  # fmt: skip
            await turns(draw.randint(1, 30))
            touched = order if draw.random() < 0.4 else some()
            if before is not None:
                for group in touched:
                    await within(world.updates.settle(group, 0))
            world.updates.allow_through()
            for group in touched:
                accepted = world.gradient(round_, group, is_streaming=is_streaming)
                await turns(draw.randint(0, 10))
                if draw.random() < 0.3:
                    await within(accepted)
                if draw.random() < 0.05:
                    (await within(world.leases.borrow(max(trips)))).free()
            for task in [task for task in world.tasks if task.get_name().startswith("gradient")]:
                await within(task)
            world.decide(round_, touched)
            if mode == "step":
                await within(world.updates.round_ended(round_))
            for group in draw.sample(range(count), draw.randint(0, count)):
                write = commit_of(world.updates.chain[group, 0], barrier, slowness())
                world.updates.resident_writes[group, 0] = world._spawn(write, f"write {group}")
            writes = list(world.updates.resident_writes.values())
            barrier = world._spawn(generation(world.updates, round_, writes), "commit")
            before = round_
        world.updates.allow_through()
        await world.check_all_ends()

    asyncio.run(play())


async def within(wanted: Any) -> Any:
    """The result, which comes within some thousands of turns or never."""
    task = asyncio.ensure_future(wanted)
    for _ in range(100):
        if task.done():
            return task.result()
        await turns(100)
    raise AssertionError("it waits for ever")


async def commit_of(after: asyncio.Task[None], barrier: asyncio.Task[None] | None, slowness: int) -> None:
    """A commit's write of the part of a chunk that lives in CPU memory."""
    await asyncio.shield(after)
    if barrier is not None:
        await asyncio.shield(barrier)
    await turns(slowness)


async def generation(updates: UpdatePipeline, round_: Round, writes: Sequence[asyncio.Task[None]]) -> None:
    await updates.round_ended(round_)
    for write in writes:
        await asyncio.shield(write)
