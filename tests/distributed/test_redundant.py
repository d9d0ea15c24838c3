"""Redundant sharding over real processes, through the public API: the loop of one device gives its numbers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import evocompile
from evocompile.plan import Plan
from tests.distributed.launch import run_ranks
from tests.distributed.surroundings import FACTS, check_facts
from tests.distributed.training import gradients, whole
from tests.redundant_model import OPTIMIZERS, STEPS, Model, Training, assert_same, batch, one_device
from tests.test_redundant import nested


def plans(world: int) -> list[Plan]:
    cp = min(world, 2)
    return [Plan(dp=world // cp, cp=cp, shard=shard) for shard in nested(world)]


RUNS = [("sgd", 3), ("adamw", 1)]


def runs_of(plan: Plan) -> list[tuple[str, int]]:
    """Both on two ranks; on four, which take long to start, one each in turns."""
    return RUNS if plan.world == 2 else [RUNS[plans(plan.world).index(plan) % 2]]


def train(plan: Plan) -> list[Training]:
    """All runs, one after the other, on one model that gets its first values again."""
    model = evocompile.parallelize(Model().double(), plan=plan, backend="eager")
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainings = []
    for optimizer, accumulation in runs_of(plan):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(first[name])
        trainings.append(optimize(model, OPTIMIZERS[optimizer](model.parameters()), accumulation))
    return trainings


def optimize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, accumulation: int) -> Training:
    losses, found = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            with nullcontext() if micro == accumulation - 1 else model.no_sync():
                loss = model(**batch(accumulation * step + micro))
                loss.backward()
            losses.append(loss.detach())
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return Training(losses, found, whole(model.named_parameters()))


def train_all(world: int) -> list[list[Training]]:
    return [train(plan) for plan in plans(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_row_2b_every_nested_choice_of_degrees_is_one_device(world: int) -> None:
    """Steps with SGD too, which does not hide gradients that are a multiple of what they should be."""
    for result in run_ranks(train_all, world, world, timeout=600.0):
        for trainings, plan in zip(result, plans(world), strict=True):
            for found, run in zip(trainings, runs_of(plan), strict=True):
                assert_same(found, one_device(*run))


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(check_facts, 2, timeout=300.0)


@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS])
def test_the_loop_around(fact: str, failures: list[dict[str, str]]) -> None:
    for rank, found in enumerate(failures):
        assert fact not in found, f"rank {rank}:\n{found[fact]}"
