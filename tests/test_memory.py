"""The static memory model: what it says of a program, before anything runs. Measured peaks: tests/distributed."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest
import torch
from torch import nn

from evocompile import inspect
from evocompile.errors import PlanError
from evocompile.memory import SAVED, TERMS, check_fits, step_memory
from evocompile.optimizers import states_of
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import nbytes
from tests.models.zoo import Case
from tests.virtual_model import captured

PLANS = [
    Plan(cp=2),
    Plan(dp=2, cp=2, shard=Shard(1, 2, 4), recompute="attention"),
    Plan(dp=2, shard=Shard(1, 1, 2)),
    Plan(ulysses=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_terms_add_up_and_everything_is_freed(plan: Plan, fused: bool) -> None:
    _, whole = captured(Case("llama", length=24))
    memory = step_memory([run_passes(whole.program, plan, 1)], fused=fused)
    assert sum(memory.terms.values()) == memory.peak == max(each.bytes for each in memory.curve)
    assert list(memory.terms) == [term for term in TERMS if term in memory.terms]
    assert memory.at in memory.curve
    degrees, elements = (
        plan.shard_degrees,
        sum(each.numel() for each in captured(Case("llama", length=24))[0].parameters()),
    )
    states = memory.terms["parameters"] + memory.terms["optimizer states"]
    assert states == pytest.approx(3 * 4 * elements / degrees.optimizer, rel=0.05)
    # Behind the step: the states, the gradients over O, the batch and, if they are others, nothing of the copies.
    last = memory.curve[-1]
    assert last.node == "step"
    copies = 4 * elements / degrees.params if degrees.params != degrees.optimizer else 0
    assert last.bytes - copies == pytest.approx(4 * 4 * elements / degrees.optimizer, rel=0.05)


def test_what_is_saved_is_alive_between_the_graphs() -> None:
    """At the end of the forward all that it saves is there, less is after, and recomputation makes it less."""
    _, whole = captured(Case("llama", length=24))
    between = {}
    for mode in ("none", "attention", "full"):
        program = run_passes(whole.program, Plan(cp=2, recompute=mode), 0)
        memory = step_memory([program])
        saved = sum(nbytes(node.meta["val"]) for node in program.saved)
        end = next(i for i, each in enumerate(memory.curve) if each.graph == "backward") - 1
        between[mode] = memory.curve[end].bytes
        assert between[mode] >= memory.curve[0].bytes - 4 * 2**10 + saved - saved // 10
        assert memory.terms[SAVED] > 0
    assert between["full"] < between["attention"] < between["none"]


def test_inductor_holds_no_more() -> None:
    _, whole = captured(Case("llama", length=24))
    program = run_passes(whole.program, Plan(cp=2), 0)
    eager, fused = step_memory([program]).curve, step_memory([program], fused=True).curve
    assert all(less.bytes <= more.bytes for less, more in zip(fused, eager, strict=True))
    assert sum(each.bytes for each in fused) < 0.995 * sum(each.bytes for each in eager)


def test_row_16_it_is_known_without_the_memory() -> None:
    """PAINS row 16: the estimate is made on fake tensors, and takes no memory by itself."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(hidden_size=4096, num_hidden_layers=2, vocab_size=32000, use_cache=False)
        )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids = torch.zeros(1, 2**17, dtype=torch.long)
    found = inspect(model, {"input_ids": ids, "labels": ids}, plan=Plan(cp=8))
    assert found.memory.peak > 10 * 2**30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30
    text = str(found)
    assert f"memory of a step: {found.memory.peak:,} bytes at the peak" in text
    for term, size in found.memory.terms.items():
        assert f"{size:,}  {term}" in text
    assert json.loads(found.memory.to_json())["curve"][-1] == ["optimizer", "step", found.memory.curve[-1].bytes]


def test_what_does_not_fit_is_refused() -> None:
    _, whole = captured(Case("llama", length=24))
    memory = step_memory([run_passes(whole.program, Plan(cp=2), 1)])
    check_fits(memory, memory.peak, 1)
    with pytest.raises(PlanError) as caught:
        check_fits(memory, memory.peak - 1, 1)
    for part in (f"{memory.peak:,} bytes of memory on rank 1", f"may use {memory.peak - 1:,}", "memory="):
        assert part in str(caught.value)
    largest = max(memory.terms, key=lambda term: memory.terms[term])
    assert f"{largest} {memory.terms[largest]:,}" in str(caught.value)
    assert "Plan(" in str(caught.value) or "more ranks" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (torch.optim.AdamW, 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.RMSprop(p, centered=True), 2),
        (torch.optim.Adagrad, 1),
        (torch.optim.NAdam, 2),
    ],
)
def test_the_state_of_an_optimizer(make: Any, states: int) -> None:
    """As its class tells before the first step, and as it is behind it."""
    linear = nn.Linear(5, 7)
    optimizer = make(linear.parameters())
    assert states_of(optimizer) == states
    linear(torch.ones(5)).sum().backward()
    optimizer.step()
    assert states_of(optimizer) == states
