"""Attention masks as predicates: text, tile classification by interval arithmetic, evaluation on positions.

A mask is a Boolean expression that says whether query position q attends to key position k:

    q, k      integers: global query and key positions        b, h    integers: batch row and query head
    t0(b, q)  integer table 0 at [b, q]; bool tables read 0/1  t1(b, k) table 1 at [b, k], …
    + - *     and // and % by a positive integer constant      <= < > >= == !=    & | ~ (also And, Or, Not)

`Mask` keeps one normal form, so that equal texts mean equal masks in the common cases: upper bounds read `k <= …`,
lower bounds `k > …`, negations are pushed into the relations. Its text is what the attention operators carry. Score
functions (`kernels.score`) share the grammar; before `canonicalize` they read i0, i1, …: integers over (b, h, q, k).

Classification is three-valued interval arithmetic over convex regions of the (q, k) plane whose vertices are
integer points, so a linear expression's bounds are exact; tables are unknown.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue

from evocompile.errors import MaskError

Q, K, B, H = sympy.symbols("q k b h", integer=True, nonnegative=True)
SYMBOLS = {str(symbol): symbol for symbol in (Q, K, B, H)}

Region = tuple[tuple[int, int], ...]  # vertices (q, k) of a convex region
Bounds = tuple[float, float]  # inclusive; ints, or infinities where unknown


class Tile(Enum):
    """What a mask does on one rectangle of query × key positions."""

    EMPTY = "nothing attends"
    FULL = "everything attends"
    CAUSAL = "exactly k <= q attends"
    MASKED = "depends on the position or on data"


@dataclass(frozen=True)
class Mask:
    """An attention mask. Build it with `Mask.of`, `Mask.full`, `Mask.causal` or `parse_mask`."""

    text: str

    @staticmethod
    def of(expression: Boolean) -> Mask:
        """The mask of a sympy expression over `Q`, `K`, `B`, `H` and `table` leaves."""
        return Mask(text_of(normalize(expression)))

    @staticmethod
    def full() -> Mask:
        return Mask("True")

    @staticmethod
    def causal() -> Mask:
        """k <= q: top-left aligned."""
        return Mask("k <= q")

    def __str__(self) -> str:
        return self.text

    @cached_property
    def expression(self) -> Boolean:
        return _parse(self.text)

    @property
    def table_count(self) -> int:
        """How many tables `evaluate` needs: one more than the largest index."""
        return max((table_index(leaf) + 1 for leaf in self.expression.atoms(AppliedUndef)), default=0)

    def classify(self, q_lo: int, q_hi: int, k_lo: int, k_hi: int) -> Tile:
        """The kind of the tile q_lo <= q < q_hi, k_lo <= k < k_hi. `MASKED` when unsure or data-dependent."""
        if q_lo >= q_hi or k_lo >= k_hi:
            return Tile.EMPTY
        lower, upper = _halves(q_lo, q_hi - 1, k_lo, k_hi - 1)
        below = self._truth(lower) if lower else None
        above = self._truth(upper) if upper else None
        known = {below, above} - {None}
        if known == {_ALWAYS}:
            return Tile.FULL
        if known == {_NEVER}:
            return Tile.EMPTY
        return Tile.CAUSAL if (below, above) == (_ALWAYS, _NEVER) else Tile.MASKED

    def evaluate(
        self,
        q_positions: torch.Tensor,
        k_positions: torch.Tensor,
        tables: Sequence[torch.Tensor],
        batch: int,
        heads: int,
        device: torch.device | str,
        row: int = 0,
        head: int = 0,
    ) -> torch.Tensor:
        """The mask at the given global positions, a 4-D bool tensor broadcastable to (batch, heads, sq, sk).

        q_positions (sq,), k_positions (sk,): integers. tables: `tables[i]` is an integer or bool tensor
        (batch or 1, N), indexed by position. row, head: what b and h are at the first
        row and head; tables begin with that row. `True` attends.
        """
        environment = positions_environment(q_positions, k_positions, batch, heads, device, row, head)
        value = evaluate(self.expression, environment, [table.to(device) for table in tables])
        if isinstance(value, bool):
            return torch.full((1, 1, 1, 1), value, device=device)
        return value

    @cached_property
    def _truth(self) -> Callable[[Region], int]:
        return truth_of(self.expression)


@lru_cache(maxsize=4096)
def parse_mask(text: str) -> Mask:
    """The mask of a text, in normal form.

    Raises MaskError for anything but the grammar of this module.
    """
    return Mask.of(_parse(text))


def table(index: int, position: sympy.Expr) -> sympy.Expr:
    """The leaf `tables[index][b, position]`, with an integer expression of `Q` and `K` as position."""
    return sympy.Function(f"t{index}", integer=True)(B, position)


def table_index(leaf: AppliedUndef) -> int:
    return int(leaf.func.__name__[1:])


# ---- normal form


def normalize(expression: Boolean) -> Boolean:
    """Relations in one form, negations pushed inward, redundant bounds and repeated conditions removed."""
    if isinstance(expression, Relational):
        return _relation(expression)
    if isinstance(expression, sympy.Not):
        inner: Any = expression.args[0]
        if isinstance(inner, Relational):
            return _relation(inner.negated)
        dual: Any = sympy.Or if isinstance(inner, sympy.And) else sympy.And
        return normalize(dual(*(sympy.Not(each) for each in inner.args)))
    if isinstance(expression, sympy.And | sympy.Or):
        return _junction(type(expression), [normalize(each) for each in expression.args])
    assert isinstance(expression, BooleanTrue | BooleanFalse), expression
    return expression


def _relation(relation: Relational) -> Boolean:
    """`sum <= 0`, `sum == 0` or `sum != 0` over the integers, rewritten with one symbol alone on the left."""
    difference = relation.lhs - relation.rhs
    if isinstance(relation, sympy.Ge | sympy.Gt):
        difference = -difference
    if isinstance(relation, sympy.Lt | sympy.Gt):
        difference += 1
    terms = dict(sympy.expand(difference).as_coefficients_dict())
    constant = terms.pop(sympy.S.One, sympy.S.Zero)
    equality = isinstance(relation, sympy.Eq | sympy.Ne)
    if not terms:
        held = constant == 0 if equality else constant <= 0
        return sympy.sympify(bool(held) != isinstance(relation, sympy.Ne))
    assert all(factor.is_integer for factor in (*terms.values(), constant)), relation
    divisor = sympy.Integer(math.gcd(*(int(coefficient) for coefficient in terms.values())))
    if equality and constant % divisor:
        return sympy.sympify(isinstance(relation, sympy.Ne))
    bound = sympy.floor(-constant / divisor)  # sum of the terms <= bound
    terms = {term: coefficient / divisor for term, coefficient in terms.items()}
    lead = min(terms, key=lambda term: (abs(terms[term]) != 1, term != K, term != Q, text_of(term)))
    sign = sympy.sign(terms[lead])
    left = sympy.Add(*(term * each for term, each in terms.items())) * sign
    moved = left - lead if abs(terms[lead]) == 1 else sympy.S.Zero
    left, right = left - moved, sign * bound - moved
    if equality:
        return type(relation)(left, right)
    return sympy.Le(left, right) if sign > 0 else sympy.Gt(left, right - 1)


def _junction(kind: Any, arguments: list[Boolean]) -> Boolean:
    """And/Or of normal arguments: what one argument settles is dropped from the others, tightest bounds kept."""
    neutral = sympy.sympify(kind is sympy.And)
    flat = [each for argument in arguments for each in (argument.args if isinstance(argument, kind) else [argument])]
    settled: dict[Boolean, Boolean] = {}
    for each in flat:
        if isinstance(each, Relational):
            settled |= {each: neutral, each.negated: sympy.Not(neutral)}
    others = [each.xreplace(settled) for each in flat if not isinstance(each, Relational)]
    relations = _tightest(kind, [each for each in flat if isinstance(each, Relational)])
    if relations is None:
        return sympy.Not(neutral)
    result = kind(*relations, *others)
    return result if set(result.args) <= set(arguments) else normalize(result)


def _tightest(kind: Any, relations: list[Relational]) -> list[Relational] | None:
    """Of bounds on one line of positions, only those that count; `None` where two of them settle the whole."""
    conjunction = kind is sympy.And
    kept: dict[Any, Relational] = {}
    for each in relations:
        key = (type(each), _line(each)) if isinstance(each, sympy.Le | sympy.Gt) else each
        held = kept.setdefault(key, each)
        if (_constant(each) < _constant(held)) == (isinstance(each, sympy.Le) == conjunction):
            kept[key] = each
    for each in kept.values():
        lower = kept.get((sympy.Gt, _line(each))) if isinstance(each, sympy.Le) else None
        gap = _constant(each) - _constant(lower) if lower is not None else None  # how many integers lie between
        if gap is not None and (gap <= 0 if conjunction else gap >= 0):
            return None
    return list(kept.values())


def _constant(relation: Relational) -> sympy.Integer:
    return relation.rhs.as_coeff_Add()[0]


def _line(relation: Relational) -> tuple[sympy.Expr, sympy.Expr]:
    """What two bounds have in common that differ in their constants."""
    return relation.lhs, relation.rhs - _constant(relation)


# ---- text

_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_COMPARE = {
    ast.LtE: sympy.Le,
    ast.Lt: sympy.Lt,
    ast.GtE: sympy.Ge,
    ast.Gt: sympy.Gt,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}
_LOGIC = {"And": sympy.And, "Or": sympy.Or, "Not": sympy.Not}


def _parse(text: str) -> Boolean:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise MaskError(f"not a mask: {text!r}: {error.msg}") from error
    expression = read(tree, text)
    if not isinstance(expression, Boolean) or isinstance(expression, sympy.Symbol):
        raise MaskError(f"not a mask: {text!r} is a number, not a condition; compare it with something")
    return expression


def read(node: ast.AST, text: str) -> Any:
    """sympy expression of a syntax tree. Only the module's grammar; nothing is evaluated as Python."""
    match node:
        case ast.Constant(value=bool() | int() as value):
            return sympy.sympify(value)
        case ast.Name(id=name) if name in SYMBOLS:
            return SYMBOLS[name]
        case ast.Name(id=name) if name[0] == "i" and name[1:].isdecimal():
            return sympy.Symbol(name, integer=True)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return sympy.Not(read(operand, text))
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() as op, right=right):
            kind = sympy.And if isinstance(op, ast.BitAnd) else sympy.Or
            return kind(read(left, text), read(right, text))
        case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Mod() as op, right=ast.Constant(value=int(divisor))) if (
            divisor > 0
        ):
            number = _number(left, text)
            return sympy.floor(number / divisor) if isinstance(op, ast.FloorDiv) else sympy.Mod(number, divisor)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_number(left, text), _number(right, text))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_number(left, text), _number(right, text))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _LOGIC:
            return _LOGIC[name](*(read(each, text) for each in args))
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id="b"), position], keywords=[]) if (
            name[0] == "t" and name[1:].isdecimal()
        ):
            return table(int(name[1:]), _number(position, text))
    raise MaskError(f"not a mask: {text!r}: {ast.unparse(node)!r} is outside the grammar of evocompile.kernels.mask")


