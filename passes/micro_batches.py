"""micro_batches: what the first and the last micro-batch of a step do besides, as variants of the two graphs.

first:    the forward that refreshes parameters: shards over O are gathered to those over P, in the type of the
          computation, and returned after the saved values.
forward:  the forward with the shards over P of an earlier one.
backward: the backward of a step of one micro-batch: gradients go on from G to O, and are summed over all copies.
inner:    the backward that leaves gradients at G, to be accumulated.
last:     `backward` that adds what was accumulated, its last placeholders, before it reduces.

A variant that would be no other graph is `None`: `first` where P = O and the types are the same, `inner` and `last`
where G is the number of replicas, and the types are the same, and no trained parameter is without dimensions.

Bytes on the wire per rank and step, Φ bytes in the type of the parameters computed with, Γ in that of reductions:
refresh Φ(O-P)/(P·O); from G to O Γ(O-G)/(G·O); the R/O copies 2(Γ/O)(R/O-1)/(R/O).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from evocompile.mesh import group_name
from evocompile.program import Input, InputKind, Output, OutputKind, Program, output_values, placeholders
from evocompile.shards import chunk_rows, shard_shape

from .build import Builder
from .shard_states import cast, pad_rows

aten = torch.ops.aten


def micro_batches(program: Program) -> Program:
    """Fills `first`, `inner` and `last`, and makes `backward` that of a whole step."""
    if any(is_copied(program, each) for each in program.inputs):
        program = _with_first(program)
    outputs = [
        replace(each, dtype=_state_dtype(program, each.name)) if each.kind is OutputKind.GRADIENT else each
        for each in program.outputs
    ]
    if program.backward is None or not _goes_on(program, outputs):
        return replace(program, outputs=outputs)
    inner = program.backward
    program = replace(program, inner=inner)
    backward = _reduced(program, inner, accumulated=False)
    last = _reduced(program, inner, accumulated=True)
    return replace(program, backward=backward, last=last, outputs=outputs)


def is_copied(program: Program, each: Input) -> bool:
    """Whether a rank computes with a copy of the parameter that is refreshed from the optimizer's shard."""
    if each.kind is not InputKind.PARAMETER:
        return False
    degrees = program.plan.shard_degrees
    return each.dtype != each.state_dtype or (bool(each.shape) and degrees.params != degrees.optimizer)


def _goes_on(program: Program, outputs: list[Output]) -> bool:
    """Whether a gradient has to be changed after its reduction within G."""
    if program.plan.shard_degrees.grads < program.plan.replicas:
        return True
    replicated = program.plan.replicas > 1
    return any(
        then.kind is OutputKind.GRADIENT and (now.dtype != then.dtype or (replicated and not then.shape))
        for now, then in zip(program.outputs, outputs, strict=True)
    )


def _state_dtype(program: Program, name: str) -> torch.dtype:
    return next(each.state_dtype for each in program.inputs if each.name == name)


# --- the first micro-batch -------------------------------------------------------------------------------------------


def _with_first(program: Program) -> Program:
    """The forward, with all refreshes started at once at its beginning, and each waited for at its first use."""
    assert program.forward is not None
    builder = Builder(program, like=program.forward)
    copies: dict[fx.Node, fx.Node] = {}
    copied: dict[fx.Node, Input] = {}
    own = [each for each in program.inputs if each.kind is not InputKind.TANGENT]
    taken = placeholders(program.forward.graph)
    for node, each in zip(taken, own, strict=True):
        copies[node] = _copy(builder, program, node, copies)
        if is_copied(program, each):
            copied[node] = each
            shape = shard_shape(each.shape, program.plan.shard_degrees.optimizer, _optimizer(program), program.rank)
            builder.layouts.pop(copies[node], None)
            with builder.fake_mode:
                copies[node].meta["val"] = node.meta["val"].new_empty(shape, dtype=each.state_dtype)
    first_use = _first_uses(program.forward.graph)
    for node in sorted(copied, key=lambda node: first_use.get(node, len(first_use))):
        copies[node] = _start_refresh(builder, copies[node], copied[node])
    refreshed: dict[fx.Node, fx.Node] = {}

    def finish(node: fx.Node) -> None:
        if node in copied and node not in refreshed:
            start = copies[node]
            builder.source = node
            refreshed[node] = copies[node] = builder.wait(start) if start in builder.collectives else start

    for node in program.forward.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for each in node.all_input_nodes:
            finish(each)
        copies[node] = _copy(builder, program, node, copies)
    for node in copied:
        finish(node)
    returned = [copies[each] if isinstance(each, fx.Node) else None for each in output_values(program.forward.graph)]
    builder.graph.output([*returned, *(refreshed[node] for node in copied)])
    return _added(program, builder, first=builder.graph_module())


def _first_uses(graph: fx.Graph) -> dict[fx.Node, int]:
    uses: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        for each in node.all_input_nodes:
            uses.setdefault(each, i)
    return uses


def _start_refresh(builder: Builder, shard: fx.Node, each: Input) -> fx.Node:
    """From a shard over O towards that over P: a gather among the ranks whose chunks make it up."""
    program = builder.program
    degrees = program.plan.shard_degrees
    builder.source = shard
    value = cast(builder, shard, each.dtype)
    if not each.shape or degrees.params == degrees.optimizer:
        return value
    value = pad_rows(builder, value, chunk_rows(each.shape[0], degrees.optimizer))
    group = group_name("refresh", program.mesh.nested_group(program.rank, degrees.params, degrees.optimizer))
    return builder.all_gather(value, group, f"parameter {each.name}, after the optimizer's step")


