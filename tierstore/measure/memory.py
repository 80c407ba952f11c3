"""Memory to measure with, as the engine has it: from an arena, with the loop thread that the arena belongs to.

Not here: what is measured in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierstore.device.streams import ComputeDevice
from tierstore.io.memory import Arena, Bytes
from tierstore.io.runtime import Runtime

_TIMEOUT_S = 86400.0  # measuring a slow disk may take this long


@contextlib.contextmanager
def arena_memory(nbytes: int, name: str, device: ComputeDevice | None = None) -> Iterator[tuple[Runtime, Bytes]]:
    """A runtime of this name, and so many bytes, which are given back at the end.

    Args:
        device: the device for which the memory is pinned; None: it is not pinned.
    """
    arena = Arena(nbytes) if device is None else Arena(nbytes, device.pin, device.unpin)
    with contextlib.closing(arena), Runtime(name, timeout_s=_TIMEOUT_S) as runtime:
        lease = runtime.call(arena.pool(name, arena.capacity_bytes).reserve, arena.capacity_bytes)

        async def free() -> None:
            lease.free()

        try:
            yield runtime, lease.array
        finally:
            runtime.call(free, raises_kept=False)
