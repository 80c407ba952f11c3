"""Groups and their chunk grid, as the store sees them: names, dtypes and sizes, no modules.

Scope: plain data that describes the packs of a training store, and the fingerprint that a manifest keeps.
Not here: where the bytes are placed (`plan/tiers.py`) and which parameters form a group (`train/groups.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierstore.errors import ConfigError
from tierstore.kernels.adam import state_bytes_per_element
from tierstore.pack.layout import ChunkSpec
from tierstore.plan.tiers import GroupNeed, Kind, Placement

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_PACK_DTYPE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_STATE_SECTIONS = {
    "fp32": (("exp_avg", "F32"), ("exp_avg_sq", "F32")),
    "bf16": (("exp_avg", "F32"), ("exp_avg_sq", "F32"), ("residual", "I16")),
    "fp16": (("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32")),
}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter and its elements `[start, start + numel)` in the flat group."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Parameters of one dtype that move together, flat and back to back."""

    name: str
    dtype: str
    trainable: bool
    parameters: tuple[ParameterSpec, ...]

    @property
    def elements(self) -> int:
        return self.parameters[-1].stop

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.elements * self.item_bytes

    def need(self) -> GroupNeed:
        """The group as the planner sees it."""
        state = state_bytes_per_element(self.dtype) if self.trainable else 0
        return GroupNeed(self.name, self.elements, self.item_bytes, state, self.trainable)


class ChunkIndex:
    """Flat indices of the chunks of one kind: those of group 0, then of group 1, ..."""

    def __init__(self, placement: Placement) -> None:
        self._base = [0]
        for group in range(len(placement.groups)):
            self._base.append(self._base[-1] + placement.chunk_count(group))

    def __call__(self, group: int, chunk: int) -> int:
        return self._base[group] + chunk

    def all(self) -> Iterator[tuple[int, int]]:
        """Every (group, chunk), in the order of the indices."""
        for group, (start, stop) in enumerate(zip(self._base, self._base[1:])):
            for chunk in range(stop - start):
                yield group, chunk


def chunk_specs(kind: Kind, groups: Sequence[GroupSpec], placement: Placement) -> list[ChunkSpec]:
    """The chunks of one kind as tensors of a pack, group by group; the state of a frozen group is one byte a chunk."""
    return [
        _chunk_spec(kind, groups[group], chunk, *placement.chunk(group, chunk))
        for group, chunk in ChunkIndex(placement).all()
    ]


def _chunk_spec(kind: Kind, group: GroupSpec, chunk: int, start: int, stop: int) -> ChunkSpec:
    name = f"{group.name}/{kind.value}/{chunk}"
    if kind is not Kind.STATE:
        return ChunkSpec(name, (("flat", _PACK_DTYPE[group.dtype], stop - start),))
    sections = _STATE_SECTIONS[group.dtype] if group.trainable else (("frozen", "U8"),)
    elements = stop - start if group.trainable else 1
    return ChunkSpec(name, tuple((section, dtype, elements) for section, dtype in sections))


def fingerprint(groups: Sequence[GroupSpec], chunk_elements: int, directories: int, codec: str) -> dict[str, Any]:
    """What must be equal for a store to open."""
    return {
        "chunk_elements": chunk_elements,
        "directories": directories,
        "codec": codec,
        "groups": [
            {
                "name": group.name,
                "dtype": group.dtype,
                "trainable": group.trainable,
                "parameters": [[p.name, list(p.shape)] for p in group.parameters],
            }
            for group in groups
        ],
    }


def check_same_model(stored: Any, groups: Sequence[GroupSpec], directory: object) -> None:
    """Refuse a store of another model with the first difference.

    Raises:
        ConfigError: nothing was changed.
    """

    def flat(description: Any) -> dict[str, str]:
        return {
            name: f"{group['dtype']} {tuple(shape)}{'' if group['trainable'] else ' frozen'} in group {group['name']}"
            for group in description
            for name, shape in group["parameters"]
        }

    theirs, ours = flat(stored["groups"]), flat(fingerprint(groups, 0, 0, "")["groups"])
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"{directory} is the store of another model: parameter {name} is "
                f"{theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here"
            )
    # Elements are found by their place in a group, and a group by its number.
    for name, other in zip(theirs, ours):
        if name != other:
            raise ConfigError(
                f"parameters are registered in another order: {name} before {other} in {directory}, after it here; "
                "build the model as it was built then"
            )
