"""Lookups by index: embedding, gather, scatter, advanced indexing, and the backward of embedding."""

from __future__ import annotations

import torch
from torch import fx

from .base import Dims, Rule, TensorLabels, argument, normal_dim, numbered, operands_of, shape_of
from .pointwise import broadcast_labels

aten = torch.ops.aten


def embedding(node: fx.Node) -> Dims:
    """weight (V, D), indices (…) -> (…, D). Sharding starts here: ids have named axes, what comes out is split."""
    index = numbered("i", len(shape_of(operands_of(node)[1])))
    return Dims(
        ((("v",), ("d",)), index), ((*index, ("d",)),), whole=frozenset({"v"}), linear=(frozenset({0}),), seeds=True
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


def index(node: fx.Node) -> Dims | None:
    """x[i, j, …] by index tensors on adjacent dims: those dims of x must be whole, the indices may be split."""
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

    return Dims(
        (labels, *(renamed(shape_of(indices[dim])) for dim in used)),
        ((*labels[: used[0]], *renamed(tuple(found)), *labels[used[-1] + 1 :]),),
        whole=frozenset(f"d{dim}" for dim in used),
        linear=(frozenset({0}),),
        seeds=operands_of(node)[0].meta["val"].is_floating_point(),
    )


RULES: dict[object, Rule] = {
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.gather.default: gather,
    aten.index_select.default: index_select,
    aten.scatter.value: scatter,
    aten.scatter.src: scatter,
    aten.scatter_add.default: scatter,
    aten.index.Tensor: index,
}
