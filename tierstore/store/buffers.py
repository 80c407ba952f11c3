"""How `cpu_memory` is shared between entries at home there and the buffers of transfers.

Scope: the arithmetic. Not here: the memory (`io/memory.py`).
Owner: none; plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.alignment import ALIGNMENT
from tierstore.config import Codec, format_size
from tierstore.errors import BudgetError

DEFAULT_CHUNK_BYTES = 4 * 2**20
LEAST_BUFFERS = 2
"""One for transfers that somebody waits for, one for prefetch."""


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """An eighth of the memory is for buffers, but at most two buffers per thread and at least two in all.

    Attributes:
        unit_bytes: one buffer, and the scratch memory of its codec.
    """

    cpu_bytes: int
    chunk_bytes: int
    threads: int
    unit_bytes: int

    @property
    def buffers(self) -> int:
        return self._buffers(self.cpu_bytes)

    @property
    def demand_bytes(self) -> int:
        return (self.buffers - self.buffers // 2) * self.chunk_bytes

    @property
    def prefetch_bytes(self) -> int:
        return self.buffers // 2 * self.chunk_bytes

    @property
    def scratch_bytes(self) -> int:
        return self.buffers * (self.unit_bytes - self.chunk_bytes)

    @property
    def resident_bytes(self) -> int:
        return self.cpu_bytes - self.buffers * self.unit_bytes

    def smallest_bytes(self, resident_bytes: int) -> int:
        """The smallest `cpu_memory` in which `resident_bytes` can be at home."""
        for buffers in range(LEAST_BUFFERS, self._most):
            whole = resident_bytes + buffers * self.unit_bytes
            if self._buffers(whole) <= buffers:
                return whole
        return resident_bytes + self._most * self.unit_bytes

    @property
    def _most(self) -> int:
        return max(LEAST_BUFFERS, 2 * self.threads)

    def _buffers(self, cpu_bytes: int) -> int:
        return min(max(cpu_bytes // 8 // self.unit_bytes, LEAST_BUFFERS), self._most)


def plan_buffers(cpu_bytes: int, chunk_bytes: int, threads: int, codec: Codec) -> BufferPlan:
    """Share out the memory.

    Raises:
        BudgetError: with the smallest `cpu_memory` that fits.
    """
    unit = chunk_bytes if codec is Codec.NONE else 2 * chunk_bytes
    plan = BufferPlan(cpu_bytes // ALIGNMENT * ALIGNMENT, chunk_bytes, threads, unit)
    if plan.resident_bytes < 0:
        raise BudgetError(
            f"cpu_memory: {format_size(cpu_bytes)} does not hold {plan.buffers} buffers of {format_size(unit)} each; "
            f"the smallest cpu_memory that fits is {plan.smallest_bytes(0)} B"
        )
    return plan
