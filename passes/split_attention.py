"""split_attention: every attention becomes the steps of its schedule, visible in the graph.

One engine carries out every schedule of `schedules.py`. At each step a rank has at most one job. What the job needs of
another rank comes straight from who has it, one step ahead; what the job gives to another rank (a helper's state, the
gradients of fetched keys and values or queries) goes straight back and is added there one step later. Forward and
backward use communicators of their own, since their exchanges may be under way together. Around it all, parts of the
sequence are exchanged for heads where the plan says so (`heads.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from evocompile.program import InputKind, Program

from .build import Builder
from .choose_schedule import Placing, placing_of
from .dependence import dependents, forward_nodes
from .exchanges import Coming, Exchanges, Part
from .gradients import Gradients
from .heads import Heads, for_each_key_head, for_each_query_head, to_heads, to_sequence
from .rules.attention import ATTENTION, ATTENTION_BACKWARD, Backward, Forward, call_of
from .schedules import Job, bounds

aten, prims = torch.ops.aten, torch.ops.prims
STEP = torch.ops.evocompile.attention_step.default
MERGE = torch.ops.evocompile.attention_merge.default
BACKWARD_STEP = torch.ops.evocompile.attention_backward_step.default


@dataclass(frozen=True)
class _Common:
    """What the steps of an attention have in common: the arguments beside the tensors that are split.

    changes: the last arguments, see `kernels.attention`; trained: how many of the params have gradients.
    """

    tables: Sequence[fx.Node]
    mask: str
    scale: float
    changes: tuple[Any, ...]
    trained: int


@dataclass(frozen=True)
class _SplitByHeads:
    """What a forward leaves to its backward when heads are split."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    out: fx.Node
    lse: fx.Node


def split_attention(program: Program) -> Program:
    """Expands the attention nodes of the joint graph at local shapes, in place."""
    assert program.joint is not None
    builder = Builder(program, in_place=True)
    exchanged: dict[fx.Node, _SplitByHeads] = {}  # by the log-sum-exp that the backward is given
    forward = forward_nodes(program)
    early = _first_of_backward(program, forward)
    for node in list(program.joint.graph.nodes):
        if node.target not in (ATTENTION, ATTENTION_BACKWARD):
            continue
        builder.source = node
        with program.joint.graph.inserting_before(node):
            if node.target == ATTENTION:
                # what backward attends again is exchanged on backward's communicators
                results = _attention(builder, node, exchanged, "" if node in forward else ".backward")
            else:
                call = call_of(node)
                # a rank's first keys of others travel while the attention behind this one is still at its own block
                can = early is not None and {call.k, call.v} <= forward and call.k < early and call.v < early
                results, early = _attention_backward(builder, node, exchanged, early if can else None)
        _replace_results(builder, node, results)
    return replace(program, joint=program.joint)


def _first_of_backward(program: Program, forward: set[fx.Node]) -> fx.Node | None:
    """The first node that depends on a gradient of the outputs."""
    assert program.joint is not None
    graph = program.joint.graph
    inputs = zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True)
    tangents = {node for node, each in inputs if each.kind is InputKind.TANGENT}
    later = dependents(graph, tangents) - tangents - forward
    return next((node for node in graph.nodes if node in later), None)


def _replace_results(builder: Builder, node: fx.Node, results: Sequence[fx.Node]) -> None:
    for use in list(node.users):
        assert use.target is operator.getitem, "the results of an attention are picked with getitem"
        result = results[use.args[1]]  # type: ignore[index]
        layout = builder.layouts.pop(use)
        if tuple(result.meta["val"].shape) == builder.sharding.local_shape(layout):
            builder.layouts[result] = layout
        use.replace_all_uses_with(result)
        builder.graph.erase_node(use)
    builder.graph.erase_node(node)


