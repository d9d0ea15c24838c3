"""Lookups by index: embedding, gather, scatter, advanced indexing, and the backward of embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .base import Dims, Rule, TensorLabels, argument, normal_dim, numbered, operands_of, shape_of
from .pointwise import broadcast_labels, is_zero

aten = torch.ops.aten


def embedding(node: fx.Node) -> Dims:
    """weight (V, D), indices (…) -> (…, D). Sharding starts here: ids have named axes, what comes out is split."""
    index = numbered("i", len(shape_of(operands_of(node)[1])))
    return Dims(
        ((("v",), ("d",)), index),
        ((*index, ("d",)),),
        whole=frozenset({"v"}),
        found=frozenset({"v"}),
        linear=(frozenset({0}),),
        seeds=True,
        starts=True,
    )


def embedding_backward(node: fx.Node) -> Dims:
    """gradient (…, D), indices (…) -> (V, D): a sum over all positions."""
    index = numbered("i", len(shape_of(operands_of(node)[1])))
    return Dims(
        ((*index, ("d",)), index),
        ((("v",), ("d",)),),
        summed=frozenset(label for labels in index for label in labels),
        whole=frozenset({"v"}),
        linear=(frozenset({0}),),
    )


def gather(node: fx.Node) -> Dims | None:
    """x, dim, index -> index' shape. Along `dim` x is needed whole; the other dims run together where equally long."""
    x, index = (shape_of(operand) for operand in operands_of(node))
    dim = normal_dim(argument(node, 1, "dim"), len(x))
    if any(a != b for i, (a, b) in enumerate(zip(x, index, strict=True)) if i != dim):
        return None
    kept = numbered("d", len(x))

    def along(label: str) -> TensorLabels:
        return (*kept[:dim], (label,), *kept[dim + 1 :])

    return Dims(
        (along("looked_up"), along("found")),
        (along("found"),),
        whole=frozenset({"looked_up", "found"}),
        found=frozenset({"looked_up"}),
        linear=(frozenset({0}),),
    )


def index_select(node: fx.Node) -> Dims:
    rank = len(shape_of(operands_of(node)[0]))
    dim = normal_dim(argument(node, 1, "dim"), rank)
    kept = numbered("d", rank)
    return Dims(
        ((*kept[:dim], ("looked_up",), *kept[dim + 1 :]), (("found",),)),
        ((*kept[:dim], ("found",), *kept[dim + 1 :]),),
        whole=frozenset({"looked_up"}),
        linear=(frozenset({0}),),
    )


def scatter(node: fx.Node) -> Dims | None:
    """x.scatter(dim, index, src or value): along `dim` everything must be whole."""
    operands = operands_of(node)
    shapes = [shape_of(operand) for operand in operands]
    dim = normal_dim(argument(node, 1, "dim"), len(shapes[0]))
    others = [[size for i, size in enumerate(shape) if i != dim] for shape in shapes]
    if any(other != others[0] for other in others):
        return None
    kept = numbered("d", len(shapes[0]))
    labels = tuple((*kept[:dim], (f"along{i}",), *kept[dim + 1 :]) for i in range(len(operands)))
    return Dims(labels, (labels[0],), whole=frozenset(f"along{i}" for i in range(len(operands))))


def scatter_add(node: fx.Node) -> Dims | None:
    """Into zeros, a sum over all positions of `dim`, like `embedding_backward`; else as `scatter`."""
    x, index, source = operands_of(node)
    dims = scatter(node)
    if dims is None or not is_zero(x) or shape_of(index) != shape_of(source):
        return dims
    dim = normal_dim(argument(node, 1, "dim"), len(shape_of(x)))
    kept = dims.operands[0]
    added = (*kept[:dim], ("added",), *kept[dim + 1 :])
    return Dims(
        (kept, added, added),
        (kept,),
        summed=frozenset({"added"}),
        whole=frozenset(kept[dim]),
        linear=(frozenset({2}),),
    )


@dataclass(frozen=True)
class _Indexed:
    """Labels of an indexed tensor, of its index tensors, and of what they select. used: the labels looked up."""

    tensor: TensorLabels
    indices: tuple[TensorLabels, ...]
    selected: TensorLabels
    used: frozenset[str]


def _indexed(node: fx.Node) -> _Indexed | None:
    """x[i, j, …] by index tensors on adjacent dims; None for other forms."""
    indices = list(argument(node, 1, "indices"))
    x = shape_of(operands_of(node)[0])
    indices += [None] * (len(x) - len(indices))
    used = [dim for dim, each in enumerate(indices) if each is not None]
    if used != list(range(used[0], used[-1] + 1)) or any(indices[dim].meta["val"].dtype == torch.bool for dim in used):
        return None
    found = torch.broadcast_shapes(*(shape_of(indices[dim]) for dim in used))
    labels = numbered("d", len(x))
    names = {f"d{i}": f"i{i}" for i in range(len(found))}

    def renamed(shape: tuple[int, ...]) -> TensorLabels:
        return tuple(tuple(names[label] for label in dim) for dim in broadcast_labels(shape, tuple(found)))

    return _Indexed(
        labels,
        tuple(renamed(shape_of(indices[dim])) for dim in used),
        (*labels[: used[0]], *renamed(tuple(found)), *labels[used[-1] + 1 :]),
        frozenset(f"d{dim}" for dim in used),
    )


def index(node: fx.Node) -> Dims | None:
    """x[i, j, …]: the dims of x that are looked up must be whole, the indices may be split."""
    labels = _indexed(node)
    if labels is None:
        return None
    return Dims(
        (labels.tensor, *labels.indices),
        (labels.selected,),
        whole=labels.used,
        linear=(frozenset({0}),),
        seeds=operands_of(node)[0].meta["val"].is_floating_point(),
    )


def index_put(node: fx.Node) -> Dims | None:
    """x[i, j, …] = values, or += with `accumulate`: into zeros, that is a sum over all positions of the indices."""
    operands, labels = operands_of(node), _indexed(node)
    if labels is None:
        return None
    values = shape_of(operands[-1])
    selected = labels.selected[len(labels.selected) - len(values) :]
    sizes = dict(zip(labels.selected, _selected_shape(node, labels), strict=True))
    selected = tuple(dim if sizes[dim] == size else () for dim, size in zip(selected, values, strict=True))
    positions = frozenset(label for dim in labels.selected for label in dim if label.startswith("i"))
    adds = argument(node, 3, "accumulate", False) and is_zero(operands[0])
    return Dims(
        (labels.tensor, *labels.indices, selected),
        (labels.tensor,),
        summed=positions if adds else frozenset(),
        whole=labels.used if adds else labels.used | positions,
        linear=(frozenset({len(operands) - 1}),) if adds else (),
    )


def _selected_shape(node: fx.Node, labels: _Indexed) -> list[int]:
    sizes: dict[tuple[str, ...], int] = {}
    for tensor, operand in zip((labels.tensor, *labels.indices), operands_of(node), strict=False):
        for dim, size in zip(tensor, shape_of(operand), strict=True):
            sizes[dim] = size
    return [sizes.get(dim, 1) for dim in labels.selected]


RULES: dict[object, Rule] = {
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.gather.default: gather,
    aten.index_select.default: index_select,
    aten.scatter.value: scatter,
    aten.scatter.src: scatter,
    aten.scatter_add.default: scatter_add,
    aten.index.Tensor: index,
    aten.index_put.default: index_put,
}
