"""Operators that cut a window out of a split dim, or put one into it: x[:, 1:], padding, x[:, -1], their backwards.

A window of a split axis is an axis too: it keeps the ranks' positions, shifted, so `logits[:, :-1]` against
`labels[:, 1:]` moves no data: the rank that holds the last position has one element fewer. Only a window that would
need positions that no rank holds is left to the general rule, which gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from evocompile.layout import Axis, Dim, Factor, Layout, Split

from .base import argument, normal_dim, operands_of, shape_of
from .solve import Solution

aten = torch.ops.aten
WINDOWS = (aten.slice.Tensor, aten.slice_scatter.default, aten.constant_pad_nd.default)


def slice_bounds(node: fx.Node, size: int) -> tuple[int, int, int]:
    """Normalised start, end, step of an aten.slice."""
    start, end, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    return slice(start, end, step).indices(size)


def padded_dims(node: fx.Node) -> dict[int, tuple[int, int]]:
    """(before, after) for every dim that constant_pad_nd really pads."""
    rank, padding = len(shape_of(node)), list(argument(node, 1, "pad"))
    pairs = {rank - 1 - i // 2: (padding[i], padding[i + 1]) for i in range(0, len(padding), 2)}
    return {dim: pair for dim, pair in pairs.items() if pair != (0, 0)}


def window_of(node: fx.Node) -> tuple[int, int] | None:
    """(dim, offset): position p of the smaller tensor is position p + offset of the larger; None if it is no window."""
    if node.target not in WINDOWS:
        return None
    shape = shape_of(node)
    if node.target == aten.slice.Tensor:
        dim = normal_dim(argument(node, 1, "dim", 0), len(shape))
        start, _, step = slice_bounds(node, shape_of(operands_of(node)[0])[dim])
        return (dim, start) if step == 1 else None
    if node.target == aten.slice_scatter.default:
        dim = normal_dim(argument(node, 2, "dim", 0), len(shape))
        start, _, step = slice(
            argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1)
        ).indices(shape[dim])
        return (dim, start) if step == 1 else None
    if len(pads := padded_dims(node)) == 1:
        ((dim, (before, after)),) = pads.items()
        return (dim, before) if before >= 0 and after >= 0 else None
    return None


def window_solution(node: fx.Node, layouts: list[Layout], splits: Mapping[str, Split]) -> Solution | None:
    """Forward: None where the dim is not split, or where the general rule must decide."""
    if node.target == aten.select.int:
        return _select(node, layouts[0], splits)
    window = window_of(node)
    if window is None or any(layout.partial for layout in layouts):  # a pending sum is left to the general rule
        return None
    dim, offset = window
    split = next((i for i, layout in enumerate(layouts) if _axis(layout.dims[dim])), None)
    if split is None or (len(layouts) == 2 and not _others_agree(layouts, dim)):
        return None
    axis = _axis(layouts[split].dims[dim])
    assert axis is not None
    larger, smaller = _sizes(node, dim)
    is_larger = axis.size == larger if larger != smaller else node.target == aten.slice.Tensor or split == 0
    start = axis.start if is_larger else axis.start - offset
    if start < 0 or start + larger > splits[axis.name].size:
        return None
    big, small = Axis(axis.name, larger, start), Axis(axis.name, smaller, start + offset)
    like = layouts[split]
    return _solution(node, _with(like, dim, big), _with(like, dim, small))


def window_pull(node: fx.Node, wanted: Layout) -> Solution | None:
    """Backward: the window of the operands that the wanted part of the result needs."""
    if node.target == aten.select_scatter.default:
        dim = normal_dim(argument(node, 2, "dim", 0), len(wanted.dims))
        if not _axis(wanted.dims[dim]):
            return None
        return Solution((wanted, Layout(wanted.dims[:dim] + wanted.dims[dim + 1 :])), (wanted,))
    window = window_of(node)
    if window is None or (axis := _axis(wanted.dims[window[0]])) is None:
        return None
    dim, offset = window
    larger, smaller = _sizes(node, dim)
    start = axis.start - offset if node.target == aten.slice.Tensor else axis.start
    big, small = Axis(axis.name, larger, start), Axis(axis.name, smaller, start + offset)
    return _solution(node, _with(wanted, dim, big), _with(wanted, dim, small))


def _select(node: fx.Node, layout: Layout, splits: Mapping[str, Split]) -> Solution | None:
    """One position of a split dim: its holder has it, the others have zeros, and the sum is pending."""
    dim = normal_dim(argument(node, 1, "dim", 0), len(layout.dims))
    axis = _axis(layout.dims[dim])
    if axis is None or layout.partial:
        return None
    rest = Layout(layout.dims[:dim] + layout.dims[dim + 1 :], frozenset(splits[axis.name].mesh_axes))
    return Solution((layout,), (rest,))


def _solution(node: fx.Node, big: Layout, small: Layout) -> Solution:
    if node.target == aten.slice.Tensor:
        return Solution((big,), (small,))
    if node.target == aten.slice_scatter.default:
        return Solution((big, small), (big,))
    return Solution((small,), (big,))


def _sizes(node: fx.Node, dim: int) -> tuple[int, int]:
    sizes = [shape_of(node)[dim], *(shape_of(operand)[dim] for operand in operands_of(node))]
    return max(sizes), min(sizes)


def _axis(dim: Dim) -> Axis | None:
    return dim[0].axis if len(dim) == 1 and dim[0].split else None


def _others_agree(layouts: list[Layout], dim: int) -> bool:
    """No two operands are split differently on the other dims."""
    split = [
        {i: d for i, d in enumerate(layout.dims) if i != dim and any(factor.split for factor in d)}
        for layout in layouts
    ]
    return all(not each or not split[0] or each == split[0] for each in split)


def _with(layout: Layout, dim: int, axis: Axis) -> Layout:
    dims = list(layout.dims)
    dims[dim] = (Factor(axis.size, axis, split=True),)
    return replace(layout, dims=tuple(dims))
