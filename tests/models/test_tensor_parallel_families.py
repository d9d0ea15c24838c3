"""Families under tensor parallelism, with one device's loss and gradients, on the virtual cluster."""

from __future__ import annotations

import pytest

from evocompile.passes.rules.routing import is_grouped
from evocompile.plan import Plan, Shard
from evocompile.program import Program
from tests.conftest import References
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import virtual_model

TP2, TP4, TP2CP2 = Plan(tp=2), Plan(tp=4), Plan(tp=2, cp=2, shard=Shard(1, 2, 4))
WORLD_8 = Plan(tp=2, cp=2, dp=2, shard=Shard(2, 4, 8))
ULYSSES = Plan(tp=2, cp=2, ulysses=2, shard=Shard(4, 4, 8))
CHUNKED = Plan(tp=2, cp=2, recompute="full", loss_chunk=1000, mlp_chunk=1000)


def case(family: str) -> Case:
    return Case(family, length=13, seed=3)


CASES = [
    *((case("llama"), plan) for plan in (TP4, TP2CP2, WORLD_8)),
    *((case("llama-tied"), plan) for plan in (TP2, ULYSSES, CHUNKED)),
    (case("gpt2"), TP2),
]
EXPERTS = [("mixtral", TP2CP2), ("qwen3-moe", TP4)]


def step(case: Case, plan: Plan, references: References) -> list[Program]:
    references.compute([*(each for each, _ in CASES), *(Case(name, length=13, seed=3) for name, _ in EXPERTS)])
    model = virtual_model(case, plan)
    losses, gradients, _ = model.step(case.inputs())
    for loss in losses:
        assert_loss(loss, references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])
    return model.programs


@pytest.mark.parametrize(("case", "plan"), CASES, ids=str)
def test_a_family_equals_one_device(case: Case, plan: Plan, references: References) -> None:
    step(case, plan, references)


@pytest.mark.parametrize(("family", "plan"), EXPERTS)
def test_experts_are_split_by_their_hidden_units(family: str, plan: Plan, references: References) -> None:
    """The rows of a rank's tokens, and of its tp neighbours', meet its own part of every expert."""
    for program in step(case(family), plan, references):
        assert program.forward is not None
        assert not any(note.what.startswith("gathered") for note in program.notes)
        whole = next(each.shape for each in program.inputs if each.name.endswith("down_proj"))
        products = [node for node in program.forward.graph.nodes if is_grouped(node)]
        inner = [tuple(node.args[1].meta["val"].shape) for node in products]
        assert inner and set(inner) == {
            (whole[0], whole[1], 2 * whole[2] // plan.tp),
            (whole[0], whole[2] // plan.tp, whole[1]),
        }
