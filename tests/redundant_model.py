"""A model whose parameters are awkward to shard, its batches, and what one device makes of them. No evocompile here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

STEPS = 5
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


class Model(nn.Module):
    """Rows that divide by nothing (11, 7, 3), fewer rows than ranks (1), none at all, a tie, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6, bias=False)
        self.gate = nn.Parameter(torch.randn(1, 6))
        self.low, self.high = nn.Linear(6, 3, bias=False), nn.Linear(3, 6)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.down(torch.tanh(self.up(x))) * self.gate
        x = x + self.high(self.low(x @ self.frozen)) * self.scale
        return nn.functional.cross_entropy((x @ self.tokens.weight.t()).flatten(0, 1), labels.flatten())


def batch(number: int) -> dict[str, Tensor]:
    """(4, 5) ids and labels; another number of labels counts in each."""
    generator = torch.Generator().manual_seed(number)
    ids, labels = torch.randint(11, (2, 4, 5), generator=generator)
    labels[number % 4, number % 5 :] = -100
    return {"ids": ids, "labels": labels}


@dataclass(frozen=True)
class Training:
    """Every micro-batch's loss, the gradients of every step, the last parameters."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


@functools.cache
def one_device(optimizer: str, accumulation: int) -> Training:
    """In float64."""
    model = Model().double()
    own = OPTIMIZERS[optimizer](model.parameters())
    losses, gradients = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = model(**batch(accumulation * step + micro))
            loss.backward()
            losses.append(loss.detach())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        own.step()
        own.zero_grad()
    return Training(losses, gradients, {name: p.detach() for name, p in model.named_parameters()})


def assert_same(found: Training, expected: Training) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-10, atol=1e-10)
    for own, one in zip(found.gradients, expected.gradients, strict=True):
        assert_same_gradients(own, one)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-7, atol=1e-9)


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
