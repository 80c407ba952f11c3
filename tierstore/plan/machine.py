"""The machines that a plan is for: nodes with GPUs, memory, disks and links.

Scope: the record of a node, and common nodes from their vendors' public data sheets.
Not here: measured rates (`plan/bandwidth.py`; a file of measured rates replaces those of the data sheet).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tierstore.errors import ConfigError, advice_on
from tierstore.plan.bandwidth import BandwidthTable

_GB, _TB, _GIB, _TIB = 1e9, 1e12, 2.0**30, 2.0**40
_REACHED = 0.5
"""Share of the data sheet's dense flop/s that training reaches: 0.4 to 0.6 in Narayanan et al. (2021), table 1."""
_BYTES_PER_UPDATE = 26
"""Memory traffic of one parameter's Adam update: gradient 2, weight 2 and state 10 are read; 12 are written."""


@dataclass(frozen=True, slots=True)
class Node:
    """One of the equal machines of a run, in bytes, seconds and flop; figures are of the whole node except where noted.

    Attributes:
        gpu_bytes: of each GPU.
        flop_per_s: of each GPU, as large matrix products reach it.
        links: between CPU memory and GPUs; each has the rates `h2d` and `d2h`, and GPUs share them evenly.
        disks: equal NVMe drives that make up `nvme_bytes` and the disk rates.
        peer_bytes_per_s: between the GPUs of the node, each GPU, one way.
        network_bytes_per_s: to other nodes, one way; 0 without a network.
        endurance_bytes: bytes that may be written to all drives together in their warranted life; 0 if unknown.
        source: of the figures.
    """

    name: str
    gpus: int
    gpu_bytes: float
    flop_per_s: float
    cpu_bytes: float
    nvme_bytes: float
    rates: BandwidthTable
    links: int
    disks: int = 1
    peer_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    endurance_bytes: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        counts = (self.gpus, self.links, self.disks)
        if min(counts) < 1:
            raise ConfigError(f"a node has at least one GPU, link and disk, not {counts}")
        if not (self.gpu_bytes > 0 and self.flop_per_s > 0 and self.cpu_bytes > 0 and self.nvme_bytes >= 0):
            raise ConfigError(f"a node needs memory and flop/s above 0: {self.name} cannot have {asdict(self)}")

    @property
    def computes_on_cpu(self) -> bool:
        """Whether the cores that update also compute; only on such a machine are layers timed."""
        return bool(self.rates.layers)

    def with_disks(self, disks: int) -> Node:
        """The same node with another number of the same drives."""
        factor = disks / self.disks
        return replace(
            self, disks=disks, nvme_bytes=self.nvme_bytes * factor, rates=self.rates.scaled(disk=factor),
            endurance_bytes=self.endurance_bytes * factor,
        )  # fmt: skip

    def with_gpus(self, gpus: int) -> Node:
        """The same node with another number of the same GPUs; links change in proportion, but one stays."""
        return replace(self, gpus=gpus, links=max(1, round(self.links * gpus / self.gpus)))


def rates_of(read: float, write: float, link: float, memory: float) -> BandwidthTable:
    """Rates of a data sheet: reads and writes of the disks share one budget, the update is bound by memory."""
    return BandwidthTable(
        read_bytes_per_s=read, write_bytes_per_s=write, shared_bytes_per_s=2 / (1 / read + 1 / write),
        h2d_bytes_per_s=link, d2h_bytes_per_s=link, memory_bytes_per_s=memory,
        adam_elements_per_s=memory / _BYTES_PER_UPDATE,
    )  # fmt: skip


# Samsung PM1733 3.84 TB, a U.2 drive of the class of these nodes: reads 7.0, writes 3.8 GB/s, 1 write a day in 5 years.
_U2 = {"nvme_bytes": 3.84 * _TB, "read": 7.0 * _GB, "write": 3.8 * _GB, "endurance": 3.84 * _TB * 365 * 5}
# Samsung 990 PRO 2 TB: 7.45 and 6.9 GB/s, 1200 TB written.
_M2 = {"nvme_bytes": 2 * _TB, "read": 7.45 * _GB, "write": 6.9 * _GB, "endurance": 1200 * _TB}


def _node(
    name: str, source: str, drive: Mapping[str, float], disks: int, *, gpus: int, gpu_bytes: float, peak: float,
    cpu_bytes: float, link: float, links: int, memory: float, peer: float, network: float,
) -> Node:  # fmt: skip
    return Node(
        name=name, gpus=gpus, gpu_bytes=gpu_bytes, flop_per_s=_REACHED * peak, cpu_bytes=cpu_bytes,
        nvme_bytes=disks * drive["nvme_bytes"],
        rates=rates_of(disks * drive["read"], disks * drive["write"], link, memory), links=links, disks=disks,
        peer_bytes_per_s=peer, network_bytes_per_s=network, endurance_bytes=disks * drive["endurance"], source=source,
    )  # fmt: skip


