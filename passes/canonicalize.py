"""Pass `canonicalize`: attention without an S×T mask.

Requires: the joint graph as captured. Provides: every `evocompile::dense_attention` and its backward is an
`evocompile::attention` and its backward, whose mask is the text of a predicate with integer tables; the operators that
built the masks are gone. With tp, losses over a vocabulary are in the forms of `loss_forms.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from evocompile.program import Note, Program, placeholders, source_line, val

from .loss_forms import split_losses
from .masks.recover import MaskRecovery
from .masks.scores import ScoreRecovery
from .masks.values import Domain

_FORMS = {
    torch.ops.evocompile.dense_attention.default: torch.ops.evocompile.attention.default,
    torch.ops.evocompile.dense_attention_backward.default: torch.ops.evocompile.attention_backward.default,
}


_NO_FORM = (None, None, "s", 0.0, None, 0)  # params, seed, score, dropout, grids, trained


def canonicalize(program: Program) -> Program:
    """Replaces the mask of every attention by its predicate. Raises MaskError for one that cannot be proven."""
    assert program.joint is not None
    graph = program.joint.graph
    recoveries: dict[Domain, ScoreRecovery] = {}
    for dense in _FORMS:
        for node in graph.find_nodes(op="call_function", target=dense):
            domain = _domain(node)
            if domain not in recoveries:
                recoveries[domain] = ScoreRecovery(MaskRecovery(program.joint, domain, _constants(program)))
            _replace(program, node, recoveries[domain])
    graph.eliminate_dead_code()
    graph.lint()
    program.joint.recompile()
    return split_losses(program) if program.plan.tp > 1 else program


def _constants(program: Program) -> dict[fx.Node, Tensor]:
    """The placeholders whose values are part of what the program is for."""
    assert program.joint is not None
    inputs = zip(placeholders(program.joint.graph), program.inputs, strict=True)
    return {node: program.constants[each.name] for node, each in inputs if each.name in program.constants}


def _domain(node: fx.Node) -> Domain:
    """Over which (B, H, S, T) an attention node asks for its mask."""
    first = 0 if node.target == torch.ops.evocompile.dense_attention.default else 1  # d_out comes before q
    q, k = node.args[first : first + 2]
    batch, heads, queries, _ = val(q).shape  # type: ignore[arg-type]
    return Domain(batch, heads, queries, keys=val(k).shape[2])  # type: ignore[arg-type]


def _replace(program: Program, node: fx.Node, recovery: ScoreRecovery) -> None:
    """Puts the canonical operator into the place of a dense one."""
    is_forward = node.target == torch.ops.evocompile.dense_attention.default
    leading = 3 if is_forward else 6
    mask, is_causal, scale, *form = node.args[leading:]
    params, seed, score, dropout, grids, trained = (*form, *_NO_FORM[len(form) :])
    found = recovery.recover(mask, is_causal, score, grids or [], len(params or []))  # type: ignore[arg-type]
    if found.rows_may_be_dead and is_forward:
        why = "a row that its finite mask leaves nothing to attend averages over all keys, so no key is left out"
        program.notes.append(Note("attention to all keys", why, source_line(node)))
    target = _FORMS[node.target]  # type: ignore[index]
    arguments = (*node.args[:leading], found.tables, str(found.mask), scale)
    if found.score != "s" or dropout:
        arguments += ([*(params or []), *found.params], seed, found.score, dropout, *((trained,) * (not is_forward)))
    with node.graph.inserting_before(node):
        canonical = node.graph.call_function(target, arguments)
    with torch.no_grad():
        canonical.meta = {**node.meta, "val": target(*fx.map_arg(arguments, val))}  # source line, checkpoint
    node.replace_all_uses_with(canonical)
    node.graph.erase_node(node)
