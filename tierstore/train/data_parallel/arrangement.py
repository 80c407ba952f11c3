"""Which parameters share a bucket: assumed at first, and arranged anew once, in the order of the first backward.

Scope: the order of the parameters, the size of buckets, and what rank 0 tells the others of both.
Not here: the assignment and the storages (`buckets.py`, `places.py`), the choice of a size (`plan/buckets.py`).
Owner: the reducer; the thread that runs backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tierstore.plan.buckets import Gradient, best_bucket_bytes
from tierstore.plan.cost_model import CostModel
from tierstore.train.data_parallel.agreement import broadcast_flat
from tierstore.train.data_parallel.launching import Launcher
from tierstore.train.data_parallel.options import ReducerOptions
from tierstore.train.data_parallel.places import Places
from tierstore.train.ranks import Ranks


class Arrangement:
    """The buckets of one reducer, in the order in which they are complete.

    Args:
        known: parameters in the order in which their gradients come, by index; None if it is not known yet.
    """

    def __init__(
        self,
        options: ReducerOptions,
        known: Sequence[int] | None,
        parameters: Sequence[torch.Tensor],
        ranks: Ranks,
        launcher: Launcher,
        places: Places,
    ) -> None:
        self._cost = options.cost if options.is_auto else None
        self._first_bytes, self._cap_bytes = options.first_cap_bytes, options.cap_bytes
        self._parameters = parameters
        self._ranks = ranks
        self._launcher = launcher
        self._places = places
        self._is_final = known is not None and self._cost is None
        self._shown: list[int] | None = None  # the order, by the first backward
        self._began: Any = None  # begin of the first backward, if its times decide the bucket size
        self._moments: dict[int, Any] = {}  # when its gradients came, by index; likewise
        self._allocate(self._completed(known or ()))

    def begin(self) -> None:
        """The first gradient of a backward comes."""
        if self._shown is not None:
            if not self._is_final:
                self._make_anew(self._shown)
        elif self._cost is not None:
            self._began, self._moments = self._launcher.now(), {}  # a backward that failed has shown nothing

    def came(self, index: int) -> None:
        """A gradient came."""
        if self.is_learning and self._cost is not None:
            self._moments[index] = self._launcher.now()

    @property
    def is_learning(self) -> bool:
        """Whether no backward has shown an order yet."""
        return self._shown is None

    def learn(self, order: list[int]) -> None:
        """The first backward is over, and its gradients came in this order."""
        self._shown = order

    def _make_anew(self, seen: Sequence[int]) -> None:
        """Buckets in the order in which rank 0 saw the gradients."""
        order, cap_bytes = self._completed(seen), self._cap_bytes
        if self._cost is not None:
            cap_bytes = self._best_bytes(order, self._cost)
        shared = torch.tensor([cap_bytes, *order], dtype=torch.int64, device=self._parameters[0].device)
        broadcast_flat(self._ranks, [shared], "the order of buckets")
        self._cap_bytes, *order = shared.tolist()
        self._is_final = True
        self._allocate(order)

    def _allocate(self, order: Sequence[int]) -> None:
        first_bytes = self._cap_bytes if self._first_bytes is None else min(self._first_bytes, self._cap_bytes)
        self._places.allocate(order, (first_bytes, self._cap_bytes))

    def _completed(self, order: Sequence[int]) -> list[int]:
        """`order`, then the parameters missing there, in the reverse order of registration."""
        return list(dict.fromkeys([*order, *reversed(range(len(self._parameters)))]))

    def _best_bytes(self, order: Sequence[int], cost: CostModel) -> int:
        """The bucket size that suits the times of the first backward; gradients that never came count as last."""
        last = next(reversed(self._moments.values()), self._began)
        seconds = {i: self._launcher.seconds_between(self._began, self._moments.get(i, last)) for i in order}
        gradients = [Gradient(self._parameters[i].nbytes, seconds[i]) for i in order]
        # One at a time: NCCL runs the collectives of a group in turn, and on gloo (torch 2.13, 2 ranks, 2 cores) 4 KiB
        # took 0.12 ms each one after the other, 0.17 ms with eight in flight.
        return best_bucket_bytes(gradients, cost)
