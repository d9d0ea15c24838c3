"""pool: which gathers and reductions write into buffers that are kept from step to step, and into which.

Layer after layer gathers weights of the same sizes, each for a short time. So a few buffers of each size serve all of
them: a layer in use and the next one ahead of its use take two of each shape. On the scheduled graphs a buffer is taken
at the start of a communication and is free behind the last reader of its data, its views and the communications that
send it on included. What a graph returns, saves for backward among it, is never in one.

A buffer stays allocated, so only sizes are pooled of which each buffer serves four requests of a step or more: not
those of an embedding and a head, nor what `overlap="all"` gathers at once. Reductions that go from rank to rank in
parts, as on CPU, have buffers of their own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import replace

from torch import fx

from evocompile.collectives import STARTS, is_start, is_wait, sends_parts
from evocompile.program import Buffer, Program, nbytes, output_values, placeholders
from evocompile.storages import Storage, storages, values_of, wire_of

_KINDS = ("all_gather", "reduce_scatter")  # of which torch has forms that write into a given tensor
_SERVED = 4


def pool(program: Program) -> Program:
    """Fills `program.pool`; changes no graph."""
    taken = {name: _buffers(graph_module.graph) for name, graph_module in program.graphs.items()}
    counts: Counter[int] = Counter()
    for buffers in taken.values():
        for buffer in buffers.values():
            counts[buffer.bytes] = max(counts[buffer.bytes], buffer.number + 1)
    step = [*taken.get("forward", {}).values(), *taken.get("backward", {}).values()]
    requests = Counter(buffer.bytes for buffer in step)
    kept = {size for size, count in counts.items() if requests[size] >= _SERVED * count}
    pooled = {node: buffer for buffers in taken.values() for node, buffer in buffers.items() if buffer.bytes in kept}
    return replace(program, pool=pooled)


def _buffers(graph: fx.Graph) -> dict[fx.Node, Buffer]:
    """For each start that may have one, a buffer that nothing else in the graph needs meanwhile."""
    values = values_of(graph, [Storage(0, "", node.name) for node in placeholders(graph)])
    returned = {each for node in output_values(graph) if isinstance(node, fx.Node) for each in storages(values[node])}
    last: dict[Storage, int] = {}
    under_way: dict[fx.Node, list[Storage]] = {}
    for i, node in enumerate(graph.nodes):
        read = [storage for each in (node, *node.all_input_nodes) for storage in storages(values.get(each))]
        if is_start(node):
            under_way[node] = wire_of(node, values)
        elif is_wait(node):
            read += under_way.pop(node.args[0])
        last |= dict.fromkeys(read, i)
    free: dict[int, list[int]] = defaultdict(list)  # numbers, by size
    made: Counter[int] = Counter()
    busy: list[tuple[int, int, int]] = []  # last use, size, number
    buffers: dict[fx.Node, Buffer] = {}
    for i, node in enumerate(graph.nodes):
        if not is_start(node) or STARTS[node.target][0] not in _KINDS or sends_parts(node):
            continue
        (storage,) = storages(values[node])
        size = nbytes(node.meta["val"])
        if storage in returned or not size:
            continue
        while busy and busy[0][0] < i:
            _, freed, number = heapq.heappop(busy)
            heapq.heappush(free[freed], number)
        if free[size]:
            number = heapq.heappop(free[size])
        else:
            number, made[size] = made[size], made[size] + 1
        buffers[node] = Buffer(size, number)
        heapq.heappush(busy, (last[storage], size, number))
    return buffers
