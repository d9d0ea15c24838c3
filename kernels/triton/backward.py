"""The backward kernels: prepare, then dk and dv, then dq. None uses atomics: results repeat bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LOG2E, attends, source, tanh, tile


@triton.jit
def attention_backward_prepare(
    out, d_out, lse, lse2, delta, rows, state_rows, padded, o_b, o_h, o_s, d_b, d_h, d_s, heads,
    VALUE_DIM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """For each row delta = sum(out * d_out) and lse in base 2, as the other kernels read them.

    Algorithm: the row sums of FlashAttention-2's backward (arXiv 2307.08691, algorithm 2, line 4). A dead row, lse
    -inf, gets +inf, and so do the rows that pad up to a multiple of the blocks: exp2(s - inf) is 0 whatever s is.

    Shapes: out, d_out (B, H, rows, E) with unit last strides; lse (B, H, rows), rows of a
    contiguous tensor with state_rows rows; lse2, delta
    (B, H, padded). Per program: 2 M E FLOPs; reads M E elements of out and of d_out and 4 M bytes, writes 8 M bytes.
    """
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    offset_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offset_e = tl.arange(0, BLOCK_E)
    in_rows = offset_m < rows
    inside = in_rows[:, None] & (offset_e < VALUE_DIM)[None, :]
    o_base = out + b.to(tl.int64) * o_b + h.to(tl.int64) * o_h
    d_base = d_out + b.to(tl.int64) * d_b + h.to(tl.int64) * d_h
    offset = offset_m[:, None].to(tl.int64)
    o = tl.load(o_base + offset * o_s + offset_e[None, :], mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_base + offset * d_s + offset_e[None, :], mask=inside, other=0.0).to(tl.float32)
    head = tl.program_id(1).to(tl.int64)
    value = tl.load(lse + head * state_rows + offset_m, mask=in_rows, other=float("-inf"))
    tl.store(lse2 + head * padded + offset_m, tl.where(value == float("-inf"), float("inf"), value * LOG2E))
    tl.store(delta + head * padded + offset_m, tl.sum(o * d, 1))


@triton.jit
def _weights(
    s, lse2, keep, distance, slope, scale, softcap, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr
):  # fmt: skip
    """Probabilities of a tile of products s, and the derivative of the capped score by the scaled one."""
    slope_of_cap = 1.0
    if MASKED:
        if SOFTCAP:
            capped = tanh(s * (scale / softcap))
            slope_of_cap = 1.0 - capped * capped
            s = capped * (softcap * LOG2E)
        else:
            s = s * (scale * LOG2E)
        if SLOPES:
            s += slope * distance.to(tl.float32)
        return tl.where(keep, tl.exp2(s - lse2), 0.0), slope_of_cap
    return tl.exp2(s * (scale * LOG2E) - lse2), slope_of_cap


@triton.jit(do_not_specialize=["rows", "columns", "padded", "state_rows", "lower", "upper"])
def attention_backward_dkdv(
    q, k, v, d_out, lse2, delta, dk, dv, work, q_pos, k_pos, q_doc, k_doc, slopes,
    scale, softcap, lower, upper, rows, columns, padded, state_rows, heads,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, d_b, d_h, d_s, q_doc_b, k_doc_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr, DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What all rows contribute to dk and dv of BLOCK_N columns of one key/value head.

    Algorithm: FlashAttention-2's backward (arXiv 2307.08691, algorithm 2) for dk and dv alone, in transposed tiles
    (N, M). The loop runs over the query heads of the group and their rows, so a column's sum is made by one program,
    in one order: no atomics. The scores are recomputed from lse; it is the global one, of all steps of a row, so the
    contributions of the steps add up.

    Shapes: as `attention_forward`; d_out (B, H, rows, E); lse2, delta (B, H, padded) of
    `attention_backward_prepare`; dk (B, H / GROUP, columns, D), dv (…, E) fp32, columns of
    contiguous tensors with state_rows of them, added to where ACCUMULATE.
    work (blocks, 3): block of columns, its first and last row; rows outside of that range are not read.

    Per program, for m rows: 4 m N (D + E) GROUP FLOPs; reads 2 GROUP m (D + E) + 2 N (D + E) bytes for 2-byte inputs,
    8 GROUP m of lse2 and delta, and writes 4 N (D + E) bytes, reads as many where ACCUMULATE.
    """
    program = tl.program_id(0)
    kv_heads = heads // GROUP
    b = tl.program_id(1) // kv_heads
    h = tl.program_id(1) % kv_heads
    start_n = tl.load(work + 3 * program) * BLOCK_N
    first = tl.load(work + 3 * program + 1)
    last = tl.load(work + 3 * program + 2)
    offset_n = start_n + tl.arange(0, BLOCK_N)
    in_columns = offset_n < columns
    k_source = source(k, b, h, columns, k_b, k_h, k_s, HEAD_DIM, BLOCK_N, BLOCK_D, READ)
    v_source = source(v, b, h, columns, v_b, v_h, v_s, VALUE_DIM, BLOCK_N, BLOCK_E, READ)
    k_tile = tile(k_source, b, h, start_n, columns, k_s, HEAD_DIM, BLOCK_N, BLOCK_D, READ)
    v_tile = tile(v_source, b, h, start_n, columns, v_s, VALUE_DIM, BLOCK_N, BLOCK_E, READ)
    k_at = offset_n[:, None]
    k_in = k_at
    if MASKED:
        k_at = tl.load(k_pos + offset_n, mask=in_columns, other=0)[:, None]
        if DOCUMENTS:
            k_in = tl.load(k_doc + b * k_doc_b + offset_n, mask=in_columns, other=0)[:, None]
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    steps = (last - first + BLOCK_M - 1) // BLOCK_M
    for index in tl.range(0, GROUP * steps):
        head = h * GROUP + index // steps
        start_m = first + index % steps * BLOCK_M
        offset_m = start_m + tl.arange(0, BLOCK_M)
        q_source = source(q, b, head, rows, q_b, q_h, q_s, HEAD_DIM, BLOCK_M, BLOCK_D, READ)
        d_source = source(d_out, b, head, rows, d_b, d_h, d_s, VALUE_DIM, BLOCK_M, BLOCK_E, READ)
        q_tile = tile(q_source, b, head, start_m, rows, q_s, HEAD_DIM, BLOCK_M, BLOCK_D, READ)
        d_tile = tile(d_source, b, head, start_m, rows, d_s, VALUE_DIM, BLOCK_M, BLOCK_E, READ)
        row = (b * heads + head).to(tl.int64) * padded + offset_m
        s = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)
        keep, distance, slope = s, s, 0.0
        if MASKED:
            in_rows = offset_m < rows
            q_at = tl.load(q_pos + offset_m, mask=in_rows, other=0)[None, :]
            q_in = q_at
            if DOCUMENTS:
                q_in = tl.load(q_doc + b * q_doc_b + offset_m, mask=in_rows, other=0)[None, :]
            if SLOPES:
                slope = tl.load(slopes + head) * LOG2E
            distance = k_at - q_at
            keep = attends(q_at, k_at, q_in, k_in, lower, upper, HAS_LOWER, HAS_UPPER, DOCUMENTS)
        lse2_rows = tl.load(lse2 + row)[None, :]
        p, by_scaled = _weights(s, lse2_rows, keep, distance, slope, scale, softcap, MASKED, SOFTCAP, SLOPES)
        dv_acc = tl.dot(p.to(d_tile.dtype), d_tile, dv_acc, input_precision=PRECISION)
        dp = tl.dot(v_tile, d_tile.T, input_precision=PRECISION)
        ds = p * (dp - tl.load(delta + row)[None, :]) * by_scaled
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    column = tl.program_id(1).to(tl.int64) * state_rows + offset_n
    offset_d = tl.arange(0, BLOCK_D)
    offset_e = tl.arange(0, BLOCK_E)
    dk_at = dk + column[:, None] * HEAD_DIM + offset_d[None, :]
    dv_at = dv + column[:, None] * VALUE_DIM + offset_e[None, :]
    in_dk = in_columns[:, None] & (offset_d < HEAD_DIM)[None, :]
    in_dv = in_columns[:, None] & (offset_e < VALUE_DIM)[None, :]
    dk_acc = dk_acc * scale
    if ACCUMULATE:
        dk_acc += tl.load(dk_at, mask=in_dk, other=0.0)
        dv_acc += tl.load(dv_at, mask=in_dv, other=0.0)
    tl.store(dk_at, dk_acc, mask=in_dk)
    tl.store(dv_at, dv_acc, mask=in_dv)


