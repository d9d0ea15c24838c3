"""Random small programs on random plans give one device's values and gradients."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evocompile.capture import capture
from evocompile.passes.shard_states import shard_rows
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import InputKind, OutputKind
from evocompile.virtual import virtual_step
from tests.property.programs import Program, Text, inputs, programs

EXAMPLES = int(os.environ.get("EVOCOMPILE_EXAMPLES", "60"))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dp, cp = draw(st.sampled_from([(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (2, 3), (3, 2)]))
    order = draw(st.sampled_from(["zigzag", "ring"]))
    degree = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
    return Plan(dp=dp, cp=cp, attention=order, shard=Shard(degree, degree, degree))


@settings(
    max_examples=EXAMPLES,
    derandomize="EVOCOMPILE_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(text=programs(), plan=plans())
def test_random_program_equals_one_device(text: Text, plan: Plan) -> None:
    check(text, plan)


def check(text: Text, plan: Plan) -> None:
    model, batch = Program(text), inputs(text)
    loss, _ = model(**batch)
    loss.backward()
    program = capture(model.forward, model, (), batch).program
    degree = plan.shard_degrees.params
    ranks = [run_passes(program, plan, rank) for rank in range(plan.world)]
    given_ = []
    for rank in range(plan.world):
        tensors = dict(batch)
        for name, parameter in model.named_parameters():
            whole = parameter.detach()
            lo, hi = shard_rows(whole.shape[0], degree, rank % degree) if whole.ndim else (0, 1)
            tensors[name] = whole[lo:hi] if whole.ndim and degree > 1 else whole
        given_.append([tensors[each.name] for each in program.inputs if each.kind is not InputKind.TANGENT])
    step = virtual_step(ranks, given_)
    users = ranks[0].outputs_of(OutputKind.USER)
    for outputs in step.outputs:
        for output, user in zip(outputs, users, strict=True):
            if not user.shape and user.differentiable:
                torch.testing.assert_close(output, loss.detach(), rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        for first in range(0, plan.world, degree):
            parts = [step.gradients[first + i].get(name) for i in range(degree)]
            if parameter.grad is None:
                assert all(part is None or not part.any() for part in parts), name
                continue
            assert all(part is not None for part in parts), name
            gradient = torch.cat(parts) if degree > 1 and parameter.ndim else parts[0]
            torch.testing.assert_close(
                gradient, parameter.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
