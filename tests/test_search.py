"""The search: the best of all it enumerates, the same each time, with reasons; and what is said where nothing fits."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import evocompile
from evocompile.cluster import Cluster
from evocompile.costs import Costs
from evocompile.errors import InfeasibleError
from evocompile.evaluate import Evaluator
from evocompile.plan import RECOMPUTE, Plan, Shard
from evocompile.search import (
    Found,
    blocks_of,
    describe,
    neighbours,
    plan_of,
    schedules_of,
    search_costs,
    space_of,
)
from evocompile.search_report import as_dict, as_html
from tests.test_costs import folded

LARGE = {"rows": 16, "length": 4096}


@cache
def costs() -> Costs:
    return Costs(folded())


def cluster(memory: float = 1e9, devices: int = 4, nodes: int = 2) -> Cluster:
    base = Cluster("dgx-a100-80g", nodes=nodes, devices=devices)
    return dataclasses.replace(base, device=dataclasses.replace(base.device, memory=memory))


@pytest.mark.parametrize("memory", [1e9, 4e7, 1.2e7])
def test_no_enumerated_plan_that_fits_is_faster(memory: float) -> None:
    """One by one, each at every fraction of the layers that recompute."""
    on = cluster(memory, devices=2)
    found = search_costs(costs(), on, **LARGE)
    space, _ = space_of(costs(), on, **LARGE)
    evaluator = Evaluator(costs(), on, **LARGE)
    assert found.candidates[0].memory <= memory
    total = 0
    for plans in blocks_of(space):
        for mode, schedule, half in itertools.product(RECOMPUTE, schedules_of(space, int(plans.cp[0])), (1, 2)):
            if mode == "none" and half == 1:
                continue
            here = plans.take(plans.inner == 1) if schedule == "balanced" else plans
            part = np.full(here.dp.shape, half / 2 if mode != "none" else 0.0)
            fits = evaluator.memory(here, mode, part) <= memory
            seconds = evaluator.seconds(here, mode, schedule, part)
            total += len(seconds) * (half == 2)
            assert not fits.any() or seconds[fits].min() >= found.candidates[0].seconds * (1 - 2e-5)
    assert found.considered == total


def test_the_evaluation_of_one_plan_is_that_of_many() -> None:
    space, _ = space_of(costs(), cluster(), **LARGE)
    evaluator = Evaluator(costs(), cluster(), **LARGE)
    for plans in itertools.islice(blocks_of(space), 3):
        seconds = evaluator.seconds(plans, "none", "zigzag", np.zeros(plans.dp.shape))
        row = len(seconds) // 2
        one = describe(evaluator, plan_of(plans, row, "none", "zigzag", 0.0))
        assert one.seconds == pytest.approx(seconds[row], rel=1e-12)


def test_the_space_is_complete() -> None:
    """World 4, sequences of 16, 4 heads, 4 rows: counted by hand."""
    space, notes = space_of(costs(), cluster(nodes=1), 4, 16)
    assert not notes
    degrees = {tuple(int(each[0]) for each in (p.dp, p.cp, p.u, p.tp)) for p in blocks_of(space)}
    whole = {(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)}
    halves = {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert degrees == {*((*each, 1) for each in whole), *((*each, 2) for each in halves), (1, 1, 1, 4)}
    chains = {tuple(map(int, row)) for p in blocks_of(space) for row in zip(p.P, p.G, p.O, strict=True)}
    assert chains == {(p, g, o) for p, g, o in itertools.product((1, 2, 4), repeat=3) if p <= g <= o}


def test_the_same_each_time() -> None:
    first, again = (search_costs(Costs(folded()), cluster(4e7), **LARGE) for _ in range(2))
    assert first.candidates == again.candidates
    assert first.reasons == again.reasons


def test_reasons_are_legal_plans_that_differ_in_one_choice() -> None:
    found = search_costs(costs(), cluster(4e7), **LARGE)
    space, _ = space_of(costs(), cluster(4e7), **LARGE)
    assert len(found.reasons) >= 6
    for reason, (name, plan) in zip(found.reasons, neighbours(space, found.plan), strict=True):
        assert (reason.instead, reason.plan) == (name, plan)
        assert plan != found.plan
        assert plan.world == found.plan.world
        assert not reason.fits or reason.seconds >= -2e-5 * found.candidates[0].seconds


def test_memory_decides() -> None:
    """With room for everything states stay whole; with less they are sharded, and then layers recompute."""
    roomy, tight = (search_costs(costs(), cluster(memory), **LARGE).candidates[0] for memory in (1e9, 1.2e7))
    assert roomy.plan.recompute == "none"
    assert (tight.plan.recompute, tight.plan.microbatches) != ("none", 1)
    assert tight.memory <= 1.2e7 < roomy.memory
    assert tight.seconds > roomy.seconds


def test_what_does_not_fit_says_what_is_short() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search_costs(costs(), cluster(1e6, nodes=1), **LARGE)
    message = str(caught.value)
    assert "no plan fits dgx-a100-80g: 1 nodes of 4 devices" in message
    assert "more than its 1 MB (" in message
    assert "The nearest that fits: " in message
    nodes = int(message.split("The nearest that fits: ")[1].split()[0])
    assert search_costs(costs(), cluster(1e6, nodes=nodes), **LARGE).candidates
    with pytest.raises(InfeasibleError):
        search_costs(costs(), cluster(1e6, nodes=nodes // 2), **LARGE)


def test_a_model_without_attention_is_split_by_rows() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found = evocompile.search(model, (torch.zeros(16, 8),), cluster(nodes=1))
    assert (found.plan.dp, found.plan.cp, found.plan.ulysses) == (4, 1, 1)
    assert any("no attention" in note for note in found.notes)


class Patches(nn.Module):
    """Images become positions, by a convolution that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.head(attended.transpose(1, 2).flatten(2)).logsumexp(-1).sum()


