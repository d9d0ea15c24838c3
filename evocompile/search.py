"""search: the fastest of all legal plans that fit. Memory first, then time; the same result wherever it is run.

Legal are all dp · cp · ulysses · tp = ranks with enough rows, positions and heads to split, tp within a node and where
it splits weights; P | G | O | R nested; each
attention schedule where blocks are exchanged, in each placement; micro-batches that divide the rows, where the call
returns the loss alone; and recomputation of as many layers as it takes to fit, and no more. The closed forms of
`costs.py` are evaluated for all of them with numpy, one (dp, cp, ulysses, tp) at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from .cluster import Cluster
from .costs import SCHEDULES, Costs
from .errors import InfeasibleError
from .evaluate import Degrees, Evaluator, degrees_of, mode_of
from .fold import Folded, fold
from .plan import RECOMPUTE, Plan, Shard
from .precision import Precision
from .program import OutputKind
from .rerank import rates_of, simulated_seconds

GB = 1e9
KEPT = 8  # candidates that the result lists


@dataclass(frozen=True)
class Candidate:
    """A plan with what it is predicted to take. held, spent: bytes and seconds by term.

    simulated: seconds by the simulator on the plan's scheduled graphs, for the best few (`rerank.py`).
    """

    plan: Plan
    seconds: float
    memory: float
    held: Mapping[str, float]
    spent: Mapping[str, float]
    simulated: float | None = None


@dataclass(frozen=True)
class Reason:
    """What another choice would cost: its plan, seconds over the chosen plan's, and whether it fits."""

    instead: str
    plan: Plan
    seconds: float
    memory: float
    fits: bool


@dataclass(frozen=True)
class Found:
    """What `search` returns. candidates: fastest first. considered: legal plans; fitting: those that fit.

    reasons: the neighbours of the chosen plan. notes: choices that were not open.
    """

    cluster: Cluster
    rows: int
    length: int
    candidates: tuple[Candidate, ...]
    reasons: tuple[Reason, ...]
    considered: int
    fitting: int
    took: float
    notes: tuple[str, ...]
    phi: int
    costs: Costs

    @property
    def plan(self) -> Plan:
        return self.candidates[0].plan

    def __str__(self) -> str:
        from .search_report import text

        return text(self)


@dataclass(frozen=True)
class Space:
    """What is open for a model. devices: of a node. heads: the fewest of an attention over the sequence.

    causal: one of them is causal. tensor: degrees of tp, with the fewest heads that each leaves to a rank.
    parts: micro-batches are allowed. sequence: there is attention over it. optimizer: O, if it is fixed.
    """

    ranks: int
    devices: int
    rows: int
    length: int
    heads: int
    causal: bool
    parts: bool
    sequence: bool
    optimizer: int | None = None
    tensor: Mapping[int, int] = field(default_factory=dict)


def search(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any],
    cluster: Cluster,
    *,
    precision: Precision | torch.dtype | str | None = None,
    folded: Folded | None = None,
    simulated: int = 0,
) -> Found:
    """The fastest plans for one call of a model on a cluster. Needs no process group and no memory for the weights.

    inputs: keyword arguments (a mapping) or positional arguments (a sequence) of one call, at global shapes.
    folded: the call's costs, where they are known already (`fold`).
    simulated: how many of the fastest plans are simulated on their scheduled graphs, and listed in that order.
    Raises InfeasibleError if nothing fits.
    """
    if folded is None:
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        folded = fold(model, args, kwargs, Precision.of(precision))
    return search_costs(Costs(folded), cluster, simulated=simulated)


def search_costs(
    costs: Costs,
    cluster: Cluster,
    rows: int | None = None,
    length: int | None = None,
    optimizer: int | None = None,
    parts: bool = True,
    simulated: int = 0,
) -> Found:
    """As `search`, from costs that are known.

    rows, length: of the batch, where it is another one than the captured.
    optimizer:    its degree O, where it is fixed already. parts: whether a plan may have micro-batches.
    simulated:    as for `search`; of the captured batch alone.
    """
    start = time.perf_counter()
    rows, length = rows or costs.folded.batch, length or costs.folded.sequence
    space, notes = space_of(costs, cluster, rows, length)
    space = dataclasses.replace(space, optimizer=optimizer, parts=space.parts and parts)
    evaluator = Evaluator(costs, cluster, rows, length, hides=True)
    best, considered, fitting, leanest = _best(evaluator, space)
    if not best:
        raise InfeasibleError(_infeasible(evaluator, space, leanest), leanest)
    candidates = _simulated(tuple(describe(evaluator, plan) for plan in best), costs.folded, cluster, simulated)
    reasons = tuple(_reasons(evaluator, space, candidates[0]))
    took = time.perf_counter() - start
    return Found(cluster, rows, length, candidates, reasons, considered, fitting, took, notes, costs.phi, costs)


