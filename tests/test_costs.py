"""Predicted costs against what is counted in the graphs of small models, plan by plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from evocompile.accounting import held
from evocompile.capture import capture
from evocompile.cluster import Cluster
from evocompile.costs import Costs
from evocompile.evaluate import Evaluator, degrees_of
from evocompile.fold import Folded, ends, fold, keys, repeating, whole
from evocompile.graph_costs import SPLIT, WHOLE, count
from evocompile.memory import step_memory
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.precision import Precision
from evocompile.predicted import sent_by_purpose
from evocompile.program import Program
from evocompile.search import describe
from tests.captured_model import llama

BATCH, LENGTH = 4, 16
PRECISION = Precision.of("bf16")


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def loss(model: nn.Module, **batch: Any) -> torch.Tensor:
    return model(**batch).loss


@cache
def folded() -> Folded:
    model = llama(tied=False).float()
    return fold(model, (), inputs(), PRECISION, lambda **batch: loss(model, **batch))


@cache
def deep() -> tuple[Any, Folded]:
    model = llama(tied=True, layers=4).float()
    return model, fold(model, (), inputs(), PRECISION)


@cache
def counted(plan: Plan, rank: int) -> Program:
    return run_passes(folded().program, plan, rank)


def evaluator(costs: Costs) -> Evaluator:
    return Evaluator(costs, Cluster("cpu-gloo"), BATCH, LENGTH)


def by_purpose(program: Program) -> dict[str, int]:
    """Bytes sent in a step, as `sent_by_purpose` names them; of micro-batches, as often as each runs."""
    parts = program.micro.plan.microbatches if program.micro else 1
    forward, backward = program.forward, program.backward
    steps = [program.first or forward, *[forward] * (parts - 1)]
    steps += [backward] if parts == 1 else [*[program.inner or backward] * (parts - 1), program.last or backward]
    total: Counter[str] = Counter()
    for module in steps:
        assert module is not None
        for node in module.graph.nodes:
            if node in program.collectives:
                purpose = program.collectives[node].group.split(":")[0]
                total[purpose.removesuffix(".backward")] += program.collectives[node].sent
    return {name: bytes_ for name, bytes_ in total.items() if bytes_}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, cp=2),
        Plan(cp=4, attention="ring", shard=Shard(1, 2, 4)),
        Plan(cp=4, attention="balanced", recompute="attention", shard=Shard(2, 2, 4)),
        Plan(ulysses=2, cp=2, recompute="full", shard=Shard(1, 1, 2)),
        Plan(ulysses=2, dp=2, shard=Shard(1, 1, 1)),
        Plan(dp=2, cp=2, ulysses=2, placement="context-first", shard=Shard(2, 4, 8)),
        Plan(dp=2, cp=2, microbatches=2, shard=Shard(2, 2, 4)),
        Plan(cp=4, recompute="full", recompute_layers=0.5),
        Plan(tp=2, shard=Shard(1, 1, 1)),
        Plan(dp=2, tp=2, recompute="full", shard=Shard(1, 2, 4)),
        Plan(cp=2, tp=2, recompute="attention", attention="ring"),
        Plan(ulysses=2, tp=2, dp=2, shard=Shard(2, 4, 8)),
        Plan(dp=2, tp=2, microbatches=2, shard=Shard(1, 2, 4)),
        Plan(tp=4, shard=Shard(1, 4, 4)),  # more ranks than key/value heads: attention is not split
    ],
    ids=str,
)
def test_predicted_bytes_are_the_counted_ones(plan: Plan) -> None:
    costs = Costs(folded())
    for rank in {0, plan.world // 2, plan.world - 1}:
        assert sent_by_purpose(costs, plan, rank) == by_purpose(counted(plan, rank))


def test_states_are_those_of_the_account() -> None:
    costs, plan = Costs(folded()), Plan(cp=4, shard=Shard(1, 2, 4))
    account = {each.what: each.bytes for each in held(counted(plan, 0))}
    parts = dataclasses.replace(plan, microbatches=2)  # gradients of one are reduced one by one, and never all there
    terms = evaluator(costs).held(degrees_of([parts]), "none", np.zeros(1))
    assert terms["parameters to compute with"][0] == account["parameters to compute with"]
    assert terms["gradients of micro-batches"][0] == account["gradients of micro-batches"]
    assert terms["optimizer"][0] == account["optimizer: parameters"] + account["optimizer: 2 states"]
    activations = terms["activations"][0] + terms["gathered"][0]
    beyond = max(0, account["optimizer: .grad, while it steps"] - activations)
    assert terms["gradients, beyond activations"][0] == beyond


@pytest.mark.parametrize(
    "plan",
    [
        Plan(cp=2, shard=Shard(1, 2, 2), recompute="attention", recompute_layers=0.5),
        Plan(dp=2, cp=8, attention="ring", recompute="full"),
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_scheduled_graphs(plan: Plan) -> None:
    """Within 5 %, with logits that are computed in chunks (cp=2: 500 MB of them at a rank), and whole ones."""
    costs, program = large()
    found = describe(Evaluator(costs, Cluster("cpu-gloo"), 2, 4096), plan)
    peak = step_memory([run_passes(program, plan, 0)]).peak
    assert found.memory == pytest.approx(peak, rel=0.05)


@cache
def large() -> tuple[Costs, Program]:
    """Four layers and a large vocabulary, on meta."""
    with torch.device("meta"):
        config = LlamaConfig(hidden_size=256, intermediate_size=640, num_hidden_layers=4, vocab_size=32000)
        config.num_attention_heads, config.num_key_value_heads, config.use_cache = 8, 4, False
        model = LlamaForCausalLM(config)
    ids = torch.zeros(2, 4096, dtype=torch.long, device="meta")
    program = capture(model.forward, model, (), {"input_ids": ids, "labels": ids}).program
    return Costs(whole(program)), program


def test_folded_layers_cost_what_all_of_them_do() -> None:
    """Four layers from two and three, against four."""
    model, found = deep()
    assert (found.layers, found.captured, found.period) == (4, 2, 1)
    assert len(model.model.layers) == 4
    every = count(capture(model.forward, model, (), inputs(), precision=PRECISION).program)
    for mode, counts in found.counts.items():
        assert counts == every[mode]


def test_a_period_of_layers_is_found() -> None:
    """Two kinds of layers in turns behind one that is like none of them."""
    kinds = [3, *[1, 2] * 4]
    model = nn.Sequential()
    model.layers = nn.ModuleList([nn.Linear(4, width) for width in kinds])
    (layers,) = repeating(model).values()
    assert ends(keys(layers)) == (1, 2)


def test_a_model_that_counts_its_layers_is_captured_whole(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(6):
                x = self.layers[i](x)
            return x.sum()

    found = fold(Counting(), (torch.zeros(2, 4),), {})
    assert found.repeated is None
    assert "all 6 are captured" in caplog.text
    assert found.counts["none"].forward["float32"].at(2, 4, 1, 1) == 2 * 6 * 2 * 16


def test_products_are_those_of_the_formula() -> None:
    """2 FLOPs for each weight of a product and token forward, twice that backward; attention by its pairs."""
    costs = Costs(folded())
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) + 64 * 32
    none = costs.counts("none")
    assert none.forward["bfloat16"] == {(SPLIT, SPLIT, WHOLE): 2 * weights}
    assert none.backward["bfloat16"] == {(SPLIT, SPLIT, WHOLE): 4 * weights}
    assert costs.pairs(LENGTH) == {"N0": LENGTH * (LENGTH + 1) / 2}
    (kind,) = costs.kinds
    assert (kind.heads, kind.kv_heads, kind.dim) == (4, 2, 8)


def test_costs_can_be_printed() -> None:
    costs = Costs(folded())
    assert str(costs.sent("none", "zigzag")["ulysses"])
    assert {str(each) for each in costs.seconds("none", "zigzag")["attention"].free_symbols} >= {"B", "N0", "cp", "dp"}


def test_recomputation_keeps_what_it_says() -> None:
    """Full keeps a layer's residual: BSD elements of 2 bytes. Attention also keeps out and the log-sum-exp."""
    repeated = deep()[1].repeated
    assert repeated is not None
    assert repeated["full"].saved == {(SPLIT, SPLIT, WHOLE): 2 * 32}
    assert repeated["attention"].saved == {(SPLIT, SPLIT, WHOLE): 2 * 32 + 2 * 32 + 4 * 4}
