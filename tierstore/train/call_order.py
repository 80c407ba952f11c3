"""In which order an engine may be called.

Scope: how far the step in progress has come, and the sentences that refuse a call which would harm it.
Not here: what the calls do (`engine.py`).
Owner: the training side.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from tierstore.errors import ClosedError, ConfigError
from tierstore.train.rounds import RoundDriver


class CallOrder:
    """The calls of one engine.

    Args:
        can_resume: a generation on disk has the step before whole.

    Attributes:
        is_syncing: the next backward is the last one of its step (not in `no_sync`).
        has_backward, has_final_backward: the step in progress has had one, and the last one.
        is_broken: a step was left half done.
    """

    def __init__(self, driver: RoundDriver, *, can_resume: bool) -> None:
        self._driver = driver
        self._can_resume = can_resume
        self._broken_by: BaseException | None = None
        self._keeps_weights = True
        self.is_syncing = True
        self.has_backward = self.has_final_backward = False

    @property
    def is_broken(self) -> bool:
        return self._broken_by is not None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are not the last of their step."""
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    @contextlib.contextmanager
    def unbroken(self, *, keeps_weights: bool = False) -> Iterator[None]:
        """What is broken off in here leaves half a step behind: the engine goes no further.

        Args:
            keeps_weights: they are all of one step, and may be read.
        """
        try:
            yield
        except BaseException as error:
            self.break_off(error, keeps_weights=keeps_weights)
            raise

    def break_off(self, error: BaseException, *, keeps_weights: bool) -> None:
        """As `unbroken`, of an error that is on its way already."""
        self._broken_by = error
        self._keeps_weights &= keeps_weights

    def refuse_broken(self) -> None:
        """No step can be finished after one that was broken off.

        Raises:
            ClosedError: there was one.
        """
        if self._broken_by is not None:
            raise ClosedError(
                f"a step was broken off by {type(self._broken_by).__name__} and cannot be finished; "
                "close the engine, and make another one that resumes the store"
            ) from self._broken_by

    def refuse_within_step(self, what: str) -> None:
        """Weights are not to be changed while a step uses them.

        Raises:
            ConfigError: one has begun.
        """
        if self._driver.has_begun:
            raise ConfigError(f"{what} would change weights in the middle of a step; call it after step()")

    def refuse_after_backward(self, what: str) -> None:
        """Weights are not to be read while updates change them.

        Raises:
            ConfigError: they do since the last backward.
            ClosedError: a step that was broken off has changed some of them. Where they are all that is left, it is
                a warning.
        """
        if not self._keeps_weights and self._can_resume:
            self.refuse_broken()
        if not self._keeps_weights:
            cause = type(self._broken_by).__name__
            warnings.warn(
                f"{what} after a step that was broken off by {cause}: some weights are those of this step, others "
                "those of the step before",
                stacklevel=3,
            )
        if self.has_final_backward and self._driver.updates_in_backward:
            raise ConfigError(
                f"{what} between engine.backward() and step() would meet weights that "
                f"update={self._driver.schedule.value!r} (given, or what 'auto' chose) is changing meanwhile; call it "
                "after step(), put earlier backwards under no_sync(), or make the engine with update='forward'"
            )
