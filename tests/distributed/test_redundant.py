"""Redundant sharding over real processes, through the public API: the loop of one device gives its numbers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import evocompile
from evocompile.plan import Plan
from evocompile.shards import shard_of
from tests.distributed.launch import run_ranks
from tests.distributed.surroundings import FACTS, check_facts
from tests.distributed.training import whole
from tests.redundant_model import (
    OPTIMIZERS,
    STEPS,
    Model,
    Training,
    assert_same,
    assert_same_gradients,
    batch,
    one_device,
)
from tests.test_redundant import RUNS, nested


def plans(world: int) -> list[Plan]:
    cp = min(world, 2)
    return [Plan(dp=world // cp, cp=cp, shard=shard) for shard in nested(world)]


def train(plan: Plan) -> None:
    """Both optimizers, with and without accumulation, one after the other, on one model that gets its first values."""
    model = evocompile.parallelize(Model().double(), plan=plan, backend="eager")
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for run in RUNS:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(first[name])
        try:
            optimize(model, OPTIMIZERS[run[0]](model.parameters()), run[1], one_device(*run))
        except AssertionError as error:
            raise AssertionError(f"{plan}, {run}: {error}") from error


def optimize(model: nn.Module, optimizer: torch.optim.Optimizer, accumulation: int, expected: Training) -> None:
    """This rank's rows of every step's gradients are compared, as gathering them takes longer than the steps."""
    degree, rank = model.forward.plan.shard_degrees.optimizer, dist.get_rank()
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            with nullcontext() if micro == accumulation - 1 else model.no_sync():
                loss = model(**batch(accumulation * step + micro))
                loss.backward()
            losses.append(loss.detach())
        found = {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
        rows = {name: shard_of(each, degree, degree, rank) for name, each in expected.gradients[step].items()}
        assert_same_gradients(found, rows)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(Training(losses, [], whole(model.named_parameters())), replace(expected, gradients=[]))


def train_all(world: int) -> None:
    for plan in plans(world):
        train(plan)


@pytest.mark.parametrize("world", [2, 4])
def test_row_2b_every_nested_choice_of_degrees_is_one_device(world: int) -> None:
    """Steps with SGD too, which does not hide gradients that are a multiple of what they should be."""
    run_ranks(train_all, world, world, timeout=600.0)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(check_facts, 2, timeout=300.0)


@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS])
def test_the_loop_around(fact: str, failures: list[dict[str, str]]) -> None:
    for rank, found in enumerate(failures):
        assert fact not in found, f"rank {rank}:\n{found[fact]}"
