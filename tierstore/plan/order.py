"""The order in which a model uses its tensors, from their names and its configuration; and sharing groups out to files.

Scope: names -> groups in execution order; groups -> files of about equal bytes.
Not here: bytes, dtypes and files (`archive/`); the groups of a live model, which hooks observe (`train/groups.py`).

[Note: order] Blocks are the modules of a list, each with its number in the name: `model.layers.17.`. A configuration
says how many there are, which tells that list from one inside a block (experts, adapters); without a configuration the
outermost number counts. Tensors outside the blocks are placed by words: embeddings come before the blocks, a norm after
them, a head last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                 "num_decoder_layers", "num_encoder_layers", "depth")  # fmt: skip
# Parts of a model that run one after the other, each a regular expression for one component of a name.
_TOWERS = (r"vision\w*|visual\w*|image\w*|audio\w*", r"encoder|text_encoder", r"\w*(projector|connector)|aligner",
           r"decoder|language_model|text_model")  # fmt: skip
_HEAD = re.compile(r"lm_head|head|heads|output|classifier|score|cls|pooler|embed_out|qa_outputs|proj_out|\w+_head")
_NORM = re.compile(r"ln_f|norm|\w*_norm|\w*layernorm|layer_norm|norm_f")
_EMBEDDING = re.compile(r"wte|wpe|shared|\w*(embed|embd|rotary|position)\w*|rope\w*|conv\d?|conv_in|cls_token")
_STAGES = ("embeddings", "block", "rest", "norm", "head")
_EMBEDDINGS, _BLOCK, _REST, _NORMS, _HEADS = range(len(_STAGES))


@dataclass(frozen=True, slots=True)
class OrderedGroup:
    """Tensors that are used together."""

    name: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Groups in the order of a forward pass.

    Attributes:
        reason: where the order comes from, in words.
    """

    groups: tuple[OrderedGroup, ...]
    reason: str


