"""Triton as a backend of `dispatch`: what it serves, whole steps, and single blocks by the same kernels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from evocompile.kernels import refusals
from evocompile.kernels.form import Form
from evocompile.kernels.pattern import ScorePattern, pattern_of, score_pattern

if TYPE_CHECKING:
    from evocompile.kernels.dispatch import Case

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST = 256  # head dim


def refuses(case: Case) -> str | None:
    """Why the kernels do not serve a case. Under TRITON_INTERPRET=1 they run on the CPU, for tests."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and case.device == "cpu"
    if case.device != "cuda" and not interpreted:
        return f"it runs on cuda, not on {case.device}"
    if not refusals.importable("triton"):
        return "triton is not installed"
    if case.capability is not None and case.capability < (8, 0):
        return "it has kernels for compute capability 8.0 and later"
    if case.dtype not in _DTYPES or (interpreted and case.dtype == torch.bfloat16):
        return f"it takes no {str(case.dtype).removeprefix('torch.')}"
    if max(case.head_dim, case.value_dim) > _LARGEST:
        return f"head dims are at most {_LARGEST}"
    reason = refusals.not_taken(case.mask)
    if reason is not None:
        return reason
    pattern = pattern_of(case.mask)
    return pattern if isinstance(pattern, str) else None


def refuses_form(score: str, dropout: bool, trained: bool) -> str | None:
    """Why the kernels do not serve what a step does to its scores and weights."""
    if dropout:
        return "it knows no dropout"
    if trained:
        return "it computes no gradients of params"
    pattern = score_pattern(score)
    return pattern if isinstance(pattern, str) else None


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carried: tuple[Tensor, Tensor] | None,
    tables: list[Tensor],
    mask: str,
    q_intervals: tuple[int, ...],
    k_intervals: tuple[int, ...],
    form: Form,
    scale: float,
    final: bool = False,
) -> tuple[Tensor, Tensor]:
    """The state after a step, new tensors; out in q's dtype if it is the final one. `carried` is read only."""
    from . import launch

    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=q.dtype if final else torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    launch.forward(q, k, v, carried, out, lse, _given(tables, mask, q_intervals, k_intervals, form, scale))
    return out, lse


def backward_step(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: list[Tensor],
    mask: str,
    q_intervals: tuple[int, ...],
    k_intervals: tuple[int, ...],
    form: Form,
    scale: float,
) -> list[Tensor]:
    """What a step contributes to [dq, dk, dv], float32. out, lse: the global ones of the rows."""
    from . import launch

    dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
    given = _given(tables, mask, q_intervals, k_intervals, form, scale)
    launch.backward(d_out, q, k, v, out, lse.contiguous(), (dq, dk, dv), False, given)
    return [dq, dk, dv]


def _given(
    tables: list[Tensor],
    mask: str,
    q_intervals: tuple[int, ...],
    k_intervals: tuple[int, ...],
    form: Form,
    scale: float,
) -> Any:
    from . import launch

    score = score_pattern(form.score)
    assert isinstance(score, ScorePattern), score
    slopes = None if score.slopes is None else form.params[score.slopes] * score.factor
    return launch.Step(mask, tables, q_intervals, k_intervals, scale, score.softcap, slopes)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """One block, as of `reference.forward`."""
    assert mask is None
    return step(q, k, v, None, [], *_block(q, k, is_causal), Form(), scale)


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
) -> list[Tensor]:
    """One block, as of `reference.backward`."""
    assert mask is None
    return backward_step(d_out, q, k, v, out, lse, [], *_block(q, k, is_causal), Form(), scale)


def _block(q: Tensor, k: Tensor, is_causal: bool) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    text: Any = "k <= q" if is_causal else "True"
    return text, (0, q.shape[2]), (0, k.shape[2])
