"""What a person calls the rates of a machine, and which of them varied while they were measured.

Scope: names, one sentence. Not here: tables (`apps/probe_report.py`), the use of rates (`plan/`).
"""

from __future__ import annotations

from tierstore.plan.bandwidth import BandwidthTable, Rate

_SYNC = "sync_bytes_per_s"
NAMES = (
    ("read_bytes_per_s", "disk, reads", "GB/s"),
    ("write_bytes_per_s", "disk, writes", "GB/s"),
    ("shared_bytes_per_s", "disk, both at once, sum", "GB/s"),
    (_SYNC, "disk, sync of writes", "GB/s"),
    ("h2d_bytes_per_s", "memory to device", "GB/s"),
    ("d2h_bytes_per_s", "device to memory", "GB/s"),
    ("h2d_pageable_bytes_per_s", "memory to device, not pinned", "GB/s"),
    ("d2h_pageable_bytes_per_s", "device to memory, not pinned", "GB/s"),
    ("memory_bytes_per_s", "copies within memory", "GB/s"),
    ("checksum_bytes_per_s", "checksum, one thread", "GB/s"),
    ("adam_elements_per_s", "Adam, bf16 weights", "Gparam/s"),
    ("adam_fp32_elements_per_s", "Adam, fp32 weights", "Gparam/s"),
    ("norm_elements_per_s", "norms of gradients", "Gparam/s"),
    ("matmul_flop_per_s", "matrix products", "Gflop/s"),
)
_WIDE = 0.15  # of the median: quartiles further apart are reported


def uncertain(table: BandwidthTable) -> list[str]:
    """A sentence about rates that varied while they were measured, if some did."""
    spreads = spreads_of(table)
    wide = [label for name, label, _ in NAMES if name in spreads and spreads[name].spread > _WIDE]
    told = f"Quartiles more than {_WIDE:.0%} of the median apart, so measure again: {'; '.join(wide)}."
    return [told] if wide else []


def spreads_of(table: BandwidthTable) -> dict[str, Rate]:
    """The measured spreads by name; without that of syncs, if a sync takes no time worth counting."""
    return {entry.name: entry.rate for entry in table.spreads if entry.name != _SYNC or table.caches_writes}
