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

All have the same last arguments, which are left out of a graph where they say nothing:

    params   float tensors (H,), (H, N) or (H, B or 1, N): learned or constant data of this call's query heads. Where
             heads are split they are split like q, where the batch is split on dim 1 of three.
    seed     int64 scalar on the CPU: the stream from which dropout draws; None without dropout.
    score    text of a number (`kernels.score`): what a scaled score s becomes before the softmax, a function of s, the
             positions q and k, b, h, tables and params; "s" is the score as it is.
    dropout  the probability with which a weight is dropped. Whether it is depends on the seed and the global
             (b, h, q, k) alone, so every schedule and both directions decide alike.
    batch    (steps) global numbers of this call's first batch row and
    head     first query head: what b is for dropout, and h in mask and score. The rows of tables and params are local.
    trained  (backward) for how many of `params`, the first ones, a gradient is returned.

A backward returns the list [dq, dk, dv, *gradients of the first `trained` params].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import reference
from .band import band_mask
from .blocks import Block, Interval, blocks, pairs_of
from .dispatch import block_kernel, step_kernel
from .form import Changes, Form
from .mask import Tile, parse_mask
from .reference import accumulation_dtype

_FORM = "Tensor[]? params=None, Tensor? seed=None, str score='s', float dropout=0.0"
_PLACE = "int batch=0, int head=0"
_GRIDS = "Tensor[]? grids=None"
_TRAINED = "int trained=0"


# ---- kernels ----


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    changes: Changes | None = None,
) -> tuple[Tensor, Tensor]:
    """One kernel call: (out in q's or the accumulation dtype, lse), dead rows (0, -inf), any strides."""
    if 0 in q.shape[:3] or k.shape[2] == 0:
        return _empty_state(q, v)
    kernel = block_kernel(q, v, mask, is_causal, changes)
    return kernel.forward(q, k, v, mask, is_causal, scale, *([changes] if changes else []))


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
    changes: Changes | None = None,
) -> list[Tensor]:
    """One kernel call: gradients in q's or the accumulation dtype, any strides."""
    if 0 in q.shape[:3] or k.shape[2] == 0:
        trained = changes.form.params[: changes.form.trained] if changes else ()
        return [torch.zeros_like(each) for each in (q, k, v, *trained)]
    kernel = block_kernel(q, v, mask, is_causal, changes)
    return list(kernel.backward(d_out, q, k, v, out, lse, mask, is_causal, scale, *([changes] if changes else [])))


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


def _gradients_like(dtype: torch.dtype, *operands: Tensor) -> list[Tensor]:
    """Uninitialised contiguous gradients of q, k, v and the trained params."""
    return [each.new_empty(each.shape, dtype=dtype) for each in operands]


