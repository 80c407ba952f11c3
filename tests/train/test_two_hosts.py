"""Four ranks on two hosts: two network namespaces that only a pair of virtual Ethernet devices joins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_ranks
from sharing import train

SCRIPT = Path(__file__).parent / "two_hosts.py"
WAIT_S = 120.0


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
    master = hosts[0][2]
    started = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--nproc-per-node", "2", "--node-rank", str(index), "--master-addr", master),
                *("--master-port", "29400", str(SCRIPT), str(tmp_path)),
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, (name, device, _) in enumerate(hosts)
    ]
    try:
        told = [process.communicate(timeout=WAIT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in ranks] == ["0", "0", "1", "1"]
    assert len({rank["weights"] for rank in ranks}) == 1
    one_host = run_ranks(4, train, str(tmp_path / "one"), 3, nodes=2)
    assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in one_host]
