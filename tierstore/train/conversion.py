"""Which tensors of a checkpoint make which tensors of a model.

Scope: exact names, the base model's prefix, and the conversions that transformers makes on loading (fused experts and
the like), by its own tables and operations.
Not here: files (`checkpoint_files.py`).
Owner: none; pure, except that a converted `Recipe` calls transformers when it is cooked.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tierstore.errors import FormatError


@dataclass(slots=True)
class Recipe:
    """Stored tensors that together make tensors of the model.

    Attributes:
        targets: names in the model's state_dict.
        sources: names in the checkpoint, in the order of transformers' conversion.
        patterns: the pattern that each source matches, where there is a converter.
        converter: transformers' `WeightConverter`; None: the source is the target.
    """

    targets: list[str]
    sources: list[str]
    patterns: list[str] = field(default_factory=list)
    converter: Any = None

    def cook(self, model: nn.Module, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The converted tensors by name. Memory: all sources and all targets, once or twice.

        Raises:
            FormatError: the sources do not fit together.
        """
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.targets[0], source, pattern, lambda name=source: read(name))
        try:
            made = converter.convert(self.targets[0], model=model, config=model.config)
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            first = f"{self.sources[0]!r} and {len(self.sources) - 1} more"
            raise FormatError(f"cannot make {self.targets[0]!r} from {first}: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def recipes(model: nn.Module, stored: Iterable[str]) -> tuple[list[Recipe], list[str]]:
    """How to fill `model` from tensors of these names, and the names that the model has no use for.

    Source: `convert_and_load_state_dict_in_model` of transformers 5, names only.
    """
    state = model.state_dict(keep_vars=True)
    library = _library(model)
    prefix = getattr(model, "base_model_prefix", "")
    if library is None:
        direct = {name: _with_prefix(name, state, prefix) for name in stored}
        found = [Recipe([target], [name]) for name, target in direct.items() if target is not None]
        return found, [name for name, target in direct.items() if target is None]
    loading, transforms = library
    renamings = [item for item in transforms if isinstance(item, loading.WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, loading.WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    found, converted, unused = [], {}, []
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # already under the name that the library gives it
            target, pattern = name, None
        if target not in state:
            unused.append(name)
        elif pattern is None:
            found.append(Recipe([target], [name]))
        else:
            converter = by_pattern[pattern]
            if target not in converted:
                first, *_ = patterns = converter.target_patterns
                names = [target.replace(first, other) for other in patterns]
                converted[target] = Recipe(names, [], [], converter)
            converted[target].sources.append(name)
            converted[target].patterns.append(pattern)
    return [*found, *converted.values()], unused


def _with_prefix(name: str, state: Mapping[str, torch.Tensor], prefix: str) -> str | None:
    candidates = [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")] if prefix else [name]
    return next((candidate for candidate in candidates if candidate in state), None)


def _library(model: nn.Module) -> tuple[ModuleType, list[Any]] | None:
    """Transformers' loading module and its transforms for `model`, if `model` is one of transformers'."""
    transformers = sys.modules.get("transformers")  # a model of the library has imported it
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    from transformers import conversion_mapping, core_model_loading

    return core_model_loading, conversion_mapping.get_model_conversion_mapping(model)
