"""What becomes of attention scores before the softmax: text, evaluation on positions, derivatives.

A score function is an expression in the grammar of `kernels.mask` with these numbers besides:

    s                      the scaled score of a query and a key
    0.5, 1e-3              real constants; / divides
    p0(h), p0(h, i), p0(h, b, i)   params[0], float, at this head (and batch row) and the integer i
    f0(b, i)               tables[0] as a float tensor (B or 1, N); t0(b, i) as integers
    tanh exp log sqrt sin cos abs  functions of one number; min(x, y), max(x, y)
    where(c, x, y)         x where the condition c (of `kernels.mask`) holds, else y; only the chosen one counts
    frozen(x)              x, but its derivative is 0
    float16(x), bfloat16(x), float32(x)   x rounded to this dtype; the derivative is that of x

`Score.by_score` is the derivative with respect to s, `Score.by_param` those with respect to the entries of params.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import Tensor

from evocompile.errors import MaskError

from .mask import B, H, evaluate, normalize, positions_environment, read, table_index, text_of

S = sympy.Symbol("s", real=True)


class frozen(sympy.Function):
    """The identity, with derivative 0."""

    is_real = True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.S.Zero


class _Rounded(sympy.Function):
    is_real = True

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        return sympy.S.One


class float16(_Rounded):
    """Rounded to torch.float16."""


class bfloat16(_Rounded):
    """Rounded to torch.bfloat16."""


class float32(_Rounded):
    """Rounded to torch.float32."""


class where(sympy.Function):
    """args: a condition and two numbers. No rule of sympy's looks into it."""

    is_real = True
    nargs = (3,)

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        condition, held, otherwise = self.args
        by = (held.diff(symbol), otherwise.diff(symbol))
        return by[0] if by[0] == by[1] else where(condition, *by)


def _rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


FUNCTIONS: dict[str, Any] = {
    **{each: getattr(sympy, each) for each in ("tanh", "exp", "log", "sqrt", "sin", "cos")},
    **{each.__name__: each for each in (frozen, float16, bfloat16, float32)},
    "abs": sympy.Abs,
    "min": sympy.Min,
    "max": sympy.Max,
}
_TORCH: dict[Any, Any] = {
    **{getattr(sympy, each): getattr(torch, each) for each in ("tanh", "exp", "log", "sin", "cos")},
    sympy.Abs: torch.abs,
    sympy.sign: torch.sign,
    frozen: lambda x: x,
    **{each: _rounding(getattr(torch, each.__name__)) for each in _Rounded.__subclasses__()},
}


class ParamDerivative(NamedTuple):
    """d(score) / d(leaf) for one entry p_index(h, …) of params."""

    index: int
    leaf: AppliedUndef
    factor: sympy.Expr


class Positions(NamedTuple):
    """Where a block of scores (B, H, rows, columns) lies, and the data at hand."""

    rows: Tensor  # (rows,) global query positions
    columns: Tensor  # (columns,) global key positions
    tables: Sequence[Tensor]
    params: Sequence[Tensor]
    batch: int = 0  # global numbers of the first batch row and the first query head
    head: int = 0
    grids: Sequence[Tensor] = ()  # x0, i1, …, each broadcastable to the block; only before `canonicalize`


@dataclass(frozen=True)
class Score:
    """A score function. Build it with `Score.of` or `parse_score`."""

    text: str

    @staticmethod
    def of(expression: sympy.Expr) -> Score:
        return Score(_text(expression))

    def __str__(self) -> str:
        return self.text

    @cached_property
    def expression(self) -> sympy.Expr:
        return _parse(self.text)

    @cached_property
    def by_score(self) -> sympy.Expr:
        """The derivative with respect to s."""
        return sympy.diff(self.expression, S)

    @cached_property
    def by_param(self) -> tuple[ParamDerivative, ...]:
        """The derivatives with respect to the entries of params that the score reads."""
        leaves = sorted((leaf for leaf in self.expression.atoms(AppliedUndef) if is_param(leaf)), key=str)
        found = []
        for leaf in leaves:
            entry = sympy.Symbol("entry", real=True)
            factor = sympy.diff(self.expression.xreplace({leaf: entry}), entry).xreplace({entry: leaf})
            found.append(ParamDerivative(table_index(leaf), leaf, factor))
        return tuple(found)


