"""The prefetch depth in force: from the rates that are measured while training goes on.

Scope: what is observed, when the depth is computed again, whose depth is taken.
Not here: computing it (`plan/prefetch.py`), fetching ahead (`access.py`).
Owner: the training side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tierstore.config import MeasuredRates, Tier, TierConfig
from tierstore.device.streams import ComputeDevice
from tierstore.errors import ConfigError
from tierstore.io.meter import LinkMeter
from tierstore.io.runtime import Runtime
from tierstore.plan.bandwidth import Estimator
from tierstore.plan.prefetch import recommend_depth
from tierstore.plan.simulate import Visit
from tierstore.store.training import TrainingStore
from tierstore.train.access import DeviceAccess
from tierstore.train.partition import Partition

DRIFT = 1.5
"""The depth is computed again when the bytes that the link can move during a step's compute have changed by about this
factor, once for each such magnitude: where rates go up and down, computing it in every step would take longer than a
small step."""
_IN_MEMORY = 2
"""The depth for weights that all come from memory: the next group, and one more because a thread may be late. In a step
of `tierstore bench step --heat cost` 14 of 99 small groups are fetched: at depth 1 compute waited for 7 of them, 2.2 ms
each, at depth 2 for 2 (machine B of README, 2026-11-27)."""


class DepthChooser:
    """Sets the depth of the groups' access.

    Args:
        links: meters between the ranks. With other ranks two links are in series: this rank's part comes from the disk,
            then the other parts come from the other ranks.

    Attributes:
        wanted: the depth that this rank has computed. With other ranks, rank 0's is in force from the next step on.
    """

    def __init__(
        self,
        access: DeviceAccess,
        store: TrainingStore,
        runtime: Runtime,
        device: ComputeDevice,
        partition: Partition,
        links: Mapping[str, LinkMeter],
    ) -> None:
        self._access = access
        self._store = store
        self._runtime = runtime
        self._device = device
        self._partition = partition
        self._links = links
        sizes, homes = access.sizes, store.placement.weights_home
        self._disk_share = sum(n for n, home in zip(sizes, homes) if home is Tier.NVME) / sum(sizes)
        self.wanted = 1 if self._disk_share or partition.is_shared else _IN_MEMORY
        self._is_fixed = False
        self._reads = Estimator(weight=0.5)
        self._gathers = Estimator(weight=0.5)
        self._seen = {"read": (0, 0.0), "gather": (0, 0.0)}
        self._known: dict[int, int] = {}

    def begin(self, tiers: TierConfig) -> None:
        """Set the first depth, and take the first rates from the table given (not its file), or measure them now."""
        if tiers.prefetch_depth is not None:
            self.fix(tiers.prefetch_depth)
            return
        if isinstance(tiers.bandwidth, MeasuredRates):
            self._reads.observe(tiers.bandwidth.read_bytes_per_s, 1.0)
        else:
            self._reads.observe(*self._runtime.call(self._store.measure_reads))
        self._seen["read"] = self._store.io.meters["read"].totals()
        self._access.depth = self.wanted

    def fix(self, depth: int) -> None:
        """Use this depth from now on, whatever is measured.

        Raises:
            ConfigError: it is not a depth.
        """
        if type(depth) is not int or depth < 0:
            raise ConfigError(f"a prefetch depth is a whole number of groups from 0 on, not {depth!r}")
        self._is_fixed = True
        self._access.depth = depth

    def step_ended(self, computing_s: float) -> None:
        """Choose the depth again from what this step measured.

        Args:
            computing_s: time of forward and backward, without waiting for weights.
        """
        self._observe("read", self._store.io.meters["read"], self._reads)
        if "gather" in self._links:
            self._observe("gather", self._links["gather"], self._gathers)
        rate, access = self._rate(), self._access
        if self._is_fixed or rate is None or not access.is_recorded:
            return
        visit_seconds = access.visit_seconds
        if self._device.kind == "cuda":
            # Kernels are queued, not run, during a visit: it gets a share of the whole time in proportion to its bytes.
            total_bytes = sum(access.sizes[group] for group in access.order)
            visit_seconds = [computing_s * access.sizes[group] / total_bytes for group in access.order]
        moved_bytes = max(1.0, rate * sum(visit_seconds))
        if (magnitude := round(math.log(moved_bytes, DRIFT))) not in self._known:
            order = tuple(Visit(g, access.sizes[g], s) for g, s in zip(access.order, visit_seconds))
            self._known[magnitude] = recommend_depth(order, rate, self._store.placement.gpu_weight_bytes)
        self.wanted = self._known[magnitude]
        if not self._partition.is_shared:
            access.depth = self.wanted

    def agree(self, depth: int) -> None:
        """Take the depth that rank 0 has computed: what is fetched ahead must be the same at all ranks."""
        if self._partition.is_shared and not self._is_fixed:
            self._access.depth = depth

    def _observe(self, link: str, meter: LinkMeter, rate: Estimator) -> None:
        moved_bytes, busy_s = meter.totals()
        rate.observe(moved_bytes - self._seen[link][0], busy_s - self._seen[link][1])
        self._seen[link] = (moved_bytes, busy_s)

    def _rate(self) -> float | None:
        """Bytes of whole groups per second; None: all groups come from memory, or nothing was measured."""
        own = 1 / self._partition.count
        parts = ((own * self._disk_share, self._reads.bytes_per_s), (1 - own, self._gathers.bytes_per_s))
        seconds_per_byte = sum(share / rate for share, rate in parts if rate is not None)
        return 1 / seconds_per_byte if seconds_per_byte else None
