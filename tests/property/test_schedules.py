"""Random attentions under random schedules: every pair that the mask allows once, and one device's numbers."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from evocompile.kernels.mask import parse_mask
from evocompile.layout import Split
from evocompile.passes.attention_report import Sizes
from evocompile.passes.choose_schedule import choose
from evocompile.passes.schedules import Schedule
from evocompile.plan import Plan
from tests.equality import assert_attends_as_one_device, run
from tests.passes.test_schedules import Attention

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
    assert_attends_as_one_device(model, {"x": x}, plan)


class Packed(Attention):
    """Its mask: causal or both ways, within a document, a window, and no further than the valid positions."""

    def __init__(self, heads: int, kv_heads: int, window: int, is_causal: bool) -> None:
        super().__init__(heads, kv_heads, window)
        self.is_causal = is_causal

    def mask(self, documents: Tensor, valid: Tensor) -> Tensor:
        at = torch.arange(documents.shape[1])
        back = at[:, None] - at
        near = (back < self.window) & ((back >= 0) if self.is_causal else (back > -self.window))
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return near & same & valid[:, None, None, :]

    def forward(self, x: Tensor, documents: Tensor, valid: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(*self.project(x), attn_mask=self.mask(documents, valid), enable_gqa=True)


@st.composite
def packings(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(documents, valid), (2, S): documents of any lengths, and up to all positions of either end not valid."""
    length = draw(st.sampled_from([1, 3, 7, 12, 13, 17]))
    documents, valid = torch.zeros(2, length, dtype=torch.long), torch.ones(2, length, dtype=torch.bool)
    for row in range(2):
        for begin in draw(st.lists(st.integers(0, length - 1), max_size=4)):
            documents[row, begin:] += 1
        lo, hi = sorted((draw(st.integers(0, length)), draw(st.integers(0, length))))
        if draw(st.booleans()):
            valid[row, :lo] = valid[row, hi:] = False
    return documents, valid


@settled(10)
@given(
    plan=plans(most=5),
    kv_heads=st.integers(1, 2),
    window=st.integers(1, 20),
    is_causal=st.booleans(),
    packing=packings(),
)
def test_documents_padding_and_windows_equal_one_device(
    plan: Plan, kv_heads: int, window: int, is_causal: bool, packing: tuple[Tensor, Tensor]
) -> None:
    """A query that sees no key gives 0 and no gradient (one device's kernels differ there from each other)."""
    documents, valid = packing
    torch.manual_seed(window)
    model = Packed(2 * kv_heads, kv_heads, window, is_causal)
    x = torch.randn(*documents.shape, 8, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        expected = model(x, documents, valid)
        expected.sum().backward()
    ran = run(model, {"x": x, "documents": documents, "valid": valid}, plan)
    torch.testing.assert_close(ran.out, expected.detach(), rtol=1e-10, atol=1e-10)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ran.gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)
