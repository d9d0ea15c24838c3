"""What splitting attention costs in precision: nothing. Errors against float64 beside those of one device's kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.test_attention import CAUSAL, FULL, SCALE, exact, keep_of, make, run_steps

LENGTH, BLOCKS = 256, 8
SPLIT = [[LENGTH * i // BLOCKS, LENGTH * (i + 1) // BLOCKS] for i in range(BLOCKS)]
ZIGZAG = [
    [LENGTH * i // 16, LENGTH * (i + 1) // 16, LENGTH * (15 - i) // 16, LENGTH * (16 - i) // 16] for i in range(BLOCKS)
]


def one_device(inputs: tuple[Tensor, Tensor, Tensor, Tensor], mask: str) -> list[Tensor]:
    """out, dq, dk, dv of torch's own attention in the inputs' dtype."""
    q, k, v = (each.detach().requires_grad_() for each in inputs[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=mask == CAUSAL, scale=SCALE, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def error(found: Tensor, expected: Tensor) -> float:
    """Root mean square."""
    return float((found.double() - expected).square().mean().sqrt())


def compare(inputs: tuple[Tensor, Tensor, Tensor, Tensor], mask: str, split: list[list[int]]) -> None:
    q, k, v, d_out = inputs
    out, _, *gradients = run_steps(inputs, [], mask, split, split)
    found = [each.to(q.dtype) for each in (out, *gradients)]
    assert all(each.isfinite().all() for each in found)
    exact_out, _, *exact_gradients = exact(q, k, v, keep_of(mask, [], q, k), d_out)
    for name, ours, theirs, expected in zip(
        ("out", "dq", "dk", "dv"), found, one_device(inputs, mask), (exact_out, *exact_gradients), strict=True
    ):
        # a tenth for chance, and what a last bit is
        allowed = 1.1 * error(theirs, expected) + torch.finfo(torch.float32).eps * float(expected.abs().max())
        assert error(ours, expected) <= allowed, f"{name}: {error(ours, expected):.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("largest", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("split", [SPLIT, ZIGZAG], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_row_7_merging_states_in_float32(mask: str, split: list[list[int]], largest: float) -> None:
    """Row 7 of PAINS: logits of any size, merged over eight blocks, stay finite and as exact as in one piece."""
    q, k, v, d_out = make((4, 2), LENGTH, LENGTH, dtype=torch.float32)
    logits = (q @ k.repeat_interleave(2, 1).mT * SCALE).abs().max()
    compare((q * (largest / logits), k, v, d_out), mask, split)


@pytest.mark.parametrize("split", [SPLIT, ZIGZAG], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_row_8_bfloat16_around_the_ring(mask: str, split: list[list[int]]) -> None:
    """Row 8 of PAINS: partial outputs, dk and dv are summed in float32 and rounded once."""
    compare(make((4, 2), LENGTH, LENGTH, dtype=torch.bfloat16), mask, split)
