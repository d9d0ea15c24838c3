"""split_attention: every attention becomes the steps of its schedule, visible in the graph.

Ring and zigzag differ only in which positions a rank holds (DESIGN: contiguous chunks, or chunks r and 2P-1-r). At
step t the rank of coordinate r attends its queries to the key/value block of coordinate r-t, which comes straight
from its owner; a block that no query of the receiver may see is neither sent nor waited for. The state (out,
log-sum-exp) is carried from step to step in fp32.

Forward, elements sent per rank, at most: (P-1) · B · S/P · Hk · (D + E): key/value heads are not repeated.
Backward: the same again to fetch the blocks, over a communicator of its own, and as much in fp32 to return their
gradients to the owner, who adds them up.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from evocompile.kernels.mask import Tile, parse_mask
from evocompile.layout import Axis, Interval
from evocompile.mesh import group_ranks
from evocompile.program import Program

from .build import Builder
from .rules.attention import ATTENTION, ATTENTION_BACKWARD

aten, prims = torch.ops.aten, torch.ops.prims
STEP = torch.ops.evocompile.attention_step.default
BACKWARD_STEP = torch.ops.evocompile.attention_backward_step.default

Intervals = tuple[Interval, ...]


@dataclass(frozen=True)
class Ring:
    """One attention's exchange, seen from one rank.

    ranks:   global ranks of the group, by coordinate.
    own:     this rank's coordinate.
    queries: the query positions of each coordinate; keys likewise.
    needs:   needs[i][j]: some query of coordinate i may see a key of coordinate j.
    """

    ranks: tuple[int, ...]
    own: int
    queries: tuple[Intervals, ...]
    keys: tuple[Intervals, ...]
    needs: tuple[tuple[bool, ...], ...]

    @property
    def steps(self) -> range:
        return range(len(self.ranks))

    def source(self, step: int) -> int:
        """Coordinate whose block this rank uses at `step`."""
        return (self.own - step) % len(self.ranks)

    def consumer(self, step: int) -> int:
        """Coordinate that uses this rank's block at `step`."""
        return (self.own + step) % len(self.ranks)

    def receives(self, step: int) -> bool:
        return self.needs[self.own][self.source(step)]

    def sends(self, step: int) -> bool:
        return self.needs[self.consumer(step)][self.own]


def split_attention(program: Program) -> Program:
    """Expands the attention nodes of the joint graph at local shapes, in place."""
    assert program.joint is not None
    builder = Builder(program, in_place=True)
    for node in list(program.joint.graph.nodes):
        if node.target not in (ATTENTION, ATTENTION_BACKWARD):
            continue
        builder.source = node
        with program.joint.graph.inserting_before(node):
            results = _forward(builder, node) if node.target == ATTENTION else _backward(builder, node)
        _replace_results(builder, node, results)
    return replace(program, joint=program.joint)


def _replace_results(builder: Builder, node: fx.Node, results: Sequence[fx.Node]) -> None:
    for use in list(node.users):
        assert use.target is operator.getitem, "the results of an attention are picked with getitem"
        result = results[use.args[1]]  # type: ignore[index]
        builder.layouts[result] = builder.layouts.pop(use)
        use.replace_all_uses_with(result)
        builder.graph.erase_node(use)
    builder.graph.erase_node(node)


def _forward(builder: Builder, node: fx.Node) -> list[fx.Node]:
    q, k, v, tables, mask, scale = node.args
    ring = _ring(builder, q, k, mask)
    group = _group(builder, "cp", ring)
    state: list[fx.Node | None] = [None, None]
    queries = _flat(ring.queries[ring.own])
    block: list[fx.Node] = [k, v]
    # the next block is on its way while this one is attended to
    coming = _fetch(builder, ring, 1, [k, v], group, "keys and values")
    for step in ring.steps:
        if ring.receives(step) or (step == 0):
            args = (q, *block, tables, *state, mask, queries, _flat(ring.keys[ring.source(step)]), scale)
            result = builder.call(STEP, args)
            state = [builder.call(operator.getitem, (result, i)) for i in range(2)]
        if step + 1 in ring.steps:
            block = _arrive(builder, ring, step + 1, coming, [k, v])
            coming = _fetch(builder, ring, step + 2, [k, v], group, "keys and values")
    out, lse = state
    assert out is not None and lse is not None
    return [_cast(builder, out, q.meta["val"].dtype), lse]


def _backward(builder: Builder, node: fx.Node) -> list[fx.Node]:
    d_out, q, k, v, out, lse, tables, mask, scale = node.args
    ring = _ring(builder, q, k, mask)
    group = _group(builder, "cp.backward", ring)
    queries = _flat(ring.queries[ring.own])
    block: list[fx.Node] = [k, v]
    coming = _fetch(builder, ring, 1, [k, v], group, "keys and values, again for backward")
    total: list[fx.Node | None] = [None, None, None]
    returning: tuple[int, fx.Node] | None = None
    for step in ring.steps:
        gradients: list[fx.Node] = []
        if ring.receives(step) or step == 0:
            args = (d_out, q, *block, out, lse, tables, mask, queries, _flat(ring.keys[ring.source(step)]), scale)
            result = builder.call(BACKWARD_STEP, args)
            dq, *gradients = [builder.call(operator.getitem, (result, i)) for i in range(3)]
            total[0] = _add(builder, total[0], dq)
        if step == 0:
            total[1:] = gradients
        else:
            total[1:] = _collect(builder, returning, total[1:], [k, v])
            returning = _return(builder, ring, step, gradients, total[1], [k, v], group)
        if step + 1 in ring.steps:
            block = _arrive(builder, ring, step + 1, coming, [k, v])
            coming = _fetch(builder, ring, step + 2, [k, v], group, "keys and values, again for backward")
    total[1:] = _collect(builder, returning, total[1:], [k, v])
    results = []
    for gradient, operand in zip(total, (q, k, v), strict=True):
        assert gradient is not None
        results.append(_cast(builder, gradient, operand.meta["val"].dtype))
    return results


