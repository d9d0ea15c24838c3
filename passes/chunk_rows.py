"""Long losses in chunks: the logits of a long sequence with a large vocabulary never exist whole.

`find_chunks` looks for regions of the joint graph that widen rows and narrow them again (`row_regions.py`), at global
shapes, so that all ranks find the same. `chunk_rows` makes loops of them at a rank's own shapes: one for the forward,
which keeps of each row what its reductions gave (a maximum, a sum of exponentials), and one for the backward, which
computes the wide values again, chunk by chunk, and adds up the gradients of the weights. No communication is inside of
a loop: where a region needs some in its middle, it becomes one loop more.

Work: the wide products of the forward run twice. Bytes: of a value with R rows of V elements exist those of one chunk.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from evocompile.chunks import MESH_AXIS, Returned, RowLoop, signature
from evocompile.layout import Layout, Split
from evocompile.program import (
    InputKind,
    Note,
    Output,
    OutputKind,
    Program,
    Recipe,
    Region,
    nbytes,
    output_values,
    placeholders,
    source_line,
)

from .build import fake_mode_of
from .dependence import dependents, forward_nodes
from .row_layouts import ByRows, NotByRowsError, body, by_rows
from .row_regions import LOOKS, Finder, elements, is_loss, row_operand, seen_through, widening_products
from .rules.contractions import RULES as CONTRACTIONS
from .rules.pointwise import CONSTANTS

AUTOMATIC = 256 * 2**20  # bytes of a rank's logits that are kept whole where the plan does not say
CHUNK = 64 * 2**20  # bytes of the chunks of larger ones


# --- at global shapes ------------------------------------------------------------------------------------------------


def find_chunks(program: Program) -> Program:
    """The program with `regions`. Outputs that are wide values are replaced by what they are computed from."""
    assert program.joint is not None
    graph, plan = program.joint.graph, program.plan
    forward = forward_nodes(program)
    found: list[Region] = []
    taken: set[fx.Node] = set()
    depend = [
        dependents(graph, {n for n, each in zip(placeholders(graph), program.inputs, strict=True) if each.kind is kind})
        for kind in (InputKind.USER, InputKind.TANGENT)
    ]
    finder = Finder(graph, forward, depend[1])
    for seed in widening_products(graph, *depend):
        if seed in taken:
            continue
        region = finder.region(seed)
        taken |= region.members
        size = max(nbytes(node.meta["val"]) for node in region.members) // plan.replicas
        loss = is_loss(region, forward)
        chunk = _loss_chunk(plan.loss_chunk, size) if loss else plan.mlp_chunk
        if not 0 < chunk < size or (not loss and not _narrows(region)):
            continue
        try:
            region = _proven(program, replace(region, chunk=chunk), forward)
        except NotByRowsError as error:
            what = "the logits are computed whole" if loss else "wide values are computed whole"
            program.notes.append(Note(what, error.why, source_line(error.node), size))
            continue
        found.append(region)
    if not found:
        return program
    outputs = _with_recipes(program, found)
    return replace(program, regions=tuple(found), outputs=outputs)


def _loss_chunk(asked: int | None, size: int) -> int:
    if asked is not None:
        return asked
    return CHUNK if size > AUTOMATIC else 0


def _narrows(region: Region) -> bool:
    """Whether less goes on than there is in between: queries, keys and values of one product are together as wide."""
    rows = elements(region.seed) // region.seed.meta["val"].shape[-1]
    reduced = [
        node
        for node in region.exits
        if node.target not in CONTRACTIONS and elements(node) > rows and region.members & set(node.all_input_nodes)
    ]
    goes_on = sum(map(elements, reduced))
    return 2 * goes_on < max(map(elements, region.members))


def _proven(program: Program, region: Region, forward: set[fx.Node]) -> Region:
    """The region with the dim of its rows, where it can be run by rows; what it cannot hold is left outside."""
    assert program.joint is not None
    graph = program.joint.graph
    lazy = _lazy_outputs(program)
    for node, output in zip(output_values(graph), program.outputs, strict=True):
        if isinstance(node, fx.Node) and node in region.members and output not in lazy:
            raise NotByRowsError(node, "they are returned")
        if isinstance(node, fx.Node) and node in region.members:
            _recipe_nodes(program, region, node)
    base = seen_through(row_operand(region.seed))
    shape = base.meta["val"].shape
    dims = sorted(
        (dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: (dim == len(shape) - 1, -shape[dim])
    )
    error = NotByRowsError(region.seed, "it has no rows")
    for dim in dims:
        tried = replace(region, dim=dim)
        try:
            while True:
                try:
                    for nodes, given, returned in _stages(program, tried, forward):
                        _by_rows(tried, nodes, given, returned, 1)
                    return tried
                except NotByRowsError as problem:
                    if problem.node not in tried.between:
                        raise
                    tried = replace(tried, between=tried.between - {problem.node})
        except NotByRowsError as problem:
            error = problem if dim == dims[0] else error
    raise error


# --- outputs that nobody may read ------------------------------------------------------------------------------------


def _lazy_outputs(program: Program) -> list[Output]:
    """Outputs beside a floating-point scalar that take no gradient."""
    users = program.outputs_of(OutputKind.USER)
    if not any(not each.shape and each.dtype.is_floating_point for each in users):
        return []
    return [each for each in users if each.shape and not each.differentiable]


def _recipe_nodes(program: Program, region: Region, output: fx.Node) -> tuple[fx.Node, list[fx.Node], list[fx.Node]]:
    """(what the rows are computed from, parameters, operators in order) of a wide output."""
    assert program.joint is not None
    graph = program.joint.graph
    kinds = dict(zip(placeholders(graph), (each.kind for each in program.inputs), strict=True))
    base = seen_through(row_operand(region.seed))
    needed, stack = {output}, [output]
    parameters: dict[fx.Node, None] = {}
    while stack:
        node = stack.pop()
        for each in node.all_input_nodes:
            if each is base:
                continue
            if kinds.get(each) is InputKind.PARAMETER:
                parameters[each] = None
            elif each in region.members or each.target in LOOKS or each.target in CONSTANTS or not each.all_input_nodes:
                if each.op != "call_function":
                    raise NotByRowsError(output, "a returned value is computed from more than the rows and parameters")
                if each not in needed:
                    needed.add(each)
                    stack.append(each)
            else:
                raise NotByRowsError(output, "a returned value is computed from more than the rows and parameters")
    return base, list(parameters), [node for node in graph.nodes if node in needed]


def _with_recipes(program: Program, regions: Sequence[Region]) -> list[Output]:
    """The outputs, and in the graph, wide values replaced by the rows that they are computed from, with the recipe."""
    assert program.joint is not None
    graph = program.joint.graph
    names = dict(zip(placeholders(graph), (each.name for each in program.inputs), strict=True))
    returned, outputs = output_values(graph), list(program.outputs)
    for i, node in enumerate(returned):
        region = next((each for each in regions if node in each.members), None)
        if region is None:
            continue
        base, parameters, nodes = _recipe_nodes(program, region, node)
        recipe = fx.Graph()
        copies = {each: recipe.placeholder(each.name) for each in (base, *parameters)}
        for each in nodes:
            copies[each] = recipe.node_copy(each, copies.__getitem__)
        for each, copy in copies.items():
            copy.meta["val"] = each.meta["val"]
        recipe.output((copies[node],))
        made = Recipe(
            fx.GraphModule(program.joint, recipe),
            tuple(names[each] for each in parameters),
            outputs[i].shape,
            outputs[i].dtype,
        )
        value = base.meta["val"]
        outputs[i] = replace(outputs[i], shape=tuple(value.shape), dtype=value.dtype, recipe=made)
        returned[i] = base
    (output,) = graph.find_nodes(op="output")
    output.args = (returned,)
    return outputs


# --- at a rank's shapes ----------------------------------------------------------------------------------------------


def chunk_rows(program: Program) -> Program:
    """Puts loops in the place of the regions. One that communication of tp has come into may have to stay whole."""
    assert program.joint is not None
    if not program.regions:
        return program
    for region in program.regions:
        stages = _stages(program, region, forward_nodes(program))
        try:
            loops = [_loop(region, program, *stage) for stage in stages]
        except NotByRowsError as error:
            size = max(nbytes(node.meta["val"]) for node in region.members)
            program.notes.append(Note("wide values are computed whole", error.why, source_line(error.node), size))
            continue
        _insert(program, region, stages, loops)
    program.joint.graph.lint()
    program.joint.recompile()
    return replace(program, regions=())


Stage = tuple[list[fx.Node], list[fx.Node], list[fx.Node]]


def _stages(program: Program, region: Region, forward: set[fx.Node]) -> list[Stage]:
    """The loops that a region takes, in order: (nodes, given, returned) of each.

    A value that comes back from outside of the region (a sum over all rows, a collective, the gradient of the loss)
    needs the loop before it to have ended, so what depends on it is in the next one. Wide values are computed again
    where a later loop needs them, narrow ones are handed on.
    """
    assert program.joint is not None
    graph = program.joint.graph
    inside = region.members | region.exits | region.between
    depths: dict[fx.Node, int] = {}
    for backward in (False, True):
        first = max(depths.values(), default=-1) + 1 if backward else 0
        for node in graph.nodes:
            own = node in inside and (node not in forward) == backward
            before = [depths.get(each, -1) + (own and each not in inside and each in depths) for each in
                      node.all_input_nodes]  # fmt: skip
            depth = max(before, default=-1)
            if own:
                depths[node] = max(depth, first)
            elif depth >= 0 and node not in inside:
                depths[node] = depth
    own = {node: depths[node] for node in inside}
    order = [node for node in graph.nodes if node in own]
    stages: list[Stage] = []
    handed_on: set[fx.Node] = set()  # to later loops
    for depth in sorted(set(own.values()), reverse=True):
        returned = [
            node
            for node in order
            if own[node] == depth
            and node not in region.members
            and (node in handed_on or any(user not in own for user in node.users))
        ]
        if returned:
            nodes, given = _closure(graph, region, own, depth, returned)
            handed_on.update(each for each in given if each in own)
            stages.append((nodes, given, returned))
    return stages[::-1]


def _closure(
    graph: fx.Graph, region: Region, own: dict[fx.Node, int], depth: int, returned: Iterable[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What a loop computes for its results, views and constants included, and what it is given."""
    nodes, given, stack = set(returned), set(), list(returned)
    while stack:
        for each in stack.pop().all_input_nodes:
            free = each.target in CONSTANTS or (each.target in LOOKS and seen_through(each) not in own)
            if each in region.members or own.get(each) == depth or (free and each not in own):
                if each not in nodes:
                    nodes.add(each)
                    stack.append(each)
            else:
                given.add(each)
    return [node for node in graph.nodes if node in nodes], [node for node in graph.nodes if node in given]