def _number(node: ast.AST, text: str) -> sympy.Expr:
    value = read(node, text)
    if isinstance(value, Boolean) and not isinstance(value, sympy.Symbol):
        raise MaskError(f"not a mask: {text!r}: {ast.unparse(node)!r} is a condition where a number is needed")
    return value


def text_of(expression: sympy.Basic, tight: bool = False) -> str:
    """Text of an expression in normal form; `tight` puts sums and relations in brackets."""
    match expression:
        case BooleanTrue() | BooleanFalse() | sympy.Integer() | sympy.Symbol():
            return str(expression)
        case AppliedUndef():
            return f"{expression.func.__name__}({', '.join(text_of(each) for each in expression.args)})"
        case sympy.And() | sympy.Or():
            sign = " & " if isinstance(expression, sympy.And) else " | "
            text = sign.join(sorted((text_of(each, tight=True) for each in expression.args), key=_reading_order))
        case Relational():
            text = f"{text_of(expression.lhs)} {expression.rel_op} {text_of(expression.rhs)}"
        case sympy.Add():
            text = _sum_text(expression)
        case sympy.Mul():
            return "*".join(text_of(each, tight=True) for each in expression.args)
        case sympy.Pow(args=(base, exponent)):
            return "*".join([text_of(base, tight=True)] * int(exponent))
        case sympy.floor(args=(ratio,)):
            numerator, divisor = sympy.together(ratio).as_numer_denom()
            return f"({text_of(numerator, tight=True)} // {divisor})"
        case sympy.Mod(args=(number, divisor)):
            return f"({text_of(number, tight=True)} % {divisor})"
        case _:
            raise AssertionError(f"not in the grammar of masks: {expression!r}")
    return f"({text})" if tight else text


