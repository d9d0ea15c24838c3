"""The whole path on a card: NCCL with one rank, and two gloo ranks that share it, with the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import evocompile
from evocompile.plan import Plan, Shard
from tests.conftest import References
from tests.distributed import training
from tests.distributed.launch import launch
from tests.models.compare import assert_gradients, assert_loss, assert_parameters
from tests.models.zoo import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="trains on a card: there is no CUDA device"),
]

CASES = [Case("llama", length=13, seed=1), Case("mistral", length=13, seed=3), Case("gpt", length=13, batch=3, seed=1)]


def train(cases: list[Case], plan: Plan, backend: str, device: str) -> list[dict[str, Any]]:
    """Loss and gradients of one step, then three steps of SGD, on this rank's device; all results on the host."""
    return [on_device(case, plan, backend, device) for case in cases]


def on_device(case: Case, plan: Plan, backend: str, device: str) -> dict[str, Any]:
    model = evocompile.parallelize(case.build().to(device), plan=plan, backend=backend)
    batches = [{name: value.to(device) for name, value in case.inputs(number).items()} for number in range(3)]
    result = training.step(model, batches[0])
    optimizer = training.OPTIMIZERS["sgd"](model.parameters())
    for batch in batches:
        training.backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "loss": result["losses"][0].cpu(),
        "gradients": {name: each.cpu() for name, each in result["gradients"].items()},
        "parameters": {name: each.cpu() for name, each in training.whole(model.named_parameters()).items()},
    }


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("wire", "plan"),
    [("nccl", Plan()), ("gloo", Plan(cp=2, shard=Shard(2, 2, 2))), ("gloo", Plan(dp=2, shard=Shard(1, 1, 1)))],
    ids=["nccl-1", "gloo-cp2", "gloo-dp2"],
)
def test_a_card_gives_the_numbers_of_one_device(wire: str, plan: Plan, backend: str, references: References) -> None:
    references.compute(CASES)
    ranks = launch(train, plan.world, CASES, plan, backend, "cuda:0", timeout=600, group_timeout=300, backend=wire)
    for rank in ranks:
        assert rank.error is None, rank.error
        for case, result in zip(CASES, rank.result, strict=True):
            expected = references[case]
            assert_loss(result["loss"], expected["loss"])
            assert_gradients(result["gradients"], expected["gradients"])
            assert_parameters(result["parameters"], expected["sgd"])
