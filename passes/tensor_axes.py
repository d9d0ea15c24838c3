"""Which dims of the weights are split over tp: found from the graph, without names of modules.

A *hidden* axis is one that a matrix product brings in and another one sums away, with nothing between that needs all
of it at once: the hidden units of an MLP, the heads of an attention. If the weights on both sides are split along it,
each rank of tp computes its own part, and what leaves is a sum over the ranks (Megatron-LM, 1909.08053, section 3).

Every dim of every weight is a *root*. One sweep over the forward, by the sharding rules' own labels, follows the roots'
*pieces* (a view divides the dim H·D of a weight into the pieces H and D) and makes classes of those that run together.
Where a later operator divides a piece further, the sweep is done again with the finer pieces.

What is chosen here is never a question of being right: the rules carry any split of the weights exactly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from evocompile.layout import Axis, Dim, Factor, Layout, Split
from evocompile.program import (
    Input,
    InputKind,
    Note,
    OutputKind,
    Program,
    nbytes,
    output_values,
    placeholders,
    source_line,
)

from .dependence import dependents, forward_nodes
from .rules import dims_of
from .rules.attention import ATTENTION, call_of
from .rules.base import Dims, label_sizes, operands_of, result_shapes, shape_of
from .rules.contractions import RULES as CONTRACTIONS
from .rules.routing import is_grouped, labels_of_grouped, moves_rows
from .rules.views import in_parts

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """The part `(index // inner) % size` of the index of a root; root -1: of nothing that is followed."""

    root: int
    inner: int
    size: int


Pieces = tuple[Piece, ...]


@dataclass
class Found:
    """What the sweep learns of one class of pieces.

    consumed: how many products sum it away.
    widest:   whether a product brings in more positions than it sums away; looked_up: whether the model's inputs do.
    reduced:  the reductions that sum over it, or take its maximum.
    whole:    why all of it is needed at once, and where.
    """

    produced: bool = False
    consumed: int = 0
    widest: bool = False
    looked_up: bool = False
    reduced: fx.Node | None = None
    whole: str = ""
    where: fx.Node | None = None

    @property
    def is_hidden(self) -> bool:
        return self.produced and self.consumed > 0 and not self.whole and self.reduced is None

    @property
    def is_vocabulary(self) -> bool:
        """Wide at the model's end, where only reductions leave it, or where its inputs are looked up, or both."""
        ends = self.widest and self.reduced is not None
        return not self.consumed and not self.whole and (ends or (self.looked_up and not self.produced))