def _contiguous_all(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [_contiguous(each, dtype) for each in gradients]


# ---- one step: all blocks of some rows and some columns ----


class Where(NamedTuple):
    """What a step's rows and columns are, and who attends whom."""

    tables: list[Tensor]
    mask: str
    q_intervals: tuple[int, ...]
    k_intervals: tuple[int, ...]
    form: Form

    def blocks(self, q: Tensor, k: Tensor) -> tuple[Block, ...]:
        for x, intervals in ((q, self.q_intervals), (k, self.k_intervals)):
            assert x.shape[2] == sum(hi - lo for lo, hi in pairs_of(intervals)), (x.shape, intervals)
        return blocks(self.mask, self.q_intervals, self.k_intervals)

    def keep(self, block: Block, q: Tensor) -> Tensor | None:
        """The bool mask of a masked block, broadcastable to (B, H, rows, columns)."""
        if block.tile is not Tile.MASKED:
            return None
        band = band_mask(self.mask, block, self.q_intervals, self.k_intervals, q.device)
        if band is not None:
            return band
        rows, columns = self._positions(block, q.device)
        batch, heads = q.shape[:2]
        return parse_mask(self.mask).evaluate(
            rows, columns, self.tables, batch, heads, q.device, self.form.batch, self.form.head
        )

    def changes(self, block: Block, device: torch.device) -> Changes | None:
        """What happens to the scores and weights of a block."""
        return None if self.form.is_plain else self.form.at(*self._positions(block, device), self.tables)

    def _positions(self, block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
        rows, columns = _positions(self.q_intervals, device), _positions(self.k_intervals, device)
        return rows[slice(*block.rows)], columns[slice(*block.columns)]


def _some(q: Tensor, k: Tensor) -> bool:
    """Whether there are rows and columns."""
    return 0 not in q.shape[:3] and k.shape[2] != 0


def _part(x: Tensor, interval: Interval) -> Tensor:
    return x[:, :, slice(*interval)]


def _positions(intervals: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(lo, hi, device=device) for lo, hi in pairs_of(intervals)])


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carried: tuple[Tensor, Tensor] | None,
    where: Where,
    scale: float,
    final: bool = False,
) -> tuple[Tensor, Tensor]:
    """The state after the rows have attended the columns; after the final step out may be in q's dtype.

    What is carried is read only.
    """
    kernel = step_kernel(q, v, where.mask, where.form)
    if kernel is not None and _some(q, k):
        return kernel.step(q, k, v, carried, *where, scale, final)

    def attend(block: Block) -> tuple[Tensor, Tensor]:
        q_rows, k_columns, v_columns = _part(q, block.rows), _part(k, block.columns), _part(v, block.columns)
        keep, is_causal = where.keep(block, q), block.tile is Tile.CAUSAL
        return _forward(q_rows, k_columns, v_columns, keep, is_causal, scale, where.changes(block, q.device))

    todo = list(where.blocks(q, k))
    if todo and todo[0].rows == (0, q.shape[2]):  # all rows: no state has to be made or copied first
        state = attend(todo.pop(0))
        if carried:
            state = reference.merge_into(*state, *carried)
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
) -> list[Tensor]:
    """What the rows and columns contribute to the gradients, in the accumulation dtype."""
    kernel = step_kernel(q, v, where.mask, where.form)
    if kernel is not None and _some(q, k):
        return kernel.backward_step(d_out, q, k, v, out, lse, *where, scale)

    def attend(block: Block) -> list[Tensor]:
        d_rows, q_rows, out_rows, lse_rows = (_part(x, block.rows) for x in (d_out, q, out, lse))
        k_columns, v_columns = _part(k, block.columns), _part(v, block.columns)
        keep, is_causal = where.keep(block, q), block.tile is Tile.CAUSAL
        changes = where.changes(block, q.device)
        return _backward(d_rows, q_rows, k_columns, v_columns, out_rows, lse_rows, keep, is_causal, scale, changes)

    todo = where.blocks(q, k)
    dtype = accumulation_dtype(q.dtype)
    if len(todo) == 1 and todo[0][1:] == ((0, q.shape[2]), (0, k.shape[2])):
        return _contiguous_all(attend(todo[0]), dtype)
    gradients = [each.zero_() for each in _gradients_like(dtype, q, k, v, *_trained(where.form))]
    dq, dk, dv, *d_params = gradients
    for block in todo:
        targets = _part(dq, block.rows), _part(dk, block.columns), _part(dv, block.columns), *d_params
        for target, gradient in zip(targets, attend(block), strict=True):
            target.add_(gradient)
    return gradients


def _trained(form: Form) -> Sequence[Tensor]:
    return form.params[: form.trained]


# ---- operators of a split graph


@torch.library.custom_op(
    "evocompile::attention_step",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] tables, Tensor? out, Tensor? lse, str mask, int[] q_intervals,"
    f" int[] k_intervals, float scale, {_FORM}, {_PLACE}) -> (Tensor, Tensor)",
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
    params: list[Tensor] | None = None,
    seed: Tensor | None = None,
    score: str = "s",
    dropout: float = 0.0,
    batch: int = 0,
    head: int = 0,
) -> tuple[Tensor, Tensor]:
    """The carried state (out, lse) after these rows have also attended these columns; no state starts a fresh one.

    The rows of q are the global positions `q_intervals` (lo0, hi0, lo1, hi1, …, concatenated), those of k and v
    `k_intervals`; `tables` cover all global positions. out, lse: in the accumulation dtype.
    """
    carried = None if out is None or lse is None else (out, lse)
    form = Form(params or (), seed, score, dropout, batch, head)
    return _step(q, k, v, carried, Where(tables, mask, tuple(q_intervals), tuple(k_intervals), form), scale)


@attention_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> tuple[Tensor, Tensor]:
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
    f" int[] q_intervals, int[] k_intervals, float scale, {_FORM}, {_PLACE}, {_TRAINED}) -> Tensor[]",
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
    params: list[Tensor] | None = None,
    seed: Tensor | None = None,
    score: str = "s",
    dropout: float = 0.0,
    batch: int = 0,
    head: int = 0,
    trained: int = 0,
) -> list[Tensor]:
    """What these rows and columns contribute to [dq, dk, dv, *d_params], in the accumulation dtype.

    out, lse: the *global* ones of these rows, after all steps of the forward. Otherwise as `attention_step`.
    """
    form = Form(params or (), seed, score, dropout, batch, head, trained)
    where = Where(tables, mask, tuple(q_intervals), tuple(k_intervals), form)
    return _backward_step(d_out, q, k, v, out, lse, where, scale)


