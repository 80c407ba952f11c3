"""Which groups stay on the compute device, and which are fetched ahead.

Scope: one policy over a cyclic order of visits, stateless between calls.
Not here: transfers, and the choice of the depth (see `plan/prefetch.py`).
Owner: the caller keeps what is resident, in use and loading; the policy only answers.

[Note: rank] Seen from one position of the order, groups are ranked by their next use. The first is the group needed
now, the next ones are the prefetch candidates, and the last is the victim (Belady, 1966: evict what is used farthest
in the future, optimal when the order is known). So one ranking per position answers everything.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass

from tierstore.config import format_size
from tierstore.errors import BudgetError, ConfigError


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do before a group is used.

    Attributes:
        evict: groups to drop, all before anything is loaded.
        load: groups to fetch, in this order; the demanded one is first unless it is resident or already loading.
        wait: not empty when the demanded group fits only after loads in flight have ended (they cannot be evicted):
            then nothing is evicted or loaded; let one of these end, and ask again.
    """

    evict: tuple[int, ...] = ()
    load: tuple[int, ...] = ()
    wait: tuple[int, ...] = ()


class ResidencyPolicy:
    """Belady's eviction and fixed-depth prefetch over a cyclic order.

    Args:
        order: groups in the order in which one step visits them (forward, then backward); a group may appear often.
        sizes: bytes of each group; groups that never appear in `order` count as used last.
        capacity_bytes: bytes that resident and loading groups may fill together.
        depth: distinct groups fetched ahead; 0 fetches on demand only.
    """

    def __init__(self, order: tuple[int, ...], sizes: tuple[int, ...], capacity_bytes: int, depth: int) -> None:
        if not order or not all(0 <= group < len(sizes) for group in order):
            raise ConfigError(f"an order visits at least one of the {len(sizes)} groups, and no other; got {order}")
        if depth < 0 or any(size < 0 for size in sizes):
            raise ConfigError(f"depth and sizes cannot be negative: depth {depth}, sizes {sizes}")
        self.order = order
        self.sizes = sizes
        self.capacity_bytes = capacity_bytes
        self.depth = depth
        self._visited = len(set(order))
        self._ranked = _rank(order, len(sizes))

    def is_settled(self, position: int, present: set[int], demand: int | None = None) -> bool:
        """Whether everything that `decide` would load is `present`: on the device, or on its way there."""
        ranked = self._ranked[position % len(self.order)]
        if demand is None or demand == ranked[0]:
            return present.issuperset(ranked[: min(1 + self.depth, self._visited)])
        return demand in present and present.issuperset(ranked[: min(self.depth, self._visited)])

    def decide(
        self,
        position: int,
        resident: Collection[int],
        in_use: Container[int],
        loading: Collection[int],
        demand: int | None = None,
    ) -> Decision:
        """What to evict and load now that the visit at `position` begins.

        Prefetch goes no farther than the first candidate that has no room, so a nearer group is never behind a farther
        one, and it never evicts a group whose next use is sooner than its own.

        Args:
            position: index in the cyclic order (any integer; taken modulo its length).
            resident: groups wholly on the device.
            in_use: groups that may not be evicted: acquired, or still read by the device. Asked only of victims.
            loading: groups in flight; they fill memory and cannot be evicted.
            demand: the group needed, where the step left the order; None is the order's own group.

        Raises:
            BudgetError: the demanded group and those in use exceed the capacity.
        """
        ranked = self._ranked[position % len(self.order)]
        needed = ranked[0] if demand is None else demand
        present = set(resident)
        present.update(loading)
        free_bytes = self.capacity_bytes - sum([self.sizes[group] for group in present])
        evict: list[int] = []
        load: list[int] = []
        if needed not in present:
            evictable = (g for g in reversed(ranked) if g in present and g not in loading and g not in in_use)
            victims = self._victims(self.sizes[needed] - free_bytes, evictable)
            if victims is None:
                self._check_fits(needed, [group for group in present if group in in_use])
                return Decision(wait=tuple(group for group in ranked if group in loading and group not in in_use))
            free_bytes += self._bytes(victims) - self.sizes[needed]
            evict += victims
            load.append(needed)
        first = 1 if needed == ranked[0] else 0
        for rank in range(first, min(first + self.depth, self._visited)):
            candidate = ranked[rank]
            if candidate in evict:
                break
            if candidate in present or candidate == needed:
                continue
            farther = ranked[:rank:-1]  # farthest first, down to the candidate's own next use
            evictable = (
                g for g in farther
                if g in present and g not in loading and g not in evict and g != needed and g not in in_use
            )  # fmt: skip
            victims = self._victims(self.sizes[candidate] - free_bytes, evictable)
            if victims is None:
                break
            free_bytes += self._bytes(victims) - self.sizes[candidate]
            evict += victims
            load.append(candidate)
        return Decision(tuple(evict), tuple(load))

    def _check_fits(self, needed: int, in_use: Collection[int]) -> None:
        together = {needed, *in_use}
        sum_bytes = self._bytes(together)
        if sum_bytes > self.capacity_bytes:
            raise BudgetError(
                f"group {needed} ({format_size(self.sizes[needed])}) and the {len(together) - 1} groups in use need "
                f"{sum_bytes} B together, but the device tier holds {self.capacity_bytes} B of weights; "
                f"raise gpu_memory by {sum_bytes - self.capacity_bytes} B"
            )

    def _victims(self, missing_bytes: int, farthest_first: Iterable[int]) -> list[int] | None:
        """Groups to evict for `missing_bytes`, or None; spares those that a larger victim makes needless."""
        victims: list[int] = []
        surplus = -missing_bytes
        if surplus >= 0:
            return victims
        for group in farthest_first:
            victims.append(group)
            surplus += self.sizes[group]
            if surplus >= 0:
                break
        else:
            return None
        for group in reversed(victims[:-1]):
            if self.sizes[group] <= surplus:
                victims.remove(group)
                surplus -= self.sizes[group]
        return victims

    def _bytes(self, groups: Iterable[int]) -> int:
        return sum([self.sizes[group] for group in groups])


def _rank(order: tuple[int, ...], groups: int) -> tuple[tuple[int, ...], ...]:
    """Per position, all groups by next use, soonest first; those never used last, by descending id."""
    unused = sorted(set(range(groups)) - set(order))
    farthest_first = dict.fromkeys([*unused, *reversed(order)])
    ranked: list[tuple[int, ...]] = []
    # Walking back, the group at a position becomes the soonest used: it moves to the end of the dict. The first lap
    # only fills in what lies beyond the end of the order.
    for lap in range(2):
        for group in reversed(order):
            del farthest_first[group]
            farthest_first[group] = None
            if lap == 1:
                ranked.append(tuple(reversed(farthest_first)))
    return tuple(reversed(ranked))
