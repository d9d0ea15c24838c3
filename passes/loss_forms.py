"""Losses over a vocabulary in forms that can be computed where each rank has a part of the vocabulary.

As captured, a cross entropy is made for one device: the maximum of each row and its sum of exponentials follow one
another, the label's logit is looked up in what they give, and its backward writes a 1 into rows of zeros and sums
whole rows of them. Three rewritings make of this what Megatron-LM computes (1909.08053, section 3):

    x - max x - log Σ exp(x - max x)          ->  x - logsumexp(x)
    gather(x - row, label)                    ->  gather(x, label) - row
    scatter(0, label, c)·w, and sums of it    ->  where(position == label, c·w, 0), and c·w

Both sides are equal up to floating-point order, for any values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from evocompile.program import Program, val

from .build import fake_mode_of
from .rules.base import argument, normal_dim, shape_of
from .rules.pointwise import is_zero

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class _OneHot:
    """`value` where the position in `dim` is `index`, zero elsewhere; both of size 1 in `dim`."""

    dim: int
    index: fx.Node
    value: fx.Node | float


def split_losses(program: Program) -> Program:
    """Rewrites the losses of a program that shall be split over tp."""
    assert program.joint is not None
    graph = program.joint.graph
    for node in graph.find_nodes(op="call_function", target=aten.log.default):
        _log_sum_exp(node)
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        _look_up_first(node)
    _one_hots(graph)
    graph.eliminate_dead_code()
    graph.lint()
    program.joint.recompile()
    return program


def _call(like: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
    """A call of an operator in the graph's insertion point, with the source line of `like`."""
    node = like.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    with fake_mode_of(like.graph), torch.no_grad():
        value = target(*fx.map_arg(args, val), **kwargs)  # type: ignore[operator, arg-type]
    node.meta = {**{key: each for key, each in like.meta.items() if key != "val"}, "val": value}
    return node


def _is(node: object, target: object) -> bool:
    return isinstance(node, fx.Node) and node.target == target


def _only_dim(node: fx.Node) -> int | None:
    """The one dim that a reduction with `keepdim` takes."""
    dims = argument(node, 1, "dim")
    if not isinstance(dims, Sequence) or len(dims) != 1 or not argument(node, 2, "keepdim", False):
        return None
    return normal_dim(dims[0], len(shape_of(node)))


def _log_sum_exp(log: fx.Node) -> None:
    """x - max x - log Σ exp(x - max x), for every such difference with this logarithm."""
    total = log.args[0]
    if not _is(total, aten.sum.dim_IntList) or not _is(total.args[0], aten.exp.default):  # type: ignore[union-attr]
        return
    shifted = total.args[0].args[0]  # type: ignore[union-attr]
    if not _is(shifted, aten.sub.Tensor) or shifted.kwargs or not _is(shifted.args[1], aten.amax.default):
        return
    x, most = shifted.args
    dim = _only_dim(total)  # type: ignore[arg-type]
    same = most.args[0] is x and dim is not None and _only_dim(most) == dim
    uses = [u for u in log.users if u.target == aten.sub.Tensor and u.args == (shifted, log) and not u.kwargs]
    if not same or not uses or val(log).dtype != val(x).dtype:
        return
    with log.graph.inserting_after(log):
        whole = _call(log, aten.logsumexp.default, x, [dim], True)
    for user in uses:
        user.args = (x, whole)


def _look_up_first(gather: fx.Node) -> None:
    """Of a difference with a value for each row, the operand alone is looked up."""
    while True:
        difference, index = gather.args[0], gather.args[2]
        dim = normal_dim(gather.args[1], len(shape_of(gather)))  # type: ignore[arg-type]
        if not _is(difference, aten.sub.Tensor) or difference.kwargs:  # type: ignore[union-attr]
            return
        x, row = difference.args  # type: ignore[union-attr]
        alike = isinstance(row, fx.Node) and isinstance(x, fx.Node) and len(shape_of(row)) == len(shape_of(x))
        if not alike or shape_of(x) != shape_of(difference) or shape_of(row)[dim] != 1 or shape_of(x)[dim] == 1:
            return
        if any(a != b for i, (a, b) in enumerate(zip(shape_of(index), shape_of(row), strict=True)) if i != dim):
            return
        if val(x).dtype != val(difference).dtype or val(row).dtype != val(x).dtype:
            return
        with gather.graph.inserting_before(gather):
            found = _call(gather, aten.gather.default, x, dim, index)
            moved = _call(gather, aten.sub.Tensor, found, row)
        gather.replace_all_uses_with(moved)
        gather.graph.erase_node(gather)
        gather = found


