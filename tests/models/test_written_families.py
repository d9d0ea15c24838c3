"""Families that write their attention out: one step equals one device's, with every attention found."""

from __future__ import annotations

import pytest

from evocompile.plan import Plan
from evocompile.program import Program
from tests.conftest import References
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import captured, virtual_model

CP2, DP2CP2 = Plan(cp=2), Plan(dp=2, cp=2)
ATTENTIONS = {
    "llama-eager": 2,
    "gemma2": 2,
    "gpt-oss": 2,
    "mpt": 2,
    "bloom": 2,
    "falcon": 2,
    "gpt-neo": 2,
    "bart": 3,
    "t5": 6,
    "vit": 2,
    "whisper": 6,
}
PLANS = [(family, DP2CP2 if number % 2 else CP2) for number, family in enumerate(ATTENTIONS)]
PRECISE = Case("vit-sdpa", batch=3, seed=3, dtype="float64")


def case(family: str, form: str = "plain") -> Case:
    return Case(family, length=13, seed=3, form=form)


@pytest.fixture(scope="module", autouse=True)
def computed(references: References) -> None:
    padded = [case("bloom", "left"), case("llama-eager", "left")]
    references.compute([*(case(family) for family in ATTENTIONS), *padded, PRECISE])


SEQUENCES = {"bart": [13, 10], "t5": [13, 10], "whisper": [13, 17]}  # whose encoder and decoder are split


def attentions(program: Program) -> int:
    assert program.joint is not None
    target = "evocompile.dense_attention.default"
    return sum(str(node.target) == target for node in program.joint.graph.nodes)


@pytest.mark.parametrize(("family", "plan"), PLANS, ids=str)
def test_a_family_equals_one_device(family: str, plan: Plan, references: References) -> None:
    model = virtual_model(case(family), plan)
    assert attentions(captured(case(family))[1].program) == ATTENTIONS[family]
    sharding = model.programs[0].sharding
    assert sharding is not None
    sizes = [split.size for name, split in sharding.splits.items() if name.startswith("seq")]
    assert sizes == SEQUENCES.get(family, sizes[:1])
    losses, gradients, _ = model.step(case(family).inputs())
    for loss in losses:
        assert_loss(loss, references[case(family)]["loss"])
    assert_gradients(gradients, references[case(family)]["gradients"])


def test_an_images_gradients_are_right_in_float64(references: References) -> None:
    """A bias of keys moves a row's logits all alike: its gradient is zero, and what float32 gives for it is noise."""
    _, gradients, _ = virtual_model(PRECISE, DP2CP2).step(PRECISE.inputs())
    expected = references[PRECISE]["gradients"]
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in gradients.items():
        error, own = float((gradient - expected[name]).abs().max()), float(expected[name].abs().max())
        assert error <= 1e-10 * max(own, 1e-3 * largest), name
        assert (own < 1e-15 * largest) == name.endswith("k_proj.bias"), name


@pytest.mark.parametrize("family", ["bloom", "llama-eager"])
def test_padding_whose_rows_attend_nowhere(family: str, references: References) -> None:
    """Left padding: the first rows see padding alone, and average over all keys, as on one device."""
    padded = case(family, "left")
    model = virtual_model(padded, CP2)
    assert any("attention to all keys" in note.what for note in model.programs[0].notes)
    losses, gradients, _ = model.step(padded.inputs())
    assert_loss(losses[0], references[padded]["loss"])
    assert_gradients(gradients, references[padded]["gradients"])
