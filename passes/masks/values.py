"""Values of a mask's subgraph at symbolic coordinates, and the arithmetic on them.

A value is a sympy condition (bool tensors), or *cases* (every other dtype): pairs of a condition and a number, of
which exactly one condition holds. Floats occur only as constants: `where(condition, 0, -inf)` is two cases.
All conditions are kept simple with what is known of the coordinates: 0 <= q < S and 0 <= k < T.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean

from evocompile.kernels.mask import B, Bounds, H, Region, bounds_of, normalize, truth_of

Cases: TypeAlias = tuple[tuple[Boolean, sympy.Expr], ...]
Value: TypeAlias = Boolean | Cases

_MOST_CASES = 32


class Unproven(Exception):
    """What stopped the proof, as a sentence without a subject's source line."""


@dataclass(frozen=True)
class Domain:
    """The shape (batch, heads, queries, keys) over which the mask is asked for."""

    batch: int
    heads: int
    queries: int
    keys: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.queries, self.keys)

    @property
    def region(self) -> Region:
        return tuple(itertools.product({0, self.queries - 1}, {0, self.keys - 1}))

    def bounds(self, number: sympy.Expr) -> Bounds:
        """Inclusive bounds of an integer over the domain."""
        least = most = 0
        for symbol, size in ((B, self.batch), (H, self.heads)):
            factor = number.coeff(symbol)
            rest = sympy.expand(number - factor * symbol)
            if factor.is_Integer and symbol not in rest.free_symbols:
                reached = int(factor) * (size - 1)
                number, least, most = rest, least + min(reached, 0), most + max(reached, 0)
        low, high = bounds_of(number)(self.region)
        return low + least, high + most

    def settle(self, condition: Boolean) -> Boolean:
        """The condition in normal form, without relations that hold everywhere or nowhere in the domain."""
        condition = normalize(condition)
        known = {}
        for relation in condition.atoms(Relational):
            truth = truth_of(relation)(self.region)
            if truth:
                known[relation] = sympy.sympify(truth > 0)
        return normalize(condition.xreplace(known)) if known else condition

    def quotient(self, number: sympy.Expr, divisor: int) -> sympy.Expr:
        """number // divisor, with the division carried out where the bounds allow."""
        whole, rest = self._split(number, divisor)
        low, high = self.bounds(rest)
        if math.isfinite(low) and math.isfinite(high) and low // divisor == high // divisor:
            return whole + int(low // divisor)
        return whole + sympy.floor(rest / divisor)

    def remainder(self, number: sympy.Expr, divisor: int) -> sympy.Expr:
        """number % divisor, with the sign of the divisor, as Python has it."""
        _, rest = self._split(number, divisor)
        low, high = self.bounds(rest)
        return rest if low >= 0 and high < divisor else sympy.Mod(rest, divisor)

    def _split(self, number: sympy.Expr, divisor: int) -> tuple[sympy.Expr, sympy.Expr]:
        """(w, r) with number = divisor * w + r, w an integer."""
        terms = sympy.expand(number).as_coefficients_dict()
        whole = sum((term * (factor // divisor) for term, factor in terms.items()), sympy.S.Zero)
        return whole, sympy.expand(number - divisor * whole)


def constant(number: bool | int | float, dtype: torch.dtype) -> Value:
    """A Python number as a value of a tensor of this dtype."""
    if dtype == torch.bool:
        return sympy.sympify(bool(number))
    if isinstance(number, float) and math.isinf(number):
        return ((sympy.true, sympy.oo if number > 0 else -sympy.oo),)
    if isinstance(number, float) and math.isnan(number):
        raise Unproven("NaN reaches the mask")
    exact = sympy.Rational(*number.as_integer_ratio())
    return ((sympy.true, exact),)


def single(number: sympy.Expr) -> Cases:
    return ((sympy.true, number),)


def cases_of(value: Value) -> Cases:
    """A condition as the number 0 or 1; cases as they are."""
    if isinstance(value, tuple):
        return value
    pairs = ((value, sympy.S.One), (sympy.Not(value), sympy.S.Zero))
    return tuple((condition, number) for condition, number in pairs if condition != sympy.false)


def only_number(value: Value) -> sympy.Expr:
    """The number of a value that has one case."""
    cases = cases_of(value)
    if len(cases) != 1:
        raise Unproven("a position is computed by cases")
    return cases[0][1]


def truth(domain: Domain, value: Value) -> Boolean:
    """value != 0"""
    return compare(domain, sympy.Ne, value, single(sympy.S.Zero)) if isinstance(value, tuple) else value


def compare(domain: Domain, relation: type[Relational], left: Value, right: Value) -> Boolean:
    """The condition under which two values are related."""
    pairs = [
        (domain.settle(sympy.And(left_condition, right_condition)), _related(relation, left_number, right_number))
        for left_condition, left_number in cases_of(left)
        for right_condition, right_number in cases_of(right)
    ]
    if len(pairs) == 2:  # the two conditions are each other's negation
        return _either(domain, pairs[0][0], pairs[0][1], pairs[1][1])
    return domain.settle(sympy.Or(*(sympy.And(*pair) for pair in pairs)))


def _either(domain: Domain, condition: Boolean, held: Boolean, otherwise: Boolean) -> Boolean:
    """`held` where the condition is true, else `otherwise`; as a conjunction where that is the same."""
    implied = domain.settle(sympy.And(condition, sympy.Not(otherwise))) == sympy.false
    if implied and domain.settle(sympy.And(sympy.Not(condition), sympy.Not(held))) == sympy.false:
        return domain.settle(sympy.And(held, otherwise))
    return domain.settle(sympy.Or(sympy.And(condition, held), sympy.And(sympy.Not(condition), otherwise)))


def _related(relation: type[Relational], left: sympy.Expr, right: sympy.Expr) -> Boolean:
    if left.is_number and right.is_number:
        return sympy.sympify(bool(relation(left, right)))
    for number in (left, right):
        if number.is_number and not number.is_integer:
            raise Unproven(f"an integer is compared with {sympy.N(number, 6)}")
    return relation(left, right)


def combine(domain: Domain, function: Callable[..., Any], *values: Value) -> Cases:
    """The function of numbers, case by case."""
    merged: dict[sympy.Expr, Boolean] = {}
    for choice in itertools.product(*(cases_of(value) for value in values)):
        condition = domain.settle(sympy.And(*(condition for condition, _ in choice)))
        if condition == sympy.false:
            continue
        number = function(*(number for _, number in choice))
        if number is sympy.nan:
            raise Unproven("NaN reaches the mask")
        merged[number] = sympy.Or(merged.get(number, sympy.false), condition)
    if len(merged) > _MOST_CASES:
        raise Unproven(f"more than {_MOST_CASES} cases")
    return tuple((domain.settle(condition), number) for number, condition in merged.items())


def choose(domain: Domain, condition: Boolean, held: Value, otherwise: Value) -> Value:
    """`held` where the condition is true, else `otherwise`."""
    if not isinstance(held, tuple) and not isinstance(otherwise, tuple):
        return _either(domain, condition, held, otherwise)
    branches = [(condition, cases_of(held)), (sympy.Not(condition), cases_of(otherwise))]
    merged: dict[sympy.Expr, Boolean] = {}
    for branch, cases in branches:
        for each, number in cases:
            merged[number] = sympy.Or(merged.get(number, sympy.false), sympy.And(branch, each))
    settled = ((domain.settle(each), number) for number, each in merged.items())
    return tuple((each, number) for each, number in settled if each != sympy.false)


def extreme(domain: Domain, relation: type[Relational], left: Value, right: Value) -> Value:
    """The smaller (`sympy.Le`) or the larger (`sympy.Ge`) of two numbers."""
    return choose(domain, compare(domain, relation, left, right), cases_of(left), cases_of(right))


def fitted(domain: Domain, value: Value, dtype: torch.dtype) -> Value:
    """The value as a tensor of this dtype holds it: floats rounded, integers proven not to wrap around."""
    if dtype == torch.bool:
        return truth(domain, value)
    cases = cases_of(value)
    if dtype.is_floating_point:
        return tuple((condition, _rounded(number, dtype)) for condition, number in cases)
    limits = torch.iinfo(dtype)
    for _, number in cases:
        low, high = (number, number) if number.is_number else domain.bounds(number)
        known = math.isfinite(low) and math.isfinite(high)
        if (known or limits.bits < 32) and not (limits.min <= low and high <= limits.max):
            raise Unproven(f"an integer may not fit into {dtype}")
    return cases


def _rounded(number: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
    if not number.is_number:
        raise Unproven(f"positions or input data are computed with in {dtype}")
    ((_, rounded),) = constant(torch.tensor(float(number), dtype=dtype).item(), dtype)
    return rounded
