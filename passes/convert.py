"""Conversions between two layouts of one value, as graph nodes: reduce, gather, index, and spread as a partial sum."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx

from evocompile.layout import Axis, Dim, Factor, Interval, Layout, is_finer
from evocompile.mesh import group_ranks

from .build import Builder
from .exchanges import places

aten = torch.ops.aten


def convert(builder: Builder, value: fx.Node, have: Layout, want: Layout) -> fx.Node:
    """`value`, laid out as `have`, laid out as `want`.

    In this order: sum what is pending, gather the factors that must be whole or split otherwise, keep only this rank's
    positions of those that must be split. To a pending sum, a split value is spread into zeros, without communication.
    """
    if "tp" in have.partial - want.partial and (scattered := _scattered(builder, value, have, want)):
        value, have = scattered
    if have.partial - want.partial:
        group = builder.group("reduce", have.partial - want.partial)
        start = builder.all_reduce(value, group, "a sum over split positions is needed whole")
        have = Layout(have.dims, have.partial & want.partial)
        value = builder.wait(start, layout=have)
    if want.partial - have.partial:
        return _spread(builder, value, have, want)
    if 0 in want.shape:
        value = builder.call(aten.reshape.default, (value, list(builder.sharding.local_shape(want))))
        builder.layouts[value] = want
        return value
    if (between := _between(have, want)) is not None:
        value, have = convert(builder, value, have, between), between
    have_dims, want_dims = _align(have, want)
    value = _reshape(builder, value, have_dims)
    factors = [factor for dim in have_dims for factor in dim]
    targets = [factor for dim in want_dims for factor in dim]
    for dim, (factor, target) in enumerate(zip(factors, targets, strict=True)):
        if factor.split and factor != target and not (target.split and is_finer(target.axis, factor.axis)):
            finer_ = target.split and is_finer(factor.axis, target.axis)
            value = _gather(builder, value, dim, factor, frozenset({"tp"}) if finer_ else None)
    for dim, (factor, target) in enumerate(zip(factors, targets, strict=True)):
        if target.split and factor != target and not (factor.split and is_finer(factor.axis, target.axis)):
            assert target.axis is not None
            held = factor.axis if factor.split and is_finer(target.axis, factor.axis) else None
            value = _index(builder, value, dim, target.axis, held)
    if any(len(dim) != 1 for dim in want_dims) or len(targets) != len(want.dims):
        value = builder.call(aten.reshape.default, (value, list(builder.sharding.local_shape(want))))
    builder.layouts[value] = want
    return value


def _between(have: Layout, want: Layout) -> Layout | None:
    """A layout on the way: dims whose split factors lie across one another become whole. None if there are none."""
    dims = [
        (Factor(size),) if _across(a, b) or _across(b, a) else a
        for size, a, b in zip(have.shape, have.dims, want.dims, strict=True)
    ]
    return Layout(tuple(dims), have.partial) if any(a is not b for a, b in zip(have.dims, dims, strict=True)) else None


def _across(a: Dim, b: Dim) -> bool:
    """Whether a split factor of `a` would be divided by the factors of `b`, or the two have no common factors."""
    cuts = sorted({1, *_ends(a), *_ends(b)})
    if any(hi % lo for lo, hi in pairwise(cuts)):
        return True
    starts = [1, *_ends(a)[:-1]]
    spans = [(lo, hi) for lo, hi, factor in zip(starts, _ends(a), a, strict=True) if factor.split]
    return any(lo < cut < hi for lo, hi in spans for cut in cuts)


def _align(have: Layout, want: Layout) -> tuple[list[Dim], list[Dim]]:
    """Both layouts with their dims divided into the same factors, so that each is split in one, both or none."""
    pairs = [_align_dim(a, b) for a, b in zip(have.dims, want.dims, strict=True)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _align_dim(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    """The common refinement. A split factor of size 1 (some ranks hold none of it) stands between two others."""
    cuts = sorted({1, *_ends(a), *_ends(b)})
    ones = list(dict.fromkeys([*_split_ones(a), *_split_ones(b)]))
    divided_a: list[Factor] = []
    divided_b: list[Factor] = []
    for lo, hi in pairwise([*cuts, cuts[-1]]):
        for one in ones:
            if one[0] == lo:
                divided_a.append(one[1] if one in _split_ones(a) else Factor(1))
                divided_b.append(one[1] if one in _split_ones(b) else Factor(1))
        if lo < hi:
            divided_a.append(_at(a, lo, hi))
            divided_b.append(_at(b, lo, hi))
    return tuple(divided_a) or (Factor(1),), tuple(divided_b) or (Factor(1),)


def _split_ones(dim: Dim) -> list[tuple[int, Factor]]:
    """The split factors of size 1, with the product of the sizes before them."""
    return [(end, factor) for end, factor in zip(_ends(dim), dim, strict=True) if factor.size == 1 and factor.split]


def _at(dim: Dim, lo: int, hi: int) -> Factor:
    """The factor that spans [lo, hi), which may be a part of one that is not split."""
    spans = zip([1, *_ends(dim)[:-1]], _ends(dim), dim, strict=True)
    return next((factor for start, end, factor in spans if (start, end) == (lo, hi)), Factor(hi // lo))


def _ends(dim: Dim) -> list[int]:
    ends, product = [], 1
    for factor in dim:
        product *= factor.size
        ends.append(product)
    return ends


def _reshape(builder: Builder, value: fx.Node, dims: list[Dim]) -> fx.Node:
    """One dim for each factor."""
    if all(len(dim) == 1 for dim in dims):
        return value
    shape = [builder.sharding.factor_size(factor) for dim in dims for factor in dim]
    return builder.call(aten.reshape.default, (value, shape))


def _scattered(builder: Builder, value: fx.Node, have: Layout, want: Layout) -> tuple[fx.Node, Layout] | None:
    """The sum over tp where a finer split of an axis is wanted of it: by a reduce-scatter over that axis, and laid out
    like this; None where none is."""
    if 0 in want.shape or _between(have, want) is not None:
        return None
    have_dims, want_dims = _align(have, want)
    factors = [factor for dim in have_dims for factor in dim]
    targets = [factor for dim in want_dims for factor in dim]
    splits = builder.sharding.splits
    finer_ = [
        i
        for i, (factor, target) in enumerate(zip(factors, targets, strict=True))
        if target.split
        and target.axis is not None
        and (is_finer(target.axis, factor.axis) if factor.split else splits[target.axis.name].mesh_axes == ("tp",))
    ]
    if len(finer_) != 1:
        return None
    at = finer_[0]
    value = _reduce_scatter(builder, _reshape(builder, value, have_dims), at, factors[at], targets[at])
    rest = iter([*factors[:at], targets[at], *factors[at + 1 :]])
    layout = Layout(tuple(tuple(next(rest) for _ in dim) for dim in have_dims), have.partial - {"tp"})
    if any(len(dim) != 1 for dim in have_dims):
        value = builder.call(aten.reshape.default, (value, list(builder.sharding.local_shape(layout))))
    return value, layout


def _reduce_scatter(builder: Builder, value: fx.Node, dim: int, factor: Factor, target: Factor) -> fx.Node:
    """Of the sum over tp this rank's positions of one dim. Parts may be uneven: they are padded to the longest."""
    assert target.axis is not None
    group = builder.group("reduce", frozenset({"tp"}))
    mesh, rank = builder.program.mesh, len(value.meta["val"].shape)
    front = [dim, *(d for d in range(rank) if d != dim)]
    value = builder.call(aten.permute.default, (value, front)) if dim else value
    held = builder.sharding.intervals(factor.axis) if factor.split and factor.axis else ((0, factor.size),)
    parts = [builder.sharding.at(mesh.coordinate(each)).intervals(target.axis) for each in group_ranks(group)]
    sizes = [sum(hi - lo for lo, hi in intervals) for intervals in parts]
    pieces = []
    for intervals, size in zip(parts, sizes, strict=True):
        for lo, hi in places(held, intervals):
            pieces.append(builder.call(aten.slice.Tensor, (value, 0, lo, hi)))
        if size < max(sizes):
            like = value.meta["val"]
            shape = [max(sizes) - size, *like.shape[1:]]
            pieces.append(builder.call(aten.full.default, (shape, 0), {"dtype": like.dtype, "device": like.device}))
    buffer = builder.call(aten.cat.default, (pieces, 0))
    value = builder.wait(builder.reduce_scatter(buffer, group, f"a sum, scattered over {target.axis}"))
    own = builder.sharding.factor_size(target)
    if own < max(sizes):
        value = builder.call(aten.slice.Tensor, (value, 0, 0, own))
    return builder.call(aten.permute.default, (value, [front.index(d) for d in range(rank)])) if dim else value


