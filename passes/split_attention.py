"""split_attention: every attention becomes the steps of its schedule, visible in the graph.

One engine carries out every schedule of `schedules.py`. At each step a rank has at most one job. What the job needs of
another rank comes straight from its owner, one step ahead; what the job gives to another rank (a helper's state, the
gradients of fetched keys and values or queries) goes straight back and is added there one step later. Forward and
backward use communicators of their own, since their exchanges may be under way together.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from evocompile.kernels.mask import Tile, parse_mask
from evocompile.layout import Axis, Interval
from evocompile.mesh import group_ranks
from evocompile.program import Note, Program, source_line

from . import schedules
from .build import Builder
from .exchanges import Coming, Exchanges
from .rules.attention import ATTENTION, ATTENTION_BACKWARD, call_of
from .schedules import Job, Schedule

aten, prims = torch.ops.aten, torch.ops.prims
STEP = torch.ops.evocompile.attention_step.default
MERGE = torch.ops.evocompile.attention_merge.default
BACKWARD_STEP = torch.ops.evocompile.attention_backward_step.default

Intervals = tuple[Interval, ...]


def split_attention(program: Program) -> Program:
    """Expands the attention nodes of the joint graph at local shapes, in place."""
    assert program.joint is not None
    builder = Builder(program, in_place=True)
    for node in list(program.joint.graph.nodes):
        if node.target not in (ATTENTION, ATTENTION_BACKWARD):
            continue
        builder.source = node
        with program.joint.graph.inserting_before(node):
            results = _forward(builder, node) if node.target == ATTENTION else _backward(builder, node)
        _replace_results(builder, node, results)
    return replace(program, joint=program.joint)


def _replace_results(builder: Builder, node: fx.Node, results: Sequence[fx.Node]) -> None:
    for use in list(node.users):
        assert use.target is operator.getitem, "the results of an attention are picked with getitem"
        result = results[use.args[1]]  # type: ignore[index]
        builder.layouts[result] = builder.layouts.pop(use)
        use.replace_all_uses_with(result)
        builder.graph.erase_node(use)
    builder.graph.erase_node(node)


def _forward(builder: Builder, node: fx.Node) -> list[fx.Node]:
    q, k, v, tables, mask, scale, form = call_of(node)
    schedule = _schedule(builder, node, q, k, mask)
    group = _group(builder, k, schedule)
    exchanges = Exchanges(builder, schedule, group, is_backward=False, queries=[[q]], keys=[[k, v]])
    changes = form.arguments(*_place(builder, q))
    state: list[fx.Node] = []
    data: list[list[fx.Node]] = []
    coming, returning = exchanges.fetch(1), None
    for step in schedule.steps:
        made: list[fx.Node] = []
        if job := schedule.job(step):
            helps, fetches = job[0] != schedule.own, job[1] != schedule.own
            rows, columns = (data[0] if helps else [q]), (data[0] if fetches else [k, v])
            carried = state if state and not helps else [None, None]
            arguments = (*rows, *columns, tables, *carried, mask, *_positions(schedule, job), scale, *changes)
            result = _results(builder, STEP, arguments, 2)
            made, state = (result, state) if helps else ([], result)
        state = _merged(builder, state, exchanges.arrive(returning))
        returning = exchanges.give_back(step, made, {"queries": state})
        data, coming = exchanges.arrive(coming), exchanges.fetch(step + 2)
    out, lse = _merged(builder, state, exchanges.arrive(returning))
    return [_cast(builder, out, q.meta["val"].dtype), lse]


def _backward(builder: Builder, node: fx.Node) -> list[fx.Node]:
    d_out, q, k, v, out, lse, tables, mask, scale, form = call_of(node)
    schedule = _schedule(builder, node, q, k, mask)
    group = _group(builder, k, schedule, ".backward")
    rows_here, columns_here = [d_out, q, out, lse], [k, v]
    exchanges = Exchanges(
        builder, schedule, group, is_backward=True, queries=[[d_out, q, out], [lse]], keys=[columns_here]
    )
    dq: list[fx.Node] = []
    dkv: list[fx.Node] = []
    d_params: list[fx.Node] = []
    changes = form.arguments(*_place(builder, q))
    data: list[list[fx.Node]] = []
    coming, returning = exchanges.fetch(1), None
    for step in schedule.steps:
        made: list[fx.Node] = []
        if job := schedule.job(step):
            helps, fetches = job[0] != schedule.own, job[1] != schedule.own
            rows = [*data[0], *data[1]] if helps else rows_here
            columns = data[0] if fetches else columns_here
            arguments = (*rows[:2], *columns, *rows[2:], tables, mask, *_positions(schedule, job), scale, *changes)
            of_rows, *others = _results(builder, BACKWARD_STEP, arguments, 3 + form.trained)
            of_columns, d_params = others[:2], _sums(builder, d_params, others[2:])
            made = [of_rows] if helps else of_columns if fetches else []
            dq = dq if helps else _sums(builder, dq, [of_rows])
            dkv = dkv if fetches else _sums(builder, dkv, of_columns)
        dq, dkv = _with_returned(builder, dq, dkv, returning, exchanges)
        returning = exchanges.give_back(step, made, {"queries": dq, "keys": dkv})
        data, coming = exchanges.arrive(coming), exchanges.fetch(step + 2)
    dq, dkv = _with_returned(builder, dq, dkv, returning, exchanges)
    return [
        _cast(builder, gradient, operand.meta["val"].dtype)
        for gradient, operand in zip([*dq, *dkv, *d_params], (q, k, v, *form.params[: form.trained]), strict=True)
    ]


def _merged(builder: Builder, state: list[fx.Node], came: list[list[fx.Node]]) -> list[fx.Node]:
    """The state with the one that a helper returned."""
    return _results(builder, MERGE, (*state, *came[0]), 2) if came else state


def _with_returned(
    builder: Builder, dq: list[fx.Node], dkv: list[fx.Node], returning: Coming | None, exchanges: Exchanges
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The gradients of the own queries, keys and values with what another rank's job added to them."""
    came = exchanges.arrive(returning)
    if not came or returning is None:
        return dq, dkv
    if returning.side == "queries":
        return _sums(builder, dq, came[0]), dkv
    return dq, _sums(builder, dkv, came[0])


