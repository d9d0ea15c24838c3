"""Models, batches and comparisons that the tests of forms, inputs and states share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile import Plan
from tests.distributed.test_parallelize import close, full_gradients
from tests.models.zoo import PlainGPT

VOCABULARY = 67
Batch = dict[str, Tensor]


def gpt(seed: int = 0) -> PlainGPT:
    torch.manual_seed(seed)
    return PlainGPT().double()


def tokens(rows: int = 3, length: int = 7, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return {"input_ids": ids, "labels": labels}


def plans(**options: Any) -> dict[str, Any]:
    """Options of `parallelize` for a quick run on all ranks."""
    world = dist.get_world_size()
    return {"backend": "eager", "plan": Plan(dp=world // 2, cp=2), **options}


def replica() -> int:
    """This rank's coordinate on dp."""
    return dist.get_rank() // (dist.get_world_size() // 2)


def parts(batch: Batch, *rows: int) -> Batch:
    """The rows of this rank's replica."""
    lo = sum(rows[: replica()])
    return {name: each[lo : lo + rows[replica()]] if each.ndim > 1 else each for name, each in batch.items()}


def dp2(**options: Any) -> dict[str, Any]:
    return {"backend": "eager", "plan": Plan(dp=2, cp=dist.get_world_size() // 2), "inputs": "local", **options}


def same_step(parallel: nn.Module, plain: nn.Module, loss: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
    loss.backward()
    expected.backward()
    close(full_gradients(parallel), full_gradients(plain))
    for each in (parallel, plain):
        each.zero_grad()


def smoothed_loss(model: nn.Module, batch: Batch, *, smoothing: float = 0.0) -> Tensor:
    """The labels are shifted here, outside of the model, and the loss has a term of the logits."""
    (logits,) = model(batch["input_ids"])
    labels = batch["labels"][:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=smoothing)
    return loss + 1e-3 * logits.logsumexp(-1).square().mean()


class Normed(nn.Module):
    """Parameters that are frozen, unused, or detached; statistics of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.detached = nn.Parameter(torch.randn(6))
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.frozen(self.embedding(ids)) + self.detached.detach()
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def small_batch(rows: int = 3, length: int = 5, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(11, (rows, length), generator=generator) for name in ("ids", "labels")}