# --- the last micro-batch --------------------------------------------------------------------------------------------


def _reduced(program: Program, inner: fx.GraphModule, accumulated: bool) -> fx.GraphModule:
    """A backward that takes gradients on from G to the optimizer. accumulated: it adds what earlier ones have left."""
    builder = Builder(program, like=inner)
    copies: dict[fx.Node, fx.Node] = {}
    values = output_values(inner.graph)
    gradients = program.outputs_of(OutputKind.GRADIENT)
    for node in placeholders(inner.graph):
        copies[node] = _copy(builder, program, node, copies)
    added = [
        _accumulated(builder, node, each.name) if accumulated else None
        for node, each in zip(values, gradients, strict=True)
    ]
    starts: list[fx.Node | None] = [None] * len(values)

    def start(node: fx.Node) -> None:
        """Starts the reduction of the gradients that this node is."""
        for i, value in enumerate(values):
            if value is node:
                starts[i] = _start_reduction(builder, copies[node], added[i], gradients[i].name, gradients[i].shape)

    wanted = {value for value in values if isinstance(value, fx.Node)}
    for node in inner.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = _copy(builder, program, node, copies)
        if node in wanted and node.op != "placeholder":
            start(node)
    for node in wanted:
        if node.op == "placeholder":
            start(node)
    for finish in (_finish_scatter, _finish_copies):  # all of one stage before the next is waited for
        starts = [
            None if each is None else finish(builder, each, gradient.name, gradient.shape)
            for each, gradient in zip(starts, gradients, strict=True)
        ]
    results = [
        None if each is None else cast(builder, each, _state_dtype(program, gradient.name))
        for each, gradient in zip(starts, gradients, strict=True)
    ]
    builder.graph.output(results)
    _added(program, builder)
    return builder.graph_module()


def _accumulated(builder: Builder, node: fx.Node | None, name: str) -> fx.Node | None:
    """The placeholder of what earlier micro-batches have left of a gradient."""
    if node is None:
        return None
    new = builder.graph.placeholder("accumulated_" + "".join(c if c.isalnum() else "_" for c in name))
    new.target = new.name
    new.meta["val"] = node.meta["val"]
    return new


def _start_reduction(
    builder: Builder, value: fx.Node, earlier: fx.Node | None, name: str, shape: tuple[int, ...]
) -> fx.Node:
    """Starts the sum over the ranks beyond G that lead to this rank's shard over O."""
    program = builder.program
    degrees = program.plan.shard_degrees
    builder.source = value
    if earlier is not None:
        value = builder.call(aten.add.Tensor, (value, earlier))
    value = cast(builder, value, program.precision.reduces(value.meta["val"].dtype))
    if shape and degrees.optimizer > degrees.grads:
        group = group_name("grads.on", program.mesh.nested_group(program.rank, degrees.grads, degrees.optimizer))
        return builder.reduce_scatter(value, group, f"gradient of {name} to the optimizer's shard")
    return _over_copies(builder, value, name, shape)


def _finish_scatter(builder: Builder, start: fx.Node, name: str, shape: tuple[int, ...]) -> fx.Node:
    collective = builder.collectives.get(start)
    if collective is None or collective.kind != "reduce_scatter":
        return start
    builder.source = start
    value = builder.wait(start)
    optimizer = _optimizer(builder.program)
    rows = shard_shape(shape, optimizer, optimizer, builder.program.rank)[0]
    if rows < value.meta["val"].shape[0]:
        value = builder.call(aten.slice.Tensor, (value, 0, 0, rows))
    return _over_copies(builder, value, name, shape)


def _over_copies(builder: Builder, value: fx.Node, name: str, shape: tuple[int, ...]) -> fx.Node:
    """Starts the sum over the copies of the shard; a gradient without dimensions has one on every rank."""
    program = builder.program
    degree = _optimizer(program) if shape else 1
    if degree == program.plan.replicas:
        return value
    copies = group_name("grads.copies", program.mesh.replica_group(program.rank, degree))
    return builder.all_reduce(value, copies, f"gradient of {name} over the copies of its shard")


def _finish_copies(builder: Builder, start: fx.Node, name: str, shape: tuple[int, ...]) -> fx.Node:
    if start not in builder.collectives:
        return start
    builder.source = start
    return builder.wait(start)


# --- graphs ----------------------------------------------------------------------------------------------------------


def _optimizer(program: Program) -> int:
    return program.plan.shard_degrees.optimizer


def _copy(builder: Builder, program: Program, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    new = builder.graph.node_copy(node, copies.__getitem__)
    if node in program.layouts:
        builder.layouts[new] = program.layouts[node]
    if node in program.collectives:
        builder.collectives[new] = program.collectives[node]
    return new


def _added(program: Program, builder: Builder, **graphs: fx.GraphModule) -> Program:
    """The program with what the builder knows of its graph."""
    program.layouts.update(builder.layouts)
    program.collectives.update(builder.collectives)
    return replace(program, **graphs)
