"""What the kernels share: loading a tile, and which pairs of a tile attend.

M rows (queries), N columns (keys), D head dim of q and k, E of v. Positions and documents are int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How a kernel reads q, k, v and d_out.
POINTERS = tl.constexpr(0)  # any strides
DESCRIPTORS = tl.constexpr(1)  # tensor descriptors made by the host: bulk copies from sm_90 on
DEVICE_DESCRIPTORS = tl.constexpr(2)  # made by the kernel, what warp specialisation needs on sm_90

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def source(
    x, b, h, length, stride_b, stride_h, stride_s, DIM: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """What `tile` reads head (b, h) of x (B, H, length, DIM) from, in tiles of (BLOCK, PADDED)."""
    base = x
    if READ != DESCRIPTORS:
        base = x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    if READ == DEVICE_DESCRIPTORS:
        found = tl.make_tensor_descriptor(base, shape=[length, DIM], strides=[stride_s, 1], block_shape=[BLOCK, PADDED])
    else:
        found = base
    return found


@triton.jit
def tile(
    x, b, h, start, length, stride_s, DIM: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """Rows [start, start + BLOCK) of a head, (BLOCK, PADDED); 0 beyond `length` rows and DIM columns."""
    if READ == DESCRIPTORS:
        found = x.load([b, h, start, 0]).reshape([BLOCK, PADDED])
    elif READ == DEVICE_DESCRIPTORS:
        found = x.load([start, 0])
    else:
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, PADDED)
        # 64 bits once for the tile, 32 bits inside of it
        at = x + tl.cast(start, tl.int64) * stride_s + rows[:, None] * stride_s + columns[None, :]
        inside = (start + rows < length)[:, None]
        if DIM != PADDED:
            inside = inside & (columns < DIM)[None, :]
        found = tl.load(at, mask=inside, other=0.0)
    return found


@triton.jit
def attends(
    q_pos, k_pos, q_doc, k_doc, lower, upper, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Which pairs attend: lower < k - q <= upper, and equal documents. Arguments broadcast to the tile's shape."""
    distance = k_pos - q_pos
    keep = distance == distance
    if HAS_UPPER:
        keep = keep & (distance <= upper)
    if HAS_LOWER:
        keep = keep & (distance > lower)
    if DOCUMENTS:
        keep = keep & (q_doc == k_doc)
    return keep


@triton.jit
def tanh(x):
    """By exp2 alone: libdevice's is not there in the interpreter."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
