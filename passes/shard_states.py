"""shard_states: parameters are gathered where they are used, gradients are reduced to the shard that owns them.

A parameter is sharded on dim 0 over `degree` consecutive ranks, ceil(rows / degree) rows a rank, as DTensor does.
Bytes on the wire per rank, Φ bytes of parameters, degree D, R replicas: each gather Φ(D-1)/D, the reduce-scatter
Φ(D-1)/D, and over the R/D copies an all-reduce of Φ/D: 2(Φ/D)(R/D-1)/(R/D).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from evocompile.layout import Layout
from evocompile.mesh import group_name, group_ranks
from evocompile.program import Input, InputKind, OutputKind, Program, output_values, placeholders

from .build import Builder

aten = torch.ops.aten


def shard_rows(rows: int, degree: int, index: int) -> tuple[int, int]:
    """Rows [lo, hi) of dim 0 that shard `index` of `degree` holds: ceil-sized chunks, the last ones fewer or none."""
    chunk = -(-rows // degree)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


def shard_states(program: Program) -> Program:
    """Replaces whole parameters by shards and pending gradients by reduced shards, in place."""
    assert program.joint is not None
    builder = Builder(program, in_place=True)
    graph = program.joint.graph
    degree = program.plan.shard_degrees.params
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node, each in zip(placeholders(graph), program.inputs, strict=True):
        if each.kind is InputKind.PARAMETER and each.shape and degree > 1:
            _gather_parameter(builder, node, each, degree, order)
    (output,) = graph.find_nodes(op="output")
    returned = output_values(graph)
    starts = [
        _reduce_gradient(builder, node, out.name, degree)
        if out.kind is OutputKind.GRADIENT and isinstance(node, fx.Node)
        else None
        for out, node in zip(program.outputs, returned, strict=True)
    ]
    # Nothing in the step needs a gradient before the optimizer does, so all are waited for at the end.
    with graph.inserting_before(output):
        for i, (start, node) in enumerate(zip(starts, returned, strict=True)):
            if isinstance(node, fx.Node) and program.outputs[i].kind is OutputKind.GRADIENT:
                returned[i] = _finish_gradient(builder, start, node, program.outputs[i].name, degree)
    output.args = (returned,)
    return replace(program, joint=program.joint)


def _gather_parameter(builder: Builder, node: fx.Node, each: Input, degree: int, order: dict[fx.Node, int]) -> None:
    """The placeholder becomes the rank's shard; its users get the gathered parameter."""
    users = list(node.users)
    rows, rest = each.shape[0], list(each.shape[1:])
    lo, hi = shard_rows(rows, degree, builder.program.rank % degree)
    with builder.fake_mode:
        node.meta["val"] = node.meta["val"].new_empty([hi - lo, *rest])
    builder.layouts.pop(node, None)  # a shard of a state, not of an activation
    if not users:
        return
    chunk = -(-rows // degree)
    builder.source = node
    with builder.graph.inserting_before(min(users, key=order.__getitem__)):
        shard = node
        if hi - lo < chunk:
            padding = [0, 0] * len(rest) + [0, chunk - (hi - lo)]
            shard = builder.call(aten.constant_pad_nd.default, (node, padding, 0))
        group = group_name("params", builder.program.mesh.shard_group(builder.program.rank, degree))
        whole = builder.wait(builder.all_gather(shard, group, f"parameter {each.name}"))
        if chunk * degree > rows:
            whole = builder.call(aten.slice.Tensor, (whole, 0, 0, rows))
    builder.layouts[whole] = Layout.whole(each.shape)
    for user in users:
        user.replace_input_with(node, whole)


def _reduce_gradient(builder: Builder, node: fx.Node, name: str, degree: int) -> fx.Node | None:
    """Starts the reduction right after the gradient is known; None if every rank already has the sum."""
    pending = builder.layouts[node].partial
    builder.source = node
    if not pending:
        return None
    mesh, rank = builder.program.mesh, builder.program.rank
    everywhere = pending == {axis for axis, count in mesh.axes if count > 1}
    with builder.graph.inserting_before(node.next):
        if degree == 1 or not everywhere or not node.meta["val"].shape:
            return builder.all_reduce(node, builder.group("grads", pending), f"gradient of {name}")
        padded = _pad_rows(builder, node, degree)
        group = group_name("grads", mesh.shard_group(rank, degree))
        return builder.reduce_scatter(padded, group, f"gradient of {name}")


def _finish_gradient(builder: Builder, start: fx.Node | None, node: fx.Node, name: str, degree: int) -> fx.Node:
    """Waits for the reduction and leaves the rank's shard, summed over all replicas."""
    builder.source = node
    shape = node.meta["val"].shape
    mesh, rank = builder.program.mesh, builder.program.rank
    value = node if start is None else builder.wait(start)
    if degree == 1 or not shape:
        return value
    lo, hi = shard_rows(shape[0], degree, rank % degree)
    if start is None or builder.collectives[start].kind == "all_reduce":
        return builder.call(aten.slice.Tensor, (value, 0, lo, hi))
    if hi - lo < value.meta["val"].shape[0]:
        value = builder.call(aten.slice.Tensor, (value, 0, 0, hi - lo))
    copies = group_name("grads.copies", mesh.replica_group(rank, degree))
    if len(group_ranks(copies)) > 1:
        value = builder.wait(builder.all_reduce(value, copies, f"gradient of {name} over the copies of its shard"))
    return value


def _pad_rows(builder: Builder, node: fx.Node, degree: int) -> fx.Node:
    rows = node.meta["val"].shape[0]
    missing = -rows % degree
    if not missing:
        return node
    padding = [0, 0] * (len(node.meta["val"].shape) - 1) + [0, missing]
    return builder.call(aten.constant_pad_nd.default, (node, padding, 0))
