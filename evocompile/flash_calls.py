"""Calls of the flash-attn package, written out for Dynamo to trace instead of them.

The package's functions run a kernel that no tracer sees into. What is traced here computes the same with plain
operators, as that package's own tests do, and `passes.written_attention` makes one operator of it: the S×T scores are
never computed. The package is not imported; where it is not loaded nothing is replaced.

Layout: q (B, S, H, D); k, v (B, T, Hk, D), H % Hk == 0; out (B, S, H, D), contiguous. Query i stands at key i + T - S
(the last query at the last key). A row that attends nowhere gives 0.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

_MODULES = ("flash_attn", "flash_attn.flash_attn_interface")
_NO_WEIGHTS = "Call it without return_attn_probs: the weights are never computed as a whole."
_NO_PACKING = (
    "Call flash_attn_func on (batch, sequence) rows, or scaled_dot_product_attention or flex_attention with a mask of"
    " document numbers (batch, sequence)."
)


def refuse(reason: str, way_out: str) -> NoReturn:
    """Stops the trace: Dynamo is told to treat a call of this as the end of capture (`torch_private.trace`)."""
    raise NotImplementedError(f"{reason}. {way_out}")


def replacements() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The package's functions that this process has loaded, and what is traced for each."""
    functions = {written.__name__: written for written in _WRITTEN}
    found: dict[Callable[..., Any], Callable[..., Any]] = {}
    for module in [sys.modules[name] for name in _MODULES if name in sys.modules]:
        for name, written in functions.items():
            function = getattr(module, name, None)
            if callable(function):
                found[function] = written
    return found


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """softmax(f(scale · QKᵀ)) V. window_size: (left, right), negative for no bound; alibi_slopes: (H,) or (B, H)."""
    if return_attn_probs:
        refuse("the weights of flash_attn_func are asked for", _NO_WEIGHTS)
    queries, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if k.shape[1] != heads:
        k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    scores = (q @ k.transpose(2, 3)) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    back = torch.arange(queries, device=q.device)[:, None] + (keys - queries) - torch.arange(keys, device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.detach().to(scores.dtype)[..., None, None] * back.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    if left >= 0:
        scores = scores.masked_fill(back > left, float("-inf"))
    if right >= 0:
        scores = scores.masked_fill(back < -right, float("-inf"))
    weights = F.dropout(scores.softmax(dim=-1), dropout_p) if dropout_p > 0 else scores.softmax(dim=-1)
    return (weights @ v).transpose(1, 2).contiguous()


def flash_attn_qkvpacked_func(qkv: Tensor, **rest: Any) -> Tensor:
    """`flash_attn_func` of qkv (B, S, 3, H, D)."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **rest)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, **rest: Any) -> Tensor:
    """`flash_attn_func` of q and kv (B, T, 2, Hk, D)."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **rest)


def flash_attn_varlen_func(**_given: Any) -> NoReturn:
    refuse("flash_attn_varlen_func, whose documents are told by cu_seqlens, is not built", _NO_PACKING)


def flash_attn_varlen_qkvpacked_func(**_given: Any) -> NoReturn:
    refuse("flash_attn_varlen_qkvpacked_func, whose documents are told by cu_seqlens, is not built", _NO_PACKING)


def flash_attn_varlen_kvpacked_func(**_given: Any) -> NoReturn:
    refuse("flash_attn_varlen_kvpacked_func, whose documents are told by cu_seqlens, is not built", _NO_PACKING)


_WRITTEN = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)
