"""How an operator is written at local shapes. Most are the same call; here are those that carry sizes or positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from evocompile.layout import Dim, Layout

from .build import Builder
from .rules.base import argument, normal_dim, operands_of
from .rules.pointwise import NEW, RANDOM
from .rules.routing import bags_of
from .rules.solve import canonical, is_over_tp
from .rules.views import SQUEEZES, VIEWS, parts_of
from .rules.windows import window_of

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


def _new(builder: Builder, node: fx.Node, results: Any, _: Any, operands: list[fx.Node]) -> fx.Node:
    shape = list(builder.sharding.local_shape(results[0]))
    if node.target == aten.new_empty_strided.default:  # the strides of one device's shape
        kwargs = {name: each for name, each in node.kwargs.items() if name != "stride"}
        return builder.call(aten.new_empty.default, (operands[0], shape), {**kwargs, "layout": torch.strided})
    return builder.call(node.target, (operands[0], shape, *node.args[2:]), node.kwargs)


def _random(builder: Builder, node: fx.Node, results: Any, _: Any, operands: list[fx.Node]) -> fx.Node:
    """Each part of a split draw is a stream of its own; ranks that hold the same part draw the same."""
    _, stream, _, distribution, _, dtype, device = node.args
    coordinate, part = builder.sharding.coordinate, 0
    split_over = builder.sharding.mesh_axes(results[0])
    for axis, degree in builder.program.mesh.axes:
        if axis in split_over:
            part = part * degree + coordinate[axis]
    size = list(builder.sharding.local_shape(results[0]))
    return builder.call(node.target, (operands[0], stream, part, distribution, size, dtype, device))


def _iota(builder: Builder, node: fx.Node, results: Any, _: Any, __: Any) -> fx.Node:
    """Positions: the rank's own ones. `start` and `step` count global positions; rows of a bag are just counted."""
    (dim,) = results[0].dims
    if bags_of(results[0]):
        return builder.call(node.target, builder.sharding.local_shape(results[0]), node.kwargs)
    if not any(factor.split for factor in dim):
        return builder.call(node.target, node.args, node.kwargs)
    (factor,) = dim
    start, step = node.kwargs["start"], node.kwargs["step"]
    parts = [
        builder.call(node.target, (hi - lo,), {**node.kwargs, "start": start + lo * step})
        for lo, hi in builder.sharding.intervals(factor.axis) or ((0, 0),)
    ]
    if builder.sharding.splits[factor.axis.name].order == "contiguous":
        return parts[0]
    return builder.call(aten.cat.default, (parts, 0))


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


def _addmm(builder: Builder, node: fx.Node, results: Any, _: Any, operands: list[fx.Node]) -> fx.Node:
    """Where each rank has a part of the contraction, the first one adds the bias."""
    bias, a, b = operands
    if results[0].partial:
        first = not any(builder.sharding.coordinate[axis] for axis in results[0].partial)
        bias = builder.call(aten.mul.Tensor, (bias, int(first)))
    return _same(builder, node, [bias, a, b])


def _grouped_mm(builder: Builder, node: fx.Node, _: Any, __: Any, operands: list[fx.Node]) -> fx.Node:
    """The kernel wants its operands in the order of memory that they have on one device."""
    ordered = [
        _in_order_of(builder, operand, original.meta["val"])
        for operand, original in zip(operands, operands_of(node), strict=True)
    ]
    return _same(builder, node, ordered)


