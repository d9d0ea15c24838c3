"""rematerialize: decide what the backward saves and what it computes again, and cut the joint graph in two.

Saved is what the forward computes anyway and the backward reads, except what costs nothing to have again: views of
saved values, values made from no data (positions, constants), and parameters, which are gathered again from the
shards so that no rank ever keeps a whole layer between forward and backward. What layers and checkpoints compute again
stands in the joint graph already, as copies that only backward needs (`recompute`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from evocompile.collectives import exchange_start, exchange_wait, is_start, is_wait
from evocompile.layout import Layout
from evocompile.program import Collective, InputKind, OutputKind, Program, output_values, placeholders
from evocompile.torch_private import graph_module

from .dependence import ancestors
from .rules.pointwise import FACTORIES

aten = torch.ops.aten
_VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.detach.default,
}


def rematerialize(program: Program) -> Program:
    """`program.forward` and, where there are gradients, `program.backward`, from the joint graph."""
    assert program.joint is not None
    joint = program.joint
    returned = output_values(joint.graph)
    is_gradient = [output.kind is OutputKind.GRADIENT for output in program.outputs]
    results = [node for node, gradient in zip(returned, is_gradient, strict=True) if not gradient]
    gradients = [node for node, gradient in zip(returned, is_gradient, strict=True) if gradient]
    tangents = {
        node
        for node, each in zip(placeholders(joint.graph), program.inputs, strict=True)
        if each.kind is InputKind.TANGENT
    }
    in_forward = ancestors(joint.graph, [*results, *_effects(joint.graph, tangents)]) | (
        set(placeholders(joint.graph)) - tangents
    )
    again = _recomputable(joint.graph, in_forward)
    in_backward = _needed(joint.graph, gradients, in_forward, again)
    saved = [
        node
        for node in joint.graph.nodes
        if node in in_forward and node not in again and any(user in in_backward for user in node.users)
    ] + [node for node in gradients if isinstance(node, fx.Node) and node in in_forward and node not in again]
    saved = list(dict.fromkeys(saved))
    has_backward = bool(gradients)
    collectives: dict[fx.Node, Collective] = {}
    layouts: dict[fx.Node, Layout] = {}
    forward = _extract(
        program, in_forward, _inputs(joint.graph, tangents, False), [*results, *saved], set(), collectives, layouts
    )
    backward = None
    if has_backward:
        incoming = [*saved, *_inputs(joint.graph, tangents, True)]
        backward = _extract(program, in_backward, incoming, gradients, again, collectives, layouts)
    return replace(program, joint=None, forward=forward, backward=backward, collectives=collectives, layouts=layouts)


def _inputs(graph: fx.Graph, tangents: set[fx.Node], want_tangents: bool) -> list[fx.Node]:
    return [node for node in placeholders(graph) if (node in tangents) == want_tangents]


def _effects(graph: fx.Graph, tangents: set[fx.Node]) -> list[fx.Node]:
    """Forward nodes that are run for their effect: assertions, and exchanges, of which another rank may be in need.

    The backward fetches keys and values again, which depends on no tangent: only its communicator tells.
    """
    of_backward = set(tangents)
    for node in graph.nodes:
        if _is_exchange(node, ".backward:") or any(each in of_backward for each in node.all_input_nodes):
            of_backward.add(node)
    return [
        node
        for node in graph.nodes
        if node not in of_backward and (node.meta.get("val", node) is None or _is_exchange(node))
    ]


def _is_exchange(node: fx.Node, suffix: str = "") -> bool:
    """The start or the wait of a point-to-point exchange, on a communicator whose purpose ends in `suffix`."""
    start = node.args[0] if node.target is exchange_wait else node
    return isinstance(start, fx.Node) and start.target is exchange_start and suffix in str(start.args[-1])


def _recomputable(graph: fx.Graph, in_forward: set[fx.Node]) -> set[fx.Node]:
    """Forward nodes that the backward has again for free, or, for gathered parameters, must have again."""
    again: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in in_forward or node.op == "placeholder":
            continue
        if (
            node.op == "get_attr"
            or node.target in FACTORIES
            or node.target in _VIEWS
            or _gathers_parameter(node)
            or (is_wait(node) and node.args[0] in again)
            or (node.target is aten.constant_pad_nd.default and any(_gathers_parameter(user) for user in node.users))
        ):
            again.add(node)
    return again


def _gathers_parameter(node: fx.Node) -> bool:
    return is_start(node) and str(node.args[-1]).startswith("params:")


def _needed(
    graph: fx.Graph, gradients: list[fx.Node | None], in_forward: set[fx.Node], again: set[fx.Node]
) -> set[fx.Node]:
    """The nodes that the backward graph computes."""
    needed = {node for node in gradients if isinstance(node, fx.Node) and (node not in in_forward or node in again)}
    for node in reversed(graph.nodes):
        if _is_exchange(node) and node not in in_forward:
            needed.add(node)
        if node in needed:
            needed.update(each for each in node.all_input_nodes if each not in in_forward or each in again)
    return {node for node in needed if node.op != "placeholder"}


def _extract(
    program: Program,
    nodes: set[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node | None],
    again: set[fx.Node],
    collectives: dict[fx.Node, Collective],
    layouts: dict[fx.Node, Layout],
) -> fx.GraphModule:
    assert program.joint is not None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.create_node("placeholder", node.name, (), {}, node.name)
        copies[node].meta = dict(node.meta)
        if node in program.layouts:
            layouts[copies[node]] = program.layouts[node]
    for node in _just_in_time(program.joint.graph, nodes - copies.keys(), again):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in program.layouts:
            layouts[copies[node]] = program.layouts[node]
        if node in program.collectives:
            collective = program.collectives[node]
            if node in again:
                collective = replace(collective, why=f"{collective.why}, again for backward")
            collectives[copies[node]] = collective
    graph.output([copies[node] if isinstance(node, fx.Node) else None for node in outputs])
    return graph_module(program.joint, graph)


def _just_in_time(graph: fx.Graph, nodes: set[fx.Node], again: set[fx.Node]) -> Iterator[fx.Node]:
    """`nodes` in the graph's order, but those that are had again right before their first use: a gathered layer is
    there when its backward comes, not before."""
    done: set[fx.Node] = set()
    wanted = [node for node in graph.nodes if node in nodes and node not in again]
    (output,) = graph.find_nodes(op="output")
    for node in [*wanted, *(each for each in output.all_input_nodes if each in nodes)]:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [each for each in top.all_input_nodes if each in nodes and each not in done]
            if missing:
                stack.extend(reversed(missing))
            else:
                stack.pop()
                if top not in done:
                    done.add(top)
                    yield top
