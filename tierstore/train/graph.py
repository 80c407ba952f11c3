"""The graph that autograd will walk.

Scope: the leaves that a backward will reach. Not here: what their gradients mean to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def leaves_of(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Every leaf that the graphs of `roots` reach, the roots included."""
    seen: set[Any] = set()
    ahead: list[Any] = []
    for root in roots:
        if root.grad_fn is None:
            yield root
        else:
            ahead.append(root.grad_fn)
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):  # the node of a function of the user's own may have such a name, too
            yield leaf
        ahead += [parent for parent, _ in node.next_functions]
