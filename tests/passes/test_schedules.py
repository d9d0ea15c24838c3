"""Schedules as tables: every pair once, balance as the theory says, and the whole attention against one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evocompile.collectives import program_events
from evocompile.passes import schedules
from evocompile.passes.schedules import Schedule
from evocompile.passes.verify import agree
from evocompile.plan import Plan
from tests.equality import assert_attends_as_one_device, run

WORLDS = [1, 2, 3, 4, 5, 7, 8, 16]


def causal(count: int) -> list[list[bool]]:
    return [[j <= i for j in range(count)] for i in range(count)]


def everything(count: int) -> list[list[bool]]:
    return [[True] * count for _ in range(count)]


@pytest.mark.parametrize("count", WORLDS)
@pytest.mark.parametrize(("make", "needs"), [("ring", causal), ("ring", everything), ("balanced", causal)])
def test_every_pair_is_done_once(make: str, needs, count: int) -> None:
    jobs = getattr(schedules, make)(needs(count))
    done = [job[:2] for own in jobs for job in own if job is not None]
    assert sorted(done) == sorted((i, j) for i, row in enumerate(needs(count)) for j, seen in enumerate(row) if seen)
    for rank, own in enumerate(jobs):
        assert own[0] == (rank, rank, rank)
        assert all(job is None or rank in job for job in own)


def chunked(count: int, length: int, jobs: schedules.Jobs) -> Schedule:
    chunks = tuple(((length * i // count, length * (i + 1) // count),) for i in range(count))
    return Schedule(tuple(range(count)), 0, chunks, chunks, jobs, "k <= q")


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16])
def test_balance_of_causal_work(count: int) -> None:
    """Odd P: every rank has P/2 blocks. Even P: the lower half rests in the last step, half a block below the mean."""
    length = 64 * count
    schedule = chunked(count, length, schedules.balanced(causal(count)))
    work = [sum(steps) for steps in schedules.work(schedule)]
    block = 64 * 64
    diagonal = 64 * 65 // 2
    most = diagonal + (count // 2) * block
    assert max(work) == most
    assert min(work) == (most if count % 2 else most - block)
    assert sum(work) == length * (length + 1) // 2
    ring = chunked(count, length, schedules.ring(causal(count)))
    assert max(map(sum, schedules.work(ring))) == diagonal + (count - 1) * block


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_zigzag_is_balanced_at_every_step(count: int) -> None:
    length = 128 * count
    part = length // (2 * count)
    chunks = tuple(
        ((part * i, part * (i + 1)), (part * (2 * count - 1 - i), part * (2 * count - i))) for i in range(count)
    )
    schedule = Schedule(tuple(range(count)), 0, chunks, chunks, schedules.ring(everything(count)), "k <= q")
    work = schedules.work(schedule)
    for step in range(count):
        at_step = [own[step] for own in work]
        assert max(at_step) <= 1.01 * sum(at_step) / count


class Attention(nn.Module):
    """Projections around one attention. window: keys further back are not seen; None: causal; 0: everything."""

    def __init__(self, heads: int, kv_heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.window = heads, kv_heads, window
        self.q = nn.Linear(8, heads * 4, bias=False, dtype=torch.float64)
        self.kv = nn.Linear(8, 2 * kv_heads * 4, bias=False, dtype=torch.float64)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, 4).transpose(1, 2)
        kv = self.kv(x).view(batch, length, 2, self.kv_heads, 4).permute(2, 0, 3, 1, 4)
        return q, kv[0], kv[1]

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        mask = None
        if self.window:
            back = positions[:, None] - positions
            mask = (back >= 0) & (back < self.window)
        return F.scaled_dot_product_attention(
            *self.project(x), attn_mask=mask, is_causal=self.window is None, enable_gqa=True
        )


@pytest.mark.parametrize("attention", ["ring", "zigzag", "balanced"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 0, 5])
def test_schedules_equal_one_device(attention: str, world: int, window: int | None) -> None:
    torch.manual_seed(world)
    heads, kv_heads = ((4, 2), (4, 1), (2, 2))[world % 3]
    model, x = Attention(heads, kv_heads, window), torch.randn(2, 19, 8, dtype=torch.float64)
    ran = assert_attends_as_one_device(model, {"x": x}, Plan(cp=world, attention=attention))
    noted = any("ring schedule" in note.what for note in ran.programs[0].notes)
    assert noted == (attention == "balanced" and window == 0)


class Checkpointed(nn.Module):
    """Its projections are computed again in the backward, with the gathers of their weights, which have equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(4, 2, None)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.attention(y.tanh()).sin(), x, use_reentrant=False)


@pytest.mark.parametrize(
    "plan", [Plan(cp=2, attention="ring"), Plan(cp=3, attention="balanced"), Plan(cp=2, ulysses=2)], ids=str
)
def test_ranks_compute_again_in_one_order(plan: Plan) -> None:
    model, x = Checkpointed(), torch.randn(2, 11, 8, dtype=torch.float64)
    ran = assert_attends_as_one_device(model, {"x": x}, plan)
    agree([program_events(program) for program in ran.programs])


@pytest.mark.parametrize("attention", ["ring", "zigzag", "balanced"])
@pytest.mark.parametrize("world", [3, 4])
def test_bfloat16_exchanges_blocks_in_bfloat16_and_gradients_in_float32(attention: str, world: int) -> None:
    torch.manual_seed(0)
    model = Attention(4, 2, None).bfloat16()
    x = torch.randn(2, 19, 8, dtype=torch.bfloat16)
    expected = model(x)
    expected.sum().backward()
    ran = run(model, {"x": x}, Plan(cp=world, attention=attention))
    torch.testing.assert_close(ran.out, expected.detach(), rtol=2e-2, atol=2e-2)
    for name, parameter in model.named_parameters():
        error = (ran.gradients[name] - parameter.grad).abs().max()
        assert error <= 0.02 * parameter.grad.abs().max(), name
