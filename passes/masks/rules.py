"""What one element of an operator's result is, in terms of elements of its operands: the rules of mask recovery.

`MOVES` are operators that only move elements: a rule says at which coordinates of its first operand an element of
the result is found. `VALUES` compute: a rule gives the value. Coordinates are integer sympy expressions, one for each
dimension. `Reader` is what a rule may ask: the value of another node at other coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import fx

from evocompile.program import val

from .values import (
    Domain,
    Unproven,
    Value,
    cases_of,
    choose,
    combine,
    compare,
    constant,
    extreme,
    fitted,
    only_number,
    single,
    truth,
)

Coordinates = tuple[sympy.Expr, ...]
aten = torch.ops.aten
prims = torch.ops.prims


class Reader(Protocol):
    domain: Domain

    def value(self, node: fx.Node, coordinates: Coordinates) -> Value: ...


# ---- operators that move elements


def _args(node: fx.Node, *defaults: Any) -> tuple[Any, ...]:
    """The arguments, with defaults for those left out; `...` stands for one that is never left out."""
    return (*node.args, *defaults[len(node.args) :])


def _source_shape(node: fx.Node) -> torch.Size:
    return val(_args(node)[0]).shape


def _reshaped(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    """view, squeeze, unsqueeze: dimensions are matched in groups of equal size; within a group, by flat index."""
    source, result = _source_shape(node), val(node).shape
    inner = [dim for dim, size in enumerate(source) if size > 1]
    outer = [dim for dim, size in enumerate(result) if size > 1]
    found = [sympy.S.Zero] * len(source)
    while inner:
        group, merged = [inner.pop()], [outer.pop()]
        while (left := _size(source, group)) != (right := _size(result, merged)):
            if left < right:
                group.append(inner.pop())
            else:
                merged.append(outer.pop())
        flat, stride = sympy.S.Zero, 1
        for dim in merged:
            flat, stride = flat + coordinates[dim] * stride, stride * result[dim]
        for dim in group[:-1]:
            found[dim], flat = domain.remainder(flat, source[dim]), domain.quotient(flat, source[dim])
        found[group[-1]] = flat
    return tuple(found)


def _size(shape: torch.Size, dims: list[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def broadcast(shape: Sequence[int], coordinates: Coordinates) -> Coordinates:
    """Coordinates in an operand of this shape, aligned to the right, 0 along dimensions of size 1."""
    aligned = coordinates[len(coordinates) - len(shape) :]
    return tuple(sympy.S.Zero if size == 1 else each for size, each in zip(shape, aligned, strict=True))


def _expanded(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    return broadcast(_source_shape(node), coordinates)


def _same(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    return coordinates


def _permuted(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    found = list(coordinates)
    for position, dim in enumerate(_args(node)[1]):
        found[dim] = coordinates[position]
    return tuple(found)


def _transposed(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    _, first, second = _args(node)
    found = list(coordinates)
    found[first], found[second] = found[second], found[first]
    return tuple(found)


def _sliced(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    _, dim, start, end, step = _args(node, ..., 0, None, None, 1)
    first, _, _ = slice(start, end).indices(_source_shape(node)[dim])
    found = list(coordinates)
    found[dim] = first + step * found[dim]
    return tuple(found)


def _selected(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    shape = _source_shape(node)
    _, dim, index = _args(node)
    dim = dim % len(shape)
    return (*coordinates[:dim], sympy.Integer(index % shape[dim]), *coordinates[dim:])


def _flipped(domain: Domain, node: fx.Node, coordinates: Coordinates) -> Coordinates:
    found = list(coordinates)
    for dim in _args(node)[1]:
        found[dim] = _source_shape(node)[dim] - 1 - found[dim]
    return tuple(found)


Move = Callable[[Domain, fx.Node, Coordinates], Coordinates]

MOVES: dict[Any, Move] = {
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.squeeze, aten.unsqueeze), _reshaped),
    **dict.fromkeys((aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy), _same),
    aten.expand: _expanded,
    aten.permute: _permuted,
    aten.transpose: _transposed,
    aten.slice: _sliced,
    aten.select: _selected,
    **dict.fromkeys((aten.flip, prims.rev), _flipped),
}


# ---- operators that compute


def _operand(reader: Reader, operand: Any, coordinates: Coordinates) -> Value:
    """A tensor operand at the broadcast coordinates, or a Python number."""
    if isinstance(operand, fx.Node):
        return reader.value(operand, broadcast(val(operand).shape, coordinates))
    return constant(operand, torch.bool if isinstance(operand, bool) else torch.float64)


def _operands(reader: Reader, node: fx.Node, coordinates: Coordinates) -> list[Value]:
    return [_operand(reader, operand, coordinates) for operand in node.args]


Rule = Callable[[Reader, fx.Node, Coordinates], Value]


def _comparison(relation: type[Any]) -> Rule:
    return lambda reader, node, coordinates: compare(reader.domain, relation, *_operands(reader, node, coordinates))


def _arithmetic(function: Callable[..., Any]) -> Rule:
    def rule(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
        if node.kwargs.get("alpha", 1) != 1:
            raise Unproven("it scales an operand (alpha)")
        return combine(reader.domain, function, *_operands(reader, node, coordinates))

    return rule


def _logical(function: Callable[..., Boolean]) -> Rule:
    def rule(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
        bitwise = str(node.target).startswith("aten.bitwise")
        if bitwise and val(node).dtype != torch.bool:
            raise Unproven("it computes on the bits of integers")
        conditions = [truth(reader.domain, value) for value in _operands(reader, node, coordinates)]
        return reader.domain.settle(function(*conditions))

    return rule


def _where(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    condition, held, otherwise = _operands(reader, node, coordinates)
    return choose(reader.domain, truth(reader.domain, condition), held, otherwise)


def _convert(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    value = reader.value(_args(node)[0], coordinates)
    to_integer = not val(node).dtype.is_floating_point and val(node).dtype != torch.bool
    if to_integer and any(number.is_integer is False for _, number in cases_of(value)):
        raise Unproven("it cuts off fractions")
    return value


def _fill(position: int) -> Rule:
    """A factory whose argument at `position` is the number that it is filled with."""

    def rule(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
        number = node.args[position]
        if not isinstance(number, bool | int | float):
            raise Unproven("it is filled with a computed number")
        return constant(number, val(node).dtype)

    return rule


def _iota(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    given: dict[str, Any] = node.kwargs
    return single(given["start"] + given["step"] * coordinates[0])


def _divide(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    """Integer division, rounded down, or towards 0 where that is the same."""
    value, divisor = _divided_by(reader, node, coordinates)
    mode = node.kwargs.get("rounding_mode", "floor" if node.target == aten.floor_divide.default else None)
    if mode is None:
        raise Unproven("its result is a fraction")
    if mode == "trunc" and any(reader.domain.bounds(number)[0] < 0 for _, number in cases_of(value)):
        raise Unproven("it rounds a number towards 0 that may be negative")
    return combine(reader.domain, lambda number: reader.domain.quotient(number, divisor), value)


def _remainder(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    value, divisor = _divided_by(reader, node, coordinates)
    return combine(reader.domain, lambda number: reader.domain.remainder(number, divisor), value)


def _divided_by(reader: Reader, node: fx.Node, coordinates: Coordinates) -> tuple[Value, int]:
    value, divisor = _operands(reader, node, coordinates)
    number = only_number(divisor)
    if not (number.is_Integer and number > 0) or any(each.is_integer is False for _, each in cases_of(value)):
        raise Unproven("it divides by something that is not a positive whole constant, or divides fractions")
    return value, int(number)


def _extreme(relation: type[Any]) -> Rule:
    return lambda reader, node, coordinates: extreme(reader.domain, relation, *_operands(reader, node, coordinates))


def _clamp(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    value, low, high = _args(node, ..., None, None)
    result = _operand(reader, value, coordinates)
    if low is not None:
        result = extreme(reader.domain, sympy.Ge, result, _operand(reader, low, coordinates))
    if high is not None:
        result = extreme(reader.domain, sympy.Le, result, _operand(reader, high, coordinates))
    return result


def _absolute(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    (value,) = _operands(reader, node, coordinates)
    return extreme(reader.domain, sympy.Ge, value, combine(reader.domain, lambda number: -number, value))


def _triangle(relation: type[Any]) -> Rule:
    """tril keeps column - row <= diagonal, triu column - row >= diagonal; 0 elsewhere."""

    def rule(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
        source, diagonal = _args(node, ..., 0)
        kept = reader.domain.settle(relation(coordinates[-1] - coordinates[-2], diagonal))
        zero = constant(0, val(node).dtype)
        return choose(reader.domain, kept, reader.value(source, coordinates), zero)

    return rule


def _cat(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    tensors, dim = _args(node, ..., 0)
    along = coordinates[dim]
    start = 0
    result: Value | None = None
    for tensor in tensors:
        size = val(tensor).shape[dim]
        inside = reader.domain.settle(sympy.And(along >= start, along < start + size))
        if inside != sympy.false:
            moved = list(coordinates)
            moved[dim] = along - start
            value = reader.value(tensor, tuple(moved))
            result = value if result is None else choose(reader.domain, inside, value, result)
        start += size
    assert result is not None
    return result


def _pad(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    source, pads, number = _args(node, ..., ..., 0)
    shape = _source_shape(node)
    moved, inside = list(coordinates), sympy.true
    for index, before in enumerate(pads[::2]):
        dim = len(shape) - 1 - index
        moved[dim] = moved[dim] - before
        inside = sympy.And(inside, moved[dim] >= 0, moved[dim] < shape[dim])
    inside = reader.domain.settle(inside)
    filler = constant(number, val(node).dtype)
    if inside == sympy.false:
        return filler
    return choose(reader.domain, inside, reader.value(source, tuple(moved)), filler)


def _index(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    """source[i, None, j, …] with index tensors: transformers reads a padding mask as mask[batch_idx, kv_idx]."""
    source, indices = _args(node)
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    rank = max(val(indices[dim]).dim() for dim in indexed)
    adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
    first = indexed[0] if adjacent else 0
    selecting = coordinates[first : first + rank]
    kept = iter(coordinates[:first] + coordinates[first + rank :])
    found = []
    for dim, size in enumerate(val(source).shape):
        if dim not in indexed:
            found.append(next(kept))
            continue
        index = indices[dim]
        if val(index).dtype == torch.bool:
            raise Unproven("it selects by a bool tensor")
        number = only_number(reader.value(index, broadcast(val(index).shape, selecting)))
        found.append(_from_start(reader.domain, number, size))
    return reader.value(source, tuple(found))


def _gather(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    source, dim, index = _args(node)
    found = list(coordinates)
    found[dim] = _from_start(reader.domain, only_number(reader.value(index, coordinates)), _source_shape(node)[dim])
    return reader.value(source, tuple(found))


def _from_start(domain: Domain, index: sympy.Expr, size: int) -> sympy.Expr:
    """An index counted from the start."""
    low, high = domain.bounds(index)
    if low >= 0:
        return index
    if high < 0:
        return index + size
    raise Unproven("it reads at positions that come from input data or may be negative")


VALUES: dict[Any, Rule] = {
    aten.le: _comparison(sympy.Le),
    aten.lt: _comparison(sympy.Lt),
    aten.ge: _comparison(sympy.Ge),
    aten.gt: _comparison(sympy.Gt),
    aten.eq: _comparison(sympy.Eq),
    aten.ne: _comparison(sympy.Ne),
    aten.add: _arithmetic(lambda left, right: left + right),
    aten.sub: _arithmetic(lambda left, right: left - right),
    aten.mul: _arithmetic(lambda left, right: left * right),
    aten.neg: _arithmetic(lambda number: -number),
    aten.abs: _absolute,
    aten.minimum: _extreme(sympy.Le),
    aten.maximum: _extreme(sympy.Ge),
    aten.clamp: _clamp,
    aten.div: _divide,
    aten.floor_divide: _divide,
    aten.remainder: _remainder,
    **dict.fromkeys((aten.bitwise_and, aten.logical_and), _logical(sympy.And)),
    **dict.fromkeys((aten.bitwise_or, aten.logical_or), _logical(sympy.Or)),
    **dict.fromkeys((aten.bitwise_xor, aten.logical_xor), _logical(lambda a, b: (a & ~b) | (~a & b))),
    **dict.fromkeys((aten.bitwise_not, aten.logical_not), _logical(sympy.Not)),
    aten.where: _where,
    **dict.fromkeys((prims.convert_element_type, aten._to_copy), _convert),
    **dict.fromkeys((aten.full, aten.full_like), _fill(1)),
    aten.scalar_tensor: _fill(0),
    prims.iota: _iota,
    aten.tril: _triangle(sympy.Le),
    aten.triu: _triangle(sympy.Ge),
    aten.cat: _cat,
    aten.constant_pad_nd: _pad,
    aten.index: _index,
    aten.gather: _gather,
}


def passes_on(node: fx.Node) -> bool:
    """Whether a result's elements are elements of an operand, moved or shifted by a constant."""
    packet = getattr(node.target, "overloadpacket", None)
    shifted = packet in (aten.add, aten.sub) and len(node.all_input_nodes) == 1
    return shifted or packet in MOVES or packet in (aten.index, aten.gather)


def element(reader: Reader, node: fx.Node, coordinates: Coordinates) -> Value:
    """The value of an operator's result at these coordinates. Raises `Unproven` where there is no rule."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in MOVES:
        moved = MOVES[packet](reader.domain, node, coordinates)
        return reader.value(_args(node)[0], moved)
    if packet not in VALUES:
        raise Unproven("it has no rule")
    return fitted(reader.domain, VALUES[packet](reader, node, coordinates), val(node).dtype)
