"""Ranks that make different calls, after the first good one, hear of it at once, all of them."""

from __future__ import annotations

import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import evocompile
from evocompile import InputError, Plan, PlanError, lazy
from tests.distributed.launch import run_ranks


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), ids.flatten())


def different_calls() -> dict[str, tuple[str, float]]:
    """What this rank hears in each case, and after how many seconds."""
    torch.manual_seed(0)
    model, rank = evocompile.parallelize(Tiny(), plan=Plan(cp=2), backend="eager"), dist.get_rank()
    ids = torch.arange(26).view(2, 13) % 16
    model(ids=ids)
    model(ids=ids[:, :7])
    cases = {
        "another batch": ids.roll(rank, 1),
        "another known length": ids if rank else ids[:, :7],
        "another new length": ids if rank else ids[:, :9],
    }
    heard = {}
    for name, batch in cases.items():
        start = time.monotonic()
        try:
            model(ids=batch)
            heard[name] = ("nothing", 0.0)
        except InputError as error:
            heard[name] = (str(error), time.monotonic() - start)
    assert torch.isfinite(model(ids=ids))  # the model goes on with a call that is alike
    return heard


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[str, float]]]:
    return run_ranks(different_calls, 2)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("another batch", "rank 1 passed another batch"),
        ("another known length", "runs program 1 for ids[2, 13]"),
        ("another new length", "rank 0 would compile a new program for ids[2, 9]"),
    ],
)
def test_row_10_every_rank_hears_at_once(case: str, says: str, outcomes: list[dict[str, tuple[str, float]]]) -> None:
    for heard in outcomes:
        message, seconds = heard[case]
        assert says in message
        assert seconds < 30  # far below any time-out


class Dropping(Tiny):
    """With a number that the model's code takes, and with dropout, which asks all ranks for one seed."""

    factor = 1

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(ids) * self.factor, 0.5, self.training)


def different_first_calls() -> list[str]:
    """What this rank hears where the ranks' first calls are of different programs."""
    heard, rank = [], dist.get_rank()

    def call(model: Dropping, records: bool = True) -> None:
        parallel = evocompile.parallelize(model, plan=Plan(cp=2), backend="eager")
        with pytest.raises(PlanError) as caught, torch.set_grad_enabled(records):
            parallel(ids=torch.arange(10).view(2, 5))
        heard.append(str(caught.value))

    def tiny() -> Dropping:
        torch.manual_seed(0)
        return Dropping()

    call(tiny().train(rank == 0))
    call(tiny(), records=rank == 0)
    other = tiny()
    other.factor = 1 + rank
    call(other)
    return heard


def test_first_calls_of_different_programs() -> None:
    says = [
        "the mode of the model must be equal on all ranks, but is rank 0: training; rank 1: evaluation",
        "the gradient mode must be equal on all ranks, but is rank 0: enabled; rank 1: disabled",
        "what the model computes must be equal on all ranks",
    ]
    for heard in run_ranks(different_first_calls, 2):
        assert [text[: len(start)] for text, start in zip(heard, says, strict=True)] == says


def use_on_one_rank_first() -> list[str]:
    """What is logged when rank 1 uses the logits later than rank 0."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evocompile").addHandler(handler)
    lazy.PATIENCE = 1.0
    torch.manual_seed(0)

    class WithLogits(Tiny):
        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.tokens(ids))
            return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits

    model = evocompile.parallelize(WithLogits(), plan=Plan(cp=2), backend="eager")
    _, logits = model(ids=torch.arange(26).view(2, 13) % 16)
    time.sleep(4.0 * dist.get_rank())
    assert torch.isfinite(logits).all()
    return records


def test_a_rank_that_waits_for_others_to_use_an_output_says_so() -> None:
    first, second = run_ranks(use_on_one_rank_first, 2)
    assert any("every rank has to use the output" in message for message in first)
    assert not any("every rank has to use the output" in message for message in second)
