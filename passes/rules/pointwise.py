"""Elementwise operators, with broadcasting, and factories."""

from __future__ import annotations

import torch
from torch import fx

import evocompile.kernels.random  # noqa: F401 (registers the operator)

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
RANDOM = torch.ops.evocompile.random.default
FACTORIES = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format, prims.iota.default)


def is_pointwise(target: object) -> bool:
    return target in _UNTAGGED or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


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
        before, after = operands[0].meta["val"].dtype, node.meta["val"].dtype
        # rounding down is not linear: sum first, in the wider type
        widens = before.is_floating_point and after.is_floating_point and after.itemsize >= before.itemsize
        return (frozenset({0}),) if widens else ()
    return ()


def factory(node: fx.Node) -> Dims:
    (result,) = result_shapes(node)
    assert result is not None
    return Dims(operands=(), results=(numbered("d", len(result)),))


def random(node: fx.Node) -> Dims:
    """evocompile::random(seed, …): any part of the draw can be drawn by itself."""
    (result,) = result_shapes(node)
    assert result is not None
    return Dims(operands=((),), results=(numbered("d", len(result)),))


RULES: dict[object, Rule] = {**dict.fromkeys(FACTORIES, factory), RANDOM: random}