def _in_order_of(builder: Builder, operand: fx.Node, original: torch.Tensor) -> fx.Node:
    """The operand with its dims in memory as those of `original`, the slowest first."""
    order = sorted(range(original.dim()), key=lambda dim: -original.stride(dim))
    turned = builder.call(aten.permute.default, (operand, order))
    if turned.meta["val"].is_contiguous():
        return operand
    dense = builder.call(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    return builder.call(aten.permute.default, (dense, [order.index(dim) for dim in range(len(order))]))


def _before(builder: Builder, dim: Dim, position: int) -> int:
    """How many of this rank's positions of a split dim come before `position`."""
    (factor,) = dim
    assert factor.axis is not None
    return sum(max(min(hi, position) - lo, 0) for lo, hi in builder.sharding.intervals(factor.axis))


def _is_split(dim: Dim) -> bool:
    return any(factor.split for factor in dim)


def _slice(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    part = parts_of(node)
    if part is not None and len(layouts[0].dims[part[0]]) > 1 and _is_split(layouts[0].dims[part[0]]):
        dim, size = part
        count = builder.sharding.local_shape(results[0])[dim]
        lo = (argument(node, 2, "start", 0) or 0) // size * count
        return builder.call(aten.slice.Tensor, (operands[0], dim, lo, lo + count))
    window = window_of(node)
    if window is None or not _is_split(layouts[0].dims[window[0]]) or canonical(layouts[0]) == canonical(results[0]):
        return _same(builder, node, operands)
    dim, offset = window
    lo = _before(builder, layouts[0].dims[dim], offset)
    count = builder.sharding.local_shape(results[0])[dim]
    return builder.call(aten.slice.Tensor, (operands[0], dim, lo, lo + count))


def _split(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    part = parts_of(node)
    if part is None or not _is_split(layouts[0].dims[part[0]]):
        return _same(builder, node, operands)
    count = builder.sharding.local_shape(results[0])[part[0]]
    return builder.call(aten.split.Tensor, (operands[0], count, part[0]))


def _slice_scatter(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    window = window_of(node)
    if window is None or not _is_split(results[0].dims[window[0]]):
        return _same(builder, node, operands)
    dim, offset = window
    lo = _before(builder, results[0].dims[dim], offset)
    count = builder.sharding.local_shape(layouts[1])[dim]
    return builder.call(aten.slice_scatter.default, (*operands, dim, lo, lo + count))


def _constant_pad(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    window = window_of(node)
    if window is None or not _is_split(results[0].dims[window[0]]):
        return _same(builder, node, operands)
    dim, offset = window
    before = _before(builder, results[0].dims[dim], offset)
    after = builder.sharding.local_shape(results[0])[dim] - before - builder.sharding.local_shape(layouts[0])[dim]
    padding = [0, 0] * (len(results[0].dims) - 1 - dim) + [before, after]
    return builder.call(node.target, (operands[0], padding, argument(node, 2, "value", 0)))


def _is_over_tp(builder: Builder, dim: Dim) -> bool:
    return is_over_tp(dim, builder.sharding.splits)


def _own_interval(builder: Builder, dim: Dim) -> tuple[int, int]:
    """The rank's positions of a dim that is split over tp: one interval of them."""
    (axis,) = (factor.axis for factor in dim if factor.split and factor.axis)
    return (builder.sharding.intervals(axis) or ((0, 0),))[0]


def _among(builder: Builder, index: fx.Node, lo: int, hi: int) -> tuple[fx.Node, fx.Node]:
    """(which of the indices are in [lo, hi), the indices counted from `lo`, 0 where they are not)."""
    not_before, before = builder.call(aten.ge.Scalar, (index, lo)), builder.call(aten.lt.Scalar, (index, hi))
    inside = builder.call(aten.logical_and.default, (not_before, before))
    return inside, builder.call(aten.mul.Tensor, (builder.call(aten.sub.Tensor, (index, lo)), inside))


def _or_zero(builder: Builder, inside: fx.Node, value: fx.Node) -> fx.Node:
    like = value.meta["val"]
    zero = builder.call(aten.full.default, ([], 0), {"dtype": like.dtype, "device": like.device})
    return builder.call(aten.where.self, (inside, value, zero))


def _embedding(builder: Builder, node: fx.Node, _: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    """Of rows that are split over tp each rank finds its own, and zeros for those of the others."""
    if not _is_over_tp(builder, layouts[0].dims[0]):
        return _same(builder, node, operands)
    weight, index = operands
    inside, local = _among(builder, index, *_own_interval(builder, layouts[0].dims[0]))
    found = builder.call(aten.embedding.default, (weight, local))
    return _or_zero(builder, builder.call(aten.unsqueeze.default, (inside, len(index.meta["val"].shape))), found)


def _embedding_backward(builder: Builder, node: fx.Node, results: Any, _: Any, operands: list[fx.Node]) -> fx.Node:
    """Of rows that are split over tp each rank adds up its own; those of the others go to a row that is cut off."""
    if not _is_over_tp(builder, results[0].dims[0]):
        return _same(builder, node, operands)
    gradient, index = operands
    padding, scaled = argument(node, 3, "padding_idx"), argument(node, 4, "scale_grad_by_freq")
    lo, hi = _own_interval(builder, results[0].dims[0])
    inside, local = _among(builder, index, lo, hi)
    outside = builder.call(aten.mul.Tensor, (builder.call(aten.logical_not.default, (inside,)), hi - lo))
    local = builder.call(aten.add.Tensor, (local, outside))
    padding = padding - lo if lo <= padding < hi else -1
    args = (gradient, local, hi - lo + 1, padding, scaled)
    rows = builder.call(aten.embedding_dense_backward.default, args)
    return builder.call(aten.slice.Tensor, (rows, 0, 0, hi - lo))


def _gather(builder: Builder, node: fx.Node, _: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    """Of positions that are split over tp each rank finds what is among its own, zeros elsewhere."""
    dim = normal_dim(argument(node, 1, "dim"), len(layouts[0].dims))
    if not _is_over_tp(builder, layouts[0].dims[dim]):
        return _same(builder, node, operands)
    inside, local = _among(builder, operands[1], *_own_interval(builder, layouts[0].dims[dim]))
    return _or_zero(builder, inside, builder.call(aten.gather.default, (operands[0], dim, local)))


def _extreme(builder: Builder, node: fx.Node, _: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    """Over positions that are split over tp: of every rank's own, and then of what the ranks found."""
    found = _same(builder, node, operands)
    return _folded(builder, found, "max" if node.target == aten.amax.default else "min", layouts[0], node)


def _folded(builder: Builder, value: fx.Node, by: str, layout: Layout, node: fx.Node) -> fx.Node:
    rank = len(layout.dims)
    reduced = {normal_dim(dim, rank) for dim in argument(node, 1, "dim", ()) or range(rank)}
    if not any(_is_over_tp(builder, layout.dims[dim]) for dim in reduced):
        return value
    group = builder.group("reduce", frozenset({"tp"}))
    what = "sum" if by == "sum" else f"{by}imum"
    return builder.wait(builder.all_reduce(value, group, f"the {what} over an axis that is split over tp", by))


def _log_sum_exp(builder: Builder, node: fx.Node, _: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    """Every rank's own maximum and sum of exponentials, brought to the common maximum, and added."""
    dims, kept = argument(node, 1, "dim"), bool(argument(node, 2, "keepdim", False))
    rank = len(layouts[0].dims)
    if not any(_is_over_tp(builder, layouts[0].dims[normal_dim(dim, rank)]) for dim in dims):
        return _same(builder, node, operands)
    own = builder.call(aten.amax.default, (operands[0], dims, True))
    exponentials = builder.call(aten.exp.default, (builder.call(aten.sub.Tensor, (operands[0], own)),))
    total = builder.call(aten.sum.dim_IntList, (exponentials, dims, True))
    most = _folded(builder, own, "max", layouts[0], node)
    scale = builder.call(aten.exp.default, (builder.call(aten.sub.Tensor, (own, most)),))
    total = _folded(builder, builder.call(aten.mul.Tensor, (total, scale)), "sum", layouts[0], node)
    whole = builder.call(aten.add.Tensor, (builder.call(aten.log.default, (total,)), most))
    return whole if kept else builder.call(aten.squeeze.dims, (whole, dims))


def _select(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    """Where the selected position is another rank's: zeros, for the sum that is pending.

    Zeros made of nothing would leave the operand, and with it this rank's part in collectives, dead.
    """
    dim, position = _selected(node, 1, layouts[0])
    if not _is_split(layouts[0].dims[dim]):
        return _same(builder, node, operands)
    lo, hi = (_before(builder, layouts[0].dims[dim], p) for p in (position, position + 1))
    held = builder.call(aten.slice.Tensor, (operands[0], dim, lo, hi))
    padding = [0, 0] * (len(layouts[0].dims) - 1 - dim) + [0, 1 - (hi - lo)]
    padded = builder.call(aten.constant_pad_nd.default, (held, padding, 0))
    return builder.call(aten.select.int, (padded, dim, 0))


def _select_scatter(builder: Builder, node: fx.Node, results: Any, layouts: Any, operands: list[fx.Node]) -> fx.Node:
    dim, position = _selected(node, 2, results[0])
    if not _is_split(results[0].dims[dim]):
        return _same(builder, node, operands)
    lo, hi = (_before(builder, results[0].dims[dim], p) for p in (position, position + 1))
    row = builder.call(aten.unsqueeze.default, (operands[1], dim))
    held = builder.call(aten.slice.Tensor, (row, dim, 0, hi - lo))
    return builder.call(aten.slice_scatter.default, (operands[0], held, dim, lo, hi))


def _selected(node: fx.Node, argument_of_dim: int, layout: Layout) -> tuple[int, int]:
    dim = normal_dim(argument(node, argument_of_dim, "dim", 0), len(layout.dims))
    return dim, argument(node, argument_of_dim + 1, "index") % layout.shape[dim]


_EMIT: dict[object, Emit] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(SQUEEZES, _view),  # locally, dims of size 1 may be others
    aten.expand.default: _expand,
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format), _factory),
    **dict.fromkeys(NEW, _new),
    prims.iota.default: _iota,
    RANDOM: _random,
    aten.addmm.default: _addmm,
    aten._grouped_mm.default: _grouped_mm,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.slice_scatter.default: _slice_scatter,
    aten.constant_pad_nd.default: _constant_pad,
    aten.select.int: _select,
    aten.select_scatter.default: _select_scatter,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.logsumexp.default: _log_sum_exp,
}
