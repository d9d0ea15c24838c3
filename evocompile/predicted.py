"""The bytes that a rank sends under a plan, from the costs of a model alone: what its graphs will count.

The states' formulas are those of `costs.py`; attention's are those of `passes/volumes.py`, which know the rank. Exact
where batch, positions and heads divide by the plan's degrees. Over tp, of layers of which a part recomputes, within
what one layer scatters: behind the last one the model's end is computed again too.
"""

from __future__ import annotations

from collections import Counter

from .cluster import Cluster
from .costs import Costs
from .evaluate import Evaluator, degrees_of, mode_of
from .graph_costs import Attention
from .mesh import Mesh
from .passes import volumes
from .passes.attention_report import Sizes
from .passes.heads import head_intervals
from .passes.schedules import length as length_of
from .passes.schedules import seen_keys
from .passes.volumes import Volume
from .plan import Plan

STATES = {"params": "params", "grads": "grads", "refresh": "refresh", "grads_on": "grads.on"}
STATES |= {"grads_copies": "grads.copies", "reduce": "reduce", "gather": "gather"}
TENSOR = {"tp, gather": "gather", "tp, reduce": "reduce"}


def sent_by_purpose(costs: Costs, plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of a step by the purpose of the communicator; of attention's, forward and backward together ("cp")."""
    evaluator = Evaluator(costs, Cluster("cpu-gloo"), costs.folded.batch, costs.folded.sequence)
    mode, part = mode_of(plan, costs.layers)
    sent = evaluator.sent(degrees_of([plan]), mode, plan.attention, part)
    found = Counter({name: round(float(sent[ours][0])) for ours, name in STATES.items()})
    for ours, name in TENSOR.items():
        found[name] += round(float(sent[ours][0]))
    costs = costs.over_tensor(plan.tp)
    again = costs.counts(mode).again
    layers = sum(again.values())
    for kind, count in costs.counts("none").attended.items():
        if kind.lengths != (None, None):
            continue
        forwards = count + (round(plan.recompute_layers * layers) * again[kind] // layers if again else 0)
        for purpose, volume in _attention(costs, kind, plan, rank).items():
            found[purpose] += plan.microbatches * (forwards * volume.forward + count * volume.backward)
    return {name: bytes_ for name, bytes_ in found.items() if bytes_}


def _attention(costs: Costs, kind: Attention, plan: Plan, rank: int) -> dict[str, Volume]:
    coordinate, causal = Mesh.of(plan).coordinate(rank), costs.is_causal(kind)
    kind = kind._replace(heads=kind.heads // (plan.tp if kind.split else 1))
    kind = kind._replace(kv_heads=kind.kv_heads // (plan.tp if kind.split == "heads" else 1))
    length, rows = costs.folded.sequence, costs.folded.batch // plan.dp // plan.microbatches
    own = {name: intervals[coordinate.get("ulysses", 0)] for name, intervals in _heads(kind, plan).items()}
    heads, kv_heads = (hi - lo for lo, hi in (own["queries"], own["keys"]))
    sizes = Sizes(rows, heads, kv_heads, kind.dim, kind.v_dim, kind.itemsize, kind.on_wire)
    found: dict[str, Volume] = {}
    if plan.ulysses > 1:
        whole = sizes._replace(heads=kind.heads, kv_heads=kind.kv_heads)
        counts = [[hi - lo for lo, hi in _heads(kind, plan)[name]] for name in ("queries", "keys")]
        found["ulysses"] = volumes.ulysses(whole, length // plan.cp, *counts, coordinate["ulysses"])
    if plan.cp > 1:
        found |= _blocks(sizes, causal, kind.mask, length, plan, coordinate["cp"])
    return found


def _heads(kind: Attention, plan: Plan) -> dict[str, tuple[tuple[int, int], ...]]:
    return head_intervals(kind.heads, kind.kv_heads, plan.ulysses)  # type: ignore[return-value]


def _blocks(sizes: Sizes, causal: bool, mask: str, length: int, plan: Plan, index: int) -> dict[str, Volume]:
    if not causal and (plan.attention == "ring" or mask == "True"):
        seen = length_of(seen_keys(mask, ((length - 1, length),), ((0, length),)))
        if plan.inner_ring > 1 and seen == length:
            within, between = volumes.double_ring(sizes, length, plan.cp, plan.inner_ring)
            return {"cp": within, "cp.windows": between}
        if seen < length:
            return {"cp": volumes.window(sizes, length, plan.cp, index, seen)}
        return {"cp": volumes.ring(sizes, length, plan.cp, index, causal=False)}
    if plan.attention == "zigzag":
        return {"cp": volumes.zigzag(sizes, length, plan.cp, index)}
    if plan.attention == "balanced":
        return {"cp": volumes.balanced(sizes, length, plan.cp, index)}
    return {"cp": volumes.ring(sizes, length, plan.cp, index, causal=True)}
