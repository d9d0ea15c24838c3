"""annotate: which part of every value each rank holds, and in which versions it is needed. Changes no graph.

The invariant: *replicated by default, localised on demand*. Two sweeps, each linear in the number of nodes.

1. Forward, `_natural`: the layout in which a node comes out by itself. Ids, labels, positions and masks stay whole
   (their axes are only named); an embedding or a matrix product of something with named axes is split, and from
   there splits propagate by the rules. A split label that is summed away leaves a partial value.
2. Backward, `_demand`: from the outputs, which versions of each node are needed. A whole value that meets a split one
   is *pulled*: the same operator on the parts of its operands, up to an operator that cannot be pulled, whose whole
   result is indexed by this rank's positions. What nobody demands is not computed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from evocompile.layout import FINE, SEQUENCE, Axis, Dim, Factor, Layout, Sharding, Split
from evocompile.program import (
    Annotations,
    Compute,
    Convert,
    Input,
    InputKind,
    Note,
    Output,
    OutputKind,
    Program,
    Version,
    nbytes,
    output_values,
    placeholders,
    source_line,
)

from .choose_schedule import other_lengths, sequence_length, sequence_split
from .rules import dims_of
from .rules.attention import ATTENTION, ATTENTION_BACKWARD, attention_solution
from .rules.base import label_sizes, operands_of, result_shapes
from .rules.pointwise import RANDOM
from .rules.routing import Routes, Splits, bags_of
from .rules.solve import Solution, canonical, coarsened, forward, pull, scattered
from .rules.views import VIEWS, in_parts
from .rules.windows import window_pull, window_solution
from .tensor_axes import routed_rows, row_gradients, tensor_layouts


def splits_of(program: Program) -> dict[str, Split]:
    """What the plan splits: the batch over dp, each sequence over cp and ulysses; their sizes.

    A model may have sequences of several lengths (an encoder's, a decoder's): each is an axis, split alike.

    Between the weights that tp splits, the stream of tokens is split over tp too ("seq.tp"; Megatron's sequence
    parallelism, 2205.05198, section 4.2.2).
    """
    splits: dict[str, Split] = {}
    tp = program.plan.tp
    for each in program.inputs_of(InputKind.USER):
        if each.shape and "batch" not in splits and program.plan.dp > 1:
            splits["batch"] = Split("dp", program.plan.dp, "contiguous", each.shape[0])
    in_sequence = program.plan.cp * program.plan.ulysses > 1
    size = sequence_length(program) if in_sequence or tp > 1 else None
    names = {}
    if size is not None:
        sizes = [size, *other_lengths(program, size)]
        names = {f"{SEQUENCE}{i + 1 if i else ''}": each for i, each in enumerate(sizes)}
    if size is not None and in_sequence:
        split = sequence_split(program, size)
        splits |= {name: replace(split, size=each) for name, each in names.items()}
    if program.batch_parts:
        parts = program.batch_parts
        splits["batch"] = Split("dp", len(parts), "contiguous", sum(parts), parts)
    if tp > 1:
        for name, each in names.items():
            whole = Split("tp", tp, "contiguous", each)
            splits[name + FINE] = splits[name].finer("tp", tp) if in_sequence else whole
    return splits


def annotate(program: Program) -> Program:
    """The program with `sharding` and `annotations` for its joint graph, which is still at global shapes."""
    assert program.joint is not None
    splits = Splits(splits_of(program))
    weights: dict[fx.Node, Layout] = {}
    if program.plan.tp > 1:
        weights, axes = tensor_layouts(program)
        splits.update(axes)
    program = replace(program, sharding=Sharding(splits, program.coordinate))
    routes, known = Routes(splits, dims_of), list(program.notes)
    while True:
        program.notes[:] = known
        natural, solutions = _natural(program, routes, weights)
        outputs = _output_layouts(program, natural, routes)
        versions = _demand(program, natural, solutions, outputs, routes)
        if not routes.broken:
            break
        routes.give_up()  # rows in a private order would have been used as if they were in the model's
    program.notes[:] = _merged(program.notes)
    return replace(program, annotations=Annotations(versions, natural, outputs))


def _natural(
    program: Program, routes: Routes, weights: Mapping[fx.Node, Layout]
) -> tuple[dict[fx.Node, Version], dict[fx.Node, Solution]]:
    assert program.joint is not None and program.sharding is not None
    splits = program.sharding.splits
    natural: dict[fx.Node, Version] = {}
    solutions: dict[fx.Node, Solution] = {}
    rows = row_gradients(program, weights) if weights else {}
    sorted_rows = routed_rows(program, weights) if weights else set()
    for node, each in zip(placeholders(program.joint.graph), program.inputs, strict=True):
        natural[node] = (weights.get(node) or _input_layout(each, splits),)
    for node in program.joint.graph.nodes:
        if node.op == "get_attr":
            natural[node] = (Layout.whole(node.meta["val"].shape),)
        elif node.target is operator.getitem and isinstance(node.args[0].meta["val"], (tuple, list)):
            natural[node] = (natural[node.args[0]][node.args[1]],)
            routes.pass_on(node)
        elif node.op == "call_function":
            layouts = [_as_read(natural[each][0], each, splits) for each in operands_of(node)]
            if node in sorted_rows:
                layouts = [coarsened(layout, splits) for layout in layouts]
            routed = routes.solve(node, layouts)
            solution = routed or _solve(program, node, layouts)
            if node in rows:
                solution = _own_rows(solution, rows[node], splits)
            routes.check(node, layouts, solution, routed is not None)
            natural[node], solutions[node] = solution.results, solution
    return natural, solutions


def _as_read(layout: Layout, operand: fx.Node, splits: Mapping[str, Split]) -> Layout:
    """How an operand is read: a sum over tp that several read is scattered first, so that it is communicated once."""
    return scattered(layout, splits) if len(operand.users) > 1 else layout


def _own_rows(solution: Solution, rows: Dim, splits: Mapping[str, Split]) -> Solution:
    """A gradient of looked-up rows, of which a rank of tp makes its own, from the tokens of all."""
    (result,) = solution.results
    operands = tuple(coarsened(layout, splits) for layout in solution.operands)
    return Solution(operands, (Layout((rows, *result.dims[1:]), result.partial - {"tp"}),))


def _input_layout(each: Input, splits: Mapping[str, Split]) -> Layout:
    """Axes of user inputs are named by position: dim 0 is the batch, dim 1 the sequence.

    Activations come split, and so does the batch axis of an input that arrives in parts.
    """
    if each.kind is not InputKind.USER:
        return Layout.whole(each.shape)
    dims = []
    for dim, size in enumerate(each.shape):
        name = ("batch", _sequence_of(size, splits), "")[min(dim, 2)]
        fine = name + FINE
        split = each.dtype.is_floating_point or (each.is_part and dim == 0)
        if split and fine in splits and splits[fine].size == size:
            dims.append((Factor(size, Axis(fine, size), split=True),))
        elif name in splits and splits[name].size == size:
            dims.append((Factor(size, Axis(name, size), split=split),))
        elif fine in splits and splits[fine].size == size:
            dims.append((Factor(size, Axis(name, size)),))
        else:
            dims.append((Factor(size),))
    return Layout(tuple(dims))


def _sequence_of(size: int, splits: Mapping[str, Split]) -> str:
    """The name of the sequence of this length; "" where there is none."""
    names = (name for name, split in splits.items() if name.startswith(SEQUENCE) and split.size == size)
    return next(names, "").removesuffix(FINE)


def _solve(program: Program, node: fx.Node, layouts: list[Layout]) -> Solution:
    assert program.sharding is not None
    splits = program.sharding.splits
    if node.target in (ATTENTION, ATTENTION_BACKWARD):
        return attention_solution(node, layouts, splits)
    in_bags = any(bags_of(layout) for layout in layouts)
    if not in_bags and (windowed := window_solution(node, layouts, splits)) is not None:
        return windowed
    dims = (in_parts(node) if program.plan.tp > 1 else None) or dims_of(node)
    if dims is not None:
        solution, problems = forward(dims, label_sizes(dims, node), layouts, splits)
    else:
        solution, problems = _replicated(node), ["there is no sharding rule for the operator"]
    for operand, have, need in zip(operands_of(node), layouts, solution.operands, strict=True):
        if _gathered(have, need, splits, bool(problems)):
            program.notes.append(
                Note(
                    f"gathered for {node.target}",
                    problems[0] if problems else "a broadcast dim is split",
                    source_line(node),
                    nbytes(operand.meta["val"]),
                )
            )
    return solution


def _gathered(have: Layout, need: Layout, splits: Mapping[str, Split], problems: bool) -> bool:
    """Whether a split is given up; that tokens are gathered over tp for a weight is how it is meant."""
    meant = coarsened(have, splits)
    lost = meant.split_axes() - coarsened(need, splits).split_axes()
    return bool(lost) or (problems and meant != have and not need.is_split)


def _replicated(node: fx.Node) -> Solution:
    results = tuple(Layout.whole(shape) if shape is not None else Layout(()) for shape in result_shapes(node))
    return Solution(tuple(Layout.whole(operand.meta["val"].shape) for operand in operands_of(node)), results)


def _merged(notes: list[Note]) -> list[Note]:
    """One note for what happens at one source line, in every layer, with all its bytes."""
    totals: dict[tuple[str, str, str], int] = {}
    for note in notes:
        key = (note.what, note.why, note.source)
        totals[key] = totals.get(key, 0) + note.bytes
    return [Note(*key, total) for key, total in totals.items()]


def _output_layouts(program: Program, natural: dict[fx.Node, Version], routes: Routes) -> list[Layout | None]:
    """How each output leaves: scalars and buffers whole, other user outputs as they are if they come back lazily,
    gradients as sums still pending (`shard_states` reduces them)."""
    assert program.joint is not None and program.sharding is not None
    lazy = any(o.kind is OutputKind.USER and not o.shape and o.dtype.is_floating_point for o in program.outputs)
    layouts: list[Layout | None] = []
    for output, node in zip(program.outputs, output_values(program.joint.graph), strict=True):
        if not isinstance(node, fx.Node):
            layouts.append(None)
            continue
        layout = natural[node][0]
        routes.check_output(node, layout)
        if output.kind is OutputKind.GRADIENT:
            pending = layout.partial | program.sharding.mesh_axes(layout)
            layouts.append(replace(layout.unsplit(), partial=pending))
        elif output.kind is OutputKind.USER and output.shape and lazy and not output.differentiable:
            layouts.append(layout.reduced())
        else:
            layouts.append(layout.unsplit())
    return layouts


def _demand(
    program: Program,
    natural: dict[fx.Node, Version],
    solutions: dict[fx.Node, Solution],
    outputs: list[Layout | None],
    routes: Routes,
) -> dict[fx.Node, dict[Version, Compute | Convert]]:
    assert program.joint is not None
    graph = program.joint.graph
    in_parts = {node for node, each in zip(placeholders(graph), program.inputs, strict=True) if each.is_part}
    wanted: dict[fx.Node, dict[Version, None]] = {node: {} for node in graph.nodes}
    versions: dict[fx.Node, dict[Version, Compute | Convert]] = {}
    for node, layout in zip(output_values(graph), outputs, strict=True):
        if layout is not None:
            wanted[node][(canonical(layout),)] = None
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if node.op == "call_function" and node.meta["val"] is None:
            wanted[node][()] = None  # an assertion: it has no result, but must run
        made = make_versions(node, wanted[node], natural[node], solutions.get(node), node in in_parts, routes)
        versions[node] = made
        for how in made.values():
            if isinstance(how, Compute):
                _want_operands(node, how.operands, wanted, natural)
    return versions


def make_versions(
    node: fx.Node,
    wanted: dict[Version, None],
    natural: Version,
    solution: Solution | None,
    in_parts: bool,
    routes: Routes,
) -> dict[Version, Compute | Convert]:
    """How to make each wanted version, those that are converted after the one that they are converted from."""
    own = tuple(canonical(layout) for layout in natural)
    source = own
    if node.op in ("placeholder", "get_attr"):
        source = (canonical(_arriving(natural[0], in_parts)),)
    computed: dict[Version, Compute | Convert] = {}
    converted: dict[Version, Compute | Convert] = {}
    # A random operator drawn twice gives two different draws: one version is drawn, others are made of it.
    drawn_once = node.target == RANDOM and len(wanted) > 1
    # What is whole by the operator's own communication would take that again.
    communicates = solution is not None and len(own) == 1 and own[0].is_whole
    communicates = communicates and any(each.is_split for each in solution.operands)  # type: ignore[union-attr]
    for version in wanted:
        as_it_is = drawn_once or communicates or version == source
        pulled = None if as_it_is else _pulled(node, version, own, routes)
        routes.check_version(node, own, version, pulled is not None)
        if version == source:
            computed[version] = Compute(solution.operands if solution else ())
        elif pulled is not None:
            computed[version] = pulled
        else:
            converted[version] = Convert(source)
    if converted and source not in computed:
        computed[source] = Compute(solution.operands if solution else ())
    if len(own) == 1 and (fine := (canonical(scattered(natural[0], routes.splits)),)) in converted:
        through = {each: Convert(source if each[0].partial else fine) for each in converted if each != fine}
        converted = {fine: Convert(source), **through}  # what is scattered already is gathered, not summed once more
    return {**computed, **converted}


def _arriving(layout: Layout, in_parts: bool) -> Layout:
    """Inputs and constants arrive whole, or with the replica's own rows of the batch."""
    whole = layout.unsplit()
    return Layout((layout.dims[0], *whole.dims[1:])) if in_parts else whole


