"""The cut into forward and backward: what is saved, what is computed again, and when."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from evocompile.capture import capture
from evocompile.collectives import is_start
from evocompile.passes.split_attention import STEP
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import Program, nbytes
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case, PlainGPT
from tests.virtual_model import VirtualModel


class Checkpointed(PlainGPT):
    """Every block is a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def program_of(model: torch.nn.Module, case: Case, plan: Plan) -> list[Program]:
    captured = capture(model.forward, model, (), case.inputs())
    return [run_passes(captured.program, plan, rank) for rank in range(plan.world)]


def saved_bytes(program: Program) -> int:
    return sum(nbytes(node.meta["val"]) for node in program.saved)


PLANS = [Plan(cp=2), Plan(cp=3, attention="ring"), Plan(dp=2, cp=3, attention="balanced", shard=Shard(2, 2, 2))]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_checkpointed_region_is_computed_again_but_not_its_attention(plan: Plan, references: Any) -> None:
    case = Case("gpt", length=13)
    torch.manual_seed(0)
    model = Checkpointed()
    programs, plain = program_of(model, case, plan), program_of(case.build(), case, plan)
    parameters = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    losses, gradients, _ = VirtualModel(programs, parameters, {}, plan.shard_degrees).step(case.inputs())
    assert_loss(losses[0], references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])
    assert saved_bytes(programs[0]) < 0.5 * saved_bytes(plain[0])
    # What each region reads, what the last one gives, and the head's input. Without them, backward would begin with all
    # regions again, to have what the last one reads.
    shapes = [node.meta["val"].shape for node in programs[0].saved]
    assert sum(len(shape) == 3 and shape[-1] == 24 for shape in shapes) == len(model.blocks) + 2
    assert programs[0].backward is not None
    assert not [node for node in programs[0].backward.graph.nodes if node.target is STEP]


def test_row_12_no_weight_is_gathered_more_than_twice_when_some_layers_recompute() -> None:
    """Once in the forward, and at most once in the backward, in layers that compute again and in those that do not."""
    torch.manual_seed(0)
    model = PlainGPT()
    block = model.blocks[0]
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    case = Case("gpt", length=13)
    program = program_of(model, case, Plan(cp=2, shard=Shard(2, 2, 2)))[0]
    gathers = [each.why.split(",")[0] for each in program.collectives.values() if each.group.startswith("params:")]
    counts = {why: gathers.count(why) for why in gathers}
    assert any("blocks.0" in why for why in counts)
    assert any("blocks.1" in why for why in counts)
    assert max(counts.values()) == 2


def test_the_backward_gathers_a_parameter_right_before_its_use() -> None:
    """At most a few parameters are whole at a time, not the model."""
    (program, _) = program_of(Case("llama").build(), Case("llama"), Plan(cp=2, overlap="none"))
    assert program.backward is not None
    nodes = list(program.backward.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    gathers = [node for node in nodes if is_start(node) and str(node.args[-1]).startswith("params:")]
    assert len(gathers) > 10
    for start in gathers:
        (wait,) = start.users
        assert position[wait] == position[start] + 1
        assert min((position[user] for user in wait.users), default=math.inf) <= position[wait] + 3
