"""What every rank of two hosts runs: hybrid sharding over the network that joins them, and what came of it."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from sharing import train
from torch import distributed

NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET of <sched.h>
PORT = 29400


def enter(namespace: str) -> str:
    """Moves this thread, and what it starts from now on, to another host; names the one that it is on then."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    return os.readlink("/proc/thread-self/ns/net")


def train_on_hosts(rank: int, ranks: int, hosts: list[tuple[str, str, str]], store: str) -> dict[str, Any]:
    """Half of the ranks are on each host, given by name, device and address; they meet on a port of the first."""
    name, device, _ = hosts[rank // (ranks // len(hosts))]
    distributed.destroy_process_group()  # it has met in a file
    host = enter(name)
    os.environ["GLOO_SOCKET_IFNAME"] = device
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{hosts[0][2]}:{PORT}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    return train(rank, ranks, store, 3, nodes=len(hosts)) | {"host": host}
