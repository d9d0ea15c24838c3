"""The static memory model against the tensors that are alive on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import evocompile
from benchmarks.live_bytes import LiveBytes
from evocompile.errors import EvocompileError
from evocompile.plan import Plan, Shard
from evocompile.runtime import parallel_forward
from tests.distributed.launch import run_ranks
from tests.models.zoo import Case

CASES = [
    (Case("llama", length=301), Plan(cp=2, attention="balanced", recompute="attention")),
    (Case("gpt-neox", length=257, form="left"), Plan(dp=2, shard=Shard(1, 2, 2), offload=0.5)),
]


def peaks(case: Case, plan: Plan) -> tuple[int, int]:
    """Of a step: predicted, and measured."""
    model = evocompile.parallelize(case.build(), plan=plan, backend="eager", memory=10**12)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = case.inputs()
    _loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values()]
    there = [each.to_local() if isinstance(each, DTensor) else each for each in [*model.parameters(), *state]]
    with LiveBytes() as live:
        _loss(model, batch).backward()
    forward = parallel_forward(model)
    assert forward is not None and forward.memory is not None
    before = sum(each.nbytes for each in [*there, *model.buffers(), *batch.values()])
    return forward.memory.peak, before + forward.model.buffers.report().bytes + live.peak


def _loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(**batch)
    return found.loss if hasattr(found, "loss") else found[0]


def refused(memory: int) -> tuple[str, bool]:
    """What a call says that may use so much memory, and whether it was compiled."""
    case = Case("llama", length=301)
    model = evocompile.parallelize(case.build(), plan=Plan(cp=2), backend="eager", memory=memory)
    try:
        _loss(model, case.inputs())
    except EvocompileError as error:
        return str(error), parallel_forward(model).memory is not None  # type: ignore[union-attr]
    return "", True


def job() -> tuple[list[tuple[int, int]], Any]:
    return [peaks(*each) for each in CASES], refused(100_000)


def test_predicted_is_measured_and_what_does_not_fit_is_refused() -> None:
    for rank, (found, too_much) in enumerate(run_ranks(job, 2)):
        for (case, plan), (predicted, measured) in zip(CASES, found, strict=True):
            assert abs(predicted - measured) < 0.03 * measured, (case, plan, rank, predicted, measured)
        message, built = too_much
        assert f"rank {rank}, which may use 100,000" in message and not built
        assert "on all ranks" not in message  # each tells of its own