def space_of(costs: Costs, cluster: Cluster, rows: int, length: int) -> tuple[Space, tuple[str, ...]]:
    """What is open, and sentences about what is not."""
    spanning = [kind for kind in costs.kinds if kind.lengths == (None, None)]
    program = costs.folded.program
    users = program.outputs_of(OutputKind.USER)
    parts = len(users) == 1 and not users[0].shape and not program.outputs_of(OutputKind.BUFFER)
    notes = []
    if not spanning:
        notes.append("cp and ulysses are 1: no attention over the sequence was found")
    if not parts:
        notes.append("micro-batches are 1: the call does not return the loss alone")
    causal = any(costs.is_causal(kind) for kind in spanning)
    heads = min((kind.heads for kind in spanning), default=1)
    tensor = {1: heads}
    for degree in divisors(math.gcd(cluster.devices, cluster.world))[1:]:
        if costs.folded.over_tensor(degree) is not None:
            kinds = [kind for kind in costs.over_tensor(degree).kinds if kind.lengths == (None, None)]
            tensor[degree] = min((kind.heads // (degree if kind.split else 1) for kind in kinds), default=1)
    if len(tensor) == 1 and cluster.devices > 1:
        notes.append("tp is 1: no weights were found that it would split")
    space = Space(*(cluster.world, cluster.devices, rows, length, heads, causal, parts, bool(spanning)), tensor=tensor)
    return space, tuple(notes)


# --- the space ------------------------------------------------------------------------------------------------------


def blocks_of(space: Space) -> Iterator[Degrees]:
    """All legal degrees, one (dp, cp, ulysses, tp) after another, but for schedule and recomputation."""
    chains = np.array(list(_chains(space.ranks, space.optimizer)), float).reshape(-1, 3).T
    for dp, cp, u, tp in _splits(space):
        arrangements = list(_arrangements(cp, u, max(space.devices // tp, 1)))
        micro = [k for k in divisors(space.rows // dp) if space.parts and space.rows % (dp * k) == 0] or [1]
        options = np.array([(k, *each) for k in micro for each in arrangements], float).T
        many = np.repeat(chains, options.shape[1], axis=1)
        other = np.tile(options, chains.shape[1])
        ones = np.ones(many.shape[1])
        yield Degrees(dp * ones, cp * ones, u * ones, tp * ones, *many, *other)  # type: ignore[call-arg]


def _splits(space: Space) -> Iterator[tuple[int, int, int, int]]:
    """dp, cp, ulysses, tp."""
    for tp in space.tensor:
        for dp in divisors(space.ranks // tp) if space.ranks % tp == 0 else ():
            for cp in divisors(space.ranks // tp // dp):
                u = space.ranks // tp // dp // cp
                if is_legal(space, dp, cp, u, tp):
                    yield dp, cp, u, tp


def is_legal(space: Space, dp: int, cp: int, u: int, tp: int) -> bool:
    """Whether every rank has rows, two positions for each chunk, and heads."""
    if dp > space.rows or u > space.tensor.get(tp, 0) or 2 * cp * u * tp > max(space.length, 2):
        return False
    return cp * u == 1 or space.sequence


def _arrangements(cp: int, u: int, devices: int) -> Iterator[tuple[bool, int]]:
    """Placements, and the window of a double ring: what a node has of it."""
    for head_first in (True, False) if cp > 1 and u > 1 else (True,):
        window = devices // (u if head_first else 1)
        for inner in [1, *(each for each in (window,) if 1 < each < cp and cp % each == 0)]:
            yield head_first, inner


def _chains(replicas: int, fixed: int | None) -> Iterator[tuple[int, int, int]]:
    """P | G | O | R."""
    for optimizer in divisors(replicas) if fixed is None else [fixed]:
        for grads in divisors(optimizer):
            for params in divisors(grads):
                yield params, grads, optimizer


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def schedules_of(space: Space, cp: int, inner: int = 1) -> list[str]:
    if cp == 1:
        return ["zigzag"]
    return [each for each in SCHEDULES if each != "balanced" or (space.causal and inner == 1)]


# --- the best -------------------------------------------------------------------------------------------------------


def _best(evaluator: Evaluator, space: Space) -> tuple[list[Plan], int, int, Plan]:
    """The fastest plans, how many were considered and fit, and the one that needs least memory."""
    found: list[tuple[float, float, Plan]] = []
    considered = fitting = 0
    leanest: tuple[float, Plan] | None = None
    for plans in blocks_of(space):
        values = evaluator.values(plans)
        for mode in RECOMPUTE if evaluator.costs.counts("none").attended else RECOMPUTE[:1]:
            memory, part = evaluator.smallest(plans, mode, values)
            fits = memory <= evaluator.cluster.device.memory
            for schedule in schedules_of(space, int(plans.cp[0])):
                legal = plans.inner == 1 if schedule == "balanced" else np.ones_like(fits)
                considered, fitting = considered + int(legal.sum()), fitting + int((fits & legal).sum())
                least = int(np.argmin(np.where(legal, memory, np.inf)))
                if leanest is None or memory[least] < leanest[0]:
                    leanest = float(memory[least]), plan_of(plans, least, mode, schedule, part[least])
                rows = np.flatnonzero(fits & legal)
                if len(rows):
                    here = {name: each[rows] if np.ndim(each) else each for name, each in values.items()}
                    seconds = evaluator.seconds(plans.take(rows), mode, schedule, part[rows], here)
                    for i in _fastest(seconds):
                        plan = plan_of(plans, int(rows[i]), mode, schedule, part[rows[i]])
                        found.append((float(seconds[i]), float(memory[rows[i]]), plan))
    if leanest is None:
        raise InfeasibleError(
            f"a batch of {space.rows} x {space.length} positions, with attention of {space.heads} heads, cannot be "
            f"split over {space.ranks} ranks: every rank needs rows, or two positions"
            + ("" if space.sequence else ", and without attention over the sequence only rows are split")
        )
    found.sort(key=lambda each: (_rounded(each[0]), *simplicity(each[2])))
    return [plan for *_, plan in found[:KEPT]], considered, fitting, leanest[1]


def _simulated(
    candidates: tuple[Candidate, ...], folded: Folded, cluster: Cluster, count: int
) -> tuple[Candidate, ...]:
    """The candidates, the first `count` of them in the order of the simulator."""
    rates = rates_of(cluster)
    first = [
        dataclasses.replace(each, simulated=simulated_seconds(folded, each.plan, rates)) for each in candidates[:count]
    ]
    first.sort(key=lambda each: (_rounded(each.simulated or 0.0), *simplicity(each.plan)))
    return (*first, *candidates[count:])


def _fastest(seconds: Any) -> Any:
    """Rows of the `KEPT` fastest, and of all that are as fast as the last of these."""
    if len(seconds) <= KEPT:
        return range(len(seconds))
    worst = np.partition(seconds, KEPT - 1)[KEPT - 1]
    return np.flatnonzero(seconds <= worst * (1 + 1e-5))[: 8 * KEPT]


def _rounded(value: float) -> float:
    """Without the digits of which nothing is known, and in the last of which machines may differ."""
    return float(f"{value:.5g}")


def simplicity(plan: Plan) -> tuple[Any, ...]:
    """Of plans that take as long, the first has fewer exchanges, in smaller groups."""
    shard = plan.shard_degrees
    degrees = (plan.cp * plan.ulysses * plan.tp, plan.tp, plan.cp, plan.inner_ring, plan.microbatches)
    return (*degrees, shard.params, shard.grads, shard.optimizer, str(plan))


def plan_of(plans: Degrees, i: int, mode: str, schedule: str, part: float) -> Plan:
    dp, cp, u, tp, params, grads, optimizer, k, head_first, inner = (int(each[i]) for each in plans)
    return Plan(
        dp=dp,
        cp=cp,
        ulysses=u,
        tp=tp,
        shard=Shard(params, grads, optimizer),
        attention=schedule,
        placement="head-first" if head_first else "context-first",
        inner_ring=inner,
        recompute=mode,
        recompute_layers=float(part) if mode != "none" else 1.0,
        microbatches=k,
    )


def describe(evaluator: Evaluator, plan: Plan) -> Candidate:
    """What one plan is predicted to take, fit or not."""
    plans = degrees_of([plan])
    schedule = plan.attention if plan.attention in SCHEDULES else "zigzag"
    mode, part = mode_of(plan, evaluator.costs.layers)
    held = {name: float(each[0]) for name, each in evaluator.held(plans, mode, part).items()}
    spent = {name: float(each[0]) for name, each in evaluator.spent(plans, mode, schedule, part).items()}
    return Candidate(plan, sum(spent.values()), sum(held.values()), held, spent)


# --- reasons --------------------------------------------------------------------------------------------------------


def _reasons(evaluator: Evaluator, space: Space, chosen: Candidate) -> Iterator[Reason]:
    for instead, plan in neighbours(space, chosen.plan):
        other = describe(evaluator, plan)
        fits = other.memory <= evaluator.cluster.device.memory
        yield Reason(instead, plan, other.seconds - chosen.seconds, other.memory, fits)


def neighbours(space: Space, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plans that differ in one choice."""
    change = dataclasses.replace
    shard = plan.shard_degrees
    names = ("dp", "cp", "ulysses", "tp")
    for take, give in itertools.permutations(names, 2):
        if getattr(plan, take) % 2 == 0:
            other = {take: getattr(plan, take) // 2, give: getattr(plan, give) * 2}
            degrees = {name: other.get(name, getattr(plan, name)) for name in names}
            inner = plan.inner_ring if degrees["cp"] % plan.inner_ring == 0 else 1
            parts = degrees["dp"] * plan.microbatches <= space.rows
            if parts and is_legal(space, *degrees.values()):
                what = ", ".join(f"{name} {degree}" for name, degree in other.items())
                yield what, change(plan, **degrees, inner_ring=inner)
    for name, nested in _shards(shard, plan.replicas):
        if space.optimizer in (None, nested.optimizer):
            yield name, change(plan, shard=nested)
    for schedule in schedules_of(space, plan.cp, plan.inner_ring):
        if schedule != plan.attention:
            yield f"attention {schedule}", change(plan, attention=schedule)
    for mode in RECOMPUTE:
        if mode != plan.recompute:
            yield f"recompute {mode}", change(plan, recompute=mode, recompute_layers=1.0)
    for k in (plan.microbatches * 2, plan.microbatches // 2):
        if space.parts and k and space.rows % (plan.dp * k) == 0:
            yield f"{k} micro-batches", change(plan, microbatches=k)


def _shards(shard: Shard, replicas: int) -> Iterator[tuple[str, Shard]]:
    """One step up or down in one degree, where they still nest."""
    for name in ("params", "grads", "optimizer"):
        for degree in (getattr(shard, name) * 2, getattr(shard, name) // 2):
            degrees = {**dataclasses.asdict(shard), name: degree}
            p, g, o = degrees["params"], degrees["grads"], degrees["optimizer"]
            if min(degrees.values()) >= 1 and g % p == 0 and o % g == 0 and replicas % o == 0:
                yield f"{'PGO'[('params', 'grads', 'optimizer').index(name)]} = {degree}", Shard(p, g, o)


def _infeasible(evaluator: Evaluator, space: Space, leanest: Plan) -> str:
    """What is short, and what would fit."""
    needs = describe(evaluator, leanest)
    memory = evaluator.cluster.device.memory
    terms = ", ".join(f"{name} {_size(size)}" for name, size in needs.held.items() if size > 0.01 * needs.memory)
    return (
        f"no plan fits {evaluator.cluster}: the leanest, {leanest}, needs {_size(needs.memory)} on a device, "
        f"{_size(needs.memory - memory)} more than its {_size(memory)} ({terms}). {_nearest(evaluator, space)}"
    )


def _size(size: float) -> str:
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
    name = next((name for name, unit in units.items() if size >= unit), "bytes")
    return f"{size / units[name]:.4g} {name}"


def _nearest(evaluator: Evaluator, space: Space) -> str:
    """The smallest change of the cluster, then of the batch, with which a plan fits."""
    cluster = evaluator.cluster
    for factor in (2, 4, 8, 16, 32, 64):
        larger = dataclasses.replace(cluster, nodes=cluster.nodes * factor)
        grown = dataclasses.replace(space, ranks=larger.world, optimizer=None)
        plan = _fitting(dataclasses.replace(evaluator, cluster=larger), grown)
        if plan is not None:
            return f"The nearest that fits: {larger.nodes} nodes, with {plan}."
    for factor in (2, 4, 8, 16, 32, 64):
        length = space.length // factor
        if length >= 2:
            plan = _fitting(dataclasses.replace(evaluator, length=length), dataclasses.replace(space, length=length))
            if plan is not None:
                return f"The nearest that fits: sequences of {length} positions, with {plan}."
    return "Not even 64 times as many nodes, or a 64th of the length, would do."


def _fitting(evaluator: Evaluator, space: Space) -> Plan | None:
    """The fastest plan that fits; `None` where none does, or the batch cannot be split so far."""
    try:
        best, *_ = _best(evaluator, space)
    except InfeasibleError:
        return None
    return best[0] if best else None
