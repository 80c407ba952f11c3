"""The graph that autograd will walk.

Scope: the leaves that a backward will reach. Not here: what becomes of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from tierstore.garbage import no_garbage_collection

Key = TypeVar("Key")


class KnownLeaves(Generic[Key]):
    """Tells which of some parameters a backward will reach, each by a key.

    When the first node of a backward runs, autograd's engine has already looked at the whole graph. Asking it then
    takes a tenth of the time of walking the graph once more from Python. Nested backwards (reentrant checkpointing) are
    graphs of their own. `torch.autograd.graph.register_multi_grad_hook` asks the engine the same question.
    """

    def __init__(self, parameters: Mapping[Key, torch.Tensor]) -> None:
        self._parameters = parameters
        self._nodes: dict[Key, Any] = {}
        self._asking: Any = None

    def renew(self, keys: Iterable[Key]) -> None:
        """These parameters may be other tensors by now."""
        for key in keys:
            self._nodes.pop(key, None)

    def ask(self, loss: torch.Tensor, answer: Callable[[list[Key]], object]) -> None:
        """When the backward of `loss` begins, `answer` is called with the keys of the parameters that it will reach."""
        self.forget()
        if loss.grad_fn is None:
            answer([key for key, parameter in self._parameters.items() if parameter is loss])
            return
        with torch._C.DisableTorchFunctionSubclass():
            for key, parameter in self._parameters.items():
                if parameter.requires_grad and key not in self._nodes:
                    self._nodes[key] = torch.autograd.graph.get_gradient_edge(parameter).node

        def begin(_: Any) -> None:
            self.forget()
            answer([key for key, node in self._nodes.items() if torch._C._will_engine_execute_node(node)])

        self._asking = loss.grad_fn.register_prehook(begin)

    def forget(self) -> None:
        """Stop asking: `answer` will not be called any more."""
        if self._asking is not None:
            self._asking.remove()
            self._asking = None


def leaves_of(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Every leaf that the graphs of `roots` reach, the roots included."""
    with no_garbage_collection():  # the collector would look at every node of the graph many times, and find nothing
        return list(_leaves_of(roots))


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
            if isinstance(leaf, torch.Tensor):  # a node of a user's own function may have such an attribute, too
                yield leaf
        for parent, _ in parents:
            if parent is not None and parent not in seen:
                seen.add(parent)
                ahead.append(parent)
