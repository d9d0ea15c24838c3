"""FlashAttention 2, 3 and 4 and ATen's copy of it on CUDA, as of the contract of `dispatch`.

What the libraries do otherwise, normalised here:

- causal is aligned to the bottom right when rows and columns differ in number (ATen refuses): only squares are asked of
  them; rows below the square attend every column;
- layout (B, S, H, D), save ATen;
- a row that attends nothing has lse +inf in FlashAttention 2. No block that gets here has one: every row of a full
  block, and of a causal one from the top left, attends its first column;
- the backward reads lse +inf as no probability. `reference` writes -inf for a dead row.

Signatures: flash-attn 2.7 and later (`flash_attn/flash_attn_interface.py`), 3 (`hopper/flash_attn_interface.py`), 4
(`flash_attn/cute/interface.py`), https://github.com/Dao-AILab/flash-attention. Tested with stand-ins that have these
signatures; on a card by the tests marked `gpu`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


class Flash(NamedTuple):
    """A library by two functions on full or square causal blocks of (B, H, S, D)."""

    square_forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    square_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], Gradients]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `reference.forward`, but out is in q's dtype."""
        assert mask is None
        if not is_causal:
            return self.square_forward(q, k, v, False, scale)
        side = min(q.shape[2], k.shape[2])
        upper, rest = q.split([side, q.shape[2] - side], 2)
        out, lse = self.square_forward(upper, k[:, :, :side], v[:, :, :side], True, scale)
        if not rest.shape[2]:
            return out, lse
        rest_out, rest_lse = self.square_forward(rest, k, v, False, scale)
        return torch.cat([out, rest_out], 2), torch.cat([lse, rest_lse], 2)

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float,
    ) -> Gradients:
        """As `reference.backward`, but the gradients are in q's dtype."""
        assert mask is None
        rows = [d_out.to(q.dtype), q, out.to(q.dtype), lse.masked_fill(lse == -math.inf, math.inf)]

        def attend(lo: int, hi: int, columns: int, square: bool) -> Gradients:
            d_rows, q_rows, out_rows, lse_rows = (x[:, :, lo:hi].contiguous() for x in rows)
            return self.square_backward(
                d_rows, q_rows, k[:, :, :columns], v[:, :, :columns], out_rows, lse_rows, square, scale
            )

        if not is_causal:
            return attend(0, q.shape[2], k.shape[2], False)
        side = min(q.shape[2], k.shape[2])
        dq, dk, dv = attend(0, side, side, True)
        if side < k.shape[2]:
            beyond = (0, 0, 0, k.shape[2] - side)
            return dq, torch.nn.functional.pad(dk, beyond), torch.nn.functional.pad(dv, beyond)
        if side < q.shape[2]:
            rest_dq, rest_dk, rest_dv = attend(side, q.shape[2], k.shape[2], False)
            return torch.cat([dq, rest_dq], 2), dk + rest_dk, dv + rest_dv
        return dq, dk, dv


def _swapped(*tensors: Tensor) -> list[Tensor]:
    """(B, H, S, D) to (B, S, H, D) and back, as views."""
    return [x.transpose(1, 2) for x in tensors]


def _library(name: str) -> Any:
    return importlib.import_module(name)


_WINDOW = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0}  # none


def _forward_2(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _library("flash_attn.flash_attn_interface")._flash_attn_forward(
        *_swapped(q, k, v),
        dropout_p=0.0,
        softmax_scale=scale,
        causal=causal,
        alibi_slopes=None,
        return_softmax=False,
        **_WINDOW,
    )
    return out.transpose(1, 2), lse


def _backward_2(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    q, k, v = _swapped(q, k, v)
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    _library("flash_attn.flash_attn_interface")._flash_attn_backward(
        d_out.transpose(1, 2),
        q,
        k,
        v,
        out.transpose(1, 2),
        lse,
        *gradients,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=causal,
        alibi_slopes=None,
        deterministic=True,
        **_WINDOW,
    )
    dq, dk, dv = _swapped(*gradients)
    return dq, dk, dv


def _forward_3(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _library("flash_attn_interface")._flash_attn_forward(
        *_swapped(q, k, v), softmax_scale=scale, causal=causal
    )
    return out.transpose(1, 2), lse


def _backward_3(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    q, k, v = _swapped(q, k, v)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _library("flash_attn_interface")._flash_attn_backward(
        d_out.transpose(1, 2),
        q,
        k,
        v,
        out.transpose(1, 2),
        lse,
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=causal,
        deterministic=True,
    )
    dq, dk, dv = _swapped(dq, dk, dv)
    return dq, dk, dv


def _forward_4(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _library("flash_attn.cute.interface")._flash_attn_fwd(
        *_swapped(q, k, v), softmax_scale=scale, causal=causal, return_lse=True
    )
    return out.transpose(1, 2), lse


def _backward_4(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    dq, dk, dv = _library("flash_attn.cute.interface")._flash_attn_bwd(
        *_swapped(q, k, v, out, d_out), lse, softmax_scale=scale, causal=causal
    )
    dq, dk, dv = _swapped(dq, dk, dv)
    return dq, dk, dv


def _forward_aten(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _backward_aten(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    seed = torch.empty(2, dtype=torch.int64, device=q.device)  # of the dropout, which is 0
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0], scale=scale
    )


two = Flash(_forward_2, _backward_2)
three = Flash(_forward_3, _backward_3)
four = Flash(_forward_4, _backward_4)
aten = Flash(_forward_aten, _backward_aten)
