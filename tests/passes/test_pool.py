"""Buffers of gathers and reductions: what shares one never overlaps, and what a graph returns is in none."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import fx

from evocompile.capture import Captured, capture
from evocompile.collectives import is_start, is_wait
from evocompile.memory import step_memory
from evocompile.passes.pool import pool
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.printing import summary
from evocompile.program import nbytes, output_values
from evocompile.storages import is_view
from tests.distributed.pooling import build

PLANS = [
    Plan(cp=2),
    Plan(cp=2, recompute="full", overlap="none", offload=1.0),
    Plan(tp=2),
    Plan(dp=2, cp=2, shard=Shard(2, 2, 4), overlap="none"),
]


@cache
def _captured() -> Captured:
    model = build()
    ids = torch.zeros(2, 13, dtype=torch.long)
    return capture(model.forward, model, (), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_buffer_is_free_when_it_is_taken_again(plan: Plan) -> None:
    program = run_passes(_captured().program, plan, 1)
    assert program.pool
    for graph_module in program.graphs.values():
        graph = graph_module.graph
        order = {node: i for i, node in enumerate(graph.nodes)}
        taken = [node for node in graph.nodes if node in program.pool]
        ends: dict[object, int] = {}
        for start in taken:
            buffer = program.pool[start]
            assert buffer.bytes == nbytes(start.meta["val"])
            assert ends.get(buffer, -1) < order[start]
            looks = _looks(start)
            ends[buffer] = max(order[each] for each in _readers(looks))
            assert not looks & {each for each in output_values(graph) if isinstance(each, fx.Node)}
    requests = Counter(program.pool[node].bytes for graph in (program.forward, program.backward) if graph is not None
                       for node in graph.graph.nodes if node in program.pool)  # fmt: skip
    buffers = Counter(buffer.bytes for buffer in set(program.pool.values()))
    assert all(requests[size] >= 4 * count for size, count in buffers.items())
    assert f"buffers that are kept: {buffers.total()} of" in summary(program)


def _looks(start: fx.Node) -> set[fx.Node]:
    """The start, its wait, and the views of its data."""
    found, stack = {start}, [start]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in found and user.op != "output" and (is_wait(user) or is_view(user, node)):
                found.add(user)
                stack.append(user)
    return found


def _readers(looks: set[fx.Node]) -> set[fx.Node]:
    """What reads the data, and the waits for what sends it on."""
    readers = {user for node in looks for user in node.users if user.op != "output"}
    return looks | readers | {user for node in readers if is_start(node) for user in node.users}


def test_two_of_a_size_suffice_for_weights_that_are_gathered_a_layer_ahead() -> None:
    program = run_passes(_captured().program, Plan(cp=2), 0)
    whys = {node: each.why.split(",")[0] for node, each in program.collectives.items()}
    used = {program.pool[node] for node, why in whys.items() if node in program.pool and "up_proj" in why}
    assert 1 <= len(used) <= 2 * 2  # the gate's weight is as large
    assert not [why for node, why in whys.items() if node in program.pool and "embed_tokens" in why]


def test_the_memory_model_counts_them_throughout() -> None:
    program = run_passes(_captured().program, Plan(cp=2), 0)
    buffers = sum(each.bytes for each in set(program.pool.values()))
    memory = step_memory([program])
    program.pool.clear()
    alone = step_memory([program])
    assert memory.curve[-1].bytes - alone.curve[-1].bytes == buffers
    assert memory.peak < alone.peak + buffers
    assert pool(program).pool
