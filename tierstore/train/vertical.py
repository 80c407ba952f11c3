"""Forwards that go through a model side by side: all of them pass one group before any goes on to the next.

Scope: taking turns. Not here: what a group is (`groups.py`), who calls this (`micro_batches.py`).
Owner: the thread that trains; of its helper threads one at a time runs, and counts as the training side.

[Note: taking turns] A model cannot be cut from outside, but a thread can wait in the middle of it. So each forward has
a thread, which passes the turn on when it comes to another group, and goes on when all the others have come as far.
Autograd numbers the nodes that a thread makes, and visits the highest numbers first: so one backward over the sum of
the losses walks forwards of fresh threads side by side, too, without threads, on any device.

[Note: random numbers of turns] Each forward draws from a random state of its own, which is set with its turn. So a
checkpoint that saved the state before other forwards had their turns draws the same numbers when it recomputes.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class _GivenUp(Exception):
    """Ends a forward whose result nobody wants any more."""


class SideBySide(Generic[T]):
    """Runs jobs in threads that take turns.

    Args:
        jobs: each calls `meet` where it may have to wait.
    """

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self._jobs = jobs
        self._results: dict[int, T] = {}
        self._turns = [threading.Semaphore(index == 0) for index in range(len(jobs))]
        self._waiting = deque(range(1, len(jobs)))  # those whose turn comes, the next one first
        self._alive = set(range(len(jobs)))
        self._ended = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._is_given_up = False
        self._own = threading.local()

    def run(self) -> list[T]:
        """The results, in the order of the jobs.

        Raises:
            BaseException: the first error of a job, raised when all jobs have ended. An interrupt waits for that, too,
                unless it is the second one.
        """
        seeds = torch.randint(2**63 - 1, (len(self._jobs),), device="cpu").tolist()
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._body(index, seed),), daemon=True,
                name=f"tierstore-forward-{index}",
            )
            for index, seed in enumerate(seeds)
        ]  # fmt: skip
        random_state = _random_state()
        try:
            for thread in threads:
                thread.start()
            self._wait_for_all()
        except BaseException:  # an interrupt, or a thread could not be started
            self._is_given_up = True
            for index, thread in enumerate(threads):
                if thread.ident is None:
                    self._turns[index].acquire()
                    self._pass_on()
                    self._alive.discard(index)
            self._wait_for_all()
            raise
        finally:
            _set_random_state(random_state)
        failure, self._failure = self._failure, None
        if failure is not None:
            self._results.clear()
            try:
                raise failure
            finally:
                del failure  # it refers to this frame: no reference cycle may keep the forwards alive
        return [self._results[index] for index in range(len(self._jobs))]

    def meet(self, place: object) -> None:
        """Wait until all other jobs have gone past the place where this job was, or have ended."""
        if not hasattr(self._own, "index") or self._own.place == place:  # a thread of the model's own has no turns
            return
        self._own.place = place
        random_state = _random_state()
        self._waiting.append(self._own.index)
        self._pass_on()
        self._wait(self._own.index)
        _set_random_state(random_state)

    def _body(self, index: int, seed: int) -> Callable[[], None]:
        entered = _thread_state()

        def body() -> None:
            self._own.index, self._own.place = index, None
            try:
                self._wait(index)
                with entered():
                    _seed(seed)
                    self._results[index] = self._jobs[index]()
            except _GivenUp:
                pass
            except BaseException as error:
                self._failure, self._is_given_up = self._failure or error, True
            finally:
                self._pass_on()
                self._alive.discard(index)  # before the release: an interrupt may lose that, not this
                self._ended.release()

        return body

    def _wait_for_all(self) -> None:
        """Wait for all jobs. Not by `join`, which in Python 3.11 forgets a thread when it is interrupted."""
        while self._alive:
            self._ended.acquire()

    def _wait(self, index: int) -> None:
        self._turns[index].acquire()
        if self._is_given_up:
            raise _GivenUp

    def _pass_on(self) -> None:
        if self._waiting:
            self._turns[self._waiting.popleft()].release()


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def _random_state() -> tuple[torch.Tensor, torch.Tensor | None]:
    """The random state of the CPU and of the current CUDA device, as checkpoints keep it."""
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), torch.cuda.get_rng_state() if has_cuda else None


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def _thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Captures this thread's grad mode, autocast, default device and CUDA stream, to be entered in another thread.

    Other modes (`TorchFunctionMode`, `TorchDispatchMode`) are not carried over.
    """
    is_grad, default = torch.is_grad_enabled(), torch.get_default_device()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(is_grad))
            for kind, dtype, is_cached in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=is_cached))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if default != torch.device("cpu"):  # a mode slows every call
                stack.enter_context(default)
            yield

    return entered