def execution_order(names: Iterable[str], config: Mapping[str, Any] | None = None) -> Order:
    """Groups of `names`: embeddings, blocks 0 to n, everything else, norms, heads; see [Note: order].

    Args:
        config: the configuration of Hugging Face; None: names alone decide.
    """
    known = list(names)
    counts = set(_layer_counts(config or {}))
    prefixes = _block_prefixes(known, counts)
    by_group: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    titles: dict[tuple[Any, ...], str] = {}
    for name in sorted(known, key=natural_key):
        block = _block(name, prefixes)
        key, title = _place(name, block)
        by_group[key].append(name)
        titles[key] = title
    groups = tuple(OrderedGroup(titles[key], tuple(by_group[key])) for key in sorted(by_group))
    return Order(_with_unique_names(groups), _reason(config, counts, prefixes))


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts `h.2` before `h.10`."""
    return tuple((0, int(part)) if _is_number(part) else (1, part) for part in re.split(r"(?a:(\d+))", name) if part)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) < 20


def share_out(sizes: Sequence[int], places: int, files: int) -> list[list[int]]:
    """Which groups each file holds, in order; file `i` stands at place `i % places`.

    Each group goes to the place that has the fewest bytes so far, so consecutive groups of similar size lie on
    different disks, and reading a long stretch keeps all disks busy. The groups of a place are divided into its files.

    Args:
        sizes: bytes of each group, in execution order.
    """
    dealt: list[list[int]] = [[] for _ in range(places)]
    total = [0] * places
    for index, size in enumerate(sizes):
        place = total.index(min(total))
        dealt[place].append(index)
        total[place] += size
    result: list[list[int]] = [[] for _ in range(files)]
    for place, groups in enumerate(dealt):
        mine = range(place, files, places)
        for part, run in zip(mine, _runs([sizes[index] for index in groups], len(mine))):
            result[part] = [groups[position] for position in run]
    return result


def _runs(sizes: Sequence[int], count: int) -> Iterator[range]:
    """`count` consecutive runs of about equal bytes; the last ones are empty if there are too few sizes."""
    start, left = 0, sum(sizes)
    for runs_left in range(count, 0, -1):
        stop, target, taken = start, left / runs_left, 0
        # Takes one more while that comes closer to the share, and leaves at least one for each run that follows.
        while stop < len(sizes) and (
            runs_left == 1 or stop == start or (taken + sizes[stop] / 2 <= target and len(sizes) - stop >= runs_left)
        ):
            taken += sizes[stop]
            stop += 1
        yield range(start, stop)
        start, left = stop, left - taken


def _layer_counts(config: Mapping[str, Any], depth: int = 0) -> Iterator[int]:
    """Numbers of layers in a configuration and in those inside it (`text_config`)."""
    for key, value in config.items():
        if key in _LAYER_COUNTS and type(value) is int and value > 0:
            yield value
        elif isinstance(value, Mapping) and depth < 2:
            yield from _layer_counts(value, depth + 1)


def _block_prefixes(names: Sequence[str], counts: set[int]) -> set[tuple[str, ...]]:
    """The parts of names before the number of a block; empty: the configuration does not fit these names."""
    indices: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for name in names:
        parts = name.split(".")
        for position, part in enumerate(parts[:-1]):
            if _is_number(part):
                indices[tuple(parts[:position])].add(int(part))
    return {prefix for prefix, found in indices.items() if len(found) in counts and max(found) == len(found) - 1}


def _block(name: str, prefixes: set[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The name up to the number of its block; None if it is in no block."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts[:-1]) if _is_number(part)]
    known = [i for i in numbers if tuple(parts[:i]) in prefixes]
    if known or (numbers and not any(_HEAD.fullmatch(part) for part in parts[: numbers[0]])):
        return tuple(parts[: (known or numbers)[0] + 1])
    return None


def _place(name: str, block: tuple[str, ...] | None) -> tuple[tuple[Any, ...], str]:
    """The sort key of a tensor's group, and the name of the group."""
    parts = block[:-1] if block else name.split(".")[:-1] or name.split(".")
    towers = [(tower, at) for at, part in enumerate(parts) for tower, word in enumerate(_TOWERS)
              if re.fullmatch(word, part)]  # fmt: skip
    stage = _BLOCK if block else _stage(parts)
    if towers:
        tower, at = towers[0]
        where = ".".join(parts[: at + 1]) + "."
    else:
        # In no such part: embeddings come before all of them, the rest after.
        tower, where = (-1 if stage == _EMBEDDINGS else len(_TOWERS)), ""
    if stage == _HEADS and not block:
        tower = len(_TOWERS)
    if block:
        return (tower, stage, natural_key(".".join(block))), ".".join(block)
    return (tower, stage, ()), where + _STAGES[stage]


def _stage(parts: Sequence[str]) -> int:
    for pattern, stage in ((_HEAD, _HEADS), (_EMBEDDING, _EMBEDDINGS), (_NORM, _NORMS)):
        if any(pattern.fullmatch(part) for part in parts):
            return stage
    return _REST


def _with_unique_names(groups: Sequence[OrderedGroup]) -> tuple[OrderedGroup, ...]:
    seen: dict[str, int] = defaultdict(int)
    result = []
    for group in groups:
        seen[group.name] += 1
        name = group.name if seen[group.name] == 1 else f"{group.name} ({seen[group.name]})"
        result.append(OrderedGroup(name, group.tensors))
    return tuple(result)


def _reason(config: Mapping[str, Any] | None, counts: set[int], prefixes: set[tuple[str, ...]]) -> str:
    if config is None:
        return "from the names of the tensors: there is no config.json"
    if not config:
        return "from the names of the tensors: config.json says nothing, or is not valid JSON"
    kind = config.get("model_type")
    if not prefixes:
        return f"from the names of the tensors: config.json ({kind}) gives no number of layers that fits them"
    return f"from config.json: {kind}, {' and '.join(map(str, sorted(counts)))} layers"
