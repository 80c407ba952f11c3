"""Which gradients a backward makes, and which have come.

Scope: the parameters that a graph reaches, counts of gradients, their order, what a changed graph means.
Not here: where gradients go (`buckets.py`), what follows when they are there (`reducer.py`).
Owner: the reducer; the thread that runs backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tierstore.errors import GraphError
from tierstore.train.graph import leaves_of

_UNKNOWN = 1 << 30  # gradients to come, while a static graph is being learnt
_SHOWN = 5


class Readiness:
    """Counts every parameter in one backward after the other.

    Args:
        find_unused: a backward may leave parameters out.
        static: the first backward tells how many gradients come for each parameter in all.

    Attributes:
        is_static: the graph is that of the first backward.
        is_learning: this is the first backward of a static graph: nothing is known to be the last gradient.
        reached: whether gradients of a parameter are waited for, by index.
        order: indices as gradients came; while learning, all of them.
        searches: whether a backward is to begin with what `search` finds.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], *, find_unused: bool, static: bool
    ) -> None:
        self._names = names
        self._index = {parameter: index for index, parameter in enumerate(parameters)}
        self._find_unused, self.is_static = find_unused, static
        self.is_learning = static
        self._expected = [_UNKNOWN if static else 1] * len(names)
        self.searches = find_unused and not static
        self.begin(None)

    def search(self, roots: Iterable[torch.Tensor]) -> tuple[bytearray, set[int]]:
        """What the graphs of `roots` reach: which of these parameters, and the ids of others."""
        reached, index, others = bytearray(len(self._names)), self._index, set()
        for leaf in leaves_of(roots):
            place = index.get(leaf)
            if place is not None:
                reached[place] = 1
            elif isinstance(leaf, torch.nn.Parameter):
                others.add(id(leaf))
        return reached, others

    def begin(self, reached: bytearray | None) -> None:
        """A backward begins.

        Args:
            reached: what `search` has found; None is everything.
        """
        self._left = self._expected.copy()
        self.order: list[int] = []
        if self.is_static:
            self.reached = bytearray(count > 0 for count in self._expected)
        else:
            self.reached = bytearray(b"\1") * len(self._names) if reached is None else reached

    def came(self, index: int) -> bool:
        """A gradient came. Whether it is the last one of its parameter.

        Raises:
            GraphError: there was a last one before.
        """
        left = self._left[index] = self._left[index] - 1
        if left < 0:
            raise self.too_late(index)
        if left == 0 or self.is_learning:
            self.order.append(index)
        return left == 0

    def too_late(self, index: int) -> GraphError:
        """A gradient came after its bucket had gone."""
        name = self._names[index]
        if self.is_static:
            count = self._expected[index]
            return GraphError(f"{name} got more gradients than in the first backward ({count}): not a static graph")
        if self._left[index] < 0:
            return GraphError(
                f"{name} got its gradient twice in one backward, as reentrant checkpointing does: use static_graph=True"
            )
        return GraphError(
            f"{name} got a gradient, and the graph that was searched does not reach it: "
            "call reducer.backward(loss); with reentrant checkpointing use static_graph=True or find_unused=False"
        )

    def end(self) -> None:
        """Backward is over.

        Raises:
            GraphError: it was not what the options promise. Nothing is left half done.
        """
        if self.is_learning:
            self.is_learning = False
            self._expected = [_UNKNOWN - left for left in self._left]
            return
        changed = [i for i, left in enumerate(self._left) if left] if self.is_static or not self._find_unused else []
        if not changed:
            return
        if self.is_static:
            text = "the graph of this backward is not that of the first (static_graph=True)"
        else:
            text = "this backward left parameters out (find_unused=False)"
        lines = [
            f"{self._names[i]} got {self._expected[i] - self._left[i]} of {self._expected[i]} gradients"
            for i in changed[:_SHOWN]
        ]
        more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise GraphError(f"{text}: {'; '.join(lines)}{more}")

    def last_order(self) -> list[int]:
        """Every parameter that got a gradient, once, by its last one."""
        return list(dict.fromkeys(reversed(self.order)))[::-1]