@dataclass
class Roots:
    """The roots of one program, their cuts, and the classes of their pieces.

    sizes, owners: of each root, its length, and the weight (a placeholder) and the dim that it is.
    cuts: of each root, the products of sizes from the innermost, between which its pieces are.
    broken: the roots that are viewed in ways that do not fit together.
    """

    sizes: list[int] = field(default_factory=list)
    owners: list[tuple[fx.Node, int]] = field(default_factory=list)
    cuts: list[set[int]] = field(default_factory=list)
    grew: bool = False
    broken: set[int] = field(default_factory=set)
    found: dict[Piece, Found] = field(default_factory=dict)
    _parent: dict[Piece, Piece] = field(default_factory=dict)

    def add(self, owner: fx.Node, dim: int, size: int) -> None:
        self.sizes.append(size)
        self.owners.append((owner, dim))
        self.cuts.append({1, size})

    def forget(self) -> None:
        """Everything but the cuts."""
        self._parent.clear()
        self.found.clear()
        self.grew = False

    def pieces(self, root: int) -> Pieces:
        cuts = sorted(self.cuts[root])
        return tuple(Piece(root, lo, hi // lo) for lo, hi in reversed(list(pairwise(cuts)))) or (Piece(root, 1, 1),)

    def cut(self, piece: Piece, inner: int) -> Pieces:
        """The piece in two, the inner one of size `inner`."""
        if piece.root >= 0:
            at = piece.inner * inner
            cuts = sorted(self.cuts[piece.root] | {at})
            if any(hi % lo for lo, hi in pairwise(cuts)):
                self.broken.add(piece.root)  # viewed in two ways that do not fit together
                return Piece(-1, 1, piece.size // inner), Piece(-1, 1, inner)
            self.grew |= at not in self.cuts[piece.root]
            self.cuts[piece.root].add(at)
        return Piece(piece.root, piece.inner * inner, piece.size // inner), Piece(piece.root, piece.inner, inner)

    def class_of(self, piece: Piece) -> Piece:
        while (parent := self._parent.get(piece, piece)) != piece:
            piece = parent
        return piece

    def known(self, piece: Piece) -> Found:
        return self.found.setdefault(self.class_of(piece), Found())

    def unite(self, a: Piece, b: Piece) -> None:
        if a.root < 0 or b.root < 0:
            return
        first, second = sorted((self.class_of(a), self.class_of(b)), key=lambda p: (p.root, p.inner))
        if first == second:
            return
        of_first, of_second = self.known(first), self.known(second)
        of_first.produced |= of_second.produced
        of_first.consumed += of_second.consumed
        of_first.widest |= of_second.widest
        of_first.looked_up |= of_second.looked_up
        of_first.reduced = of_first.reduced or of_second.reduced
        if not of_first.whole:
            of_first.whole, of_first.where = of_second.whole, of_second.where
        del self.found[second]
        self._parent[second] = first

    def need_whole(self, pieces: Iterable[Piece], why: str, where: fx.Node) -> None:
        for piece in pieces:
            if piece.root >= 0 and not (known := self.known(piece)).whole:
                known.whole, known.where = why, where

    def divide(self, pieces: Pieces, sizes: Sequence[int]) -> list[Pieces] | None:
        """Consecutive parts of these sizes, pieces being cut where they have to be; None where that does not go."""
        rest, parts = [piece for piece in pieces if piece.size != 1], []
        for size in sizes:
            part: list[Piece] = []
            while size > 1:
                if not rest:
                    return None
                piece = rest.pop(0)
                if size % piece.size == 0:
                    part.append(piece)
                    size //= piece.size
                elif piece.size % size == 0:
                    outer, inner = self.cut(piece, piece.size // size)
                    part.append(outer)
                    rest.insert(0, inner)
                    size = 1
                else:
                    return None
            parts.append(tuple(part))
        return None if rest else parts

    def match(self, a: Pieces, b: Pieces, where: fx.Node) -> Pieces:
        """Makes the pieces of two dims that run together the same; returns the finer ones."""
        left, right, matched = list(a), list(b), []
        while left and right:
            x, y = left.pop(0), right.pop(0)
            if x.size > y.size and x.size % y.size == 0:
                x, inner = self.cut(x, x.size // y.size)
                left.insert(0, inner)
            elif y.size > x.size and y.size % x.size == 0:
                y, inner = self.cut(y, y.size // x.size)
                right.insert(0, inner)
            elif x.size != y.size:
                self.need_whole((*a, *b), "two dims that run together are divided differently", where)
                return a
            self.unite(x, y)
            matched.append(x if x.root >= 0 else y)
        return tuple(matched)


def tensor_layouts(program: Program) -> tuple[dict[fx.Node, Layout], dict[str, Split]]:
    """The layouts of the weights that are split over tp, by placeholder, and the splits of their axes."""
    assert program.joint is not None
    degree = program.plan.tp
    roots = _Sweep(program).roots
    members: dict[Piece, list[Piece]] = {}
    for root in range(len(roots.sizes)):
        for piece in roots.pieces(root):
            members.setdefault(roots.class_of(piece), []).append(piece)
    # An axis between two products comes before one that runs through the whole model, as the residual stream does;
    # and one that splits more weights (heads, with keys and values) before one that splits fewer.
    order = sorted(
        members,
        key=lambda each: (roots.found.get(each, Found()).consumed, -len(members[each]), each.root, -each.inner),
    )
    chosen: dict[fx.Node, Piece] = {}
    axes: dict[Piece, Axis] = {}
    for each in order:
        known = roots.found.get(each, Found())
        owners = {roots.owners[piece.root][0] for piece in members[each]}
        if not (known.is_hidden or known.is_vocabulary) or each.size < degree or owners & chosen.keys():
            continue
        if len(owners) < len(members[each]) or any(piece.root in roots.broken for piece in members[each]):
            continue  # a weight with two dims along one axis, or one that is not followed
        axes[each] = Axis(f"tensor{len(axes)}", each.size)
        chosen |= {roots.owners[piece.root][0]: piece for piece in members[each]}
    _note_whole(program, roots, chosen, degree)
    layouts = {node: _layout(roots, node, piece, axes[roots.class_of(piece)]) for node, piece in chosen.items()}
    return layouts, {axis.name: Split("tp", degree, "contiguous", axis.size) for axis in axes.values()}


_PASSES_ON = {aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, torch.ops.prims.convert_element_type.default}


def row_gradients(program: Program, weights: Mapping[fx.Node, Layout]) -> dict[fx.Node, Dim]:
    """The gradients of looked-up rows that are split over tp, with the layout of their rows.

    Each rank makes those of its own rows, from all tokens: fewer bytes than the sum of everybody's terms of all rows.
    """
    assert program.joint is not None
    graph = program.joint.graph
    split = {each.name: weights[node] for node, each in _inputs(program) if node in weights}
    found: dict[fx.Node, Dim] = {}
    for output, node in zip(program.outputs, output_values(graph), strict=True):
        if output.kind is not OutputKind.GRADIENT or output.name not in split or node is None:
            continue
        rows, stack = split[output.name].dims[0], [node]
        while stack and any(factor.split for factor in rows):
            each = stack.pop()
            if each.target == aten.embedding_dense_backward.default:
                found[each] = rows
            elif each.target in _PASSES_ON:
                stack += each.all_input_nodes
    return found


def routed_rows(program: Program, weights: Mapping[fx.Node, Layout]) -> set[fx.Node]:
    """What sorts rows and works on them in that order, where the weights of these rows' groups are split over tp: from
    there on a rank works on all tokens of its tp group, as beside any other split weight."""
    assert program.joint is not None
    graph = program.joint.graph
    for node in graph.nodes:
        if is_grouped(node):
            weight = operands_of(node)[1]
            while weight not in weights and weight.op == "call_function" and len(weight.all_input_nodes) == 1:
                (weight,) = weight.all_input_nodes
            if weight in weights:
                sorts = {each for each in graph.nodes if each.target in (aten.sort.default, aten.sort.stable)}
                return {each for each in dependents(graph, sorts) if moves_rows(each)}
    return set()


def _inputs(program: Program) -> Iterable[tuple[fx.Node, Input]]:
    assert program.joint is not None
    return zip(placeholders(program.joint.graph), program.inputs, strict=True)


def _layout(roots: Roots, weight: fx.Node, chosen: Piece, axis: Axis) -> Layout:
    dims: list[Dim] = [(Factor(size),) for size in shape_of(weight)]
    dim, size = roots.owners[chosen.root][1], roots.sizes[chosen.root]
    around = (Factor(size // (chosen.inner * chosen.size)), Factor(axis.size, axis, split=True), Factor(chosen.inner))
    dims[dim] = tuple(factor for factor in around if factor.split or factor.size > 1)
    return Layout(tuple(dims))


def _note_whole(program: Program, roots: Roots, chosen: dict[fx.Node, Piece], degree: int) -> None:
    """Says of every matrix that is not split why it is not."""
    by_owner: dict[fx.Node, list[Piece]] = {}
    for root, (owner, _) in enumerate(roots.owners):
        by_owner.setdefault(owner, []).extend(roots.pieces(root))
    for owner, pieces in by_owner.items():
        if owner in chosen or len(shape_of(owner)) < 2:
            continue
        found = [(piece, roots.found.get(roots.class_of(piece), Found())) for piece in pieces]
        reasons = [(known.whole, known.where) for _, known in found if known.whole]
        reasons += [
            (f"{known.reduced.target} reduces it", known.reduced)
            for _, known in found
            if known.reduced is not None and not known.whole and not known.is_vocabulary
        ]
        short = [piece for piece, known in found if known.is_hidden or known.is_vocabulary]
        if short:
            reasons = [(f"its axis has {short[0].size} positions, for {degree} ranks", None), *reasons]
        why, where = reasons[0] if reasons else ("no product sums its axes away", None)
        source = source_line(where) if where is not None else ""
        program.notes.append(Note("replicated over tp: a weight", why, source, nbytes(owner.meta["val"])))


class _Sweep:
    """Follows the roots of a program's weights through its forward."""

    def __init__(self, program: Program) -> None:
        assert program.joint is not None
        self.roots = Roots()
        self._dims: dict[fx.Node, list[list[Pieces]]] = {}  # of each node, of each result, the pieces of each dim
        graph, forward = program.joint.graph, forward_nodes(program)
        self._weights: dict[fx.Node, list[int]] = {}
        for node, each in _inputs(program):
            if each.kind is InputKind.PARAMETER:
                first = len(self.roots.sizes)
                for dim, size in enumerate(each.shape):
                    self.roots.add(node, dim, size)
                self._weights[node] = list(range(first, len(self.roots.sizes)))
        given = {node for node, each in _inputs(program) if each.kind is InputKind.USER}
        self._of_inputs = dependents(graph, given)
        nodes = [node for node in graph.nodes if node in forward]
        while True:
            self.roots.forget()
            for node in nodes:
                self._dims[node] = self._visit(node)
            if not self.roots.grew:
                return

    def _visit(self, node: fx.Node) -> list[list[Pieces]]:
        if node in self._weights:
            return [[self.roots.pieces(root) for root in self._weights[node]]]
        if node.op != "call_function" or node.meta["val"] is None:
            return _unnamed(node)
        if node.target is operator.getitem and isinstance(node.args[0].meta["val"], (tuple, list)):  # type: ignore[union-attr]
            return [self._dims[node.args[0]][node.args[1]]]  # type: ignore[index]
        operands = [self._dims[each][0] for each in operands_of(node)]
        if node.target == ATTENTION:
            return self._attention(node)
        grouped = labels_of_grouped(node, [len(each) for each in operands])
        if grouped is not None:
            return self._grouped(node, operands, *grouped)
        return self._by_rule(node, operands)

    def _by_rule(self, node: fx.Node, operands: list[list[Pieces]]) -> list[list[Pieces]]:
        rule = in_parts(node) or dims_of(node)
        if rule is None:
            every = [piece for dims in operands for dim in dims for piece in dim]
            self.roots.need_whole(every, f"{node.target} has no sharding rule", node)
            return _unnamed(node)
        sizes, assigned = label_sizes(rule, node), {}
        for tensor, dims in zip(rule.operands, operands, strict=True):
            for labels, pieces in zip(tensor, dims, strict=True):
                parts = self.roots.divide(pieces, [sizes[label] for label in labels])
                if parts is None:
                    self.roots.need_whole(pieces, "a view breaks it up", node)
                    continue
                for label, part in zip(labels, parts, strict=True):
                    known = assigned.get(label)
                    assigned[label] = part if known is None else self.roots.match(known, part, node)
        kept = {label for tensor in rule.results for labels in tensor for label in labels}
        for label, pieces in assigned.items():
            if label in rule.found and node in self._of_inputs and _wider(rule, sizes, label):
                self._looked_up(pieces)
            elif label in rule.folded or (label in rule.found and not self._weight_of(node)):
                self._reduced(pieces, node)
            elif label in rule.whole:
                self.roots.need_whole(pieces, f"{node.target} needs all of it", node)
            elif label in rule.summed - kept:
                if node.target in CONTRACTIONS:
                    self._consumed(pieces)
                else:
                    self._reduced(pieces, node)
            elif (node.target in CONTRACTIONS or rule.seeds) and _in_one(rule.operands[-2:], label):
                self._produced(pieces, _wider(rule, sizes, label))
        return [
            [
                tuple(
                    piece
                    for label in labels
                    for piece in assigned.get(label) or (Piece(-1, 1, sizes.get(label, size)),)
                )
                for labels, size in zip(tensor, shape, strict=True)
            ]
            if shape is not None
            else []
            for tensor, shape in zip(rule.results, result_shapes(node), strict=True)
        ]

    def _attention(self, node: fx.Node) -> list[list[Pieces]]:
        """Heads run together; of everything else all is needed."""
        call = call_of(node)
        q, k, v = (self._dims[each][0] for each in (call.q, call.k, call.v))
        count, shared = shape_of(call.q)[1], shape_of(call.k)[1]
        parts = self.roots.divide(q[1], [shared, count // shared])
        if parts is None:
            self.roots.need_whole(q[1], "heads are divided otherwise", node)
            parts = [(Piece(-1, 1, shared),), (Piece(-1, 1, count // shared),)]
        for keys in (k[1], v[1]):
            parts[0] = self.roots.match(parts[0], keys, node)
        heads = (*parts[0], *parts[1])
        for each in call.form.params:
            own = self._dims[each][0]
            heads = self.roots.match(heads, own[0], node) if own[0] != heads else heads
        for tensor in (q, k, v):
            for dim in (0, 2, 3):
                self.roots.need_whole(tensor[dim], "attention needs all of it", node)
        batch, _, positions, _ = shape_of(call.q)
        lse = [(Piece(-1, 1, batch),), heads, (Piece(-1, 1, positions),)]
        return [[*lse, (Piece(-1, 1, shape_of(call.v)[3]),)], lse]

    def _grouped(
        self,
        node: fx.Node,
        operands: list[list[Pieces]],
        labels: Sequence[str],
        results: Sequence[str],
    ) -> list[list[Pieces]]:
        """Rows times the weight of their group."""
        assigned: dict[str, Pieces] = {}
        for tensor, dims in zip(labels, operands, strict=True):
            for label, pieces in zip(tensor, dims, strict=True):
                known = assigned.get(label)
                assigned[label] = pieces if known is None else self.roots.match(known, pieces, node)
        self._consumed(assigned.get("k", ()))
        self._produced(assigned.get("n", ()))
        for label in "rg":
            self.roots.need_whole(assigned.get(label, ()), "rows are grouped by it", node)
        return [[assigned[label] for label in result] for result in results]

    def _produced(self, pieces: Pieces, widest: bool = False) -> None:
        for piece in pieces:
            if piece.root >= 0:
                known = self.roots.known(piece)
                known.produced, known.widest = True, known.widest or widest

    def _reduced(self, pieces: Pieces, node: fx.Node) -> None:
        for piece in pieces:
            if piece.root >= 0:
                known = self.roots.known(piece)
                known.reduced = known.reduced or node

    def _looked_up(self, pieces: Pieces) -> None:
        for piece in pieces:
            if piece.root >= 0:
                self.roots.known(piece).looked_up = True

    def _weight_of(self, node: fx.Node) -> bool:
        """Whether what is looked up in is a weight itself."""
        return node.all_input_nodes[0] in self._weights

    def _consumed(self, pieces: Pieces) -> None:
        for piece in pieces:
            if piece.root >= 0:
                self.roots.known(piece).consumed += 1


def _in_one(operands: Iterable[Iterable[Sequence[str]]], label: str) -> bool:
    return sum(any(label in labels for labels in tensor) for tensor in operands) == 1


def _wider(rule: Dims, sizes: Mapping[str, int], label: str) -> bool:
    """Whether a label is longer than what a product sums away, or than the rows that are looked up."""
    others = rule.summed or {"d"} & sizes.keys()
    return bool(others) and all(sizes[label] > sizes[each] for each in others)


def _unnamed(node: fx.Node) -> list[list[Pieces]]:
    return [[(Piece(-1, 1, size),) for size in shape] if shape is not None else [] for shape in result_shapes(node)]
