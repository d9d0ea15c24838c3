"""A run with checkpoints, as a user writes it: what `test_checkpoints.py` starts, kills and starts again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from evocompile import Checkpoints, Plan, Shard, StateError, parallelize, unsharded

EPOCHS, ROWS, LENGTH, VOCABULARY = 2, 10, 6, 13


class Dropping(nn.Module):
    """Draws random numbers; has tied, uneven and frozen parameters, a buffer, and one that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, 6)
        self.norm = nn.BatchNorm1d(6)
        self.hidden = nn.Linear(6, 5)
        self.back = nn.Linear(5, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids).transpose(1, 2)).transpose(1, 2)
        x = x + self.back(F.dropout(self.hidden(x).relu(), 0.3, self.training)) * self.scale
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Run:
    """A training run in `folder`. plan: `None` for one device."""

    def __init__(self, folder: Path, plan: Plan | None, **options: Any) -> None:
        self.model: nn.Module = Dropping()
        if plan is not None:
            parallelize(self.model, plan=plan, backend="eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        timeout = timedelta(seconds=20)
        self.checkpoints = Checkpoints(
            folder, self.model, self.optimizer, schedule=self.schedule, timeout=timeout, **options
        )
        self.losses: list[float] = []

    def train(self, *, asynchronous: bool = False, before_save: Callable[[int], None] = id) -> None:
        """Go on from the newest checkpoint to the end, with a checkpoint after every second step."""
        torch.manual_seed(17)
        position = self.checkpoints.load() or {"step": 0, "epoch": 0, "batch": 0}
        ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 7 % VOCABULARY
        step, first = position["step"], position["batch"]
        order = torch.Generator()
        for epoch in range(position["epoch"], EPOCHS):
            order.manual_seed(epoch)  # so that an epoch's order depends on nothing else
            for number, (batch,) in enumerate(DataLoader(TensorDataset(ids), 3, shuffle=True, generator=order)):
                if number < first:
                    continue
                loss = self.model(batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.losses.append(loss.item())
                step += 1
                if step % 2 == 0:
                    before_save(step)
                    self.checkpoints.save(step, asynchronous=asynchronous, epoch=epoch, batch=number + 1)
            first = 0
        self.checkpoints.finish()


def die_while_writing(step: int) -> None:
    """The next save of the last rank ends in a kill, when the first file is written but not synchronised."""
    if step == 6 and dist.get_rank() == dist.get_world_size() - 1:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


def whole_state(run: Run) -> dict[str, Tensor]:
    """All tensors of model and optimizer, whole, by name; the optimizer's are counted over its own order."""
    optimizer = run.optimizer.state_dict()["state"]
    states = {f"{index}.{name}": each for index, state in optimizer.items() for name, each in state.items()}
    return {name: whole(each) for name, each in {**run.model.state_dict(), **states}.items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def loaded(folder: Path, plan: Plan | None) -> dict[str, Tensor]:
    """What a new run finds in the folder, and that `torch.distributed.checkpoint` finds the same by itself."""
    run = Run(folder, plan)
    assert run.checkpoints.load() is not None
    other = Run(folder, plan).model
    step = run.checkpoints.steps()[-1]
    dcp.load({"model": other.state_dict()}, checkpoint_id=folder / f"step-{step:08d}", no_dist=plan is None)
    for name, value in other.state_dict().items():
        assert torch.equal(whole(value), whole(run.model.state_dict()[name])), name
    return whole_state(run)


def saved_again(folder: Path, other: Path, plan: Plan) -> None:
    """What is loaded from the first folder under the plan, saved under it in the other."""
    run = Run(folder, plan)
    run.checkpoints.load()
    Checkpoints(other, run.model, run.optimizer, schedule=run.schedule).save(1)


# The copies to compute with are other shards than the optimizer's, which are saved: P < O, but for HSDP.
FOUR = Plan(dp=2, tp=2, shard=Shard(params=1, grads=2, optimizer=4))
HSDP = Plan(dp=2, cp=2, shard=Shard(2, 2, 2))
TWO = Plan(cp=2, shard=Shard(params=1, grads=2, optimizer=2))


def on_four_ranks(folder: Path) -> dict[str, Any]:
    found = loaded(folder / "one", HSDP)
    saved_again(folder / "one", folder / "hsdp", HSDP)
    run = Run(folder / "four", FOUR)
    run.train()
    state = whole_state(run)
    written_while_unsharded(run.model, found)
    return {"one": found, "four": state}


def written_while_unsharded(model: nn.Module, state: dict[str, Tensor]) -> None:
    """What all ranks write to the plain model is in the shards afterwards, also where these have copies."""
    state = {name: state[name] for name in model.state_dict()}
    with unsharded(model):
        model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), state[name]), name


def on_two_ranks(folder: Path) -> dict[str, Any]:
    plan = TWO
    found = {name: loaded(folder / name, plan) for name in ("one", "four", "hsdp")}
    straight = Run(folder / "two", plan, keep=3)
    straight.train(asynchronous=True)
    after_kill = Run(folder / "killed", plan)
    steps = after_kill.checkpoints.steps()
    after_kill.train()
    runs = {"two": straight, "killed": after_kill}
    return {
        **found,
        **{name: whole_state(each) for name, each in runs.items()},
        "losses": {name: each.losses for name, each in runs.items()},
        "steps": [steps, straight.checkpoints.steps()],
    }


def killed(folder: Path) -> float:
    """Seconds until the survivors of a rank that dies in a save raise."""
    run = Run(folder / "killed", TWO)
    began = 0.0

    def before_save(step: int) -> None:
        nonlocal began
        began = time.monotonic()
        die_while_writing(step)

    try:
        run.train(before_save=before_save)
    except StateError as error:
        assert "the checkpoint of step 6 was not completed" in str(error), error
        assert "the last complete one is of step 4" in str(error), error
        return time.monotonic() - began
    raise AssertionError("the save ended although a rank did not take part")
