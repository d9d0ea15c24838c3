"""Elementwise operators, with broadcasting, and factories."""

from __future__ import annotations

import torch
from torch import fx

import evocompile.kernels.random  # noqa: F401 (registers the operator)
from evocompile.torch_private import OpOverload

from .base import Dims, Rule, TensorLabels, numbered, operands_of, result_shapes, shape_of

aten, prims = torch.ops.aten, torch.ops.prims

# Linear in every operand jointly (sums), in each operand alone (products), or in the first.
_JOINTLY = {aten.add.Tensor, aten.sub.Tensor, aten.neg.default}
_EACH = {aten.mul.Tensor}
_FIRST = {
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
}
# Elementwise, though not tagged so.
_UNTAGGED = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.where.self,
    prims.convert_element_type.default,
}
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that hold counts exactly
RANDOM = torch.ops.evocompile.random.default
CONSTANTS = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
FACTORIES = (*CONSTANTS, prims.iota.default)


def is_pointwise(target: object) -> bool:
    return target in _UNTAGGED or (isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags)


def broadcast_labels(shape: tuple[int, ...], result: tuple[int, ...]) -> TensorLabels:
    """Labels of an operand broadcast to `result`, whose dim i has the label "d<i>"."""
    offset = len(result) - len(shape)
    return tuple((f"d{i + offset}",) if size == result[i + offset] else () for i, size in enumerate(shape))


def pointwise(node: fx.Node) -> Dims | None:
    (result,) = result_shapes(node)
    if result is None:
        return None
    operands = operands_of(node)
    return Dims(
        operands=tuple(broadcast_labels(shape_of(operand), result) for operand in operands),
        results=(numbered("d", len(result)),),
        linear=_linear(node, operands),
    )


def _linear(node: fx.Node, operands: list[fx.Node]) -> tuple[frozenset[int], ...]:
    if node.target in _JOINTLY:
        # adding a number to a partial value would add it once a rank
        return (frozenset(range(len(operands))),) if len(operands) > 1 or node.target == aten.neg.default else ()
    if node.target in _EACH:
        return tuple(frozenset({i}) for i in range(len(operands)))
    if node.target in _FIRST:
        return (frozenset({0}),)
    if node.target == aten.where.self:
        return (frozenset({1, 2}),)
    if node.target == prims.convert_element_type.default:
        return (frozenset({0}),) if converts_exactly(operands[0], node.meta["val"].dtype) else ()
    return ()


def converts_exactly(node: fx.Node, after: torch.dtype) -> bool:
    """Whether a conversion may come before a pending sum: rounding down must not, it would round every term."""
    before = node.meta["val"].dtype
    if before.is_floating_point and after.is_floating_point:
        return before == after or before.itemsize < after.itemsize
    while node.target == prims.convert_element_type.default and node.meta["val"].dtype in _COUNTING:
        (node,) = operands_of(node)
    return node.target == aten.histc.default and after in _COUNTING  # whole numbers


def factory(node: fx.Node) -> Dims:
    (result,) = result_shapes(node)
    assert result is not None
    return Dims(operands=(), results=(numbered("d", len(result)),))


def new_like(node: fx.Node) -> Dims:
    """x.new_empty(size), …: of x only dtype and device matter, so the result may be split where x has the same dims."""
    (result,), source = result_shapes(node), shape_of(operands_of(node)[0])
    assert result is not None
    alike = len(source) == len(result)
    operand = tuple((f"d{i}",) if alike and size == result[i] else (f"x{i}",) for i, size in enumerate(source))
    return Dims(operands=(operand,), results=(numbered("d", len(result)),))


def copy(node: fx.Node) -> Dims:
    """aten.copy(x, y): y, broadcast to the shape of x and in its dtype."""
    target, source = operands_of(node)
    shape = shape_of(target)
    linear = (frozenset({1}),) if converts_exactly(source, target.meta["val"].dtype) else ()
    return Dims(
        operands=(numbered("d", len(shape)), broadcast_labels(shape_of(source), shape)),
        results=(numbered("d", len(shape)),),
        linear=linear,
    )


def is_zero(node: fx.Node) -> bool:
    """Whether a value is zeros."""
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        return node.args[1 if node.target != aten.new_full.default else 2] == 0
    return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def random(node: fx.Node) -> Dims:
    """evocompile::random(seed, …): any part of the draw can be drawn by itself."""
    (result,) = result_shapes(node)
    assert result is not None
    return Dims(operands=((),), results=(numbered("d", len(result)),))


NEW = (
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
RULES: dict[object, Rule] = {
    **dict.fromkeys(FACTORIES, factory),
    **dict.fromkeys(NEW, new_like),
    aten.copy.default: copy,
    RANDOM: random,
}
