"""Attention on CPU through ATen's flash kernels, which take fewer key/value heads than query heads as they are.

What these kernels do otherwise than `reference`, found by experiment and normalised here (torch 2.13):

- bool masks are refused;
- a last dimension whose stride is not 1 is read as if it were: silently wrong;
- a row that attends nothing gets lse 0, and lse -inf makes the backward NaN;
- no rows or no columns is a division by zero that ends the process (the callers' guard);
- v must have the head dimension of q and k;
- results are rounded to the dtype of the inputs, which loses bits of what is merged or summed afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reference import accumulation_dtype, with_causal


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """As `reference.forward`, but neither result is contiguous."""
    q, k, v = _precise(q, k, v)
    mask, is_causal = _one_mask(q, k, mask, is_causal)
    bias = _bias(q, mask)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _unit_stride(q), _unit_stride(k), _unit_stride(v), 0.0, is_causal, attn_mask=bias, scale=scale
    )
    if mask is not None:
        dead = ~mask.any(-1) if mask.dtype == torch.bool else (mask == -math.inf).all(-1)
        lse = lse.masked_fill(dead, -math.inf)
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.backward`, but the gradients are not contiguous."""
    d_out, q, k, v, out = _precise(d_out, q, k, v, out)
    mask, is_causal = _one_mask(q, k, mask, is_causal)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _unit_stride(d_out),
        _unit_stride(q),
        _unit_stride(k),
        _unit_stride(v),
        _unit_stride(out),
        lse.masked_fill(lse == -math.inf, math.inf),
        0.0,
        is_causal,
        attn_mask=_bias(q, mask),
        scale=scale,
    )


def _precise(*tensors: Tensor) -> list[Tensor]:
    """In the accumulation dtype, to which the kernels then round: what blocks give is still to be summed."""
    return [each.to(accumulation_dtype(each.dtype)) for each in tensors]


def _one_mask(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
    """A mask of four dims with the causal condition in it when there are both."""
    if mask is None:
        return None, is_causal
    mask = with_causal(mask, is_causal, q.shape[2], k.shape[2], q.device)
    assert mask is not None
    return mask[(None,) * (4 - mask.dim())], False


def _bias(q: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as what is added to the scores."""
    dtype = accumulation_dtype(q.dtype)
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(dtype)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), -math.inf)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
