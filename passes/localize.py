"""localize: rewrite the joint graph to this rank's shapes, and insert the collectives that the annotations ask for.

A new graph is built in the order of the old one. Each node appears once for every version that `annotate` found to
be needed; the operators are the same, with sizes replaced where an operator carries them (`emit.py`), and versions
that are conversions become indexing, an all-gather or an all-reduce (`convert.py`).
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from evocompile.collectives import is_start
from evocompile.program import Annotations, Compute, Program, Region, Version, output_values

from .annotate import output_table
from .build import Builder
from .convert import convert
from .emit import emit
from .row_regions import LOOKS, row_operand, seen_through
from .rules.base import operands_of
from .rules.solve import canonical


def localize(program: Program) -> Program:
    """The program at this rank's shapes. Gradients leave as sums still pending (see their layouts)."""
    assert program.joint is not None and program.annotations is not None
    annotations = program.annotations
    builder = Builder(program)
    made: dict[tuple[fx.Node, Version], fx.Node] = {}
    parts: dict[fx.Node, list[fx.Node]] = {}
    for node in program.joint.graph.nodes:
        if node.op == "output":
            continue
        builder.source = node
        for version, how in annotations.versions[node].items():
            before = next(iter(reversed(builder.graph.nodes)), None)
            if isinstance(how, Compute):
                made[node, version] = _compute(builder, node, version, how, annotations, made)
            else:
                made[node, version] = convert(builder, made[node, how.source], how.source[0], version[0])
            if program.regions:
                own = _without_communication(builder.graph, before, isinstance(how, Compute))
                parts.setdefault(node, []).extend(own)
        if node.op == "placeholder" and not annotations.versions[node]:
            builder.copy(node)  # an unused input keeps its place
    builder.source = None
    returned = [
        made[node, (canonical(layout),)] if layout is not None else None
        for node, layout in zip(output_values(program.joint.graph), annotations.outputs, strict=True)
    ]
    builder.graph.output(returned)
    return replace(
        program,
        joint=builder.graph_module(),
        annotations=None,
        layouts=builder.layouts,
        collectives=builder.collectives,
        outputs=output_table(program, annotations.outputs),
        regions=tuple(_local(each, made, parts) for each in program.regions),
    )


def _without_communication(graph: fx.Graph, before: fx.Node | None, computes: bool) -> list[fx.Node]:
    """What was made behind `before`: of an operator up to where it communicates, of a conversion that does, nothing."""
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node is before:
            break
        found.append(node)
    found.reverse()
    ends = next((i for i, node in enumerate(found) if is_start(node)), len(found))
    return found[:ends] if computes or ends == len(found) else []


def _local(region: Region, made: dict[tuple[fx.Node, Version], fx.Node], parts: dict[fx.Node, list[fx.Node]]) -> Region:
    """The region in the new graph, with all versions of its nodes."""
    members, exits, between = (
        frozenset(new for node in nodes for new in parts.get(node, ()))
        for nodes in (region.members, region.exits, region.between)
    )
    seed = next(new for (node, _), new in made.items() if node is region.seed)
    base = seen_through(row_operand(region.seed))
    given = {new for (node, _), new in made.items() if node is base}
    dim = _dim_of_rows(seed, given, region.dim)
    return replace(region, seed=seed, members=members, exits=exits, between=between, dim=dim)


def _dim_of_rows(seed: fx.Node, given: set[fx.Node], dim: int) -> int:
    """The dim of the rows in what the seed's operand looks at: a gathered value has them first, and is turned."""
    node = row_operand(seed)
    while node not in given and node.target in LOOKS:
        node = node.all_input_nodes[0]
    while node.target == torch.ops.aten.permute.default:
        dim = node.args[1][dim]  # type: ignore[index, assignment]
        node = node.all_input_nodes[0]
    return dim


def _compute(
    builder: Builder,
    node: fx.Node,
    version: Version,
    how: Compute,
    annotations: Annotations,
    made: dict[tuple[fx.Node, Version], fx.Node],
) -> fx.Node:
    if node.op in ("placeholder", "get_attr"):
        return builder.copy(node, version[0])
    if node.target is operator.getitem and isinstance(node.args[0].meta["val"], (tuple, list)):
        parent = tuple(canonical(layout) for layout in annotations.natural[node.args[0]])
        return builder.call(operator.getitem, (made[node.args[0], parent], node.args[1]), layout=version[0])
    operands = [
        made[operand, (canonical(layout),)] for operand, layout in zip(operands_of(node), how.operands, strict=True)
    ]
    return emit(builder, node, with_names(version, annotations.natural[node]), how.operands, operands)


def with_names(version: Version, natural: Version) -> Version:
    """The version, with the names that the natural layout gives to its axes where they are the same data."""
    return tuple(n if canonical(n) == v else v for v, n in zip(version, natural, strict=True))