def _attention(builder: Builder, node: fx.Node, exchanged: dict[fx.Node, _SplitByHeads], suffix: str) -> list[fx.Node]:
    call = call_of(node)
    placing = placing_of(builder, node)
    common, heads, dtype = _common(builder, call, placing.heads), placing.heads, call.q.meta["val"].dtype
    if heads is None:
        out, lse = _forward(builder, placing, common, suffix, call.q, call.k, call.v)
        return [_cast(builder, out, dtype), lse]
    group, why = heads.group(suffix), "queries, keys and values from sequence to heads"
    q, k, v = to_heads(builder, heads, [call.q, call.k, call.v], ["queries", "keys", "keys"], group, why)
    k_heads, v_heads = (for_each_query_head(builder, heads, each) for each in (k, v))
    out, lse = _forward(builder, placing, common, suffix, q, k_heads, v_heads)
    out = _cast(builder, out, dtype)
    (whole,) = to_sequence(builder, heads, [out], ["queries"], group, "attention's output from heads to sequence")
    if _is_read(node, result=1):  # sinks are merged, over the sequence
        why = "attention's log-sum-exp from heads to sequence"
        return [whole, *to_sequence(builder, heads, [lse], ["queries"], group, why)]
    exchanged[lse] = _SplitByHeads(q, k, v, out, lse)
    return [whole, lse]


def _attention_backward(
    builder: Builder, node: fx.Node, exchanged: dict[fx.Node, _SplitByHeads], early: fx.Node | None
) -> tuple[list[fx.Node], fx.Node | None]:
    """The gradients, and the step at the rank's own block where it is the last. early: before which the first exchange
    may stand."""
    call = call_of(node)
    assert isinstance(call, Backward)
    placing = placing_of(builder, node)
    common, heads = _common(builder, call, placing.heads), placing.heads
    dtypes = [each.meta["val"].dtype for each in (call.q, call.k, call.v, *call.form.params[: call.form.trained])]
    if heads is None:
        tensors = call.d_out, call.q, call.k, call.v, call.out, call.lse
        gradients, last = _backward(builder, placing, common, early, *tensors)
        return _cast_all(builder, gradients, dtypes), last
    if call.lse not in exchanged or heads.shared:  # keys and values are not there yet, on some rank
        early = None
    group = heads.group(".backward")
    there = exchanged.get(call.lse) or _by_heads(builder, heads, call, group)
    why = "the output's gradient from sequence to heads"
    (d_out,) = to_heads(builder, heads, [call.d_out], ["queries"], group, why)
    k, v = (for_each_query_head(builder, heads, each) for each in (there.k, there.v))
    tensors = d_out, there.q, k, v, there.out, there.lse
    (dq, dk, dv, *d_params), last = _backward(builder, placing, common, early, *tensors)
    gradients = [dq, *(for_each_key_head(builder, heads, each) for each in (dk, dv))]
    if not heads.shared:  # else they are summed first, in the accumulation dtype
        gradients = _cast_all(builder, gradients, dtypes[:3])
    why = "gradients of queries, keys and values from heads to sequence"
    gradients = to_sequence(builder, heads, gradients, ["queries", "keys", "keys"], group, why)
    d_params = [_among_all_heads(builder, heads, each) for each in d_params]
    return _cast_all(builder, [*gradients, *d_params], dtypes), last


def _is_read(node: fx.Node, result: int) -> bool:
    """Whether more than the backward reads this result of an attention."""
    readers = [reader for use in node.users if use.args[1] == result for reader in use.users]
    return any(reader.target != ATTENTION_BACKWARD for reader in readers)


def _by_heads(builder: Builder, heads: Heads, call: Backward, group: str) -> _SplitByHeads:
    """What the forward did not leave, as its output and log-sum-exp were changed over the sequence."""
    why = "queries, keys and values from sequence to heads, again for backward"
    q, k, v = to_heads(builder, heads, [call.q, call.k, call.v], ["queries", "keys", "keys"], group, why)
    why = "attention's {} with sinks from sequence to heads"
    (out,) = to_heads(builder, heads, [call.out], ["queries"], group, why.format("output"))
    (lse,) = to_heads(builder, heads, [call.lse], ["queries"], group, why.format("log-sum-exp"))
    return _SplitByHeads(q, k, v, out, lse)


def _common(builder: Builder, call: Forward | Backward, heads: Heads | None) -> _Common:
    batch, head = _place(builder, call.q)
    form = call.form
    if heads is not None:
        first, last = heads.queries
        head += first
        form = form._replace(
            params=[builder.call(aten.slice.Tensor, (each, 0, first, last)) for each in call.form.params]
        )
    return _Common(call.tables, call.mask, call.scale, form.arguments(call.mask, batch, head), form.trained)


