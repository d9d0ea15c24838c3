"""verify: the invariants of a program, checked after every pass, and the proof that the ranks cannot block one another.

`verify` looks at one rank's program and is linear in its nodes; what it finds is a defect of a pass, never of the
model. `agree` looks at the communication of all ranks together and runs before the first step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from evocompile.collectives import (
    Event,
    exchange_start,
    graph_events,
    is_start,
    is_wait,
    sent_bytes,
    start_arguments,
    start_event,
)
from evocompile.errors import VerificationError
from evocompile.layout import Layout, Sharding
from evocompile.mesh import group_ranks
from evocompile.program import Input, InputKind, Output, OutputKind, Program, nbytes, output_values, placeholders
from evocompile.shards import shard_shape
from evocompile.virtual import Blocked, Rendezvous, Ticket, run_together

from .launch_order import LaunchOrder
from .micro_batches import is_copied

events = graph_events

# --- one rank ------------------------------------------------------------------------------------------------------


def verify(program: Program, after: str = "") -> None:
    """Check the invariants of a program; raises VerificationError that names the pass and the node.

    after: name of the pass that ran last, for the message (the last snapshot's when left out).
    """
    after = after or (program.snapshots[-1].name if program.snapshots else "capture")
    for name, graph_module in program.graphs.items():
        try:
            graph_module.graph.lint()
        except RuntimeError as error:
            raise VerificationError(f"after {after}: the {name} graph is malformed: {error}") from error
        for problem in _graph_problems(program, name, graph_module):
            raise VerificationError(f"after {after}: {problem}")
    for problem in _cut_problems(program) if program.joint is None else _joint_problems(program):
        raise VerificationError(f"after {after}: {problem}")


def _graph_problems(program: Program, name: str, graph_module: fx.GraphModule) -> Iterator[str]:
    known: dict[Layout, tuple[tuple[int, ...], bool]] = {}  # most nodes share a few layouts
    for node in graph_module.graph.nodes:
        here = f"{name}.{node.name}"
        if node.op == "output":
            continue
        if "val" not in node.meta:
            yield f"{here} has no fake value"
            continue
        if is_start(node):
            yield from (f"{here} {problem}" for problem in _start_problems(program, node))
        elif is_wait(node) and not (isinstance(node.args[0], fx.Node) and is_start(node.args[0])):
            yield f"{here} waits for {node.args[0]}, which starts no communication"
        layout, value = program.layouts.get(node), node.meta["val"]
        if layout is not None and program.sharding is not None and isinstance(value, torch.Tensor):
            if layout not in known:
                known[layout] = program.sharding.local_shape(layout), _is_split_twice(program.sharding, layout)
            expected, twice = known[layout]
            if twice:
                yield f"{here} is split twice over one mesh axis: {layout}"
            if tuple(value.shape) != expected:
                yield f"{here} has shape {tuple(value.shape)}; its layout {layout} makes {expected} on this rank"


def _is_split_twice(sharding: Sharding, layout: Layout) -> bool:
    names = [each.name for dim in layout.dims for factor in dim if factor.split and (each := factor.axis)]
    axes = [mesh_axis for name in names for mesh_axis in sharding.splits[name].mesh_axes]
    return len(set(axes)) != len(axes)


def _start_problems(program: Program, node: fx.Node) -> Iterator[str]:
    waits = [user for user in node.users if is_wait(user)]
    for user in node.users:
        if user not in waits:
            yield f"is read by {user} before its wait"
    if len(waits) != 1:
        yield f"has {len(waits)} waits; every start needs exactly one, whether or not its data is used"
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    given = start_arguments(node, args, kwargs)
    ranks = group_ranks(given["group"])
    if program.rank not in ranks or not 0 <= ranks[0] <= ranks[-1] < program.mesh.world:
        yield f"communicates on group {given['group']} from rank {program.rank} of {program.mesh.world}"
        return
    if len(set(ranks)) != len(ranks) or given.get("group_size", len(ranks)) != len(ranks):
        yield f"takes group {given['group']} for one of {given.get('group_size', len(ranks))} ranks"
        return
    if given.get("reduce", "sum") not in ("sum", "max", "min"):
        yield f"reduces by {given['reduce']!r}; across ranks only sums and extremes are exact for every shard"
    if node.target is exchange_start:
        yield from _exchange_problems(program.rank, ranks, given)
    event = start_event(node, given)
    received = _received_bytes(event, given)
    if nbytes(node.meta["val"]) != received:
        yield f"has a value of {nbytes(node.meta['val'])} bytes, but receives {received}"
    entry = program.collectives.get(node)
    if entry is None:
        yield "has no entry in the table of collectives"
    elif (entry.kind, entry.group) != (event.kind, event.group):
        yield f"is {event.kind} on {event.group}; the table says {entry.kind} on {entry.group}"
    elif entry.sent != sent_bytes(event, program.rank):
        yield f"sends {sent_bytes(event, program.rank)} bytes; the table says {entry.sent}"


def _exchange_problems(rank: int, ranks: tuple[int, ...], given: dict[str, Any]) -> Iterator[str]:
    for what in ("destination", "source"):
        if given[what] != -1 and (given[what] == rank or given[what] not in ranks):
            yield f"has {what} {given[what]}, which is no other member of group {given['group']}"
    for tensor in given["tensors"]:
        if tensor.dtype != given["dtype"]:
            yield f"exchanges {given['dtype']}, but is given {tensor.dtype}"


def _received_bytes(event: Event, given: dict[str, Any]) -> int:
    """Bytes of the value that a communication gives."""
    match event.kind:
        case "all_gather":
            return event.size * given["group_size"]
        case "reduce_scatter":
            return event.size // given["group_size"]
        case "all_reduce":
            return event.size
    return sum(size for _, size in event.received)


def _joint_problems(program: Program) -> Iterator[str]:
    assert program.joint is not None
    graph = program.joint.graph
    yield from _input_problems("joint", placeholders(graph), program.inputs)
    yield from _output_problems(program, "joint", output_values(graph), program.outputs)
    yield from _gradient_problems(program, "joint", output_values(graph), program.outputs)


def _cut_problems(program: Program) -> Iterator[str]:
    """The contract between the two graphs that `rematerialize` makes."""
    if program.forward is None:
        yield "there is neither a joint nor a forward graph"
        return
    own = [each for each in program.inputs if each.kind is not InputKind.TANGENT]
    returned = program.outputs_of(OutputKind.USER) + program.outputs_of(OutputKind.BUFFER)
    placed, values = placeholders(program.forward.graph), output_values(program.forward.graph)
    yield from _input_problems("forward", placed, own)
    yield from _output_problems(program, "forward", values[: len(returned)], returned)
    saved = values[len(returned) :]
    if program.first is not None:
        yield from _first_problems(program, own, placed, values)
    if program.backward is None:
        if saved:
            yield f"forward saves {len(saved)} values, but there is no backward graph"
        return
    tangents, gradients = program.inputs_of(InputKind.TANGENT), program.outputs_of(OutputKind.GRADIENT)
    received, results = placeholders(program.backward.graph), output_values(program.backward.graph)
    if len(received) != len(saved) + len(tangents):
        yield f"backward takes {len(received)} values; {len(saved)} are saved and {len(tangents)} are tangents"
        return
    for kept, taken in zip(saved, received, strict=False):
        if _kind_of(kept) != _kind_of(taken):
            yield f"backward.{taken.name} is {_kind_of(taken)}; the saved forward.{kept} is {_kind_of(kept)}"
    yield from _input_problems("backward", received[len(saved) :], tangents)
    yield from _output_problems(program, "backward", results, gradients)
    yield from _gradient_problems(program, "backward", results, gradients)
    yield from _variant_problems(program, gradients)


def _first_problems(
    program: Program, own: list[Input], placed: list[fx.Node], values: list[fx.Node | None]
) -> Iterator[str]:
    """`first` takes the optimizer's shards; it returns what `forward` returns, then the parameters that this takes."""
    assert program.first is not None
    optimizer = program.plan.shard_degrees.optimizer
    copied = []
    for each, node, taken in zip(own, placed, placeholders(program.first.graph), strict=True):
        expected = _kind_of(node)
        if expected is not None and is_copied(program, each):
            copied.append(expected)
            shape = shard_shape(each.shape, optimizer, optimizer, program.rank)
            expected = (shape, each.state_dtype, *expected[2:])
        if _kind_of(taken) != expected:
            yield f"first.{taken.name} is {_kind_of(taken)}; the optimizer's shard of {each.name} is {expected}"
    found, wanted = [_kind_of(node) for node in output_values(program.first.graph)], [_kind_of(n) for n in values]
    if found != wanted + copied:
        yield f"first returns {found}; forward returns {wanted}, and takes {copied}"


def _variant_problems(program: Program, gradients: list[Output]) -> Iterator[str]:
    """The variants of the backward take what it takes; `last` besides what `inner` leaves."""
    if program.inner is None or program.last is None or program.backward is None:
        return
    received = [_kind_of(node) for node in placeholders(program.backward.graph)]
    left = [_kind_of(node) for node in output_values(program.inner.graph) if node is not None]
    for name, graph_module, expected in (("inner", program.inner, []), ("last", program.last, left)):
        found = [_kind_of(node) for node in placeholders(graph_module.graph)]
        if found != received + expected:
            yield f"{name} takes {found}; backward takes {received}, and accumulated are {expected}"
    yield from _gradient_problems(program, "inner", output_values(program.inner.graph), gradients)
    yield from _gradient_problems(program, "last", output_values(program.last.graph), gradients)


def _kind_of(node: fx.Node | None) -> tuple[Any, ...] | None:
    value = node.meta["val"] if node is not None else None
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else None


def _input_problems(graph: str, placed: list[fx.Node], inputs: list[Any]) -> Iterator[str]:
    """Placeholders must be the inputs, in order; parameters and parts may be shards, all others are whole."""
    if len(placed) != len(inputs):
        yield f"the {graph} graph has {len(placed)} placeholders for {len(inputs)} inputs"
        return
    for node, each in zip(placed, inputs, strict=True):
        value = node.meta["val"]
        whole = each.kind is InputKind.PARAMETER or each.is_part or tuple(value.shape) == each.shape
        if value.dtype != each.dtype or not whole:
            yield (
                f"{graph}.{node.name} is {value.dtype} {tuple(value.shape)}; "
                f"{each.kind.value} {each.name} is {each.dtype} {each.shape}"
            )


def _output_problems(
    program: Program, graph: str, values: list[fx.Node | None], outputs: list[Output]
) -> Iterator[str]:
    if len(values) != len(outputs):
        yield f"the {graph} graph returns {len(values)} values for {len(outputs)} outputs"
        return
    for node, output in zip(values, outputs, strict=True):
        if node is None:
            if output.kind is not OutputKind.GRADIENT:
                yield f"the {graph} graph returns None for {output.kind.value} {output.name}"
            continue
        value = node.meta["val"]
        if value.dtype != output.dtype:
            yield f"{graph}.{node.name} is {value.dtype}; {output.kind.value} {output.name} is {output.dtype}"
        if output.kind is OutputKind.USER:
            expected = output.shape
            if output.layout is not None and program.sharding is not None:
                expected = program.sharding.local_shape(output.layout)
            if tuple(value.shape) != expected:
                yield f"{graph}.{node.name} is {tuple(value.shape)}; output {output.name} is {expected}"


def _gradient_problems(
    program: Program, graph: str, values: list[fx.Node | None], outputs: list[Output]
) -> Iterator[str]:
    """A gradient has the shape of the shard of its parameter: over G until it is reduced on to the optimizer's, O."""
    shapes = {each.name: each.shape for each in program.inputs if each.kind is not InputKind.TANGENT}
    degrees = program.plan.shard_degrees
    on_at_o = graph == "last" or (graph == "backward" and "variants of a step" in program.facts)
    degree = degrees.optimizer if on_at_o else degrees.grads
    for node, output in zip(values, outputs, strict=True):
        if node is None or output.kind is not OutputKind.GRADIENT:
            continue
        if output.name not in shapes:
            yield f"{graph}.{node.name} is the gradient of {output.name}, which is no input"
            continue
        expected = shapes[output.name]
        if "sharded states" in program.facts:
            expected = shard_shape(expected, degree, degrees.optimizer, program.rank)
        if tuple(node.meta["val"].shape) != expected:
            yield (
                f"{graph}.{node.name} is {tuple(node.meta['val'].shape)}; the shard of {output.name}, whose gradient "
                f"it is, is {expected}"
            )


# --- all ranks -----------------------------------------------------------------------------------------------------


def agree(event_lists: list[list[Event]]) -> None:
    """Prove that programs with these events can run together, by running them without data (`virtual.Rendezvous`).

    event_lists: for each rank its starts and waits in order (`events`, `collectives.program_events`).
    Raises DeadlockError naming both nodes where two starts do not match, every rank's node where they block, and
    communications that two ranks launch in opposite orders.
    """
    order = LaunchOrder()
    rendezvous = Rendezvous(order.match)
    launched = run_together([_walk(rank, each, rendezvous) for rank, each in enumerate(event_lists)], rendezvous)
    order.check(launched)


def _walk(rank: int, program: list[Event], rendezvous: Rendezvous) -> Generator[Blocked, None, list[Ticket]]:
    tickets: dict[int, Ticket] = {}
    launched: list[Ticket] = []
    for position, event in enumerate(program):
        if event.kind != "wait":
            tickets[position] = rendezvous.post(rank, event)
            launched.append(tickets[position])
            continue
        ticket = tickets.pop(event.start)
        if not ticket.done:
            yield ticket, event.node
    return launched
