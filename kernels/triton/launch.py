"""Launching the kernels: blocks, ranges and variants are chosen here, on the host."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from evocompile.kernels.blocks import blocks, pairs_of
from evocompile.kernels.mask import Tile
from evocompile.kernels.pattern import Pattern, pattern_of

from . import tiles
from .backward import attention_backward_dkdv, attention_backward_dq, attention_backward_prepare
from .forward import attention_forward
from .tuning import Blocks, blocks_for
from .work import Intervals, position_tensor, work_table

# 1: the warp-specialised forward, from sm_90 on, for FULL steps (with the loads that a mask needs, triton 3.9 refuses)
SPECIALIZE = "EVOCOMPILE_TRITON_SPECIALIZE"
_ROW_PADDING = 128  # a multiple of every block of rows


class Step(NamedTuple):
    """What a step computes besides its tensors.

    mask: text of a predicate that has a `Pattern`. softcap: 0 for none. slopes (H,) float32: ALiBi's.
    read: how tiles are read, a constant of `tiles`; None chooses.
    """

    mask: str
    tables: Sequence[Tensor]
    q_intervals: Intervals
    k_intervals: Intervals
    scale: float
    softcap: float = 0.0
    slopes: Tensor | None = None
    read: int | None = None

    @property
    def pattern(self) -> Pattern:
        found = pattern_of(self.mask)
        assert isinstance(found, Pattern), found
        return found

    @property
    def changes_scores(self) -> bool:
        return bool(self.softcap) or self.slopes is not None

    def full_parts(self) -> list[tuple[slice, slice]] | None:
        """The rectangles of rows and columns that attend one another, where there is nothing else."""
        found = blocks(self.mask, self.q_intervals, self.k_intervals)
        if self.changes_scores or any(block.tile is not Tile.FULL for block in found):
            return None
        return [(slice(*block.rows), slice(*block.columns)) for block in found]


def interpreting() -> bool:
    return bool(triton.knobs.runtime.interpret)


# ---- forward ----


def forward(
    q: Tensor, k: Tensor, v: Tensor, carried: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor, step: Step
) -> None:
    """Write the state after a step into (out, lse), contiguous; `carried` may be these tensors themselves.

    Without a carried state the rows start from none. out in q's dtype makes it the final step.
    """
    parts = step.full_parts()
    if parts is not None and len(parts) == 1 and parts[0][0] == slice(0, q.shape[2]):
        columns = parts[0][1]
        _launch_forward(q, k[:, :, columns], v[:, :, columns], carried, out, lse, step, full=True)
    elif parts is None or out.dtype != torch.float32:  # a final step is one launch
        _launch_forward(q, k, v, carried, out, lse, step)
    else:
        _start(carried, out, lse)
        for rows, columns in parts:
            state = out[:, :, rows], lse[:, :, rows]
            _launch_forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], state, *state, step, full=True)


def _start(carried: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor) -> None:
    if carried is None:
        out.zero_()
        lse.fill_(-math.inf)
    elif carried[0] is not out:
        out.copy_(carried[0])
        lse.copy_(carried[1])


def _launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    carried: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    step: Step,
    full: bool = False,
) -> None:
    wanted = full and os.environ.get(SPECIALIZE) == "1" and (_major(q) or 0) >= 9
    specialize = wanted and max(q.shape[3], v.shape[3]) <= 128 and q.dtype.itemsize == 2
    found = _sizes("specialised" if specialize else "forward", q, v)
    read, (q_in, k_in, v_in) = _readable(
        step.read, (q, found.rows), (k, found.columns), (v, found.columns), specialize=specialize
    )
    in_place = carried is not None and carried[0].data_ptr() == out.data_ptr()
    work = _work_of_rows(q, k, step, full, found, every=not in_place)
    if not work.shape[0]:
        return

    def launch() -> None:
        if specialize:  # memory for the descriptors that the kernel makes
            triton.set_allocator(lambda size, alignment, stream: q.new_empty(size, dtype=torch.int8))
        attention_forward[(work.shape[0], q.shape[0] * q.shape[1])](
            q_in, k_in, v_in, *(carried or (out, lse)), out, lse, work, *_mask_operands(q, k, step, full),
            step.scale, step.softcap, *_band(step), q.shape[2], k.shape[2], _between_heads(lse), q.shape[1],
            *_strides(q, k, v), *_document_strides(q, step, full),
            **_constants(q, k, v, step, full, found, read), CARRIED=carried is not None,
            EVEN=k.shape[2] % found.columns == 0, SPECIALIZE=specialize,
        )  # fmt: skip

    with _device(q):
        copy_context().run(launch)  # triton's allocator is a context variable: what is set stays in the copy


# ---- backward ----


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    accumulate: bool,
    step: Step,
) -> None:
    """Write or add what a step contributes to (dq, dk, dv), contiguous float32. out, lse: the global ones."""
    parts = step.full_parts()
    dq, dk, dv = gradients
    if parts is None:
        _launch_backward(d_out, q, k, v, out, lse, gradients, accumulate, step)
        return
    whole = [(slice(0, q.shape[2]), slice(0, k.shape[2]))]
    if parts != whole and not accumulate:
        for each in gradients:
            each.zero_()
    for rows, columns in parts:
        _launch_backward(
            *(x[:, :, rows] for x in (d_out, q)),
            *(x[:, :, columns] for x in (k, v)),
            *(x[:, :, rows] for x in (out, lse)),
            (dq[:, :, rows], dk[:, :, columns], dv[:, :, columns]),
            accumulate or parts != whole,
            step,
            full=True,
        )


def _launch_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    accumulate: bool,
    step: Step,
    full: bool = False,
) -> None:
    dq, dk, dv = gradients
    d_out = d_out.to(q.dtype)  # of one dtype with q and v, as the products need it
    lse2, delta = _prepare(out, d_out, lse)
    padded, (batch, heads) = lse2.shape[2], q.shape[:2]
    masks, band = _mask_operands(q, k, step, full), _band(step)
    documents = _document_strides(q, step, full)
    for kernel, targets in (("dkdv", (dk, dv)), ("dq", (dq,))):
        found = _sizes(kernel, q, v)
        read, (q_in, k_in, v_in, d_in) = _readable(
            step.read, (q, found.rows), (k, found.columns), (v, found.columns), (d_out, found.rows)
        )
        of_columns = kernel == "dkdv"
        work = (_work_of_columns if of_columns else _work_of_rows)(q, k, step, full, found, every=not accumulate)
        if not work.shape[0]:
            continue
        constants = _constants(q, k, v, step, full, found, read)
        function: Any = attention_backward_dkdv if of_columns else attention_backward_dq
        if not of_columns:
            constants["EVEN"] = k.shape[2] % found.columns == 0
        own_heads = targets[0].shape[1]
        with _device(q):
            function[(work.shape[0], batch * own_heads)](
                q_in, k_in, v_in, d_in, lse2, delta, *targets, work, *masks, step.scale, step.softcap, *band,
                q.shape[2], k.shape[2], padded, _between_heads(targets[0]) // targets[0].shape[3], heads,
                *_strides(q, k, v, d_out), *documents, **constants, ACCUMULATE=accumulate,
            )  # fmt: skip


def _prepare(out: Tensor, d_out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, rows, dim = out.shape
    out = out if out.stride(3) == 1 else out.contiguous()
    d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
    padded = triton.cdiv(rows, _ROW_PADDING) * _ROW_PADDING
    lse2, delta = (lse.new_empty((batch, heads, padded)) for _ in range(2))
    with _device(out):
        attention_backward_prepare[(padded // _ROW_PADDING, batch * heads)](
            out, d_out, lse, lse2, delta, rows, _between_heads(lse), padded, *_strides(out, d_out), heads,
            VALUE_DIM=dim, BLOCK_E=_padded(dim), BLOCK_M=_ROW_PADDING, num_warps=4,
        )  # fmt: skip
    return lse2, delta


# ---- arguments ----


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _major(q: Tensor) -> int | None:
    """Of the compute capability; None in the interpreter."""
    return torch.cuda.get_device_capability(q.device)[0] if q.device.type == "cuda" else None


def _sizes(kernel: str, q: Tensor, v: Tensor) -> Blocks:
    return blocks_for(kernel, _major(q), _padded(max(q.shape[3], v.shape[3])), q.dtype.itemsize)


def _constants(q: Tensor, k: Tensor, v: Tensor, step: Step, full: bool, found: Blocks, read: int) -> dict[str, Any]:
    pattern = step.pattern
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": q.shape[3],
        "VALUE_DIM": v.shape[3],
        "BLOCK_D": _padded(q.shape[3]),
        "BLOCK_E": _padded(v.shape[3]),
        "BLOCK_M": found.rows,
        "BLOCK_N": found.columns,
        "MASKED": not full,
        "HAS_LOWER": not full and pattern.lower is not None,
        "HAS_UPPER": not full and pattern.upper is not None,
        "DOCUMENTS": not full and pattern.has_documents,
        "SOFTCAP": not full and bool(step.softcap),
        "SLOPES": not full and step.slopes is not None,
        "READ": read,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_warps": found.warps,
        "num_stages": found.stages,
    }


def _band(step: Step) -> tuple[int, int]:
    pattern = step.pattern
    return pattern.lower or 0, pattern.upper or 0  # not read where there is none


def _mask_operands(q: Tensor, k: Tensor, step: Step, full: bool) -> tuple[Any, ...]:
    """q_pos, k_pos, q_doc, k_doc, slopes; some tensor for what the variant does not read."""
    if full:
        return (q,) * 5
    q_pos = position_tensor(step.q_intervals, q.device)
    k_pos = position_tensor(step.k_intervals, q.device)
    slopes = q_pos if step.slopes is None else step.slopes.to(torch.float32).contiguous()
    return q_pos, k_pos, *_documents(q, step, q_pos, k_pos), slopes


def _documents(q: Tensor, step: Step, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Tensor]:
    pattern = step.pattern
    if not pattern.has_documents:
        return q_pos, k_pos
    q_doc = pattern.numbers(q_pos.long(), step.tables, "q")
    k_doc = pattern.numbers(k_pos.long(), step.tables, "k")
    shape = (q.shape[0],)
    return q_doc.expand(*shape, -1).contiguous(), k_doc.expand(*shape, -1).contiguous()


def _document_strides(q: Tensor, step: Step, full: bool) -> tuple[int, int]:
    if full or not step.pattern.has_documents:
        return 0, 0
    return (
        sum(hi - lo for lo, hi in pairs_of(step.q_intervals)),
        sum(hi - lo for lo, hi in pairs_of(step.k_intervals)),
    )


def _work_of_rows(q: Tensor, k: Tensor, step: Step, full: bool, found: Blocks, every: bool) -> Tensor:
    if full:
        return _full_work(q.shape[2], k.shape[2], found.rows, q.device)
    pattern = step.pattern
    return work_table(
        step.q_intervals, step.k_intervals, pattern.lower, pattern.upper, found.rows, found.columns, every, q.device
    )


def _work_of_columns(q: Tensor, k: Tensor, step: Step, full: bool, found: Blocks, every: bool) -> Tensor:
    if full:
        return _full_work(k.shape[2], q.shape[2], found.columns, q.device)
    pattern = step.pattern
    lower = None if pattern.upper is None else -pattern.upper - 1
    upper = None if pattern.lower is None else -pattern.lower - 1
    return work_table(step.k_intervals, step.q_intervals, lower, upper, found.columns, found.rows, every, q.device)


@lru_cache(maxsize=1024)
def _full_work(own: int, other: int, block: int, device: torch.device) -> Tensor:
    return work_table((0, own), (0, other), None, None, block, 1, True, device)


def _between_heads(x: Tensor) -> int:
    """Elements from a head to the next in rows of a contiguous tensor; the stride of a dim of size 1 means nothing."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _readable(read: int | None, *operands: tuple[Tensor, int], specialize: bool = False) -> tuple[int, list[Any]]:
    """How the kernel reads tensors in tiles of so many rows, and what it is given for each."""
    units = [(x if x.stride(3) == 1 else x.contiguous(), rows) for x, rows in operands]
    if specialize:
        return tiles.DEVICE_DESCRIPTORS.value, [x for x, _ in units]
    fits = all(_describable(x) for x, _ in units)
    if read is None:
        # 4-byte inputs: with descriptors the backward kernels spill heavily, with pointers hardly
        bulk = fits and (_major(units[0][0]) or 0) >= 9 and units[0][0].dtype.itemsize == 2
        read = tiles.DESCRIPTORS.value if bulk else tiles.POINTERS.value
    if read != tiles.DESCRIPTORS.value:
        return read, [x for x, _ in units]
    assert fits
    return read, [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, _padded(x.shape[3])]) for x, rows in units
    ]


def _describable(x: Tensor) -> bool:
    """Bulk copies want addresses and strides that are multiples of 16 bytes."""
    size = x.dtype.itemsize
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:3])


@contextmanager
def _device(x: Tensor) -> Iterator[None]:
    """Kernels run on the current device."""
    if x.device.type != "cuda":
        yield
        return
    with torch.cuda.device(x.device):
        yield