def _place(builder: Builder, q: fx.Node) -> tuple[int, int]:
    """Global numbers of this rank's first batch row and first query head: what b and h count from."""
    layout, firsts = builder.layouts[q], []
    for dim in layout.dims[:2]:
        first = 0
        for factor in dim:
            intervals = builder.sharding.intervals(factor.axis) if factor.split and factor.axis else ()
            first = first * factor.size + (intervals[0][0] if intervals else 0)
        firsts.append(first)
    return firsts[0], firsts[1]


def _among_all_heads(builder: Builder, heads: Heads, gradient: fx.Node) -> fx.Node:
    """The gradient of params of the own heads as this rank's term of that of all."""
    first, last = heads.queries
    padding = [0, 0] * (gradient.meta["val"].ndim - 1) + [first, heads.heads["queries"][-1][1] - last]
    return builder.call(aten.constant_pad_nd.default, (gradient, padding, 0))


def _forward(
    builder: Builder, placing: Placing, common: _Common, suffix: str, q: fx.Node, k: fx.Node, v: fx.Node
) -> list[fx.Node]:
    """The state (out, log-sum-exp) of this rank's queries after all its steps."""
    schedule = placing.schedule
    exchanges = Exchanges(builder, schedule, *placing.groups(suffix), is_backward=False, queries=[[q]])
    own = Part((k, v), schedule.keys[schedule.own])
    held = {schedule.own: own}
    state: list[fx.Node] = []
    data: list[list[fx.Node]] = []
    coming, visiting = exchanges.fetch(1, held), exchanges.invite(1, own)
    returning: Coming | None = None
    for step in schedule.steps:
        made: list[fx.Node] = []
        if job := schedule.job(step):
            helps = job.queries != schedule.own
            queries = data[0] if helps else [q]
            columns = _columns(exchanges, placing, job, held, data)
            carried = state if state and not helps else [None, None]
            where = (common.mask, *_positions(placing, job), common.scale, *common.changes)
            result = _results(builder, STEP, (*queries, *columns, common.tables, *carried, *where), 2)
            made, state = (result, state) if helps else ([], result)
        state = _merged(builder, state, exchanges.arrive(returning))
        returning = exchanges.give_back(step, made, {"queries": [each.meta["val"] for each in state]})
        data = exchanges.arrive(coming)
        if (outer := _next_outer(placing, step)) is not None:
            held = _received(placing, own, visiting, exchanges)
            visiting = exchanges.invite(outer + 1, own)
        coming = exchanges.fetch(step + 2, held)
    return _merged(builder, state, exchanges.arrive(returning))


def _backward(
    builder: Builder,
    placing: Placing,
    common: _Common,
    early: fx.Node | None,
    d_out: fx.Node,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    out: fx.Node,
    lse: fx.Node,
) -> tuple[list[fx.Node], fx.Node | None]:
    """The gradients of this rank's queries, keys and values, in the accumulation dtype, and the own block's step.

    The own block comes last: meanwhile the last gradients travel to their owner. A double ring begins with it and gives
    no such step. early: before which the first exchange may stand, where no helper needs what is not there yet.
    """
    schedule = placing.schedule
    order = [*schedule.steps[1:], 0] if schedule.window == 1 else list(schedule.steps)
    exchanges = Exchanges(
        builder, schedule, *placing.groups(".backward"), is_backward=True, queries=[[d_out, q, out], [lse]]
    )
    own = Part((k, v), schedule.keys[schedule.own])
    held = {schedule.own: own}
    sums = Gradients(builder, schedule.own, like=(q, k, v))
    sums.hold(held)
    data: list[list[fx.Node]] = []
    own_step: fx.Node | None = None
    fetched = iter([step for step in order if step])
    can = early is not None and schedule.window == 1 and not schedule.has_helpers
    with builder.graph.inserting_before(early) if can else nullcontext():
        coming = exchanges.fetch(next(fetched, 0), held)
    visiting = exchanges.invite(1, own)
    if order[0]:
        data = exchanges.arrive(coming)
        coming = exchanges.fetch(next(fetched, 0), held)
    returning: Coming | None = None
    home: Coming | None = None
    for step in order:
        made: list[fx.Node] = []
        if job := schedule.job(step):
            queries = [*data[0], *data[1]] if job.queries != schedule.own else [d_out, q, out, lse]
            columns = _columns(exchanges, placing, job, held, data)
            where = (common.tables, common.mask, *_positions(placing, job), common.scale, *common.changes)
            arguments = (*queries[:2], *columns, *queries[2:], *where)
            gradients = _results(builder, BACKWARD_STEP, arguments, 3 + common.trained)
            own_step = gradients[0].args[0] if step == 0 and schedule.window == 1 else own_step  # type: ignore[assignment]
            made = sums.take(job, schedule.columns(schedule.own, job), gradients, held)
        sums.came(returning, exchanges.arrive(returning))
        outer = step // schedule.window - 1  # the round whose last returns have just come
        if schedule.window > 1 and step % schedule.window == 0 and outer > 0:
            home = _sent_home(exchanges, placing, sums, outer, home)
        returning = exchanges.give_back(step, made, sums.expected)
        data = exchanges.arrive(coming)
        if (next_outer := _next_outer(placing, step)) is not None:
            held = _received(placing, own, visiting, exchanges)
            sums.hold(held)
            visiting = exchanges.invite(next_outer + 1, own)
        coming = exchanges.fetch(next(fetched, 0), held)
    sums.came(returning, exchanges.arrive(returning))
    if schedule.window > 1:
        home = _sent_home(exchanges, placing, sums, schedule.windows[-1], home)
    sums.came(home, exchanges.arrive(home))
    return [*sums.queries, *sums.blocks[schedule.own].tensors, *sums.params], own_step


