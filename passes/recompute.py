"""recompute: which layers keep their activations for backward, and which compute them again.

A *layer* is what lies between two cuts of the forward; there is one cut between each attention and the next, where the
fewest bytes are alive: in a transformer, the residual stream alone. A layer that recomputes keeps what is alive at its
cut and, under "attention", its attention's out and log-sum-exp (LightSeq / DistFlashAttn, 2310.03294, section 3.3: the
checkpoint stands behind attention, whose forward and exchanges run once). "full" keeps the cut alone, and so attends
twice, as ordinary checkpoints of layers do. What comes before the first cut (embeddings) and after the last (the head
and the loss, whose backward comes at once) is kept. Regions that the model itself checkpoints
(`torch.utils.checkpoint`) keep what they read and their attentions' results, whatever the plan says.

Backward gets copies of the operators that it has to compute again, each right before its first use, on the graph at
global shapes: so every rank computes the same again, in the same place.

Bytes: a transformer's layer of width D that keeps everything holds about 16 to 34 · B · S · D elements; "attention"
holds 2 · B · S · D (the residual and out) and B · H · S for the log-sum-exp, "full" B · S · D.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from evocompile.errors import PlanError
from evocompile.program import InputKind, Note, OutputKind, Program, nbytes, placeholders

from .dependence import dependents, forward_nodes
from .rules.attention import ATTENTION, ATTENTION_BACKWARD
from .rules.contractions import RULES as CONTRACTIONS
from .rules.pointwise import RANDOM
from .rules.views import SQUEEZES, VIEWS

aten = torch.ops.aten
ALIASES = {
    *VIEWS,
    *SQUEEZES,
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default),
}
_REGION = "ac_graph_id"  # in `meta`, of torch: which checkpoint


@dataclass(frozen=True)
class Layer:
    """The forward between two cuts. attention: its node. kept: what the second cut keeps alive for later layers."""

    nodes: tuple[fx.Node, ...]
    attention: fx.Node
    kept: frozenset[fx.Node]


def recompute(program: Program) -> Program:
    """Gives backward copies of what the plan's layers and the model's own checkpoints compute again, in place."""
    assert program.joint is not None
    mode = program.plan.recompute
    is_checkpointed = any(map(_is_checkpointed, program.joint.graph.nodes))
    if (mode == "none" and not is_checkpointed) or not program.outputs_of(OutputKind.GRADIENT):
        return program
    forward = Forward(program)
    again = forward.checkpointed()
    if mode != "none":
        layers = forward.layers()
        if not layers:
            why = "the forward has no attention between whose calls layers could be cut"
            program.notes.append(Note(f"nothing is computed again for recompute={mode!r}", why, ""))
        for layer, choice in zip(layers, _modes(program, len(layers)), strict=True):
            again |= forward.again(layer, choice)
    _copy_into_backward(program, forward, again)
    return program


def _modes(program: Program, layers: int) -> Sequence[str]:
    """What each layer computes again: as was chosen for each, or the same for the first ones, as what they keep is kept
    the longest."""
    mode = program.plan.recompute
    if not isinstance(mode, str):
        if len(program.again) != layers:
            raise PlanError(
                f"Plan.recompute has a choice for each of {len(program.again)} layers, but the model has {layers}, one "
                "for each attention: give as many choices, or one for all"
            )
        return program.again
    count = round(program.plan.recompute_layers * layers)
    return [mode] * count + ["none"] * (layers - count)


def _is_checkpointed(node: fx.Node) -> bool:
    """Computed inside of a region that the model checkpoints (torch's own mark)."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _may_run(node: fx.Node, mode: str = "attention") -> bool:
    """Whether an operator may run again: attention under "full" only, and no random draw.

    Draws are kept: the parts of a split draw have streams of their own, which a copy need not get again.
    """
    attends = node.target == ATTENTION or (node.target is operator.getitem and node.args[0].target == ATTENTION)  # type: ignore[union-attr]
    drawn = node.target == RANDOM or any(each.target == RANDOM for each in node.all_input_nodes)
    return not drawn and (mode == "full" or not attends)


class Forward:
    """The forward part of a joint graph, and what is alive where.

    nodes:       operators that the outputs depend on, in order.
    activations: those of them that depend on parameters and on inputs; others are small, or shared by all layers.
    """

    def __init__(self, program: Program) -> None:
        assert program.joint is not None
        graph = program.joint.graph
        kinds = dict(zip(placeholders(graph), (each.kind for each in program.inputs), strict=True))
        needed = forward_nodes(program)
        self.nodes = [node for node in graph.nodes if node in needed and node.op == "call_function"]
        of_parameters = dependents(graph, {node for node, kind in kinds.items() if kind is InputKind.PARAMETER})
        of_inputs = dependents(graph, {node for node, kind in kinds.items() if kind is InputKind.USER})
        self.activations = [node for node in self.nodes if node in of_parameters and node in of_inputs]
        self._position = {node: i for i, node in enumerate(self.nodes)}
        self._root = self._roots()

    def _roots(self) -> dict[fx.Node, fx.Node]:
        """For each node the one that owns its memory."""
        roots: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            source = node.args[0] if node.target in ALIASES else None
            roots[node] = roots.get(source, source) if isinstance(source, fx.Node) else node
        return roots

    def _alive(self) -> dict[fx.Node, tuple[int, int]]:
        """For each activation with memory of its own, but for attention's results: its position and its last use's."""
        attended = {node for node in self.nodes if node.target == ATTENTION}
        spans: dict[fx.Node, tuple[int, int]] = {}
        for node in self.activations:
            root = self._root[node]
            if root in attended or (root.target is operator.getitem and root.args[0] in attended):
                continue
            if not isinstance(root.meta.get("val"), torch.Tensor) or root not in self._position:
                continue
            uses = [self._position[user] for user in node.users if user in self._position]
            last = max(uses, default=self._position[node])  # a returned value is its caller's to keep
            first, before = spans.get(root, (self._position[root], 0))
            spans[root] = first, max(before, last)
        return spans

    def layers(self) -> list[Layer]:
        """One for each attention."""
        attentions = [node for node in self.activations if node.target == ATTENTION]
        if not attentions:
            return []
        spans = self._alive()
        alive = [0] * (len(self.nodes) + 1)  # bytes after each node, first as differences
        for root, (first, last) in spans.items():
            alive[first] += nbytes(root.meta["val"])
            alive[last] -= nbytes(root.meta["val"])
        for i in range(1, len(alive)):
            alive[i] += alive[i - 1]
        begins = [max(self._position[each] for each in (node, *node.users)) for node in attentions]
        ends = [self._position[node] for node in attentions]
        start = min(first for first, _ in spans.values())
        cuts = [_fewest(alive, start, ends[0])]
        cuts += [_fewest(alive, begin, end) for begin, end in zip(begins, ends[1:], strict=False)]
        cuts.append(_before_the_head(alive, begins[-1]))
        return [
            self._layer(attention, (lo, hi), spans)
            for attention, (lo, hi) in zip(attentions, pairwise(cuts), strict=True)
        ]

    def _layer(self, attention: fx.Node, bounds: tuple[int, int], spans: dict[fx.Node, tuple[int, int]]) -> Layer:
        lo, hi = bounds
        kept = frozenset(root for root, (first, last) in spans.items() if first <= hi < last)
        nodes = tuple(node for node in self.activations if lo < self._position[node] <= hi)
        return Layer(nodes, attention, kept)

    def checkpointed(self) -> set[fx.Node]:
        """What the model's own checkpoints compute again: all of a region but what others read of it."""
        inside = set(self.nodes)

        def leaves(node: fx.Node) -> bool:
            return any(user in inside and user.meta.get(_REGION) != node.meta.get(_REGION) for user in node.users)

        return {node for node in self.nodes if _is_checkpointed(node) and _may_run(node) and not leaves(node)}

    def again(self, layer: Layer, mode: str) -> set[fx.Node]:
        """What a layer computes again as far as backward needs it."""
        if mode == "none":
            return set()
        return {node for node in layer.nodes if self.root(node) not in layer.kept and _may_run(node, mode)}

    def root(self, node: fx.Node) -> fx.Node:
        return self._root[node]


def _fewest(alive: list[int], begin: int, end: int) -> int:
    """The last position in [begin, end) after which the fewest bytes are alive."""
    return min(range(begin, max(end, begin + 1)), key=lambda i: (alive[i], -i))


def _before_the_head(alive: list[int], begin: int) -> int:
    """The last position behind the last attention at which about as much is alive as right behind it.

    There the last layer ends; the head and the loss follow, where first more is alive (logits), then next to nothing.
    """
    best = begin
    for i in range(begin, len(alive)):
        if alive[i] < alive[begin] / 2:
            break
        if alive[i] <= 1.25 * alive[begin]:
            best = i
    return best


def _copy_into_backward(program: Program, forward: Forward, again: set[fx.Node]) -> None:
    """Copies what backward reads of `again`, and what of it that depends on, each right before its first use.

    What no product is needed for (a norm of what is kept) is copied once more behind an attention's backward, where
    memory is scarce, instead of being alive beside it.
    """
    assert program.joint is not None
    graph = program.joint.graph
    is_forward = set(forward.nodes)
    costly = _costly(forward, again)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in is_forward:
            continue
        for needed in _in_order([each for each in node.all_input_nodes if each in again], again, copies):
            with graph.inserting_before(node):
                copies[needed] = graph.node_copy(needed, lambda each, known=copies: known.get(each, each))  # type: ignore[misc]
        for each in node.all_input_nodes:
            if each in copies:
                node.replace_input_with(each, copies[each])
        if node.target == ATTENTION_BACKWARD:
            copies = {each: copy for each, copy in copies.items() if each in costly}
    graph.lint()
    program.joint.recompile()


def _costly(forward: Forward, again: set[fx.Node]) -> set[fx.Node]:
    """What takes matrix products or attention to have again."""
    costly: set[fx.Node] = set()
    for node in forward.nodes:
        products = node.target in CONTRACTIONS or node.target == ATTENTION
        if node in again and (products or any(each in costly for each in node.all_input_nodes)):
            costly.add(node)
    return costly


def _in_order(wanted: list[fx.Node], again: set[fx.Node], done: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Nodes of `again` that have no copy yet, each behind those that it depends on."""
    found: dict[fx.Node, None] = {}
    stack = list(reversed(wanted))
    while stack:
        node = stack[-1]
        missing = [each for each in node.all_input_nodes if each in again and each not in done and each not in found]
        if missing and node not in done and node not in found:
            stack.extend(reversed(missing))
            continue
        stack.pop()
        if node not in done:
            found[node] = None
    return list(found)