def _reading_order(text: str) -> tuple[bool, str]:
    return ("t" in text, text)


def _sum_text(expression: sympy.Add) -> str:
    """Positive terms first, the constant last."""
    terms = expression.as_coefficients_dict().items()
    ordered = sorted(terms, key=lambda item: (item[0] == 1, bool(item[1] < 0), text_of(item[0])))
    text = ""
    for index, (term, coefficient) in enumerate(ordered):
        sign = "-" if coefficient < 0 else "+"
        text += f" {sign} " if index else "-" if sign == "-" else ""
        text += text_of(abs(coefficient) * term, tight=True)
    return text


# ---- classification

_ALWAYS, _UNSURE, _NEVER = 1, 0, -1


def _halves(q_lo: int, q_hi: int, k_lo: int, k_hi: int) -> tuple[Region, Region]:
    """Vertices of the parts k <= q and k > q of a box with inclusive bounds; () where a part is empty."""
    corners = [(q, k) for q in {q_lo, q_hi} for k in {k_lo, k_hi}]
    first, last = max(q_lo, k_lo), min(q_hi, k_hi)
    lower = [corner for corner in corners if corner[1] <= corner[0]]
    lower += [(first, first), (last, last)] if first <= last else []
    first, last = max(q_lo, k_lo - 1), min(q_hi, k_hi - 1)
    upper = [corner for corner in corners if corner[1] > corner[0]]
    upper += [(first, first + 1), (last, last + 1)] if first <= last else []
    return tuple(lower), tuple(upper)


