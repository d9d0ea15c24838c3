"""How an operator is written at local shapes. Most are the same call; here are those that carry sizes or positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from evocompile.layout import Layout

from .build import Builder
from .rules.base import argument
from .rules.views import VIEWS

aten, prims = torch.ops.aten, torch.ops.prims

Emit = Callable[[Builder, fx.Node, tuple[Layout, ...], tuple[Layout, ...], list[fx.Node]], fx.Node]


def emit(
    builder: Builder,
    node: fx.Node,
    results: tuple[Layout, ...],
    layouts: tuple[Layout, ...],
    operands: list[fx.Node],
) -> fx.Node:
    """The local call of `node`, with its operands laid out as `layouts` and its results as `results`."""
    special = _EMIT.get(node.target)
    new = special(builder, node, results, layouts, operands) if special else _same(builder, node, operands)
    if len(results) == 1:
        builder.layouts[new] = results[0]
    return new


def _same(builder: Builder, node: fx.Node, operands: list[fx.Node], **replaced: Any) -> fx.Node:
    rest = iter(operands)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: next(rest))
    return builder.call(node.target, args, {**kwargs, **replaced})


def _view(builder: Builder, node: fx.Node, results: Any, _: Any, operands: list[fx.Node]) -> fx.Node:
    # reshape, not view: a localised operand may be strided
    return builder.call(aten.reshape.default, (operands[0], list(builder.sharding.local_shape(results[0]))))


def _expand(builder: Builder, node: fx.Node, results: Any, _: Any, operands: list[fx.Node]) -> fx.Node:
    return builder.call(aten.expand.default, (operands[0], list(builder.sharding.local_shape(results[0]))))


def _factory(builder: Builder, node: fx.Node, results: Any, _: Any, __: Any) -> fx.Node:
    shape = list(builder.sharding.local_shape(results[0]))
    return builder.call(node.target, (shape, *node.args[1:]), node.kwargs)


def _iota(builder: Builder, node: fx.Node, results: Any, _: Any, __: Any) -> fx.Node:
    """Positions: the rank's own ones. `start` and `step` count global positions."""
    (dim,) = results[0].dims
    if not any(factor.split for factor in dim):
        return builder.call(node.target, node.args, node.kwargs)
    (factor,) = dim
    start, step = node.kwargs["start"], node.kwargs["step"]
    parts = [
        builder.call(node.target, (hi - lo,), {**node.kwargs, "start": start + lo * step})
        for lo, hi in builder.sharding.intervals(factor.axis) or ((0, 0),)
    ]
    return parts[0] if len(parts) == 1 else builder.call(aten.cat.default, (parts, 0))


def _mean(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    """Over split positions a mean is the local sum over the global count."""
    if results[0].partial == layouts[0].partial:
        return _same(builder, node, operands)
    count = math.prod(layouts[0].shape) // math.prod(results[0].shape)
    dtype = argument(node, 3 if node.target == aten.mean.dim else 1, "dtype")
    total = (
        builder.call(aten.sum.dim_IntList, (operands[0], *node.args[1:3]), {"dtype": dtype})
        if node.target == aten.mean.dim
        else builder.call(aten.sum.default, (operands[0],), {"dtype": dtype})
    )
    return builder.call(aten.div.Scalar, (total, count))


_EMIT: dict[object, Emit] = {
    **dict.fromkeys(VIEWS, _view),
    aten.expand.default: _expand,
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format), _factory),
    prims.iota.default: _iota,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
}
