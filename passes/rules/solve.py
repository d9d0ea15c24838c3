"""The solver: from a node's labels to the layouts of its operands and results, in both directions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from evocompile.layout import FINE, Axis, Dim, Factor, Layout, Split, finer

from .base import Dims, TensorLabels


@dataclass(frozen=True)
class Solution:
    """How to compute a node on its rank's part.

    operands: the layout in which each operand is needed.
    results:  the layout in which each result comes.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]


def canonical(layout: Layout) -> Layout:
    """The layout without names of what is not split: two equal canonical layouts are the same data."""
    dims = []
    for dim in layout.dims:
        merged: list[Factor] = []
        for factor in dim:
            if factor.split:
                merged.append(factor)
            elif factor.size != 1:
                if merged and not merged[-1].split:
                    merged[-1] = Factor(merged[-1].size * factor.size)
                else:
                    merged.append(Factor(factor.size))
        dims.append(tuple(merged) or (Factor(1),))
    return Layout(tuple(dims), layout.partial)


def regroup(dim: Dim, sizes: list[int]) -> list[Dim] | None:
    """Divides the factors of a dim into consecutive parts of the given sizes; None where a split factor would break."""
    if len(sizes) == 1:
        return [dim]
    rest = list(dim)
    parts: list[Dim] = []
    for i, size in enumerate(sizes):
        part: list[Factor] = []
        while rest and (size > 1 or rest[0].size == 1 or i == len(sizes) - 1):
            factor = rest[0]
            if size % factor.size == 0:
                part.append(rest.pop(0))
                size //= factor.size
            elif factor.size % size == 0 and not factor.split and size > 1:
                part.append(Factor(size))
                rest[0] = Factor(factor.size // size)
                size = 1
            else:
                return None
        if size != 1:
            return None
        parts.append(tuple(part) or (Factor(1),))
    return None if rest else parts


def forward(
    dims: Dims, sizes: Mapping[str, int], layouts: list[Layout], splits: Mapping[str, Split]
) -> tuple[Solution, list[str]]:
    """From the operands' natural layouts to the node's. Also says what had to be gathered, in words."""
    problems: list[str] = []
    assigned = _assign(dims.operands, layouts, sizes, problems)
    if dims.seeds:
        for label in assigned.keys() - dims.whole:
            assigned[label] = tuple(_seed(factor, splits, dims.starts) for factor in assigned[label])
    over_tp = {each for each in (dims.found | dims.folded) & assigned.keys() if is_over_tp(assigned[each], splits)}
    for label in dims.whole - over_tp:
        if label in assigned and _is_split(assigned[label]):
            problems.append("the operator needs a split dim whole")
            assigned[label] = _unsplit(assigned[label])
    _coarsen_beside_weights(assigned, splits)
    _one_label_per_mesh_axis(assigned, splits, problems)
    used = {each for dim in assigned.values() for f in dim for each in mesh_axes(f, splits)}
    partial = _passing_partial(dims, layouts, used, splits)
    if "tp" not in used:
        _refine_sums(dims, assigned, layouts, partial, splits)

    def summed_over(result: TensorLabels) -> frozenset[str]:
        """The mesh axes of the split labels that are summed away in a result."""
        kept = {label for labels in result for label in labels}
        gone = [factor for label in (dims.summed | (dims.found & over_tp)) - kept for factor in assigned.get(label, ())]
        return frozenset(each for factor in gone for each in mesh_axes(factor, splits))

    return Solution(
        tuple(
            _layout(tensor, assigned, sizes, layout.partial if i in partial else frozenset())
            for i, (tensor, layout) in enumerate(zip(dims.operands, layouts, strict=True))
        ),
        tuple(
            _layout(tensor, assigned, sizes, summed_over(tensor).union(*(layouts[i].partial for i in partial)))
            for tensor in dims.results
        ),
    ), problems


def pull(dims: Dims, sizes: Mapping[str, int], wanted: Layout) -> Solution | None:
    """From the wanted part of a node's only result to the parts of its operands; None if it cannot be pulled."""
    (result,) = dims.results
    if any(_is_split(dim) for labels, dim in zip(result, wanted.dims, strict=True) if not labels):
        return None  # a dim of size 1 that is split has no counterpart in the operands
    problems: list[str] = []
    assigned = _assign(dims.results, [wanted], sizes, problems)
    if problems or any(_is_split(assigned[label]) for label in dims.whole & assigned.keys()):
        return None
    return Solution(tuple(_layout(tensor, assigned, sizes, frozenset()) for tensor in dims.operands), (wanted,))


def _assign(
    tensors: Iterable[TensorLabels], layouts: Iterable[Layout], sizes: Mapping[str, int], problems: list[str]
) -> dict[str, Dim]:
    """Which factors each label runs over. A split operand decides over one that is whole, a name over none."""
    assigned: dict[str, Dim] = {}
    for tensor, layout in zip(tensors, layouts, strict=True):
        for labels, dim in zip(tensor, layout.dims, strict=True):
            if not labels:  # of size one, which may be an axis that the plan splits
                if _is_split(dim):
                    problems.append("a view drops or adds a split dim")
                continue
            parts = regroup(dim, [sizes[label] for label in labels])
            if parts is None:
                if _is_split(dim):
                    problems.append("a view breaks up a split dim")
                continue
            for label, part in zip(labels, parts, strict=True):
                known = assigned.get(label)
                if known is None or _strength(part) > _strength(known):
                    if known is not None and _is_split(known) and _coarse_names(part) != _coarse_names(known):
                        problems.append("operands are split differently")
                    assigned[label] = part
                elif _is_split(part) and _coarse_names(part) != _coarse_names(known):
                    problems.append("operands are split differently")
    return assigned


def _strength(dim: Dim) -> tuple[int, int, int]:
    split = [factor for factor in dim if factor.split]
    return len(split), sum(map(is_fine, split)), sum(factor.axis is not None for factor in dim)


def _coarse_names(dim: Dim) -> list[Factor]:
    """The split factors of a dim, those of a finer split like those of the coarser one."""
    split = [factor for factor in dim if factor.split]
    return [replace(each, axis=_coarser(each.axis)) if is_fine(each) and each.axis else each for each in split]


def is_fine(factor: Factor) -> bool:
    """Whether a factor is split over tp besides what its axis is split over."""
    return factor.split and factor.axis is not None and factor.axis.name.endswith(FINE)


def _coarser(axis: Axis) -> Axis:
    return replace(axis, name=axis.name.removesuffix(FINE))


def is_over_tp(dim: Dim, splits: Mapping[str, Split]) -> bool:
    """Whether a dim is one axis of the weights, split over tp: each rank has one interval of it."""
    factors = [factor for factor in dim if factor.size > 1 or factor.split]
    return len(factors) == 1 and not is_fine(factors[0]) and mesh_axes(factors[0], splits) == ("tp",)


def coarsened(layout: Layout, splits: Mapping[str, Split]) -> Layout:
    """The layout with the finer splits undone."""
    return replace(layout, dims=tuple(tuple(_coarsened(factor, splits) for factor in dim) for dim in layout.dims))


def _coarsened(factor: Factor, splits: Mapping[str, Split]) -> Factor:
    if not is_fine(factor) or factor.axis is None:
        return factor
    axis = _coarser(factor.axis)
    return replace(factor, axis=axis, split=axis.name in splits)


def _coarsen_beside_weights(assigned: dict[str, Dim], splits: Mapping[str, Split]) -> None:
    """Tokens that are split over tp are gathered where they meet a weight that is: a column of it needs all of them."""
    if any("tp" in mesh_axes(factor, splits) and not is_fine(factor) for dim in assigned.values() for factor in dim):
        for label, dim in assigned.items():
            assigned[label] = tuple(_coarsened(factor, splits) for factor in dim)


def _refinable(factor: Factor, splits: Mapping[str, Split]) -> bool:
    axis = factor.axis
    return axis is not None and finer(axis).name in splits and (factor.split or axis.name not in splits)


def has_rows(layout: Layout) -> bool:
    """Whether a value has more than one number for each token: less is not worth another communication."""
    last = layout.dims[-1] if layout.dims else ()
    return math.prod(factor.size for factor in last) > 1 and not any(factor.axis for factor in last)


def scattered(layout: Layout, splits: Mapping[str, Split]) -> Layout:
    """A sum that is pending over tp as it is scattered over the tokens; as it is, where it cannot be."""
    if "tp" not in layout.partial or not has_rows(layout):
        return layout
    dims = list(layout.dims)
    for i, dim in enumerate(dims):
        for at, factor in enumerate(dim):
            if _refinable(factor, splits) and factor.axis is not None:
                dims[i] = (*dim[:at], replace(factor, axis=finer(factor.axis), split=True), *dim[at + 1 :])
                return Layout(tuple(dims), layout.partial - {"tp"})
    return layout


def _refine_sums(
    dims: Dims,
    assigned: dict[str, Dim],
    layouts: list[Layout],
    passing: frozenset[int],
    splits: Mapping[str, Split],
) -> None:
    """A sum over tp that is needed now is scattered over the tokens, which costs half of having all of it."""
    for i, (tensor, layout) in enumerate(zip(dims.operands, layouts, strict=True)):
        if "tp" not in layout.partial or i in passing or not has_rows(layout):
            continue
        for label in (label for labels in tensor for label in labels if label not in dims.whole):
            factors = list(assigned.get(label, ()))
            for at, factor in enumerate(factors):
                if _refinable(factor, splits) and factor.axis is not None:
                    factors[at] = replace(factor, axis=finer(factor.axis), split=True)
                    assigned[label] = tuple(factors)
                    return


def _is_split(dim: Dim) -> bool:
    return any(factor.split for factor in dim)


def _unsplit(dim: Dim) -> Dim:
    return tuple(replace(factor, split=False) for factor in dim)


def mesh_axes(factor: Factor, splits: Mapping[str, Split]) -> tuple[str, ...]:
    """The mesh axes over which a factor is split; none where it is whole."""
    return splits[factor.axis.name].mesh_axes if factor.split and factor.axis else ()


def _seed(factor: Factor, splits: Mapping[str, Split], starts: bool) -> Factor:
    if starts and not factor.split and _refinable(replace(factor, split=True), splits) and factor.axis is not None:
        return replace(factor, axis=finer(factor.axis), split=True)
    return replace(factor, split=True) if factor.axis and factor.axis.name in splits else factor


def _one_label_per_mesh_axis(assigned: dict[str, Dim], splits: Mapping[str, Split], problems: list[str]) -> None:
    """A mesh axis can split one factor of a node; the first keeps it (queries before keys in q kᵀ).

    A label can have two such factors itself: the merged dim of a (batch, seq, seq) tensor.
    """
    taken: set[str] = set()
    for label, dim in assigned.items():
        kept = []
        for factor in dim:
            axes = mesh_axes(factor, splits)
            if taken & set(axes):
                problems.append(f"two dims are split over {' and '.join(axes)}")
                factor = replace(factor, split=False)
            else:
                taken.update(axes)
            kept.append(factor)
        assigned[label] = tuple(kept)


def _passing_partial(dims: Dims, layouts: list[Layout], used: set[str], splits: Mapping[str, Split]) -> frozenset[int]:
    """The operands whose pending sum may stay pending; those left out are reduced first."""
    partial = frozenset(i for i, layout in enumerate(layouts) if layout.partial)
    if partial not in dims.linear:
        return frozenset()
    pending = {layouts[i].partial for i in partial}
    if len(pending) != 1 or next(iter(pending)) & used:
        return frozenset()
    if len(partial) == 1 < len(layouts) and "tp" in pending.pop():
        # What a product makes of it would be needed by itself, too: scattered here, it is communicated once.
        (layout,) = (layouts[i] for i in partial)
        if any(_refinable(factor, splits) for dim in layout.dims for factor in dim):
            return frozenset()
    return partial


def _layout(
    tensor: TensorLabels, assigned: Mapping[str, Dim], sizes: Mapping[str, int], partial: frozenset[str]
) -> Layout:
    dims = []
    for labels in tensor:
        factors: list[Factor] = []
        for label in labels:
            factors.extend(assigned.get(label) or (Factor(sizes[label]),))
        dims.append(tuple(factors) or (Factor(1),))
    return Layout(tuple(dims), partial)