def _one_hots(graph: fx.Graph) -> None:
    known: dict[fx.Node, _OneHot] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            if (hot := _one_hot(node, known)) is not None:
                known[node] = hot
            elif (total := _summed(node, known)) is not None:
                node.replace_all_uses_with(total)
    for node, hot in known.items():
        if any(user not in known for user in node.users):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_compared(node, hot), lambda user: user not in known)


def _one_hot(node: fx.Node, known: dict[fx.Node, _OneHot]) -> _OneHot | None:
    """What is known of a node that has at most one value other than zero in each row."""
    if node.target in (aten.scatter.value, aten.scatter.src, aten.scatter_add.default):
        zeros, dim, index, value = node.args[:4]
        rank = len(shape_of(node))
        if len(node.args) > 4 or node.kwargs or not rank or not is_zero(zeros):  # type: ignore[arg-type]
            return None
        dim = normal_dim(dim, rank)  # type: ignore[arg-type]
        row = (*shape_of(node)[:dim], 1, *shape_of(node)[dim + 1 :])
        fits = shape_of(index) == row and (not isinstance(value, fx.Node) or shape_of(value) == row)
        return _OneHot(dim, index, value) if fits else None  # type: ignore[arg-type]
    if node.target == aten.mul.Tensor and not node.kwargs:
        for hot, factor in (node.args, node.args[::-1]):
            if hot in known and factor not in known and _for_each_row(factor, node, known[hot].dim):
                return _scaled(node, known[hot], factor)
    if node.target == prims.convert_element_type.default and node.args[0] in known:
        hot, dtype = known[node.args[0]], node.args[1]
        value = hot.value
        if isinstance(value, fx.Node):
            value = _call(node, prims.convert_element_type.default, value, dtype)
        return _OneHot(hot.dim, hot.index, value)
    return None


def _for_each_row(factor: object, product: fx.Node, dim: int) -> bool:
    """Whether a factor is a number, or one for each row."""
    if not isinstance(factor, fx.Node):
        return True
    shape = shape_of(factor)
    missing = len(shape_of(product)) - len(shape)
    return dim < missing or shape[dim - missing] == 1


def _scaled(product: fx.Node, hot: _OneHot, factor: object) -> _OneHot:
    """`hot` times a factor for each row; as many values as there are rows."""
    dtype, value = val(product).dtype, hot.value
    if not isinstance(value, fx.Node) and not isinstance(factor, fx.Node):
        return _OneHot(hot.dim, hot.index, value * factor)  # type: ignore[operator]
    tensor, other = (value, factor) if isinstance(value, fx.Node) else (factor, value)
    scaled = _call(product, aten.mul.Tensor, tensor, other)
    if val(scaled).dtype != dtype:
        scaled = _call(product, prims.convert_element_type.default, scaled, dtype)
    return _OneHot(hot.dim, hot.index, scaled)


def _summed(node: fx.Node, known: dict[fx.Node, _OneHot]) -> fx.Node | None:
    """The sum over the rows of what is one-hot in them: its values."""
    if node.target != aten.sum.dim_IntList or (hot := known.get(node.args[0])) is None:  # type: ignore[arg-type]
        return None
    operand = node.args[0]
    dims = [normal_dim(dim, len(shape_of(operand))) for dim in argument(node, 1, "dim") or ()]
    if dims != [hot.dim] or val(node).dtype != val(operand).dtype or not isinstance(hot.value, fx.Node):
        return None
    shape = [size if dim != hot.dim else 1 for dim, size in enumerate(shape_of(operand))]
    value = hot.value
    if list(shape_of(value)) != shape:
        value = _call(node, aten.expand.default, value, shape)
    return value if argument(node, 2, "keepdim", False) else _call(node, aten.squeeze.dim, value, hot.dim)


def _compared(node: fx.Node, hot: _OneHot) -> fx.Node:
    """The one-hot value by a comparison of positions, of which any part can be computed by itself."""
    value, rank = val(node), len(shape_of(node))
    index = val(hot.index)
    positions = _call(
        node,
        prims.iota.default,
        value.shape[hot.dim],
        start=0,
        step=1,
        dtype=index.dtype,
        device=index.device,
        requires_grad=False,
    )
    for dim in range(hot.dim + 1, rank):
        positions = _call(node, aten.unsqueeze.default, positions, dim - hot.dim)
    here = _call(node, aten.eq.Tensor, positions, hot.index)
    constant = {"dtype": value.dtype, "device": value.device}
    zero = _call(node, aten.full.default, [], 0, **constant)
    held = hot.value if isinstance(hot.value, fx.Node) else _call(node, aten.full.default, [], hot.value, **constant)
    return _call(node, aten.where.self, here, held, zero)
