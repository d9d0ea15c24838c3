"""Losses in chunks on real ranks: accumulation, logits that are computed when they are read, what is alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import evocompile
from evocompile import Plan
from evocompile.errors import EvocompileError
from tests.distributed.launch import run_ranks
from tests.passes.test_chunk_rows import VOCABULARY, WIDTH, PlainGPT, batch

LENGTH = 40


class WithLogits(PlainGPT):
    """As Hugging Face's models, which return logits beside the loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = torch.tanh(self.head(self.tokens(ids))) * 3
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Largest(TorchDispatchMode):
    """The largest tensor that an operator gives, in elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [each.untyped_storage().nbytes() // 8 for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}  # type: ignore[attr-defined]


def on_ranks() -> dict[str, Any]:
    plan = Plan(cp=2, loss_chunk=3 * 2 * VOCABULARY * 8, mlp_chunk=3 * 2 * 5 * WIDTH * 8)
    found: dict[str, Any] = {}
    model = evocompile.parallelize(PlainGPT().double(), plan=plan, backend="eager")
    inputs = batch(LENGTH)
    evocompile.compile(model, **inputs)
    with Largest() as largest:
        model(**inputs).backward()
    found["largest"] = largest.elements
    model.zero_grad()
    with model.no_sync():
        model(**inputs).backward()
    model(**inputs).backward()
    found["accumulated"] = gradients(model)

    parts = Plan(cp=2, microbatches=2, loss_chunk=plan.loss_chunk)
    model = evocompile.parallelize(PlainGPT().double(), plan=parts, backend="eager")
    model(**inputs).backward()
    found["micro-batches"] = gradients(model)

    model = evocompile.parallelize(WithLogits().double(), plan=plan, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, logits = model(**inputs)
    _, unread = model(**inputs)
    loss.backward()
    found |= {"shape": tuple(logits.shape), "before": logits.is_gathered, "logits": logits + 0}
    optimizer.step()
    try:
        unread.sum()
    except EvocompileError as error:
        found["error"] = str(error)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    first, second = run_ranks(on_ranks, 2)
    assert torch.equal(first["logits"], second["logits"])
    return first


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    model = PlainGPT().double()
    model(**batch(LENGTH)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_nothing_is_as_large_as_the_logits(found: dict[str, Any]) -> None:
    """A rank's logits have 20 rows of two batches; a chunk 3, and next in size are the weights and hidden states."""
    assert found["largest"] <= max(VOCABULARY, 3 * WIDTH, 5 * WIDTH) * WIDTH * 2 < LENGTH * VOCABULARY


@pytest.mark.parametrize(("kind", "steps"), [("accumulated", 2), ("micro-batches", 1)])
def test_gradients_of_one_device(found: dict[str, Any], expected: dict[str, Tensor], kind: str, steps: int) -> None:
    assert found[kind].keys() == expected.keys()
    for name, gradient in found[kind].items():
        torch.testing.assert_close(gradient, steps * expected[name], rtol=1e-10, atol=1e-10)


def test_logits_are_computed_when_they_are_read(found: dict[str, Any]) -> None:
    _, logits = WithLogits().double()(**batch(LENGTH))
    assert found["shape"] == tuple(logits.shape) and not found["before"]
    torch.testing.assert_close(found["logits"], logits.detach(), rtol=1e-10, atol=1e-10)


def test_logits_of_parameters_that_have_changed_are_refused(found: dict[str, Any]) -> None:
    assert "after the parameters have changed" in found["error"] and "loss_chunk=0" in found["error"]
