"""Predicates and score functions of the form that the Triton kernels know: distances, documents, softcap, slopes.

A predicate that is a conjunction of

    k <= q + c,  k > q - c           a band: lower < k - q <= upper (causal, windows, either side alone)
    t0(b, q) == t0(b, k)             documents; one pair of tables
    anything of b and k alone        for example padding, or a prefix of keys; also of b and q alone

is a `Pattern`. The conditions on one side become part of the document numbers, so that a kernel compares those alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from torch import Tensor

from .mask import B, H, K, Mask, Q, parse_mask, table_index
from .score import S, is_param, parse_score

_INT_MIN = torch.iinfo(torch.int32).min


class Pattern(NamedTuple):
    """lower < k - q <= upper and documents[0] at q == documents[1] at k, where both sides' conditions hold.

    documents: numbers of two tables. of_rows, of_columns: texts of masks of (b, q) and of (b, k).
    """

    lower: int | None = None
    upper: int | None = None
    documents: tuple[int, int] | None = None
    of_rows: str | None = None
    of_columns: str | None = None

    @property
    def has_documents(self) -> bool:
        return (self.documents, self.of_rows, self.of_columns) != (None, None, None)

    def numbers(self, positions: Tensor, tables: Sequence[Tensor], side: str) -> Tensor:
        """Document numbers, (B or 1, positions) int32, of the rows (side "q") or columns ("k").

        Who does not meet a condition gets a number of its own, which the other side never has.
        """
        index = None if self.documents is None else self.documents["qk".index(side)]
        found = (
            torch.zeros(1, len(positions), dtype=torch.int32, device=positions.device)
            if index is None
            else tables[index].to(positions.device)[:, positions].to(torch.int32)
        )
        condition = self.of_rows if side == "q" else self.of_columns
        if condition is None:
            return found
        batch = max((table.shape[0] for table in tables), default=1)
        none = positions.new_zeros(1)
        mask = parse_mask(condition)
        if side == "q":
            keep = mask.evaluate(positions, none, tables, batch, 1, positions.device)[:, 0, :, 0]
        else:
            keep = mask.evaluate(none, positions, tables, batch, 1, positions.device)[:, 0, 0, :]
        return torch.where(keep, found, _INT_MIN if side == "q" else _INT_MIN + 1)


@lru_cache(maxsize=1024)
def pattern_of(text: str) -> Pattern | str:
    """The pattern of a predicate, or why it has none."""
    expression: Any = parse_mask(text).expression
    if expression == sympy.false:
        return "nothing attends"
    conjuncts = expression.args if isinstance(expression, sympy.And) else (expression,)
    lowers, uppers, documents, of_rows, of_columns = [], [], [], [], []
    for each in conjuncts:
        if each == sympy.true:
            continue
        free = each.free_symbols
        band = _band(each)
        pair = _documents(each)
        if band is not None and not band[0]:
            uppers.append(band[1])
        elif band is not None:
            lowers.append(band[1])
        elif pair is not None:
            documents.append(pair)
        elif free <= {B, K}:
            of_columns.append(each)
        elif free <= {B, Q}:
            of_rows.append(each)
        else:
            return f"{str(Mask.of(each))!r} is no bound on k - q, no equality of documents, no condition on one side"
    if len(set(documents)) > 1:
        return "it compares more than one pair of tables"
    return Pattern(
        max(lowers, default=None),
        min(uppers, default=None),
        documents[0] if documents else None,
        _text(of_rows),
        _text(of_columns),
    )


class ScorePattern(NamedTuple):
    """softcap * tanh(s / softcap), or s where that is 0, plus factor * params[slopes] at the head * (k - q)."""

    softcap: float = 0.0
    slopes: int | None = None
    factor: float = 1.0


@lru_cache(maxsize=1024)
def score_pattern(text: str) -> ScorePattern | str:
    """The pattern of a score function (`kernels.score`), or why it has none."""
    terms = dict(sympy.expand(parse_score(text).expression).as_coefficients_dict())
    softcap = _softcap({term: factor for term, factor in terms.items() if term.has(S)})
    bias = {term: factor for term, factor in terms.items() if not term.has(S)}
    leaves = {leaf for term in bias for leaf in term.atoms(AppliedUndef)}
    if softcap is None:
        return f"the score {text!r} is neither s nor a softcap of it, with or without a bias"
    if not bias:
        return ScorePattern(softcap)
    leaf = leaves.pop() if len(leaves) == 1 else None
    if leaf is None or not is_param(leaf) or leaf.args != (H,) or set(bias) != {leaf * K, leaf * Q}:
        return f"the bias in the score {text!r} is not a number for each head times k - q"
    if bias[leaf * K] != -bias[leaf * Q]:
        return f"the bias in the score {text!r} is not a number for each head times k - q"
    return ScorePattern(softcap, table_index(leaf), float(bias[leaf * K]))


def _softcap(terms: dict[Any, Any]) -> float | None:
    """c for c * tanh(s / c), 0 for s."""
    if terms == {S: 1}:
        return 0.0
    if len(terms) != 1:
        return None
    ((term, factor),) = terms.items()
    inner, rest = term.args[0].as_independent(S) if isinstance(term, sympy.tanh) else (0, None)
    # The text rounds 1 / c to a float.
    return float(factor) if rest == S and factor > 0 and abs(float(inner * factor) - 1.0) < 1e-12 else None


def _text(conditions: list[Any]) -> str | None:
    return str(Mask.of(sympy.And(*conditions))) if conditions else None


def _band(relation: Any) -> tuple[bool, int] | None:
    """(False, c) for k - q <= c, (True, c) for k - q > c."""
    if not isinstance(relation, sympy.Le | sympy.Gt):
        return None
    terms = dict(sympy.expand(relation.lhs - relation.rhs).as_coefficients_dict())
    constant = int(terms.pop(sympy.S.One, 0))
    is_lower = isinstance(relation, sympy.Gt)
    if terms == {K: 1, Q: -1}:
        return is_lower, -constant
    if terms == {K: -1, Q: 1}:  # q - k + c <= 0 is k - q >= c, q - k + c > 0 is k - q < c
        return not is_lower, constant - 1
    return None


def _documents(relation: Any) -> tuple[int, int] | None:
    if not (isinstance(relation, Relational) and relation.rel_op == "=="):
        return None
    leaves: dict[sympy.Symbol, int] = {}
    for side in (relation.lhs, relation.rhs):
        if not isinstance(side, AppliedUndef):
            return None
        leaves[side.args[1]] = table_index(side)
    return (leaves[Q], leaves[K]) if set(leaves) == {Q, K} else None