def _fetch(builder: Builder, ring: Ring, step: int, block: list[fx.Node], group: str, what: str) -> fx.Node | None:
    """Starts the exchange of blocks for `step`; None if this rank neither sends nor receives one."""
    if step not in ring.steps or not (ring.sends(step) or ring.receives(step)):
        return None
    source = ring.ranks[ring.source(step)] if ring.receives(step) else -1
    destination = ring.ranks[ring.consumer(step)] if ring.sends(step) else -1
    shapes = _block_shapes(block, ring.keys[ring.source(step)])
    return builder.exchange(block, destination, source, shapes, block[0].meta["val"], group, f"{what}, step {step}")


def _arrive(builder: Builder, ring: Ring, step: int, coming: fx.Node | None, block: list[fx.Node]) -> list[fx.Node]:
    if coming is None:
        return []
    return builder.receive(coming, _block_shapes(block, ring.keys[ring.source(step)]))


def _return(
    builder: Builder,
    ring: Ring,
    step: int,
    gradients: list[fx.Node],
    like: fx.Node | None,
    block: list[fx.Node],
    group: str,
) -> tuple[int, fx.Node] | None:
    """Starts sending the gradients of the block used at `step` to its owner, and receiving those of the own block."""
    if not (ring.sends(step) or ring.receives(step)):
        return None
    assert like is not None
    destination = ring.ranks[ring.source(step)] if ring.receives(step) else -1
    source = ring.ranks[ring.consumer(step)] if ring.sends(step) else -1
    shapes = _block_shapes(block, ring.keys[ring.own])
    why = f"gradients of keys and values to their owner, step {step}"
    return step, builder.exchange(gradients, destination, source, shapes, like.meta["val"], group, why)


def _collect(
    builder: Builder, returning: tuple[int, fx.Node] | None, total: list[fx.Node | None], block: list[fx.Node]
) -> list[fx.Node | None]:
    """Adds the gradients of the own block that another rank returned."""
    if returning is None:
        return total
    shapes = [list(each.meta["val"].shape) for each in block]
    came = builder.receive(returning[1], shapes)
    return [_add(builder, mine, theirs) for mine, theirs in zip(total, came, strict=True)] if came else total


def _ring(builder: Builder, q: fx.Node, k: fx.Node, mask: str) -> Ring:
    """Who holds what; a single coordinate where the keys are whole."""
    sharding = builder.sharding
    q_axis, k_axis = _axis(builder, q), _axis(builder, k)
    if k_axis is None:
        queries = sharding.intervals(q_axis) if q_axis else ((0, q.meta["val"].shape[2]),)
        own = (builder.program.rank,)
        return Ring(own, 0, (queries,), (((0, k.meta["val"].shape[2]),),), ((True,),))
    assert q_axis is not None
    mesh_axis = sharding.splits[k_axis.name].mesh_axis
    ranks = builder.program.mesh.peers(builder.program.rank, {mesh_axis})
    seen_from = [sharding.at({**sharding.coordinate, mesh_axis: i}) for i in range(len(ranks))]
    queries = tuple(each.intervals(q_axis) for each in seen_from)
    keys = tuple(each.intervals(k_axis) for each in seen_from)
    needs = tuple(tuple(_sees(mask, q_part, k_part) for k_part in keys) for q_part in queries)
    return Ring(ranks, sharding.coordinate[mesh_axis], queries, keys, needs)


def _sees(mask: str, queries: Intervals, keys: Intervals) -> bool:
    predicate = parse_mask(mask)
    return any(predicate.classify(*q_part, *k_part) is not Tile.EMPTY for q_part in queries for k_part in keys)


def _axis(builder: Builder, tensor: fx.Node) -> Axis | None:
    """The logical axis over which dim 2 (positions) of a localised (B, H, S, D) tensor is split."""
    (factor,) = builder.layouts[tensor].dims[2]
    return factor.axis if factor.split else None


def _group(builder: Builder, purpose: str, ring: Ring) -> str:
    if len(ring.ranks) == 1:
        return ""
    group = builder.group(purpose, frozenset({"cp"}))
    assert group_ranks(group) == ring.ranks
    return group


def _block_shapes(block: list[fx.Node], positions: Intervals) -> list[list[int]]:
    count = sum(hi - lo for lo, hi in positions)
    shapes = [list(each.meta["val"].shape) for each in block]
    return [[batch, heads, count, dim] for batch, heads, _, dim in shapes]


def _flat(intervals: Intervals) -> list[int]:
    return [bound for interval in intervals for bound in interval]


def _add(builder: Builder, a: fx.Node | None, b: fx.Node) -> fx.Node:
    return b if a is None else builder.call(aten.add.Tensor, (a, b))


def _cast(builder: Builder, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if value.meta["val"].dtype == dtype:
        return value
    return builder.call(prims.convert_element_type.default, (value, dtype))
