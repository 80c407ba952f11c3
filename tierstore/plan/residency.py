"""Which groups stay on the compute device, and which are fetched ahead.

Scope: one policy over a cyclic order of visits, stateless between calls.
Not here: transfers, and the choice of the depth (see `plan/prefetch.py`).
Owner: the caller keeps what is resident, in use and loading; the policy only answers.

[Note: rank] Seen from one position of the order, groups are ranked by their next use. The first is the group needed
now, the next ones are the prefetch candidates, and the last is the victim (Belady, 1966: evict what is used farthest
in the future, optimal when the order is known). Only what is asked for is ranked: ranking all groups at every position
would take the square of their number, which may be thousands.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass

from tierstore.config import format_size
from tierstore.errors import BudgetError, ConfigError

_NEVER = 1 << 60  # visits


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
        sizes: bytes of each group; groups that never appear in `order` count as used last, by descending id.
        capacity_bytes: bytes that resident and loading groups may fill together.
        depth: distinct groups fetched ahead; 0 fetches on demand only.
    """

    def __init__(self, order: tuple[int, ...], sizes: tuple[int, ...], capacity_bytes: int, depth: int) -> None:
        if not order or not all(0 <= group < len(sizes) for group in order):
            raise ConfigError(f"an order must name at least one group, each from 0 to {len(sizes) - 1}; got {order}")
        if depth < 0 or any(size < 0 for size in sizes):
            raise ConfigError(f"depth and sizes cannot be negative: depth {depth}, sizes {sizes}")
        self.order = order
        self.sizes = sizes
        self.capacity_bytes = capacity_bytes
        self.depth = depth
        self._nearest: dict[tuple[int, int], tuple[int, ...]] = {}
        # Next uses as seen from `_seen_from`, both counted in visits since the beginning.
        self._seen_from = 0
        self._next_use = [_NEVER - group for group in range(len(sizes))]
        self._until_next: list[int] = [0] * len(order)
        for place in reversed(range(2 * len(order))):
            group = order[place % len(order)]
            if place < len(order):
                self._until_next[place] = self._next_use[group] - place
            self._next_use[group] = place

    def is_settled(self, position: int, present: set[int], demand: int | None = None) -> bool:
        """Whether everything that `decide` would load is `present`: on the device, or on its way there."""
        ahead = self._ahead(position % len(self.order))
        if demand is None or demand == ahead[0]:
            return present.issuperset(ahead)
        return demand in present and present.issuperset(ahead[: self.depth])

    def _ahead(self, position: int) -> tuple[int, ...]:
        """The group that is used at a position, and the next distinct ones, as many as the depth."""
        found = self._nearest.get((position, self.depth))
        if found is None:
            groups: dict[int, None] = {}
            for group in itertools.chain(self.order[position:], self.order[:position]):
                groups[group] = None
                if len(groups) > self.depth:
                    break
            found = self._nearest[position, self.depth] = tuple(groups)
        return found

    def _look_from(self, position: int) -> list[int]:
        """When each group is used next, at this position or later."""
        for visit in range(self._seen_from, self._seen_from + (position - self._seen_from) % len(self.order)):
            self._next_use[self.order[visit % len(self.order)]] += self._until_next[visit % len(self.order)]
            self._seen_from = visit + 1
        return self._next_use

    def decide(
        self,
        position: int,
        resident: Collection[int],
        in_use: Container[int],
        loading: Collection[int],
        demand: int | None = None,
    ) -> Decision:
        """What to evict and load now that the visit at `position` begins.

        Prefetch stops at the first candidate that has no room, so a nearer group is never behind a farther one. A
        candidate never evicts a group that is used sooner than itself.

        Args:
            position: index in the cyclic order (any integer; taken modulo its length).
            resident: groups wholly on the device.
            in_use: groups that may not be evicted: acquired, or still read by the device. Checked only for victims.
            loading: groups in flight; they fill memory and cannot be evicted.
            demand: the group needed if the step left the order; None is the order's own group.

        Raises:
            BudgetError: the demanded group and those in use exceed the capacity.
        """
        position %= len(self.order)
        ahead = self._ahead(position)
        needed = ahead[0] if demand is None else demand
        present = set(resident)
        present.update(loading)
        free_bytes = self.capacity_bytes - sum([self.sizes[group] for group in present])
        evict: list[int] = []
        load: list[int] = []
        next_use = self._look_from(position)
        ranked: list[int] = []  # the present groups, farthest next use first, once a victim is needed

        def evictable(beyond: int) -> Iterator[int]:
            if not ranked:
                ranked.extend(sorted(present, key=next_use.__getitem__, reverse=True))
            for group in ranked:
                if next_use[group] <= beyond:
                    return
                if group not in loading and group not in evict and group != needed and group not in in_use:
                    yield group

        for group in (needed, *(ahead[1:] if needed == ahead[0] else ahead[: self.depth])):
            if group in evict:
                break
            if group in present or group in load:
                continue
            beyond = -1 if group == needed else next_use[group]
            victims = self._victims(self.sizes[group] - free_bytes, evictable(beyond))
            if victims is None and group == needed:
                self._check_fits(needed, [group for group in present if group in in_use])
                return Decision(wait=tuple(g for g in reversed(ranked) if g in loading and g not in in_use))
            if victims is None:
                break
            free_bytes += self._bytes(victims) - self.sizes[group]
            evict += victims
            load.append(group)
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
        """Groups to evict for `missing_bytes`, or None if too few; spares those that a larger victim makes needless."""
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
