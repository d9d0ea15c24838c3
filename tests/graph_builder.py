"""Small scheduled graphs for tests, with fake values as the passes leave them."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from evocompile import torch_private

aten = torch.ops.aten
wait = torch.ops._c10d_functional.wait_tensor.default  # of a tensor that nobody fills: the identity, and a boundary


class GraphBuilder:
    def __init__(self) -> None:
        self.mode = torch_private.new_fake_mode()
        self.graph = fx.Graph()
        self.root = torch.nn.Module()
        self.inputs: list[fx.Node] = []

    def input(self, *shape: int, name: str = "x", dtype: torch.dtype = torch.float32) -> fx.Node:
        with self.mode:
            return self.input_like(torch.empty(*shape, dtype=dtype), name)

    def input_like(self, fake: Tensor, name: str = "x") -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        self.inputs.append(node)
        return node

    def constant(self, tensor: Tensor, name: str) -> fx.Node:
        setattr(self.root, name, tensor)
        node = self.graph.get_attr(name)
        with self.mode:
            node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = map_arg((args, kwargs), lambda each: each.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    def finish(self, outputs: list[Any]) -> fx.GraphModule:
        self.graph.output(outputs)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph)

    def random_inputs(self, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(node.meta["val"].shape, generator=generator) * 0.3 for node in self.inputs]


def layers(count: int, *, rows: int = 6, width: int = 8) -> tuple[GraphBuilder, fx.GraphModule]:
    """`count` equal layers, each with two compute segments behind two boundaries; returns the last value and one
    saved value of each layer."""
    build = GraphBuilder()
    x = build.input(rows, width)
    weights = [build.input(width, width, name=f"weight_{index}") for index in range(count)]
    saved = []
    for weight in weights:
        gathered = build.call(wait, weight)
        scale = build.call(aten.rsqrt.default, build.call(aten.mean.dim, build.call(aten.mul.Tensor, x, x), [-1], True))
        normed = build.call(aten.mul.Tensor, x, scale)
        hidden = build.call(aten.mm.default, normed, build.call(aten.permute.default, gathered, [1, 0]))
        exchanged = build.call(wait, hidden)
        x = build.call(aten.add.Tensor, x, build.call(aten.tanh.default, exchanged))
        saved.append(normed)
    return build, build.finish([x, *saved])


def many_layers(count: int) -> fx.GraphModule:
    """A graph as of `layers`, without saved values, made from copies of one layer: much faster for thousands."""
    _, one = layers(1)
    x, weight = one.graph.find_nodes(op="placeholder")
    graph = fx.Graph()
    current = graph.node_copy(x)
    for index in range(count):
        own_weight = graph.placeholder(f"weight_{index}")
        own_weight.meta.update(weight.meta)
        copied = graph.graph_copy(one.graph, {x: current, weight: own_weight})
        assert isinstance(copied, list)
        current = copied[0]
    graph.output([current])
    return fx.GraphModule(torch.nn.Module(), graph)


def random_graph(seed: int) -> tuple[GraphBuilder, fx.GraphModule]:
    """Square float32 values through random operators, views, tuples, constants and boundaries; random outputs."""
    chooser = random.Random(seed)
    build = GraphBuilder()
    size = chooser.choice([1, 2, 5])
    values = [build.input(size, size, name=f"x_{index}") for index in range(3)]
    values.append(build.constant(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)), "constant"))

    def halves(value: fx.Node) -> fx.Node:
        pieces = build.call(aten.split.Tensor, build.call(aten.cat.default, [value, value]), size)
        return build.item(pieces, chooser.randrange(2))

    def largest(value: fx.Node) -> fx.Node:
        pair = build.call(aten.sort.default, value, 1)
        return build.item(pair, 0)

    makers: list[Callable[[], fx.Node]] = [
        lambda: build.call(aten.add.Tensor, chooser.choice(values), chooser.choice(values)),
        lambda: build.call(aten.sub.Tensor, chooser.choice(values), chooser.choice(values), alpha=0.5),
        lambda: build.call(aten.mul.Tensor, chooser.choice(values), chooser.choice([0.5, -0.0, 1])),
        lambda: build.call(aten.sigmoid.default, chooser.choice(values)),
        lambda: build.call(aten.mm.default, chooser.choice(values), chooser.choice(values)),
        lambda: build.call(aten.permute.default, chooser.choice(values), [1, 0]),
        lambda: build.call(aten.full.default, [size, size], 0.25, dtype=torch.float32),
        lambda: build.call(wait, chooser.choice(values)),
        lambda: build.call(wait, chooser.choice(values)),
        lambda: halves(chooser.choice(values)),
        lambda: largest(chooser.choice(values)),
    ]
    for _ in range(chooser.randrange(1, 40)):
        values.append(chooser.choice(makers)())
    outputs: list[Any] = [chooser.choice([*values, None]) for _ in range(chooser.randrange(1, 8))]
    return build, build.finish(outputs)
