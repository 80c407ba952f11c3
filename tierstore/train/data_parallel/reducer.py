"""The gradient reducer: gradients of all ranks are averaged in buckets, while backward still makes others.

Scope: the public face, and one backward from its first gradient to `.grad`.
Not here: which gradients come (`readiness.py`), which share a bucket (`arrangement.py`), where they stand and are
averaged (`places.py`), collectives and streams (`launching.py`), the same start (`agreement.py`).
Owner: the training thread, and the autograd thread while backward runs; never both at once.

[Note: one backward] It begins at `backward(loss)`, or when the outputs of `reducer(...)` get their gradient, or with
the first gradient. Every parameter that the graph reaches is counted; a bucket whose last gradient has come is ready,
and is launched when those before it are. Others are ready at the end of backward: a parameter without a gradient adds
zeros. One small all-reduce, launched before the last bucket, says which parameters no rank has used: those keep None.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import or_
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from tierstore.errors import ClosedError, ConfigError, GraphError
from tierstore.plan.cost_model import CostModel
from tierstore.trace import Tracer
from tierstore.train.data_parallel.agreement import broadcast_flat, check_same, described
from tierstore.train.data_parallel.arrangement import Arrangement
from tierstore.train.data_parallel.buckets import Bucket, BucketRecord, BucketSet, StepRecord
from tierstore.train.data_parallel.launching import CommHook, Launcher, LaunchQueue
from tierstore.train.data_parallel.options import ReducerOptions
from tierstore.train.data_parallel.places import Places
from tierstore.train.data_parallel.readiness import Readiness
from tierstore.train.owners import close_reducers_of, enlist, strike_off
from tierstore.train.ranks import Ranks


class GradientReducer:
    """Data parallel training of a module: each rank computes its own batch, gradients are averaged over ranks.

    Use it in place of DDP: `loss = f(reducer(x)); loss.backward()`, or `reducer.backward(loss)`, which finds unused
    parameters exactly and works with any way of calling the module. All ranks do the same in the same order. A module
    has one reducer at a time: making another one closes the first.

    Args:
        module: the model, on this rank's device.
        process_group: None is the default group; a `Ranks` is used and not closed.
        bucket: bytes at which a bucket is full. "auto": 25 MiB, and after the first backward what suits its times best.
        cost: what a collective costs here, for "auto".
        first_bucket: bytes at which the first bucket is full; it is launched first, and a small one begins early.
        max_in_flight: collectives at once; further ready buckets wait.
        reduce: "all_reduce" leaves the average in every `.grad`; "reduce_scatter" leaves each rank its part of every
            bucket in `shards()`, and None in `.grad`.
        find_unused: a backward may leave parameters out, different ones on each rank. If False that is a GraphError.
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
        ConfigError: an option, or the model, differs between ranks (raised on all), or cannot work.
        RankLost: a rank did not come. (Not with NCCL in backward, where the host does not wait: there the group's own
            watchdog ends the process, and says so.)
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | Ranks | None = None,
        *,
        bucket: int | str = "25MiB",
        cost: CostModel | None = None,
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
        options = ReducerOptions(
            bucket=bucket, cost=cost, first_bucket=first_bucket, max_in_flight=max_in_flight, reduce=reduce,
            find_unused=find_unused, static_graph=static_graph, delayed=delayed, broadcast_buffers=broadcast_buffers,
            order=None if order is None else list(order),
        )  # fmt: skip
        options.check(module)
        self.module = module
        self._options = options
        self._readiness = Readiness(module, find_unused=find_unused, static=static_graph)
        self._names = self._readiness.names
        # Walking all modules in each forward takes a third of a millisecond for 91 parameters.
        self._buffers = [(child, name) for child in module.modules() for name in child._buffers]
        self._clock = clock
        self._late: BucketSet | None = None  # launched, and not shown yet
        self._recorded: BucketSet | None = None
        self._used: bytearray | None = None  # of a static graph, once it is known
        self._reached: bytearray | None = None  # by the outputs of the forwards since the last backward
        self._searches_outputs = self._readiness.searches
        self._is_begun = self._is_open = False
        self._ending: weakref.ref[Any] | None = None  # what autograd calls at the end; None if `backward` does that
        self._is_syncing = self._is_stale = True
        self._failure: BaseException | None = None
        self._unused: list[str] = []
        self._handles: list[Any] = []
        self._began_s = self._last_s = self._ended_s = 0.0
        self._owns_ranks = not isinstance(process_group, Ranks)
        device = self._readiness.parameters[0].device
        self.ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group, device=device)
        try:
            self._build(tracer, timed=timed)
            self._begin_alike()
        except BaseException:
            self.close()
            raise

    def _build(self, tracer: Tracer | None, *, timed: bool) -> None:
        """Make the parts that know the ranks."""
        options, parameters, ranks = self._options, self._readiness.parameters, self.ranks
        device, scatter = parameters[0].device, options.scatters
        self._launcher = Launcher(ranks, device, self._clock, scatter=scatter, timed=timed)
        self._tracer = tracer or Tracer(self._clock, enabled=False)
        if tracer is None and device.type == "cuda":
            self._tracer.annotate = torch.cuda.nvtx.range
        self._queue = LaunchQueue(self._launcher, options.max_in_flight, self._tracer, self._start_used)
        self._places = Places(self._names, parameters, ranks.count, scatter=scatter, delayed=options.delayed)
        known = None if options.order is None else [self._names.index(name) for name in options.order]
        self._arrangement = Arrangement(options, known, parameters, ranks, self._launcher, self._places)

    def _begin_alike(self) -> None:
        """Check that all ranks have the same model, and give them rank 0's values; from here on gradients are seen."""
        module = self.module
        check_same(self.ranks, described(module) | self._options.lines())
        broadcast_flat(self.ranks, [*module.parameters(), *module.buffers()], "the broadcast of parameters")
        close_reducers_of(module)
        for index, parameter in enumerate(self._readiness.parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        enlist(self)

    # --- what a person calls ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; with rank 0's buffers."""
        self._check_usable()
        if torch.is_grad_enabled():
            self._readiness.refuse_newcomers()
        if self._options.broadcast_buffers and self._is_stale:
            self.sync_buffers()
        output = self.module(*args, **kwargs)
        # As DDP: buffers are those of rank 0 after a forward that is not part of an accumulation.
        self._is_stale = torch.is_grad_enabled() and self._is_syncing
        if self._is_stale:
            roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if self._searches_outputs:
                found = self._readiness.search(roots)
                self._reached = found if self._reached is None else bytearray(map(or_, found, self._reached))
            for root in roots:
                if not root.is_leaf:  # a parameter that is an output stays, and would collect hooks
                    root.register_hook(self._outputs_hook)  # type: ignore[no-untyped-call]
        return output

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`; afterwards the gradients are averaged, unless under `no_sync`.

        An error in here ends this reducer, because other ranks may have got further, unless autograd does not take the
        loss. (An error in `loss.backward()` also ends it, once a gradient has come.)

        Raises:
            RankLost: a rank died or stopped; this reducer can do no more.
            GraphError: backward did what the options exclude.
        """
        self._check_usable()
        if not isinstance(loss, torch.Tensor):
            raise ConfigError(f"a loss is a tensor that depends on the weights, not {type(loss).__name__}")
        is_sound = loss.requires_grad and (loss.numel() == 1 or kwargs.get("gradient") is not None)
        if self._is_syncing and is_sound:  # else autograd refuses it before anything begins
            self._readiness.refuse_newcomers()
            self._searches_outputs = False
            self._begin(self._readiness.search([loss]) if self._readiness.searches else None)
            self._ending = None
            self._open()
        try:
            loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            self._is_begun = False
            raise
        if self._is_open:
            self._finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here add to the gradients of this rank only."""
        self._check_usable()
        before, self._is_syncing = self._is_syncing, False
        try:
            yield
        finally:
            self._is_syncing = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce buckets with a hook of `torch.distributed.algorithms.ddp_comm_hooks`, or one like these.

        Args:
            hook: `hook(state, bucket)` gets a bucket that is not averaged, and returns a future of the averaged one.
        """
        if not callable(hook):
            raise ConfigError(f"a comm hook is called with a state and a bucket: {type(hook).__name__} cannot be")
        if self._options.scatters:
            raise ConfigError("a comm hook replaces the all-reduce: use reduce='all_reduce' with it")
        if self._launcher.hook is not None:
            raise ConfigError("there is a comm hook already")
        self._launcher.hook, self._launcher.hook_state = hook, state
        self._places.averages = False

    def sync_buffers(self) -> None:
        """Give all ranks rank 0's buffers."""
        # Looked up by name: a module may put another tensor in the place of a buffer.
        found = {id(b): b for child, name in self._buffers if (b := child._buffers[name]) is not None}
        buffers = list(found.values())
        if buffers:
            broadcast_flat(self.ranks, buffers, "the broadcast of buffers")

    def flush(self) -> None:
        """If delayed: wait for what is in flight, and put it into `.grad` now; the next backward then leaves None.

        Raises:
            GraphError: `.grad` holds what `no_sync` has gathered, which would be lost.
        """
        self._check_usable()
        if self._late is not None:
            self._places.refuse_to_lose()
        late, self._late = self._late, None
        if late is not None:
            self._show(late)

    def shards(self) -> list[torch.Tensor]:
        """With "reduce_scatter": this rank's part of every bucket, by bucket, valid until the next backward."""
        return [bucket.shard for bucket in self._places.shown.buckets if bucket.shard is not None]

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Whether it averages the gradient of this parameter."""
        return self._readiness.knows(parameter)

    def layout(self) -> list[list[str]]:
        """Names of the parameters of every bucket, in the order of launches."""
        return [[self._names[i] for i in bucket.members] for bucket in self._places.sets[0].buckets]

    @property
    def is_delayed(self) -> bool:
        """Whether a backward shows the gradients of the step before."""
        return self._options.delayed

    @property
    def extra_bytes(self) -> int:
        """Device memory that `delayed` takes beyond the gradients themselves."""
        return sum(buckets.nbytes for buckets in self._places.sets[1:])

    def unused(self) -> list[str]:
        """Parameters that no rank has used in the step whose gradients were delivered last."""
        return self._unused

    def last_step(self) -> StepRecord | None:
        """The last backward that was reduced, to be read before the next one; None before the first."""
        if self._recorded is None:
            return None
        order = tuple(self._names[i] for i in self._readiness.last_order())
        records = tuple(self._record(bucket) for bucket in self._recorded.buckets)
        return StepRecord(self._began_s, self._last_s, self._ended_s, order, records)

    def _record(self, bucket: Bucket) -> BucketRecord:
        names = tuple(self._names[i] for i in bucket.members)
        return BucketRecord(bucket.index, bucket.nbytes, names, *self._launcher.times(bucket))

    def close(self) -> None:
        """Take the hooks off the parameters. Twice is fine. Gradients stay."""
        if self._handles:
            self._launcher.let_go(bucket for buckets in self._places.sets for bucket in buckets.buckets)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        strike_off(self)
        if self._owns_ranks:
            self.ranks.close()

    def __enter__(self) -> GradientReducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one backward -------------------------------------------------------------------------------------------

    def _outputs_hook(self, _: torch.Tensor) -> None:
        # Refers to no tensor: the graph would hold itself.
        if self._is_syncing:
            self._follow(self._reached)

    def _follow(self, reached: bytearray | None) -> None:
        """Begin the backward that runs, unless it has begun."""
        if self._is_begun and (self._ending is None or self._ending() is not None):
            return
        self._begin(reached)
        # Only autograd holds `at_end`, and drops it when the backward fails, which nothing else would tell.
        at_end = functools.partial(self._finish_if_open)
        self._ending = weakref.ref(at_end)
        Variable._execution_engine.queue_callback(at_end)

    def _begin(self, reached: bytearray | None) -> None:
        """Count what is to come. No collective yet: this backward may turn out to reach no parameter."""
        self._check_usable()
        if self._is_open:
            raise GraphError(
                "a backward began before the one before it had ended, or after one that failed, in which ranks may "
                "have reduced different buckets; close this reducer on all of them, and make a new one"
            )
        self._readiness.begin(reached)
        self._is_begun = True
        self._began_s = self._clock()
        self._reached = None

    def _open(self) -> None:
        """The first gradient comes: from here on the ranks meet."""
        self._is_open = True
        self._arrangement.begin()
        self._launcher.begin()
        self._places.begin(self._readiness.reached)
        buckets = self._places.current.buckets
        self._queue.begin(buckets)
        for bucket in buckets:
            if not bucket.missing:
                self._mark_ready(bucket)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            self._came(index)

        return hook

    def _came(self, index: int) -> None:
        if not self._is_syncing:
            self._places.hold(index)
            return
        self._follow(None)
        if not self._is_open:
            self._open()
        self._last_s = self._clock()
        self._arrangement.came(index)
        if not self._readiness.came(index):
            return
        bucket = self._places.current.home[index]
        if bucket.is_ready:
            raise self._readiness.too_late(index)
        self._places.place(index)
        self._launcher.note_stream(bucket)
        if self._readiness.reached[index]:
            bucket.missing -= 1
            if not bucket.missing:
                self._mark_ready(bucket)
                self._advance()
                return
        if self._queue.is_deferred:
            self._advance()

    def _mark_ready(self, bucket: Bucket) -> None:
        self._places.fill(bucket)
        self._launcher.mark_ready(bucket)

    def _advance(self) -> None:
        try:
            self._queue.advance()
        except BaseException as error:
            self._failure = error
            raise

    def _finish_if_open(self) -> None:
        if self._is_open:
            self._finish()
        self._is_begun = False

    def _finish(self) -> None:
        """Backward is over: launch the rest, wait, and put the averages into `.grad`."""
        current = self._places.current
        try:
            if self._readiness.is_learning:
                for index in self._readiness.last_order():
                    self._places.place(index)
            for bucket in current.buckets:
                if not bucket.is_ready:
                    self._mark_ready(bucket)
            self._queue.launch_rest()
            late, self._late = self._late, current if self._options.delayed else None
            if not self._options.delayed:
                self._show(current)
            elif late is not None:
                self._show(late)
            else:
                self._places.clear()
        except BaseException as error:
            self._failure = error
            raise
        self._ended_s = self._clock()
        self._recorded = current
        self._is_begun = self._is_open = False
        if self._arrangement.is_learning:
            self._arrangement.learn(self._readiness.last_order())
        self._readiness.end()

    def _start_used(self) -> None:
        if self._options.find_unused and self._used is None:
            self._places.current.used = self._launcher.start_used(self._places.placed)

    def _show(self, buckets: BucketSet) -> None:
        """Wait for a set of buckets, then make `.grad` its views."""
        for bucket in buckets.buckets:
            self._launcher.wait(bucket)
        used = self._used
        if buckets.used is not None:
            is_learnt = self._readiness.is_static
            used = self._launcher.wait_used(buckets.used, is_read=bool(buckets.unfired) or is_learnt)
            buckets.used = None
            if is_learnt:
                self._used = used
        self._unused = self._places.show(buckets, used)
        self._trace(buckets)

    # --- records ------------------------------------------------------------------------------------------------

    def _trace(self, buckets: BucketSet) -> None:
        if not self._tracer.enabled:
            return
        for bucket in buckets.buckets:
            _, launched_s, done_s, _ = self._launcher.times(bucket)
            if not math.isnan(done_s):
                self._tracer.span("reduce", f"bucket {bucket.index}", launched_s, done_s, bytes=bucket.nbytes)

    def _check_usable(self) -> None:
        if not self._handles:
            raise ClosedError("the reducer was closed")
        if isinstance(self._failure, Exception):
            raise self._failure
        if self._failure is not None:
            broken_by = type(self._failure).__name__
            raise ClosedError(f"a step was broken off by {broken_by}: close this reducer, and make a new one on all")
