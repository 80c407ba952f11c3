"""Parameters that were added to a model after its engine or reducer was made.

Scope: finding them, at each step.
Not here: what that means for an engine (`groups.py`), or a reducer (`data_parallel/`).
Owner: no state.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn


def newcomers(model: nn.Module, known_ids: Container[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with elements whose ids are not known, with their names."""
    ahead: list[nn.Module | None] = [model]  # takes a third of the time of `model.modules()`, which makes names
    seen: set[int] = set()
    while ahead:
        module = ahead.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        ahead += module._modules.values()
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in known_ids and parameter.numel():
                named = (name for name, other in model.named_parameters() if other is parameter)
                yield next(named, f"of a {type(module).__name__}"), parameter