def _index(builder: Builder, value: fx.Node, dim: int, axis: Axis, held: Axis | None) -> fx.Node:
    """This rank's positions of one dim, of which it has all, or those of the coarser split `held`.

    The same operators on every rank, however many intervals it has: what later passes decide by them (a slice is a
    free view, a concatenation is not) must come out alike everywhere, or the ranks' collectives differ.
    """
    intervals = builder.sharding.intervals(axis)
    if held is not None:
        intervals = places(builder.sharding.intervals(held), intervals)
    parts = [builder.call(aten.slice.Tensor, (value, dim, lo, hi)) for lo, hi in intervals or ((0, 0),)]
    if builder.sharding.splits[axis.name].order == "contiguous":
        return parts[0]
    return builder.call(aten.cat.default, (parts, dim))


def _as_many(builder: Builder, axis: Axis) -> tuple[Interval, ...]:
    """This rank's intervals of an axis, with empty ones up to the number that ranks can have."""
    held = builder.sharding.intervals(axis)
    most = 1 if builder.sharding.splits[axis.name].order == "contiguous" else 2
    return held + ((0, 0),) * (most - len(held))


def _gather(
    builder: Builder, value: fx.Node, dim: int, factor: Factor, mesh_axes: frozenset[str] | None = None
) -> fx.Node:
    """All positions of a split dim, in global order. Parts may be uneven: they are padded to the longest.

    mesh_axes: over which alone to gather, for a coarser split of the dim.
    """
    assert factor.axis is not None
    all_axes = frozenset(builder.sharding.splits[factor.axis.name].mesh_axes)
    group = builder.group("gather", mesh_axes or all_axes)
    mesh = builder.program.mesh
    held = [builder.sharding.at(mesh.coordinate(each)).intervals(factor.axis) for each in group_ranks(group)]
    sizes = [sum(hi - lo for lo, hi in intervals) for intervals in held]
    longest, own = max(sizes), builder.sharding.factor_size(factor)
    rank = len(value.meta["val"].shape)
    front = [dim, *(d for d in range(rank) if d != dim)]
    back = [front.index(d) for d in range(rank)]
    value = builder.call(aten.permute.default, (value, front)) if dim else value
    if min(sizes) < longest:
        padding = [0, 0] * (rank - 1) + [0, longest - own]
        value = builder.call(aten.constant_pad_nd.default, (value, padding, 0))
    needed = "whole" if mesh_axes in (None, all_axes) else "at all ranks of tp"
    value = builder.wait(builder.all_gather(value, group, f"axis {factor.axis} is needed {needed}"))
    pieces = [
        (lo, index * longest + offset, hi - lo)
        for index, intervals in enumerate(held)
        for (lo, hi), offset in zip(intervals, _offsets(intervals), strict=True)
    ]
    parts = [builder.call(aten.slice.Tensor, (value, 0, start, start + length)) for _, start, length in sorted(pieces)]
    value = parts[0] if len(parts) == 1 else builder.call(aten.cat.default, (parts, 0))
    return builder.call(aten.permute.default, (value, back)) if dim else value