def truth_of(expression: Boolean) -> Callable[[Region], int]:
    """The three-valued truth of a condition over a region, as a closure: fast enough to call for every tile."""
    if isinstance(expression, sympy.And | sympy.Or):
        parts = [truth_of(each) for each in expression.args]
        # And: the least of the parts' truths, Or: the greatest.
        choose: Callable[[Iterable[int]], int] = min if isinstance(expression, sympy.And) else max
        return lambda region: choose(part(region) for part in parts)
    if not isinstance(expression, Relational):
        truth = _ALWAYS if expression == sympy.true else _NEVER
        return lambda region: truth
    bounds = bounds_of(expression.lhs - expression.rhs)
    test = _TRUTH[expression.rel_op]
    return lambda region: test(*bounds(region))


def _below(low: float, high: float) -> int:
    return _ALWAYS if high <= 0 else _NEVER if low > 0 else _UNSURE


def _zero(low: float, high: float) -> int:
    return _ALWAYS if low == high == 0 else _NEVER if low > 0 or high < 0 else _UNSURE


_TRUTH: dict[str, Callable[[float, float], int]] = {
    "<=": _below,
    ">": lambda low, high: -_below(low, high),
    "==": _zero,
    "!=": lambda low, high: -_zero(low, high),
}


def bounds_of(number: sympy.Expr) -> Callable[[Region], Bounds]:
    """Inclusive bounds of a number over a region, as a closure. Exact for linear expressions of q and k."""
    terms = dict(sympy.expand(number).as_coefficients_dict())
    constant, of_q, of_k = (int(terms.pop(term, 0)) for term in (sympy.S.One, Q, K))
    others = [(int(coefficient), _atom_bounds(atom)) for atom, coefficient in terms.items()]

    def bounds(region: Region) -> Bounds:
        values = [constant + of_q * q + of_k * k for q, k in region]
        low: float = min(values)
        high: float = max(values)
        for coefficient, atom in others:
            ends = [coefficient * end for end in atom(region)]
            low, high = low + min(ends), high + max(ends)
        return low, high

    return bounds