def _by_rows(
    region: Region, nodes: Sequence[fx.Node], given: Sequence[fx.Node], returned: Sequence[fx.Node], chunk: int
) -> ByRows:
    """The first product of the loop whose rows are given says where they are."""
    for node in nodes:
        if node in region.members and node.target == region.seed.target:
            base = seen_through(row_operand(node))
            if base not in given or base.meta["val"].ndim <= region.dim:
                continue
            part = by_rows(nodes, given, returned, (base, region.dim), chunk)
            if part.natural[node].partial:
                raise NotByRowsError(node, "it sums over its rows")
            return part
    raise NotByRowsError(region.seed, "the rows of a product are not known")


def _insert(
    program: Program, region: Region, stages: Sequence[Stage], loops: Sequence[tuple[RowLoop, list[fx.Node]]]
) -> None:
    """The loops, each at the place of the last of its nodes, with what depends on its results behind it."""
    assert program.joint is not None
    graph = program.joint.graph
    inside = region.members | region.exits | region.between
    handed: dict[fx.Node, fx.Node] = {}
    for (_, _, returned), (loop, arguments) in zip(stages, loops, strict=True):
        with graph.inserting_after(returned[-1]):
            call = graph.call_function(loop, tuple(handed.get(each, each) for each in arguments))
        call.meta["stack_trace"] = region.seed.meta.get("stack_trace", "")
        last = call
        for i, node in enumerate(returned):
            with graph.inserting_after(last):
                last = handed[node] = graph.call_function(operator.getitem, (call, i))
            with fake_mode_of(graph):
                last.meta["val"] = node.meta["val"].new_empty(node.meta["val"].shape)
            last.meta["stack_trace"] = node.meta.get("stack_trace", "")
            if node in program.layouts:
                program.layouts[last] = program.layouts[node]
            node.replace_all_uses_with(last, lambda user: user not in inside)
        call.meta["val"] = tuple(handed[node].meta["val"] for node in returned)
        _move_behind(graph, call, last)
    done = {each for nodes, _, _ in stages for each in nodes} | inside
    for node in reversed(graph.nodes):
        if node in done and not node.users:
            program.layouts.pop(node, None)
            graph.erase_node(node)