def _offsets(intervals: tuple[Interval, ...]) -> list[int]:
    offsets, offset = [], 0
    for lo, hi in intervals:
        offsets.append(offset)
        offset += hi - lo
    return offsets


def _spread(builder: Builder, value: fx.Node, have: Layout, want: Layout) -> fx.Node:
    """A split value as this rank's term of a sum: itself at its own positions, zero elsewhere."""
    assert have.partial | builder.sharding.mesh_axes(have) == want.partial, "only split axes become pending"
    factors = [factor for dim in have.dims for factor in dim]
    value = _reshape(builder, value, list(have.dims))
    for dim, factor in enumerate(factors):
        if not factor.split:
            continue
        assert factor.axis is not None
        intervals = _as_many(builder, factor.axis)
        shape = list(value.meta["val"].shape)
        shape[dim] = factor.size
        like = value.meta["val"]
        whole = builder.call(aten.full.default, (shape, 0), {"dtype": like.dtype, "device": like.device})
        for (lo, hi), offset in zip(intervals, _offsets(intervals), strict=True):
            part = builder.call(aten.slice.Tensor, (value, dim, offset, offset + hi - lo))
            whole = builder.call(aten.slice_scatter.default, (whole, part, dim, lo, hi))
        value = whole
    if any(len(dim) != 1 for dim in have.dims):
        value = builder.call(aten.reshape.default, (value, list(want.shape)))
    builder.layouts[value] = want
    return value
