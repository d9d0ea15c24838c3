"""Which queries attend at all, as a table that is computed from the mask's tables: no S×T tensor.

For masks that are a conjunction of a window (bounds of k - q), conditions on the key and conditions on the query, as
padding under a causal or a sliding window is: the keys that may be seen are counted along the sequence, and a query is
live if some of them lie in its window.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational
from sympy.logic.boolalg import Boolean
from torch import fx

from evocompile.kernels.mask import K, Q, table_index
from evocompile.program import val

aten = torch.ops.aten


def live_rows(recovery: Any, keep: Boolean) -> fx.Node | None:
    """A bool node (B or 1, S): whether a query attends to some key; None for a mask of another form."""
    parts = list(keep.args) if isinstance(keep, sympy.And) else [keep]
    domain = recovery.domain
    low, high = -domain.queries, domain.keys  # least and greatest k - q that is seen
    of_keys: list[Boolean] = []
    of_queries: list[Boolean] = []
    for each in parts:
        symbols = {*each.free_symbols} & {Q, K}
        if symbols == {Q, K}:
            if not isinstance(each, sympy.Le | sympy.Gt) or each.lhs != K or not (each.rhs - Q).is_Integer:
                return None
            bound = int(each.rhs - Q)
            low, high = (low, min(high, bound)) if isinstance(each, sympy.Le) else (max(low, bound + 1), high)
        else:
            (of_queries if Q in symbols else of_keys).append(each)
    emit = _Emitter(recovery)
    if not emit.can(of_keys + of_queries):
        return None
    seen = emit.condition(sympy.And(*of_keys), K)
    counts = emit.call(aten.cumsum.default, emit.call(aten.to.dtype, seen, torch.int64), 1)
    counts = emit.call(aten.constant_pad_nd.default, counts, [1, 0], 0)
    until = emit.bounded(high + 1)
    since = emit.bounded(low)
    count = emit.call(aten.sub.Tensor, *(emit.call(aten.index.Tensor, counts, [None, each]) for each in (until, since)))
    live = emit.call(aten.gt.Scalar, count, 0)
    return emit.call(aten.bitwise_and.Tensor, live, emit.condition(sympy.And(*of_queries), Q))


_RELATIONS = {
    sympy.Le: aten.le,
    sympy.Gt: aten.gt,
    sympy.Eq: aten.eq,
    sympy.Ne: aten.ne,
    sympy.Lt: aten.lt,
    sympy.Ge: aten.ge,
}


class _Emitter:
    """Writes conditions on one position as nodes of the graph, (B or 1, N) each."""

    def __init__(self, recovery: Any) -> None:
        self.domain = recovery.domain
        self.tables = recovery.emit_table
        self.graph = recovery.graph_module.graph
        self.output = self.graph.output_node()
        self.example = val(next(iter(self.graph.nodes)))
        self.before: fx.Node | None = None
        self.recovery = recovery

    def can(self, conditions: list[Boolean]) -> bool:
        allowed = (sympy.And, sympy.Or, Relational, AppliedUndef, sympy.Add, sympy.Mul, sympy.Integer, sympy.Symbol)
        every = [each for condition in conditions for each in sympy.preorder_traversal(condition)]
        return all(isinstance(each, allowed) or each in (sympy.true, sympy.false) for each in every)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A call in front of the attentions that need it: right behind the last of its operands."""
        nodes: list[fx.Node] = []
        fx.map_arg(args, nodes.append)
        last = max(nodes, key=self._place) if nodes else list(self.graph.find_nodes(op="placeholder"))[-1]
        if last.op == "placeholder":
            last = list(self.graph.find_nodes(op="placeholder"))[-1]
        with self.graph.inserting_after(last):
            made = self.graph.call_function(target, args)
        made.meta["val"] = target(*fx.map_arg(args, val))
        made.meta["stack_trace"] = next((each.meta.get("stack_trace") for each in nodes), None)
        return made

    def _place(self, node: fx.Node) -> int:
        return next(index for index, each in enumerate(self.graph.nodes) if each is node)

    def condition(self, condition: Boolean, position: sympy.Symbol) -> fx.Node:
        match condition:
            case sympy.And() | sympy.Or():
                first, *others = (self.condition(each, position) for each in condition.args)
                join = aten.bitwise_and.Tensor if isinstance(condition, sympy.And) else aten.bitwise_or.Tensor
                for other in others:
                    first = self.call(join, first, other)
                return first
            case Relational():
                difference = self.number(condition.lhs - condition.rhs, position)
                return self.call(_RELATIONS[condition.func].Scalar, difference, 0)
        zeros = self.number(sympy.S.Zero, position)
        return self.call((aten.eq if condition == sympy.true else aten.ne).Scalar, zeros, 0)

    def number(self, number: sympy.Expr, position: sympy.Symbol) -> fx.Node:
        match number:
            case AppliedUndef():
                return self.call(aten.to.dtype, self.recovery.emit_table(table_index(number)), torch.int64)
            case sympy.Symbol():
                return self.positions(position)
            case sympy.Integer():
                return (
                    self.call(aten.mul.Scalar, self.positions(position), 0)
                    if number == 0
                    else self.call(aten.add.Scalar, self.number(sympy.S.Zero, position), int(number))
                )
            case sympy.Mul(args=(sympy.Integer() as factor, other)):
                return self.call(aten.mul.Scalar, self.number(other, position), int(factor))
        assert isinstance(number, sympy.Add), number
        first, *others = (self.number(each, position) for each in number.args)
        for other in others:
            first = self.call(aten.add.Tensor, first, other)
        return first

    def positions(self, position: sympy.Symbol) -> fx.Node:
        length = self.domain.queries if position == Q else self.domain.keys
        device = self.recovery.device
        made = self._iota(length, device)
        return self.call(aten.unsqueeze.default, made, 0)

    def _iota(self, length: int, device: torch.device) -> fx.Node:
        anchor = list(self.graph.find_nodes(op="placeholder"))[-1]
        arguments = {"start": 0, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
        with self.graph.inserting_after(anchor):
            made = self.graph.call_function(torch.ops.prims.iota.default, (length,), arguments)
        with self.recovery.fake_mode:
            made.meta["val"] = torch.ops.prims.iota.default(length, **arguments)
        return made

    def bounded(self, shift: int) -> fx.Node:
        """clamp(q + shift, 0, T) for every query, (S,)."""
        shifted = self.call(aten.add.Scalar, self._iota(self.domain.queries, self.recovery.device), shift)
        return self.call(aten.clamp.default, shifted, 0, self.domain.keys)
