"""How a part of a graph runs for some rows at a time: the layouts of its nodes where the axis `rows` is split.

To run a part of a graph chunk by chunk is to spread it over ranks, in time instead of in space. So the sharding rules
prove that it can be done, and say which operands are cut, and which results are put together or added up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from evocompile.chunks import AXIS, MESH_AXIS, summed_in
from evocompile.layout import Axis, Factor, Layout, Sharding, Split
from evocompile.program import Compute, Program, Version

from .annotate import make_versions
from .build import Builder
from .emit import emit
from .localize import with_names
from .rules import dims_of
from .rules.base import label_sizes, operands_of
from .rules.routing import Routes, Splits
from .rules.solve import Solution, canonical, forward
from .rules.windows import window_solution

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default


class NotByRowsError(Exception):
    """A node that cannot be computed for some rows at a time, and why."""

    def __init__(self, node: fx.Node, why: str) -> None:
        super().__init__(why)
        self.node = node
        self.why = why


@dataclass(frozen=True)
class ByRows:
    """A part of a graph by chunks of rows.

    given:    what it reads from outside, each once for every layout in which it does.
    natural:  the layout in which each node comes out. versions: those that are needed, and how they are made.
    returned: the nodes that it gives, in their natural layouts.
    """

    nodes: Sequence[fx.Node]
    given: Sequence[tuple[fx.Node, Layout]]
    natural: Mapping[fx.Node, Layout]
    versions: Mapping[fx.Node, Mapping[Version, Compute]]
    returned: Sequence[fx.Node]
    split: Split

    @property
    def layouts(self) -> list[Layout]:
        """All layouts that occur."""
        made = [layout for versions in self.versions.values() for version in versions for layout in version]
        return [*made, *(layout for _, layout in self.given), *self.natural.values()]


def split_of(rows: int, chunk: int) -> Split:
    """Chunks of `chunk` rows, the last one of what is left."""
    parts = [min(chunk, rows - start) for start in range(0, rows, chunk)]
    return Split(MESH_AXIS, len(parts), "contiguous", rows, tuple(parts))


def by_rows(
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    returned: Sequence[fx.Node],
    base: tuple[fx.Node, int],
    chunk: int,
) -> ByRows:
    """The layouts where the dim of `base`, one of the `given`, is cut into chunks of `chunk` rows.

    nodes: in the graph's order; operands that are none of them are given. Raises NotByRowsError.
    """
    first, dim = base
    shape = tuple(first.meta["val"].shape)
    split = split_of(shape[dim], chunk)
    splits = Splits({AXIS: split})
    natural = {node: Layout.whole(tuple(node.meta["val"].shape)) for node in given}
    dims = list(natural[first].dims)
    dims[dim] = (Factor(shape[dim], Axis(AXIS, shape[dim]), split=True),)
    natural[first] = Layout(tuple(dims))
    solutions: dict[fx.Node, Solution] = {}
    for node in nodes:
        solutions[node] = _solve(node, [natural[each] for each in operands_of(node)], splits)
        (natural[node],) = solutions[node].results
    for node in returned:
        if not natural[node].is_split and not natural[node].partial:
            raise NotByRowsError(node, "its rows are not those of the product")
    wanted = _demand(nodes, natural, solutions, returned, splits)
    known = set(nodes)
    versions = {node: how for node, how in wanted.items() if node in known}
    cut = [(node, version[0]) for node, how in wanted.items() if node not in known for version in how]
    order = {node: i for i, node in enumerate(given)}
    return ByRows(nodes, sorted(cut, key=lambda each: order[each[0]]), natural, versions, returned, split)


def _solve(node: fx.Node, layouts: list[Layout], splits: Splits) -> Solution:
    solution = window_solution(node, layouts, splits)
    if solution is None:
        dims = dims_of(node)
        if dims is None or not isinstance(node.meta["val"], torch.Tensor):
            raise NotByRowsError(node, "it has no rule for one row at a time")
        solution, _ = forward(dims, label_sizes(dims, node), layouts, splits)
    for have, need in zip(layouts, solution.operands, strict=True):
        if have.split_axes() - need.split_axes():
            raise NotByRowsError(node, "it needs all rows at once")
        if have.partial - need.partial:
            raise NotByRowsError(node, "it needs a sum over all rows")
    return solution


def _demand(
    nodes: Sequence[fx.Node],
    natural: Mapping[fx.Node, Layout],
    solutions: Mapping[fx.Node, Solution],
    returned: Sequence[fx.Node],
    splits: Splits,
) -> dict[fx.Node, dict[Version, Compute]]:
    """The versions that are needed of nodes and of what is given, from the results backwards."""
    routes = Routes(splits, dims_of)
    wanted: dict[fx.Node, dict[Version, None]] = {}
    for node in returned:
        wanted.setdefault(node, {})[(canonical(natural[node]),)] = None
    found: dict[fx.Node, dict[Version, Compute]] = {}
    for node in reversed(nodes):
        made = make_versions(node, wanted.pop(node, {}), (natural[node],), solutions[node], False, routes)
        found[node] = {}
        for version, how in made.items():
            if not isinstance(how, Compute):
                raise NotByRowsError(node, "its rows cannot be told from the product's")
            found[node][version] = how
            for operand, layout in zip(operands_of(node), how.operands, strict=True):
                wanted.setdefault(operand, {})[(canonical(layout),)] = None
    nothing = Compute(())
    return {**found, **{node: dict.fromkeys(versions, nothing) for node, versions in wanted.items()}}


def body(program: Program, part: ByRows, index: int) -> fx.GraphModule:
    """The graph of one chunk: from the given values, cut, to the returned ones."""
    builder = Builder(replace(program, sharding=Sharding({AXIS: part.split}, {MESH_AXIS: index})))
    made: dict[tuple[fx.Node, Layout], fx.Node] = {}
    for node, layout in part.given:
        made[node, layout] = builder.given(node, layout)
    for node in part.nodes:
        builder.source = node
        for version, how in part.versions[node].items():
            operands = [
                made[each, canonical(layout)] for each, layout in zip(operands_of(node), how.operands, strict=True)
            ]
            named = with_names(version, (part.natural[node],))
            made[node, version[0]] = emit(builder, node, named, how.operands, operands)
    results = [made[node, canonical(part.natural[node])] for node in part.returned]
    for i, node in enumerate(part.returned):
        dtype = summed_in(node.meta["val"].dtype)
        if part.natural[node].partial and dtype != node.meta["val"].dtype:
            builder.source = node
            results[i] = _summed_in(builder, results[i], dtype)
    builder.graph.output(results)
    builder.graph.eliminate_dead_code()
    return builder.graph_module()


def _summed_in(builder: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A chunk's sum over its rows without being rounded first: as one device rounds the sum over all rows, once."""
    if node.target == aten.sum.dim_IntList:
        return builder.call(node.target, node.args, {**node.kwargs, "dtype": dtype})
    if node.target != aten.mm.default:
        return node
    operands = [each for each in node.args if isinstance(each, fx.Node)]
    if operands[0].meta["val"].is_cuda:  # of 16 bits in, 32 out: the CPU has no such product
        return builder.call(aten.mm.dtype, (*operands, dtype))
    return builder.call(aten.mm.default, [builder.call(convert, (each, dtype)) for each in operands])
