"""A number of bytes for what is saved: it holds on every rank, in the least time, and the numbers stay the same."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch

from evocompile.errors import PlanError
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.recompute_budget import Choice, layers_within, saved_bytes, solve
from tests.models.zoo import Case
from tests.virtual_model import captured, virtual_model

CASE = Case("llama", length=13, batch=3)  # parts of which none is even


def saved(plan: Plan, rank: int) -> int:
    return saved_bytes(run_passes(captured(CASE)[1].program, plan, rank))


@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(dp=2)], ids=str)
def test_a_budget_holds_on_every_rank(plan: Plan) -> None:
    """And is made use of: next to it lies what fewer layers, or layers that do less, would save."""
    _, whole = captured(CASE)
    ranks = range(plan.world)
    most, least = (
        max(saved(Plan(**vars(plan) | {"recompute": mode}), rank) for rank in ranks) for mode in ("none", "full")
    )
    chosen = []
    for part in (0, 2, 6, 10):
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


def test_what_no_choice_reaches_is_refused() -> None:
    least = max(saved(Plan(cp=2, recompute="full"), rank) for rank in range(2))
    with pytest.raises(PlanError, match=r"saves [\d,]+ bytes for backward on rank \d, and [\d,]+ when all 2 layers"):
        layers_within(captured(CASE)[1].program, Plan(cp=2, recompute=least - 1))


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


@pytest.mark.parametrize("wrong", ["some", 0, -5, True, 1.5])
def test_other_choices_are_refused(wrong: object) -> None:
    with pytest.raises(PlanError, match="or a number of bytes"):
        Plan(recompute=wrong)  # type: ignore[arg-type]


def test_bytes_and_a_fraction_of_the_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"leave out recompute_layers=0\.5"):
        Plan(recompute=10**6, recompute_layers=0.5)