def _move_behind(graph: fx.Graph, call: fx.Node, last: fx.Node) -> None:
    """Moves what stands before the loop and reads its results behind them."""
    late = set(call.users)
    for node in list(graph.nodes):
        if node is call:
            return
        if any(each in late for each in node.all_input_nodes):
            late.add(node)
            last.append(node)
            last = node


def _loop(
    region: Region,
    program: Program,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    returned: Sequence[fx.Node],
) -> tuple[RowLoop, list[fx.Node]]:
    """The loop and its arguments. A rank without rows has a loop too, which reads the same and gives zeros."""
    what = source_line(region.seed)
    rows = seen_through(row_operand(region.seed)).meta["val"].shape[region.dim]
    if not elements(region.seed):
        nothing = [Layout.whole(tuple(node.meta["val"].shape)) for node in returned]
        zeros = tuple(
            Returned(replace(layout, partial=frozenset({MESH_AXIS})), node.meta["val"].dtype, node.meta["val"].device)
            for layout, node in zip(nothing, returned, strict=True)
        )
        whole = tuple(Layout.whole(tuple(node.meta["val"].shape)) for node in given)
        return RowLoop(Split(MESH_AXIS, 1, "contiguous", 0, (0,)), (), (), whole, zeros, what), list(given)
    chunk = max(rows * region.chunk // max(nbytes(node.meta["val"]) for node in region.members), 1)
    if chunk >= rows:
        return _one_chunk(program, nodes, given, returned, what), list(given)
    part = _by_rows(region, nodes, given, returned, chunk)
    layouts = part.layouts
    numbers: dict[tuple[object, ...], int] = {}
    bodies: list[fx.GraphModule] = []
    order: list[int] = []
    for index in range(part.split.degree):
        kind = signature(layouts, part.split, index)
        if kind not in numbers:
            numbers[kind] = len(bodies)
            bodies.append(body(program, part, index))
        order.append(numbers[kind])
    results = tuple(Returned(part.natural[node], node.meta["val"].dtype, node.meta["val"].device) for node in returned)
    loop = RowLoop(part.split, tuple(bodies), tuple(order), tuple(each for _, each in part.given), results, what)
    return loop, [node for node, _ in part.given]


def _one_chunk(
    program: Program, nodes: Sequence[fx.Node], given: Sequence[fx.Node], returned: Sequence[fx.Node], what: str
) -> RowLoop:
    """A loop of one chunk, in which everything is whole."""
    assert program.joint is not None
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node, copy in copies.items():
        copy.meta["val"] = node.meta["val"]
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in returned])
    layouts = {node: Layout.whole(tuple(node.meta["val"].shape)) for node in (*given, *returned)}
    results = tuple(Returned(layouts[node], node.meta["val"].dtype, node.meta["val"].device) for node in returned)
    split = Split(MESH_AXIS, 1, "contiguous", 1)
    body = fx.GraphModule(program.joint, graph)
    return RowLoop(split, (body,), (0,), tuple(layouts[node] for node in given), results, what)
