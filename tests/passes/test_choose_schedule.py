"""Which schedule an attention gets, and what is said of it: names, reasons, work, bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.errors import PlanError
from evocompile.layout import Split
from evocompile.passes import volumes
from evocompile.passes.attention_report import Sizes
from evocompile.passes.choose_schedule import choose
from evocompile.passes.schedules import Schedule
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.printing import attention_table
from evocompile.program import Program
from tests.models.zoo import Case
from tests.passes.test_schedules import Attention
from tests.virtual_model import captured


class TwoMasks(nn.Module):
    """A causal attention and one with a window, of the same projections."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(8, 3 * 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (2, 128)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        at = torch.arange(x.shape[1])
        seen = (at <= at[:, None]) & (at[:, None] - at < self.window)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v, seen)


def program_of(model: nn.Module, length: int, plan: Plan, rank: int = 0) -> Program:
    return run_passes(capture(model.forward, model, (), {"x": torch.zeros(1, length, 8)}).program, plan, rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_work_of_a_causal_attention(ranks: int) -> None:
    """Zigzag is even. Balanced: a diagonal and ⌊P/2⌋ blocks at most, of P diagonals and P(P-1)/2 blocks."""
    length = 64 * ranks
    zigzag = program_of(Attention(2, 1, None).float(), length, Plan(cp=ranks)).attentions
    balanced = program_of(Attention(2, 1, None).float(), length, Plan(cp=ranks, attention="balanced")).attentions
    assert [each.imbalance for each in zigzag] == [pytest.approx(1, abs=0.01)]
    diagonal, block = 64 * 65 // 2, 64 * 64
    mean = diagonal + (ranks - 1) / 2 * block
    assert [each.imbalance for each in balanced] == [pytest.approx((diagonal + ranks // 2 * block) / mean)]
    assert (zigzag[0].steps, balanced[0].steps) == (ranks, ranks // 2 + 1)


def choice(attention: str, order: str, mask: str, sizes: Sizes, length: int = 8192) -> str:
    chunks = tuple(Split("cp", 4, order, length).intervals(i) for i in range(4))
    return choose(
        Plan(cp=4, attention=attention), Schedule((0, 1, 2, 3), 0, chunks, chunks, (), mask), order, sizes
    ).name


WORK = Sizes(1, 32, 32, 128, 128, 2, 4)  # attention that takes longer than its exchanges at this length
FEW_KEYS = Sizes(1, 32, 1, 128, 128, 2, 4)


def test_each_attention_gets_a_schedule_of_its_own() -> None:
    assert choice("auto", "contiguous", "k <= q", WORK, 65536) == "balanced"
    assert choice("auto", "contiguous", "k <= q", FEW_KEYS, 1024) == "ring"  # queries and states are what is large
    assert choice("auto", "contiguous", "True", WORK) == "ring"
    assert choice("auto", "contiguous", "(k <= q) & (k > q - 64)", WORK) == "ring"
    assert choice("auto", "zigzag", "k <= q", WORK) == "zigzag ring"
    assert choice("balanced", "contiguous", "True", WORK) == "ring"


def test_auto_takes_one_order_for_the_whole_program() -> None:
    causal = program_of(Attention(8, 8, None).float(), 16384, Plan(cp=4, attention="auto"))
    window = program_of(Attention(8, 8, 16).float(), 16384, Plan(cp=4, attention="auto"))
    both = [program_of(TwoMasks(64), 16384, Plan(cp=4, attention="auto"), rank) for rank in range(4)]
    assert [note.what for note in causal.notes] == ["sequence in zigzag order"]
    assert [note.what for note in window.notes] == ["sequence in contiguous order"]
    assert all(each.attentions == both[0].attentions and each.notes == both[0].notes for each in both)
    assert len({each.mask for each in both[0].attentions}) == 2
    text = attention_table(both[0])
    assert text.count("1 x ") == 2 and "work max/mean" in text and "bytes received" in text


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_of_real_models_move_the_same_bytes_at_any_length(family: str) -> None:
    """What depends on the length is the exchange of Gemma3's full layer, by its formula."""

    def sent(length: int, rank: int) -> tuple[int, int]:
        program = run_passes(captured(Case(family, length=length))[1].program, Plan(cp=4), rank)
        exchanged = sum(each.sent for each in program.collectives.values() if each.group.startswith("cp"))
        full = volumes.zigzag(Sizes(2, 4, 2, 8, 8, 4, 4), length, 4, rank)
        return exchanged, full.forward + full.backward

    for rank in (0, 2):
        (short, short_full), (long, long_full) = sent(48, rank), sent(96, rank)
        if family == "gemma3":
            short, long = short - short_full, long - long_full
        assert short == long > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cp": 4, "inner_ring": 3}, "does not divide cp=4"),
        ({"cp": 4, "inner_ring": 2, "attention": "balanced"}, "not handed on"),
        ({"placement": "first"}, "choose one of 'head-first', 'context-first'"),
        ({"ulysses": 0}, "positive integer"),
        ({"attention": "best"}, "'auto'"),
    ],
)
def test_plans_that_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**fields)  # type: ignore[arg-type]


def test_plans_travel_as_json() -> None:
    plan = Plan(dp=2, cp=4, ulysses=2, placement="context-first", inner_ring=2, attention="auto")
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.world == plan.replicas == 16
    assert str(plan) == ("Plan(dp=2, cp=4, ulysses=2, attention='auto', placement='context-first', inner_ring=2)")
