"""The attention operators of the graph: `torch.ops.evocompile.*`, three forms, each with its backward.

| operator                                   | stands in the graph            | sees                                   |
|--------------------------------------------|--------------------------------|----------------------------------------|
| `dense_attention`, `…_backward`            | as captured                    | global tensors, a mask tensor          |
| `attention`, `…_backward`                  | after `canonicalize`           | global tensors, a mask as a predicate  |
| `attention_step`, `attention_backward_step`| after `split_attention`        | blocks of rows and columns, a state    |

Shapes: q (B, H, S, D); k (B, Hk, T, D); v (B, Hk, T, E) with H % Hk == 0; out, d_out (B, H, S, E); lse (B, H, S).
`lse` is the natural log-sum-exp, float32 (float64 for float64 inputs); a row that attends nothing has out 0 and lse
-inf. All results are contiguous and alias no input. Kernels that do otherwise are normalised at `_forward` and
`_backward`, through which everything passes.

The state (out, lse) that steps carry is in the accumulation dtype. A backward step takes the *global* out and lse: the
contributions of all steps of a row then add up to its gradient.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import reference
from .blocks import Block, Interval, blocks, pairs_of
from .dispatch import block_kernel
from .mask import Tile, parse_mask
from .reference import accumulation_dtype

Gradients = tuple[Tensor, Tensor, Tensor]


# ---- kernels ----


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """One kernel call: (out in q's or the accumulation dtype, lse), dead rows (0, -inf), any strides."""
    if 0 in q.shape[:3] or k.shape[2] == 0:
        return _empty_state(q, v)
    return block_kernel(q, v, mask, is_causal).forward(q, k, v, mask, is_causal, scale)


def _backward(
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
    """One kernel call: gradients in q's or the accumulation dtype, any strides."""
    if 0 in q.shape[:3] or k.shape[2] == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return block_kernel(q, v, mask, is_causal).backward(d_out, q, k, v, out, lse, mask, is_causal, scale)


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    # `to` alone copies only when the dtype differs, whatever the memory format.
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _state_like(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised (out in `dtype`, lse)."""
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _empty_state(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state of rows that have attended nothing yet."""
    out, lse = _state_like(q, v, accumulation_dtype(q.dtype))
    return out.zero_(), lse.fill_(-math.inf)


def _gradients_like(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Gradients:
    """Uninitialised contiguous (dq, dk, dv)."""
    return q.new_empty(q.shape, dtype=dtype), k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)


def _contiguous_gradients(gradients: Gradients, dtype: torch.dtype) -> Gradients:
    dq, dk, dv = gradients
    return _contiguous(dq, dtype), _contiguous(dk, dtype), _contiguous(dv, dtype)


# ---- one step: all blocks of some rows and some columns ----


class Where(NamedTuple):
    """What a step's rows and columns are, and who attends whom."""

    tables: list[Tensor]
    mask: str
    q_intervals: tuple[int, ...]
    k_intervals: tuple[int, ...]

    def blocks(self, q: Tensor, k: Tensor) -> tuple[Block, ...]:
        for x, intervals in ((q, self.q_intervals), (k, self.k_intervals)):
            assert x.shape[2] == sum(hi - lo for lo, hi in pairs_of(intervals)), (x.shape, intervals)
        return blocks(self.mask, self.q_intervals, self.k_intervals)

    def keep(self, block: Block, q: Tensor) -> Tensor | None:
        """The bool mask of a masked block, broadcastable to (B, H, rows, columns)."""
        if block.tile is not Tile.MASKED:
            return None
        rows = _positions(self.q_intervals, q.device)[slice(*block.rows)]
        columns = _positions(self.k_intervals, q.device)[slice(*block.columns)]
        return parse_mask(self.mask).evaluate(rows, columns, self.tables, q.shape[0], q.shape[1], q.device)


def _part(x: Tensor, interval: Interval) -> Tensor:
    return x[:, :, slice(*interval)]


def _positions(intervals: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(lo, hi, device=device) for lo, hi in pairs_of(intervals)])


def _step(
    q: Tensor, k: Tensor, v: Tensor, carried: tuple[Tensor, Tensor] | None, where: Where, scale: float
) -> tuple[Tensor, Tensor]:
    """The state after the rows have attended the columns. What is carried is read only."""

    def attend(block: Block) -> tuple[Tensor, Tensor]:
        q_rows, k_columns, v_columns = _part(q, block.rows), _part(k, block.columns), _part(v, block.columns)
        return _forward(q_rows, k_columns, v_columns, where.keep(block, q), block.tile is Tile.CAUSAL, scale)

    todo = list(where.blocks(q, k))
    if todo and todo[0].rows == (0, q.shape[2]):  # all rows: no state has to be made or copied first
        state = attend(todo.pop(0))
        if carried:
            state = reference.merge(*carried, *state)
    else:
        state = (carried[0].clone(), carried[1].clone()) if carried else _empty_state(q, v)
    out, lse = _contiguous(state[0], accumulation_dtype(q.dtype)), state[1].contiguous()
    for block in todo:
        block_out, block_lse = attend(block)
        out_rows, lse_rows = _part(out, block.rows), _part(lse, block.rows)
        merged_lse, weight = reference.merge_weight(lse_rows, block_lse)
        out_rows.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
        lse_rows.copy_(merged_lse)
    return out, lse


def _backward_step(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, where: Where, scale: float
) -> Gradients:
    """What the rows and columns contribute to (dq, dk, dv), in the accumulation dtype."""

    def attend(block: Block) -> Gradients:
        d_rows, q_rows, out_rows, lse_rows = (_part(x, block.rows) for x in (d_out, q, out, lse))
        k_columns, v_columns = _part(k, block.columns), _part(v, block.columns)
        keep, is_causal = where.keep(block, q), block.tile is Tile.CAUSAL
        return _backward(d_rows, q_rows, k_columns, v_columns, out_rows, lse_rows, keep, is_causal, scale)

    todo = where.blocks(q, k)
    dtype = accumulation_dtype(q.dtype)
    if len(todo) == 1 and todo[0][1:] == ((0, q.shape[2]), (0, k.shape[2])):
        return _contiguous_gradients(attend(todo[0]), dtype)
    dq, dk, dv = (gradient.zero_() for gradient in _gradients_like(q, k, v, dtype))
    for block in todo:
        block_dq, block_dk, block_dv = attend(block)
        _part(dq, block.rows).add_(block_dq)
        _part(dk, block.columns).add_(block_dk)
        _part(dv, block.columns).add_(block_dv)
    return dq, dk, dv


# ---- operators of a split graph ----


@torch.library.custom_op(
    "evocompile::attention_step",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] tables, Tensor? out, Tensor? lse, str mask, int[] q_intervals,"
    " int[] k_intervals, float scale) -> (Tensor, Tensor)",
)
def attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    out: Tensor | None,
    lse: Tensor | None,
    mask: str,
    q_intervals: list[int],
    k_intervals: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The carried state (out, lse) after these rows have also attended these columns; no state starts a fresh one.

    The rows of q are the global positions `q_intervals` (lo0, hi0, lo1, hi1, …, concatenated), those of k and v
    `k_intervals`; `tables` cover all global positions. out, lse: in the accumulation dtype.
    """
    carried = None if out is None or lse is None else (out, lse)
    return _step(q, k, v, carried, Where(tables, mask, tuple(q_intervals), tuple(k_intervals)), scale)


@attention_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return _state_like(q, v, accumulation_dtype(q.dtype))


@torch.library.custom_op("evocompile::attention_merge", mutates_args=())
def attention_merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two states (out, lse) of the same rows over different keys as one; all in the accumulation dtype."""
    return reference.merge(out, lse, other_out, other_lse)


@attention_merge.register_fake
def _(out: Tensor, lse: Tensor, _other_out: Tensor, _other_lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(lse)


@torch.library.custom_op(
    "evocompile::attention_backward_step",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] tables, str mask,"
    " int[] q_intervals, int[] k_intervals, float scale) -> (Tensor, Tensor, Tensor)",
)
def attention_backward_step(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    mask: str,
    q_intervals: list[int],
    k_intervals: list[int],
    scale: float,
) -> Gradients:
    """What these rows and columns contribute to (dq, dk, dv), in the accumulation dtype.

    out, lse: the *global* ones of these rows, after all steps of the forward. Otherwise as `attention_step`.
    """
    where = Where(tables, mask, tuple(q_intervals), tuple(k_intervals))
    return _backward_step(d_out, q, k, v, out, lse, where, scale)


@attention_backward_step.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Gradients:
    return _gradients_like(q, k, v, accumulation_dtype(q.dtype))


# ---- operators with a predicate, before the split ----


@torch.library.custom_op("evocompile::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor], mask: str, scale: float) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse) of whole sequences under the predicate `mask` (`kernels.mask`) with its tables."""
    out, lse = _step(q, k, v, None, _everywhere(q, k, tables, mask), scale)
    return out.to(q.dtype), lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return _state_like(q, v, q.dtype)


@torch.library.custom_op("evocompile::attention_backward", mutates_args=())
def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    mask: str,
    scale: float,
) -> Gradients:
    """(dq, dk, dv) of `attention`, in q's dtype."""
    gradients = _backward_step(d_out, q, k, v, out, lse, _everywhere(q, k, tables, mask), scale)
    return _contiguous_gradients(gradients, q.dtype)


@attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Gradients:
    return _gradients_like(q, k, v, q.dtype)


def _everywhere(q: Tensor, k: Tensor, tables: list[Tensor], mask: str) -> Where:
    return Where(tables, mask, (0, q.shape[2]), (0, k.shape[2]))


# ---- operators as captured ----


@torch.library.custom_op("evocompile::dense_attention", mutates_args=())
def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse). Differentiable in q, k and v.

    mask: bool (True attends) or float (added to the scores), broadcastable to (B, H, S, T); is_causal: column <= row,
    aligned to the top left, on top of the mask.
    """
    out, lse = _forward(q, k, v, mask, is_causal, scale)
    return _contiguous(out, q.dtype), lse.contiguous()


@dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return _state_like(q, v, q.dtype)


@torch.library.custom_op("evocompile::dense_attention_backward", mutates_args=())
def dense_attention_backward(
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
    """(dq, dk, dv) of `dense_attention`, in q's dtype."""
    return _contiguous_gradients(_backward(d_out, q, k, v, out, lse, mask, is_causal, scale), q.dtype)


