"""Network namespaces on one bridge, each behind a link whose rate can be set: a cluster's network on one machine.

Needs root and iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

BITS = {"gbit": 1e9, "mbit": 1e6}


@dataclass(frozen=True)
class Network:
    """names: of the namespaces, one for each rank, in which the device is eth0. ends: of their links on the bridge."""

    names: Sequence[str]
    ends: Sequence[str]

    def shape(self, rate: str | None) -> None:
        """Limit every link to this rate both ways, as tc writes it; None: no limit. Also while it is in use."""
        for name, end in zip(self.names, self.ends, strict=True):
            for tc, device in (("tc", end), (f"tc -n {name}", "eth0")):
                subprocess.run(f"{tc} qdisc del dev {device} root".split(), capture_output=True)  # there may be none
                if rate is not None:  # a larger burst would be credit that no link gives
                    _run(f"{tc} qdisc add dev {device} root tbf rate {rate} burst 64kb latency 50ms")

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command, in the rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank], *command]

    def environment(self, rank: int, port: int) -> dict[str, str]:
        """By which torch.distributed meets over this network."""
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(self.names), "MASTER_PORT": port}
        return {name: str(value) for name, value in places.items()} | {
            "MASTER_ADDR": "10.77.0.1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }


@contextmanager
def network(world: int) -> Iterator[Network]:
    """Namespaces of `world` ranks, with links that are not limited yet."""
    tag = f"evo{os.getpid() % 10000}"
    found = Network([f"{tag}n{rank}" for rank in range(world)], [f"{tag}v{rank}" for rank in range(world)])
    try:
        _run(f"ip link add {tag}b type bridge")
        _run(f"ip link set {tag}b up")
        for rank, (name, end) in enumerate(zip(found.names, found.ends, strict=True)):
            _run(f"ip netns add {name}")
            _run(f"ip link add {end} type veth peer name eth0 netns {name}")
            _run(f"ip link set {end} master {tag}b up")
            _run(f"ip -n {name} addr add 10.77.0.{rank + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
        yield found
    finally:
        for name in found.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{tag}b"], capture_output=True)


def _run(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"{command.split()[0]!r} is missing: install iproute2") from None
    if done.returncode:
        raise SystemExit(f"the network cannot be shaped here (root is needed): {command}: {done.stderr.strip()}")
