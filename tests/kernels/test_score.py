"""Score functions, params and dropout of the attention operators against plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import evocompile.kernels.attention  # noqa: F401 (registers the operators)
from evocompile.errors import MaskError
from evocompile.kernels.random import kept
from evocompile.kernels.score import parse_score

ops = torch.ops.evocompile
B, H, HK, S, T, D = 2, 4, 2, 5, 7, 3
SCALE = 0.5
ROWS, COLUMNS = torch.arange(S)[:, None], torch.arange(T)
SEED = torch.tensor(12345678912345)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def all_kept(dropout: float) -> Tensor:
    rows, heads = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(1, -1, 1, 1)
    return kept(int(SEED), rows, heads, torch.arange(S), torch.arange(T), dropout)


CHUNKS = torch.randint(0, 9, (1, S + T), generator=torch.Generator().manual_seed(3))
FLOATS = torch.randn(B, T, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
HEADS = torch.arange(H)[:, None, None]
CASES: dict[str, tuple[str, list[tuple[int, ...]], Any]] = {
    "softcap": ("5.0*tanh(s/5.0)", [], lambda s: 5 * torch.tanh(s / 5)),
    "alibi": ("s - p0(h)*abs(q - k)", [(H,)], lambda s, p: s - p[:, None, None] * (ROWS - COLUMNS).abs()),
    "relative bias": ("s + p0(h, t0(b, k - q + 4))", [(H, 9)], lambda s, p: s + p[:, CHUNKS[0, COLUMNS - ROWS + 4]]),
    "per row": ("s*p0(h, b, k)", [(H, B, T)], lambda s, p: s * p.transpose(0, 1)[:, :, None]),
    "same for rows": ("s*p0(h, b, q)", [(H, 1, S)], lambda s, p: s * p[:, 0, :, None]),
    "branches": (
        "where((k <= q) | (h % 2 == 0), exp(s/4) + max(s, 0.5), s*f1(b, k)) + min(p0(h), p1(h, q))",
        [(H,), (H, S)],
        lambda s, p, r: (
            torch.where(
                (COLUMNS <= ROWS) | (HEADS % 2 == 0), (s / 4).exp() + s.clamp(min=0.5), s * FLOATS[:, None, None]
            )
            + torch.minimum(p[:, None], r)[..., None]
        ),
    ),
    "frozen": (
        "2*s - frozen(s)*sqrt(p0(h)*p0(h) + 1)",
        [(H,)],
        lambda s, p: 2 * s - s.detach() * (p * p + 1).sqrt()[:, None, None],
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", CASES)
def test_in_one_piece_and_in_steps(name: str, dropout: float) -> None:
    text, shapes, function = CASES[name]
    q, k, v = random(B, H, S, D), random(B, HK, T, D, seed=1), random(B, HK, T, D, seed=2)
    params = [random(*shape, seed=5 + i) for i, shape in enumerate(shapes)]
    d_out = random(B, H, S, D, seed=9).detach()
    scores = function(q @ k.repeat_interleave(2, 1).mT * SCALE, *params).masked_fill(COLUMNS > ROWS + 1, -torch.inf)
    weights = scores.softmax(-1)
    weights = weights * all_kept(dropout) / (1 - dropout) if dropout else weights
    expected = weights @ v.repeat_interleave(2, 1)
    gradients = torch.autograd.grad(expected, (q, k, v, *params), d_out)

    mask, tables = "k <= q + 1", [CHUNKS, FLOATS]
    form = (params, SEED, text, dropout)
    with torch.no_grad():
        out, lse = ops.attention(q, k, v, tables, mask, SCALE, *form)
        whole = ops.attention_backward(d_out, q, k, v, out, lse, tables, mask, SCALE, *form, len(params))
        stepped = [torch.zeros_like(each) for each in gradients]
        for rows, columns in (((0, 2), (0, 3)), ((0, 2), (3, 7)), ((2, 5), (0, 7))):
            at = slice(*rows), slice(*columns)
            step = ops.attention_backward_step(
                *(x[:, :, at[0]] for x in (d_out, q)), *(x[:, :, at[1]] for x in (k, v)),
                *(x[:, :, at[0]] for x in (out, lse)), tables, mask, list(rows), list(columns), SCALE,
                *form, 0, 0, len(params),
            )  # fmt: skip
            stepped[0][:, :, at[0]] += step[0]
            stepped[1][:, :, at[1]] += step[1]
            stepped[2][:, :, at[1]] += step[2]
            for total, part in zip(stepped[3:], step[3:], strict=True):
                total += part
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(whole, list(gradients), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(stepped, list(gradients), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("text", [case[0] for case in CASES.values()] + ["bfloat16(s) + float16(x0)", "s*i1 - 1/(s*s)"])
def test_texts_come_back(text: str) -> None:
    score = parse_score(text)
    assert parse_score(str(score)).expression == score.expression


@pytest.mark.parametrize("text", ["s +", "s.real", "tanh(s, s)", "s if q else k", "p0(k)", "__import__('os')"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(MaskError, match="not a"):
        parse_score(text)


def test_a_part_of_the_heads_and_rows_has_their_numbers() -> None:
    """h in the text and all of dropout count from the call's first head and row."""
    q, k, v = (random(B, 4, S, D, seed=i).detach() for i in range(3))
    params, text = random(4, S).detach(), "where(h % 2 == 0, s + p0(h, q), s*h)"
    whole, _ = ops.attention_step(q, k, v, [], None, None, "h <= q", [0, S], [0, S], SCALE, [params], SEED, text, 0.5)
    for row, head in ((0, 1), (1, 0), (1, 3)):
        part = [x[row : row + 1, head : head + 1] for x in (q, k, v)]
        own = ([params[head : head + 1]], SEED, text, 0.5, row, head)
        out, _ = ops.attention_step(*part, [], None, None, "h <= q", [0, S], [0, S], SCALE, *own)
        torch.testing.assert_close(out, whole[row : row + 1, head : head + 1])


def test_dropout_keeps_the_right_share_independently() -> None:
    rows, heads = torch.arange(4).view(-1, 1, 1, 1), torch.arange(4).view(1, -1, 1, 1)
    keep = kept(77, rows, heads, torch.arange(64), torch.arange(64), 0.3).double()
    count = keep.numel()
    assert abs(keep.mean() - 0.7) < 4 * (0.21 / count) ** 0.5
    for dim in range(4):  # neighbours along every number are uncorrelated
        first, second = keep.narrow(dim, 0, keep.shape[dim] - 1) - 0.7, keep.narrow(dim, 1, keep.shape[dim] - 1) - 0.7
        assert abs((first * second).mean()) < 4 * 0.21 / count**0.5
    other = kept(78, rows, heads, torch.arange(64), torch.arange(64), 0.3).double()
    assert abs(((keep - 0.7) * (other - 0.7)).mean()) < 4 * 0.21 / count**0.5
