"""Finds attention that a model has written out, by data flow: softmax(f(scale · QKᵀ)) V becomes `dense_attention`.

From each softmax over the last dim the graph is read in both directions. Forward: casts, dropout, views and the slice
that drops a sink, up to the product with V. Backward: f, a pointwise function of the product QKᵀ, is written as a score
function (`kernels.score`): masks and biases become grids, which `canonicalize` proves to be functions of positions;
learned biases become params. Where something else is done, or the weights are used elsewhere, the operators stay as
they are, under the general rules: exact, but the keys are gathered.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from evocompile.kernels.dense_attention import attention_with_sink
from evocompile.kernels.mask import K, Q
from evocompile.kernels.score import S, Score, param, where

_CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone")
_VIEWS = ("view", "reshape")
_DENSE = torch.ops.evocompile.dense_attention.default


class NotAttention(Exception):
    """What stopped the match; the operators stay."""


class Leaves:
    """The tensors that a score function reads beside the score, and their symbols in it."""

    def __init__(self) -> None:
        self.grids: list[fx.Node] = []
        self.learned: list[tuple[fx.Node, sympy.Expr]] = []  # those that require a gradient
        self.ranks: dict[fx.Node, int] = {}  # how many dims the scores have where a leaf enters them

    def symbol(self, node: fx.Node, rank: int) -> sympy.Expr:
        """What a tensor is called in a score function; a sum or product of learned ones by its parts."""
        self.ranks.setdefault(node, rank)
        if fake(node).requires_grad:
            return self._learned(node, rank)
        if node not in self.grids:
            self.grids.append(node)
        index = self.grids.index(node)
        if fake(node).is_floating_point():
            return sympy.Symbol(f"x{index}", real=True)
        return sympy.Symbol(f"i{index}", integer=True)

    def _learned(self, node: fx.Node, rank: int) -> sympy.Expr:
        name = name_of(node)
        if name in ("add", "iadd", "mul", "imul", "sub") and len(node.args) == 2 and not node.kwargs:
            one, other = (
                self.symbol(each, rank) if isinstance(each, fx.Node) else number_of(each) for each in node.args
            )
            return one * other if "mul" in name else one - other if name == "sub" else one + other
        if name in ("to", "float", "contiguous", "type_as", "clone"):
            return self.symbol(node.args[0], rank)  # type: ignore[arg-type]
        for each, symbol in self.learned:
            if each is node:
                return symbol
        self.learned.append((node, sympy.Symbol(f"learned{len(self.learned)}", real=True)))
        return self.learned[-1][1]


@dataclass
class Written:
    """What an attention is: q (…, S, D), k (…, T, D) or its transpose, v (…, T, E), a function of scale · QKᵀ."""

    result: fx.Node  # the product with V
    q: fx.Node
    k: fx.Node
    v: fx.Node
    heads: int
    scale: float
    score: sympy.Expr
    leaves: Leaves
    dropout: float = 0.0
    sink: fx.Node | None = None
    is_turned: bool = False  # k is the transpose
    mask: fx.Node | None = None
    is_causal: bool = False


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls; "" for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def fake(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(fake(node).shape)


def given(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments of a call by name."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def only_user(node: fx.Node) -> fx.Node:
    users = list(node.users)
    if len(users) != 1:
        raise NotAttention("the weights are used elsewhere")
    return users[0]


# ---- forward: from the softmax to the product with V


@dataclass
class _Forward:
    result: fx.Node
    v: fx.Node
    dropout: float
    drops_last: bool


def read_forward(softmax: fx.Node) -> _Forward:
    node, dropout, drops_last = softmax, 0.0, False
    while True:
        user = only_user(node)
        name = name_of(user)
        if name == "dropout":
            arguments = given(user, "input", "p", "training", "inplace")
            p, training = arguments.get("p", 0.5), arguments.get("training", True)
            if isinstance(p, fx.Node) or isinstance(training, fx.Node) or arguments["input"] is not node:
                raise NotAttention("the dropout is computed")
            if training and p:
                if dropout:
                    raise NotAttention("dropout twice")
                dropout = float(p)
        elif name == "getitem" and user.args[0] is node:
            if user.args[1] != (Ellipsis, slice(None, -1, None)) or drops_last:
                raise NotAttention("a part of the weights is taken")
            drops_last = True
        elif name in _VIEWS:
            if shape(user)[-2:] != shape(node)[-2:]:
                raise NotAttention("queries or keys are reshaped")
        elif name in ("matmul", "bmm"):
            if user.args[0] is not node or user.kwargs:
                raise NotAttention("the weights are the second operand")
            return _Forward(user, user.args[1], dropout, drops_last)
        elif name not in _CASTS or user.args[0] is not node:
            raise NotAttention(f"{name or user.op} is applied to the weights")
        node = user


# ---- backward: from the softmax to the product of Q and Kᵀ


class Scores:
    """The score function between a product QKᵀ and a softmax, read off the graph."""

    def __init__(self, entering: fx.Node) -> None:
        self.size = shape(entering)[-2:]
        self.products: dict[fx.Node, fx.Node | None] = {}
        self.leaves = Leaves()
        self.rank = 0
        self.scale = 1.0
        self.product = self._product(entering)
        if self.product is None:
            raise NotAttention("no product of two tensors enters it")
        self.leading: tuple[int, ...] = shape(self.product)[:-2]
        self.four: tuple[int, ...] = ()

    def _product(self, node: Any) -> fx.Node | None:
        """The matrix product that a node is a pointwise function of."""
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("example_value"), Tensor):
            return None
        if node not in self.products:
            self.products[node] = None
            name = name_of(node)
            if name in ("matmul", "bmm", "baddbmm"):
                found = [node] if shape(node)[-2:] == self.size else []
            elif name in _POINTWISE or name in _CASTS or name in _VIEWS:
                found = [each for each in map(self._product, node.all_input_nodes) if each is not None]
            else:
                found = []
            if len(set(found)) > 1:
                raise NotAttention("several products are added")
            self.products[node] = found[0] if found else None
        return self.products[node]

    def read(self, node: Any) -> sympy.Expr:
        """A node, or a number, as an expression of s."""
        if not isinstance(node, fx.Node):
            return number_of(node)
        if self._product(node) is None:
            return self._leaf(node)
        name = name_of(node)
        if node is self.product:
            return self._read_product(node)
        if name in _CASTS:
            return self.read(node.args[0])
        if name in _VIEWS:
            if shape(node)[-2:] != shape(node.args[0])[-2:]:
                raise NotAttention("the scores are reshaped")
            return self.read(node.args[0])
        if name in ("sub", "isub") and self._is_row_constant(node.args[1], node.args[0]):
            return self.read(node.args[0])
        outer, self.rank = self.rank, len(shape(node))
        expression = _POINTWISE[name](self, node)
        self.rank = outer
        return expression

    def _read_product(self, node: fx.Node) -> sympy.Expr:
        if name_of(node) != "baddbmm":
            return S
        arguments = given(node, "input", "batch1", "batch2")
        beta, alpha = arguments.get("beta", 1), arguments.get("alpha", 1)
        self.rank = 3
        added = self._leaf(arguments["input"]) if beta else 0
        self.scale = float(alpha)
        return S + number_of(beta) * added

    def times(self, expression: sympy.Expr, factor: sympy.Expr, by: Any) -> sympy.Expr:
        """A product with a constant; of the score itself it becomes the scale."""
        if expression == S and isinstance(by, int | float):
            self.scale *= by
            return S
        return expression * factor

    def _is_row_constant(self, node: Any, scores: fx.Node) -> bool:
        """Whether a node is the largest score of each row: taking it off changes no softmax."""
        if not isinstance(node, fx.Node):
            return False
        if name_of(node) == "getitem" and node.args[1] == 0:
            node = node.args[0]
        if name_of(node) == "detach":
            node = node.args[0]
        arguments = given(node, "input", "dim", "keepdim") if name_of(node) in ("max", "amax") else {}
        return arguments.get("input") is scores and arguments.get("dim") in (-1, len(shape(scores)) - 1)

    def _leaf(self, node: Any) -> sympy.Expr:
        """A tensor or number that does not depend on the product."""
        return self.leaves.symbol(node, self.rank) if isinstance(node, fx.Node) else number_of(node)

    def condition(self, node: Any) -> sympy.Basic:
        if not isinstance(node, fx.Node) or fake(node).requires_grad or self._product(node) is not None:
            raise NotAttention("a condition on scores")
        return sympy.Ne(self._leaf(node), 0)


def number_of(value: Any) -> sympy.Expr:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotAttention(f"{value!r} in the scores")
    if math.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Rational(*float(value).as_integer_ratio())


Rule = Callable[[Scores, fx.Node], sympy.Expr]


def _two(function: Callable[[sympy.Expr, sympy.Expr], sympy.Expr]) -> Rule:
    def rule(scores: Scores, node: fx.Node) -> sympy.Expr:
        if node.kwargs or len(node.args) != 2:
            raise NotAttention("an operand is scaled")
        return function(*(scores.read(each) for each in node.args))

    return rule


def _multiply(scores: Scores, node: fx.Node) -> sympy.Expr:
    one, other = node.args
    if not isinstance(one, fx.Node):
        one, other = other, one
    return scores.times(scores.read(one), scores.read(other), other)


def _divide(scores: Scores, node: fx.Node) -> sympy.Expr:
    one, other = node.args
    if node.kwargs:
        raise NotAttention("a rounded division")
    inverse = 1 / other if isinstance(other, int | float) else other
    return scores.times(scores.read(one), 1 / scores.read(other), inverse)


def _masked_fill(scores: Scores, node: fx.Node) -> sympy.Expr:
    arguments = given(node, "input", "mask", "value")
    return where(scores.condition(arguments["mask"]), scores.read(arguments["value"]), scores.read(arguments["input"]))


def _where(scores: Scores, node: fx.Node) -> sympy.Expr:
    condition, held, otherwise = node.args
    return where(scores.condition(condition), scores.read(held), scores.read(otherwise))


_POINTWISE: dict[str, Rule] = {
    **dict.fromkeys(("add", "iadd", "add_"), _two(lambda one, other: one + other)),
    **dict.fromkeys(("sub", "isub", "sub_"), _two(lambda one, other: one - other)),
    **dict.fromkeys(("mul", "imul", "mul_", "multiply"), _multiply),
    **dict.fromkeys(("div", "truediv", "itruediv", "div_"), _divide),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
    "where": _where,
    "tanh": lambda scores, node: sympy.tanh(scores.read(node.args[0])),
    "neg": lambda scores, node: -scores.read(node.args[0]),
}


# ---- the match


def softmaxes(graph: fx.Graph) -> list[fx.Node]:
    """The softmaxes over a last dim."""
    found = []
    for node in graph.nodes:
        if name_of(node) == "softmax":
            dim = given(node, "input", "dim").get("dim")
            if isinstance(dim, int) and dim in (-1, len(shape(node)) - 1):
                found.append(node)
    return found


def match(softmax: fx.Node) -> Written:
    """The attention around a softmax. Raises NotAttention."""
    forward = read_forward(softmax)
    entering, sink = softmax.args[0] if softmax.args else softmax.kwargs["input"], None
    if forward.drops_last:
        entering, sink = _without_sink(entering)
    scores = Scores(entering)
    expression = scores.read(entering)
    product = scores.product
    assert product is not None
    if name_of(product) == "baddbmm":
        arguments = given(product, "input", "batch1", "batch2")
        q, k_turned = arguments["batch1"], arguments["batch2"]
    else:
        q, k_turned = product.args
    if len({fake(each).dtype for each in (q, k_turned, forward.v)}) > 1:
        raise NotAttention("dtypes differ")
    dims = {len(shape(each)) for each in (q, k_turned, forward.v)}
    if dims not in ({3}, {4}):
        raise NotAttention("neither three nor four dims")
    heads = _heads(scores, entering, forward, q)
    found = Written(
        forward.result, q, k_turned, forward.v, heads, scores.scale, expression, scores.leaves, forward.dropout, sink,
        is_turned=True,
    )  # fmt: skip
    _check_shapes(found)
    return found


def _without_sink(entering: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The scores and the sink (…, S, 1) that are concatenated, with or without the row's largest taken off."""
    node = entering
    while name_of(node) in (*_CASTS, "sub"):
        if name_of(node) == "sub" and not Scores._is_row_constant(None, node.args[1], node.args[0]):  # type: ignore[arg-type]
            raise NotAttention("something is taken off the scores and the sink")
        node = node.args[0]
    arguments = given(node, "tensors", "dim") if name_of(node) == "cat" else {}
    parts = arguments.get("tensors", ())
    if len(parts) != 2 or arguments.get("dim") not in (-1, len(shape(node)) - 1) or shape(parts[1])[-1] != 1:
        raise NotAttention("the weight that is dropped is no sink")
    return parts[0], parts[1]


