"""The product of schedules, masks and forms of heads on 2, 3, 4 and 8 ranks, against attention written out on one
device in float64: outputs and all gradients, to 1e-10 in float64 and 1e-5 in float32.

One graph holds all masks times all forms of heads. It is captured and made canonical once, and every plan runs them
all. What a plan makes of it is run in float64, and once more as the program of float32, which differs in its types
alone (`test_a_program_of_float32_is_that_of_float64_with_other_types`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from evocompile.capture import capture
from evocompile.passes.canonicalize import canonicalize
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import Program
from tests.equality import step

BATCH, LENGTH, WIDTH, DIM, V_DIM = 3, 13, 6, 4, 6
WINDOW, CHUNK, PREFIX = 4, 5, 3
HEADS = {"MHA": (3, 3), "GQA": (4, 2), "MQA": (3, 1)}
MASKS = ("causal", "full", "window", "chunks", "prefix", "documents", "padding")


class Attentions(nn.Module):
    """For each form of heads projections, which all masks share. v has another head dim than q and k."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleDict(
            {
                name: nn.Linear(WIDTH, heads * DIM + kv_heads * (DIM + V_DIM), bias=False)
                for name, (heads, kv_heads) in HEADS.items()
            }
        ).to(dtype)

    def forward(self, x: Tensor, documents: Tensor, valid: Tensor, plainly: bool = False) -> Tensor:
        """(B, S, all heads of all forms and masks). documents, valid: (B, S)."""
        outs = []
        for name, (heads, kv_heads) in HEADS.items():
            sizes = [heads * DIM, kv_heads * DIM, kv_heads * V_DIM]
            q, k, v = (
                part.unflatten(2, (count, -1)).transpose(1, 2)
                for part, count in zip(
                    self.projections[name](x).split(sizes, 2), (heads, kv_heads, kv_heads), strict=True
                )
            )
            for mask in self._masks(documents, valid):
                attend = attention_plainly if plainly else attention
                outs.append(attend(q, k, v, mask).transpose(1, 2).flatten(2))
        return torch.cat(outs, 2)

    def _masks(self, documents: Tensor, valid: Tensor) -> Iterator[Tensor | str | None]:
        at = torch.arange(LENGTH)
        causal = at[:, None] >= at
        yield "causal"
        yield None
        yield causal & (at[:, None] - at < WINDOW)
        yield causal & (at[:, None] // CHUNK == at // CHUNK)
        yield causal | (at < PREFIX)
        yield causal & (documents[:, None, :, None] == documents[:, None, None, :])
        yield valid[:, None, None, :]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None) -> Tensor:
    if isinstance(mask, str):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def attention_plainly(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None) -> Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    if isinstance(mask, str):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(3) @ v


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Padding on the left, on the right, and on both sides."""
    torch.manual_seed(1)
    documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 4, [0] * 8 + [1] * 5, [0] * 13])
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[0, :3] = valid[1, 9:] = valid[2, :2] = valid[2, 11:] = False
    return {"x": torch.randn(BATCH, LENGTH, WIDTH).to(dtype), "documents": documents, "valid": valid}


@cache
def captured(dtype: torch.dtype) -> tuple[Attentions, Program, Tensor, dict[str, Tensor]]:
    """The model, its program, and what one device computes plainly in float64: the output and the gradients."""
    model, exact, inputs = Attentions(dtype), Attentions(torch.float64), batch(torch.float64)
    expected = exact(**inputs, plainly=True)
    weigh(expected).backward()
    gradients = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    program = capture(model.forward, model, (), batch(dtype)).program
    return model, canonicalize(program.bind(Plan(), rank=0)), expected.detach(), gradients


def weigh(out: Tensor) -> Tensor:
    return (out * tangent(out)).sum()


def tangent(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Collecting garbage among the nodes of so many graphs would take a third of the time."""
    gc.disable()
    yield
    gc.enable()


def schedules(ranks: int) -> list[Plan]:
    """Each schedule on so many ranks; a double ring and 2D in one form of each."""
    plans = [Plan(cp=ranks, attention=each) for each in ("ring", "zigzag", "balanced")] + [Plan(ulysses=ranks)]
    if ranks >= 4:
        half = ranks // 2
        plans += [
            Plan(cp=ranks, attention="ring" if ranks == 4 else "zigzag", inner_ring=half),
            Plan(cp=2, ulysses=half, placement="head-first"),
            Plan(cp=half, ulysses=2, attention="balanced", placement="context-first"),
        ]
    return plans


@pytest.mark.parametrize("plan", [each for ranks in (2, 3, 4, 8) for each in schedules(ranks)], ids=str)
def test_every_mask_and_form_of_heads(plan: Plan) -> None:
    model, program, expected, gradients = captured(torch.float64)
    ranks = [run_passes(program, plan, rank) for rank in range(plan.world)]
    assert len(ranks[0].attentions) == len(MASKS) * len(HEADS)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        if dtype == torch.float32:
            model = captured(dtype)[0]
            for each in ranks:
                retype(each)
        ran = step(model, batch(dtype), ranks, [tangent(expected).to(dtype)])
        for out in ran.outs:
            assert_close(out, expected, tolerance)
        for name, gradient in gradients.items():
            assert_close(ran.gradients[name], gradient, tolerance)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """The tolerance is relative to the largest entry: each is a sum over all masks, in which such entries cancel."""
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"an entry is off by {error:.1e} of the largest"


def retype(program: Program) -> None:
    """Makes a program of float64 one of float32, in place."""
    for each in (program.forward, program.backward):
        assert each is not None
        for node in each.graph.nodes:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _retyped)
        each.recompile()


def _retyped(argument: object) -> object:
    return torch.float32 if argument is torch.float64 else argument


@pytest.mark.parametrize("plan", [Plan(cp=3, attention="balanced"), Plan(cp=2, ulysses=2)], ids=str)
def test_a_program_of_float32_is_that_of_float64_with_other_types(plan: Plan) -> None:
    double, single = (run_passes(captured(dtype)[1], plan, 1) for dtype in (torch.float64, torch.float32))
    retype(double)
    for one, other in ((double.forward, single.forward), (double.backward, single.backward)):
        assert one is not None and other is not None
        assert one.code == other.code
