"""The best few plans again, by the simulator: each as it would run, in the graphs that the passes schedule for it.

The closed forms of `costs.py` know what hides behind what only in the large; the simulator sees every start and wait.
A plan's graphs are made of the small captures of a folded model, with two numbers of layers, and the time of all layers
follows from the two. Simulated is one rank whose peers are always ready, the first and the last; the slower counts.
Of layers of which a part recomputes, none and all are simulated, and the time lies between.
"""

from __future__ import annotations

import dataclasses

import torch

from .cluster import Cluster
from .fold import Folded
from .pipeline import run_passes
from .plan import Plan
from .program import Program
from .rates import Link, Rates
from .simulate import simulate, work_of


def rates_of(cluster: Cluster) -> Rates:
    """What a cluster's devices and links do, as the simulator takes it."""
    device = cluster.device
    return Rates(
        flops={getattr(torch, dtype): peak * device.linear for dtype, peak in device.flops.items()},
        memory=device.memory_bandwidth,
        launch=device.operator,
        inside=Link(cluster.inside.bandwidth, cluster.inside.latency),
        between=Link(cluster.across.bandwidth, cluster.across.latency),
        node=cluster.devices,
    )


def simulated_seconds(folded: Folded, plan: Plan, rates: Rates) -> float:
    """Seconds of a step of the whole model."""
    part = plan.recompute_layers
    if plan.recompute != "none" and 0 < part < 1:
        ends = [dataclasses.replace(plan, recompute_layers=float(each)) for each in (0, 1)]
        none, most = (simulated_seconds(folded, each, rates) for each in ends)
        return none + part * (most - none)
    small = _of_capture(folded.program, plan, rates)
    if folded.larger is None:
        return small
    return small + folded.times * (_of_capture(folded.larger, plan, rates) - small)


def _of_capture(captured: Program, plan: Plan, rates: Rates) -> float:
    ranks = dict.fromkeys((0, plan.world - 1))
    return max(_of_rank(run_passes(captured, plan, rank), rank, rates) for rank in ranks)


def _of_rank(program: Program, rank: int, rates: Rates) -> float:
    """One rank's step, its micro-batches one after another."""
    parts = program.micro.plan.microbatches if program.micro else 1
    steps = [program.first or program.forward, program.backward]
    if parts > 1:
        middle = [program.inner or program.backward, program.forward] * (parts - 1)
        steps = [steps[0], *middle, program.last or program.backward]
    graphs = [each.graph for each in steps if each is not None]
    return simulate([work_of(graphs, rank, rates)], alone=rank).seconds
