"""What a rank does on one of two hosts: it moves there, trains with hybrid sharding, and tells what it sees there."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import Any

from sharing import train

CLONE_NEWNET = 0x40000000


def enter(hosts: Sequence[tuple[str, str]], rank: int) -> None:
    """Move to the network namespace of this rank, two ranks to a host, and have gloo use its device.

    Args:
        hosts: namespace and device of each.
    """
    name, device = hosts[rank // 2]
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = device


def train_there(rank: int, ranks: int, directory: str) -> dict[str, Any]:
    """Some steps, and the network devices of this host."""
    told = train(rank, ranks, directory, 2, nodes=2)
    return told | {"devices": {name for _, name in socket.if_nameindex()}}
