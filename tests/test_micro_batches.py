"""Plan(microbatches=k): one batch, computed in k parts, is the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.errors import PlanError
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import InputKind, OutputKind
from evocompile.virtual import run_virtual
from tests.redundant_model import Model, batch


def step(model: nn.Module, plan: Plan) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """The loss, and every rank's sum of what the micro-batches leave of each gradient."""
    program = capture(model.forward, model, (), batch(1)).program
    losses, sums = torch.zeros((), dtype=torch.float64), {}
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()} | batch(1)
    for number in range(plan.microbatches):
        ranks = [run_passes(program, plan, rank, number=number) for rank in range(plan.world)]
        given = [[whole[each.name] for each in r.inputs if each.kind is not InputKind.TANGENT] for r in ranks]
        results = run_virtual([each.forward for each in ranks], given)
        losses = losses + sum(result[0] for result in results)
        tangent = torch.ones((), dtype=torch.float64)
        left = run_virtual([each.inner or each.backward for each in ranks], [[*r[1:], tangent] for r in results])
        for rank, values in enumerate(left):
            for output, value in zip(ranks[0].outputs_of(OutputKind.GRADIENT), values, strict=True):
                if value is not None:
                    own = sums.setdefault(output.name, [torch.zeros_like(value) for _ in ranks])
                    own[rank] = own[rank] + value
    return losses, sums


@pytest.mark.parametrize("microbatches", [2, 3, 4])
@pytest.mark.parametrize("degrees", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_row_3_micro_batches_are_normalised_by_the_whole_batch(microbatches: int, degrees: tuple[int, int]) -> None:
    """Rows with other numbers of valid tokens; parts of uneven rows, and of none."""
    model = Model().double()
    plan = Plan(dp=degrees[0], cp=degrees[1], microbatches=microbatches, shard=Shard())
    loss, sums = step(model, plan)
    expected = model(**batch(1))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(sum(sums[name]), parameter.grad, rtol=1e-9, atol=1e-10)


class WithOutput(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(ids, labels), self.tokens(ids)


class Squared(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels).square()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(WithOutput, r"returns 2 tensors: parallelize a loss function"), (Squared, r"before the loss")],
)
def test_what_cannot_be_added_up_is_refused(kind: type[Model], message: str) -> None:
    model = kind()
    program = capture(model.forward, model, (), batch(1)).program
    with pytest.raises(PlanError, match=message):
        run_passes(program, Plan(cp=2, microbatches=2), 0)


def test_attention_in_micro_batches() -> None:
    """Exchanges go to the real ranks."""
    from tests.models.zoo import Case, PlainGPT

    case = Case("gpt", length=9, batch=3)

    class Loss(PlainGPT):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids, labels)[0]

    torch.manual_seed(0)
    model = Loss().double()
    program = capture(model.forward, model, (), case.inputs()).program
    plan = Plan(dp=2, cp=2, microbatches=2, shard=Shard())
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()} | case.inputs()
    total = torch.zeros((), dtype=torch.float64)
    for number in range(2):
        ranks = [run_passes(program, plan, rank, number=number) for rank in range(plan.world)]
        given = [[whole[each.name] for each in r.inputs if each.kind is not InputKind.TANGENT] for r in ranks]
        total = total + sum(result[0] for result in run_virtual([each.forward for each in ranks], given))
    torch.testing.assert_close(total, model(**case.inputs()).detach(), rtol=1e-10, atol=1e-10)
