"""The arithmetic of a step: bytes per parameter, efficiency, overlap, codecs.

Scope: formulas on plain numbers (bytes, seconds, bytes/s). Traffic counts padded chunks, as the disks see them.
Not here: how often weights are fetched (`plan/simulate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tierstore.config import Tier
from tierstore.errors import ConfigError
from tierstore.plan.placement import Grid, Kind, Placement


@dataclass(frozen=True, slots=True)
class StepPattern:
    """The parts of a step that move bytes from and to the disks.

    Attributes:
        weight_loads: fetches per step of each group whose weights live on NVMe, as `simulate` counts them; None: two
            (forward and backward) for every group, trainable or frozen.
        commits_per_step: 1 / commit_every; 0 without a store. Bytes that live in CPU memory are written for commits
            only.
        micro_batches: backward passes per step; each except the first adds to the spilled gradient.
        kept_gradients: groups whose gradients of all passes are summed on the GPU.
        read_weights_with_state: the update reads weights that live on NVMe, unless all weights stay on the device.
    """

    weight_loads: tuple[int, ...] | None = None
    commits_per_step: float = 1.0
    micro_batches: int = 1
    kept_gradients: Collection[int] = ()
    read_weights_with_state: bool = False

    def arrivals(self, group: int) -> int:
        """How often per step a group's gradient comes to CPU memory."""
        return 1 if group in self.kept_gradients else self.micro_batches


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """NVMe bytes of one step by kind; an average if not every step commits."""

    read: Mapping[Kind, float]
    written: Mapping[Kind, float]
    trained_parameters: int

    @property
    def read_bytes(self) -> float:
        return sum(self.read.values())

    @property
    def written_bytes(self) -> float:
        return sum(self.written.values())

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes read and written per trained parameter; 0 if nothing is trained."""
        return (self.read_bytes + self.written_bytes) / self.trained_parameters if self.trained_parameters else 0.0


def step_traffic(placement: Placement, pattern: StepPattern = StepPattern()) -> StepTraffic:
    """NVMe traffic of a step in which every trainable group is updated.

    A bf16 model that is wholly on disk moves 26 B per parameter: weights are read 2 + 2 and written 2, state is read 10
    and written 10. With the weights in CPU memory it is 22 B; fp32 is 28 B, fp16 30 B. Spilled bf16 gradients add 4 B
    (2 B if an update in backward already waits for them, which is not counted here). Padding comes on top.
    """
    loads = pattern.weight_loads
    if loads is not None and len(loads) != len(placement.groups):
        raise ConfigError(f"weight_loads counts {len(loads)} groups, but {len(placement.groups)} are placed")
    read = dict.fromkeys(Kind, 0.0)
    written = dict.fromkeys(Kind, 0.0)
    reads_weights = pattern.read_weights_with_state and not placement.weights_stay
    for index, need in enumerate(placement.groups):
        grid = Grid(need, placement.chunk_elements)
        weight_bytes = grid.total(need.weight_bytes)
        on_nvme = placement.weights_home[index] is Tier.NVME
        if on_nvme:
            read[Kind.WEIGHTS] += weight_bytes * (2 if loads is None else loads[index])
        if not need.trainable:
            continue
        if on_nvme and reads_weights:
            read[Kind.WEIGHTS] += weight_bytes
        written[Kind.WEIGHTS] += weight_bytes * (1 if on_nvme else pattern.commits_per_step)
        resident_bytes = placement.state_bytes_in_memory(index)
        moved_bytes = grid.total(need.state_bytes) - resident_bytes
        read[Kind.STATE] += moved_bytes
        written[Kind.STATE] += moved_bytes + resident_bytes * pattern.commits_per_step
        passes_through = placement.streams_gradients and pattern.arrivals(index) == 1
        if placement.gradient_home[index] is Tier.NVME and not passes_through:
            read[Kind.GRADIENTS] += weight_bytes * pattern.arrivals(index)
            written[Kind.GRADIENTS] += weight_bytes * pattern.arrivals(index)
    trained = sum(need.elements for need in placement.groups if need.trainable)
    return StepTraffic(read, written, trained)


def phase_seconds(compute_s: float, links_s: Iterable[float] = (), sync_s: float = 0.0) -> float:
    """Time of a fully overlapped phase: `max(compute, each link's total) + sync`; `links_s` has one total per link."""
    return max(compute_s, *links_s, 0.0) + sync_s


def beside_s(one_s: float, other_s: float, slower: tuple[float, float]) -> float:
    """Time of two activities that begin together: both slowed until one is over, then the rest of the other alone.

    It is the longer time if neither slows the other, and their sum if each takes twice as long beside the other.

    Args:
        slower: how many times as long each takes beside the other, 1 or more.
    """
    one_beside_s, other_beside_s = one_s * slower[0], other_s * slower[1]
    if one_beside_s <= other_beside_s:
        return other_s + one_beside_s * (1 - 1 / slower[1])
    return one_s + other_beside_s * (1 - 1 / slower[0])


def efficiency(compute_s: float, seconds: float) -> float:
    """Share of a phase in which the device computes, `T_compute / T`."""
    return compute_s / seconds if seconds > 0 else 1.0


def overlap_speedup(compute_s: float, transfer_s: float, overlap: float) -> float:
    """Speed-up over compute and transfer in turn if a share `overlap` of the shorter is hidden: 1 for 0, at most 2."""
    serial_s = compute_s + transfer_s
    overlapped_s = serial_s - overlap * min(compute_s, transfer_s)
    return serial_s / overlapped_s if overlapped_s > 0 else 1.0


def overlap_of_shorter(compute_s: float, transfer_s: float, seconds: float) -> float:
    """Hidden time as a share of the shorter of compute and transfer: 1 if all that can be hidden is hidden."""
    shorter_s = min(compute_s, transfer_s)
    return (compute_s + transfer_s - seconds) / shorter_s if shorter_s > 0 else 1.0


def hidden_share_of_transfer(compute_s: float, transfer_s: float, seconds: float) -> float:
    """Hidden time as a share of the transfer: below 1 wherever transfers outlast compute."""
    return (compute_s + transfer_s - seconds) / transfer_s if transfer_s > 0 else 1.0


def codec_break_even_bytes_per_s(disk_bytes_per_s: float, ratio: float) -> float:
    """Codec rate, in raw bytes, above which a codec in series pays: `B / (1 - 1/R)`; infinite if it shrinks nothing.

    Args:
        ratio: raw bytes per stored byte.
    """
    return disk_bytes_per_s / (1 - 1 / ratio) if ratio > 1 else math.inf


def pays_below_bytes_per_s(ratio: float, codec_bytes_per_s: float) -> float:
    """The rate of a disk below which a codec in series pays, `C (1 - 1/R)`; 0 if it shrinks nothing."""
    return codec_bytes_per_s * (1 - 1 / ratio) if ratio > 1 else 0.0


def codec_rate_bytes_per_s(
    disk_bytes_per_s: float, ratio: float, codec_bytes_per_s: float, *, overlapped: bool
) -> float:
    """Raw bytes per second through codec and disk: the slower of the two if overlapped, else one after the other."""
    stored_bytes_per_s = disk_bytes_per_s * ratio
    if overlapped:
        return min(codec_bytes_per_s, stored_bytes_per_s)
    return 1 / (1 / codec_bytes_per_s + 1 / stored_bytes_per_s)


def codec_pays(disk_bytes_per_s: float, ratio: float, codec_bytes_per_s: float, *, overlapped: bool) -> bool:
    """Whether a codec beats the raw disk."""
    rate = codec_rate_bytes_per_s(disk_bytes_per_s, ratio, codec_bytes_per_s, overlapped=overlapped)
    return rate > disk_bytes_per_s
