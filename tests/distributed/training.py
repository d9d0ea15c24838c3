"""What ranks do in the end-to-end tests, through the public API only; every rank returns whole, plain tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import evocompile
from evocompile.plan import Plan
from tests.models.reference import OPTIMIZERS, STEPS
from tests.models.zoo import Case

Batch = dict[str, Tensor]
MAX_NORM = 0.1  # what gradients are clipped to


def parallel_model(case: Case, plan: Plan, backend: str, **options: Any) -> nn.Module:
    return evocompile.parallelize(case.build(), plan=plan, backend=backend, **options)


def whole(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """Copies of the whole values, by name; those that are `None` are left out."""
    gathered = {}
    for name, value in dict(values).items():
        if value is not None:
            tensor = value.detach()
            gathered[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return gathered


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return whole((name, parameter.grad) for name, parameter in model.named_parameters())


def backward(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a batch, after its backward."""
    loss = model(**batch)[0]
    loss.backward()
    return loss.detach()


def step(model: nn.Module, *batches: Batch) -> dict[str, Any]:
    """Losses of the batches and the sum of their gradients, which the model has no more afterwards."""
    losses = [backward(model, batch) for batch in batches]
    result = {"losses": losses, "gradients": gradients(model)}
    model.zero_grad()
    return result


def train(case: Case, plan: Plan, backend: str) -> dict[str, Any]:
    """As `tests.models.reference.train`; also the first state, and the first gradients' norm and clipped values."""
    model = parallel_model(case, plan, backend)
    result: dict[str, Any] = {"state": whole(model.state_dict())}
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, make in OPTIMIZERS.items():
        result[name] = optimize(model, make(model.parameters()), case)
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                parameter.copy_(first[n])
    result["loss"] = backward(model, case.inputs())
    result["gradients"] = gradients(model)
    result |= whole({"norm": nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)})
    result["clipped"] = gradients(model)
    return result


def optimize(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> dict[str, Any]:
    """Losses and parameters of `STEPS` steps."""
    losses = []
    for number in range(STEPS):
        losses.append(backward(model, case.inputs(number)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "parameters": whole(model.named_parameters())}


def first_step(case: Case, plan: Plan, backend: str) -> dict[str, Any]:
    """Loss and gradients of one step."""
    return step(parallel_model(case, plan, backend), case.inputs())


def descend(case: Case, plan: Plan, backend: str) -> dict[str, Any]:
    """Three steps of SGD."""
    model = parallel_model(case, plan, backend)
    return optimize(model, OPTIMIZERS["sgd"](model.parameters()), case)


def train_with_a_passed_optimizer(case: Case, plan: Plan, backend: str) -> dict[str, Any]:
    model = case.build()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    evocompile.parallelize(model, plan=plan, backend=backend, optimizer=optimizer)
    return optimize(model, optimizer, case)


def train_on_two_lengths(case: Case, plan: Plan, backend: str) -> list[dict[str, Any]]:
    """Steps of the case's length, of another one, and of the case's again."""
    model = parallel_model(case, plan, backend)
    return [step(model, inputs) for inputs in batches_of_two_lengths(case)]


def batches_of_two_lengths(case: Case) -> list[Batch]:
    return [case.inputs(0), dataclasses.replace(case, length=case.length - 5).inputs(1), case.inputs(2)]


def accumulate(case: Case, plan: Plan, backend: str) -> dict[str, Any]:
    """Two backward calls without a step between them."""
    return accumulate_on(parallel_model(case, plan, backend), case)


def accumulate_on(model: nn.Module, case: Case) -> dict[str, Any]:
    return step(model, case.inputs(0), case.inputs(1))


def evaluate(case: Case, plan: Plan, backend: str) -> list[Tensor]:
    """Logits in evaluation: without labels, and beside the loss."""
    return logits(parallel_model(case, plan, backend), case)


def logits(model: nn.Module, case: Case) -> list[Tensor]:
    model.eval()
    batch = case.inputs()
    with torch.no_grad():
        return [model(input_ids=batch["input_ids"])[0] + 0, model(**batch)[1] + 0]


def train_beside_others(case: Case, plan: Plan, backend: str) -> dict[str, list[dict[str, Any]]]:
    """Steps of a plain model, a parallel one, and a parallel one of another plan and other values, in turns.

    The plain model also takes a step before there is any parallel model.
    """
    plain = case.build()
    steps = {"plain": [step(plain, case.inputs())], "parallel": [], "other": []}
    models = {
        "parallel": parallel_model(case, plan, backend),
        "plain": plain,
        "other": parallel_model(other_case(case), Plan(dp=plan.cp, cp=plan.dp, attention="ring"), backend),
    }
    for number in range(2):
        losses = {name: model(**case.inputs(number))[0] for name, model in models.items()}
        for name, loss in losses.items():
            loss.backward()
            steps[name].append({"losses": [loss.detach()], "gradients": gradients(models[name])})
            models[name].zero_grad()
    return steps


def other_case(case: Case) -> Case:
    """The same model with other values."""
    return dataclasses.replace(case, seed=case.seed + 1)
