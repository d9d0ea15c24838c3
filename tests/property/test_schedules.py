"""Random attentions under random schedules: every pair that the mask allows once, and one device's numbers."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evocompile.kernels.mask import parse_mask
from evocompile.layout import Split
from evocompile.passes.attention_report import Sizes
from evocompile.passes.choose_schedule import choose
from evocompile.passes.schedules import Schedule
from evocompile.plan import Plan
from tests.passes.test_schedules import Attention, run

EXAMPLES = int(os.environ.get("EVOCOMPILE_EXAMPLES", "0"))  # so many, other ones each time; 0: always the same
SIZES = Sizes(1, 2, 1, 4, 4, 4, 4)


def settled(examples: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def plans(draw: st.DrawFn, most: int) -> Plan:
    ulysses = draw(st.integers(1, 4))
    cp = draw(st.integers(1, most // ulysses))
    attention = draw(st.sampled_from(["ring", "zigzag", "balanced", "auto"]))
    divisors = [n for n in range(1, cp + 1) if cp % n == 0 and attention != "balanced"]
    placement = draw(st.sampled_from(["head-first", "context-first"]))
    inner_ring = draw(st.sampled_from(divisors or [1]))
    return Plan(cp=cp, ulysses=ulysses, attention=attention, placement=placement, inner_ring=inner_ring)


MASKS = st.one_of(
    st.sampled_from(["True", "k <= q", "q <= k", "(k <= q) & (q // 5 == k // 5)", "(k <= q) | (k < 4)"]),
    st.integers(1, 40).map(lambda width: f"(k <= q) & (k > q - {width})"),
    st.integers(1, 9).map(lambda width: f"(k <= q + {width}) & (k > q - {width})"),
)


@settled(200)
@given(plans(most=9), MASKS, st.integers(1, 40), st.sampled_from(["zigzag", "contiguous"]))
def test_every_pair_that_the_mask_allows_is_computed_once(plan: Plan, mask: str, length: int, order: str) -> None:
    split = Split("cp", plan.cp, order, length)
    chunks = tuple(split.intervals(i) for i in range(plan.cp))
    schedule = choose(plan, Schedule(tuple(range(plan.cp)), 0, chunks, chunks, (), mask), order, SIZES).schedule
    done = torch.zeros(length, length, dtype=torch.int64)
    for rank, jobs in enumerate(schedule.jobs):
        for job in jobs:
            if job is not None:
                rows, columns = positions(schedule.queries[job.queries]), positions(schedule.columns(rank, job))
                done[rows[:, None], columns] += 1
    every = torch.arange(length)
    allowed = parse_mask(mask).evaluate(every, every, [], 1, 1, "cpu").expand(1, 1, length, length)[0, 0]
    assert int(done.max()) <= 1
    assert bool((done[allowed] == 1).all())


def positions(intervals: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.tensor([position for lo, hi in intervals for position in range(lo, hi)], dtype=torch.long)


@settled(25)
@given(
    plan=plans(most=6),
    kv_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(0, 8)),
    length=st.sampled_from([1, 2, 5, 12, 13, 17]),
)
def test_attention_equals_one_device(plan: Plan, kv_heads: int, repeats: int, window: int | None, length: int) -> None:
    torch.manual_seed(length)
    model, x = Attention(kv_heads * repeats, kv_heads, window), torch.randn(2, length, 8, dtype=torch.float64)
    expected = model(x)
    expected.sum().backward()
    out, gradients, _ = run(model, x, plan)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)
