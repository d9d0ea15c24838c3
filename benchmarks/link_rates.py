"""Rates of the link and the machine that a benchmark's ranks run on, measured among them: what the simulator is given.

A line through the times of a small and a large message for each kind of communication, as each has a way
of its own on gloo; a copy for the memory; a small operator for what any one costs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from evocompile.collectives import Event, reduce_scatter_on_gloo, reduce_scatter_wait, sent_bytes
from evocompile.rates import Link, Rates

SIZES = 1 << 12, 1 << 21  # bytes of a message


def measured(rates: Rates, repeats: int = 5) -> Rates:
    """`rates` with everything but the speed of products as measured. Every rank calls it, and gets the same."""
    links = {kind: _link(kind, repeats) for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")}
    links["exchange"] = _link("exchange", repeats)
    block, one = torch.zeros(1 << 22), torch.zeros(())
    copies = _median(block.clone, repeats)
    launch = _median(lambda: [one + one for _ in range(1000)], repeats) / 1000
    memory = 2 * block.nbytes / copies
    return replace(rates, links=links, memory=memory, launch=launch, _seconds={})


def _link(kind: str, repeats: int) -> Link:
    others = dist.get_world_size() - 1
    sent, times = [], []
    for size in SIZES:
        run, event = _message(kind, size)
        sent.append(sent_bytes(event, dist.get_rank()))
        times.append(_median(run, repeats))
    per_byte = max(times[1] - times[0], 1e-12) / (sent[1] - sent[0])
    messages = {"exchange": 1, "all_reduce": 2 * others}.get(kind, others)
    return Link(1 / per_byte, max(times[0] - per_byte * sent[0], 1e-9) / messages)


def _message(kind: str, size: int) -> tuple[Callable[[], object], Event]:
    """A communication of `size` bytes to each other rank, and what the simulator takes it for."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = "all:" + ",".join(map(str, range(world)))
    part, whole = torch.zeros(size // 4), torch.zeros(world * size // 4)
    there, back = (rank + 1) % world, (rank - 1) % world
    match kind:
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part), Event(kind, kind, group, size=part.nbytes)
        case "reduce_scatter":
            assert dist.group.WORLD is not None
            name = dist.group.WORLD.group_name
            event = Event(kind, kind, group, size=whole.nbytes)
            return lambda: reduce_scatter_wait(reduce_scatter_on_gloo(whole, "sum", world, name)), event
        case "all_reduce":
            return lambda: dist.all_reduce(whole), Event(kind, kind, group, size=whole.nbytes)
        case "all_to_all":
            received = torch.empty_like(whole)
            peers = tuple((peer, part.nbytes) for peer in range(world))
            return lambda: dist.all_to_all_single(received, whole), Event(kind, kind, group, sent=peers)
    received = torch.empty_like(part)
    operations = [dist.P2POp(dist.isend, part, there), dist.P2POp(dist.irecv, received, back)]

    def exchange() -> None:
        for each in dist.batch_isend_irecv(operations):
            each.wait()

    return exchange, Event(kind, kind, group, sent=((there, part.nbytes),))


def _median(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one run at the slowest rank."""
    taken = []
    for number in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        run()
        slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if number:
            taken.append(float(slowest))
    return statistics.median(taken)