def _columns(
    exchanges: Exchanges, placing: Placing, job: Job, held: Mapping[int, Part], data: list[list[fx.Node]]
) -> Sequence[fx.Node]:
    """The keys and values of a job: those of a block that is held, or what has just come."""
    schedule = placing.schedule
    return exchanges.part(held[job.keys], schedule.columns(schedule.own, job)) if job.keys in held else data[0]


def _next_outer(placing: Placing, step: int) -> int | None:
    """The round of a double ring that begins after `step`, if one does."""
    outer, inner = divmod(step + 1, placing.schedule.window)
    return outer if placing.schedule.window > 1 and inner == 0 and outer in placing.schedule.windows else None


def _received(placing: Placing, own: Part, visiting: Coming | None, exchanges: Exchanges) -> dict[int, Part]:
    """The blocks that are held in a round of a double ring: the own one, and the one that has just come."""
    held = {placing.schedule.own: own}
    for tensors in exchanges.arrive(visiting):
        assert visiting is not None
        held[visiting.block] = Part(tuple(tensors), visiting.positions)
    return held


def _sent_home(
    exchanges: Exchanges, placing: Placing, sums: Gradients, outer: int, before: Coming | None
) -> Coming | None:
    """Sends home the gradients of the block that was held in round `outer`; takes what came of the round `before`."""
    schedule = placing.schedule
    sums.came(before, exchanges.arrive(before))
    block = sums.blocks.get(schedule.visitor(schedule.own, outer))
    return exchanges.send_home(outer, block.tensors if block else (), sums.blocks[schedule.own].tensors)


def _merged(builder: Builder, state: list[fx.Node], came: list[list[fx.Node]]) -> list[fx.Node]:
    """The state with the one that a helper returned."""
    return _results(builder, MERGE, (*state, *came[0]), 2) if came else state


def _positions(placing: Placing, job: Job) -> tuple[list[int], list[int]]:
    """Positions of a job's queries and keys as [lo, hi, lo, hi, …]."""
    schedule = placing.schedule
    return bounds(schedule.queries[job.queries]), bounds(schedule.columns(schedule.own, job))


def _results(builder: Builder, target: object, arguments: tuple[object, ...], count: int) -> list[fx.Node]:
    result = builder.call(target, arguments)  # type: ignore[arg-type]
    return [builder.call(operator.getitem, (result, i)) for i in range(count)]


def _cast_all(builder: Builder, values: Sequence[fx.Node], dtypes: Sequence[torch.dtype]) -> list[fx.Node]:
    return [_cast(builder, value, dtype) for value, dtype in zip(values, dtypes, strict=True)]


def _cast(builder: Builder, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return builder.call(prims.convert_element_type.default, (value, dtype))
