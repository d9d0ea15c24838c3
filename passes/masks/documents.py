"""Position ids inside packed documents.

From position ids p, transformers numbers the documents of a packed row as d[i] = Σ_{j ≤ i} [p[j] − p[j−1] ≠ 1], and
compares p[k] with p[q] where d[k] = d[q]. Equal document numbers mean that every step of p between k and q is 1, so
there p[k] = p[q] + k − q, whatever the data: `p[k] <= p[q]` is `k <= q`, and a window of p is one of positions. With
this the predicate says which tiles are empty.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean
from torch import fx

from evocompile.kernels.mask import K, Q, table_index
from evocompile.program import val

aten = torch.ops.aten


def with_steps_of_one(condition: Boolean, positions_of: dict[int, int]) -> Boolean:
    """Rewrites, in each conjunction that asks for equal document numbers, the position ids of k by those of q.

    positions_of: index of a table of document numbers -> index of the table of position ids that it comes from.
    """
    if not isinstance(condition, sympy.And | sympy.Or):
        return condition
    parts = [with_steps_of_one(each, positions_of) for each in condition.args]
    if isinstance(condition, sympy.And):
        positions = {positions_of.get(_same_document(each), -1) for each in parts}
        leaves = {
            leaf for leaf in condition.atoms(AppliedUndef) if table_index(leaf) in positions and leaf.args[1] == K
        }
        known = {leaf: leaf.subs(K, Q) + K - Q for leaf in leaves}
        parts = [each.xreplace(known) for each in parts]
    return condition.func(*parts)


def _same_document(condition: Boolean) -> int:
    """i of the condition t_i(b, k) == t_i(b, q); -1 for another one."""
    if not isinstance(condition, sympy.Eq):
        return -1
    left, right = condition.args
    both = isinstance(left, AppliedUndef) and isinstance(right, AppliedUndef) and left.func == right.func
    return table_index(left) if both else -1


def position_ids(numbers: fx.Node) -> fx.Node | None:
    """The p of a node (B, S) that computes cumsum(diff(p, prepend=…) != 1) along S; `None` for any other node."""
    steps = _argument(_argument(numbers, aten.cumsum.default, -1), aten.ne.Scalar, 1)
    if steps is None or steps.target != aten.sub.Tensor or steps.kwargs:
        return None
    late, early = steps.args
    later, earlier = _slice_of(late), _slice_of(early)
    if later is None or earlier is None or later[0] is not earlier[0] or (earlier[1], later[1]) != (0, 1):
        return None
    joined = later[0]
    if joined.target != aten.cat.default or _dim(joined) != -1:
        return None
    parts: Any = joined.args[0]
    return parts[1] if len(parts) == 2 and val(parts[0]).shape[-1] == 1 else None


def _argument(node: fx.Node | None, target: Any, second: int) -> fx.Node | None:
    """x of target(x, second), where a dimension may be counted from either end."""
    if node is None or node.target != target:
        return None
    given = _dim(node) if target == aten.cumsum.default else node.args[1]
    return node.args[0] if given == second else None  # type: ignore[return-value]


def _dim(node: fx.Node) -> int:
    """The dimension that a call works on, counted from the end."""
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return dim % val(node).dim() - val(node).dim()


def _slice_of(node: Any) -> tuple[fx.Node, int] | None:
    """(x, start) of x[..., start : start + length]."""
    if not isinstance(node, fx.Node) or node.target != aten.slice.Tensor or len(node.args) != 4 or _dim(node) != -1:
        return None
    return node.args[0], node.args[2]  # type: ignore[return-value]
