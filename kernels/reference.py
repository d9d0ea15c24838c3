"""Attention in plain torch, on any device and in any dtype: the definition of correctness for every other kernel.

Shapes: q (B, H, S, D); k (B, Hk, T, D); v (B, Hk, T, E); out, d_out (B, H, S, E); lse (B, H, S). Query head h reads
key/value head h // (H / Hk). `lse` is the natural logarithm of the sum of exponentials of the scaled, masked scores.
A dead row, one that attends nothing, has out 0 and lse -inf, and no gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .form import Changes


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states, log-sum-exps and accumulated gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def with_causal(mask: Tensor | None, is_causal: bool, rows: int, columns: int, device: torch.device) -> Tensor | None:
    """One mask for both arguments; causal is aligned to the top left: column <= row."""
    if not is_causal:
        return mask
    causal = torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
    if mask is None:
        return causal
    return mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -math.inf)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    changes: Changes | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one tile: (out, lse), both in the accumulation dtype.

    mask: bool (True attends) or float (added to the scores), broadcastable to (B, H, S, T). No dimension is 0.
    """
    scores = _scaled(q, k, scale)
    scores = _masked(changes.scores(scores) if changes else scores, mask, is_causal)
    largest = scores.amax(-1, keepdim=True)
    # The exponent is never positive; a dead row gives exp(-inf) = 0 everywhere.
    weights = (scores - largest.masked_fill(largest == -math.inf, 0.0)).exp_()
    total = weights.sum(-1, keepdim=True)
    weights = changes.weights(weights) if changes else weights
    out = _per_query_head(_grouped(weights, k) @ v.to(scores.dtype), q)
    return out / total.masked_fill(total == 0.0, 1.0), (largest + total.log()).squeeze(-1)


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    changes: Changes | None = None,
) -> list[Tensor]:
    """Gradients [dq, dk, dv, *of the trained params] in the accumulation dtype that one tile contributes.

    out, lse: of the whole rows, over all keys. The tile's probabilities are exp(scores - lse), hence the gradients
    of all tiles of a row add up to those of the row.
    """
    scaled = _scaled(q, k, scale)
    scores = _masked(changes.scores(scaled) if changes else scaled, mask, is_causal)
    d_out, out = d_out.to(scores.dtype), out.to(scores.dtype)
    # A dead row has lse -inf; +inf makes its probabilities 0, where -inf would give exp(-inf + inf) = NaN.
    weights = (scores - lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()
    d_weights = _per_query_head(_grouped(d_out, k) @ v.to(scores.dtype).mT, q)
    d_weights = changes.weights(d_weights) if changes else d_weights
    d_scores = weights * (d_weights - (d_out * out).sum(-1, keepdim=True))
    d_params = changes.d_params(d_scores, scaled) if changes else []
    d_scaled = (changes.d_scaled(d_scores, scaled) if changes else d_scores) * scale
    dq = _per_query_head(_grouped(d_scaled, k) @ k.to(scores.dtype), q)
    dk = _grouped(d_scaled, k).mT @ _grouped(q.to(scores.dtype), k)
    weights = changes.weights(weights) if changes else weights
    dv = _grouped(weights, k).mT @ _grouped(d_out, k)
    return [dq, dk, dv, *d_params]


def merge_weight(lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """How to merge two states of the same rows over different keys: the merged lse, and the weight of the other out.

    Relative to the larger lse, so no positive number is exponentiated. Two dead rows merge to a dead row.
    """
    # 1 / (1 + exp(lse - other)); of two dead rows -inf - -inf is no number, and the weight is 0
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(0.0)
    return torch.logaddexp(lse, other_lse), weight


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states (out, lse) of the same rows over different keys."""
    merged_lse, weight = merge_weight(lse, other_lse)
    return torch.lerp(out, other_out.to(out.dtype), weight.unsqueeze(-1)), merged_lse


def merge_into(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """As `merge`, in the memory of `out` where that has the accumulation dtype: fresh memory costs more than sums."""
    merged_lse, weight = merge_weight(lse, other_lse)
    return out.to(other_out.dtype).lerp_(other_out, weight.unsqueeze(-1)), merged_lse


def _scaled(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled scores (B, H, S, T)."""
    dtype = accumulation_dtype(q.dtype)
    return _per_query_head(_grouped(q.to(dtype), k) @ k.to(dtype).mT, q) * scale


def _masked(scores: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    mask = with_causal(mask, is_causal, *scores.shape[2:], scores.device)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, S, X) as (B, Hk, H/Hk * S, X): the query heads of a key head become rows, so k and v are not repeated."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of `_grouped`."""
    return x.reshape(x.shape[0], q.shape[1], q.shape[2], x.shape[-1])
