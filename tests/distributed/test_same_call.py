"""Ranks that make different calls, after the first good one, hear of it at once, all of them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import evocompile
from evocompile import InputError, Plan
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
def test_every_rank_hears_at_once(case: str, says: str, outcomes: list[dict[str, tuple[str, float]]]) -> None:
    for heard in outcomes:
        message, seconds = heard[case]
        assert says in message
        assert seconds < 30  # far below any time-out
