"""Attention as it is captured, `evocompile::dense_attention`: global tensors, a mask tensor, differentiable.

The arguments and conventions are those of `kernels.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from evocompile.torch_private import arguments_by_name

from .form import Changes, Form
from .schema import FORM, TRAINED, as_operands, operands_like
from .steps import attend_block, attend_block_backward, contiguous, state_like

_GRIDS = "Tensor[]? grids=None"


@library.custom_op(
    "evocompile::dense_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale, {FORM}, {_GRIDS}) ->"
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
    out, lse = attend_block(q, k, v, mask, is_causal, scale, changes)
    return contiguous(out, q.dtype), lse.contiguous()


def _dense_changes(q: Tensor, k: Tensor, form: Form, grids: list[Tensor] | None) -> Changes | None:
    rows, columns = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
    return form.at(rows, columns, (), grids or ())


@dense_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> tuple[Tensor, Tensor]:
    return state_like(q, v, q.dtype)


@library.custom_op(
    "evocompile::dense_attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool is_causal,"
    f" float scale, {FORM}, {_GRIDS}, {TRAINED}) -> Tensor[]",
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
    return as_operands(attend_block_backward(d_out, q, k, v, out, lse, mask, is_causal, scale, changes), q, form)


@dense_attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> list[Tensor]:
    given = arguments_by_name(torch.ops.evocompile.dense_attention_backward.default, (d_out, q, k, v, *_rest), _form)
    return operands_like(q, k, v, (given["params"] or ())[: given["trained"]])


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


_autocast = library.Library("evocompile", "IMPL")
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