def _pulled(node: fx.Node, version: Version, own: Version, routes: Routes) -> Compute | None:
    if node.op != "call_function" or len(version) != 1 or node.target is operator.getitem:
        return None
    if not own[0].is_whole:
        return _coarser_view(node, version[0], own[0], routes) or _further(node, version[0], own[0], routes)
    dims = dims_of(node)
    if dims is None or not version[0].is_split or version[0].partial:
        return None
    if (windowed := window_pull(node, version[0])) is not None:
        return Compute(windowed.operands)
    merged = node.target == torch.ops.prims.iota.default and len(version[0].dims[0]) > 1
    if merged and not routes.numbers_a_bag(node, version[0]):
        return None  # merged axes: this rank's positions are no arithmetic sequence
    solution = pull(dims, label_sizes(dims, node), version[0])
    return Compute(solution.operands) if solution else None


def _further(node: fx.Node, version: Layout, own: Layout, routes: Routes) -> Compute | None:
    """A comparison or choice of which a part is wanted, split over tp besides: of the parts of its operands."""
    if node.target not in _CHEAP or version.partial or own.partial or bags_of(own):
        return None
    added = version.split_axes() - own.split_axes()
    if own.split_axes() - version.split_axes() or any(routes.splits[a.name].mesh_axes != ("tp",) for a in added):
        return None
    dims = dims_of(node)
    solution = pull(dims, label_sizes(dims, node), version) if dims else None
    return Compute(solution.operands) if solution else None


