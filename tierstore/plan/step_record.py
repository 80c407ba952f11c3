"""A step as the engine saw it: visits, their seconds, gradients; and its JSON form.

Scope: plain data. Not here: recording it (`Engine.record`), the step on paper (`plan/step_model.py`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tierstore.errors import ConfigError, FormatError
from tierstore.plan.bandwidth import first_wrong
from tierstore.plan.placement import GroupNeed

_VERSION = 1
_MOST_SECONDS = 10**9  # of one visit: decades
_MOST_BYTES = 2**62
_ALWAYS_THERE = ("version", "groups", "forward", "backward", "completed", "between_s")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step without updates beside it, in which nothing waited.

    Attributes:
        forward, backward: groups in the order of their visits, with the seconds of each.
        completed: groups in the order in which backward completed their gradients.
        between_s: from the end of backward to the next forward: deciding the step, data, what the loop itself does.
        contention: how many times as much other activities slow this computing as they slow matrix products. See
            `plan/tuning.calibrated`.
        drag: how many times as long reads and writes take within steps as the measured rates say, judged by how long
            the steps took: the I/O threads wait for cores and for the interpreter, which training uses, too.
        acquired_bytes: of weights that are on the device together, at least; see `plan.placement.Request`.
    """

    groups: tuple[GroupNeed, ...]
    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    completed: tuple[int, ...]
    between_s: float = 0.0
    contention: float = 1.0
    drag: float = 1.0
    acquired_bytes: int | None = None

    def __post_init__(self) -> None:
        visited = [group for group, _ in (*self.forward, *self.backward)]
        if not self.forward or not all(0 <= group < len(self.groups) for group in (*visited, *self.completed)):
            raise ConfigError(f"a recorded step visits at least one of its {len(self.groups)} groups, and no other")
        times_s = (self.between_s, self.contention, *(seconds for _, seconds in (*self.forward, *self.backward)))
        if not all(0 <= seconds < _MOST_SECONDS for seconds in times_s):  # False for nan
            raise ConfigError("the times of a recorded step are seconds, finite and from 0 to 10^9")
        if not 0 < self.drag < _MOST_SECONDS:
            raise ConfigError(f"drag must be finite and above 0, not {self.drag}")
        if self.acquired_bytes is not None and not 0 < self.acquired_bytes < _MOST_BYTES:
            raise ConfigError(f"acquired_bytes must be 1 to 2^62, not {self.acquired_bytes}")

    @property
    def compute_s(self) -> float:
        """Computing of the whole step, `between_s` included."""
        return self.forward_s + self.backward_s + self.between_s

    @property
    def forward_s(self) -> float:
        return sum(seconds for _, seconds in self.forward)

    @property
    def backward_s(self) -> float:
        return sum(seconds for _, seconds in self.backward)

    def check_gradients(self) -> None:
        """Checks that every trained group completed its gradients once, because its update waits for them.

        Raises:
            ConfigError: names the first group that did not.
        """
        trained = {index for index, need in enumerate(self.groups) if need.trainable}
        for index in sorted(trained - {*self.completed}):
            name = self.groups[index].name
            raise ConfigError(f"backward completed no gradients of group {index} ({name!r}), which is trained")
        if len(self.completed) > len(trained):
            raise ConfigError(f"backward completed {len(self.completed)} gradients of {len(trained)} trained groups")

    def scaled(self, compute: float) -> StepRecord:
        """The step with `compute` times the computing, as with so many times the batch."""
        forward, backward = (
            tuple((group, compute * seconds) for group, seconds in visits) for visits in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    @classmethod
    def typical(cls, records: Sequence[StepRecord]) -> StepRecord:
        """The last record, with median times over all records that made the same visits."""
        last = records[-1]
        ways = [[group for group, _ in (*one.forward, *one.backward)] for one in records]
        same = [one for one, way in zip(records, ways) if way == ways[-1]]
        forward, backward = (
            tuple(
                (visits[0][0], statistics.median(seconds for _, seconds in visits))
                for visits in zip(*(getattr(one, name) for one in same))
            )
            for name in ("forward", "backward")
        )
        between_s = statistics.median(one.between_s for one in same)
        return replace(last, forward=forward, backward=backward, between_s=between_s)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {"version": _VERSION} | asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepRecord:
        """The record of `to_json`.

        Raises:
            FormatError: the value is no such record.
        """
        if missing := [name for name in _ALWAYS_THERE if name not in value]:
            raise FormatError(f"not a recorded step: it has no {missing[0]!r}")
        if value["version"] != _VERSION:
            raise FormatError(f"a recorded step of version {value['version']} cannot be read; record it again")
        try:  # as text: accepts only what JSON can hold
            record = _ADAPTER.validate_json(json.dumps(value), strict=True)
            record.check_gradients()
        except ValidationError as error:
            raise FormatError(f"not a recorded step: {first_wrong(error)}") from None
        except (ConfigError, TypeError, ValueError) as error:
            raise FormatError(f"not a recorded step: {error}") from None
        return record


_ADAPTER = TypeAdapter(StepRecord)
