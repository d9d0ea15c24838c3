"""Pass `canonicalize`: attention without an S×T mask.

Requires: the joint graph as captured. Provides: every `evocompile::dense_attention` and its backward is an
`evocompile::attention` and its backward, whose mask is the text of a predicate with integer tables; the operators that
built the masks are gone.
"""

from __future__ import annotations

import torch
from torch import fx

from evocompile.program import Program, val

from .masks.recover import MaskRecovery
from .masks.values import Domain

_FORMS = {
    torch.ops.evocompile.dense_attention.default: torch.ops.evocompile.attention.default,
    torch.ops.evocompile.dense_attention_backward.default: torch.ops.evocompile.attention_backward.default,
}


def canonicalize(program: Program) -> Program:
    """Replaces the mask of every attention by its predicate. Raises MaskError for one that cannot be proven."""
    assert program.joint is not None
    graph = program.joint.graph
    recoveries: dict[Domain, MaskRecovery] = {}
    for dense in _FORMS:
        for node in graph.find_nodes(op="call_function", target=dense):
            domain = _domain(node)
            if domain not in recoveries:
                recoveries[domain] = MaskRecovery(program.joint, domain)
            _replace(node, recoveries[domain])
    graph.eliminate_dead_code()
    graph.lint()
    program.joint.recompile()
    return program


def _domain(node: fx.Node) -> Domain:
    """Over which (B, H, S, T) an attention node asks for its mask."""
    first = 0 if node.target == torch.ops.evocompile.dense_attention.default else 1  # d_out comes before q
    q, k = node.args[first : first + 2]
    batch, heads, queries, _ = val(q).shape  # type: ignore[arg-type]
    return Domain(batch, heads, queries, keys=val(k).shape[2])  # type: ignore[arg-type]


def _replace(node: fx.Node, recovery: MaskRecovery) -> None:
    """Puts the canonical operator into the place of a dense one."""
    leading = 3 if node.target == torch.ops.evocompile.dense_attention.default else 6
    mask, is_causal, scale, *form = node.args[leading:]
    predicate, tables = recovery.recover(mask, is_causal)  # type: ignore[arg-type]
    target = _FORMS[node.target]  # type: ignore[index]
    arguments = (*node.args[:leading], tables, str(predicate), scale, *form)
    with node.graph.inserting_before(node):
        canonical = node.graph.call_function(target, arguments)
    with torch.no_grad():
        canonical.meta["val"] = target(*fx.map_arg(arguments, val))
    canonical.meta["stack_trace"] = node.meta.get("stack_trace")
    node.replace_all_uses_with(canonical)
    node.graph.erase_node(node)
