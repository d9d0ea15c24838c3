"""The graph builder that passes use: creates nodes with their fake value, source line, layout and table entries."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from evocompile.collectives import exchange_start, exchange_wait, unpack
from evocompile.layout import Layout, Sharding
from evocompile.mesh import group_name, group_ranks
from evocompile.program import Collective, Program, nbytes
from evocompile.torch_private import graph_module

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Builder:
    """Adds nodes to a graph: a new one, or with `in_place` the program's joint graph at its insertion point.

    like:   the graph that a new one is made from; default: the joint graph.
    source: the node of the old graph that the new nodes stand for; they take its name and source line.
    """

    def __init__(self, program: Program, in_place: bool = False, like: fx.GraphModule | None = None) -> None:
        owner = like or program.joint
        assert owner is not None and program.sharding is not None
        self.program = program
        self.owner = owner
        self.sharding: Sharding = program.sharding
        self.graph = owner.graph if in_place else fx.Graph()
        self.layouts: dict[fx.Node, Layout] = program.layouts if in_place else {}
        self.collectives: dict[fx.Node, Collective] = program.collectives if in_place else {}
        self.source: fx.Node | None = None
        self.fake_mode = fake_mode_of(owner.graph)
        self._known: dict[Any, Any] = {}

    def graph_module(self) -> fx.GraphModule:
        return graph_module(self.owner, self.graph)

    def copy(self, node: fx.Node, layout: Layout | None = None) -> fx.Node:
        """The node as it is: placeholders and constants. A split one arrives as this rank's part."""
        new = self.graph.node_copy(node, lambda _: None)
        if layout is not None:
            self.layouts[new] = layout
        if layout is not None and layout.is_split:
            with self.fake_mode:
                new.meta["val"] = node.meta["val"].new_empty(self.sharding.local_shape(layout))
        return new

    def given(self, node: fx.Node, layout: Layout) -> fx.Node:
        """A placeholder for this part of a value that another graph computes."""
        new = self.graph.placeholder(node.name)
        value = node.meta["val"]
        with self.fake_mode:
            new.meta["val"] = value if not layout.is_split else value.new_empty(self.sharding.local_shape(layout))
        return new

    def call(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> fx.Node:
        """A call of `target`; its fake value is computed by running it on the fake values of its arguments."""
        kwargs = dict(kwargs or {})
        name = self.source.name if self.source is not None and self.source.op == "call_function" else None
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name)
        node.meta["val"] = self._fake_value(target, tuple(args), kwargs)
        if self.source is not None and "stack_trace" in self.source.meta:
            node.meta["stack_trace"] = self.source.meta["stack_trace"]
        if layout is not None:
            self.layouts[node] = layout
        return node

    def _fake_value(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call gives on fake values; the same calls in the next layer are looked up, not run."""
        key = _hashable((target, args, kwargs))
        if key not in self._known:
            fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
            with self.fake_mode, torch.no_grad():
                self._known[key] = target(*fake_args, **fake_kwargs)
        return self._known[key]

    def group(self, purpose: str, mesh_axes: frozenset[str]) -> str:
        """Name of the communicator of the ranks that differ from this one only on `mesh_axes`."""
        return group_name(purpose, self.program.mesh.peers(self.program.rank, mesh_axes))

    def all_reduce(self, value: fx.Node, group: str, why: str, by: str = "sum") -> fx.Node:
        """Starts the sum of `value` over `group`, or its "max" or "min"; returns the start (see `wait`)."""
        count = len(group_ranks(group))
        start = self.call(c10d.all_reduce.default, (self.contiguous(value), by, group))
        sent = 2 * nbytes(value.meta["val"]) * (count - 1) // count
        self.collectives[start] = Collective("all_reduce", group, sent, why)
        return start

    def all_gather(self, value: fx.Node, group: str, why: str) -> fx.Node:
        """Starts the concatenation of every rank's `value` (equal shapes) on dim 0."""
        count = len(group_ranks(group))
        start = self.call(c10d.all_gather_into_tensor.default, (self.contiguous(value), count, group))
        self.collectives[start] = Collective("all_gather", group, nbytes(value.meta["val"]) * (count - 1), why)
        return start

    def reduce_scatter(self, value: fx.Node, group: str, why: str) -> fx.Node:
        """Starts the sum over `group` of which each rank gets its part of dim 0."""
        count = len(group_ranks(group))
        start = self.call(c10d.reduce_scatter_tensor.default, (self.contiguous(value), "sum", count, group))
        self.collectives[start] = Collective(
            "reduce_scatter", group, nbytes(value.meta["val"]) * (count - 1) // count, why
        )
        return start

    def all_to_all(self, value: fx.Node, received: Sequence[int], sent: Sequence[int], group: str, why: str) -> fx.Node:
        """Starts sending sent[i] rows of `value`, one after the other, to the i-th rank of `group`, and receiving
        received[i] rows from it."""
        start = self.call(c10d.all_to_all_single.default, (value, list(received), list(sent), group))
        tensor = value.meta["val"]
        own = sent[group_ranks(group).index(self.program.rank)]
        row = nbytes(tensor) // tensor.shape[0] if tensor.shape[0] else 0
        self.collectives[start] = Collective("all_to_all", group, row * (sum(sent) - own), why)
        return start

    def wait(self, start: fx.Node, layout: Layout | None = None) -> fx.Node:
        return self.call(c10d.wait_tensor.default, (start,), layout=layout)

    def exchange(
        self,
        send: Sequence[fx.Node],
        destination: int,
        source: int,
        shapes: Sequence[Sequence[int]],
        like: torch.Tensor,
        group: str,
        why: str,
    ) -> fx.Node:
        """Starts sending `send` to rank `destination` and receiving tensors of `shapes` from `source` (-1: none)."""
        start = self.call(
            exchange_start,
            (
                list(send) if destination >= 0 else [],
                destination,
                source,
                [list(shape) for shape in shapes],
                like.dtype,
                like.device,
                group,
            ),
        )
        sent = sum(nbytes(each.meta["val"]) for each in send) if destination >= 0 else 0
        self.collectives[start] = Collective("exchange", group, sent, why)
        return start

    def receive(self, start: fx.Node, shapes: Sequence[Sequence[int]]) -> list[fx.Node]:
        """Waits for an exchange and unpacks what came; [] if nothing was to come."""
        buffer = self.call(exchange_wait, (start,))
        if start.args[2] == -1:
            return []
        parts = self.call(unpack, (buffer, [list(shape) for shape in shapes]))
        return [self.call(operator.getitem, (parts, i)) for i in range(len(shapes))]

    def contiguous(self, value: fx.Node) -> fx.Node:
        """Communication buffers are dense and row-major."""
        if value.meta["val"].is_contiguous():
            return value
        return self.call(aten.clone.default, (value,), {"memory_format": torch.contiguous_format})


def _hashable(value: Any) -> Any:
    """A key for an argument: tensors by their metadata, everything else by its value and type (1 is not True)."""
    if isinstance(value, fx.Node):
        return _hashable(value.meta["val"])
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(each)) for name, each in value.items())
    return type(value), value


def fake_mode_of(graph: fx.Graph, key: str = "val") -> Any:
    """The fake mode under which a graph was captured. key: "example_value" for Dynamo's graph."""
    for node in graph.nodes:
        mode = getattr(node.meta.get(key), "fake_mode", None)
        if mode is not None:
            return mode
    raise AssertionError("a captured graph has fake values")
