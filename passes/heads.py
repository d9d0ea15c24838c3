"""Ulysses: parts of the sequence are exchanged for heads around an attention, and back (2309.14509, section 3).

Before: every rank of the group holds all heads at its own positions. After: it holds its own heads at the positions of
all. Heads need not divide: query heads are dealt out in intervals as even as possible, and each rank gets exactly the
key/value heads that its query heads read; a head that two ranks need goes to both. One all-to-all carries q, k and v.
The backward takes what the forward had exchanged, so that only the gradient of the output goes, and those of q, k and v
come back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import fx

from evocompile.collectives import unpack
from evocompile.layout import Interval
from evocompile.mesh import group_name

from .build import Builder
from .exchanges import places
from .schedules import Intervals, length, union

aten, prims = torch.ops.aten, torch.ops.prims
Kind = Literal["queries", "keys"]  # whose heads and positions the dims 1 and 2 of a tensor are


@dataclass(frozen=True)
class Heads:
    """Who holds what in one group, seen from the rank of coordinate `own`.

    ranks:   global ranks by coordinate.
    heads:   the heads of each coordinate while heads are split, by kind.
    places:  the positions of each coordinate while the sequence is split, by kind.
    repeats: query heads for each key/value head.
    """

    ranks: tuple[int, ...]
    own: int
    heads: dict[Kind, tuple[Interval, ...]]
    places: dict[Kind, tuple[Intervals, ...]]
    repeats: int

    @property
    def queries(self) -> Interval:
        """This rank's query heads."""
        return self.heads["queries"][self.own]

    def group(self, suffix: str = "") -> str:
        return group_name("ulysses" + suffix, self.ranks)

    @property
    def shared(self) -> bool:
        """Whether a key/value head is at several ranks, whose gradients have to be summed."""
        return sum(hi - lo for lo, hi in self.heads["keys"]) > self.heads["keys"][-1][1]


