"""Steps with and without the pool of buffers, on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import evocompile
from evocompile.buffers import PoolReport
from evocompile.plan import Plan
from evocompile.runtime import parallel_forward


def build() -> nn.Module:
    """Four layers, so that each buffer serves several."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
    return LlamaForCausalLM(config).train()


def steps(plan: Plan, pooled: bool) -> tuple[list[PoolReport], dict[str, Tensor]]:
    """The pool's report after each of three steps, and this rank's shards of the trained parameters."""
    model = evocompile.parallelize(build(), plan=plan, backend="eager")
    forward = parallel_forward(model)
    assert forward is not None
    buffers = forward.model.buffers
    if not pooled:
        buffers.resolve = lambda taken: lambda node: node.target  # type: ignore[method-assign, assignment, return-value]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = []
    for number in range(3):
        ids = torch.randint(0, 32, (2, 13), generator=torch.Generator().manual_seed(number))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(buffers.report())
    return reports, {name: each.to_local().detach() for name, each in model.named_parameters()}  # type: ignore[attr-defined]


def job(plans: list[Plan]) -> list[Any]:
    return [(steps(plan, True), steps(plan, False)) for plan in plans]
