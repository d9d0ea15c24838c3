"""What depends on what in a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from evocompile.program import OutputKind, Program, output_values


def ancestors(graph: fx.Graph, roots: Iterable[fx.Node | None]) -> set[fx.Node]:
    """Everything that the roots depend on, and they themselves.

    And all results of an operator with several of which one is needed: only tensors can be saved, not tuples of them.
    """
    needed = {node for node in roots if isinstance(node, fx.Node)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    needed.update(node for node in graph.nodes if node.target is operator.getitem and node.args[0] in needed)
    return needed


def dependents(graph: fx.Graph, sources: set[fx.Node]) -> set[fx.Node]:
    """Everything that depends on the sources, and they themselves."""
    found = set(sources)
    for node in graph.nodes:
        if any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def forward_nodes(program: Program) -> set[fx.Node]:
    """What the outputs of a joint graph, gradients left out, depend on."""
    assert program.joint is not None
    returned = zip(output_values(program.joint.graph), program.outputs, strict=True)
    return ancestors(program.joint.graph, [node for node, each in returned if each.kind is not OutputKind.GRADIENT])
