"""plan="auto" on gloo ranks: what is chosen, when, and that the numbers are one device's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from evocompile import Cluster, InfeasibleError, PlanError, Shard, calibrate, parallelize
from evocompile.runtime import parallel_forward
from tests.distributed.facts import Facts, on_ranks, selected_facts
from tests.distributed.small import gpt, same_step, smoothed_loss, tokens


def found_at_the_first_call() -> None:
    plain, model = gpt(), parallelize(gpt(), backend="eager")
    forward = parallel_forward(model)
    assert forward is not None and forward.plan.shard_degrees == Shard(1, 1, 2)
    batch = tokens(rows=4, length=8)
    same_step(model, plain, model(**batch)[0], plain(**batch)[0])
    assert forward.plan.world == 2 and forward.plan.shard_degrees.optimizer == 2
    chosen = forward.plan
    same_step(model, plain, model(**tokens(rows=3, length=5))[0], plain(**tokens(rows=3, length=5))[0])
    assert forward.plan == chosen


def found_for_a_loss_function() -> None:
    plain, model = gpt(), gpt()
    step = parallelize(smoothed_loss, model=model, backend="eager")
    same_step(model, plain, step(model, tokens(rows=4, length=8)), smoothed_loss(plain, tokens(rows=4, length=8)))


def one_long_row_is_split_over_positions() -> None:
    plain, batch = gpt(), tokens(rows=1, length=24)
    model = parallelize(gpt(), example_inputs=batch, cluster=Cluster("cpu-gloo", devices=2), backend="eager")
    forward = parallel_forward(model)
    assert forward is not None and forward.plan.cp * forward.plan.ulysses == 2
    same_step(model, plain, model(**batch)[0], plain(**batch)[0])


def clusters_are_checked() -> None:
    with pytest.raises(PlanError, match=r"cluster= is of 8 devices .* but 2 ranks run"):
        parallelize(gpt(), cluster=Cluster("h100"))
    with pytest.raises(PlanError, match="example_inputs= goes with a model"):
        parallelize(smoothed_loss, model=gpt(), example_inputs=tokens())
    base = Cluster("cpu-gloo", devices=2)
    small = dataclasses.replace(base, device=dataclasses.replace(base.device, memory=1e3))
    with pytest.raises(InfeasibleError, match="no plan fits"):
        parallelize(gpt(), example_inputs=tokens(), cluster=small)


def a_measured_cluster_is_the_same_on_all_ranks() -> None:
    cluster = calibrate(sizes=(1 << 10, 1 << 16), seconds=0.02)
    everyone: list[str] = ["", ""]
    dist.all_gather_object(everyone, cluster.to_json())
    assert everyone[0] == everyone[1]
    assert cluster.world == 2 and cluster.inside.bandwidth > 0 and cluster.inside.latency > 0
    assert 0 < cluster.device.linear <= 1 and cluster.device.peak("float32") > 0
    model = parallelize(gpt(), cluster=cluster, backend="eager")
    assert torch.isfinite(model(**tokens(rows=2))[0])


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest) -> Facts:
    return selected_facts(request)


@on_ranks(
    {
        2: (
            found_at_the_first_call,
            found_for_a_loss_function,
            one_long_row_is_split_over_positions,
            clusters_are_checked,
            a_measured_cluster_is_the_same_on_all_ranks,
        )
    }
)
def test_on_ranks(world: int, fact: str, facts: Facts) -> None:
    facts.check(world, fact)
