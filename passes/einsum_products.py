"""`torch.einsum` of two tensors as transposes and `matmul`: attention is found however its products are written.

    bqhd,bkhd->bhqk   becomes   q.permute(0, 2, 1, 3) @ k.permute(0, 2, 1, 3).transpose(-2, -1)

The letters of a product are *batch* (in the result and in one operand or both), *row* and *column* (in the result and
one operand) and *inner* (summed, in both operands). Other equations stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any, NamedTuple

from torch import fx

Call = Callable[..., fx.Node]  # call(target, *args): a new node before the einsum


class Product(NamedTuple):
    """left (*batch, row, inner) @ right (*batch, inner, column), by the letters of the two operands and the result."""

    left: int  # which operand holds the rows
    letters: tuple[str, str]
    result: str
    batch: str
    row: str
    inner: str
    column: str


def read(equation: str, dims: Sequence[int]) -> Product | None:
    """The product that an equation on two operands of so many dims says; `None` for any other."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or len(letters) != 2 or len(dims) != 2:
        return None
    unused = "".join(each for each in ascii_letters if each not in equation)
    hidden = {n - len(term.replace("...", "")) for n, term in zip(dims, letters, strict=True) if "..." in term}
    if len(hidden) > 1:
        return None
    one, other, result = (each.replace("...", unused[: max(hidden, default=0)]) for each in (*letters, result))
    if any(len(set(each)) < len(each) for each in (one, other, result)):
        return None
    inner = [each for each in one if each in other and each not in result]
    if len(inner) != 1 or set(result) | set(inner) != set(one) | set(other) or len(result) < 3:
        return None
    row, column = result[-2:] if set(result[:-2]) >= set(one) & set(other) - set(inner) else ("", "")
    if not row:  # the weights' product with V as (batch, row, head, column): the weights say what the heads are
        row, column = one[-2], result[-1]
    batch = "".join(each for each in (result if row == result[-2] else one) if each not in (row, column, *inner))
    if set(result) != {*batch, row, column} or (row in one) == (row in other) or (column in one) == (column in other):
        return None
    if (row in one) == (column in one):
        return None
    return Product(int(row in other), (one, other), result, batch, row, inner[0], column)


def write_as_matmul(node: fx.Node, call: Call, operands: Sequence[fx.Node], dims: Sequence[int]) -> fx.Node | None:
    """The result of an einsum by `matmul`, as a new node; `None` where the equation is no product."""
    found = read(node.args[0], dims) if isinstance(node.args[0], str) else None
    if found is None:
        return None

    def ordered(value: fx.Node, own: str, wanted: str) -> fx.Node:
        """With its dims in this order, and dims of size 1 for the letters that it has not."""
        there = [own.index(each) for each in wanted if each in own]
        made = value if there == sorted(there) else call("permute", value, *there)
        for at, each in enumerate(wanted):
            if each not in own:
                made = call("unsqueeze", made, at)
        return made

    left_letters, right_letters = found.letters[found.left], found.letters[1 - found.left]
    left = ordered(operands[found.left], left_letters, found.batch + found.row + found.inner)
    if right_letters[-1] == found.inner:  # as keys are
        right = ordered(operands[1 - found.left], right_letters, found.batch + found.column + found.inner)
        right = call("transpose", right, -2, -1)
    else:
        right = ordered(operands[1 - found.left], right_letters, found.batch + found.inner + found.column)
    return ordered(call("matmul", left, right), found.batch + found.row + found.column, found.result)


def operands_of(node: fx.Node) -> list[Any]:
    """The tensors of einsum(equation, a, b) or einsum(equation, [a, b])."""
    given = node.args[1:]
    return list(given[0]) if len(given) == 1 and isinstance(given[0], (list, tuple)) else list(given)
