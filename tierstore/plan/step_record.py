"""What a step does, as the engine saw it: visits, their seconds, gradients; and its JSON form.

Scope: plain data. Not here: recording it (`Engine.record`), the step on paper (`plan/step_model.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tierstore.errors import ConfigError, FormatError
from tierstore.plan.placement import GroupNeed

_VERSION = 1
_MOST_SECONDS = 10**9  # of one visit: decades
_MOST_BYTES = 2**62
_MOST_SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step without updates beside it, in which nothing waited.

    Attributes:
        forward, backward: groups in the order of their visits, with the seconds of each.
        completed: groups in the order in which backward completed their gradients.
        between_s: from the end of backward to the next forward: deciding the step, data, what the loop itself does.
        contention: how many times as much the rest slows this computing as it slows matrix products. See
            `plan/tuning.calibrated`.
        drag: how many times as long reads and writes take within steps as the measured rates say, judged by how long
            the steps took: the threads of the disks wait for cores and for the interpreter, which both train.
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
        if not all(0 <= seconds < math.inf for seconds in times_s):
            raise ConfigError("the times of a recorded step are seconds, finite and not negative")
        if not 0 < self.drag < math.inf:
            raise ConfigError(f"reads and writes take so many times as long, finite and above 0, not {self.drag}")

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

    def check_gradients(self) -> None:
        """Every group that is trained completed its gradients once: an update waits for them.

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
                name: tuple((_index(group), _seconds(seconds)) for group, seconds in value[name])
                for name in ("forward", "backward")
            }
            groups = tuple(GroupNeed(**need) for need in value["groups"])
            completed = tuple(_index(group) for group in value["completed"])
            contention, drag = (_seconds(value.get(name, 1.0)) for name in ("contention", "drag"))
            between_s = _seconds(value["between_s"])
            size = value.get("acquired_bytes")
            acquired_bytes = None if size is None else _bytes(size)
            record = cls(
                groups, visits["forward"], visits["backward"], completed, between_s, contention, drag, acquired_bytes
            )
            record.check_gradients()
        except FormatError:
            raise
        except KeyError as error:
            raise FormatError(f"not a recorded step: it has no {error}") from None
        except (ValueError, TypeError, ConfigError) as error:
            raise FormatError(f"not a recorded step: {error}") from None
        return record


def _index(value: Any) -> int:
    if type(value) is not int:
        raise FormatError(f"not a recorded step: a group is given by its number, not {_shown(value)}")
    return value


def _bytes(value: Any) -> int:
    if type(value) is not int or not 0 < value < _MOST_BYTES:
        raise FormatError(f"not a recorded step: a size is a number of bytes, 1 to 2^62, not {_shown(value)}")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _MOST_SECONDS:
        raise FormatError(f"not a recorded step: a time is a number of seconds, 0 to 10^9, not {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    is_long = type(value) is int and value.bit_length() > 64  # which Python refuses to print
    text = f"an integer of {value.bit_length()} bits" if is_long else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
