"""Every schedule with every kind of mask and of heads, in one model, against attention written out on one device.

One graph holds all masks times all forms of heads, so that it is captured once and every plan runs them all.
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

from evocompile.capture import capture
from evocompile.plan import Plan
from evocompile.program import Program
from tests.equality import run

BATCH, LENGTH, WIDTH, DIM, V_DIM, WINDOW = 2, 13, 6, 4, 6, 4
HEADS = {"MHA": (3, 3), "GQA": (4, 2), "MQA": (3, 1)}
MASKS = ("causal", "full", "window", "documents", "padding")


class Attentions(nn.Module):
    """For each form of heads projections, which all masks share. v has another head dim than q and k."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleDict(
            {
                name: nn.Linear(WIDTH, heads * DIM + kv_heads * (DIM + V_DIM), bias=False, dtype=dtype)
                for name, (heads, kv_heads) in HEADS.items()
            }
        )

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
    torch.manual_seed(1)
    documents = torch.tensor([[0] * 3 + [1] * 6 + [2] * 4, [0] * 8 + [1] * 5])
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[0, :3] = valid[1, 9:] = False
    return {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype), "documents": documents, "valid": valid}


@cache
def captured(dtype: torch.dtype) -> tuple[Attentions, Program, Tensor, dict[str, Tensor]]:
    """The model, its program, and what one device computes plainly in float64: the output and the gradients."""
    model, exact, inputs = Attentions(dtype), Attentions(torch.float64), batch(dtype)
    exact.load_state_dict(model.state_dict())
    expected = exact(**{**inputs, "x": inputs["x"].double()}, plainly=True)
    weigh(expected).backward()
    gradients = {name: each.grad for name, each in exact.named_parameters() if each.grad is not None}
    return model, capture(model.forward, model, (), inputs).program, expected.detach(), gradients


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


SMALL = [
    *(Plan(cp=cp, attention=each) for cp in (2, 3) for each in ("ring", "zigzag", "balanced")),
    *(Plan(ulysses=ulysses) for ulysses in (2, 3)),
]
FOUR = [
    *(Plan(cp=4, attention=each) for each in ("ring", "zigzag", "balanced", "auto")),
    *(Plan(cp=4, attention=each, inner_ring=2) for each in ("ring", "zigzag")),
    Plan(ulysses=4),
    Plan(cp=2, ulysses=2),
    Plan(cp=2, ulysses=2, attention="balanced", placement="context-first"),
]
EIGHT = [
    *(Plan(cp=8, attention=each) for each in ("ring", "zigzag", "balanced")),
    Plan(ulysses=8),
    Plan(cp=4, ulysses=2, inner_ring=2, placement="context-first"),
]


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        *((plan, torch.float64) for plan in [*SMALL, *FOUR, *EIGHT]),
        *((plan, torch.float32) for plan in (Plan(cp=3, attention="balanced"), Plan(cp=2, ulysses=2))),
    ],
    ids=str,
)
def test_every_mask_and_form_of_heads(plan: Plan, dtype: torch.dtype) -> None:
    model, program, expected, gradients = captured(dtype)
    ran = run(model, batch(dtype), plan, program, [tangent(expected).to(dtype)])
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    for out in ran.outs:
        torch.testing.assert_close(out.double(), expected, **close)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ran.gradients[name].double(), gradient, **close)
    assert len(ran.programs[0].attentions) == len(MASKS) * len(HEADS)