def head_intervals(heads: int, kv_heads: int, degree: int) -> dict[Kind, tuple[Interval, ...]]:
    """The query heads of each of `degree` ranks, and the key/value heads that these read; perhaps none."""
    repeats = heads // kv_heads
    queries = tuple((heads * i // degree, heads * (i + 1) // degree) for i in range(degree))
    keys = tuple((lo // repeats, -(-hi // repeats) if lo < hi else lo // repeats) for lo, hi in queries)
    return {"queries": queries, "keys": keys}


# --- exchanging


def to_heads(
    builder: Builder, split: Heads, tensors: Sequence[fx.Node], kinds: Sequence[Kind], group: str, why: str
) -> list[fx.Node]:
    """(B, all heads, own positions, …) → (B, own heads, all positions in order, …), in one message for all tensors."""
    count = len(split.ranks)
    pieces = [
        [
            builder.call(aten.slice.Tensor, (tensor, 1, *split.heads[kind][to]))
            for tensor, kind in zip(tensors, kinds, strict=True)
        ]
        for to in range(count)
    ]

    def shape(tensor: fx.Node, kind: Kind, sender: int) -> list[int]:
        lo, hi = split.heads[kind][split.own]
        batch, _, _, *rest = tensor.meta["val"].shape
        return [batch, hi - lo, length(split.places[kind][sender]), *rest]

    shapes = [
        [shape(tensor, kind, sender) for tensor, kind in zip(tensors, kinds, strict=True)] for sender in range(count)
    ]
    came = _all_to_all(builder, pieces, shapes, group, why)
    return [_in_order(builder, split.places[kind], [each[i] for each in came]) for i, kind in enumerate(kinds)]


def to_sequence(
    builder: Builder, split: Heads, tensors: Sequence[fx.Node], kinds: Sequence[Kind], group: str, why: str
) -> list[fx.Node]:
    """The inverse of `to_heads`. A head that several ranks hold becomes the sum of theirs."""
    count = len(split.ranks)
    everywhere = {kind: union(places_) for kind, places_ in split.places.items()}
    pieces = [
        [
            _at(builder, tensor, places(everywhere[kind], split.places[kind][to]))
            for tensor, kind in zip(tensors, kinds, strict=True)
        ]
        for to in range(count)
    ]

    def shape(tensor: fx.Node, kind: Kind, sender: int) -> list[int]:
        lo, hi = split.heads[kind][sender]
        batch, _, _, *rest = tensor.meta["val"].shape
        return [batch, hi - lo, length(split.places[kind][split.own]), *rest]

    shapes = [
        [shape(tensor, kind, sender) for tensor, kind in zip(tensors, kinds, strict=True)] for sender in range(count)
    ]
    came = _all_to_all(builder, pieces, shapes, group, why)
    return [_whole_heads(builder, split.heads[kind], [each[i] for each in came]) for i, kind in enumerate(kinds)]


def _all_to_all(
    builder: Builder, pieces: list[list[fx.Node]], shapes: list[list[list[int]]], group: str, why: str
) -> list[list[fx.Node]]:
    """Sends pieces[i] to the i-th rank of the group; what came from each, of these shapes."""
    flat = [builder.call(aten.reshape.default, (piece, [-1])) for row in pieces for piece in row]
    sent = [sum(piece.meta["val"].numel() for piece in row) for row in pieces]
    received = [sum(map(math.prod, row)) for row in shapes]
    start = builder.all_to_all(builder.call(aten.cat.default, (flat,)), received, sent, group, why)
    parts = builder.call(unpack, (builder.wait(start), [shape for row in shapes for shape in row]))
    each = iter(range(sum(map(len, shapes))))
    return [[builder.call(operator.getitem, (parts, next(each))) for _ in row] for row in shapes]


def _at(builder: Builder, tensor: fx.Node, where: Intervals) -> fx.Node:
    """Rows of dim 2. A concatenation also of one part: every rank has the same operators."""
    parts = [builder.call(aten.slice.Tensor, (tensor, 2, lo, hi)) for lo, hi in where or ((0, 0),)]
    return parts[0] if len(parts) == 1 else builder.call(aten.cat.default, (parts, 2))


def _in_order(builder: Builder, held: Sequence[Intervals], parts: Sequence[fx.Node]) -> fx.Node:
    """The parts of all ranks in the order of their positions."""
    pieces = []
    for intervals, part in zip(held, parts, strict=True):
        for lo, hi in intervals:
            (where,) = places(intervals, ((lo, hi),))
            pieces.append((lo, builder.call(aten.slice.Tensor, (part, 2, *where))))
    ordered = [piece for _, piece in sorted(pieces, key=lambda each: each[0])]
    return builder.call(aten.cat.default, (ordered or [parts[0]], 2))


def _whole_heads(builder: Builder, heads: Sequence[Interval], parts: Sequence[fx.Node]) -> fx.Node:
    """All heads from the intervals that each rank holds."""
    cuts = sorted({bound for interval in heads for bound in interval})
    whole = []
    for lo, hi in pairwise(cuts):
        there = [
            builder.call(aten.slice.Tensor, (part, 1, lo - first, hi - first))
            for (first, last), part in zip(heads, parts, strict=True)
            if first <= lo and hi <= last
        ]
        total = there[0]
        for each in there[1:]:
            total = builder.call(aten.add.Tensor, (total, each))
        whole.append(total)
    return builder.call(aten.cat.default, (whole, 1))


# --- key/value heads that do not divide among the query heads


def _readers(split: Heads) -> list[int]:
    """For each of this rank's key/value heads, how many of its query heads read it."""
    first, last = split.queries
    return [
        min(last, (head + 1) * split.repeats) - max(first, head * split.repeats)
        for head in range(*split.heads["keys"][split.own])
    ]


def for_each_query_head(builder: Builder, split: Heads, keys: fx.Node) -> fx.Node:
    """Keys or values as the attention operators take them: as often repeated as needed where the numbers of query heads
    differ between key/value heads, else as they are."""
    readers = _readers(split)
    if len(set(readers)) <= 1:
        return keys
    shape = list(keys.meta["val"].shape)
    parts = [
        builder.call(
            aten.expand.default,
            (builder.call(aten.slice.Tensor, (keys, 1, i, i + 1)), [shape[0], count, *shape[2:]]),
        )
        for i, count in enumerate(readers)
    ]
    return builder.call(aten.cat.default, (parts, 1))


def for_each_key_head(builder: Builder, split: Heads, gradient: fx.Node) -> fx.Node:
    """The gradient of what was repeated."""
    readers = _readers(split)
    if len(set(readers)) <= 1:
        return gradient
    parts, first = [], 0
    for count in readers:
        part = builder.call(aten.slice.Tensor, (gradient, 1, first, first + count))
        parts.append(builder.call(aten.sum.dim_IntList, (part, [1], True)))
        first += count
    return builder.call(aten.cat.default, (parts, 1))
