"""Which gradients a backward makes, and which have come.

Scope: the parameters that a graph reaches, counts of gradients, their order, what a changed graph means.
Not here: where gradients go (`buckets.py`), what follows when they are there (`reducer.py`).
Owner: the reducer; the thread that runs backward.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tierstore.errors import GraphError
from tierstore.pack.layout import some_of
from tierstore.train.graph import leaves_of
from tierstore.train.newcomers import newcomers


class Readiness:
    """Counts every parameter in one backward after the other.

    Args:
        find_unused: a backward may leave parameters out.
        static: the first backward tells how many gradients each parameter gets in every backward.

    Attributes:
        names, parameters: those that needed a gradient when this was made; their positions are the indices that are
            used everywhere.
        is_static: the graph is that of the first backward.
        is_learning: this is the first backward of a static graph: nothing is known to be the last gradient.
        reached: whether gradients of a parameter are waited for, by index.
        order: indices in the order in which last gradients came; while learning, those of all gradients.
        searches: whether a backward is to begin with what `search` finds.
    """

    def __init__(self, module: nn.Module, *, find_unused: bool, static: bool) -> None:
        self._module = module
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.names, self.parameters = list(trained), list(trained.values())
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._known_ids = {id(parameter) for parameter in module.parameters()}
        self._index: dict[torch.Tensor, int] = {parameter: index for index, parameter in enumerate(self.parameters)}
        self._find_unused, self.is_static = find_unused, static
        self.is_learning = static
        self._expected = [] if static else [1] * len(self.names)  # gradients in a backward; unknown while learning
        self.searches = find_unused and not static
        self.begin(None)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether it needed a gradient when this was made."""
        return parameter in self._index

    def search(self, roots: Iterable[torch.Tensor]) -> bytearray:
        """Which parameters the graphs of `roots` reach.

        Raises:
            GraphError: they also reach one that was not in the module when this was made.
        """
        reached, index, others = bytearray(len(self.names)), self._index, set()
        for leaf in leaves_of(roots):
            place = index.get(leaf)
            if place is not None:
                reached[place] = 1
            elif isinstance(leaf, nn.Parameter):
                others.add(id(leaf))
        if others:  # of another module, most likely
            known = {id(parameter) for _, parameter in self._frozen}
            for name, parameter in self._module.named_parameters():
                if id(parameter) in others and id(parameter) not in known:
                    raise _newcomer(name)
        return reached

    def refuse_newcomers(self) -> None:
        """Refuse parameters that were put into the module after this was made, where no graph is searched for them.

        Raises:
            GraphError: as `search`.
        """
        if not self.searches:
            name = next((name for name, p in newcomers(self._module, self._known_ids) if p.requires_grad), None)
            if name is not None:
                raise _newcomer(name)

    def begin(self, reached: bytearray | None) -> None:
        """A backward begins.

        Args:
            reached: what `search` has found; None is everything.

        Raises:
            GraphError: a parameter that was frozen needs a gradient now.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise GraphError(f"{name} was frozen when the reducer was made, and needs a gradient now")
        self._came = [0] * len(self.names)
        self.order: list[int] = []
        if self.is_static and not self.is_learning:
            self.reached = bytearray(count > 0 for count in self._expected)
        else:
            self.reached = bytearray(b"\1") * len(self.names) if reached is None else reached

    def came(self, index: int) -> bool:
        """Count a gradient that came. Returns whether it is the last one of its parameter.

        Raises:
            GraphError: the last one had come before.
        """
        self._came[index] += 1
        if self.is_learning:
            self.order.append(index)
            return False
        left = self._expected[index] - self._came[index]
        if left < 0:
            raise self.too_late(index)
        if left == 0:
            self.order.append(index)
        return left == 0

    def too_late(self, index: int) -> GraphError:
        """The error for a gradient that came after its bucket had gone."""
        name = self.names[index]
        if self.is_static:
            count = self._expected[index]
            return GraphError(
                f"{name} got more gradients than in the first backward ({count}): it is no static graph, as "
                "static_graph=True says"
            )
        if self._came[index] > self._expected[index]:
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
            self.is_learning, self._expected = False, self._came
            return
        if self._find_unused and not self.is_static:
            return
        changed = [i for i, count in enumerate(self._expected) if self._came[i] != count]
        if not changed:
            return
        if self.is_static:
            text = "the graph of this backward is not that of the first (static_graph=True)"
        else:
            text = "this backward left parameters out (find_unused=False)"
        lines = [f"{self.names[i]} got {self._came[i]} of {self._expected[i]} gradients" for i in changed]
        raise GraphError(f"{text}: {some_of(lines)}")

    def last_order(self) -> list[int]:
        """Every parameter that got a gradient, once, in the order of their last gradients."""
        return list(dict.fromkeys(reversed(self.order)))[::-1]


def _newcomer(name: str) -> GraphError:
    return GraphError(
        f"{name} was put into the module after the reducer was made: ranks would not share its gradient; close this "
        "reducer and make a new one"
    )
