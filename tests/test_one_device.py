"""The promise: on any plan a step gives one device's loss and gradients. On the virtual cluster."""

from __future__ import annotations

import pytest
import torch

from evocompile.capture import capture
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import OutputKind
from tests.conftest import References
from tests.models.compare import assert_gradients, assert_loss, assert_parameters
from tests.models.reference import STEPS
from tests.models.zoo import Case
from tests.virtual_model import virtual_model

CP2, CP4, DP2CP2 = Plan(cp=2), Plan(cp=4), Plan(dp=2, cp=2)


def sharded(plan: Plan, degree: int) -> Plan:
    return Plan(dp=plan.dp, cp=plan.cp, attention=plan.attention, shard=Shard(degree, degree, degree))


COMBINATIONS = [
    (Case("llama"), CP2),
    (Case("llama"), DP2CP2),
    (Case("llama", length=13, seed=1), CP4),
    (Case("llama", length=13, seed=1), sharded(DP2CP2, 2)),
    (Case("llama-tied", length=17, batch=3), CP2),
    (Case("llama-tied", length=17, batch=3), sharded(CP4, 1)),
    (Case("llama-tied", length=17, batch=3), DP2CP2),
    (Case("llama-bias", length=11, seed=2), Plan(cp=3, attention="ring")),
    (Case("llama-bias", length=11, seed=2), Plan(dp=2, cp=3, shard=Shard(3, 3, 3))),
    (Case("gpt"), CP2),
    (Case("gpt"), Plan(cp=4, attention="ring")),
    (Case("gpt", length=13, batch=3, seed=1), DP2CP2),
    (Case("gpt", length=13, batch=3, seed=1), sharded(CP4, 2)),
    (Case("gpt", length=13, batch=3, seed=1), Plan(dp=4, shard=Shard(1, 1, 1))),
    (Case("mixtral", length=13, seed=3), Plan(tp=2)),
    # ranks without a token, ranks without a row of the batch
    (Case("llama", length=3), CP4),
    (Case("gpt", length=5, batch=1), Plan(dp=2, cp=4)),
]


@pytest.fixture(scope="module", autouse=True)
def computed(references: References) -> None:
    references.compute([case for case, _ in COMBINATIONS])


@pytest.mark.parametrize(("case", "plan"), COMBINATIONS, ids=str)
def test_one_step_equals_one_device(case: Case, plan: Plan, references: References) -> None:
    losses, gradients, _ = virtual_model(case, plan).step(case.inputs())
    for loss in losses:
        assert_loss(loss, references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_three_optimizer_steps_equal_one_device(name: str, references: References) -> None:
    from tests.models.reference import OPTIMIZERS

    case = Case("gpt", length=13, batch=3, seed=1)
    model = virtual_model(case, DP2CP2)
    trained = {n: torch.nn.Parameter(model.parameters[n]) for n in references[case]["gradients"]}
    optimizer = OPTIMIZERS[name](trained.values())
    for step in range(STEPS):
        _, gradients, _ = model.step(case.inputs(step))
        for n, parameter in trained.items():
            parameter.grad = gradients[n]
        optimizer.step()
    assert_parameters({n: p.detach() for n, p in trained.items()}, references[case][name])


def test_other_outputs_come_back_in_the_models_order() -> None:
    case = Case("gpt", length=13, batch=3, seed=1)
    model = virtual_model(case, DP2CP2)
    _, _, outputs = model.step(case.inputs())
    with torch.no_grad():
        expected = case.build()(**case.inputs())[1]
    torch.testing.assert_close(model.whole_output(outputs, 1), expected, rtol=1e-5, atol=1e-5)


def test_a_differentiable_output_is_whole_even_beside_a_scalar_that_is_not() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x * self.weight
            return y.detach().mean(), y

    model = Model()
    program = run_passes(
        capture(model.forward, model, (), {"x": torch.ones(2, 6, 4)}).program, Plan(cp=2, shard=Shard()), 0
    )
    assert [output.layout for output in program.outputs_of(OutputKind.USER)] == [None, None]
