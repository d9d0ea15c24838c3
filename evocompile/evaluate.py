"""Costs of many plans at once: expressions compiled with numpy, and the groups of each plan on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import sympy

from .cluster import Cluster
from .collective_costs import Group, group
from .costs import Costs
from .errors import PlanError
from .plan import RECOMPUTE, Plan

Array = Any


class Degrees(NamedTuple):
    """Plans as arrays of one length. k: micro-batches. head_first: placement. inner: ranks of an inner ring."""

    dp: Array
    cp: Array
    u: Array
    tp: Array
    P: Array
    G: Array
    O: Array  # noqa: E741
    k: Array
    head_first: Array
    inner: Array

    def take(self, rows: Array) -> Degrees:
        return Degrees(*(each[rows] for each in self))


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A model's costs on a cluster, for a batch of `rows` x `length`. hides: traffic of states hides behind work."""

    costs: Costs
    cluster: Cluster
    rows: int
    length: int
    hides: bool = False

    @cached_property
    def _known(self) -> dict[str, float]:
        """Values of the symbols that are the same for all plans."""
        device = self.cluster.device
        found = {f"F_{dtype}": device.peak(dtype) * device.linear for dtype in self.costs.dtypes}
        dtypes = [{2: "bfloat16", 4: "float32", 8: "float64"}[kind.itemsize] for kind in self.costs.kinds]
        found["F_attention"] = min((device.peak(each) for each in dtypes), default=1.0) * device.attention
        found |= {"W_memory": device.memory_bandwidth, "W_inside": self.cluster.inside.bandwidth}
        found["t_operator"] = device.operator
        return {**found, **self.costs.pairs(self.length), "S": float(self.length), "hides": float(self.hides)}

    def _costs(self, plans: Degrees) -> Costs:
        """Plans that are evaluated together have one tp."""
        degrees = np.unique(plans.tp)
        assert len(degrees) == 1, f"plans of several degrees of tp: {degrees}"
        return self.costs.over_tensor(int(degrees[0]))

    def _call(
        self, costs: Costs, key: tuple[str, ...], expressions: Sequence[sympy.Expr], values: dict[str, Array]
    ) -> list[Array]:
        if key not in costs.functions:
            symbols = sorted(set().union(*(each.free_symbols for each in expressions)), key=str)
            function = sympy.lambdify(symbols, list(expressions), "numpy", cse=False)
            costs.functions[key] = [str(each) for each in symbols], function
        names, function = costs.functions[key]
        results = function(*(values[name] for name in names))
        return [np.broadcast_to(np.asarray(each, float), values["dp"].shape) for each in results]

    def values(self, plans: Degrees, groups: bool = True) -> dict[str, Array]:
        """All symbols but r. Batches that do not divide take as long as those of the rank with most rows."""
        parts = plans.dp * plans.k
        found: dict[str, Array] = {**self._known, **plans._asdict()}
        found["B"] = np.ceil(self.rows / parts) * parts
        for purpose, each in self._groups(plans).items() if groups else ():
            found |= {
                f"W_{purpose}": each.bandwidth,
                f"V_{purpose}": each.own,
                f"t_{purpose}": each.ring,
                f"a_{purpose}": each.tree,
                f"h_{purpose}": each.hop,
                f"x_{purpose}": each.outside,
            }
        return found

    def _groups(self, plans: Degrees) -> dict[str, Group]:
        near, ones = plans.tp, np.ones_like(plans.tp)  # ranks of tp are neighbours
        replicas = plans.dp * plans.cp * plans.u * plans.tp
        cp_stride = np.where(plans.head_first, plans.u, 1) * near
        u_stride = np.where(plans.head_first, 1, plans.cp) * near
        found = {
            name: group(self.cluster, ranks, stride)
            for name, ranks, stride in (
                ("params", plans.P, ones),
                ("grads", plans.G, ones),
                ("refresh", plans.O / plans.P, plans.P),
                ("grads_on", plans.O / plans.G, plans.G),
                ("grads_copies", replicas / plans.O, plans.O),
                ("cp", plans.cp, cp_stride),
                ("ulysses", plans.u, u_stride),
                ("tp", plans.tp, ones),
                ("reduce", replicas, ones),
            )
        }
        windows = plans.cp / plans.inner
        cross, within = windows - 1, (plans.inner - 1) * windows
        inside = group(self.cluster, plans.inner, cp_stride).own
        double = np.maximum(plans.cp - 1, 1) / np.maximum(cross / found["cp"].own + within / inside, 1e-30)
        found["cp"] = found["cp"]._replace(own=np.where(plans.inner > 1, double, found["cp"].own))
        return found

    # --- results

    def held(self, plans: Degrees, mode: str, part: Array) -> dict[str, Array]:
        """Bytes by term."""
        costs = self._costs(plans)
        return self._terms(costs, ("held", mode), costs.held(mode), {**self.values(plans, groups=False), "r": part})

    def spent(self, plans: Degrees, mode: str, schedule: str, part: Array) -> dict[str, Array]:
        """Seconds by what they are spent on."""
        costs = self._costs(plans)
        values = {**self.values(plans), "r": part}
        return self._terms(costs, ("spent", mode, schedule), costs.seconds(mode, schedule), values)

    def sent(self, plans: Degrees, mode: str, schedule: str, part: Array) -> dict[str, Array]:
        """Bytes that a rank sends by purpose."""
        costs = self._costs(plans)
        values = {**self.values(plans, groups=False), "r": part}
        return self._terms(costs, ("sent", mode, schedule), costs.sent(mode, schedule), values)

    def _terms(
        self, costs: Costs, key: tuple[str, ...], terms: dict[str, sympy.Expr], values: dict[str, Array]
    ) -> dict[str, Array]:
        return dict(zip(terms, self._call(costs, key, list(terms.values()), values), strict=True))

    def memory(self, plans: Degrees, mode: str, part: Array, values: dict[str, Array] | None = None) -> Array:
        """Bytes in all. values: of the plans' symbols, where they are known."""
        costs, key = self._costs(plans), ("memory", mode)
        expressions = [] if key in costs.functions else [sympy.Add(*costs.held(mode).values())]
        return self._call(costs, key, expressions, {**(values or self.values(plans, groups=False)), "r": part})[0]

    def smallest(self, plans: Degrees, mode: str, values: dict[str, Array] | None = None) -> tuple[Array, Array]:
        """Memory, and the part of the layers that recompute: the least with which a plan fits, all if none does."""
        zeros = np.zeros(plans.dp.shape)
        none = self.memory(plans, mode, zeros, values)
        if mode == "none":
            return none, zeros
        layers = self.costs.layers
        most = self.memory(plans, mode, zeros + 1, values)
        needed = (none - self.cluster.device.memory) / np.maximum(none - most, 1)
        part = np.clip(np.ceil(needed * layers), 1, layers) / layers
        return none + part * (most - none), part

    def seconds(
        self, plans: Degrees, mode: str, schedule: str, part: Array, values: dict[str, Array] | None = None
    ) -> Array:
        costs, key = self._costs(plans), ("seconds", mode, schedule)
        expressions = [] if key in costs.functions else [sympy.Add(*costs.seconds(mode, schedule).values())]
        return self._call(costs, key, expressions, {**(values or self.values(plans)), "r": part})[0]


def mode_of(plan: Plan, layers: int) -> tuple[str, Array]:
    """A plan's mode of recomputation, and the part of the model's layers that do it: a whole number of them."""
    if plan.recompute not in RECOMPUTE or not isinstance(plan.recompute, str):
        raise PlanError(
            f"recompute={plan.recompute!r} is decided layer by layer in the graph, for which costs have no form"
        )
    part = round(plan.recompute_layers * layers) / layers if layers else 0.0
    return plan.recompute, np.array([part if plan.recompute != "none" else 0.0])


def degrees_of(plans: Sequence[Plan]) -> Degrees:
    rows = [
        (
            *(each.dp, each.cp, each.ulysses, each.tp),
            *(each.shard_degrees.params, each.shard_degrees.grads, each.shard_degrees.optimizer),
            *(each.microbatches, each.placement == "head-first", each.inner_ring),
        )
        for each in plans
    ]
    return Degrees(*np.array(rows, float).T)