@dense_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any) -> Gradients:
    return _gradients_like(q, k, v, q.dtype)


def _register_autocast(dispatch_key: str, device_type: str) -> None:
    """Under autocast q, k and v take its dtype, as torch does for scaled_dot_product_attention."""

    def cast_and_attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        if q.dtype != torch.float64:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        with torch.autocast(device_type, enabled=False):
            return torch.ops.evocompile.dense_attention(q, k, v, mask, is_causal, scale)

    _autocast.impl("dense_attention", cast_and_attend, dispatch_key)


_autocast = torch.library.Library("evocompile", "IMPL")
_register_autocast("AutocastCPU", "cpu")
_register_autocast("AutocastCUDA", "cuda")


def _save_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, mask)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # a zero tangent of lse would be one more node in the joint graph


def _differentiate_dense(ctx: Any, d_out: Tensor, _d_lse: None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = dense_attention_backward(d_out, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return dq, dk, dv, None, None, None


dense_attention.register_autograd(_differentiate_dense, setup_context=_save_dense)


# ---- FLOPs: two products forward, five backward (the scores again, and the gradients of q, k, v and the weights) ----


def _forward_flops(q_shape: torch.Size, v_shape: torch.Size, pairs: int) -> int:
    return 2 * q_shape[0] * q_shape[1] * pairs * (q_shape[3] + v_shape[3])


def _backward_flops(q_shape: torch.Size, v_shape: torch.Size, pairs: int) -> int:
    return 2 * q_shape[0] * q_shape[1] * pairs * (3 * q_shape[3] + 2 * v_shape[3])


def _dense_pairs(q_shape: torch.Size, k_shape: torch.Size, is_causal: bool) -> int:
    return Block(Tile.CAUSAL if is_causal else Tile.FULL, (0, q_shape[2]), (0, k_shape[2])).pairs


def _step_pairs(mask: str, q_intervals: list[int], k_intervals: list[int]) -> int:
    return sum(block.pairs for block in blocks(mask, tuple(q_intervals), tuple(k_intervals)))


@register_flop_formula(torch.ops.evocompile.dense_attention)
def _(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, *_rest: Any, **_out: Any) -> int:
    return _forward_flops(q, v, _dense_pairs(q, k, is_causal))


@register_flop_formula(torch.ops.evocompile.dense_attention_backward)
def _(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: Any, is_causal: bool, *_rest: Any, **_out: Any
) -> int:
    return _backward_flops(q, v, _dense_pairs(q, k, is_causal))


@register_flop_formula(torch.ops.evocompile.attention)
def _(q: Any, k: Any, v: Any, tables: Any, mask: str, *_rest: Any, **_out: Any) -> int:
    return _forward_flops(q, v, _step_pairs(mask, [0, q[2]], [0, k[2]]))


@register_flop_formula(torch.ops.evocompile.attention_backward)
def _(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, tables: Any, mask: str, *_rest: Any, **_out: Any) -> int:
    return _backward_flops(q, v, _step_pairs(mask, [0, q[2]], [0, k[2]]))


@register_flop_formula(torch.ops.evocompile.attention_step)
def _(q: Any, k: Any, v: Any, tables: Any, out: Any, lse: Any, *where: Any, **_out: Any) -> int:
    return _forward_flops(q, v, _step_pairs(*where[:3]))


@register_flop_formula(torch.ops.evocompile.attention_backward_step)
def _(d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, tables: Any, *where: Any, **_out: Any) -> int:
    return _backward_flops(q, v, _step_pairs(*where[:3]))
