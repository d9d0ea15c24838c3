"""Which schedule an attention gets, among which ranks, over heads or blocks. Every rank decides alike."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from evocompile.layout import Axis, Sharding
from evocompile.mesh import group_name
from evocompile.program import Note, source_line

from . import schedules
from .build import Builder
from .heads import Heads, head_intervals
from .rules.attention import ATTENTION
from .schedules import Jobs, Needs, Schedule, union


@dataclass(frozen=True)
class Placing:
    """How one attention is spread. heads: who exchanges parts of the sequence for heads first, None if nobody does."""

    schedule: Schedule
    heads: Heads | None = None

    def groups(self, suffix: str = "") -> tuple[str, str]:
        """The communicators of the steps, and of the blocks that come to a window."""
        ranks = self.schedule.ranks
        if len(ranks) == 1:
            return "", ""
        return group_name("cp" + suffix, ranks), group_name("cp.windows" + suffix, ranks)


def placing_of(builder: Builder, node: fx.Node, q: fx.Node, k: fx.Node, mask: str) -> Placing:
    """The placing of an attention node at local shapes; of a rank alone where the keys are whole."""
    sharding, program = builder.sharding, builder.program
    q_axis, k_axis = _axis(builder, q), _axis(builder, k)
    if k_axis is None:
        queries = sharding.intervals(q_axis) if q_axis else ((0, q.meta["val"].shape[2]),)
        keys = ((0, k.meta["val"].shape[2]),)
        return Placing(Schedule((program.rank,), 0, (queries,), (keys,), schedules.ring([[True]]), mask))
    assert q_axis is not None
    mesh_axes = sharding.splits[k_axis.name].mesh_axes
    heads = _heads(builder, q, k, q_axis, k_axis) if "ulysses" in mesh_axes else None
    if "cp" not in mesh_axes:
        assert heads is not None
        places = (union(heads.places["queries"]), union(heads.places["keys"]))
        alone = Schedule((program.rank,), 0, (places[0],), (places[1],), schedules.ring([[True]]), mask)
        return Placing(alone, heads)
    ranks = program.mesh.peers(program.rank, {"cp"})
    queries_of, keys_of = (
        tuple(_places(builder, axis, {"cp": i}) for i in range(len(ranks))) for axis in (q_axis, k_axis)
    )
    needs = [[schedules.sees(mask, q_part, k_part) for k_part in keys_of] for q_part in queries_of]
    jobs, window = _jobs(builder, node, mask, needs)
    return Placing(Schedule(ranks, sharding.coordinate["cp"], queries_of, keys_of, jobs, mask, window), heads)


def _jobs(builder: Builder, node: fx.Node, mask: str, needs: Needs) -> tuple[Jobs, int]:
    """The table of jobs, and the ranks of an inner ring."""
    program = builder.program
    if program.plan.attention == "balanced":
        if schedules.is_causal(needs):
            return schedules.balanced(needs), 1
        if node.target == ATTENTION:
            why = f"the mask {mask!r} lets queries see later keys; the balanced schedule is for causal masks"
            program.notes.append(Note("attention by the ring schedule", why, source_line(node)))
    window = program.plan.inner_ring
    if 1 < window < len(needs):
        return schedules.double_ring(needs, window), window
    return schedules.ring(needs), 1


def _heads(builder: Builder, q: fx.Node, k: fx.Node, q_axis: Axis, k_axis: Axis) -> Heads:
    program = builder.program
    ranks = program.mesh.peers(program.rank, {"ulysses"})
    counts = q.meta["val"].shape[1], k.meta["val"].shape[1]
    at = [builder.sharding.at(program.mesh.coordinate(rank)) for rank in ranks]
    return Heads(
        ranks,
        builder.sharding.coordinate["ulysses"],
        head_intervals(*counts, len(ranks)),
        {
            "queries": tuple(each.intervals(q_axis) for each in at),
            "keys": tuple(each.intervals(k_axis) for each in at),
        },
        counts[0] // counts[1],
    )


def _places(builder: Builder, axis: Axis, coordinate: dict[str, int]) -> schedules.Intervals:
    """The positions of an axis that the ranks of one cp coordinate hold together."""
    sharding, mesh = builder.sharding, builder.program.mesh
    own = {**sharding.coordinate, **coordinate}
    ulysses = mesh.degree("ulysses") if "ulysses" in own else 1
    seen_from = [Sharding(sharding.splits, {**own, "ulysses": i}) for i in range(ulysses)]
    return union(each.intervals(axis) for each in seen_from)


def _axis(builder: Builder, tensor: fx.Node) -> Axis | None:
    """The logical axis over which dim 2 (positions) of a localised (B, H, S, D) tensor is split."""
    (factor,) = builder.layouts[tensor].dims[2]
    return factor.axis if factor.split else None
