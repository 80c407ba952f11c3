"""Launching: the collective of a bucket, on the stream and with the events that it needs.

Scope: start, poll and wait for the collective of one bucket; comm hooks; CUDA streams.
Not here: which bucket, and when (`reducer.py`).
Owner: the reducer; the thread that runs backward.

[Note: the communication stream] On CUDA with NCCL the host waits for nothing. A bucket's gradients are made on streams
of backward: an event of each is recorded when the last of them is ready, the communication stream waits for these, the
collective is queued there, `work.wait()` under that stream orders the stream after NCCL's own, and a mark after it is
what the compute stream waits for at the end of backward. The communication stream has a higher priority, so that a
collective does not queue behind the kernels of backward. The allocator: a bucket's storage belongs to the compute
stream, is written by others only between the ready events and the mark, and is freed only after the compute stream has
waited for the mark; so no block of it is handed out too early. What a hook allocates belongs to the communication
stream, where it is also used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from tierstore.errors import ConfigError
from tierstore.trace import Tracer
from tierstore.train.data_parallel.buckets import Bucket, HookBucket
from tierstore.train.ranks import Ranks, is_nccl, reduce_scatter_flat

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Launcher:
    """Starts collectives, and waits for them.

    Args:
        device: of all buckets.
        clock: seconds.
        scatter: each rank gets its part of a bucket only.
        timed: the times at which collectives end are recorded exactly.
    """

    def __init__(
        self, ranks: Ranks, device: torch.device, clock: Callable[[], float], *, scatter: bool, timed: bool
    ) -> None:
        self._ranks = ranks
        self._group: Any = ranks.group
        self._clock = clock
        self._scatter = scatter
        self._device = device
        self.hook: CommHook | None = None
        self.hook_state: Any = None
        self._is_timed = timed
        self._is_cuda = device.type == "cuda"
        # gloo takes CUDA tensors too, and blocks the host in wait().
        self._is_stream_ordered = self._is_cuda and is_nccl(self._group, device)
        self._stream = torch.cuda.Stream(device, priority=-1) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._base: tuple[Any, float] | None = None
        if scatter and timed and not self._is_stream_ordered:
            raise ConfigError("timed=True: only NCCL tells when a reduce-scatter ends; measure reduce='all_reduce'")

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether a bucket must have ended before the next one is launched.

        A hook may start collectives when its first ones end (PowerSGD does); without NCCL it does so in threads of the
        group, and these collectives would meet those of the next bucket in another order on each rank.
        """
        return self.hook is not None and not self._is_stream_ordered

    def now(self) -> Any:
        """A moment of backward: seconds, or on CUDA an event of the current stream. See `seconds_between`."""
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        """Seconds between two moments. On CUDA this waits for the last one."""
        if not self._is_cuda:
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def begin(self) -> None:
        """A backward begins."""
        if self._is_cuda and self._is_timed:
            self._base = (self.now(), self._clock())

    def note_stream(self, bucket: Bucket) -> None:
        """A gradient of `bucket` was just put into its place."""
        if self._is_cuda:
            bucket.streams.add(torch.cuda.current_stream(self._device))

    def mark_ready(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are in their places."""
        bucket.is_ready = True
        bucket.ready_s = self._clock()
        self.note_stream(bucket)
        bucket.ready_marks = [self._event(stream) for stream in bucket.streams]

    def start(self, bucket: Bucket) -> None:
        """Start the collective.

        Raises:
            RankLost: it could not be started, because a rank is missing.
        """
        bucket.launched_s = self._clock()
        with self._ranks.waiting(self._name(bucket)):
            if self._stream is None:
                bucket.work = self._collective(bucket)
                if self._is_timed:
                    self._time(bucket)
                return
            for mark in bucket.ready_marks:
                self._stream.wait_event(mark)
            with torch.cuda.stream(self._stream):
                if self._is_timed:
                    bucket.begun_mark = self._event(self._stream)
                bucket.work = self._collective(bucket)
                if self._is_stream_ordered:
                    self._settle(bucket)
                    bucket.done_mark = self._event(self._stream)

    def is_done(self, bucket: Bucket) -> bool:
        """Whether the collective has ended; does not wait. Its result is in place only after `wait`."""
        if bucket.work is None:
            return bucket.done_mark is None or bool(bucket.done_mark.query())
        work = bucket.work
        is_done = bool(work.done() if isinstance(work, torch._C.Future) else work.is_completed())
        if is_done and bucket.done_s is None:
            bucket.done_s = self._clock()
        return is_done

    def wait(self, bucket: Bucket) -> None:
        """The calling thread (or, with NCCL, its current stream) goes on when the bucket is reduced.

        Raises:
            RankLost: the collective failed, or its timeout has passed.
        """
        begun_s = self._clock()
        if self._is_stream_ordered:
            stream = torch.cuda.current_stream(self._device)
            before = self._event(stream) if self._is_timed else None
            stream.wait_event(bucket.done_mark)
            bucket.wait_marks = (before, self._event(stream)) if self._is_timed else ()
        else:
            with self._ranks.waiting(self._name(bucket)), self._in_stream():
                self._settle(bucket)
            if self._stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
        ended_s = self._clock()
        bucket.exposed_s += ended_s - begun_s
        if bucket.done_s is None and not self._is_stream_ordered:
            bucket.done_s = ended_s

    def wait_on_host(self, bucket: Bucket) -> None:
        """The calling thread goes on when the collective has ended, to bound how many are in flight."""
        if self._is_stream_ordered:
            bucket.done_mark.synchronize()
        else:
            self.wait(bucket)

    def let_go(self, buckets: Iterable[Bucket]) -> None:
        """Make the current stream wait for what is in flight: its next kernels may get the buckets' memory."""
        if self._is_stream_ordered:
            for mark in (bucket.done_mark for bucket in buckets if bucket.done_mark is not None):
                torch.cuda.current_stream(self._device).wait_event(mark)

    def times(self, bucket: Bucket) -> tuple[float, float, float, float]:
        """When the bucket was last ready, launched and done, on the reducer's clock, and how long the wait for it took.

        On CUDA these are times of the device if timed, and the host waits for them; else they are times of the host,
        which runs ahead, and the end is not known (NaN).
        """
        exposed_s = bucket.exposed_s
        if self._is_stream_ordered and self._base is not None and bucket.begun_mark is not None:
            base, base_s = self._base
            ready_s = max(base_s + self.seconds_between(base, mark) for mark in bucket.ready_marks)
            launched_s = base_s + self.seconds_between(base, bucket.begun_mark)
            done_s = base_s + self.seconds_between(base, bucket.done_mark)
            if bucket.wait_marks:
                exposed_s = self.seconds_between(*bucket.wait_marks)
            return ready_s, launched_s, done_s, exposed_s
        return bucket.ready_s, bucket.launched_s, math.nan if bucket.done_s is None else bucket.done_s, exposed_s

    def start_used(self, flags: bytearray) -> tuple[torch.Tensor, Any]:
        """Start the collective that says which parameters any rank has used: the maximum of all ranks' flags."""
        with self._ranks.waiting("the all-reduce of used parameters"), self._in_stream():
            here = torch.frombuffer(bytearray(flags), dtype=torch.uint8)
            if self._is_cuda:
                here = here.pin_memory()  # else the host would wait for the stream, and all buckets before this
            used = here.to(self._device, non_blocking=True)
            work = distributed.all_reduce(used, distributed.ReduceOp.MAX, group=self._group, async_op=True)
            if self._is_stream_ordered:
                work.wait()
            return used, work

    def wait_used(self, started: tuple[torch.Tensor, Any], *, is_read: bool) -> bytearray | None:
        """Wait for the collective of `start_used`. With NCCL the host waits only if the answer is to be read.

        Raises:
            RankLost: the collective failed, or its timeout has passed.
        """
        used, work = started
        with self._ranks.waiting("the all-reduce of used parameters"), self._in_stream():
            if not self._is_stream_ordered:
                work.wait()
            return bytearray(used.tolist()) if is_read else None

    def _in_stream(self) -> contextlib.AbstractContextManager[Any]:
        """The communication stream is the current one in here, if there is one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _name(self, bucket: Bucket) -> str:
        verb = "reduce-scatter" if self._scatter else "all-reduce"
        return f"the {verb} of bucket {bucket.index} ({bucket.nbytes} B)"

    def _event(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=self._is_timed)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _collective(self, bucket: Bucket) -> Any:
        if self.hook is not None:
            future = self.hook(self.hook_state, HookBucket(bucket))
            if not isinstance(future, torch._C.Future):
                raise ConfigError(
                    f"a comm hook returns a future of the averaged bucket, this one {type(future).__name__}"
                )
            return future
        if bucket.shard is not None:
            return reduce_scatter_flat(bucket.shard, bucket.flat, self._group, async_op=True)
        return distributed.all_reduce(bucket.flat, group=self._group, async_op=True)

    def _settle(self, bucket: Bucket) -> None:
        """Wait for the work; what a hook has made elsewhere is copied into the bucket."""
        work, bucket.work = bucket.work, None
        if work is None:
            return
        result = work.wait()
        if isinstance(work, torch._C.Future):
            result = result[0] if isinstance(result, (list, tuple)) else result
            if not isinstance(result, torch.Tensor) or result.numel() != bucket.flat.numel():
                found = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ConfigError(
                    f"the future of a comm hook holds the averaged bucket, {bucket.flat.numel()} elements, not {found}"
                )
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result.view(-1))

    def _time(self, bucket: Bucket) -> None:
        """Note when the work ends, in the thread that ends it."""

        def note(_: Any) -> None:
            bucket.done_s = self._clock()

        work = bucket.work
        future = work if isinstance(work, torch._C.Future) else work.get_future()
        future.add_done_callback(note)


class LaunchQueue:
    """Launches buckets in their order, each when it is ready and there is room in flight.

    Args:
        max_in_flight: collectives at once. A bucket that is deferred is launched at the next gradient that finds room.
        before_last: called before the last bucket is launched, on every rank.
    """

    def __init__(self, launcher: Launcher, max_in_flight: int, tracer: Tracer, before_last: Callable[[], None]) -> None:
        self._launcher = launcher
        self._max_in_flight = max_in_flight
        self._tracer = tracer
        self._before_last = before_last
        self.begin(())

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A backward begins."""
        self._ahead = list(reversed(buckets))
        self._in_flight: list[Bucket] = []
        self.is_deferred = False

    def advance(self) -> None:
        """Launch what is ready and next, as far as there is room in flight; does not wait.

        Raises:
            RankLost: a collective could not be started.
        """
        most = 1 if self._launcher.is_one_at_a_time else self._max_in_flight
        while self._ahead and self._ahead[-1].is_ready:
            while self._in_flight and self._launcher.is_done(self._in_flight[0]):
                self._in_flight.pop(0)
            self.is_deferred = len(self._in_flight) >= most
            if self.is_deferred:
                return
            self._launch(self._ahead.pop())
        self.is_deferred = False

    def launch_rest(self) -> None:
        """Launch what is left, all of it ready; waits for room.

        Raises:
            RankLost: a collective failed, or its timeout has passed.
        """
        self.advance()
        while self._ahead:
            self._launcher.wait_on_host(self._in_flight.pop(0))
            self.advance()

    def _launch(self, bucket: Bucket) -> None:
        with self._tracer.measure("reducer", f"launch bucket {bucket.index}", bytes=bucket.nbytes):
            if bucket.is_last:
                self._before_last()
            self._launcher.start(bucket)
        self._in_flight.append(bucket)