def apply(expression: sympy.Expr, scores: Tensor, at: Positions) -> Tensor:
    """The expression on a block of scaled scores (B, H, rows, columns), broadcastable to it."""
    value = evaluate(expression, _environment(scores, at), at.tables, _numbers(scores.dtype, at))
    return value if isinstance(value, Tensor) else scores.new_full((1, 1, 1, 1), value)


def add_param_gradient(
    gradient: Tensor, derivative: ParamDerivative, d_scores: Tensor, scores: Tensor, at: Positions
) -> None:
    """Adds to the gradient of a param what a block contributes; d_scores: that of the score function's result."""
    contribution = (d_scores * apply(derivative.factor, scores, at)).to(gradient.dtype)
    if gradient.dim() == 1:
        gradient.add_(contribution.sum((0, 2, 3)))
        return
    lines = gradient if gradient.dim() == 3 else gradient.unsqueeze(1)
    place = evaluate(derivative.leaf.args[-1], _environment(scores, at), at.tables)
    index = torch.as_tensor(place, device=scores.device)
    index = index.expand(scores.shape[0], *scores.shape[1:]).flatten(2).transpose(0, 1)
    contribution = contribution.flatten(2).transpose(0, 1)
    if lines.shape[1] == 1:
        index, contribution = (each.flatten(1).unsqueeze(1) for each in (index, contribution))
    lines.scatter_add_(2, index, contribution)


def _environment(scores: Tensor, at: Positions) -> dict[sympy.Symbol, Any]:
    batch, heads = scores.shape[:2]
    positions = positions_environment(at.rows, at.columns, batch, heads, scores.device, at.batch, at.head)
    return {S: scores, **positions, **dict(_grid(*each, scores.dtype) for each in enumerate(at.grids))}


def _grid(index: int, grid: Tensor, dtype: torch.dtype) -> tuple[sympy.Symbol, Tensor]:
    grid = grid[(None,) * (4 - grid.dim())]
    if grid.is_floating_point():
        return sympy.Symbol(f"x{index}", real=True), grid.to(dtype)
    return sympy.Symbol(f"i{index}", integer=True), grid.long()


@lru_cache(maxsize=4096)
def parse_score(text: str) -> Score:
    """The score function of a text. Raises MaskError for anything but the grammar of this module."""
    return Score.of(_parse(text))


def param(index: int, *position: sympy.Expr) -> sympy.Expr:
    """The leaf `params[index][h, *position]`."""
    return sympy.Function(f"p{index}", real=True)(H, *position)


def float_table(index: int, position: sympy.Expr) -> sympy.Expr:
    """The leaf `tables[index][b, position]` of a float table."""
    return sympy.Function(f"f{index}", real=True)(B, position)


def is_param(leaf: AppliedUndef) -> bool:
    return leaf.func.__name__[0] == "p"


# ---- evaluation


def _numbers(dtype: torch.dtype, at: Positions) -> Any:
    """How `evaluate` goes on with what only scores have."""

    def number(x: Any) -> Tensor:
        return torch.as_tensor(x, dtype=dtype, device=at.rows.device)

    def value(each: sympy.Basic, inner: Any) -> Any:
        match each:
            case sympy.Rational() | sympy.core.numbers.Infinity() | sympy.core.numbers.NegativeInfinity():
                return number(float(each))  # a tensor: a Python float would make float32 of integers
            case where(args=(condition, held, otherwise)):
                chosen = inner(condition)
                if isinstance(chosen, bool):
                    return inner(held if chosen else otherwise)
                return torch.where(chosen, *(number(inner(branch)) for branch in (held, otherwise)))
            case sympy.Min() | sympy.Max():
                join = torch.minimum if isinstance(each, sympy.Min) else torch.maximum
                first, *others = (number(inner(arg)) for arg in each.args)
                for other in others:
                    first = join(first, other)
                return first
            case sympy.Heaviside(args=(x, *_)):
                return torch.heaviside(number(inner(x)), number(0.5))
            case sympy.Pow(args=(base, exponent)):
                return number(inner(base)) ** float(exponent)
            case AppliedUndef():
                return _param_at(each, inner, dtype, at)
            case sympy.Function() if each.func in _TORCH:
                return _TORCH[each.func](number(inner(each.args[0])))
        raise AssertionError(f"not in the grammar of scores: {each!r}")

    return value


