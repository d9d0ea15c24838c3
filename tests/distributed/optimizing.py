"""Steps of every optimizer on shards, with the same gradients on every rank, against steps on plain parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from evocompile.shards import shard_of
from evocompile.state import as_gradient, shard_parameters, state_mesh
from tests.distributed.training import whole

STEPS = 4


class Lion(torch.optim.Optimizer):
    """A user's own optimizer, written with plain tensor operations."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                update = (average * first + parameter.grad * (1 - first)).sign_()
                parameter.add_(update, alpha=-group["lr"])
                average.mul_(second).add_(parameter.grad, alpha=1 - second)


Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
o = torch.optim
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: o.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: o.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: o.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: o.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: o.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: o.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: o.Adadelta(p, lr=0.1),
    "Adamax": lambda p: o.Adamax(p, lr=0.01),
    "NAdam": lambda p: o.NAdam(p, lr=0.01),
    "RAdam": lambda p: o.RAdam(p, lr=0.01),
    "ASGD": lambda p: o.ASGD(p, lr=0.01),
    "Rprop": lambda p: o.Rprop(p, lr=0.01),
    "Lion": lambda p: Lion(p),
    "Muon": lambda p: o.Muon([each for each in p if each.ndim == 2], lr=0.01),
    "Adafactor": lambda p: o.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: o.LBFGS(p, lr=0.1),
}


class Uneven(nn.Module):
    """5 and 3 rows, one row, no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)
        self.row, self.scale = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.tensor(0.7))


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def optimize(name: str, degree: int | None) -> dict[str, Tensor]:
    """Whole parameters after the steps. degree: over how many ranks they are sharded; `None`: plain ones."""
    model, rank = Uneven(), 0
    if degree is not None:
        import torch.distributed as dist

        rank = dist.get_rank()
        shard_parameters(model, state_mesh(dist.get_world_size(), degree, "cpu"), degree)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = o.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for step in range(STEPS):
        for key, value in gradients(model, step).items():
            parameter = model.get_parameter(key)
            local = value if degree is None else shard_of(value, degree, degree, rank).clone()
            parameter.grad = local if degree is None else as_gradient(parameter, local)
        optimizer.step((lambda: torch.tensor(0.0)) if name == "LBFGS" else None)
        scheduler.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return whole(model.named_parameters())


def optimize_all(names: list[str], degree: int) -> dict[str, Any]:
    """By name the parameters, or the error."""
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = optimize(name, degree)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results
