"""Regions of a joint graph that widen rows and narrow them again: the logits and their loss, the inside of an MLP.

A region grows from one matrix product with more columns than its operand: through everything elementwise, views and
scatters, forward and backward, as long as values are as wide. Other products and reductions end it: they are its
*exits* (a loss for each row, the next product, gradients of the weights). Nothing is told by a model's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from evocompile.collectives import is_boundary
from evocompile.program import Region

from .rules import dims_of
from .rules.contractions import RULES as CONTRACTIONS
from .rules.pointwise import CONSTANTS
from .rules.views import SQUEEZES, VIEWS

aten = torch.ops.aten
LOOKS = {
    *VIEWS,
    *SQUEEZES,
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.alias.default, aten.detach.default),
}


def elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return sum(math.prod(each.shape) for each in values if isinstance(each, torch.Tensor))


def row_operand(product: fx.Node) -> fx.Node:
    """The operand of a matrix product whose rows its result has."""
    operand = product.args[1 if product.target == aten.addmm.default else 0]
    assert isinstance(operand, fx.Node)
    return operand


def seen_through(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while node.target in LOOKS:
        node = node.all_input_nodes[0]
    return node


def widening_products(graph: fx.Graph, of_inputs: set[fx.Node], of_tangents: set[fx.Node]) -> list[fx.Node]:
    """Products of rows and a weight with more columns than their operand, the largest first; those of gradients not.

    of_inputs, of_tangents: what depends on them.
    """
    found = [
        node
        for node in graph.nodes
        if node.target in (aten.mm.default, aten.addmm.default)
        and node not in of_tangents
        and node.args[-1] not in of_inputs
        and elements(node) > elements(row_operand(node))
    ]
    return sorted(found, key=elements, reverse=True)


@dataclass(frozen=True)
class Finder:
    """Finds regions in one graph.

    forward:     what its outputs, gradients left out, depend on.
    of_tangents: what depends on tangents; the rest of backward is the forward again.
    """

    graph: fx.Graph
    forward: set[fx.Node]
    of_tangents: set[fx.Node]

    def _phase(self, node: fx.Node) -> int:
        return 0 if node in self.forward else 2 if node in self.of_tangents else 1

    def region(self, seed: fx.Node) -> Region:
        members = self._members(seed)
        exits = dict.fromkeys(
            user for node in members for user in node.users if user.op != "output" and user not in members
        )
        between = self._between(members, exits)
        exits |= self._sums(exits)
        return Region(seed, frozenset(members), frozenset(exits), frozenset(between))

    def _members(self, seed: fx.Node) -> dict[fx.Node, None]:
        wide = elements(seed)

        def belongs(node: fx.Node) -> bool:
            computes = isinstance(node.meta.get("val"), torch.Tensor) and node.op == "call_function"
            computes = computes and not is_boundary(node) and node.target not in CONSTANTS
            return computes and 2 * elements(node) >= wide and dims_of(node) is not None

        members, stack = {seed: None}, [seed]
        while stack:
            node = stack.pop()
            near: Iterable[fx.Node] = [user for user in node.users if user.target not in CONTRACTIONS]
            if node.target not in CONTRACTIONS:
                near = [*near, *node.all_input_nodes]
            for each in near:
                if each not in members and belongs(each):
                    members[each] = None
                    stack.append(each)
        return members

    def _sums(self, exits: dict[fx.Node, None]) -> dict[fx.Node, None]:
        """Sums of two exits that nothing else reads, with the views between: the gradients of gate's and up's input."""
        found: dict[fx.Node, None] = {}
        for node in exits:
            user, looks = node, []
            while len(user.users) == 1 and (user is node or user.target in LOOKS):
                looks.append(user)
                (user,) = user.users
            both = [seen_through(each) for each in user.all_input_nodes]
            own = len(both) == 2 and all(each in exits and len(each.users) == 1 for each in both)
            if user.target == aten.add.Tensor and own and self._phase(both[0]) == self._phase(both[1]):
                found |= dict.fromkeys((*looks[1:], user))
        return found

    def _between(self, members: dict[fx.Node, None], exits: dict[fx.Node, None]) -> Iterator[fx.Node]:
        """What lies on a way from an exit back into the region, each within the forward, its copy, or backward."""
        position = {node: i for i, node in enumerate(self.graph.nodes)}
        for phase in range(3):
            inside = [node for node in members if self._phase(node) == phase]
            last = max((position[node] for node in inside), default=-1)
            reached: dict[fx.Node, None] = {}
            stack = [node for node in exits if self._phase(node) == phase]
            while stack:
                for user in stack.pop().users:
                    known = user in reached or user in members or user in exits
                    if not known and position[user] < last and self._phase(user) == phase:
                        reached[user] = None
                        stack.append(user)
            back: set[fx.Node] = set()
            for node in sorted(reached, key=position.__getitem__, reverse=True):
                if any(user in members or user in back for user in node.users):
                    back.add(node)
            yield from back


def is_loss(region: Region, forward: set[fx.Node]) -> bool:
    """Whether the forward leaves little of each row, by reductions, and nothing like a row's input."""
    ends = [node for node in region.exits if node in forward]
    narrow = all(node.target not in CONTRACTIONS and 4 * elements(node) <= elements(region.seed) for node in ends)
    return region.seed in forward and narrow
