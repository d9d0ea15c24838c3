"""The steps as operators that write in place: `torch.ops.evocompile.triton_*_`, which a compiled graph may hold.

`custom_op` with `mutates_args`, not `triton_op`: without a driver the mutation analysis of the latter clones all. Under
Inductor a chain of steps then works on one buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

from evocompile.kernels.blocks import blocks


def _step(
    mask: str,
    tables: list[Tensor],
    q_intervals: list[int],
    k_intervals: list[int],
    scale: float,
    softcap: float,
    slopes: Tensor | None,
) -> Any:
    from .launch import Step

    return Step(mask, tables, tuple(q_intervals), tuple(k_intervals), scale, softcap, slopes)


@library.custom_op("evocompile::triton_attention_step_", mutates_args=("out", "lse"))
def triton_attention_step_(
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
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> None:
    """Rows attend columns: (out, lse), contiguous float32, become the state after it. As `attention_step` otherwise."""
    from .launch import forward

    step = _step(mask, tables, q_intervals, k_intervals, scale, softcap, slopes)
    forward(q, k, v, (out, lse), out, lse, step)


@triton_attention_step_.register_fake
def _(*_arguments: Any, **_rest: Any) -> None:
    return None


@library.custom_op("evocompile::triton_attention_backward_step_", mutates_args=("dq", "dk", "dv"))
def triton_attention_backward_step_(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    tables: list[Tensor],
    mask: str,
    q_intervals: list[int],
    k_intervals: list[int],
    scale: float,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> None:
    """Add what the step contributes to dq, dk, dv, contiguous float32. out, lse: the global ones of the rows."""
    from .launch import backward

    step = _step(mask, tables, q_intervals, k_intervals, scale, softcap, slopes)
    backward(d_out, q, k, v, out, lse, (dq, dk, dv), True, step)


@triton_attention_backward_step_.register_fake
def _(*_arguments: Any, **_rest: Any) -> None:
    return None


def _pairs(mask: str, q_intervals: list[int], k_intervals: list[int]) -> int:
    return sum(block.pairs for block in blocks(mask, tuple(q_intervals), tuple(k_intervals)))


@register_flop_formula(torch.ops.evocompile.triton_attention_step_)
def _(q: Any, k: Any, v: Any, out: Any, lse: Any, tables: Any, *where: Any, **_rest: Any) -> int:
    return 2 * q[0] * q[1] * _pairs(*where[:3]) * (q[3] + v[3])


@register_flop_formula(torch.ops.evocompile.triton_attention_backward_step_)
def _(
    d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, tables: Any, *where: Any,
    **_rest: Any,
) -> int:  # fmt: skip
    return 2 * q[0] * q[1] * _pairs(*where[:3]) * (3 * q[3] + 2 * v[3])
