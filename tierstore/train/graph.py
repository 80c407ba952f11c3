"""The graph that autograd will walk.

Scope: the leaves that a backward will reach. Not here: what their gradients mean to anybody.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def leaves_of(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Every leaf that the graphs of `roots` reach, the roots included."""
    with _no_garbage_collection():  # it would look at every node of the graph many times, and find nothing
        return list(_leaves_of(roots))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def _leaves_of(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[Any] = set()
    ahead: list[Any] = []
    for root in roots:
        if root.grad_fn is None:
            yield root
        elif root.grad_fn not in seen:
            seen.add(root.grad_fn)
            ahead.append(root.grad_fn)
    while ahead:
        node = ahead.pop()
        parents = node.next_functions
        if not parents:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):  # the node of a function of the user's own may have such a name, too
                yield leaf
        for parent, _ in parents:
            if parent is not None and parent not in seen:
                seen.add(parent)
                ahead.append(parent)
