"""The closed forms of what schedules send, against the bytes counted in the graphs: exactly, rank by rank."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from evocompile.capture import capture
from evocompile.passes import volumes
from evocompile.passes.attention_report import Sizes
from evocompile.passes.heads import head_intervals
from evocompile.passes.volumes import Volume
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import Program
from tests.passes.test_schedules import Attention

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 4
SIZES = Sizes(BATCH, HEADS, KV_HEADS, DIM, DIM, 2, 4)  # bfloat16, with states in float32


@cache
def captured(length: int, window: int | None) -> Program:
    model = Attention(HEADS, KV_HEADS, window).bfloat16()
    return capture(model.forward, model, (), {"x": torch.zeros(BATCH, length, 8, dtype=torch.bfloat16)}).program


def programs(plan: Plan, length: int, window: int | None) -> list[Program]:
    return [run_passes(captured(length, window), plan, rank) for rank in range(plan.world)]


def counted(program: Program, *purposes: str) -> Volume:
    """Bytes that the rank sends in a step over communicators of these purposes."""
    assert program.forward is not None and program.backward is not None
    nodes = [node for module in (program.forward, program.backward) for node in module.graph.nodes]
    collectives = [program.collectives[node] for node in nodes if node in program.collectives]

    def sent(suffix: str) -> int:
        names = {purpose + suffix for purpose in purposes}
        return sum(each.sent for each in collectives if each.group.split(":")[0] in names)

    return Volume(sent(""), sent(".backward"))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["ring", "ring, not causal", "zigzag", "balanced"])
def test_schedules_send_what_their_formula_says(schedule: str, ranks: int) -> None:
    length = 4 * ranks
    for rank, program in enumerate(
        programs(Plan(cp=ranks, attention=schedule.split(",")[0]), length, 0 if "not" in schedule else None)
    ):
        formula = {
            "ring": lambda r: volumes.ring(SIZES, length, ranks, r, causal=True),
            "ring, not causal": lambda r: volumes.ring(SIZES, length, ranks, r, causal=False),
            "zigzag": lambda r: volumes.zigzag(SIZES, length, ranks, r),
            "balanced": lambda r: volumes.balanced(SIZES, length, ranks, r),
        }[schedule]
        assert counted(program, "cp") == formula(rank)


@pytest.mark.parametrize(("ranks", "length", "width"), [(4, 32, 4), (4, 512, 4), (4, 32, 12), (3, 12, 100)])
def test_a_window_sends_what_its_formula_says(ranks: int, length: int, width: int) -> None:
    for rank, program in enumerate(programs(Plan(cp=ranks, attention="ring"), length, width)):
        assert counted(program, "cp") == volumes.window(SIZES, length, ranks, rank, width)


@pytest.mark.parametrize("attention", ["ring", "zigzag", "balanced"])
@pytest.mark.parametrize("inner_ring", [1, 2])
def test_the_bytes_of_a_window_do_not_depend_on_the_length(attention: str, inner_ring: int) -> None:
    if attention == "balanced" and inner_ring > 1:
        return
    plan = Plan(cp=4, attention=attention, inner_ring=inner_ring)
    short, long = (
        [counted(program, "cp", "cp.windows") for program in programs(plan, length, 6)] for length in (64, 4096)
    )
    assert short == long
    assert sum(each.forward for each in short) > 0


@pytest.mark.parametrize(("ranks", "width"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_a_double_ring_sends_what_its_formula_says(ranks: int, width: int) -> None:
    length = 2 * ranks
    within, between = volumes.double_ring(SIZES, length, ranks, width)
    ring = volumes.ring(SIZES, length, ranks, 0, causal=False)
    assert within.forward + between.forward == ring.forward
    for program in programs(Plan(cp=ranks, attention="ring", inner_ring=width), length, 0):
        assert counted(program, "cp") == within
        assert counted(program, "cp.windows") == between


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_ulysses_sends_what_its_formula_says(degree: int) -> None:
    length = 2 * degree
    split = head_intervals(HEADS, KV_HEADS, degree)
    heads, kv_heads = ([hi - lo for lo, hi in split[kind]] for kind in ("queries", "keys"))  # type: ignore[index]
    for rank, program in enumerate(programs(Plan(ulysses=degree), length, None)):
        assert counted(program, "ulysses") == volumes.ulysses(SIZES, length, heads, kv_heads, rank)


@pytest.mark.parametrize("placement", ["head-first", "context-first"])
def test_2d_sends_what_both_formulas_say(placement: str) -> None:
    """Rings over heads of a rank, at the positions of a whole head group."""
    length, cp, ulysses = 16, 2, 2
    plan = Plan(cp=cp, ulysses=ulysses, attention="ring", placement=placement)
    heads, kv_heads = [HEADS // 2] * 2, [KV_HEADS // 2] * 2
    for program in programs(plan, length, None):
        at = program.coordinate
        inner = resized(heads=heads[at["ulysses"]], kv_heads=kv_heads[at["ulysses"]])
        assert counted(program, "cp") == volumes.ring(inner, length, cp, at["cp"], causal=True)
        expected = volumes.ulysses(SIZES, length // cp, heads, kv_heads, at["ulysses"])
        assert counted(program, "ulysses") == expected


def resized(**changes: int) -> Sizes:
    return SIZES._replace(**changes)


def test_papers_formulas() -> None:
    """With equal heads and dims: the published volumes, in elements."""
    ranks, length, heads, dim = 8, 64, 8, 4
    sizes, hidden = Sizes(1, heads, heads, dim, dim, 1, 1), heads * dim
    whole = length * hidden
    assert volumes.ring(sizes, length, ranks, 0, causal=False).forward == 2 * whole * (ranks - 1) // ranks
    per_rank = volumes.ulysses(sizes, length, [1] * ranks, [1] * ranks, 0)
    assert per_rank.forward == 4 * whole * (ranks - 1) // ranks**2
    # DistFlashAttn counts N·h forward on average; a state's lse is the small rest
    total = sum(volumes.balanced(sizes, length, ranks, rank).forward for rank in range(ranks))
    lse = sum(max(0, (ranks - 1) // 2 - rank) for rank in range(ranks)) * length // ranks * heads
    assert total - lse == whole * (ranks - 1)
