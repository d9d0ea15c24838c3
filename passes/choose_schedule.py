"""Which schedule an attention gets, among which ranks, over heads or blocks. Every rank decides alike.

The order of the sequence (contiguous or zigzag) is one for the whole program; within it each attention gets the
schedule that suits its own mask. A plan names both, or with `attention="auto"` both are chosen here, by the time that
the slowest rank would need for each step (`seconds`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import fx

from evocompile.layout import Axis, Sharding, Split
from evocompile.mesh import group_name
from evocompile.plan import Plan
from evocompile.program import InputKind, Note, Program, source_line

from . import schedules
from .attention_report import Sizes, bytes_received, flops, report
from .build import Builder
from .heads import Heads, head_intervals
from .rules.attention import ATTENTION, call_of
from .schedules import Needs, Schedule, union

FLOPS_PER_SECOND, BYTES_PER_SECOND = 200e12, 100e9  # of a device and of its link: what `auto` weighs work and bytes by


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


# --- the schedule of one attention


@dataclass(frozen=True)
class Choice:
    """name: of the schedule. why: it was chosen. falls_back: it is not what the plan names."""

    name: str
    why: str
    schedule: Schedule
    falls_back: bool = False


@lru_cache(maxsize=256)
def choose(plan: Plan, split: Schedule, order: str, sizes: Sizes) -> Choice:
    """The schedule of one attention for this order of the sequence. `split` tells who holds what; it has no jobs yet.

    Sizes but for the batch may decide: they are the same on all ranks, and the batch changes all times alike.
    """
    count = len(split.ranks)
    needs = [[schedules.sees(split.mask, q_part, k_part) for k_part in split.keys] for q_part in split.queries]
    causal = schedules.is_causal(needs)
    rings = Choice("ring", "contiguous chunks" if causal else "queries see later keys", _ring(plan, split, needs))
    if 1 < plan.inner_ring < count:
        rings = replace(rings, name=f"double ring, windows of {plan.inner_ring}")
    if order == "zigzag":
        return replace(rings, name=f"zigzag {rings.name}", why="two chunks a rank even out causal work")
    if count == 1 or plan.attention == "ring" or plan.inner_ring > 1:
        return rings
    if not causal:
        why = f"the mask {split.mask!r} lets queries see later keys; the balanced schedule is for causal masks"
        return replace(rings, why=why, falls_back=plan.attention == "balanced")
    helped = Choice("balanced", "ranks that would idle help others", replace(split, jobs=schedules.balanced(needs)))
    if plan.attention == "balanced":
        return helped
    times = {each.name: seconds(each.schedule, sizes) for each in (rings, helped)}
    best = rings if times[rings.name] <= times[helped.name] else helped
    return replace(best, why=", ".join(f"{name} {_microseconds(time)}" for name, time in times.items()))


def seconds(schedule: Schedule, sizes: Sizes) -> float:
    """A forward's time, if each step takes the longer of the slowest rank's work and its largest receipt."""
    work, received = flops(schedule, sizes), bytes_received(schedule, sizes)
    return sum(
        max(max(step) / FLOPS_PER_SECOND, max(came) / BYTES_PER_SECOND)
        for step, came in zip(zip(*work, strict=True), zip(*received, strict=True), strict=True)
    )


def _ring(plan: Plan, split: Schedule, needs: Needs) -> Schedule:
    if 1 < plan.inner_ring < len(needs):
        return replace(split, jobs=schedules.double_ring(needs, plan.inner_ring), window=plan.inner_ring)
    return replace(split, jobs=schedules.ring(needs))


def _microseconds(time: float) -> str:
    return f"{time * 1e6:.3g} µs"


# --- the order of the sequence


def sequence_length(program: Program) -> int | None:
    """The number of positions that the plan splits: dim 1 of the first input for which it is a length of queries.

    The images of a vision model have channels there, and no input has the length that its attentions have: it is then
    that of the attention with the most work. Without attention, dim 1 of the first input that has one.
    """
    work: dict[int, int] = {}
    for q, k, _, _ in _attentions(program):
        work[q[2]] = work.get(q[2], 0) + q[0] * q[1] * q[2] * k[2]
    given = [each.shape[1] for each in program.inputs_of(InputKind.USER) if len(each.shape) > 1]
    attended = [size for size in given if size in work]
    if attended or not work:
        return next(iter(attended or given), None)
    return max(work, key=lambda size: work[size])


def other_lengths(program: Program, main: int) -> list[int]:
    """The lengths of a model's further sequences, such as an encoder's beside a decoder's.

    They are those of attention of a sequence to itself, and of keys that an input has as its dim 1. Others, as of keys
    after a learned prefix, stay whole.
    """
    given = {each.shape[1] for each in program.inputs_of(InputKind.USER) if len(each.shape) > 1}
    lengths = [k[2] for q, k, _, _ in _attentions(program) if q[2] == k[2] or k[2] in given]
    return [size for size in dict.fromkeys(lengths) if size > 1 and size != main]


def sequence_split(program: Program, size: int) -> Split:
    """How the plan spreads a sequence of `size` positions."""
    plan = program.plan
    if plan.cp == 1:
        return Split("ulysses", plan.ulysses, "contiguous", size)
    inner = ("ulysses", plan.ulysses) if plan.ulysses > 1 else ("", 1)
    orders = {"zigzag": ("zigzag",), "auto": ("contiguous", "zigzag")}.get(plan.attention, ("contiguous",))
    splits = [Split("cp", plan.cp, order, size, (), *inner) for order in orders]
    if len(splits) == 1:
        return splits[0]
    times = [_program_seconds(program, split) for split in splits]
    chosen = splits[1] if times[1] < times[0] else splits[0]
    estimated = ", ".join(f"{order} {_microseconds(time)}" for order, time in zip(orders, times, strict=True))
    why = f"attention takes least time so, by work and bytes: {estimated}"
    program.notes.append(Note(f"sequence in {chosen.order} order", why, "Plan.attention='auto'"))
    return chosen


def _program_seconds(program: Program, split: Split) -> float:
    """The time of all attentions of a captured program whose queries and keys are the whole sequence."""
    plan, total = program.plan, 0.0
    chunks = tuple(split.outer_intervals(i) for i in range(plan.cp))
    known: dict[tuple[object, ...], float] = {}
    for q, k, v, mask in _attentions(program):
        lengths = q[2], k[2]
        if lengths != (split.size, split.size):
            continue
        key = (q, k, v, mask)
        if key not in known:
            sizes = Sizes(-(-q[0] // plan.dp), -(-q[1] // plan.ulysses), -(-k[1] // plan.ulysses), q[3], v[3], 2, 4)
            shares = Schedule((0,) * plan.cp, 0, chunks, chunks, (), mask)
            known[key] = seconds(choose(plan, shares, split.order, sizes).schedule, sizes)
        total += known[key]
    return total


def _attentions(program: Program) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]]:
    assert program.joint is not None
    for node in program.joint.graph.find_nodes(op="call_function", target=ATTENTION):
        call = call_of(node)
        q, k, v = (tuple(each.meta["val"].shape) for each in (call.q, call.k, call.v))
        yield q, k, v, call.mask


# --- at local shapes


def placing_of(builder: Builder, node: fx.Node) -> Placing:
    """The placing of an attention node at local shapes; of a rank alone where the keys are whole."""
    sharding, program, call = builder.sharding, builder.program, call_of(node)
    q, k, v, mask = call.q, call.k, call.v, call.mask
    q_axis, k_axis = _axis(builder, q), _axis(builder, k)
    alone = Schedule((program.rank,), 0, (), (), schedules.ring([[True]]), mask)
    if k_axis is None:
        queries = sharding.intervals(q_axis) if q_axis else ((0, q.meta["val"].shape[2]),)
        return Placing(replace(alone, queries=(queries,), keys=(((0, k.meta["val"].shape[2]),),)))
    assert q_axis is not None
    mesh_axes = sharding.splits[k_axis.name].mesh_axes
    heads = _heads(builder, q, k, q_axis, k_axis) if "ulysses" in mesh_axes else None
    if "cp" not in mesh_axes:
        split = replace(alone, queries=(_places(builder, q_axis, {}),), keys=(_places(builder, k_axis, {}),))
    else:
        ranks = program.mesh.peers(program.rank, {"cp"})
        split = Schedule(
            ranks,
            sharding.coordinate["cp"],
            tuple(_places(builder, q_axis, {"cp": i}) for i in range(len(ranks))),
            tuple(_places(builder, k_axis, {"cp": i}) for i in range(len(ranks))),
            (),
            mask,
        )
    sizes = _sizes(q, k, v, program.plan.ulysses if heads else 1)
    order = sharding.splits[k_axis.name].order if "cp" in mesh_axes else "contiguous"
    choice = choose(program.plan, split, order, sizes)
    if node.target == ATTENTION:
        source = source_line(node)
        shares = [hi - lo for lo, hi in heads.heads["queries"]] if heads else [sizes.heads]
        if choice.falls_back:
            program.notes.append(Note("attention by the ring schedule", choice.why, source))
        program.attentions.append(report(_full_name(choice, heads), choice.why, choice.schedule, sizes, shares, source))
    return Placing(choice.schedule, heads)


def _full_name(choice: Choice, heads: Heads | None) -> str:
    if heads is None:
        return choice.name
    ulysses = f"ulysses over {len(heads.ranks)}"
    return ulysses if len(choice.schedule.ranks) == 1 else f"{ulysses}, {choice.name}"


def _sizes(q: fx.Node, k: fx.Node, v: fx.Node, ulysses: int) -> Sizes:
    """Sizes at the rank with the most heads, alike on all ranks."""
    batch, heads, _, dim = q.meta["val"].shape
    kinds = head_intervals(heads, k.meta["val"].shape[1], ulysses)
    most, most_keys = (max(hi - lo for lo, hi in kinds[kind]) for kind in ("queries", "keys"))  # type: ignore[index]
    dtype = q.meta["val"].dtype
    return Sizes(batch, most, most_keys, dim, v.meta["val"].shape[3], dtype.itemsize, max(4, dtype.itemsize))


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
    split = [factor for factor in builder.layouts[tensor].dims[2] if factor.split]
    assert len(split) <= 1, "attention's solution splits a dim of positions as one axis"
    return split[0].axis if split else None