@attention_backward_step.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> list[Tensor]:
    given = _given(attention_backward_step, (d_out, q, k, v, *_rest), _form)
    return _gradients_like(accumulation_dtype(q.dtype), q, k, v, *(given["params"] or ())[: given["trained"]])


# ---- operators with a predicate, before the split ----


@torch.library.custom_op(
    "evocompile::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor[] tables, str mask, float scale, {_FORM}) -> (Tensor, Tensor)",
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: list[Tensor],
    mask: str,
    scale: float,
    params: list[Tensor] | None = None,
    seed: Tensor | None = None,
    score: str = "s",
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse) of whole sequences under the predicate `mask` (`kernels.mask`) with its tables."""
    form = Form(params or (), seed, score, dropout)
    out, lse = _step(q, k, v, None, _everywhere(q, k, tables, mask, form), scale, final=True)
    return out.to(q.dtype), lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> tuple[Tensor, Tensor]:
    return _state_like(q, v, q.dtype)


@torch.library.custom_op(
    "evocompile::attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] tables, str mask,"
    f" float scale, {_FORM}, {_TRAINED}) -> Tensor[]",
)
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
    params: list[Tensor] | None = None,
    seed: Tensor | None = None,
    score: str = "s",
    dropout: float = 0.0,
    trained: int = 0,
) -> list[Tensor]:
    """[dq, dk, dv, *d_params] of `attention`, in the dtypes of q and of the params."""
    form = Form(params or (), seed, score, dropout, trained=trained)
    gradients = _backward_step(d_out, q, k, v, out, lse, _everywhere(q, k, tables, mask, form), scale)
    return _as_operands(gradients, q, form)


@attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> list[Tensor]:
    given = _given(attention_backward, (d_out, q, k, v, *_rest), _form)
    return _operands_like(q, k, v, (given["params"] or ())[: given["trained"]])


def _everywhere(q: Tensor, k: Tensor, tables: list[Tensor], mask: str, form: Form) -> Where:
    return Where(tables, mask, (0, q.shape[2]), (0, k.shape[2]), form)


def _as_operands(gradients: Sequence[Tensor], q: Tensor, form: Form) -> list[Tensor]:
    """Gradients contiguous and in the dtypes of what they are gradients of."""
    dtypes = [q.dtype] * 3 + [each.dtype for each in _trained(form)]
    return [_contiguous(each, dtype) for each, dtype in zip(gradients, dtypes, strict=True)]


def _operands_like(q: Tensor, k: Tensor, v: Tensor, trained: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised gradients as of `_as_operands`."""
    return _gradients_like(q.dtype, q, k, v) + [each.new_empty(each.shape) for each in trained]


def _given(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the defaults of those that are left out."""
    schema = operator._opoverload._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return {**defaults, **dict(zip((each.name for each in schema), args, strict=False)), **kwargs}


# ---- operators as captured ----


@torch.library.custom_op(
    "evocompile::dense_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, {_FORM}, {_GRIDS}) ->"
    " (Tensor, Tensor)",
)
def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    params: list[Tensor] | None = None,
    seed: Tensor | None = None,
    score: str = "s",
    dropout: float = 0.0,
    grids: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse). Differentiable in q, k, v and params.

    mask: bool (True attends) or float (added to what the score function gives), broadcastable to (B, H, S, T);
    is_causal: column <= row, aligned to the top left, on top of the mask. grids: tensors broadcastable to (B, H, S, T)
    that the score function reads, float ones as x0, x1, …, those of other dtypes as i0, i1, … by their number.
    """
    changes = _dense_changes(q, k, Form(params or (), seed, score, dropout), grids)
    out, lse = _forward(q, k, v, mask, is_causal, scale, changes)
    return _contiguous(out, q.dtype), lse.contiguous()


def _dense_changes(q: Tensor, k: Tensor, form: Form, grids: list[Tensor] | None) -> Changes | None:
    rows, columns = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
    return form.at(rows, columns, (), grids or ())


@dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> tuple[Tensor, Tensor]:
    return _state_like(q, v, q.dtype)


@torch.library.custom_op(
    "evocompile::dense_attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool is_causal,"
    f" float scale, {_FORM}, {_GRIDS}, {_TRAINED}) -> Tensor[]",
)
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
    params: list[Tensor] | None = None,
    seed: Tensor | None = None,
    score: str = "s",
    dropout: float = 0.0,
    grids: list[Tensor] | None = None,
    trained: int = 0,
) -> list[Tensor]:
    """[dq, dk, dv, *d_params] of `dense_attention`, in the dtypes of q and of the params."""
    form = Form(params or (), seed, score, dropout, trained=trained)
    changes = _dense_changes(q, k, form, grids)
    return _as_operands(_backward(d_out, q, k, v, out, lse, mask, is_causal, scale, changes), q, form)