_CHEAP = (torch.ops.aten.where.self, torch.ops.aten.eq.Tensor)


def _coarser_view(node: fx.Node, version: Layout, own: Layout, routes: Routes) -> Compute | None:
    """A view of tokens that are gathered over tp: of their operand, which is then gathered once for all its views."""
    if node.target not in _REORDERED or canonical(coarsened(own, routes.splits)) != version or version == own:
        return None
    dims = dims_of(node)
    if dims is None or version.partial:
        return None
    solution = pull(dims, label_sizes(dims, node), coarsened(own, routes.splits))
    return Compute(solution.operands) if solution else None


_REORDERED = (*VIEWS, torch.ops.aten.permute.default, torch.ops.aten.transpose.int, torch.ops.aten.t.default)


def _want_operands(
    node: fx.Node,
    layouts: tuple[Layout, ...],
    wanted: dict[fx.Node, dict[Version, None]],
    natural: dict[fx.Node, Version],
) -> None:
    if node.target is operator.getitem and isinstance(node.args[0].meta["val"], (tuple, list)):
        # one result of several: all come as they come
        wanted[node.args[0]][tuple(canonical(layout) for layout in natural[node.args[0]])] = None
        return
    for operand, layout in zip(operands_of(node), layouts, strict=True):
        wanted[operand][(canonical(layout),)] = None


def output_table(program: Program, layouts: list[Layout | None]) -> list[Output]:
    """The outputs with the layouts in which they are returned."""
    table = []
    for output, layout in zip(program.outputs, layouts, strict=True):
        lazily = output.kind is OutputKind.USER and layout is not None and layout.is_split
        table.append(replace(output, layout=layout if lazily else None))
    return table