def _schedule(builder: Builder, node: fx.Node, q: fx.Node, k: fx.Node, mask: str) -> Schedule:
    """Who holds what, and does what when; a single coordinate where the keys are whole."""
    sharding, program = builder.sharding, builder.program
    q_axis, k_axis = _axis(builder, q), _axis(builder, k)
    if k_axis is None:
        queries = sharding.intervals(q_axis) if q_axis else ((0, q.meta["val"].shape[2]),)
        keys = ((0, k.meta["val"].shape[2]),)
        return Schedule((program.rank,), 0, (queries,), (keys,), schedules.ring([[True]]))
    assert q_axis is not None
    mesh_axis = sharding.splits[k_axis.name].mesh_axis
    ranks = program.mesh.peers(program.rank, {mesh_axis})
    seen_from = [sharding.at({**sharding.coordinate, mesh_axis: i}) for i in range(len(ranks))]
    queries_of = tuple(each.intervals(q_axis) for each in seen_from)
    keys_of = tuple(each.intervals(k_axis) for each in seen_from)
    needs = [[_sees(mask, q_part, k_part) for k_part in keys_of] for q_part in queries_of]
    jobs = schedules.ring(needs)
    if program.plan.attention == "balanced":
        if schedules.is_causal(needs):
            jobs = schedules.balanced(needs)
        elif node.target == ATTENTION:
            why = f"the mask {mask!r} lets queries see later keys; the balanced schedule is for causal masks"
            program.notes.append(Note("attention by the ring schedule", why, source_line(node)))
    return Schedule(ranks, sharding.coordinate[mesh_axis], queries_of, keys_of, jobs)


def _sees(mask: str, queries: Intervals, keys: Intervals) -> bool:
    predicate = parse_mask(mask)
    return any(predicate.classify(*q_part, *k_part) is not Tile.EMPTY for q_part in queries for k_part in keys)


def _axis(builder: Builder, tensor: fx.Node) -> Axis | None:
    """The logical axis over which dim 2 (positions) of a localised (B, H, S, D) tensor is split."""
    (factor,) = builder.layouts[tensor].dims[2]
    return factor.axis if factor.split else None


def _group(builder: Builder, k: fx.Node, schedule: Schedule, suffix: str = "") -> str:
    """The communicator of the ranks that split the keys, named by their mesh axis: "cp:0,1", "cp.backward:0,1"."""
    axis = _axis(builder, k)
    if axis is None:
        return ""
    mesh_axis = builder.sharding.splits[axis.name].mesh_axis
    group = builder.group(mesh_axis + suffix, frozenset({mesh_axis}))
    assert group_ranks(group) == schedule.ranks
    return group


def _place(builder: Builder, q: fx.Node) -> tuple[int, int]:
    """Global numbers of this rank's first batch row and first query head: what b and h count from."""
    layout, firsts = builder.layouts[q], []
    for dim in layout.dims[:2]:
        (factor,) = dim
        intervals = builder.sharding.intervals(factor.axis) if factor.split and factor.axis else ((0, factor.size),)
        firsts.append(intervals[0][0] if intervals else 0)
    return firsts[0], firsts[1]


def _positions(schedule: Schedule, job: Job) -> tuple[list[int], list[int]]:
    """Positions of a job's queries and keys as [lo, hi, lo, hi, …]."""
    queries, keys = (
        [bound for interval in intervals for bound in interval]
        for intervals in (schedule.queries[job[0]], schedule.keys[job[1]])
    )
    return queries, keys


def _results(builder: Builder, target: object, arguments: tuple[object, ...], count: int) -> list[fx.Node]:
    result = builder.call(target, arguments)  # type: ignore[arg-type]
    return [builder.call(operator.getitem, (result, i)) for i in range(count)]


def _sums(builder: Builder, total: list[fx.Node], more: list[fx.Node]) -> list[fx.Node]:
    if not total:
        return more
    return [builder.call(aten.add.Tensor, (a, b)) for a, b in zip(total, more, strict=True)]


def _cast(builder: Builder, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return builder.call(prims.convert_element_type.default, (value, dtype))
