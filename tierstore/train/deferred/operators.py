"""What the recorder must know of one torch operator, and of one call of it.

Scope: reading an operator's schema and tags; the few names whose meaning the schema does not tell.
Not here: what is done with a call (`recording.py`).
Owner: none; traits are immutable and computed once per operator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.train.deferred.program import SELF, tensors_of

_aten = torch.ops.aten

_CREATES = {form.format(stem) for stem in ("empty", "empty_strided", "zeros", "ones", "full")
            for form in ("{}", "{}_like", "new_{}")}  # fmt: skip
_REDRAWS = {name: draw for stem, draw in (("randn", _aten.normal_.default), ("rand", _aten.uniform_.default))
            for name in (stem, f"{stem}_like")}  # fmt: skip
_FILLS = {"fill_", "zero_"}
_COPIES = {"clone", "_to_copy"}
_ROUNDED_ONCE = {"add", "sub", "mul", "div", "neg", "abs", "clamp", "clamp_min", "clamp_max"}
_EXACT = {*_ROUNDED_ONCE, *(f"{name}_" for name in _ROUNDED_ONCE), *_FILLS, *_COPIES, "copy_"}
_MOVES = {"set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_", "swapdims_"}
_RESIZES = {"resize_", "resize_as_"}


@dataclass(frozen=True, slots=True)
class Traits:
    """One operator.

    Attributes:
        name: without namespace and overload.
        draws: takes numbers from a generator.
        creates: makes a tensor from sizes (and a fill value) alone; a tensor argument lends only its layout.
        redraw: the in-place draw from (0, 1) that gives the same numbers, for an operator that creates and draws.
        is_elementwise: each element of the result follows from one element, and has the same place.
        overwrites: no element that it writes depends on what was there.
        touches_no_values: makes a view, or changes where a tensor lies.
        resizes: gives a storage another size.
        targets: positions and names of the arguments that it writes.
    """

    name: str
    draws: bool
    creates: bool
    redraw: Any
    is_elementwise: bool
    overwrites: bool
    touches_no_values: bool
    resizes: bool
    targets: tuple[tuple[int, str], ...]

    def is_exact(self, constants: Iterable[torch.Tensor], kwargs: Mapping[str, Any], elements: int) -> bool:
        """Whether a call on so many elements may be cut into pieces anywhere, see [Note: pieces] in `program.py`."""
        is_plain = kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None
        fits = all(
            item.numel() == elements and item.is_contiguous() if item.numel() > 1 else item.dim() < 2
            for item in constants
        )
        return self.name in _EXACT and is_plain and fits


@functools.cache
def traits_of(operator: Any) -> Traits:
    """The traits of an overload (`torch.ops.aten.mul.Tensor`)."""
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    aliases = [(place, item.name, item.alias_info) for place, item in enumerate(schema.arguments) if item.alias_info]
    targets = tuple((place, label) for place, label, alias in aliases if alias.is_write)
    is_out = "out" in operator._overloadname and bool(targets)
    draws = torch.Tag.nondeterministic_seeded in operator.tags
    is_elementwise = torch.Tag.pointwise in operator.tags or name in _COPIES | _FILLS
    return Traits(
        name=name,
        draws=draws,
        creates=name in _CREATES and not targets,
        redraw=None if targets else _REDRAWS.get(name),
        is_elementwise=is_elementwise and len(schema.returns) == 1 and not is_out,
        overwrites=is_out or draws or name in _FILLS or name == "copy_",
        touches_no_values=(bool(aliases) and not targets) or name in _MOVES,
        resizes=name in _RESIZES,
        targets=targets,
    )


class Call:
    """One call of an operator.

    Attributes:
        tensors: all tensors among the arguments, also in lists.
        written: tensors that it writes.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.traits = traits_of(function)
        self.tensors = list(tensors_of((args, kwargs)))
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.traits.targets]
        self.written = list(tensors_of(targets))

    def run(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def about(self, target: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with SELF in the place of `target`."""
        args = tuple(SELF if value is target else value for value in self.args)
        return args, {name: SELF if value is target else value for name, value in self.kwargs.items()}

    def fill_value(self) -> Any:
        """What a creating call fills with; None for zeros, and for memory left as it is."""
        name = self.traits.name
        if "ones" in name:
            return 1
        if "full" not in name:
            return None
        return self.kwargs["fill_value"] if "fill_value" in self.kwargs else self.args[2 if name == "new_full" else 1]
