"""What a step does, as the engine saw it: visits, their seconds, gradients; and its JSON form.

Scope: plain data. Not here: recording it (`train/recording.py`), the step on paper (`plan/step_model.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tierstore.errors import ConfigError, FormatError
from tierstore.plan.placement import GroupNeed

_VERSION = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step without updates beside it, in which nothing waited.

    Attributes:
        forward, backward: groups in the order of their visits, with the seconds of each.
        completed: groups in the order in which backward completed their gradients.
        between_s: from the end of backward to the next forward: deciding the step, data, what the loop itself does.
    """

    groups: tuple[GroupNeed, ...]
    forward: tuple[tuple[int, float], ...]
    backward: tuple[tuple[int, float], ...]
    completed: tuple[int, ...]
    between_s: float = 0.0

    def __post_init__(self) -> None:
        visited = [group for group, _ in (*self.forward, *self.backward)]
        if not self.forward or not all(0 <= group < len(self.groups) for group in (*visited, *self.completed)):
            raise ConfigError(f"a recorded step visits at least one of its {len(self.groups)} groups, and no other")
        if min(self.between_s, *(seconds for _, seconds in (*self.forward, *self.backward))) < 0:
            raise ConfigError("no time of a recorded step is negative")

    @property
    def compute_s(self) -> float:
        """Of the whole step."""
        return self.forward_s + self.backward_s + self.between_s

    @property
    def forward_s(self) -> float:
        return sum(seconds for _, seconds in self.forward)

    @property
    def backward_s(self) -> float:
        return sum(seconds for _, seconds in self.backward)

    def scaled(self, compute: float) -> StepRecord:
        """A step that computes so many times as long: with so many times the batch."""
        forward, backward = (
            tuple((group, compute * seconds) for group, seconds in visits) for visits in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)

    @classmethod
    def typical(cls, records: Sequence[StepRecord]) -> StepRecord:
        """The medians of several steps that went the same way; of others only the last one."""
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
            FormatError: it is none.
        """
        try:
            if value["version"] != _VERSION:
                raise FormatError(f"a recorded step of version {value['version']} cannot be read; record it again")
            visits = {
                name: tuple((int(group), float(seconds)) for group, seconds in value[name])
                for name in ("forward", "backward")
            }
            groups = tuple(GroupNeed(**need) for need in value["groups"])
            return cls(groups, visits["forward"], visits["backward"], tuple(value["completed"]), value["between_s"])
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise FormatError(f"not a recorded step: {type(error).__name__}: {error}") from None
