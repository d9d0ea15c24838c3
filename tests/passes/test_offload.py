"""Saved values in host memory: the same numbers, less on the device, fetched a layer ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evocompile.errors import PlanError
from evocompile.memory import Memory, step_memory
from evocompile.offload import fetch_start, fetch_wait, to_host
from evocompile.passes.split_attention import BACKWARD_STEP
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.printing import summary
from evocompile.program import Program, nbytes
from evocompile.workspace import LiveBytes
from tests.models.zoo import Case
from tests.virtual_model import captured, virtual_model

CASE = Case("llama", length=25)
PLANS = [
    {"cp": 2},
    {"cp": 2, "recompute": "attention", "attention": "balanced"},
    {"ulysses": 2, "shard": Shard(1, 1, 2), "overlap": "none"},
    {"dp": 2, "recompute": "full", "overlap": "all"},
]


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_the_numbers_are_the_same_to_the_last_bit(fields: dict[str, Any]) -> None:
    batch = CASE.inputs()
    losses, gradients, _ = virtual_model(CASE, Plan(**fields)).step(batch)
    model = virtual_model(CASE, Plan(**fields, offload=1.0))
    assert all(_sent(each) for each in model.programs)
    own_losses, own_gradients, _ = model.step(batch)
    assert all(map(torch.equal, losses, own_losses))
    assert all(torch.equal(gradients[name], own_gradients[name]) for name in gradients)


def _sent(program: Program) -> int:
    """Bytes that the forward sends to the host."""
    return sum(nbytes(node.meta["val"]) for node in program.saved if node.target is to_host)


def _memory(**fields: Any) -> tuple[Program, Memory]:
    program = run_passes(captured(CASE)[1].program, Plan(cp=2, **fields), 0)
    return program, step_memory([program])


def test_more_of_them_leave_less_on_the_device() -> None:
    runs = [_memory(offload=part) for part in (0.0, 0.5, 1.0)]
    none, half, all_ = (_between_the_graphs(memory) for _, memory in runs)
    saved = sum(nbytes(node.meta["val"]) for node in runs[0][0].saved)
    assert none - all_ >= 0.9 * saved
    assert 0.4 * saved <= none - half <= 0.6 * saved
    for program, memory in runs:
        assert memory.host == _sent(program)
        assert (f"{memory.host:,} of them in host memory" in summary(program)) == bool(memory.host)
    assert runs[2][1].peak < runs[0][1].peak


def _between_the_graphs(memory: Memory) -> int:
    return next(
        each.bytes for each, then in zip(memory.curve, memory.curve[1:], strict=False) if then.graph == "backward"
    )


def test_a_layer_is_fetched_with_the_attention_before_it() -> None:
    program, _ = _memory(offload=1.0, overlap="none")
    assert program.backward is not None
    nodes = list(program.backward.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    first_steps = {node.args[5]: i for i, node in reversed(list(enumerate(nodes))) if node.target is BACKWARD_STEP}
    marks = sorted(first_steps.values())
    assert len(marks) == 2
    fetches = [node for node in nodes if node.target is fetch_start]
    begin = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    behind = 0
    for start in fetches:
        (wait,) = start.users
        assert wait.target is fetch_wait
        use = min(order[user] for user in wait.users)
        behind += use >= marks[1]
        place = marks[0] if use >= marks[1] else begin + len(fetches)
        assert place - len(fetches) <= order[start] < place
    assert 0 < behind < len(fetches)


def test_host_memory_is_no_tensors_own() -> None:
    value = torch.randn(3, 4, 5).transpose(0, 2)
    with LiveBytes() as live:
        host = to_host(value)
        assert live.peak == 0
        back = fetch_wait(fetch_start(host, value.device))
        assert live.now == nbytes(value)
    assert back.stride() == host.stride() == value.stride()
    assert torch.equal(back, value)


@pytest.mark.parametrize("part", [-0.1, 1.5, True, "all"])
def test_it_is_a_fraction(part: Any) -> None:
    with pytest.raises(PlanError, match="offload must be a fraction from 0 to 1"):
        Plan(cp=2, offload=part)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a card: there is no CUDA device")
def test_a_card_gets_back_what_it_has_sent_though_the_memory_is_reused() -> None:
    value = torch.randn(1000, 1000, device="cuda").t()
    expected = value.cpu()
    host = to_host(value)
    assert host.is_pinned()
    del value
    other = torch.zeros(1000, 1000, device="cuda")  # may get the memory, once it is sent
    back = fetch_wait(fetch_start(host, other.device))
    assert torch.equal(back.cpu(), expected)
    assert not other.any()
