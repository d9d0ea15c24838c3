"""seed_random: random operators draw from the step's seed instead of the process' generator.

So that replicas agree and shards differ, the seed becomes an input of the program, and every random operator an
`evocompile::random` with a stream of its own. `localize` later gives each part of a split draw a stream too. The
draws are not one device's: that is the one exception to its numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from evocompile.errors import ShardingError
from evocompile.program import Input, InputKind, Program, placeholders, source_line
from evocompile.torch_private import OpOverload

from .build import fake_mode_of
from .rules.base import argument
from .rules.pointwise import RANDOM

aten, prims = torch.ops.aten, torch.ops.prims
_DISTRIBUTIONS = {aten.rand.default: "uniform", aten.randn.default: "normal"}


def seed_random(program: Program) -> Program:
    """The program with a SEED input before its tangents, if its graph draws random numbers."""
    assert program.joint is not None
    graph = program.joint.graph
    drawing = [node for node in graph.nodes if _is_random(node)]
    if not drawing:
        return program
    incoming = placeholders(graph)
    inputs = list(program.inputs)
    position = sum(each.kind is not InputKind.TANGENT for each in inputs)
    fake_mode = fake_mode_of(graph)
    with graph.inserting_after(incoming[position - 1]):
        seed = graph.placeholder("random_seed")
    with fake_mode:
        seed.meta["val"] = torch.zeros((), dtype=torch.int64)
    inputs.insert(position, Input(InputKind.SEED, "random_seed", (), torch.int64))
    for stream, node in enumerate(drawing):
        with graph.inserting_before(node):
            node.replace_all_uses_with(_seeded(graph, node, seed, stream))
        graph.erase_node(node)
    return replace(program, inputs=inputs)


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _seeded(graph: fx.Graph, node: fx.Node, seed: fx.Node, stream: int) -> fx.Node:
    value = node.meta["val"]

    def call(target: object, args: tuple[object, ...], meta: dict[str, object]) -> fx.Node:
        new = graph.call_function(target, args)  # type: ignore[arg-type]
        new.meta = {**node.meta, **meta}
        return new

    if node.target == torch.ops.evocompile.attention_seed.default:
        return call(torch.ops.evocompile.stream_seed.default, (seed, stream), {})
    if node.target in _DISTRIBUTIONS:
        args = (seed, stream, 0, _DISTRIBUTIONS[node.target], list(value.shape), value.dtype, value.device)
        return call(RANDOM, args, {})
    if node.target == aten.bernoulli.p:
        with value.fake_mode:
            draw, drawn = torch.empty_like(value, dtype=torch.float32), torch.empty_like(value, dtype=torch.bool)
        args = (seed, stream, 0, "uniform", list(value.shape), torch.float32, value.device)
        uniform = call(RANDOM, args, {"val": draw})
        lower = call(aten.lt.Scalar, (uniform, argument(node, 1, "p", 0.5)), {"val": drawn})
        return call(prims.convert_element_type.default, (lower, value.dtype), {})
    if node.target == aten.uniform.default:
        low, high = argument(node, 1, "from", 0.0), argument(node, 2, "to", 1.0)
        draw = call(RANDOM, (seed, stream, 0, "uniform", list(value.shape), value.dtype, value.device), {})
        return call(aten.add.Tensor, (call(aten.mul.Tensor, (draw, high - low), {}), low), {})
    raise ShardingError(
        f"{source_line(node)}\nuses {node.target}, whose random numbers cannot be split over ranks. "
        "Use torch.rand, torch.randn, torch.bernoulli or dropout, or pass the numbers in as an input."
    )
