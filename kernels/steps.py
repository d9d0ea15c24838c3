"""What attention operators run: one kernel call for a block, and all blocks of some rows and some columns.

Shapes and conventions are those of `kernels.attention`. Kernels that do otherwise are normalised at `attend_block` and
`attend_block_backward`, through which everything passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .band import band_mask
from .blocks import Block, Interval, blocks, pairs_of
from .dispatch import block_kernel, step_kernel
from .form import Changes, Form
from .mask import Tile, parse_mask
from .reference import accumulation_dtype

# ---- one block ----


def attend_block(
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
        return empty_state(q, v)
    kernel = block_kernel(q, v, mask, is_causal, changes)
    return kernel.forward(q, k, v, mask, is_causal, scale, *([changes] if changes else []))


def attend_block_backward(
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


def contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    # `to` alone copies only when the dtype differs, whatever the memory format.
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def state_like(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised (out in `dtype`, lse)."""
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def empty_state(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The state of rows that have attended nothing yet."""
    out, lse = state_like(q, v, accumulation_dtype(q.dtype))
    return out.zero_(), lse.fill_(-math.inf)


def gradients_like(dtype: torch.dtype, *operands: Tensor) -> list[Tensor]:
    """Uninitialised contiguous gradients of q, k, v and the trained params."""
    return [each.new_empty(each.shape, dtype=dtype) for each in operands]


def contiguous_all(gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [contiguous(each, dtype) for each in gradients]


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


def run_step(
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
        return attend_block(q_rows, k_columns, v_columns, keep, is_causal, scale, where.changes(block, q.device))

    todo = list(where.blocks(q, k))
    if todo and todo[0].rows == (0, q.shape[2]):  # all rows: no state has to be made or copied first
        state = attend(todo.pop(0))
        if carried:
            state = reference.merge_into(*state, *carried)
    else:
        state = (carried[0].clone(), carried[1].clone()) if carried else empty_state(q, v)
    out, lse = contiguous(state[0], accumulation_dtype(q.dtype)), state[1].contiguous()
    for block in todo:
        block_out, block_lse = attend(block)
        out_rows, lse_rows = _part(out, block.rows), _part(lse, block.rows)
        merged_lse, weight = reference.merge_weight(lse_rows, block_lse)
        out_rows.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
        lse_rows.copy_(merged_lse)
    return out, lse


def run_backward_step(
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
        return attend_block_backward(
            d_rows, q_rows, k_columns, v_columns, out_rows, lse_rows, keep, is_causal, scale, changes
        )

    todo = where.blocks(q, k)
    dtype = accumulation_dtype(q.dtype)
    if len(todo) == 1 and todo[0][1:] == ((0, q.shape[2]), (0, k.shape[2])):
        return contiguous_all(attend(todo[0]), dtype)
    gradients = [each.zero_() for each in gradients_like(dtype, q, k, v, *trained(where.form))]
    dq, dk, dv, *d_params = gradients
    for block in todo:
        targets = _part(dq, block.rows), _part(dk, block.columns), _part(dv, block.columns), *d_params
        for target, gradient in zip(targets, attend(block), strict=True):
            target.add_(gradient)
    return gradients


def trained(form: Form) -> Sequence[Tensor]:
    return form.params[: form.trained]