def _heads(scores: Scores, entering: fx.Node, forward: _Forward, q: fx.Node) -> int:
    """The number of heads; where batch and heads are one dim, as some view of the scores or the result tells."""
    if len(shape(q)) == 4:
        return shape(q)[1]
    if len(shape(entering)) == 4:
        return shape(entering)[1]
    both, width = shape(q)[0], shape(forward.v)[-1]
    users, reached = list(forward.result.users), 0
    while users and reached < 8:
        user, reached = users.pop(0), reached + 1
        sizes = shape(user) if isinstance(user.meta.get("example_value"), Tensor) else ()
        if (
            name_of(user) in _VIEWS
            and sizes[-1] % width == 0
            and sizes[-1] > width
            and both % (sizes[-1] // width) == 0
        ):
            return sizes[-1] // width
        if name_of(user) in (*_VIEWS, *_CASTS, "transpose", "permute"):
            users += user.users
    return both


def _check_shapes(found: Written) -> None:
    q, k, v = shape(found.q), shape(found.k), shape(found.v)
    if len(q) == 3:
        if not q[0] == k[0] == v[0] or q[0] % found.heads:
            raise NotAttention("batch sizes differ")
        return
    if not q[0] == k[0] == v[0] or k[1] != v[1] or q[1] % k[1] or k[1] not in (1, q[1]):
        raise NotAttention("batch sizes or heads differ")


# ---- what the operator gets

Call = Callable[..., fx.Node]  # call(target, *args): a new node before the attention


def replace(found: Written, call: Call, method: Call, unrepeated: Callable[..., tuple[fx.Node, fx.Node]]) -> None:
    """Puts `dense_attention` into the place of what was found."""
    q, k, v = found.q, _turned_back(found.k, method) if found.is_turned else found.k, found.v
    leaves = found.leaves
    rank, result_rank = len(shape(q)), len(shape(found.result))
    batch = shape(q)[0] if rank == 4 else shape(q)[0] // found.heads

    def four(node: fx.Node, entering: int) -> fx.Node:
        """A tensor that enters scores of 3 or 4 dims as one of 4."""
        sizes = shape(node)
        if entering == 3 and len(sizes) == 3:
            leading = (batch, found.heads) if sizes[0] > 1 else (1, 1)
            return method("reshape", node, (*leading, *sizes[1:]))
        return node if len(sizes) == 4 else method("reshape", node, (*(1,) * (4 - len(sizes)), *sizes))

    if rank == 3:
        q, k, v = (four(each, 3) for each in (q, k, v))
    else:
        k, v = unrepeated(k, v)
    (queries, keys), heads = (shape(q)[2], shape(k)[2]), shape(q)[1]
    grids = [four(each, leaves.ranks[each]) for each in leaves.grids]
    params, expression = [], found.score
    for node, symbol in leaves.learned:
        made, leaf = _param(node, len(params), grids, heads, queries, keys, leaves.ranks, four, method)
        params.append(made)
        expression = expression.subs(symbol, leaf)
    seed = None
    if found.dropout:
        target = torch.ops.evocompile.attention_seed.default
        seed = call(target, len(q.graph.find_nodes(op="call_function", target=target)))
    score = str(Score.of(expression))
    if found.sink is not None:
        if params:
            raise NotAttention("a sink and a learned bias")
        sink = method("squeeze", four(found.sink, result_rank), -1)
        out = call(attention_with_sink, q, k, v, sink, found.scale, seed, score, found.dropout, grids)
    else:
        form = (params, seed, score, found.dropout, grids) if score != "s" or found.dropout else ()
        both = call(_DENSE, q, k, v, found.mask, found.is_causal, found.scale, *form)
        out = call(operator.getitem, both, 0)
    if result_rank == 3:
        out = method("reshape", out, shape(found.result))
    if fake(out).dtype != fake(found.result).dtype:
        out = method("to", out, fake(found.result).dtype)
    found.result.replace_all_uses_with(out)


def _turned_back(node: fx.Node, method: Call) -> fx.Node:
    """k (…, T, D) of its transpose."""
    last = len(shape(node)) - 1
    source = node.args[0] if node.args else None
    dims = node.args[1:]
    if dims and isinstance(dims[0], Sequence):
        dims = tuple(dims[0])
    numbers = [int(dim) % (last + 1) for dim in dims] if name_of(node) in ("transpose", "swapaxes", "permute") else []
    turned = sorted(numbers) == [last - 1, last] or numbers == [*range(last - 1), last, last - 1]
    if isinstance(source, fx.Node) and turned and not node.kwargs:
        return source
    return method("transpose", node, -2, -1)


def _param(
    node: fx.Node,
    index: int,
    grids: list[fx.Node],
    heads: int,
    queries: int,
    keys: int,
    ranks: dict[fx.Node, int],
    four: Callable[[fx.Node, int], fx.Node],
    method: Call,
) -> tuple[fx.Node, sympy.Expr]:
    """A learned tensor as one of the operator's params, and what the score function reads of it."""
    looked_up = _embedding(node, heads, queries, keys)
    if looked_up is not None:
        numbers, weight = looked_up
        if numbers not in grids:
            grids.append(numbers)
        return method("t", weight), param(index, sympy.Symbol(f"i{grids.index(numbers)}", integer=True))
    made = four(node, ranks[node])
    rows, own_heads, of_queries, of_keys = shape(made)
    position = Q * (of_keys if of_queries > 1 else 0) + K * int(of_keys > 1)
    made = method("reshape", method("transpose", made, 0, 1), (own_heads, rows, of_queries * of_keys))
    made = method("expand", made, heads, rows, of_queries * of_keys)
    if rows > 1:
        return made, param(index, sympy.Symbol("b", integer=True, nonnegative=True), position)
    return method("squeeze", made, 1), param(index, position)


def _embedding(node: fx.Node, heads: int, queries: int, keys: int) -> tuple[fx.Node, fx.Node] | None:
    """(numbers (S, T), weight (buckets, H)) of a bias (1, H, S, T) that is looked up, as T5 does."""
    order = [0, 1, 2, 3]  # dims of the bias among (1, H, S, T)
    if shape(node) != (1, heads, queries, keys):
        return None
    while True:
        name, source = name_of(node), node.args[0] if node.args else None
        if name == "embedding":
            numbers, weight = given(node, "input", "weight").values() if len(node.args) == 2 else node.args[:2]
            return (numbers, weight) if order == [2, 3, 1] else None
        if not isinstance(source, fx.Node):
            return None
        if name == "unsqueeze" and node.args[1] == 0 and order[0] == 0:
            order = order[1:]
        elif name == "permute":
            dims = node.args[1] if isinstance(node.args[1], Sequence) else node.args[1:]
            order = [order[list(dims).index(dim)] for dim in range(len(dims))]
        elif name not in _CASTS and not (name == "getitem" and shape(node) == shape(source)):
            return None
        node = source
