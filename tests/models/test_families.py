"""The promise, family by family: one step on any plan gives one device's loss and gradients. On the virtual cluster.

Every family runs plainly on three plans; padded and packed batches run on one of them each, in turn. Nothing of any
family is gathered for want of a rule.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from evocompile.capture import capture
from evocompile.plan import Plan
from tests.conftest import References
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import virtual_model

PLANS = Plan(cp=2), Plan(cp=4), Plan(dp=2, cp=2)

CAUSAL = [
    "gpt2",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "gpt-neox",
    "phi3",
    "olmo2",
    "smollm3",
    "mixtral",
    "mixtral-auxiliary",
    "qwen3-moe",
    "deepseek-v3",
]
BIDIRECTIONAL = ["bert", "encoder", "encoder-norm-first", "encoder-seq-first"]


def case(family: str, form: str = "plain") -> Case:
    return Case(family, length=13, seed=3, form=form)


PLAIN = [(case(family), plan) for family in [*CAUSAL, *BIDIRECTIONAL] for plan in PLANS]
PADDED = [
    ([case(family, "left"), case(family, "right")], PLANS[number % 3])
    for number, family in enumerate([*CAUSAL, *BIDIRECTIONAL])
]
PACKED = [(case(family, "packed"), PLANS[(number + 1) % 3]) for number, family in enumerate(CAUSAL)]
WORLD_16 = [
    (Case(family, length=33, seed=4), plan)
    for family in ("llama", "mixtral")
    for plan in (Plan(cp=16), Plan(dp=2, cp=8))
]


@pytest.fixture(scope="module", autouse=True)
def computed(references: References) -> None:
    padded = [case for cases, _ in PADDED for case in cases]
    references.compute([*padded, *(case for case, _ in [*PLAIN, *PACKED, *WORLD_16])])


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Collecting garbage among the nodes of so many graphs would take a third of the time."""
    gc.disable()
    yield
    gc.enable()


def compare(cases: list[Case], plan: Plan, references: References) -> None:
    """One step of each case: their batches have the same form, so one program serves them all."""
    model = virtual_model(cases[0], plan)
    assert not model.programs[0].notes
    for case in cases:
        losses, gradients, _ = model.step(case.inputs())
        for loss in losses:
            assert_loss(loss, references[case]["loss"])
        assert_gradients(gradients, references[case]["gradients"])


@pytest.mark.parametrize(("case", "plan"), PLAIN, ids=str)
def test_a_family_equals_one_device(case: Case, plan: Plan, references: References) -> None:
    compare([case], plan, references)


@pytest.mark.parametrize(("cases", "plan"), PADDED, ids=str)
def test_padding_equals_one_device(cases: list[Case], plan: Plan, references: References) -> None:
    compare(cases, plan, references)


@pytest.mark.parametrize(("case", "plan"), PACKED, ids=str)
def test_packed_documents_equal_one_device(case: Case, plan: Plan, references: References) -> None:
    compare([case], plan, references)


@pytest.mark.parametrize(("case", "plan"), WORLD_16, ids=str)
def test_sixteen_ranks_equal_one_device(case: Case, plan: Plan, references: References) -> None:
    compare([case], plan, references)


def test_a_library_that_sets_itself_up_under_a_lock_is_captured() -> None:
    """transformers installs the hooks that collect router logits at a model's first call, under a lock."""
    auxiliary = case("mixtral-auxiliary")
    model, inputs = auxiliary.build(), auxiliary.inputs()
    program = capture(model.forward, model, (), inputs)
    assert model.model._output_capturing_hooks_installed
    assert program.mismatch((), inputs) == ""
