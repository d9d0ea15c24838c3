"""An operator that fails on one rank: the model's line, and no rank waits for the time-out. Then the model goes on."""

from __future__ import annotations

import time
import traceback

import pytest
import torch
from torch import Tensor, nn

import evocompile
from evocompile import DeadlockError, Plan
from tests.distributed.launch import run_ranks

PATIENCE = 50.0  # seconds that a test may take; the group's time-out is 60


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 8), nn.Linear(8, 31)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def beyond_the_vocabulary() -> dict[str, tuple[str, str]]:
    """The type of the error, and what Python prints of it, on this rank in each case."""
    torch.manual_seed(0)
    model = evocompile.parallelize(Net(), plan=Plan(cp=2), backend="eager")
    good = torch.arange(26).view(2, 13)
    bad = good.clone()
    bad[1, 5] = 31  # a position of rank 1
    expected = model(good, good).item()
    heard, begun = {}, time.monotonic()
    for name, batch in {"ids": (bad, good), "labels": (good, bad)}.items():
        try:
            model(*batch).backward()
        except Exception as error:
            heard[name] = type(error).__name__, "".join(traceback.format_exception(error))
        assert model(good, good).item() == expected
    assert time.monotonic() - begun < PATIENCE
    return heard


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[str, str]]]:
    return run_ranks(beyond_the_vocabulary, 2)


@pytest.mark.parametrize(
    ("case", "kind", "line"),
    [
        ("ids", "IndexError", "x = self.tokens(ids)"),
        ("labels", "RuntimeError", "return nn.functional.cross_entropy(self.head(x)"),
    ],
)
def test_an_index_beyond_the_vocabulary(case: str, kind: str, line: str, outcomes: list) -> None:
    (waiting, told), (failing, own) = (each[case] for each in outcomes)
    assert (waiting, failing) == (DeadlockError.__name__, kind)
    for text in (told, own):
        assert "rank 1 failed in" in text and "test_failures.py" in text and line in text
