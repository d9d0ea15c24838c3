"""Calls of the flash-attn package, written out for Dynamo to trace instead of them.

The package's functions run a kernel that no tracer sees into. What is traced here computes the same with plain
operators, as that package's own tests do, and `passes.written_attention` makes one operator of it: the S×T scores are
never computed. The package is not imported; where it is not loaded nothing is replaced.

Layout: q (B, S, H, D); k, v (B, T, Hk, D), H % Hk == 0; out (B, S, H, D), contiguous. Query i stands at key i + T - S
(the last query at the last key). A row that attends nowhere gives 0. The varlen functions have all documents in one
row, q (total, H, D), and see each document as a sequence of its own; cu_seqlens (documents + 1,): where they begin, and
where the last one ends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import CaptureError

_MODULES = ("flash_attn", "flash_attn.flash_attn_interface")
_NO_WEIGHTS = "Call it without return_attn_probs: the weights are never computed as a whole."
_NO_PAGES = "Pass keys and values themselves."
_ONE_LENGTH = "Pass one tensor as cu_seqlens_q and cu_seqlens_k, if they are the same."
_NO_SLOPES = "Pass slopes (heads,), or write the bias out."


def refuse(reason: str, way_out: str) -> NoReturn:
    """Ends the capture, which Dynamo does itself where it meets a call of this (`torch_private`)."""
    raise CaptureError(f"{reason}. {way_out}")


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
    queries, keys = q.shape[1], k.shape[1]
    back = torch.arange(queries, device=q.device)[:, None] + (keys - queries) - torch.arange(keys, device=q.device)
    window = window_size[0], 0 if causal else window_size[1]
    return _attend(q, k, v, back, None, window, dropout_p, softmax_scale, softcap, alibi_slopes)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """`flash_attn_func` on each document; out (total, H, D). max_seqlen only sizes the kernel's launch."""
    if return_attn_probs:
        refuse("the weights of flash_attn_varlen_func are asked for", _NO_WEIGHTS)
    if block_table is not None:
        refuse("keys of flash_attn_varlen_func are in pages (block_table)", _NO_PAGES)
    if alibi_slopes is not None and alibi_slopes.dim() > 1:
        refuse("slopes of flash_attn_varlen_func differ between documents", _NO_SLOPES)
    at, of_key = torch.arange(q.shape[0], device=q.device), torch.arange(k.shape[0], device=q.device)
    rows, q_ends = _documents(cu_seqlens_q, q.shape[0])
    columns = rows
    if cu_seqlens_q is not cu_seqlens_k:  # else both end at the same position
        if alibi_slopes is not None:
            refuse("flash_attn_varlen_func has slopes, and documents whose queries and keys differ", _ONE_LENGTH)
        columns, k_ends = _documents(cu_seqlens_k, k.shape[0])
        at, of_key = at - q_ends, of_key - k_ends
    same, back = rows[:, None] == columns, at[:, None] - of_key
    window = window_size[0], 0 if causal else window_size[1]
    whole = q[None], k[None], v[None]
    return _attend(*whole, back, same, window, dropout_p, softmax_scale, softcap, alibi_slopes)[0]


def _documents(bounds: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(total,) each: the number of a token's document, and where that ends."""
    numbers = (torch.arange(total, device=bounds.device)[:, None] >= bounds[1:]).sum(1)
    return numbers, bounds[(numbers + 1).clamp(max=bounds.shape[0] - 1)]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    back: Tensor,
    same: Tensor | None,
    window: tuple[int, int],
    dropout: float,
    scale: float | None,
    softcap: float,
    slopes: Tensor | None,
) -> Tensor:
    """back (S, T): how far a key is behind; same (S, T): whether it is of the query's document."""
    heads = q.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if k.shape[1] != heads:
        k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.detach().to(scores.dtype)[..., None, None] * back.abs()
    left, right = window
    if left >= 0:
        scores = scores.masked_fill(back > left, float("-inf"))
    if right >= 0:
        scores = scores.masked_fill(back < -right, float("-inf"))
    if same is not None:
        scores = scores.masked_fill(~same, float("-inf"))
    weights = F.dropout(scores.softmax(dim=-1), dropout) if dropout > 0 else scores.softmax(dim=-1)
    return (weights @ v).transpose(1, 2).contiguous()


def flash_attn_qkvpacked_func(qkv: Tensor, **rest: Any) -> Tensor:
    """`flash_attn_func` of qkv (B, S, 3, H, D)."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **rest)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, **rest: Any) -> Tensor:
    """`flash_attn_func` of q and kv (B, T, 2, Hk, D)."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **rest)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any, **rest: Any) -> Tensor:
    """`flash_attn_varlen_func` of qkv (total, 3, H, D)."""
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **rest)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, **rest: Any) -> Tensor:
    """`flash_attn_varlen_func` of q and kv (total, 2, Hk, D)."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], **rest)


_WRITTEN = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)
