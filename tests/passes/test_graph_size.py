"""A program stays small: what one more step of the ring adds to a rank's graphs."""

from __future__ import annotations

import pytest

from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from tests.models.zoo import Case
from tests.virtual_model import captured


@pytest.mark.parametrize("attention", ["ring", "zigzag"])
def test_a_step_of_the_ring_adds_a_handful_of_nodes(attention: str) -> None:
    """To forward: the step, its two results, start, wait and unpacking of its block; to backward: the returns too."""
    case = Case("llama", length=32)
    _, capture = captured(case)

    def sizes(ranks: int) -> tuple[int, int]:
        plan = Plan(cp=ranks, attention=attention, shard=Shard(1, 1, 1))
        program = run_passes(capture.program, plan, ranks - 1)
        assert program.forward is not None and program.backward is not None
        return len(program.forward.graph.nodes), len(program.backward.graph.nodes)

    (forward, backward), (more_forward, more_backward) = sizes(4), sizes(8)
    steps, layers = 4, 2
    assert 0 < more_forward - forward <= 8 * steps * layers
    assert 0 < more_backward - backward <= 18 * steps * layers
