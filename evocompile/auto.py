"""plan="auto": the search at `parallelize`, or at the first call.

The layout of the optimizer's shards is fixed at `parallelize`, as the optimizer is built next: over all ranks, unless
`example_inputs` say what to plan for. The rest is searched when the first call has been captured. Every rank searches
by itself, with the same costs on the same cluster, and the ranks compare their plans before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .cluster import Cluster
from .costs import Costs
from .errors import InfeasibleError, PlanError
from .fold import Folded, fold, whole
from .plan import Plan, Shard
from .precision import Precision
from .program import Program
from .search import search_costs

log = logging.getLogger("evocompile")


@dataclass(frozen=True)
class Search:
    """What is left to decide. cluster: as the user gave it. device: of the model. parts: micro-batches are allowed."""

    cluster: Cluster | None
    world: int
    device: torch.device
    parts: bool

    @property
    def first(self) -> Plan:
        """What is known before the first call: where the optimizer's shards are."""
        return Plan(dp=self.world, shard=Shard(1, 1, self.world))

    def of_program(self, captured: Program) -> Plan:
        """The plan for a captured call, in the layout of `first`."""
        return self._found(whole(captured), self.world)

    def of_example(self, model: nn.Module, inputs: Any, precision: Precision) -> Plan:
        """The plan for a call with these inputs, the optimizer's degree included."""
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        return self._found(fold(model, args, kwargs, precision), None)

    def _found(self, folded: Folded, optimizer: int | None) -> Plan:
        cluster = self.cluster or known_cluster(self.world, self.device)
        try:
            found = search_costs(Costs(folded), cluster, optimizer=optimizer, parts=self.parts)
        except InfeasibleError as error:
            if self.cluster is not None or error.leanest is None:
                raise
            _tell("plan='auto': %s. It is tried all the same, as the cluster is a guess: pass cluster=", error)
            return error.leanest
        _tell("plan='auto': %s, the fastest of %d for %s", found.plan, found.considered, cluster)
        return found.plan


def check_cluster(cluster: Cluster | None, world: int) -> None:
    if cluster is not None and cluster.world != world:
        raise PlanError(f"cluster= is of {cluster.world} devices ({cluster}), but {world} ranks run")


def known_cluster(world: int, device: torch.device) -> Cluster:
    """What is known without measuring: the same on all ranks of equal devices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Cluster.for_world(world, device.type, name)


def _tell(text: str, *values: Any) -> None:
    if dist.get_rank() == 0:
        log.warning(text, *values)