def _param_at(leaf: AppliedUndef, inner: Any, dtype: torch.dtype, at: Positions) -> Tensor:
    """params[index] at the heads, batch rows and positions of the block: (B or 1, H, rows or 1, columns or 1)."""
    values = at.params[table_index(leaf)].to(dtype)
    if values.dim() == 1:
        return values.view(1, -1, 1, 1)
    lines = values if values.dim() == 3 else values.unsqueeze(1)
    index = torch.as_tensor(inner(leaf.args[-1]), device=values.device)
    index = index if index.dim() == 4 else index.view(1, 1, 1, 1)
    heads, shape = lines.shape[0], index.shape
    if shape[0] == 1:
        return lines[:, :, index.flatten()].view(heads, lines.shape[1], *shape[2:]).transpose(0, 1)
    lines = lines.expand(heads, shape[0], -1)
    found = lines.gather(2, index.flatten(1).unsqueeze(0).expand(heads, -1, -1))
    return found.view(heads, shape[0], *shape[2:]).transpose(0, 1)


# ---- text


def _parse(text: str) -> sympy.Expr:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise MaskError(f"not a score function: {text!r}: {error.msg}") from error
    return _read(tree, text)


def _read(node: ast.AST, text: str) -> Any:
    def number(each: ast.AST) -> sympy.Expr:
        return _read(each, text)

    match node:
        case ast.Constant(value=float() as value):
            return sympy.Rational(*value.as_integer_ratio())
        case ast.Name(id="s"):
            return S
        case ast.Name(id="inf"):
            return sympy.oo
        case ast.Name(id=name) if name[0] == "x" and name[1:].isdecimal():
            return sympy.Symbol(name, real=True)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -number(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as op, right=right):
            one, other = number(left), number(right)
            match op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case _:
                    return one / other
        case ast.Call(func=ast.Name(id="where"), args=[condition, held, otherwise], keywords=[]):
            return where(normalize(read(condition, text)), number(held), number(otherwise))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS and (
            len(args) == 1 or name in ("min", "max")
        ):
            return FUNCTIONS[name](*(number(each) for each in args))
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id="h"), *position], keywords=[]) if (
            name[0] == "p" and name[1:].isdecimal()
        ):
            return param(int(name[1:]), *(read(each, text) for each in position))
        case ast.Call(func=ast.Name(id=name), args=[ast.Name(id="b"), position], keywords=[]) if (
            name[0] == "f" and name[1:].isdecimal()
        ):
            return float_table(int(name[1:]), read(position, text))
    return read(node, text)


def _text(number: sympy.Expr, tight: bool = False) -> str:
    if number.is_integer and not number.is_number and not number.atoms(*FUNCTIONS.values(), where):
        return text_of(number, tight)
    match number:
        case sympy.Integer():
            text = str(number)
            return f"({text})" if tight and number < 0 else text
        case sympy.core.numbers.Infinity() | sympy.core.numbers.NegativeInfinity():
            return "inf" if number > 0 else "(-inf)" if tight else "-inf"
        case sympy.Rational():
            text = repr(float(number))
            return f"({text})" if tight and number < 0 else text
        case sympy.Symbol():
            return str(number)
        case AppliedUndef():
            return f"{number.func.__name__}({', '.join(text_of(each) for each in number.args)})"
        case where(args=(condition, held, otherwise)):
            return f"where({text_of(condition)}, {_text(held)}, {_text(otherwise)})"
        case sympy.Add():
            text = " + ".join(_text(each, tight=True) for each in sorted(number.args, key=_reading_order))
        case sympy.Mul():
            text = "*".join(_text(each, tight=True) for each in sorted(number.args, key=_reading_order))
        case sympy.Pow(args=(base, sympy.S.Half)):
            return f"sqrt({_text(base)})"
        case sympy.Pow(args=(base, exponent)) if exponent.is_Integer and exponent > 0:
            text = "*".join([_text(base, tight=True)] * int(exponent))
        case sympy.Pow(args=(base, exponent)) if exponent.is_Integer:
            text = f"1 / ({'*'.join([_text(base, tight=True)] * -int(exponent))})"
        case sympy.Function() if number.func in FUNCTIONS.values():
            name = next(name for name, function in FUNCTIONS.items() if function is number.func)
            return f"{name}({', '.join(_text(each) for each in number.args)})"
        case sympy.Min() | sympy.Max():
            name = "min" if isinstance(number, sympy.Min) else "max"
            return f"{name}({', '.join(_text(each) for each in number.args)})"
        case _:
            return text_of(number)
    return f"({text})" if tight else text


def _reading_order(number: sympy.Expr) -> tuple[bool, bool, str]:
    return (not number.is_number, S not in number.free_symbols, str(number))
