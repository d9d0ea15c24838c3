"""Sharding rules: one small function for each kind of operator, in tables grouped by kind."""

from __future__ import annotations

from torch import fx

from . import contractions, convolutions, indexing, pointwise, reductions, views
from .base import Dims, Rule
from .custom import CUSTOM

RULES: dict[object, Rule] = {
    **pointwise.RULES,
    **reductions.RULES,
    **contractions.RULES,
    **convolutions.RULES,
    **views.RULES,
    **indexing.RULES,
}


def dims_of(node: fx.Node) -> Dims | None:
    """The labels of a node, or None where there is no rule."""
    rule = RULES.get(node.target) or CUSTOM.get(node.target)
    if rule is not None:
        return rule(node)
    return pointwise.pointwise(node) if pointwise.is_pointwise(node.target) else None
