"""shard_states: parameters are gathered where they are used, gradients reduced as far as each micro-batch has to.

Over R replicas, parameters have degree P, gradients G, the optimizer O: P | G | O | R (`evocompile/shards.py` says
which rows are where). This pass does what every micro-batch does: gathers within P, and reduce-scatters within G. What
the first and the last one do besides is `micro_batches`. A gradient becomes the sum over G ranks only; what
remains to be summed, over R / G of them, is summed by the last micro-batch.

Bytes on the wire per rank, Φ bytes of parameters: each gather Φ(P-1)/P, each reduce-scatter Φ(G-1)/G.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from evocompile.layout import Layout
from evocompile.mesh import group_name
from evocompile.program import Input, InputKind, OutputKind, Program, output_values, placeholders
from evocompile.shards import chunk_rows, shard_shape

from .build import Builder

aten = torch.ops.aten


def shard_states(program: Program) -> Program:
    """Replaces whole parameters by shards over P, and pending gradients by shards over G, in place."""
    assert program.joint is not None
    builder = Builder(program, in_place=True)
    graph = program.joint.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node, each in zip(placeholders(graph), program.inputs, strict=True):
        if each.kind is InputKind.PARAMETER and each.shape and program.plan.shard_degrees.optimizer > 1:
            _gather_parameter(builder, node, each, order)
    (output,) = graph.find_nodes(op="output")
    returned = output_values(graph)
    outputs = list(program.outputs)
    gradients = [
        i
        for i, (out, node) in enumerate(zip(outputs, returned, strict=True))
        if out.kind is OutputKind.GRADIENT and isinstance(node, fx.Node)
    ]
    for i in gradients:
        returned[i] = _reduce_within(builder, returned[i], outputs[i].name)
    # Nothing in the step needs a gradient before the optimizer does, so all are waited for at the end.
    with graph.inserting_before(output):
        for i in gradients:
            returned[i] = _finish(builder, returned[i], outputs[i].shape, outputs[i].dtype)
            outputs[i] = replace(outputs[i], dtype=returned[i].meta["val"].dtype)
    output.args = (returned,)
    return replace(program, joint=program.joint, outputs=outputs)


def _gather_parameter(builder: Builder, node: fx.Node, each: Input, order: dict[fx.Node, int]) -> None:
    """The placeholder becomes the rank's shard over P; its users get the gathered parameter."""
    program = builder.program
    degrees = program.plan.shard_degrees
    users = list(node.users)
    with builder.fake_mode:
        shape = shard_shape(each.shape, degrees.params, degrees.optimizer, program.rank)
        node.meta["val"] = node.meta["val"].new_empty(shape)
    builder.layouts.pop(node, None)  # a shard of a state, not of an activation
    if not users:
        return
    chunk = chunk_rows(each.shape[0], degrees.optimizer)
    builder.source = node
    with builder.graph.inserting_before(min(users, key=order.__getitem__)):
        whole = node
        if degrees.params > 1:
            shard = pad_rows(builder, node, chunk * degrees.optimizer // degrees.params)
            group = group_name("params", program.mesh.shard_group(program.rank, degrees.params))
            whole = builder.wait(builder.all_gather(shard, group, f"parameter {each.name}"))
            whole = _in_order(builder, whole, degrees.params, degrees.optimizer // degrees.params, chunk)
        if chunk * degrees.optimizer > each.shape[0]:
            whole = builder.call(aten.slice.Tensor, (whole, 0, 0, each.shape[0]))
    builder.layouts[whole] = Layout.whole(each.shape)
    for user in users:
        user.replace_input_with(node, whole)


def _in_order(builder: Builder, value: fx.Node, outer: int, inner: int, chunk: int) -> fx.Node:
    """Rows (outer, inner, chunk) as (inner, outer, chunk): between the order of ranks and that of the chunks."""
    if outer == 1 or inner == 1:
        return value
    rest = list(value.meta["val"].shape[1:])
    parts = builder.call(aten.view.default, (value, [outer, inner, chunk, *rest]))
    parts = builder.call(aten.transpose.int, (parts, 0, 1))
    return builder.call(aten.reshape.default, (parts, [outer * inner * chunk, *rest]))


def _reduce_within(builder: Builder, node: fx.Node, name: str) -> fx.Node:
    """Starts the reduction within G right after the gradient is known; the start, or what needs none."""
    program = builder.program
    degrees, optimizer = program.plan.shard_degrees, program.plan.shard_degrees.optimizer
    pending = builder.layouts[node].partial
    builder.source = node
    with builder.graph.inserting_before(node.next):
        value = node
        # Where replicas hold the same value already, the first one contributes it, so that all gradients are sums.
        # So do micro-batches, which are replicas in `sharding`.
        if any(index for axis, index in builder.sharding.coordinate.items() if axis not in pending):
            value = builder.call(aten.mul.Tensor, (value, 0))
        shape = node.meta["val"].shape
        if not shape or optimizer == 1:
            return value
        chunk = chunk_rows(shape[0], optimizer)
        value = pad_rows(builder, value, chunk * optimizer)
        if degrees.grads == 1:
            return value
        value = cast(builder, value, program.precision.reduces(value.meta["val"].dtype))
        value = _in_order(builder, value, optimizer // degrees.grads, degrees.grads, chunk)
        group = group_name("grads", program.mesh.shard_group(program.rank, degrees.grads))
        return builder.reduce_scatter(value, group, f"gradient of {name}")


def _finish(builder: Builder, value: fx.Node, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    """Waits for the reduction within G; the shard over G, in the type in which gradients are accumulated."""
    program = builder.program
    degrees = program.plan.shard_degrees
    builder.source = value
    if value in builder.collectives:
        value = builder.wait(value)
    rows = shard_shape(shape, degrees.grads, degrees.optimizer, program.rank)[:1]
    if rows and rows[0] < value.meta["val"].shape[0]:
        value = builder.call(aten.slice.Tensor, (value, 0, 0, rows[0]))
    return cast(builder, value, program.precision.accumulates(dtype))


def pad_rows(builder: Builder, node: fx.Node, rows: int) -> fx.Node:
    """The value with zeros below it, up to `rows` rows."""
    shape = node.meta["val"].shape
    if shape[0] == rows:
        return node
    padding = [0, 0] * (len(shape) - 1) + [0, rows - shape[0]]
    return builder.call(aten.constant_pad_nd.default, (node, padding, 0))


def cast(builder: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return builder.call(torch.ops.prims.convert_element_type.default, (node, dtype))
