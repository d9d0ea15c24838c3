"""Views, permutations, and operators that cut or join along dims that are not split."""

from __future__ import annotations

import math
import operator
from itertools import pairwise

import torch
from torch import fx

from .base import Dims, Rule, TensorLabels, argument, normal_dim, numbered, operands_of, result_shapes, shape_of
from .pointwise import broadcast_labels

aten = torch.ops.aten

_FIRST = (frozenset({0}),)


def view(node: fx.Node) -> Dims:
    """A view is described by the common refinement of both shapes: (B, S, D) -> (B*S, D) has labels of size B, S, D."""
    source, (result,) = shape_of(operands_of(node)[0]), result_shapes(node)
    assert result is not None
    return view_labels(source, result)


def view_labels(source: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    cuts_source, cuts_result = _prefix_products(source), _prefix_products(result)
    cuts = sorted({1, *cuts_source, *cuts_result})
    sizes: dict[str, int] = {}
    if 0 in cuts or any(b % a for a, b in pairwise(cuts)):
        return _opaque_view(source, result)
    for i, (lo, hi) in enumerate(pairwise(cuts)):
        sizes[f"v{i}"] = hi // lo

    def labels(shape: tuple[int, ...], ends: list[int]) -> TensorLabels:
        starts = [1, *ends][: len(ends)]
        return tuple(
            tuple(f"v{i}" for i in range(len(cuts) - 1) if start <= cuts[i] and cuts[i + 1] <= end)
            for start, end in zip(starts, ends, strict=True)
        )

    return Dims(
        (labels(source, cuts_source),),
        (labels(result, cuts_result),),
        linear=_FIRST,
        sizes=sizes,
    )


def _prefix_products(shape: tuple[int, ...]) -> list[int]:
    products, product = [], 1
    for size in shape:
        product *= size
        products.append(product)
    return products


def _opaque_view(source: tuple[int, ...], result: tuple[int, ...]) -> Dims:
    """Shapes whose refinement does not exist ((4, 6) -> (3, 8)): nothing of it can be split."""
    operand, out = numbered("s", len(source)), numbered("r", len(result))
    return Dims((operand,), (out,), whole=frozenset(label for dim in operand + out for label in dim), linear=_FIRST)


def permute(node: fx.Node) -> Dims:
    rank = len(shape_of(operands_of(node)[0]))
    order = [normal_dim(dim, rank) for dim in argument(node, 1, "dims")]
    return Dims((numbered("d", rank),), (tuple((f"d{dim}",) for dim in order),), linear=_FIRST)


def transpose(node: fx.Node) -> Dims:
    rank = len(shape_of(operands_of(node)[0]))
    order = list(range(rank))
    if node.target == aten.t.default:
        order.reverse()
    else:
        a, b = normal_dim(argument(node, 1, "dim0"), rank), normal_dim(argument(node, 2, "dim1"), rank)
        order[a], order[b] = order[b], order[a]
    return Dims((numbered("d", rank),), (tuple((f"d{dim}",) for dim in order),), linear=_FIRST)


def unsqueeze(node: fx.Node) -> Dims:
    rank = len(shape_of(operands_of(node)[0]))
    dim = normal_dim(argument(node, 1, "dim"), rank + 1)
    labels = numbered("d", rank)
    return Dims((labels,), ((*labels[:dim], (), *labels[dim:]),), linear=_FIRST)


def squeeze(node: fx.Node) -> Dims:
    shape = shape_of(operands_of(node)[0])
    dims = argument(node, 1, "dim", list(range(len(shape))))
    dims = {normal_dim(dim, len(shape)) for dim in ([dims] if isinstance(dims, int) else dims)}
    gone = {dim for dim in dims if shape[dim] == 1}
    operand = tuple(() if dim in gone else (f"d{dim}",) for dim in range(len(shape)))
    return Dims((operand,), (tuple(labels for dim, labels in enumerate(operand) if dim not in gone),), linear=_FIRST)


def expand(node: fx.Node) -> Dims:
    """Linear, but a pending sum is done before it: there is less to add up."""
    (result,), source = result_shapes(node), shape_of(operands_of(node)[0])
    assert result is not None
    linear = _FIRST if math.prod(source) == math.prod(result) else ()
    return Dims((broadcast_labels(source, result),), (numbered("d", len(result)),), linear=linear)


def select(node: fx.Node) -> Dims:
    rank = len(shape_of(operands_of(node)[0]))
    dim = normal_dim(argument(node, 1, "dim", 0), rank)
    labels = numbered("d", rank)
    return Dims((labels,), (labels[:dim] + labels[dim + 1 :],), whole=frozenset({f"d{dim}"}), linear=_FIRST)


def cut(position: int = 1) -> Rule:
    """slice, split, unbind-like and padding operators that change the size of one dim, which must be whole."""

    def rule(node: fx.Node) -> Dims:
        rank = len(shape_of(operands_of(node)[0]))
        dim = normal_dim(argument(node, position, "dim", 0), rank)
        kept = numbered("d", rank)
        if result_shapes(node) == [shape_of(operands_of(node)[0])]:  # x[:], which cuts nothing
            return Dims((kept,), (kept,), linear=_FIRST)
        result = (*kept[:dim], ("cut",), *kept[dim + 1 :])
        # split() has results of several sizes: one label each
        results = tuple((*result[:dim], (f"cut{i}",), *result[dim + 1 :]) for i in range(len(result_shapes(node))))
        cuts = frozenset(f"cut{i}" for i in range(len(results)))
        return Dims((kept,), results, whole=cuts | {f"d{dim}"}, linear=_FIRST)

    return rule


def cat(node: fx.Node) -> Dims:
    operands = operands_of(node)
    rank = len(shape_of(operands[0]))
    dim = normal_dim(argument(node, 1, "dim", 0), rank)
    kept = numbered("d", rank)

    def along(label: str) -> TensorLabels:
        return (*kept[:dim], (label,), *kept[dim + 1 :])

    labels = [f"part{i}" for i in range(len(operands))]
    return Dims(
        tuple(along(label) for label in labels),
        (along("joined"),),
        whole=frozenset({"joined", *labels}),
        linear=(frozenset(range(len(operands))),),
    )


def parts_of(node: fx.Node) -> tuple[int, int] | None:
    """(dim, size) of a slice or split into equal parts of a dim, each starting at a multiple of its size."""
    if node.target not in (aten.slice.Tensor, aten.split.Tensor):
        return None
    source, results = shape_of(operands_of(node)[0]), result_shapes(node)
    position = 1 if node.target == aten.slice.Tensor else 2
    dim = normal_dim(argument(node, position, "dim", 0), len(source))
    sizes = {shape[dim] for shape in results if shape is not None}
    start = argument(node, 2, "start", 0) or 0 if position == 1 else 0
    step = argument(node, 4, "step", 1) if position == 1 else 1
    if len(sizes) != 1 or step != 1 or start < 0 or min(size := sizes.pop(), source[dim]) < 2:
        return None
    return None if size == source[dim] or source[dim] % size or start % size else (dim, size)


def in_parts(node: fx.Node) -> Dims | None:
    """Cutting a dim into equal parts, as a fused (q, k, v) is, or joining such: the dim is (part, position in it), so
    that the positions can be split. None for everything else."""
    shapes = [shape_of(operand) for operand in operands_of(node)]
    if node.target == aten.cat.default and len(set(shapes)) == 1 < len(shapes):
        dim, count = normal_dim(argument(node, 1, "dim", 0), len(shapes[0])), len(shapes)
        size = shapes[0][dim]
    elif (part := parts_of(node)) is not None:
        (dim, size), count = part, 0
    else:
        return None
    kept = numbered("d", len(shapes[0]))
    whole = (*kept[:dim], ("parts", "part"), *kept[dim + 1 :])
    one = (*kept[:dim], ("part",), *kept[dim + 1 :])
    sizes = {"parts": count or shapes[0][dim] // size, "part": size}
    if count:
        every = frozenset(range(count))
        return Dims((one,) * count, (whole,), whole=frozenset({"parts"}), linear=(every,), sizes=sizes)
    results = (one,) * len(result_shapes(node))
    return Dims((whole,), results, whole=frozenset({"parts"}), linear=_FIRST, sizes=sizes)


def slice_scatter(node: fx.Node) -> Dims:
    rank = len(shape_of(node))
    dim = normal_dim(argument(node, 2, "dim", 0), rank)
    kept = numbered("d", rank)
    if shape_of(operands_of(node)[1]) == shape_of(node):  # x[:] = y
        return Dims((kept, kept), (kept,), linear=(frozenset({0, 1}),))
    source = (*kept[:dim], ("source",), *kept[dim + 1 :])
    return Dims((kept, source), (kept,), whole=frozenset({f"d{dim}", "source"}), linear=(frozenset({0, 1}),))


def select_scatter(node: fx.Node) -> Dims:
    rank = len(shape_of(node))
    dim = normal_dim(argument(node, 2, "dim", 0), rank)
    kept = numbered("d", rank)
    return Dims(
        (kept, kept[:dim] + kept[dim + 1 :]), (kept,), whole=frozenset({f"d{dim}"}), linear=(frozenset({0, 1}),)
    )


def constant_pad(node: fx.Node) -> Dims:
    """Padding of the last dims: those that are padded must be whole."""
    source = shape_of(operands_of(node)[0])
    padding = list(argument(node, 1, "pad"))
    padded = {len(source) - 1 - i // 2 for i, amount in enumerate(padding) if amount}
    operand = numbered("d", len(source))
    result = tuple((f"p{i}",) if i in padded else labels for i, labels in enumerate(operand))
    whole = frozenset(label for i in padded for label in (f"d{i}", f"p{i}"))
    value = argument(node, 2, "value", 0)
    return Dims((operand,), (result,), whole=whole, linear=_FIRST if value == 0 else ())


def flip(node: fx.Node) -> Dims:
    rank = len(shape_of(node))
    dims = frozenset(f"d{normal_dim(dim, rank)}" for dim in argument(node, 1, "dims"))
    return Dims((numbered("d", rank),), (numbered("d", rank),), whole=dims, linear=_FIRST)


def complex_pairs(node: fx.Node) -> Dims:
    """view_as_complex and view_as_real: the last dim of the real tensor holds pairs."""
    (result,), source = result_shapes(node), shape_of(operands_of(node)[0])
    assert result is not None
    shared = numbered("d", min(len(source), len(result)))
    pairs = (*shared, ("pair",))
    to_complex = len(source) > len(result)
    operand, out = (pairs, shared) if to_complex else (shared, pairs)
    return Dims((operand,), (out,), whole=frozenset({"pair"}), linear=_FIRST)


def getitem(_: fx.Node) -> None:
    """Results of multi-result operators are handled by the passes themselves."""


SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
RULES: dict[object, Rule] = {
    **dict.fromkeys(VIEWS, view),
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: transpose,
    aten.unsqueeze.default: unsqueeze,
    **dict.fromkeys(SQUEEZES, squeeze),
    aten.expand.default: expand,
    aten.select.int: select,
    aten.slice.Tensor: cut(),
    aten.split.Tensor: cut(2),
    aten.split_with_sizes.default: cut(2),
    aten.cat.default: cat,
    aten.slice_scatter.default: slice_scatter,
    aten.select_scatter.default: select_scatter,
    aten.constant_pad_nd.default: constant_pad,
    aten.flip.default: flip,
    **dict.fromkeys((aten.view_as_complex.default, aten.view_as_real.default), complex_pairs),
    operator.getitem: getitem,
}