def test_the_positions_of_images_are_those_of_their_attention() -> None:
    found = evocompile.search(Patches(), (torch.zeros(1, 3, 24, 24),), cluster(nodes=1))
    assert (found.rows, found.length) == (1, 36)
    assert found.plan.cp * found.plan.ulysses > 1


def test_a_batch_that_cannot_be_split_further_is_not_grown() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan fits .* Not even 64 times as many nodes"):
        search_costs(costs(), cluster(1e3, devices=2, nodes=1), rows=3, length=7)


def test_more_devices_than_there_are_rows_and_positions() -> None:
    with pytest.raises(evocompile.PlanError, match="cannot be split over 256 ranks"):
        search_costs(costs(), cluster(devices=8, nodes=32), rows=2, length=8)


def test_large_worlds() -> None:
    found = search_costs(costs(), cluster(1e10, devices=8, nodes=12_500), rows=8, length=1 << 20, optimizer=100_000)
    assert found.plan.world == 100_000


def test_text_json_and_html() -> None:
    found: Found = search_costs(costs(), cluster(4e7), **LARGE)
    text, data, page = str(found), as_dict(found), as_html(found)
    assert str(found.plan) in text
    assert "why not" in text
    assert Plan.from_json(json.dumps(data["candidates"][0]["plan"])) == found.plan
    assert page.count("<table>") == 4
    assert data["considered"] == found.considered


def test_candidates_are_legal_plans() -> None:
    found: Any = search_costs(costs(), cluster(), **LARGE)
    for each in found.candidates:
        assert each.plan.world == 8
        assert isinstance(each.plan.shard, Shard)
        assert sum(each.spent.values()) == pytest.approx(each.seconds)


def test_the_best_few_are_ordered_by_simulations_of_their_graphs() -> None:
    """On the captured batch; the times are those of the simulator, the first is the fastest, the same each time."""
    on = cluster(devices=2, nodes=1)
    found, again = (search_costs(costs(), on, simulated=2) for _ in range(2))
    first, second, *rest = found.candidates
    assert first.simulated is not None and second.simulated is not None
    assert 0 < first.simulated <= second.simulated * (1 + 1e-4)
    assert all(each.simulated is None for each in rest)
    assert found.candidates == again.candidates
    assert {each.plan for each in found.candidates} == {each.plan for each in search_costs(costs(), on).candidates}