@dense_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> list[Tensor]:
    given = _given(dense_attention_backward, (d_out, q, k, v, *_rest), _form)
    return _operands_like(q, k, v, (given["params"] or ())[: given["trained"]])


class _WithSink(torch.autograd.Function):
    """Operators only, so that AOT traces through it: the attention, and plain arithmetic for the sink."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor, scale: float, *form: Any) -> Tensor:
        params, seed, score, dropout, grids = form[0], *form[1:4], form[4]
        alone, lse_alone = dense_attention(q, k, v, None, False, scale, params, seed, score, dropout, grids)
        lse = torch.logaddexp(lse_alone, sink.to(lse_alone.dtype))
        out = (alone * (lse_alone - lse).exp().unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.form = scale, form
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (d_out,), (q, k, v, out, lse, sink) = gradients, ctx.saved_tensors
        scale, form = ctx.form
        dq, dk, dv = dense_attention_backward(d_out, q, k, v, out, lse, None, False, scale, *form)
        weight = (sink.to(lse.dtype) - lse).exp()
        d_sink = -weight * (d_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        return dq, dk, dv, d_sink.sum_to_size(sink.shape).to(sink.dtype), None, *[None] * len(form)


def attention_with_sink(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, scale: float, seed: Tensor | None, score: str, dropout: float,
    grids: list[Tensor],
) -> Tensor:  # fmt: skip
    """The out of `dense_attention` where each row attends one key more, of value 0 and score `sink`.

    sink: broadcastable to (B, H, S). It is the last state that is merged, (0, sink); the backward of the attention with
    the merged out and lse is then right as it stands, and d_sink = -exp(sink - lse) · Σ d_out · out.
    """
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        q, k, v = (each.to(torch.get_autocast_dtype(q.device.type)) for each in (q, k, v))
    return _WithSink.apply(q, k, v, sink, scale, [], seed, score, dropout, grids)


def _register_autocast(dispatch_key: str, device_type: str) -> None:
    """Under autocast q, k and v take its dtype, as torch does for scaled_dot_product_attention."""

    def cast_and_attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float, *form: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        if q.dtype != torch.float64:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        with torch.autocast(device_type, enabled=False):
            return torch.ops.evocompile.dense_attention(q, k, v, mask, is_causal, scale, *form, **named)

    _autocast.impl("dense_attention", cast_and_attend, dispatch_key)


_autocast = torch.library.Library("evocompile", "IMPL")
_register_autocast("AutocastCPU", "cpu")
_register_autocast("AutocastCUDA", "cuda")


def _save_dense(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale, params, seed, ctx.score, ctx.dropout, grids = inputs
    out, lse = output
    ctx.counts = [None if each is None else len(each) for each in (params, grids)]
    params, grids = params or [], grids or []
    ctx.trained = sum(each.requires_grad for each in params)
    assert all(each.requires_grad for each in params[: ctx.trained]), "trained params come first"
    ctx.save_for_backward(q, k, v, out, lse, mask, seed, *params, *grids)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # a zero tangent of lse would be one more node in the joint graph


def _differentiate_dense(ctx: Any, d_out: Tensor, _d_lse: None) -> tuple[Any, ...]:
    q, k, v, out, lse, mask, seed, *rest = ctx.saved_tensors
    of_params, of_grids = ([] if count is None else [None] * count for count in ctx.counts)
    params, grids = rest[: len(of_params)], rest[len(of_params) :]
    changed = ctx.score != "s" or ctx.dropout != 0.0
    form = (params, seed, ctx.score, ctx.dropout, grids, ctx.trained) if changed else ()
    dq, dk, dv, *d_params = dense_attention_backward(d_out, q, k, v, out, lse, mask, ctx.is_causal, ctx.scale, *form)
    of_params[: len(d_params)] = d_params
    lists = [None if count is None else each for count, each in zip(ctx.counts, (of_params, of_grids), strict=True)]
    # The dispatcher leaves out trailing arguments that are defaults; autograd wants one result for each that came.
    return (dq, dk, dv, None, None, None, lists[0], None, None, None, lists[1])[: len(ctx.needs_input_grad)]


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