def _atom_bounds(atom: sympy.Expr) -> Callable[[Region], Bounds]:
    match atom:
        case sympy.floor(args=(ratio,)):
            numerator, divisor = sympy.together(ratio).as_numer_denom()
            inner, step = bounds_of(numerator), int(divisor)
            return lambda region: _quotient(*inner(region), step)
        case sympy.Mod(args=(number, divisor)):
            inner, step = bounds_of(number), int(divisor)
            return lambda region: _modulo(*inner(region), step)
        case sympy.Symbol():
            return lambda region: (0, math.inf)  # b, h: not part of a tile
        case _:
            return lambda region: (-math.inf, math.inf)  # tables and products: unknown


def _quotient(low: float, high: float, step: int) -> Bounds:
    return low // step if math.isfinite(low) else low, high // step if math.isfinite(high) else high


def _modulo(low: float, high: float, step: int) -> Bounds:
    same_period = math.isfinite(low) and math.isfinite(high) and low // step == high // step
    return (low % step, high % step) if same_period else (0, step - 1)


# ---- evaluation

_TORCH: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


def positions_environment(
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    batch: int,
    heads: int,
    device: torch.device | str,
    row: int = 0,
    head: int = 0,
) -> dict[sympy.Symbol, torch.Tensor]:
    """The symbols as tensors that broadcast to (batch, heads, sq, sk); row, head: numbers of the first of them."""
    return {
        Q: q_positions.to(device, torch.int64).view(1, 1, -1, 1),
        K: k_positions.to(device, torch.int64).view(1, 1, 1, -1),
        B: torch.arange(row, row + batch, device=device).view(-1, 1, 1, 1),
        H: torch.arange(head, head + heads, device=device).view(1, -1, 1, 1),
    }


def evaluate(
    expression: sympy.Basic,
    environment: Mapping[sympy.Symbol, torch.Tensor],
    tables: Sequence[torch.Tensor],
    others: Callable[[sympy.Basic, Callable[[sympy.Basic], Any]], Any] | None = None,
) -> Any:
    """A 4-D tensor, or a Python number where nothing depends on positions.

    others(each, value): the value of what is not in the grammar of masks, with `value` for its arguments.
    """

    def value(each: sympy.Basic) -> Any:
        match each:
            case BooleanTrue() | BooleanFalse():
                return bool(each)
            case sympy.Integer():
                return int(each)
            case sympy.Symbol():
                return environment[each]
            case AppliedUndef(args=(_, position)) if each.func.__name__[0] in "tf":
                return _table_at(each, value(position), tables)
            case sympy.And() | sympy.Or():
                join = operator.and_ if isinstance(each, sympy.And) else operator.or_
                return _fold(join, each.args)
            case sympy.Not(args=(condition,)):
                held = value(condition)
                return not held if isinstance(held, bool) else ~held
            case Relational():
                return _TORCH[each.rel_op](value(each.lhs), value(each.rhs))
            case sympy.floor(args=(ratio,)):
                numerator, divisor = sympy.together(ratio).as_numer_denom()
                return value(numerator) // int(divisor)
            case sympy.Mod(args=(number, divisor)):
                return value(number) % int(divisor)
            case sympy.Add():
                return _fold(operator.add, each.args)
            case sympy.Mul():
                return _fold(operator.mul, each.args)
            case sympy.Pow(args=(base, exponent)) if exponent.is_Integer and exponent > 0:
                return value(base) ** int(exponent)
        assert others is not None, f"not in the grammar of masks: {each!r}"
        return others(each, value)

    def _fold(join: Callable[[Any, Any], Any], args: tuple[sympy.Basic, ...]) -> Any:
        result = value(args[0])
        for each in args[1:]:
            result = join(result, value(each))
        return result

    return value(expression)


def _table_at(leaf: AppliedUndef, position: Any, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """tables[index][b, position], broadcastable to (B, H, sq, sk). Tables of t leaves are read as integers."""
    rows = tables[table_index(leaf)]
    position = torch.as_tensor(position, device=rows.device)
    position = position if position.dim() == 4 else position.view(1, 1, 1, 1)
    if position.shape[0] > 1:
        found = rows.expand(position.shape[0], -1).gather(1, position.flatten(1)).view(position.shape)
    else:
        found = rows[:, position.flatten()].view(rows.shape[0], 1, *position.shape[2:])
    return found.long() if leaf.func.__name__[0] == "t" else found
