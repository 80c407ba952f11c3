"""How long a model's layers compute on a machine whose layers were timed: by their work, not by flop/s alone.

Scope: the work of a layer in four counts, timed layers, and the seconds of other layers that follow from them.
Not here: the timing (`measure/layers.py`), the place of computing in a step (`plan/step_time.py`).

[Note: layers on a CPU] With few tokens a CPU does not compute a layer as fast as it multiplies large matrices: weights
and fresh gradients pass through memory, and so do norms, activations and softmax. So a pass over a layer costs
`a + b * parameters + c * elements + d * flop`: a for the calls, b for memory traffic of the size of the weights, c for
that of the activations, d for products. All four are fitted, none below 0, to layers of several sizes that the probe
has timed.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from tierstore.errors import ConfigError

_SAME_ERROR = 1e-12  # of sums of squared relative errors: smaller differences are rounding


class LayerKind(enum.Enum):
    """A repeated block, or the parts around the blocks: embedding, the product with the vocabulary, the loss."""

    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one forward over some layers; that of backward is proportional.

    Attributes:
        elements: tokens times the layer's width (of a head, the vocabulary).
        flop: of matrix products.
    """

    layers: float
    parameters: float
    elements: float
    flop: float


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """Seconds of both passes over one layer, with its gradients going to memory of their own."""

    kind: LayerKind
    dtype: str
    work: LayerWork
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        figures = (*astuple(self.work), self.forward_s, self.backward_s)
        if not all(0 < figure < math.inf for figure in figures):
            raise ConfigError(f"a timed layer has work and seconds, positive and finite, not {figures}")


def is_timed(timed: Iterable[TimedLayer], dtype: str) -> bool:
    """Whether layers of both kinds were timed in this dtype."""
    return {one.kind for one in timed if one.dtype == dtype} == set(LayerKind)


def computing_s(
    timed: Iterable[TimedLayer], dtype: str, work: Mapping[LayerKind, LayerWork]
) -> tuple[float, float] | None:
    """Seconds of forward and of backward over this work; None if layers of a kind were not timed in this dtype."""
    found = [one for one in timed if one.dtype == dtype]
    passes_s = [0.0, 0.0]
    for kind, own in work.items():
        alike = [one for one in found if one.kind is kind]
        if not alike:
            return None
        for index, name in enumerate(("forward_s", "backward_s")):
            costs = _costs([astuple(one.work) for one in alike], [getattr(one, name) for one in alike])
            passes_s[index] += sum(cost * amount for cost, amount in zip(costs, astuple(own)))
    return passes_s[0], passes_s[1]


def _costs(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Seconds per unit of each count, none below 0, with the least squares of relative errors over all subsets.

    Of equally good subsets, one with fewer counts is taken, and with later fields of `LayerWork`: flop alone if only
    one layer was timed.

    Source: exact for so few counts; Lawson and Hanson, "Solving Least Squares Problems" (1974), chapter 23.
    """
    count = len(rows[0])
    # Counts differ by orders of magnitude: they are scaled by their largest values, and the costs are scaled back.
    largest = [max(row[column] for row in rows) for column in range(count)]
    scaled = [[row[c] / largest[c] / taken_s for c in range(count)] for row, taken_s in zip(rows, seconds)]
    best, best_error = [0.0] * count, math.inf
    for size in range(1, min(count, len(rows)) + 1):
        for chosen in itertools.combinations(reversed(range(count)), size):
            solution = _least_squares([[row[column] for column in chosen] for row in scaled])
            if solution is None or min(solution) < 0:
                continue
            costs = [0.0] * count
            for column, cost in zip(chosen, solution):
                costs[column] = cost
            error = sum((sum(a * b for a, b in zip(row, costs)) - 1) ** 2 for row in scaled)
            if error < best_error - _SAME_ERROR:
                best, best_error = costs, error
    return [cost / unit for cost, unit in zip(best, largest)]


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The solution of `rows * x = 1` by the normal equations, with pivots; None if there is no unique one."""
    count = len(rows[0])
    system = [[sum(row[i] * row[j] for row in rows) for j in range(count)] + [sum(row[i] for row in rows)]
              for i in range(count)]  # fmt: skip
    for column in range(count):
        pivot = max(range(column, count), key=lambda i: abs(system[i][column]))
        if abs(system[pivot][column]) <= 1e-12 * max(abs(value) for value in system[pivot]):
            return None
        system[column], system[pivot] = system[pivot], system[column]
        for i in range(count):
            if i != column:
                factor = system[i][column] / system[column][column]
                system[i] = [a - factor * b for a, b in zip(system[i], system[column])]
    return [system[i][count] / system[i][i] for i in range(count)]
