"""Schedules of random graphs: legal, equal across ranks, within the memory of two layers, and never slower."""

from __future__ import annotations

import pytest
from torch import fx

from evocompile.collectives import Event, is_start, is_wait
from evocompile.passes.ahead import layer_of, purpose
from evocompile.passes.overlap import schedule
from evocompile.passes.verify import agree
from evocompile.rates import transfer_event
from evocompile.simulate import simulate, work_of
from tests.property.scheduled import UNITS, RankGraph, random_graphs


def events(graph: fx.Graph) -> list[Event]:
    found: list[Event] = []
    position: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if is_start(node):
            position[node] = len(found)
            found.append(transfer_event(node))
        elif is_wait(node):
            found.append(Event("wait", node.name, start=position[node.args[0]]))
    return found


def by_group(graph: fx.Graph) -> dict[str, list[Event]]:
    groups: dict[str, list[Event]] = {}
    for event in events(graph):
        if event.kind != "wait":
            groups.setdefault(event.group, []).append(event)
    return groups


def held(graph: fx.Graph) -> int:
    """Bytes of gathered weights that are there at once, from their start to their last use, at most."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for node in nodes:
        if is_start(node) and purpose(node) == "params":
            (wait,) = node.users
            size = node.meta["val"].numel()
            change[position[node]] += size
            change[max(position[user] for user in wait.users)] -= size
    total, most = 0, 0
    for each in change:
        total += each
        most = max(most, total)
    return most


def largest_layer(each: RankGraph) -> int:
    sizes: dict[str, int] = {}
    for node, why in each.whys.items():
        if purpose(node) == "params":
            sizes[layer_of(why)] = sizes.get(layer_of(why), 0) + node.meta["val"].numel()
    return max(sizes.values(), default=0)


def seconds(graphs: list[RankGraph]) -> float:
    return simulate([work_of([each.graph], rank, UNITS) for rank, each in enumerate(graphs)]).seconds


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_graphs(hundred: int) -> None:
    """Every tenth under "all" besides, which may be slower, and hold everything."""
    gained = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        for everything in (False, True)[: 1 + (seed % 10 == 0)]:
            graphs = random_graphs(seed, 2 + seed % 3)
            before = [(set(each.graph.nodes), by_group(each.graph)) for each in graphs]
            slow = seconds(graphs)
            for each, (nodes, groups) in zip(graphs, before, strict=True):
                schedule(each.graph, each.whys, everything=everything, spread=True)
                each.graph.lint()
                assert set(each.graph.nodes) == nodes
                assert by_group(each.graph) == groups
                assert everything or held(each.graph) <= 2 * largest_layer(each)
            agree([events(each.graph) for each in graphs])
            fast = seconds(graphs)
            assert everything or fast <= slow * (1 + 1e-9), f"seed {seed}: {slow} s as it came, {fast} s as scheduled"
            gained += not everything and fast < slow
    assert gained > 50
