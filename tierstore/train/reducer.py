"""The gradient reducer: gradients of all ranks are averaged in buckets, while backward still makes others.

Scope: readiness, order of launches, averaging, unused parameters, what a changed graph means.
Not here: storages (`buckets.py`), collectives and streams (`launching.py`), the same start (`agreement.py`).
Owner: the training thread, and the autograd thread while backward runs; never both at once.

[Note: one backward] It begins at `backward(loss)`, or when the outputs of `reducer(...)` get their gradient, or with
the first gradient. Every parameter that the graph reaches is counted; a bucket whose last gradient has come is ready,
and is launched when those before it are. Others are ready at the end of backward: a parameter without a gradient adds
zeros. One small all-reduce, launched before the last bucket, says which parameters no rank has used: those keep None.

[Note: in place] A gradient is copied once, with the division by the number of ranks (`_place`, the only place that
averages), from where autograd made it to its place in the bucket, which becomes `.grad`. There the collective leaves
the average: nothing is copied back. A gradient that is in its place already (accumulated there under `no_sync`) is
divided in place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from tierstore.config import parse_size
from tierstore.errors import ClosedError, ConfigError, GraphError
from tierstore.trace import Tracer
from tierstore.train.agreement import broadcast_flat, check_same, described
from tierstore.train.buckets import Bucket, BucketRecord, BucketSet, StepRecord, assign_buckets
from tierstore.train.launching import CommHook, Launcher
from tierstore.train.ranks import Ranks

_UNKNOWN = 1 << 30  # firings to come, while a static graph is being learnt
_SHOWN = 5
_NOT_ZEROED = "delayed=True needs zero_grad() between a step and the next backward: .grad is of the step before"


class GradientReducer:
    """Data parallel training of a module: each rank computes its own batch, gradients are averaged over ranks.

    Use it in the place of DDP: `loss = f(reducer(x)); loss.backward()`, or `reducer.backward(loss)`, which finds
    unused parameters exactly and works with any way of calling the module. All ranks do the same in the same order.

    Args:
        process_group: None is the default group; a `Ranks` is used and not closed.
        bucket: bytes at which a bucket is full.
        first_bucket: the same for the first one, which is launched first: a small one begins early.
        max_in_flight: collectives at once; further ready buckets wait.
        reduce: "all_reduce" leaves the average in every `.grad`; "reduce_scatter" leaves each rank its part of every
            bucket in `shards()`, and None in `.grad`.
        find_unused: a backward may leave parameters out, others on each rank. If False that is a GraphError.
        static_graph: the graph of the first backward is that of all: the graph is not searched, gradients that come
            several times (reentrant checkpointing) are counted, and a change is a GraphError.
        delayed: `.grad` after a backward is the average of the step before (None after the first), so that collectives
            may take until the end of the next backward. Not exact: one step stale. Takes a second set of buckets.
        broadcast_buffers: buffers are rank 0's before each forward of `reducer(...)`.
        order: names of the parameters in the order in which backward makes their gradients, if it is known (from
            `last_step().order`). None: the reverse of their registration, until the first backward has shown it to
            rank 0; the buckets are made anew once then.
        timed: records say exactly when collectives end.
        clock: seconds.
        tracer: gets a span per bucket.

    Raises:
        ConfigError: an option, or the model, differs between ranks (said on all), or cannot work.
        RankLost: a rank did not come.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | Ranks | None = None,
        *,
        bucket: int | str = "25MiB",
        first_bucket: int | str | None = "1MiB",
        max_in_flight: int = 8,
        reduce: Literal["all_reduce", "reduce_scatter"] = "all_reduce",
        find_unused: bool = True,
        static_graph: bool = False,
        delayed: bool = False,
        broadcast_buffers: bool = True,
        order: Sequence[str] | None = None,
        timed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        tracer: Tracer | None = None,
    ) -> None:
        self.module = module
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        cap_bytes = parse_size(bucket)
        first_bytes = cap_bytes if first_bucket is None else min(cap_bytes, parse_size(first_bucket))
        self._caps_bytes = [first_bytes, cap_bytes]
        _check_options(module, self._parameters, cap_bytes, max_in_flight, reduce, delayed)
        self._max_in_flight = max_in_flight
        self._scatter = reduce == "reduce_scatter"
        self._find_unused, self._is_static, self._is_delayed = find_unused, static_graph, delayed
        self._broadcast_buffers = broadcast_buffers
        self._clock = clock
        self._owns_ranks = not isinstance(process_group, Ranks)
        self.ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group)
        device = self._parameters[0].device
        self._launcher = Launcher(self.ranks, device, clock, scatter=self._scatter)
        self._launcher.is_timed = timed
        self._tracer = tracer or Tracer(clock, enabled=False)
        if tracer is None and device.type == "cuda":
            self._tracer.annotate = torch.cuda.nvtx.range
        self._index: dict[torch.Tensor, int] = {p: i for i, p in enumerate(self._parameters)}
        self._scale = 1.0 / self.ranks.count
        self._sets: list[BucketSet] = []
        self._filling = 0
        self._is_rebuilt = order is not None
        self._late: BucketSet | None = None  # launched, and not delivered yet
        self._recorded: BucketSet | None = None
        self._is_learning = static_graph
        self._known_used: bytearray | None = None
        self._allocate(self._completed([] if order is None else [self._names.index(name) for name in order]))
        self._reset_step()
        self._expected = [_UNKNOWN if static_graph else 1] * len(self._parameters)
        self._is_syncing = True
        self._is_stale = True  # buffers may differ between ranks
        self._is_closed = False
        self._failure: BaseException | None = None
        self._unused: list[str] = []
        self._handles: list[Any] = []
        try:
            options = [cap_bytes, first_bytes, max_in_flight, reduce, find_unused, static_graph, delayed, order]
            check_same(self.ranks, described(module) | {"options": str(options)})
            broadcast_flat(self.ranks, [*module.parameters(), *module.buffers()], "the broadcast of parameters")
        except BaseException:
            self.close()
            raise
        for index, parameter in enumerate(self._parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    # --- what a person calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with rank 0's buffers."""
        self._check_usable()
        if self._broadcast_buffers and self._is_stale:
            self.sync_buffers()
        output = self.module(*args, **kwargs)
        # As DDP: buffers are those of rank 0 after a forward that is not part of an accumulation.
        self._is_stale = torch.is_grad_enabled() and self._is_syncing
        if self._is_stale:
            roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            for root in roots:
                root.register_hook(self._outputs_hook(roots))  # type: ignore[no-untyped-call]
        return output

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`; afterwards the gradients are averaged, unless under `no_sync`.

        Raises:
            RankLost: a rank died or stopped; this reducer can do no more.
            GraphError: backward did what the options exclude.
        """
        self._check_usable()
        if self._is_syncing:
            self._begin([loss])
            self._open()
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        if self._is_open:
            self._finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here add to the gradients of this rank only."""
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets by a hook of `torch.distributed.algorithms.ddp_comm_hooks`, or one like these.

        Args:
            hook: `hook(state, bucket)` gets a bucket that is not averaged, and returns a future of the averaged one.
        """
        if self._scatter:
            raise ConfigError("a comm hook replaces the all-reduce: use reduce='all_reduce' with it")
        if self._launcher.hook is not None:
            raise ConfigError("there is a comm hook already")
        self._launcher.hook, self._launcher.hook_state = hook, state

    def sync_buffers(self) -> None:
        """Rank 0's buffers for all."""
        buffers = list(self.module.buffers())
        if buffers:
            broadcast_flat(self.ranks, buffers, "the broadcast of buffers")

    def flush(self) -> None:
        """If delayed: wait for what is in flight, and put it into `.grad` now; the next backward then leaves None."""
        self._check_usable()
        late, self._late = self._late, None
        if late is not None:
            self._deliver(late)

    def shards(self) -> list[torch.Tensor]:
        """With "reduce_scatter": this rank's part of every bucket, by bucket, valid until the next backward."""
        return [bucket.shard for bucket in self._delivered.buckets if bucket.shard is not None]

    def layout(self) -> list[list[str]]:
        """Names of the parameters of every bucket, in the order of launches."""
        return [[self._names[i] for i in bucket.members] for bucket in self._sets[0].buckets]

    @property
    def extra_bytes(self) -> int:
        """What `delayed` takes beyond the gradients themselves."""
        return sum(buckets.nbytes for buckets in self._sets[1:])

    def unused(self) -> list[str]:
        """Parameters that no rank has used in the step whose gradients were delivered last."""
        return self._unused

    def timeline(self) -> list[BucketRecord]:
        """The buckets of the last backward that was reduced; to be read before the next one."""
        record = self.last_step()
        return [] if record is None else list(record.buckets)

    def last_step(self) -> StepRecord | None:
        """The last backward that was reduced, to be read before the next one; None before the first."""
        if self._recorded is None:
            return None
        order = tuple(self._names[i] for i in dict.fromkeys(self._order))
        records = tuple(self._record(bucket) for bucket in self._recorded.buckets)
        return StepRecord(self._began_s, self._last_s, self._ended_s, order, records)

    def _record(self, bucket: Bucket) -> BucketRecord:
        return BucketRecord(
            bucket.index,
            bucket.nbytes,
            tuple(self._names[i] for i in bucket.members),
            bucket.ready_s,
            bucket.launched_s,
            self._launcher.done_s(bucket),
            bucket.exposed_s,
        )

    def close(self) -> None:
        """Take the hooks off the parameters. Twice is fine. Gradients stay."""
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._owns_ranks:
            self.ranks.close()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- a backward begins --------------------------------------------------------------------------------------

    def _outputs_hook(self, roots: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if self._is_syncing and not self._is_begun:
                self._begin(roots)
                _queue(self._finish_if_open)

        return hook

    def _begin(self, roots: list[torch.Tensor] | None) -> None:
        """Count what is to come. No collective yet: this backward may turn out to reach no parameter."""
        self._check_usable()
        if self._is_open:
            raise GraphError("a backward began before the one before it had ended, or after that had failed")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise GraphError(f"{name} was frozen when the reducer was made, and needs a gradient now")
        self._reset_step()
        self._is_begun = True
        self._began_s = self._clock()
        self._left = self._expected.copy()
        if self._is_static:
            self._reached = bytearray(count > 0 for count in self._expected)
        if roots is not None and self._find_unused and not self._is_static:
            index = self._index
            reached = bytearray(len(self._parameters))
            for leaf in _leaves_of(roots):
                if leaf in index:
                    reached[index[leaf]] = 1
            self._reached = reached

    def _open(self) -> None:
        """The first gradient comes: from here on the ranks meet."""
        self._is_open = True
        if self._ready_order and not self._is_rebuilt:
            self._rebuild()
        if self._is_delayed:
            self._filling = 1 - self._filling
        self._current = self._sets[self._filling]
        self._launcher.begin()
        reached = self._reached
        for bucket in self._current.buckets:
            bucket.begin(sum(reached[i] for i in bucket.members))
            if not bucket.missing:
                self._mark_ready(bucket)

    def _reset_step(self) -> None:
        self._is_begun = self._is_open = False
        self._next = 0
        self._is_deferred = False
        self._in_flight: list[Bucket] = []
        self._order: list[int] = []
        self._began_s = self._last_s = self._ended_s = 0.0
        self._placed = bytearray(len(self._parameters))
        self._unfired: list[int] = []
        self._reached = bytearray(b"\1") * len(self._parameters)

    def _rebuild(self) -> None:
        """Buckets in the order in which rank 0 saw the gradients; those that it did not see last, in reverse order."""
        order = self._completed(self._ready_order)
        shared = torch.tensor(order, dtype=torch.int64, device=self._parameters[0].device)
        broadcast_flat(self.ranks, [shared], "the order of buckets")
        self._is_rebuilt = True
        self._allocate(shared.tolist())

    def _completed(self, order: list[int]) -> list[int]:
        """`order`, then those that are missing there in the reverse of their registration."""
        return list(dict.fromkeys([*order, *reversed(range(len(self._parameters)))]))

    def _allocate(self, order: list[int]) -> None:
        kinds = [p.dtype for p in self._parameters]
        assignment = assign_buckets(order, [p.nbytes for p in self._parameters], kinds, self._caps_bytes)
        self._sets = [
            BucketSet(self._parameters, assignment, pad_to=self.ranks.count, scatter=self._scatter)
            for _ in range(2 if self._is_delayed else 1)
        ]
        self._filling = 0
        self._current = self._delivered = self._sets[0]
        self._ready_order: list[int] = []
        self._held = bytearray(len(self._parameters))

    # --- gradients come -----------------------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._arrived(index, parameter)

        return hook

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if not self._is_syncing:
            self._hold(index, parameter)
            return
        if not self._is_open:
            if not self._is_begun:
                self._begin(None)
                _queue(self._finish_if_open)
            self._open()
        self._last_s = self._clock()
        self._left[index] -= 1
        if self._left[index] > 0:
            if self._is_learning:
                self._order.append(index)
            return
        bucket = self._current.home[index]
        if self._left[index] < 0 or bucket.is_ready:
            raise GraphError(self._too_late(index))
        self._place(index, parameter)
        self._order.append(index)
        if self._reached[index]:
            bucket.missing -= 1
            if not bucket.missing:
                self._mark_ready(bucket)
                self._advance()
                return
        if self._is_deferred:
            self._advance()

    def _hold(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient of this rank only: put into its place at once, so that it takes no memory of its own."""
        view = self._sets[1 - self._filling if self._is_delayed else 0].views[index]
        if parameter.grad is not view:
            self._check_gradient(index, parameter.grad)
            view.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = view
        elif self._is_delayed and not self._held[index]:
            raise GraphError(_NOT_ZEROED)
        self._held[index] = 1

    def _place(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient into its place in the bucket, divided by the number of ranks. See [Note: in place]."""
        gradient, view = parameter.grad, self._current.views[index]
        if gradient is not None and gradient is view:
            if self._is_delayed and not self._held[index]:
                raise GraphError(_NOT_ZEROED)
            if self._launcher.hook is None:
                view.mul_(self._scale)
        else:
            self._check_gradient(index, gradient)
            if self._launcher.hook is None:
                torch.mul(gradient, self._scale, out=view)  # type: ignore[arg-type]
            else:
                view.copy_(gradient)  # type: ignore[arg-type]
            parameter.grad = view
        self._held[index] = 0
        self._placed[index] = 1
        if self._launcher.is_cuda:
            self._launcher.note_stream(self._current.home[index])

    def _check_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
            why = (
                "is sparse" if gradient is not None and not gradient.requires_grad else "was made by create_graph=True"
            )
            raise GraphError(f"the gradient of {self._names[index]} {why}: that cannot be reduced in a bucket")
        if self._is_delayed and gradient is self._delivered.views[index]:
            raise GraphError(_NOT_ZEROED)

    def _too_late(self, index: int) -> str:
        name = self._names[index]
        if self._is_static:
            count = self._expected[index]
            return f"{name} got a gradient more often than in the first backward ({count}): not a static graph"
        if self._placed[index]:
            return f"{name} got its gradient twice in one backward, as reentrant checkpointing does: use static_graph"
        return (
            f"{name} got a gradient, and the graph that was searched does not reach it: "
            "call reducer.backward(loss); with reentrant checkpointing use static_graph=True or find_unused=False"
        )

    # --- buckets go ---------------------------------------------------------------------------------------------

    def _mark_ready(self, bucket: Bucket) -> None:
        """No more gradients come: those that are not there are zeros, or what other backwards have left."""
        for member in bucket.members:
            if not self._placed[member]:
                parameter = self._parameters[member]
                if parameter.grad is None:
                    self._current.views[member].zero_()
                    self._unfired.append(member)
                else:
                    self._place(member, parameter)
        self._launcher.mark_ready(bucket)

    def _advance(self) -> None:
        """Launch what is ready and next, as far as there is room in flight."""
        buckets = self._current.buckets
        while self._next < len(buckets) and buckets[self._next].is_ready:
            while self._in_flight and self._launcher.is_done(self._in_flight[0]):
                self._in_flight.pop(0)
            self._is_deferred = len(self._in_flight) >= self._launcher.most_in_flight(self._max_in_flight)
            if self._is_deferred:
                return
            self._launch(buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        with self._tracer.measure("reducer", f"launch bucket {bucket.index}", bytes=bucket.nbytes):
            try:
                if bucket.is_last and self._find_unused and self._known_used is None:
                    self._current.used = self._launcher.start_used(self._placed)
                self._launcher.start(bucket)
            except BaseException as error:
                self._failure = error
                raise
        self._in_flight.append(bucket)
        self._next += 1

    def _finish_if_open(self) -> None:
        if self._is_open:
            self._finish()
        self._is_begun = False

    def _finish(self) -> None:
        """Backward is over: launch the rest, wait, and put the averages into `.grad`."""
        try:
            self._launch_rest()
            if not self._is_delayed:
                self._deliver(self._current)
            else:
                late, self._late = self._late, self._current
                if late is not None:
                    self._deliver(late)
                else:
                    self._clear()
        except BaseException as error:
            self._failure = error
            raise
        self._ended_s = self._clock()
        self._is_begun = self._is_open = False
        if not self._is_rebuilt and not self._ready_order:
            self._ready_order = list(dict.fromkeys(reversed(self._order)))[::-1]
        self._recorded = self._current
        self._check_graph()

    def _launch_rest(self) -> None:
        if self._is_learning:
            for index in sorted(set(self._order)):
                self._place(index, self._parameters[index])
        buckets = self._current.buckets
        for bucket in buckets:
            if not bucket.is_ready:
                self._mark_ready(bucket)
        while self._next < len(buckets):
            self._advance()
            if self._is_deferred:
                self._launcher.wait_on_host(self._in_flight.pop(0))
        self._current.unfired = self._unfired

    def _deliver(self, buckets: BucketSet) -> None:
        """Wait for a set of buckets; `.grad` are its views then."""
        for bucket in buckets.buckets:
            self._launcher.wait(bucket)
        used = self._known_used
        if buckets.used is not None:
            used = self._launcher.wait_used(buckets.used, is_read=bool(buckets.unfired) or self._is_learning)
            buckets.used = None
        if self._is_learning:
            self._known_used = used
        absent = {i for i in buckets.unfired if used is not None and not used[i]}
        self._unused = [self._names[i] for i in sorted(absent)]
        if self._scatter:
            self._clear()
        else:
            indices = range(len(self._parameters)) if self._is_delayed else buckets.unfired
            for index in indices:
                self._parameters[index].grad = None if index in absent else buckets.views[index]
        self._delivered = buckets
        self._trace(buckets)

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _check_graph(self) -> None:
        """After the collectives, so that the others are not left waiting."""
        if self._is_learning:
            self._is_learning = False
            self._expected = [_UNKNOWN - left for left in self._left]
            return
        if self._is_static:
            changed = [i for i, left in enumerate(self._left) if left]
            lines = [
                f"{self._names[i]} got {self._expected[i] - self._left[i]} gradients, {self._expected[i]} in the first"
                for i in changed[:_SHOWN]
            ]
            text = "the graph of this backward is not that of the first (static_graph=True): "
        else:
            changed = self._unfired if not self._find_unused else []
            lines = [f"{self._names[i]} got no gradient" for i in sorted(changed)[:_SHOWN]]
            text = "this backward left parameters out (find_unused=False): "
        if changed:
            more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise GraphError(text + "; ".join(lines) + more)

    # --- records ------------------------------------------------------------------------------------------------

    def _trace(self, buckets: BucketSet) -> None:
        if not self._tracer.enabled:
            return
        for bucket in buckets.buckets:
            done_s = self._launcher.done_s(bucket)
            if done_s == done_s:
                name = f"bucket {bucket.index}"
                self._tracer.span("reduce", name, bucket.launched_s, done_s, bytes=bucket.nbytes)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClosedError("the reducer was closed")
        if self._failure is not None:
            raise self._failure


def _check_options(
    module: nn.Module,
    parameters: list[nn.Parameter],
    cap_bytes: int,
    max_in_flight: int,
    reduce: str,
    delayed: bool,
) -> None:
    if not parameters:
        raise ConfigError("no parameter of the module needs a gradient")
    devices = {str(p.device) for p in parameters}
    if len(devices) > 1:
        raise ConfigError(f"the parameters are on {', '.join(sorted(devices))}: a reducer is for one device")
    if cap_bytes < 1 or max_in_flight < 1:
        raise ConfigError("bucket and max_in_flight must be at least 1")
    if reduce not in ("all_reduce", "reduce_scatter"):
        raise ConfigError(f"reduce must be 'all_reduce' or 'reduce_scatter', not {reduce!r}")
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise ConfigError(f"{name} makes sparse gradients, which cannot be reduced in buckets: use sparse=False")


def _queue(callback: Callable[[], None]) -> None:
    """Call it when the backward that is running ends."""
    Variable._execution_engine.queue_callback(callback)


def _leaves_of(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Every leaf that the graphs of `roots` reach, once."""
    seen: set[Any] = set()
    ahead: list[Any] = [root.grad_fn for root in roots]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        ahead += [parent for parent, _ in node.next_functions]
