"""Cutting a scheduled graph into compute segments, and recognising the segments that are equal.

A *boundary* (communication, an attention step) is executed by the driver, where the schedule placed it. The compute
between two boundaries is one *segment*. Layer after layer has the same segments, so one compiled function serves many.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx
from torch.fx.node import map_arg

from . import collectives


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of consecutive compute nodes.

    inputs:  values that it reads from outside (constants of the graph included), in the order of their first use.
    outputs: its values that are used outside, in the graph's order. All inputs and outputs are tensors.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


Step = fx.Node | Segment


def cut(graph: fx.Graph) -> list[Step]:
    """The steps of the graph in its own order: segments, and single nodes that the driver calls itself.

    The driver calls boundaries, operators with side effects, and the compute runs with fewer than two operators that
    are not views: there is nothing in them to fuse, so compiling them would cost seconds and gain nothing. Unused runs
    disappear. The elements of a tuple are taken out right after the tuple is made, so that only tensors cross a
    boundary. Linear in the number of nodes.
    """
    steps: list[Step] = []
    run: list[fx.Node] = []

    def close_run() -> None:
        if segment := _segment(run):
            steps.extend([segment] if sum(map(_computes, run)) > 1 else run)
        run.clear()

    unpacked: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in unpacked:
            continue
        assert node.op == "call_function", f"{node.format_node()}: only operators are left in a scheduled graph"
        elements = list(_elements(node))
        unpacked.update(elements)
        if collectives.is_boundary(node) or node.is_impure(impure_random=False):
            close_run()
            steps += [node, *elements]
        else:
            run += [node, *elements]
    close_run()
    return steps


def _elements(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that take a tuple apart, by index; also those of nested tuples."""
    if isinstance(node.meta.get("val"), Tensor):
        return
    taken = [user for user in node.users if user.target is operator.getitem]
    taken.sort(key=lambda element: cast(int, element.args[1]))  # equal segments must not differ by this order
    for element in taken:
        yield element
        yield from _elements(element)


def _segment(run: list[fx.Node]) -> Segment | None:
    """The run with its inputs and outputs; `None` when nothing of it is used."""
    own = set(run)
    inputs = dict.fromkeys(each for node in run for each in node.all_input_nodes if each not in own)
    outputs = [node for node in run if any(user not in own for user in node.users)]
    return Segment(tuple(run), tuple(inputs), tuple(outputs)) if outputs else None


def _computes(node: fx.Node) -> bool:
    """Does more than to look at existing memory in another way."""
    return node.target is not operator.getitem and not getattr(node.target, "is_view", False)


def structure(segment: Segment) -> Hashable:
    """Equal for segments that one compiled function can serve: the same operators with the same constants, wiring and
    outputs, on inputs of the same shapes, strides, dtypes and devices. Names and metadata do not count."""
    position = {node: index for index, node in enumerate((*segment.inputs, *segment.nodes))}

    def canonical(value: Any) -> Hashable:
        match value:
            case fx.Node():
                return ("node", position[value])
            case list() | tuple():
                return (isinstance(value, list), *map(canonical, value))
            case dict():
                return tuple((key, canonical(each)) for key, each in sorted(value.items()))
            case slice():
                return ("slice", *map(canonical, (value.start, value.stop, value.step)))
            case _:
                return (type(value), repr(value))  # 1, 1.0 and True are equal, 0.0 and -0.0 too; their texts are not

    return (
        tuple(_tensor_structure(node.meta["val"]) for node in segment.inputs),
        tuple((node.target, canonical(node.args), canonical(node.kwargs)) for node in segment.nodes),
        tuple(position[node] for node in segment.outputs),
    )


def _tensor_structure(tensor: Tensor) -> Hashable:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def as_graph(segment: Segment) -> fx.Graph:
    """The segment as a graph of its own that returns a tuple.

    Its names are made anew from the operators', so that equal segments of all layers, ranks and runs give the same
    text, which is Inductor's cache key. Of the metadata only "val" is kept.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(segment.inputs):
        copies[node] = graph.placeholder(f"input_{index}")
    for node in segment.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        assert callable(node.target)
        copies[node] = graph.call_function(node.target, args, kwargs)
    for node, copy in copies.items():
        copy.meta["val"] = node.meta["val"]
    graph.output(tuple(copies[node] for node in segment.outputs))
    return graph