@triton.jit(do_not_specialize=["rows", "columns", "padded", "state_rows", "lower", "upper"])
def attention_backward_dq(
    q, k, v, d_out, lse2, delta, dq, work, q_pos, k_pos, q_doc, k_doc, slopes,
    scale, softcap, lower, upper, rows, columns, padded, state_rows, heads,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, d_b, d_h, d_s, q_doc_b, k_doc_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr, DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, EVEN: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What some columns contribute to dq of BLOCK_M rows of one head.

    Algorithm: FlashAttention-2's backward (arXiv 2307.08691, algorithm 2) for dq alone, with a program for each block
    of rows, which recomputes the scores once more than the published kernel and needs no atomics for it.

    Shapes: as `attention_backward_dkdv`; dq (B, H, rows, D) fp32, rows of a contiguous tensor with
    state_rows rows, added to where ACCUMULATE. work as
    `attention_forward`.

    Per program, for n columns: 2 M n (2 D + E) FLOPs; reads 2 M (D + E) + 2 n (D + E) bytes for 2-byte inputs and 8 M
    of lse2 and delta, writes 4 M D bytes, reads as many where ACCUMULATE.
    """
    program = tl.program_id(0)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    start_m = tl.load(work + 3 * program) * BLOCK_M
    first = tl.load(work + 3 * program + 1)
    last = tl.load(work + 3 * program + 2)
    offset_m = start_m + tl.arange(0, BLOCK_M)
    in_rows = offset_m < rows
    q_source = source(q, b, h, rows, q_b, q_h, q_s, HEAD_DIM, BLOCK_M, BLOCK_D, READ)
    d_source = source(d_out, b, h, rows, d_b, d_h, d_s, VALUE_DIM, BLOCK_M, BLOCK_E, READ)
    k_source = source(k, b, h // GROUP, columns, k_b, k_h, k_s, HEAD_DIM, BLOCK_N, BLOCK_D, READ)
    v_source = source(v, b, h // GROUP, columns, v_b, v_h, v_s, VALUE_DIM, BLOCK_N, BLOCK_E, READ)
    q_tile = tile(q_source, b, h, start_m, rows, q_s, HEAD_DIM, BLOCK_M, BLOCK_D, READ)
    d_tile = tile(d_source, b, h, start_m, rows, d_s, VALUE_DIM, BLOCK_M, BLOCK_E, READ)
    padded_row = tl.program_id(1).to(tl.int64) * padded + offset_m
    lse2_rows = tl.load(lse2 + padded_row)[:, None]
    delta_rows = tl.load(delta + padded_row)[:, None]
    slope = 0.0
    if MASKED:
        q_at = tl.load(q_pos + offset_m, mask=in_rows, other=0)[:, None]
        q_in = q_at
        if DOCUMENTS:
            q_in = tl.load(q_doc + b * q_doc_b + offset_m, mask=in_rows, other=0)[:, None]
        if SLOPES:
            slope = tl.load(slopes + h) * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start_n in tl.range(first, last, BLOCK_N):
        k_tile = tile(k_source, b, h // GROUP, start_n, columns, k_s, HEAD_DIM, BLOCK_N, BLOCK_D, READ)
        v_tile = tile(v_source, b, h // GROUP, start_n, columns, v_s, VALUE_DIM, BLOCK_N, BLOCK_E, READ)
        offset_n = start_n + tl.arange(0, BLOCK_N)
        in_columns = offset_n < columns
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        keep, distance = s, s
        if MASKED:
            k_at = tl.load(k_pos + offset_n, mask=in_columns, other=0)[None, :]
            k_in = k_at
            if DOCUMENTS:
                k_in = tl.load(k_doc + b * k_doc_b + offset_n, mask=in_columns, other=0)[None, :]
            distance = k_at - q_at
            keep = attends(q_at, k_at, q_in, k_in, lower, upper, HAS_LOWER, HAS_UPPER, DOCUMENTS)
        p, by_scaled = _weights(s, lse2_rows, keep, distance, slope, scale, softcap, MASKED, SOFTCAP, SLOPES)
        if not EVEN:  # k is 0 there, but p may be inf, and inf * 0 is no number
            p = tl.where(in_columns[None, :], p, 0.0)
        dp = tl.dot(d_tile, v_tile.T, input_precision=PRECISION)
        ds = p * (dp - delta_rows) * by_scaled
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    row = tl.program_id(1).to(tl.int64) * state_rows + offset_m
    offset_d = tl.arange(0, BLOCK_D)
    dq_at = dq + row[:, None] * HEAD_DIM + offset_d[None, :]
    in_dq = in_rows[:, None] & (offset_d < HEAD_DIM)[None, :]
    acc = acc * scale
    if ACCUMULATE:
        acc += tl.load(dq_at, mask=in_dq, other=0.0)
    tl.store(dq_at, acc, mask=in_dq)
