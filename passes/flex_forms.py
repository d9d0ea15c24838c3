"""Calls of `flex_attention` as the one attention operator.

`mask_mod` becomes a mask by running its graph on broadcast positions, which `canonicalize` proves as any other mask, so
the S×T tensor is never built. `score_mod` becomes a score function: what depends on the score is written as text, the
rest as grids or params. A BlockMask counts as what `create_block_mask` makes of its `mask_mod`; without a `mask_mod` it
says what no predicate can, and is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from evocompile.kernels.score import S, where
from evocompile.torch_private import HigherOrderOperator

from .written_attention import Leaves, NotAttention, Written, fake, name_of, number_of, shape

Make = Callable[..., fx.Node]  # make(target, args, kwargs): a new call before the attention

_ON_SCORES: dict[str, Callable[..., sympy.Expr]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), operator.add),
    **dict.fromkeys(("sub", "__sub__"), operator.sub),
    "__rsub__": lambda one, other: other - one,
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), operator.mul),
    **dict.fromkeys(("div", "truediv", "__truediv__"), operator.truediv),
    **dict.fromkeys(("neg", "__neg__"), operator.neg),
    **{each: getattr(sympy, each) for each in ("tanh", "exp", "log", "sqrt")},
}


def is_flex(node: fx.Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and name_of(node) == "flex_attention"


def read_flex(node: fx.Node, make: Make) -> Written:
    """The attention of a call. Raises NotAttention with the reason where it cannot be said."""
    q, k, v, score_mod, block_mask, scale, _, score_others, mask_others = node.args
    if any(use.args[1] != 0 for use in node.users if use.users):
        raise NotAttention("the log-sum-exp of flex_attention is used")
    (batch, heads, queries, _), keys = shape(q), shape(k)[2]  # type: ignore[arg-type]
    sizes = (("b", batch, 0), ("h", heads, 1), ("q", queries, 2), ("k", keys, 3))

    def positions(size: int, dim: int) -> fx.Node:
        line = make(torch.arange, (size,), {"device": fake(q).device})  # type: ignore[arg-type]
        return make("view", (line, *(size if each == dim else 1 for each in range(4))), {})

    where_it_is = [positions(size, dim) for _, size, dim in sizes]
    leaves = Leaves()
    expression = _run(_graph(node, score_mod), [S, *where_it_is, *score_others], leaves, make)  # type: ignore[misc]
    mask = _run(_graph(node, block_mask[-1]), [*where_it_is, *mask_others], leaves, make)  # type: ignore[index,misc]
    if not isinstance(mask, fx.Node) or not fake(mask).dim():
        if max(shape(block_mask[2])[-2:]) > 1:  # type: ignore[index]
            raise NotAttention("its BlockMask leaves out blocks without a mask_mod that says which")
        mask = None
    result = next(iter(node.users))
    return Written(result, q, k, v, heads, float(scale), _as_score(expression, leaves), leaves, mask=mask)  # type: ignore[arg-type]


def _graph(node: fx.Node, attribute: Any) -> fx.Graph:
    owner: Any = node.graph.owning_module
    for name in str(attribute.target).split("."):
        owner = getattr(owner, name)
    return owner.graph


def _run(graph: fx.Graph, inputs: list[Any], leaves: Leaves, make: Make) -> Any:
    """What a mod's graph gives: an expression where it depends on the score, else a node of the outer graph."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda each: values[each])
        elif node.op == "get_attr":
            raise NotAttention("a mod of flex_attention holds a tensor of its own")
        else:
            operands = [values[each] if isinstance(each, fx.Node) else each for each in node.args]
            if any(isinstance(each, sympy.Basic) for each in operands):
                values[node] = _on_scores(node, operands, leaves)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: values[each])
                values[node] = make(node.target if node.op == "call_function" else str(node.target), args, kwargs)
    raise AssertionError("a graph has an output")


def _on_scores(node: fx.Node, operands: list[Any], leaves: Leaves) -> sympy.Expr:
    name = name_of(node)
    if name == "where":
        condition, held, otherwise = operands
        if not isinstance(condition, fx.Node):
            raise NotAttention("score_mod chooses by the score")
        chosen = sympy.Ne(leaves.symbol(condition, 4), 0)
        return where(chosen, _as_score(held, leaves), _as_score(otherwise, leaves))
    if name in ("to", "float", "type", "type_as"):
        return operands[0]
    if name not in _ON_SCORES or node.kwargs:
        raise NotAttention(f"score_mod applies {name} to the score")
    return _ON_SCORES[name](*(_as_score(each, leaves) for each in operands))


def _as_score(value: Any, leaves: Leaves) -> sympy.Expr:
    if isinstance(value, sympy.Basic):
        return value
    if isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), Tensor):
        if not fake(value).is_floating_point() and not fake(value).dim():
            raise NotAttention("a number of the score is computed")
        return leaves.symbol(value, 4)
    return number_of(value)
