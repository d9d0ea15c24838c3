"""Reductions, and operators that need all positions of one dim (softmax, cumulative sums, sorting)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from .base import Dims, Rule, TensorLabels, argument, normal_dim, numbered, operands_of, result_shapes, shape_of
from .pointwise import converts_exactly

aten = torch.ops.aten


def _reduced(rank: int, dims: list[int], keepdim: bool) -> tuple[TensorLabels, frozenset[str]]:
    """Labels of the result of reducing `dims` of an operand labelled d0, d1, …, and the labels reduced."""
    reduced = {normal_dim(dim, rank) for dim in dims} if dims else set(range(rank))
    labels: list[tuple[str, ...]] = []
    for dim in range(rank):
        if dim not in reduced:
            labels.append((f"d{dim}",))
        elif keepdim:
            labels.append(())
    return tuple(labels), frozenset(f"d{dim}" for dim in reduced)


def _dims_argument(node: fx.Node) -> list[int]:
    dims = argument(node, 1, "dim")
    if dims is None:
        return []
    return [dims] if isinstance(dims, int) else list(dims)


def summing(node: fx.Node) -> Dims:
    """sum and mean: a split dim leaves a partial sum."""
    rank = len(shape_of(operands_of(node)[0]))
    labels, reduced = _reduced(rank, _dims_argument(node), bool(argument(node, 2, "keepdim", False)))
    return Dims((numbered("d", rank),), (labels,), summed=reduced, linear=(frozenset({0}),))


def whole_reduction(keepdim_position: int = 2, folds: bool = False) -> Rule:
    """Reductions that are no sums (amax, any, var, argmax, …): every result has the same dims.

    folds: what several ranks find can be put together (`emit.py`).
    """

    def rule(node: fx.Node) -> Dims:
        rank = len(shape_of(operands_of(node)[0]))
        keepdim = bool(argument(node, keepdim_position, "keepdim", False))
        labels, reduced = _reduced(rank, _dims_argument(node), keepdim)
        folded = reduced if folds else frozenset()
        return Dims((numbered("d", rank),), (labels,) * len(result_shapes(node)), whole=reduced, folded=folded)

    return rule


def along_dim(position: int = 1) -> Rule:
    """Operators that keep the shape and need one dim whole: cumsum, softmax, sort, topk, flip along that dim."""

    def rule(node: fx.Node) -> Dims:
        operands = operands_of(node)
        rank = len(shape_of(operands[0]))
        dim = normal_dim(argument(node, position, "dim", -1), rank)
        kept = numbered("d", rank)
        results = []
        for shape in result_shapes(node):
            assert shape is not None
            same = shape[dim : dim + 1] == shape_of(operands[0])[dim : dim + 1]
            results.append(kept if same else (*kept[:dim], ("result",), *kept[dim + 1 :]))
        return Dims((kept,) * len(operands), tuple(results), whole=frozenset({f"d{dim}", "result"}))

    return rule


def cumulative_sum(node: fx.Node) -> Dims:
    """cumsum along a whole dim: linear, but for rounding down to another dtype."""
    dims = along_dim()(node)
    before, after = operands_of(node)[0].meta["val"].dtype, node.meta["val"].dtype
    linear = (frozenset({0}),) if before == after or converts_exactly(operands_of(node)[0], after) else ()
    return replace(dims, linear=linear)


def histogram(node: fx.Node) -> Dims:
    """histc: counts are sums over all elements, if the bins do not depend on them."""
    operand = numbered("d", len(shape_of(operands_of(node)[0])))
    labels = frozenset(label for dim in operand for label in dim)
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):  # from the least to the greatest element
        return Dims((operand,), ((("bin",),),), whole=labels)
    return Dims((operand,), ((("bin",),),), summed=labels)


RULES: dict[object, Rule] = {
    aten.histc.default: histogram,
    aten.cumsum.default: cumulative_sum,
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), summing),
    **dict.fromkeys(
        (
            aten.any.default,
            aten.any.dim,
            aten.any.dims,
            aten.all.default,
            aten.all.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.max.default,
            aten.max.dim,
            aten.min.default,
            aten.min.dim,
            aten.prod.default,
            aten.prod.dim_int,
        ),
        whole_reduction(),
    ),
    **dict.fromkeys((aten.amax.default, aten.amin.default, aten.logsumexp.default), whole_reduction(folds=True)),
    **dict.fromkeys((aten.var.correction, aten.var_mean.correction, aten.std.correction), whole_reduction(3)),
    **dict.fromkeys(
        (
            aten.cumprod.default,
            aten._softmax.default,
            aten._log_softmax.default,
            aten.sort.default,
            aten.sort.stable,
        ),
        along_dim(),
    ),
    **dict.fromkeys(
        (aten.topk.default, aten._softmax_backward_data.default, aten._log_softmax_backward_data.default), along_dim(2)
    ),
}
