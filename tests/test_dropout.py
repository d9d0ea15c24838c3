"""Dropout: other draws than one device's, but the same on replicas, different on shards, repeated by the seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.layout import whole_from_parts
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import InputKind
from evocompile.virtual import virtual_step

BATCH, LENGTH, WIDTH, RATE = 4, 40, 16, 0.25


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(x * self.weight, RATE)
        return y.sum(), y


class Jittering(Dropping):
    """Phimoe's router noise."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * self.weight * torch.empty_like(x).uniform_(0.5, 1.5)
        return y.sum(), y


def step(plan: Plan, seed: int, form: type[nn.Module] = Dropping) -> tuple[list[Tensor], Tensor, Tensor]:
    """Every rank's part of y, the whole y, and the weight's gradient."""
    torch.manual_seed(0)
    model, x = form(), torch.ones(BATCH, LENGTH, WIDTH)
    program = capture(model.forward, model, (), {"x": x}).program
    programs = [run_passes(program, plan, rank) for rank in range(plan.world)]
    values = {"weight": torch.ones(WIDTH), "x": x, "random_seed": torch.tensor(seed)}
    inputs = [values[each.name] for each in programs[0].inputs if each.kind is not InputKind.TANGENT]
    result = virtual_step(programs, [inputs] * plan.world)
    parts = [outputs[1] for outputs in result.outputs]
    layout = programs[0].outputs[1].layout
    assert layout is not None
    y = whole_from_parts(parts, [each.sharding for each in programs if each.sharding], layout)
    gradients = [each["weight"] for each in result.gradients]
    assert all(isinstance(each, Tensor) and torch.equal(each, gradients[0]) for each in gradients)
    return parts, y, gradients[0]


def test_the_gradient_uses_the_draws_of_the_forward() -> None:
    for plan in (Plan(cp=2, shard=Shard()), Plan(dp=2, cp=2, shard=Shard())):
        _, y, gradient = step(plan, 7)
        torch.testing.assert_close(gradient, y.sum((0, 1)))  # x is one: d(sum y)/d(weight) = sum of the kept scales


def test_statistics() -> None:
    _, y, _ = step(Plan(dp=2, cp=2, shard=Shard()), 3)
    kept = (y != 0).float().mean().item()
    deviation = (RATE * (1 - RATE) / y.numel()) ** 0.5
    assert abs(kept - (1 - RATE)) < 5 * deviation
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - RATE)))


def test_shards_differ_and_the_seed_repeats() -> None:
    plan = Plan(dp=2, cp=2, attention="ring", shard=Shard())
    parts, y, _ = step(plan, 3)
    for i, one in enumerate(parts):
        assert not any(torch.equal(one, other) for other in parts[:i])
    assert torch.equal(step(plan, 3)[1], y)
    assert not torch.equal(step(plan, 4)[1], y)


def test_replicas_agree() -> None:
    """A draw over the batch alone is the same on all ranks that split the sequence."""

    class Rows(Dropping):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * self.weight * torch.rand(BATCH, 1, 1)
            return y.sum(), y

    model, x = Rows(), torch.ones(BATCH, LENGTH, WIDTH)
    plan = Plan(dp=2, cp=2, shard=Shard())
    program = capture(model.forward, model, (), {"x": x}).program
    programs = [run_passes(program, plan, rank) for rank in range(plan.world)]
    values = {"weight": model.weight.detach(), "x": x, "random_seed": torch.tensor(1)}
    inputs = [values[each.name] for each in programs[0].inputs if each.kind is not InputKind.TANGENT]
    rows = [outputs[1][:, 0, 0] for outputs in virtual_step(programs, [inputs] * 4).outputs]
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=0)
    torch.testing.assert_close(rows[2], rows[3], rtol=0, atol=0)
    assert not torch.equal(rows[0], rows[2])


def test_uniform_draws_in_place() -> None:
    plan = Plan(dp=2, cp=2, attention="ring", shard=Shard())
    parts, y, gradient = step(plan, 3, Jittering)
    assert 0.5 <= y.min() < 0.51 and 1.49 < y.max() < 1.5
    assert abs(y.mean().item() - 1) < 5 / (12 * y.numel()) ** 0.5
    torch.testing.assert_close(gradient, y.sum((0, 1)))
    for i, one in enumerate(parts):
        assert not any(torch.equal(one, other) for other in parts[:i])
