"""Numbers that depend on k - q alone: computed once for every k - q, whatever S·T is.

The operators between the positions and the result may be any pointwise ones: each is carried out on a line of
positions. What enters them must be a proven function of the positions that is the same at (q + 1, k + 1).
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from evocompile.errors import MaskError
from evocompile.kernels.mask import H, K, Q, evaluate
from evocompile.program import val
from evocompile.torch_private import OpOverload, outside_fake_mode

from .rules import MOVES, Coordinates, broadcast
from .values import Unproven, cases_of


class _NoDistance(Exception):
    """The node is no function of k - q that could be computed."""


def of_relative_positions(recovery: Any, node: fx.Node) -> Tensor | None:
    """Values (H or 1, S + T - 1) of a node at k - q = 1 - S … T - 1; None for a node that depends on more."""
    domain = recovery.domain
    by_heads = val(node).dim() >= 3 and val(node).shape[-3] > 1
    with outside_fake_mode():
        line = {
            Q: torch.full((1, 1), domain.queries - 1),
            K: torch.arange(domain.queries + domain.keys - 1).view(1, -1),
            H: torch.arange(domain.heads).view(-1, 1),
        }
        try:
            found = _on_line(recovery, node, broadcast(val(node).shape, (sympy.S.Zero, H, Q, K)), line)
        except _NoDistance:
            return None
        return found.expand(domain.heads if by_heads else 1, line[K].shape[1]).to(val(node).dtype).contiguous()


def _on_line(recovery: Any, node: fx.Node, coordinates: Coordinates, line: dict[sympy.Symbol, Tensor]) -> Tensor:
    if not isinstance(val(node), Tensor):
        raise _NoDistance
    try:
        return _proven(recovery, node, coordinates, line)
    except (Unproven, MaskError):
        pass
    if not recovery.is_constant(node):
        raise _NoDistance
    packet = getattr(node.target, "overloadpacket", None)
    if packet in MOVES:
        source: Any = node.args[0]
        return _on_line(recovery, source, MOVES[packet](recovery.domain, node, coordinates), line)
    if not {Q, K} & {symbol for each in coordinates for symbol in each.free_symbols}:
        return recovery.compute(node)[tuple(torch.as_tensor(evaluate(each, line, ())) for each in coordinates)]
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        raise _NoDistance

    def operand(each: fx.Node) -> Tensor:
        return _on_line(recovery, each, broadcast(val(each).shape, coordinates), line)

    return node.target(*fx.map_arg(node.args, operand), **fx.map_arg(node.kwargs, operand))


def _proven(recovery: Any, node: fx.Node, coordinates: Coordinates, line: dict[sympy.Symbol, Tensor]) -> Tensor:
    """What mask recovery proves of the node, if that is the same along k - q."""
    result: Tensor | None = None
    further = {Q: Q + 1, K: K + 1}
    for condition, number in cases_of(recovery.value(node, coordinates)):
        for each in (condition, number):
            moved = each.xreplace(further)
            same = each == moved or (isinstance(each, sympy.Expr) and sympy.expand(moved - each) == 0)
            if (not same and sympy.simplify(moved) != sympy.simplify(each)) or each.atoms(sympy.Function):
                raise _NoDistance
        here = torch.as_tensor(evaluate(number, line, (), lambda each, _: float(each)), dtype=val(node).dtype)
        chosen = torch.as_tensor(evaluate(condition, line, ()))
        result = here if result is None else torch.where(chosen, here, result)
    assert result is not None
    return result


def constant_node(graph_module: fx.GraphModule, node: fx.Node, values: Tensor) -> fx.Node:
    """The values as a constant of the graph, on the device of the node."""
    name = f"relative_positions_{sum(each.startswith('relative_positions_') for each in dir(graph_module))}"
    fake_mode = val(node).fake_mode
    with outside_fake_mode():
        graph_module.register_buffer(name, values.to(val(node).device), persistent=False)
    last = list(graph_module.graph.find_nodes(op="placeholder"))[-1]
    with graph_module.graph.inserting_after(last):
        made = graph_module.graph.get_attr(name)
    with fake_mode:
        made.meta["val"] = torch.empty(values.shape, dtype=values.dtype, device=val(node).device)
    return made
