"""Processes on a simulated clock: the parts of the step model.

Scope: generators that wait for seconds, signals, memory, and their share of a resource that several use at once.
Not here: what the processes do (`plan/step_model.py`).
Owner: one `Clock` per run; nothing here knows real time, and two runs of the same processes are equal.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tierstore.errors import ConfigError


class Signal:
    """An event that happens once."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[_Begun] = []


Process = Generator[Signal | float, None, None]
"""Waits for each signal, or for as many seconds, that it yields."""
_Begun = tuple[Process, Signal]
"""A process, and the signal that is set at its end."""


class Clock:
    """Runs processes in the order of their events; simultaneous ones in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: deque[_Begun] = deque()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def spawn(self, process: Process) -> Signal:
        """Begin a process; the signal is set at its end."""
        ended = Signal()
        self._ready.append((process, ended))
        return ended

    def set(self, signal: Signal) -> None:
        """The event happens: processes that wait for it go on."""
        if not signal.is_set:
            signal.is_set = True
            self._ready.extend(signal.waiting)
            signal.waiting.clear()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after so many seconds."""
        heapq.heappush(self._later, (self.now_s + seconds, next(self._order), action))

    def run(self, until: Signal) -> None:
        """Runs processes until this signal is set.

        Raises:
            ConfigError: it never will be: all processes wait for one another.
        """
        while self._ready or self._later:
            while self._ready:
                self._advance(self._ready.popleft())
            if until.is_set:
                return
            if self._later:
                self.now_s, _, action = heapq.heappop(self._later)
                action()
        raise ConfigError("the simulated step waits for itself within these budgets: raise cpu_memory or gpu_memory")

    def _advance(self, begun: _Begun) -> None:
        process, ended = begun
        for wanted in process:
            if isinstance(wanted, Signal):
                if not wanted.is_set:
                    wanted.waiting.append(begun)
                    return
            elif wanted > 0:
                self.after(wanted, lambda: self._ready.append(begun))
                return
        self.set(ended)


class _Waiter(NamedTuple):
    nbytes: int
    granted: Signal
    elsewhere: Callable[[], bool]
    who: Hashable


class Memory:
    """Memory that is granted in the order in which it was asked for."""

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        self._clock = clock
        self._free_bytes = capacity_bytes
        self._capacity_bytes = capacity_bytes
        self._queue: deque[_Waiter] = deque()
        self.peak_bytes = 0

    def reserve(self, nbytes: int, elsewhere: Callable[[], bool] = lambda: False, who: Hashable = None) -> Signal:
        """The signal is set when the bytes are reserved, by `elsewhere` or else here; `rearrange` ranks by `who`."""
        granted = Signal()
        if nbytes == 0:
            self._clock.set(granted)
            return granted
        self._queue.append(_Waiter(nbytes, granted, elsewhere, who))
        self.look_again()
        return granted

    def try_reserve(self, nbytes: int) -> bool:
        """Reserve the bytes if they are free and nobody waits; returns whether they are reserved."""
        if self._queue or nbytes > self._free_bytes:
            return False
        self._take(nbytes)
        return True

    def free(self, nbytes: int) -> None:
        """Give back reserved bytes."""
        self._free_bytes += nbytes
        self.look_again()

    def rearrange(self, ranks: Mapping[Hashable, int]) -> None:
        """Waiters that are ranked here swap their turns so that the lowest rank is first; all others keep theirs."""
        turns = [turn for turn, waiter in enumerate(self._queue) if waiter.who in ranks]
        ranked = sorted((self._queue[turn] for turn in turns), key=lambda waiter: ranks[waiter.who])
        for turn, waiter in zip(turns, ranked):
            self._queue[turn] = waiter
        self.look_again()

    def look_again(self) -> None:
        """Grant the requests that can be granted; to be called when memory elsewhere has changed."""
        while self._queue:
            nbytes, granted, elsewhere, _ = self._queue[0]
            if not elsewhere():
                if nbytes > self._free_bytes:
                    return
                self._take(nbytes)
            self._queue.popleft()
            self._clock.set(granted)

    def _take(self, nbytes: int) -> None:
        self._free_bytes -= nbytes
        self.peak_bytes = max(self.peak_bytes, self._capacity_bytes - self._free_bytes)


@dataclass(slots=True, eq=False)
class _Job:
    lane: str
    kind: str
    left: float
    ended: Signal


class Shared:
    """A resource that several jobs use at once, each at a speed that depends on what else runs: a disk, the cores.

    Args:
        lanes: how many jobs of each lane run at once; the others queue, smaller priorities first.
        speeds: maps the number of running jobs per kind to the speed of one job of each kind, in amount per second;
            called once for each mix.
    """

    def __init__(
        self, clock: Clock, lanes: Mapping[str, int], speeds: Callable[[Mapping[str, int]], Mapping[str, float]]
    ) -> None:
        self._clock = clock
        self._free = dict(lanes)
        self._speeds = functools.cache(lambda running: speeds(dict(running)))  # few mixes, and each comes often
        self._queues: dict[str, list[tuple[int, int, _Job]]] = {lane: [] for lane in lanes}
        self._running: list[_Job] = []
        self._counts: Counter[str] = Counter()
        self._mix: frozenset[tuple[str, int]] = frozenset()
        self._order = itertools.count()
        self._since_s = 0.0
        self._rates: Mapping[str, float] = {}
        self._version = 0
        self._busy_s: defaultdict[frozenset[tuple[str, int]], float] = defaultdict(float)
        self.amounts: defaultdict[str, float] = defaultdict(float)

    def submit(self, lane: str, kind: str, amount: float, priority: int = 0) -> Signal:
        """Have `amount` of work done in this lane; the signal is set at the end."""
        ended = Signal()
        if amount <= 0:
            self._clock.set(ended)
            return ended
        self.amounts[kind] += amount
        job = _Job(lane, kind, amount, ended)
        if self._free[lane]:  # so no job queues
            self._account()
            self._start(job)
            self._come_back()
        else:
            heapq.heappush(self._queues[lane], (priority, next(self._order), job))
        return ended

    def busy_s(self, *kinds: str) -> float:
        """Time in which jobs of any of these kinds ran."""
        return sum(seconds for mix, seconds in self._busy_s.items() if any(kind in kinds for kind, _ in mix))

    def _account(self) -> None:
        """Subtract the work that was done since the last change."""
        seconds = self._clock.now_s - self._since_s
        if seconds > 0:
            self._since_s = self._clock.now_s
            self._busy_s[self._mix] += seconds
            for job in self._running:
                job.left -= self._rates[job.kind] * seconds

    def _start(self, job: _Job) -> None:
        self._free[job.lane] -= 1
        self._counts[job.kind] += 1
        self._running.append(job)

    def _come_back(self) -> None:
        """Schedule `_end` for the moment at which the first of the running jobs ends."""
        self._version += 1
        self._mix = frozenset([item for item in self._counts.items() if item[1]])
        if self._running:
            self._rates = rates = self._speeds(self._mix)
            first_s = min([job.left / rates[job.kind] for job in self._running])
            self._clock.after(max(first_s, 0.0), functools.partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # the mix has changed since: another call comes
        self._account()
        least_s = max(1e-9, 4 * math.ulp(self._clock.now_s))  # in less time a late clock may stand still
        ended = [job for job in self._running if job.left <= least_s * self._rates[job.kind]]
        for job in ended:
            self._running.remove(job)
            self._free[job.lane] += 1
            self._counts[job.kind] -= 1
            self._clock.set(job.ended)
            if queue := self._queues[job.lane]:
                self._start(heapq.heappop(queue)[2])
        self._come_back()
