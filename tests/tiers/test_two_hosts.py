"""A store and its users on two hosts, made of network namespaces; the wire between them is cut for a while."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from servers import has_redis, mooncake_server, redis_server, told_by, why_no_mooncake, worker

HERE, THERE = "10.213.77.1", "10.213.77.2"
WIRE = f"kvp{os.getpid() % 10**6}"  # the name of an interface has 15 characters


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    """What runs a command on the first and on the second host."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command: apt-get install iproute2")
    names = [f"{WIRE}a", f"{WIRE}b"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
        for name, address in zip(names, (HERE, THERE)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.parametrize("engine", ["redis", "mooncake"])
def test_two_hosts_share_a_store(engine: str, hosts: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """The one beside the store never notices; the other is in time with every answer, and has it back by itself."""
    here, there = hosts
    if engine == "redis" and not has_redis():
        pytest.skip("no redis-server: apt-get install redis-server")
    if engine == "mooncake" and (reason := why_no_mooncake()):
        pytest.skip(reason)
    if engine == "redis":
        store = redis_server(tmp_path, "--protected-mode", "no", host=HERE, within=here)
    else:
        store = mooncake_server(tmp_path, host=HERE, within=here)
    with store as server:
        near, far = (worker(server.address, 4.0, seed, host) for seed, host in enumerate(hosts))
        sleep(1)
        ip("-n", there[-1], "link", "set", there[-1], "down")
        sleep(1.5)
        ip("-n", there[-1], "link", "set", there[-1], "up")
        told = [told_by(process) for process in (near, far)]
    faults = [sum(count for what, count in one.items() if "timeout" in what or "unavailable" in what) for one in told]
    assert all(one["load ok"] > 20 for one in told) and not faults[0] and faults[1] >= 3, told
