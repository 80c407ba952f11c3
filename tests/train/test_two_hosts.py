"""Four ranks on two hosts: two network namespaces that only a pair of virtual Ethernet devices joins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import two_hosts
from ranks import run_ranks
from sharing import train


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Name, device and address of two hosts."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command to make network namespaces with")
    mark = os.getpid() % 100_000
    found = [(f"tierstore-{mark}-{i}", f"ts{mark}-{i}", f"10.213.77.{i + 1}") for i in range(2)]
    made: list[str] = []
    try:
        try:
            for name, _, _ in found:
                ip("netns", "add", name)
                made.append(name)
            (first, a, _), (second, b, _) = found
            ip("link", "add", a, "netns", first, "type", "veth", "peer", "name", b, "netns", second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for name, device, address in found:
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield found
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_hybrid_sharding_over_two_hosts(hosts: list[tuple[str, str, str]], tmp_path: Path) -> None:
    devices = [device for _, device, _ in hosts]
    places = [(name, device) for name, device, _ in hosts]
    found = run_ranks(4, two_hosts.train_there, str(tmp_path / "two"), enter=partial(two_hosts.enter, places))
    assert [rank["devices"] & set(devices) for rank in found] == [{devices[rank // 2]} for rank in range(4)]
    for rank in found[1:]:
        assert all(np.array_equal(weight, rank["weights"][name]) for name, weight in found[0]["weights"].items())
    one_host = run_ranks(4, train, str(tmp_path / "one"), 2, nodes=2)
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in one_host]
