"""calibrate: a `Cluster` measured on the ranks that run: links from collectives, products and attention from a device.

Bandwidth and latency of a link come from a line through the times of all-gathers of several sizes, within the ranks of
a node and, where there are several nodes, among the first ranks of each. What is measured is told to all ranks by rank
0, so every rank gets the same cluster; with `path` it is kept there, and read the next time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from .cluster import GB, Cluster, Device, Link
from .errors import PlanError
from .meeting import group_device


def calibrate(
    path: str | Path | None = None,
    *,
    sizes: Sequence[int] = (1 << 14, 1 << 18, 1 << 22, 1 << 25),
    seconds: float = 0.3,
) -> Cluster:
    """The cluster of the default process group, measured. Every rank calls it.

    path:    of a JSON file in which the cluster is kept: read if rank 0 finds it there, and of as many devices.
    sizes:   bytes of the collectives that are timed. seconds: spent on each measurement, about.
    Raises PlanError without a process group, and where nodes run different numbers of ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError("calibrate() needs a process group: call it under torchrun, after init_process_group()")
    known: list[Cluster | None] = [_kept(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(known, src=0)
    if known[0] is not None:
        return known[0]
    cluster: list[Cluster | None] = [_measured(sizes, seconds)]
    dist.broadcast_object_list(cluster, src=0)
    assert cluster[0] is not None
    if path is not None and dist.get_rank() == 0:
        Path(path).write_text(cluster[0].to_json())
    return cluster[0]


def _kept(path: str | Path | None) -> Cluster | None:
    if path is None or not Path(path).exists():
        return None
    cluster = Cluster.from_file(path)
    return cluster if cluster.world == dist.get_world_size() else None


def _measured(sizes: Sequence[int], seconds: float) -> Cluster:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    nodes = [[rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)]
    if len({len(ranks) for ranks in nodes}) > 1:
        raise PlanError(f"calibrate() needs equal nodes; these run {', '.join(str(len(each)) for each in nodes)} ranks")
    device = group_device()
    inside = _link(nodes, device, sizes, seconds)
    across = _link([[ranks[0] for ranks in nodes]], device, sizes, seconds) if len(nodes) > 1 else inside
    if len(nodes) > 1:  # one rank had all the ways out of its node
        across = Link(across.bandwidth / len(nodes[0]), across.latency)
    return Cluster("measured", len(nodes), len(nodes[0]), _device(device, seconds), inside, across)


def _link(groups: list[list[int]], device: torch.device, sizes: Sequence[int], seconds: float) -> Link:
    """Of all-gathers within each group at once; the slowest rank counts."""
    made = [dist.new_group(ranks) for ranks in groups]  # every rank makes all of them
    own = next((i for i, ranks in enumerate(groups) if dist.get_rank() in ranks), None)
    count = len(groups[0])
    times = []
    for size in sizes:
        taken = 0.0
        if own is not None and count > 1:
            part = torch.zeros(size // count // 4 + 1, device=device)
            whole = part.new_empty(part.numel() * count)
            taken = _seconds(lambda w=whole, p=part: dist.all_gather_into_tensor(w, p, group=made[own]), device, 8)  # type: ignore[misc]
        times.append(_slowest(taken))
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    if count == 1:
        return Link(100 * GB, 1e-6)  # nothing is sent
    sent = [size * (count - 1) / count for size in sizes]
    return _line(sent, times, count - 1)


def _line(sent: Sequence[float], times: Sequence[float], hops: int) -> Link:
    """Latency from the smallest message, bandwidth from what the largest takes beyond it."""
    per_byte = max(times[-1] - times[0], 1e-12) / (sent[-1] - sent[0])
    return Link(1 / per_byte, max(times[0] - per_byte * sent[0], 1e-9) / hops)


def _slowest(taken: float) -> float:
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, taken)
    return max(everyone)


def _device(device: torch.device, seconds: float) -> Device:
    """Rates by dtype; the peak is the best product that was seen, as what counts is time."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        n = 4096 if device.type == "cuda" else 256
        a = torch.randn(n, n, device=device, dtype=dtype)
        rates[str(dtype).removeprefix("torch.")] = 2 * n**3 / _seconds(lambda a=a: a @ a, device, _repeats(seconds))  # type: ignore[misc]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    n, heads = (4096, 16) if device.type == "cuda" else (256, 2)
    q = torch.randn(1, heads, n, 64, device=device, dtype=dtype)
    attends = _seconds(lambda: F.scaled_dot_product_attention(q, q, q), device, _repeats(seconds))
    attention = 4 * heads * n * n * 64 / attends / rates[str(dtype).removeprefix("torch.")]
    block = torch.zeros(1 << 26 if device.type == "cuda" else 1 << 22, device=device)
    copied = 8 * block.numel() / _seconds(lambda: block.clone(), device, _repeats(seconds))
    return Device(rates, _memory(device), copied, 1.0, min(attention, 1.0))


def _repeats(seconds: float) -> int:
    return max(2, round(30 * seconds))


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one run, the median."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return sorted(taken[1:])[times // 2]  # the first one warms up


def _memory(device: torch.device) -> float:
    if device.type == "cuda":
        return 0.96 * torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / dist.get_world_size()
