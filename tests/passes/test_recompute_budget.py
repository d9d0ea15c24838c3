"""A number of bytes for what is saved, or for the peak: it holds on every rank, in the least time, at equal numbers."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from random import Random

import pytest
import torch

from evocompile.errors import PlanError
from evocompile.memory import step_memory
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.recompute_auto import fitted
from evocompile.recompute_budget import MODES, Choice, layers_within, saved_bytes, solve
from tests.models.zoo import Case
from tests.virtual_model import captured, virtual_model

CASE = Case("llama", length=13, batch=3)  # parts of which none is even


def saved(plan: Plan, rank: int) -> int:
    return saved_bytes(run_passes(captured(CASE)[1].program, plan, rank))


def test_a_budget_holds_on_every_rank() -> None:
    """And is made use of: next to it lies what fewer layers, or layers that do less, would save."""
    plan, (_, whole) = Plan(dp=2), captured(CASE)
    ranks = range(plan.world)
    most, least = (
        max(saved(Plan(**vars(plan) | {"recompute": mode}), rank) for rank in ranks) for mode in ("none", "full")
    )
    chosen = []
    for part in (0, 4, 10):
        budget = least + (most - least) * part // 10
        bounded = Plan(**vars(plan) | {"recompute": budget})
        programs = [run_passes(whole.program, bounded, rank) for rank in ranks]
        assert max(map(saved_bytes, programs)) <= budget
        assert len({program.again for program in programs}) == 1
        chosen.append(programs[0].again)
    assert chosen[0] == ("full", "full") and chosen[-1] == ("none", "none")
    assert len(set(chosen)) >= 3
    assert any("attention" in each for each in chosen)


def test_the_numbers_are_the_same() -> None:
    """With layers that do different things."""
    plan = Plan(cp=2)
    most, least = (max(saved(Plan(cp=2, recompute=mode), rank) for rank in range(2)) for mode in ("none", "attention"))
    bounded = virtual_model(CASE, Plan(cp=2, recompute=(most + least) // 2))
    assert len(set(bounded.programs[0].again)) == 2
    losses, gradients, _ = bounded.step(CASE.inputs())
    expected_losses, expected, _ = virtual_model(CASE, plan).step(CASE.inputs())
    assert losses == expected_losses
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_what_no_choice_reaches_is_refused_with_the_least_number_that_works() -> None:
    program = captured(CASE)[1].program
    with pytest.raises(PlanError, match=r"saves [\d,]+ bytes for backward on rank \d") as caught:
        layers_within(program, Plan(cp=2, recompute=1))
    (least,) = re.findall(r"and ([\d,]+) when all 2 layers .* the least number that works", str(caught.value))
    least = int(least.replace(",", ""))
    assert layers_within(program, Plan(cp=2, recompute=least)) == ("full", "full")
    with pytest.raises(PlanError, match="the least number"):
        layers_within(program, Plan(cp=2, recompute=least - 1))


LONGER = Case("llama", length=45)


def peak(plan: Plan) -> int:
    program = captured(LONGER)[1].program
    return max(
        step_memory([run_passes(program, plan, rank, number=i) for i in range(plan.microbatches)]).peak
        for rank in range(plan.world)
    )


def test_auto_fits_the_peak_in_memory() -> None:
    """On every rank, with less than everything where that does; the least that works is named where nothing does."""
    program = captured(LONGER)[1].program
    plan = Plan(cp=2, offload=0.2)
    auto = replace(plan, recompute="auto")
    most, middle, least = (peak(replace(plan, recompute=mode)) for mode in MODES)
    least = min(middle, least)
    assert fitted(program, auto, most, step_memory).recompute == "none"
    for limit in ((most + middle) // 2, least):
        chosen = fitted(program, auto, limit, step_memory)
        assert peak(chosen) <= limit
        assert limit == least or "none" in chosen.recompute
    assert fitted(program, plan, None, step_memory) is plan
    with pytest.raises(PlanError, match=rf"takes {least:,} bytes at the least \({most:,} when .* use {least // 2:,}: "):
        fitted(program, auto, least // 2, step_memory)
    with pytest.raises(PlanError, match="pass memory="):
        fitted(program, auto, None, step_memory)
    with pytest.raises(PlanError, match="for parallelize"):
        run_passes(program, auto, 0)


def test_a_choice_for_each_layer() -> None:
    program = captured(CASE)[1].program
    plan = Plan(cp=2, recompute=("attention", "none"))
    assert saved(plan, 0) == saved(Plan(cp=2, recompute="attention", recompute_layers=0.5), 0)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="for each of 3 layers, but the model has 2"):
        run_passes(program, Plan(cp=2, recompute=("full", "none", "full")), 0)


def test_least_time_of_all_choices() -> None:
    """Against all combinations, also where layers are alike, where a choice gains nothing, and out of reach."""
    random = Random(0)
    for _ in range(60):
        kinds = [
            [Choice(0, 0), *(Choice(random.randint(-2, 9), random.randint(1, 9)) for _ in range(2))] for _ in range(2)
        ]
        layers = [random.choice(kinds) for _ in range(5)]
        needed = random.randint(1, 45)
        found = [layer[number] for layer, number in zip(layers, solve(layers, needed), strict=True)]
        possible = [
            sum(each.time for each in chosen)
            for chosen in itertools.product(*layers)
            if sum(each.gain for each in chosen) >= needed
        ]
        if possible:
            assert sum(each.gain for each in found) >= needed
            assert sum(each.time for each in found) == min(possible)
        else:
            assert sum(each.gain for each in found) == sum(max(each.gain for each in layer) for layer in layers)


@pytest.mark.parametrize("wrong", ["some", 0, -5, True, 1.5, ("full", "auto"), ["full"]])
def test_other_choices_are_refused(wrong: object) -> None:
    with pytest.raises(PlanError, match="or a number of bytes"):
        Plan(recompute=wrong)  # type: ignore[arg-type]


def test_bytes_and_a_fraction_of_the_layers_are_refused() -> None:
    for chooses in (10**6, "auto", ("full", "none")):
        with pytest.raises(PlanError, match=r"leave out recompute_layers=0\.5"):
            Plan(recompute=chooses, recompute_layers=0.5)
