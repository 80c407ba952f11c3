"""Where gradients stand: in the buckets, with `.grad` as views of them.

Scope: the sets of buckets, gradients put into their places and averaged, what `.grad` is after a step.
Not here: when a bucket is complete (`readiness.py`) and launched (`launching.py`).
Owner: the reducer; the thread that runs backward.

[Note: in place] A gradient is copied once, with the division by the number of ranks (`Places.place`, the only place
that averages), from where autograd made it to its place in the bucket, which becomes `.grad`. There the collective
leaves the average: nothing is copied back. A gradient that is in its place already (accumulated there under `no_sync`)
is divided in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierstore.errors import GraphError
from tierstore.train.data_parallel.buckets import Bucket, BucketSet, assign_buckets

_NOT_ZEROED = (
    "delayed=True needs zero_grad(set_to_none=True) between a step and the next backward: .grad is of the step before"
)


class Places:
    """The sets of buckets of one reducer: one, or two if delayed.

    Args:
        ranks: number of ranks: gradients are divided by it, and a bucket has so many shards.
        scatter: each rank gets a shard of every bucket.
        delayed: one set fills while the other is reduced and shown.

    Attributes:
        averages: gradients are divided as they are placed; False with a comm hook, which does it itself.
        current: the set that is being filled, or was filled last.
        shown: the set that `.grad` are views of, or were.
        placed: whether the gradient is in its place in `current`, by index.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], ranks: int, *, scatter: bool, delayed: bool
    ) -> None:
        self._names, self._parameters = names, parameters
        self._ranks, self._scale = ranks, 1.0 / ranks
        self._is_scattered, self._is_delayed = scatter, delayed
        self.averages = True
        self.placed = bytearray(len(parameters))
        self._has_shown = False

    def allocate(self, order: Sequence[int], caps_bytes: tuple[int, int]) -> None:
        """Make the buckets anew; views that `.grad` still holds stay what they are.

        Args:
            order: indices in the order in which gradients come.
            caps_bytes: caps of the first bucket, and of the others.
        """
        sizes = [parameter.nbytes for parameter in self._parameters]
        assignment = assign_buckets(order, sizes, [p.dtype for p in self._parameters], *caps_bytes)
        self.sets = [
            BucketSet(self._parameters, assignment, pad_to=self._ranks, scatter=self._is_scattered)
            for _ in range(2 if self._is_delayed else 1)
        ]
        self.current = self.sets[0]
        if not self._has_shown:  # else `.grad` may be views of the shown set, which no backward may add to
            self.shown = self.current
        self._held = bytearray(len(self._parameters))

    def begin(self, reached: bytearray) -> None:
        """A backward begins that makes these gradients."""
        self.current = self._next()
        self.current.unfired = []
        self.placed = bytearray(len(self._parameters))
        for bucket in self.current.buckets:
            bucket.begin(sum(reached[member] for member in bucket.members))

    def hold(self, index: int) -> None:
        """Put a gradient of this rank only into its place at once, so that it takes no memory of its own.

        Raises:
            GraphError: it cannot stand there.
        """
        parameter, view = self._parameters[index], self._next().views[index]
        if parameter.grad is not view:
            view.copy_(self._checked(index, parameter.grad))
            parameter.grad = view
        elif self._is_delayed and not self._held[index]:
            raise GraphError(_NOT_ZEROED)
        self._held[index] = 1

    def place(self, index: int) -> None:
        """Put a gradient into its place, divided by the number of ranks. See [Note: in place].

        Raises:
            GraphError: it cannot stand there.
        """
        parameter, view = self._parameters[index], self.current.views[index]
        gradient = parameter.grad
        if gradient is view:
            if self._is_delayed and not self._held[index]:
                raise GraphError(_NOT_ZEROED)
            if self.averages:
                view.mul_(self._scale)
        else:
            gradient = self._checked(index, gradient)
            if self.averages:
                torch.mul(gradient, self._scale, out=view)
            else:
                view.copy_(gradient)
            parameter.grad = view
        self._held[index] = 0
        self.placed[index] = 1

    def fill(self, bucket: Bucket) -> None:
        """No more gradients come: fill the places of missing ones with what other backwards have left, or zeros."""
        for member in bucket.members:
            if self.placed[member]:
                continue
            if self._parameters[member].grad is not None:
                self.place(member)
            else:
                self.current.views[member].zero_()
                self.current.unfired.append(member)

    def show(self, buckets: BucketSet, used: bytearray | None) -> list[str]:
        """A set is reduced: make `.grad` its views; for parameters that no rank has used None, and return their names.

        Args:
            used: whether any rank has used a parameter, by index; None is all.
        """
        absent = {index for index in buckets.unfired if used is not None and not used[index]}
        self.shown, self._has_shown = buckets, self._is_delayed
        if self._is_scattered:
            self.clear()
        else:
            for index in range(len(self._parameters)) if self._is_delayed else buckets.unfired:
                self._parameters[index].grad = None if index in absent else buckets.views[index]
        return [self._names[index] for index in sorted(absent)]

    def refuse_to_lose(self) -> None:
        """Refuse to drop gradients of this rank only, of an accumulation that goes on.

        Raises:
            GraphError: there are some in `.grad`.
        """
        views = self._next().views
        held = (index for index, is_held in enumerate(self._held) if is_held)
        if (index := next((i for i in held if self._parameters[i].grad is views[i]), None)) is not None:
            raise GraphError(
                f"the gradient of {self._names[index]} was accumulated in no_sync(), and would be lost: call "
                "flush() before the first backward in no_sync(), or after the one that ends the accumulation"
            )

    def clear(self) -> None:
        """Set every `.grad` to None: there are no gradients to show."""
        for parameter in self._parameters:
            parameter.grad = None

    def _next(self) -> BucketSet:
        """The set that the next backward fills."""
        return self.sets[1] if self._is_delayed and self.current is self.sets[0] else self.sets[0]

    def _checked(self, index: int, gradient: torch.Tensor | None) -> torch.Tensor:
        own = self._parameters[index].dtype
        if gradient is None:
            why = "was taken away by a hook that ran before the reducer's"
        elif gradient.requires_grad:
            why = "was made by create_graph=True"
        elif gradient.layout is not torch.strided:
            why = "is sparse"
        elif gradient.dtype is not own:
            why = f"is {gradient.dtype}, and the parameter {own}, because somebody has set its grad_dtype"
        elif self._is_delayed and gradient is self.shown.views[index]:
            raise GraphError(_NOT_ZEROED)
        else:
            return gradient
        raise GraphError(f"the gradient of {self._names[index]} {why}: that cannot be reduced in a bucket")