# Links are PCIe's: 16 lanes of the 3rd, 4th, 5th generation move 16, 32, 64 GB/s one way. NVLink one way: 300 GB/s on
# A100, 450 on H100 and H200. Dense bf16 flop/s: A100 312e12, H100 and H200 989e12, RTX 3090 71e12, RTX 4090 165e12.
# Memory: channels x 8 B x transfers per second of the CPUs' data sheets.
_NODES = (
    _node("dgx-a100", "NVIDIA DGX A100 640GB data sheet (2021); two GPUs share a PCIe switch", _U2, 8,
          gpus=8, gpu_bytes=80 * _GB, peak=312e12, cpu_bytes=2 * _TB, link=32 * _GB, links=4,
          memory=2 * 8 * 8 * 3.2e9, peer=300 * _GB, network=8 * 25 * _GB),
    _node("dgx-h100", "NVIDIA DGX H100 data sheet (2023)", _U2, 8,
          gpus=8, gpu_bytes=80 * _GB, peak=989e12, cpu_bytes=2 * _TB, link=64 * _GB, links=8,
          memory=2 * 8 * 8 * 4.8e9, peer=450 * _GB, network=8 * 50 * _GB),
    _node("dgx-h200", "NVIDIA DGX H200 data sheet (2024)", _U2, 8,
          gpus=8, gpu_bytes=141 * _GB, peak=989e12, cpu_bytes=2 * _TB, link=64 * _GB, links=8,
          memory=2 * 8 * 8 * 4.8e9, peer=450 * _GB, network=8 * 50 * _GB),
    _node("aws-p4d", "Amazon EC2 p4d.24xlarge: 8 x A100 40 GB, 8 x 1 TB, reads of 16 GB/s (writes assumed half)",
          {**_U2, "nvme_bytes": 1 * _TB, "read": 2.0 * _GB, "write": 1.0 * _GB, "endurance": 0.0}, 8,
          gpus=8, gpu_bytes=40 * _GB, peak=312e12, cpu_bytes=1152 * _GIB, link=32 * _GB, links=4,
          memory=2 * 6 * 8 * 2.933e9, peer=300 * _GB, network=50 * _GB),
    _node("aws-p5", "Amazon EC2 p5.48xlarge instance details: 8 x H100 80 GB, 8 x 3.84 TB, 3200 Gbit/s",
          {**_U2, "endurance": 0.0}, 8,
          gpus=8, gpu_bytes=80 * _GB, peak=989e12, cpu_bytes=2 * _TIB, link=64 * _GB, links=8,
          memory=2 * 8 * 8 * 4.8e9, peer=450 * _GB, network=400 * _GB),
    _node("rtx-4090", "NVIDIA Ada GPU architecture white paper (2022), 128 GB of DDR5-5600, 990 PRO", _M2, 1,
          gpus=1, gpu_bytes=24 * _GIB, peak=165e12, cpu_bytes=128 * _GB, link=32 * _GB, links=1,
          memory=2 * 8 * 5.6e9, peer=0.0, network=1.25 * _GB),
    _node("rtx-3090", "NVIDIA Ampere GA102 white paper (2020), 64 GB of DDR4-3200, 990 PRO", _M2, 1,
          gpus=1, gpu_bytes=24 * _GIB, peak=71e12, cpu_bytes=64 * _GB, link=32 * _GB, links=1,
          memory=2 * 8 * 3.2e9, peer=0.0, network=1.25 * _GB),
    _node("laptop", "RTX 4060 Laptop GPU (233 AI TOPS, an eighth of which is dense bf16), 32 GB of DDR5-5600, 990 PRO "
          "class of 1 TB", {"nvme_bytes": 1 * _TB, "read": 7.0 * _GB, "write": 5.0 * _GB, "endurance": 600 * _TB}, 1,
          gpus=1, gpu_bytes=8 * _GIB, peak=29e12, cpu_bytes=32 * _GB, link=16 * _GB, links=1,
          memory=2 * 8 * 5.6e9, peer=0.0, network=0.0),
)  # fmt: skip
NODES: Mapping[str, Node] = {node.name: node for node in _NODES}


def node_called(name: str) -> Node:
    """The node of `NODES` with this name.

    Raises:
        ConfigError: there is none.
    """
    if name in NODES:
        return NODES[name]
    advice = advice_on(name, NODES)
    raise ConfigError(f"no machine is called {name!r}: {advice}; any other is described by its --gpu-memory and so on")
