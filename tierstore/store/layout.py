"""Groups and their chunk grid, as the store sees them: names, dtypes and sizes, no modules.

Scope: plain data that describes the packs of a training store, and the fingerprint that a manifest keeps.
Not here: where the bytes are placed (`plan/tiers.py`) and which parameters form a group (`train/groups.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierstore.config import Codec
from tierstore.errors import ConfigError
from tierstore.kernels.adam import STATE_SECTIONS, state_bytes_per_element
from tierstore.pack.layout import ChunkSpec
from tierstore.plan.codec_choice import CodecChoice
from tierstore.plan.placement import GroupNeed, Kind, Placement

Codecs = Mapping[Kind, CodecChoice]
"""The codec of each kind of chunks."""
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_PACK_DTYPE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter and its elements `[start, start + numel)` in the flat group."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Parameters of one dtype that move together, flat and back to back.

    Attributes:
        first: the first element that this rank keeps, at the start of a chunk; see [Note: shards].
        kept: how many elements this rank keeps; None is all.
        padding: elements on the device behind the last parameter, so that all ranks have equal parts.
    """

    name: str
    dtype: str
    trainable: bool
    parameters: tuple[ParameterSpec, ...]
    first: int = 0
    kept: int | None = None
    padding: int = 0

    @property
    def size(self) -> int:
        """Elements of the whole group."""
        return self.parameters[-1].stop

    @property
    def elements(self) -> int:
        """Elements that are kept here."""
        return self.size if self.kept is None else self.kept

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def device_elements(self) -> int:
        """Elements on the device while the group is there: all, and the padding."""
        return self.size + self.padding

    @property
    def device_bytes(self) -> int:
        return self.device_elements * self.item_bytes

    def need(self) -> GroupNeed:
        """The group as the planner sees it."""
        state = state_bytes_per_element(self.dtype) if self.trainable else 0
        whole_bytes = None if self.kept is None else self.device_bytes
        return GroupNeed(self.name, self.elements, self.item_bytes, state, self.trainable, whole_bytes)

    def kept_part(self, start: int, stop: int) -> tuple[int, int]:
        """The part of elements `[start, stop)` that is kept here, counted from `first`; empty if its stop <= start."""
        return max(start - self.first, 0), min(stop - self.first, self.elements)


