"""offload: which of the saved values wait in host memory, and when backward fetches them.

`Plan.offload` is a fraction of the bytes that a rank saves. The first ones go, as they wait the longest. Each is sent
as soon as it is there, and its memory is free after the forward's last use of it. Backward fetches a layer ahead: what
it first reads between two attentions starts to come with the attention before, so that two layers' saved values are on
the device at a time. Without attentions, what is read next comes while the value before it is used.

Transfers stand beside boundaries, so that no segment is cut by them. They are no communication, and each rank decides
on its own. Inputs, what the caller gets, and small values stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from evocompile.collectives import is_boundary
from evocompile.offload import fetch_start, fetch_wait, to_host
from evocompile.program import InputKind, Program, nbytes, output_values, placeholders
from evocompile.storages import Storage, is_dense, storages, values_of

from .build import fake_mode_of
from .split_attention import BACKWARD_STEP

_SMALL = 1024  # bytes that are not worth a transfer


def offload(program: Program) -> Program:
    """Puts transfers into both graphs, in place."""
    if not program.plan.offload or program.forward is None or program.backward is None:
        return program
    forward, backward = program.forward.graph, program.backward.graph
    tangents = len(program.inputs_of(InputKind.TANGENT))
    taken = placeholders(backward)[: len(placeholders(backward)) - tangents]
    returned = output_values(forward)
    first = len(returned) - len(taken)
    moved: list[tuple[fx.Node, fx.Node]] = []
    for place in _chosen(forward, first, program.plan.offload):
        value, node = returned[place], taken[place - first]
        returned[place] = _send(forward, value)
        moved.append((node, value))
        node.meta = node.meta | {"val": returned[place].meta["val"]}
    (output,) = forward.find_nodes(op="output")
    output.args = (returned,)
    _fetch(backward, moved)
    for graph_module in (program.forward, program.backward):
        graph_module.graph.lint()
        graph_module.recompile()
    return program


# --- what goes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Saved values that share memory. places: theirs among what the forward returns."""

    storage: Storage
    places: list[int]


def _chosen(graph: fx.Graph, first: int, fraction: float) -> Iterator[int]:
    """The places of what goes, among what the graph returns, where saved values begin at `first`."""
    given = [Storage(0, "", node.name) for node in placeholders(graph)]
    values, returned = values_of(graph, given), output_values(graph)
    stays = {*given, *storages([values[each] for each in returned[:first] if isinstance(each, fx.Node)])}
    groups: dict[Storage, _Group] = {}
    for place, node in enumerate(returned[first:], first):
        for storage in storages(values[node]):
            groups.setdefault(storage, _Group(storage, [])).places.append(place)
    order = {node: i for i, node in enumerate(graph.nodes)}
    total = sum(each.storage.bytes for each in groups.values())
    sent = 0
    for group in sorted(groups.values(), key=lambda each: min(order[returned[place]] for place in each.places)):
        nodes = {returned[place] for place in group.places}
        size = sum(nbytes(node.meta["val"]) for node in nodes)
        movable = all(is_dense(node.meta["val"]) for node in nodes) and _SMALL <= size <= group.storage.bytes
        if sent >= fraction * total:
            return
        if movable and group.storage not in stays:
            sent += group.storage.bytes
            yield from group.places


# --- transfers -------------------------------------------------------------------------------------------------------


def _send(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """The value in host memory: before the next boundary behind it."""
    sent = next((user for user in value.users if user.target is to_host), None)
    if sent is not None:
        return sent
    place = value.next
    while place.op != "output" and not is_boundary(place):
        place = place.next
    with graph.inserting_before(place):
        sent = graph.call_function(to_host, (value,))
    like = value.meta["val"]
    with fake_mode_of(graph):
        sent.meta["val"] = like.new_empty_strided(like.shape, like.stride(), device="cpu")
    if "stack_trace" in value.meta:
        sent.meta["stack_trace"] = value.meta["stack_trace"]
    return sent


def _fetch(graph: fx.Graph, moved: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Fetches what arrives in host memory. moved: placeholders, and the values that the forward had for them."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    begin = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    boundary = [begin] * len(nodes)  # for each position the last boundary's before it, behind which nothing is cut
    for i in range(begin + 1, len(nodes)):
        boundary[i] = i if is_boundary(nodes[i - 1]) else boundary[i - 1]
    uses = {node: min(order[user] for user in node.users) for node, _ in moved}
    marks = _attentions(graph, order)
    before: list[int] = []  # where values were read, in order
    for node, value in sorted(moved, key=lambda pair: (uses[pair[0]], order[pair[0]])):
        use = uses[node]
        earlier = [mark for mark in marks if mark <= use] if marks else [each for each in before if each < use]
        ahead = earlier[-2:-1] if marks else earlier[-1:]
        before.append(boundary[use])
        start = _call(graph, nodes[ahead[0] if ahead else begin], fetch_start, (node, value.meta["val"].device), value)
        wait = _call(graph, nodes[boundary[use]], fetch_wait, (start,), value)
        node.replace_all_uses_with(wait, lambda user, start=start: user is not start)  # type: ignore[misc]


def _attentions(graph: fx.Graph, order: dict[fx.Node, int]) -> list[int]:
    """Where the backward of each attention begins: its first step. All of its steps read one log-sum-exp."""
    values = values_of(graph, [Storage(0, "", node.name) for node in placeholders(graph)])
    first: dict[Storage, int] = {}
    for node in graph.nodes:
        if node.target is BACKWARD_STEP:
            for storage in storages(values[node.args[5]]):
                first.setdefault(storage, order[node])
    return sorted(first.values())


def _call(graph: fx.Graph, place: fx.Node, target: object, args: tuple[object, ...], like: fx.Node) -> fx.Node:
    with graph.inserting_before(place):
        node = graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta = {key: like.meta[key] for key in ("val", "stack_trace") if key in like.meta}
    return node
