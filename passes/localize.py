"""localize: rewrite the joint graph to this rank's shapes, and insert the collectives that the annotations ask for.

A new graph is built in the order of the old one. Each node appears once for every version that `annotate` found to
be needed; the operators are the same, with sizes replaced where an operator carries them (`emit.py`), and versions
that are conversions become indexing, an all-gather or an all-reduce (`convert.py`).
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from evocompile.program import Annotations, Compute, Program, Region, Version, output_values

from .annotate import output_table
from .build import Builder
from .convert import convert
from .emit import emit
from .rules.base import operands_of
from .rules.solve import canonical


def localize(program: Program) -> Program:
    """The program at this rank's shapes. Gradients leave as sums still pending (see their layouts)."""
    assert program.joint is not None and program.annotations is not None
    annotations = program.annotations
    builder = Builder(program)
    made: dict[tuple[fx.Node, Version], fx.Node] = {}
    for node in program.joint.graph.nodes:
        if node.op == "output":
            continue
        builder.source = node
        for version, how in annotations.versions[node].items():
            if isinstance(how, Compute):
                made[node, version] = _compute(builder, node, version, how, annotations, made)
            else:
                made[node, version] = convert(builder, made[node, how.source], how.source[0], version[0])
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
        regions=tuple(_local(each, made) for each in program.regions),
    )


def _local(region: Region, made: dict[tuple[fx.Node, Version], fx.Node]) -> Region:
    """The region in the new graph, with all versions of its nodes."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for (node, _), new in made.items():
        found.setdefault(node, []).append(new)
    members, exits, between = (
        frozenset(new for node in nodes for new in found.get(node, ()))
        for nodes in (region.members, region.exits, region.between)
    )
    return replace(region, seed=found[region.seed][0], members=members, exits=exits, between=between)


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