def shard(spec: GroupSpec, rank: int, ranks: int, chunk_elements: int) -> GroupSpec:
    """The part of a group that `rank` of `ranks` keeps: equally many whole chunks each, fewer for the last ranks.

    [Note: shards] Ranks own whole chunks of one grid, which does not depend on the number of ranks. So the files of a
    store do not depend on it either: a store that N ranks wrote opens on M ranks, and none of its bytes moves.
    """
    part = -(-spec.size // (ranks * chunk_elements)) * chunk_elements
    first = min(rank * part, spec.size)
    return replace(spec, first=first, kept=min(part, spec.size - first), padding=ranks * part - spec.size)


class ChunkIndex:
    """Flat indices of the chunks of one kind in their pack: those of group 0, then of group 1, ..."""

    def __init__(self, groups: Sequence[GroupSpec], placement: Placement) -> None:
        self._placement = placement
        self._base = []
        count = 0
        for group in groups:
            self._base.append(count + group.first // placement.chunk_elements)
            count += -(-group.size // placement.chunk_elements)

    def __call__(self, group: int, chunk: int) -> int:
        return self._base[group] + chunk

    def all(self) -> Iterator[tuple[int, int]]:
        """Every (group, chunk) that is kept here, in the order of the indices."""
        for group in range(len(self._base)):
            for chunk in range(self._placement.chunk_count(group)):
                yield group, chunk


def chunk_specs(kind: Kind, groups: Sequence[GroupSpec], chunk_elements: int) -> list[ChunkSpec]:
    """The chunks of one kind, of all ranks, as tensors of a pack, by group; a chunk of frozen state is one byte."""
    return [
        _chunk_spec(kind, group, chunk, start, min(start + chunk_elements, group.size))
        for group in groups
        for chunk, start in enumerate(range(0, group.size, chunk_elements))
    ]


def _chunk_spec(kind: Kind, group: GroupSpec, chunk: int, start: int, stop: int) -> ChunkSpec:
    name = f"{group.name}/{kind.value}/{chunk}"
    tensors = tuple(one.name for one in group.parameters if one.start < stop and start < one.stop)
    if kind is not Kind.STATE:
        return ChunkSpec(name, (("flat", _PACK_DTYPE[group.dtype], stop - start),), tensors)
    sections = STATE_SECTIONS[group.dtype] if group.trainable else (("frozen", "U8"),)
    elements = stop - start if group.trainable else 1
    return ChunkSpec(name, tuple((section, dtype, elements) for section, dtype in sections), tensors)


def fingerprint(
    groups: Sequence[GroupSpec], chunk_elements: int, directories: int, codec: str, codecs: Codecs | None = None
) -> dict[str, Any]:
    """What must be equal for a store to open, and what was decided when it was made.

    Args:
        codec: as asked for; if that is "auto", `codecs` says which codec was chosen for each kind.
    """
    decided = codecs if codec == Codec.AUTO.value and codecs is not None else {}
    return {
        "codecs": {kind.value: [choice.codec.value, choice.why] for kind, choice in decided.items()},
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


def recorded_codecs(layout: Mapping[str, Any]) -> Codecs:
    """The codec of each kind in a store with this fingerprint."""
    decided = layout.get("codecs", {})
    asked = [layout["codec"], "as asked for"]
    rows = {kind: decided.get(kind.value, asked) for kind in Kind}
    return {kind: CodecChoice(Codec(name), why) for kind, (name, why) in rows.items()}


def recorded_groups(layout: Mapping[str, Any]) -> list[GroupSpec]:
    """The groups of a store with this fingerprint; none if it holds named tensors."""
    return [_recorded_group(row) for row in layout["groups"]]


def _recorded_group(row: Mapping[str, Any]) -> GroupSpec:
    parameters, start = [], 0
    for name, shape in row["parameters"]:
        parameters.append(ParameterSpec(name, tuple(shape), start))
        start += math.prod(shape)
    return GroupSpec(row["name"], row["dtype"], row["trainable"], tuple(parameters))


def check_same_model(stored: Mapping[str, Any], groups: Sequence[GroupSpec], claim: str) -> None:
    """Refuse another model, naming the first difference.

    Args:
        stored: the fingerprint to compare with.
        claim: how the message begins.

    Raises:
        ConfigError: nothing was changed.
    """

    def flat(groups: Sequence[GroupSpec]) -> dict[str, str]:
        return {
            p.name: f"{group.dtype} {p.shape}{'' if group.trainable else ' frozen'} in group {group.name}"
            for group in groups
            for p in group.parameters
        }

    theirs, ours = flat(recorded_groups(stored)), flat(groups)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"{claim}: parameter {name} is {theirs.get(name, 'missing')} there and {ours.get(name, 'missing')} here"
            )
    # Elements are found by their place in a group, and a group by its number.
    for name, other in zip(theirs, ours):
        if name != other:
            raise ConfigError(
                f"{claim}: its parameters are registered in another order, {name} before {other}, which is after it "
                "here; build the model in the same way"
            )


def check_same_frozen(stored: Mapping[str, Any], groups: Sequence[GroupSpec], where: str) -> None:
    """Refuse to train a parameter that the store has as frozen, or the reverse: groups and files would differ.

    Args:
        stored: the fingerprint of the store.
        where: the directory of the store.

    Raises:
        ConfigError: nothing was changed.
    """
    theirs = {(p.name, p.shape): group.trainable for group in recorded_groups(stored) for p in group.parameters}
    ours = {(p.name, p.shape): group.trainable for group in groups for p in group.parameters}
    others = [(key[0], is_trained) for key, is_trained in ours.items() if theirs.get(key) != is_trained]
    if theirs.keys() != ours.keys() or not others:
        return  # another model, or no difference
    name, is_trained_here = others[0]
    alike = sum(is_trained == is_trained_here for _, is_trained in others)
    name += f" (and {alike - 1} more)" if alike > 1 else ""
    if is_trained_here:
        raise ConfigError(
            f"{where}: parameter {name} was frozen when this store was made, and has no moments there; to train it "
            "now, resume with it frozen, write the weights by engine.export(), and begin a store in another directory "
            "with them"
        )
    raise ConfigError(
        f"{where}: parameter {name} was trained in this store, and is frozen here; make the engine while it needs a "
        "gradient, and call requires_grad_(False) after that"
    )
