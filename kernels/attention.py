"""The attention operators of the graph: `torch.ops.evocompile.*`, three forms, each with its backward.

| operator                                   | stands in the graph            | sees                                   |
|--------------------------------------------|--------------------------------|----------------------------------------|
| `dense_attention`, `…_backward`            | as captured                    | global tensors, a mask tensor          |
| `attention`, `…_backward`                  | after `canonicalize`           | global tensors, a mask as a predicate  |
| `attention_step`, `attention_backward_step`| after `split_attention`        | blocks of rows and columns, a state    |

Shapes: q (B, H, S, D); k (B, Hk, T, D); v (B, Hk, T, E) with H % Hk == 0; out, d_out (B, H, S, E); lse (B, H, S).
`lse` is the natural log-sum-exp, float32 (float64 for float64 inputs); a row that attends nothing has out 0 and lse
-inf. All results are contiguous and alias no input. What they run is in `steps`.

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

from typing import Any

import torch
from torch import Tensor, library

from evocompile.torch_private import arguments_by_name

from . import dense_attention, reference  # noqa: F401 (dense_attention registers its operators)
from .form import Form
from .reference import accumulation_dtype
from .schema import FORM, TRAINED, as_operands, operands_like
from .steps import Where, gradients_like, run_backward_step, run_step, state_like

_PLACE = "int batch=0, int head=0"

# ---- operators of a split graph ----


@library.custom_op(
    "evocompile::attention_step",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] tables, Tensor? out, Tensor? lse, str mask, int[] q_intervals,"
    f" int[] k_intervals, float scale, {FORM}, {_PLACE}) -> (Tensor, Tensor)",
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
    return run_step(q, k, v, carried, Where(tables, mask, tuple(q_intervals), tuple(k_intervals), form), scale)


@attention_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> tuple[Tensor, Tensor]:
    return state_like(q, v, accumulation_dtype(q.dtype))


@library.custom_op("evocompile::attention_merge", mutates_args=())
def attention_merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two states (out, lse) of the same rows over different keys as one; all in the accumulation dtype."""
    return reference.merge(out, lse, other_out, other_lse)


@attention_merge.register_fake
def _(out: Tensor, lse: Tensor, _other_out: Tensor, _other_lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(lse)


@library.custom_op(
    "evocompile::attention_backward_step",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] tables, str mask,"
    f" int[] q_intervals, int[] k_intervals, float scale, {FORM}, {_PLACE}, {TRAINED}) -> Tensor[]",
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
    return run_backward_step(d_out, q, k, v, out, lse, where, scale)


@attention_backward_step.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> list[Tensor]:
    given = arguments_by_name(torch.ops.evocompile.attention_backward_step.default, (d_out, q, k, v, *_rest), _form)
    return gradients_like(accumulation_dtype(q.dtype), q, k, v, *(given["params"] or ())[: given["trained"]])


# ---- operators with a predicate, before the split ----


@library.custom_op(
    "evocompile::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor[] tables, str mask, float scale, {FORM}) -> (Tensor, Tensor)",
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
    out, lse = run_step(q, k, v, None, _everywhere(q, k, tables, mask, form), scale, final=True)
    return out.to(q.dtype), lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> tuple[Tensor, Tensor]:
    return state_like(q, v, q.dtype)


@library.custom_op(
    "evocompile::attention_backward",
    mutates_args=(),
    schema="(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor[] tables, str mask,"
    f" float scale, {FORM}, {TRAINED}) -> Tensor[]",
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
    gradients = run_backward_step(d_out, q, k, v, out, lse, _everywhere(q, k, tables, mask, form), scale)
    return as_operands(gradients, q, form)


@attention_backward.register_fake
def _(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: Any, **_form: Any) -> list[Tensor]:
    given = arguments_by_name(torch.ops.evocompile.attention_backward.default, (d_out, q, k, v, *_rest), _form)
    return operands_like(q, k, v, (given["params"] or ())[: given["trained"]])


def _everywhere(q: Tensor, k: Tensor, tables: list[Tensor], mask: str, form: Form) -> Where:
    return Where(tables, mask, (0, q.shape[2]), (0, k.shape[2]), form)


from . import flops  # noqa: E402, F401 (its formulas are for the operators above)
