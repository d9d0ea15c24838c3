"""Redundant sharding: every nested choice of degrees for parameters, gradients and optimizer state is one device."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from torch import nn

from evocompile.capture import Captured, capture
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from tests.redundant_model import OPTIMIZERS, STEPS, Model, Training, assert_same, batch, one_device
from tests.virtual_training import VirtualTraining


def nested(world: int) -> list[Shard]:
    divisors = [degree for degree in range(1, world + 1) if world % degree == 0]
    return [
        Shard(params, grads, optimizer)
        for optimizer in divisors
        for grads in divisors
        for params in divisors
        if optimizer % grads == 0 and grads % params == 0
    ]


@functools.cache
def captured() -> tuple[nn.Module, Captured]:
    model = Model().double()
    return model, capture(model.forward, model, (), batch(0))


WORLDS = {4: Plan(dp=2, cp=2), 8: Plan(dp=4, cp=2)}
RUNS = [(optimizer, accumulation) for optimizer in OPTIMIZERS for accumulation in (1, 3)]


@pytest.mark.parametrize(("world", "shard"), [(world, shard) for world in WORLDS for shard in nested(world)], ids=str)
def test_row_2_every_nested_choice_of_degrees_is_one_device(world: int, shard: Shard) -> None:
    plan = replace(WORLDS[world], shard=shard)
    model, capture_ = captured()
    programs = [run_passes(capture_.program, plan, rank) for rank in range(world)]
    whole = {name: p.detach() for name, p in model.named_parameters()}
    for optimizer, accumulation in RUNS:
        losses, gradients = [], []
        training = VirtualTraining(programs, whole, OPTIMIZERS[optimizer])
        for step in range(STEPS):
            for micro in range(accumulation):
                number, synchronise = accumulation * step + micro, micro == accumulation - 1
                losses.append(training.micro_batch(batch(number), synchronise=synchronise))
            gradients.append(training.gradients())
            training.step()
        found = Training(losses, gradients, training.parameters())
        assert_same(found, one_device(optimizer, accumulation))
