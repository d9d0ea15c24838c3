"""Sharding rules of custom operators, written as einsum is: "b s d, d -> b s d"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import fx

from evocompile.errors import ShardingError
from evocompile.program import source_line
from evocompile.torch_private import OpOverload

from .base import Dims, Labels, Rule, TensorLabels, label_sizes, operands_of, result_shapes, shape_of

CUSTOM: dict[object, Rule] = {}
_BUILT_IN = ("aten", "prims", "evocompile", "_c10d_functional", "higher_order")

Notation = str | Callable[[fx.Node], str]


def register_sharding_rule(
    operator: OpOverload,
    rule: Notation,
    *,
    summed: str = "",
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
) -> None:
    """Says which dims of a custom operator run together, so that it can run on each rank's part of its operands.

    operator: an overload, such as `torch.ops.my.scale.default`. Its backward is an operator with a rule of its own.
    rule:     the dims of every tensor operand, in the order of the arguments (those in lists in place, `None` left
              out), "->", the dims of every result: "b s d, d -> b s d". A dim in several operands has one name; "1" is
              a dim that is broadcast, "(b s)" a dim in which two are merged. Or a function of the graph's node that
              returns such a text, where it depends on shapes or other arguments.
    summed:   names of dims that are summed away: on split ones each rank has its own term of the sum.
    whole:    names of dims of which the operator needs all positions (a scan, a convolution, a maximum): never split.
    linear:   sets of operand numbers in which the operator is jointly linear while the others are constant; sums that
              are pending in one such set stay pending.

    A dim that is neither summed nor whole promises: the operator on some positions of it gives those positions of the
    result, whatever else there is. The operator must take no sizes and no positions as arguments.

    Raises ShardingError for a text that cannot be read, and for operators that have a rule already.
    """
    _check_operator(operator)
    keywords = {"summed": _names(summed), "whole": _names(whole)}
    sets = tuple(frozenset(numbers) for numbers in linear)
    if isinstance(rule, str):
        _check_names(operator, _parse(operator, rule), **keywords)

    def dims(node: fx.Node) -> Dims:
        text = rule if isinstance(rule, str) else rule(node)
        parsed = _parse(operator, text)
        _check_names(operator, parsed, **keywords)
        made = replace(parsed, **keywords, linear=sets)
        _check_shapes(node, text, made)
        return made

    CUSTOM[operator] = dims


def _check_operator(operator: object) -> None:
    if not isinstance(operator, OpOverload):
        raise ShardingError(
            f"{operator!r} is no operator overload. Register the rule for one, such as torch.ops.my.scale.default"
        )
    if operator.namespace in _BUILT_IN or torch.Tag.pointwise in operator.tags:
        raise ShardingError(
            f"{operator} has a rule of its own, which cannot be replaced; rules are for custom operators"
        )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.replace(",", " ").split())


_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z_]\w*)|(1)")


def _parse(operator: object, text: str) -> Dims:
    """The labels that a notation gives to operands and results."""
    sides = text.split("->")
    if len(sides) != 2:
        raise ShardingError(f"{operator}: {text!r} is no rule; write operands -> results, as in 'b s d, d -> b s d'")
    operands, results = (tuple(_tensor(operator, text, each) for each in side.split(",")) for side in sides)
    return Dims(operands, results)


def _tensor(operator: object, text: str, dims: str) -> TensorLabels:
    if _TOKEN.sub("", dims).strip():
        raise ShardingError(
            f"{operator}: {dims.strip()!r} in the rule {text!r} names no dims; write names between spaces, '1' for a "
            "dim that is broadcast, '(b s)' for two merged"
        )
    found: list[Labels] = []
    for merged, name, _ in _TOKEN.findall(dims):
        found.append(tuple(merged.split()) if merged else (name,) if name else ())
    flat = [label for labels in found for label in labels]
    if len(flat) != len(set(flat)):
        raise ShardingError(f"{operator}: a name occurs twice in {dims.strip()!r} of the rule {text!r}")
    return tuple(found)


def _check_names(operator: object, dims: Dims, summed: frozenset[str], whole: frozenset[str]) -> None:
    """Every dim that a result does not have must be accounted for."""
    read = {label for tensor in dims.operands for labels in tensor for label in labels}
    made = [{label for labels in tensor for label in labels} for tensor in dims.results]
    every = read.union(*made)
    if unknown := (summed | whole) - every:
        raise ShardingError(f"{operator}: {_listed(unknown)} is named as summed or whole, but is no dim of the rule")
    if both := summed & whole:
        raise ShardingError(f"{operator}: {_listed(both)} cannot be both summed and whole")
    if invented := every - read - whole:
        raise ShardingError(f"{operator}: {_listed(invented)} is in a result but in no operand; name it in whole=")
    if lost := {label for result in made for label in read - result} - summed - whole:
        raise ShardingError(f"{operator}: {_listed(lost)} is not in every result; name it in summed= or in whole=")


def _check_shapes(node: fx.Node, text: str, dims: Dims) -> None:
    """The rule must fit the node: as many tensors, as many dims, one size for each name."""
    shapes = [shape_of(operand) for operand in operands_of(node)]
    results = result_shapes(node)
    if len(shapes) != len(dims.operands) or len(results) != len(dims.results):
        raise _unfit(
            node,
            text,
            f"it is about {len(dims.operands)} operands and {len(dims.results)} results, but the call has "
            f"{len(shapes)} and {len(results)}",
        )
    for tensor, shape in zip((*dims.operands, *dims.results), (*shapes, *results), strict=True):
        if shape is None or len(tensor) != len(shape):
            raise _unfit(node, text, f"{len(tensor)} dims are named for a tensor of shape {shape}")
    sizes = label_sizes(dims, node)
    for tensor, shape in zip((*dims.operands, *dims.results), (*shapes, *results), strict=True):
        assert shape is not None
        for labels, size in zip(tensor, shape, strict=True):
            if unknown := [label for label in labels if label not in sizes]:
                raise _unfit(node, text, f"the size of {_listed(unknown)} is seen nowhere: it is always merged")
            if math.prod(sizes[label] for label in labels) != size:
                named = " ".join(f"{label}={sizes[label]}" for label in labels) or "1"
                raise _unfit(node, text, f"{named} is named for a dim of size {size}")


def _unfit(node: fx.Node, text: str, reason: str) -> ShardingError:
    return ShardingError(f"{source_line(node)}\n  the sharding rule {text!r} of {node.target} does not fit: {reason}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
