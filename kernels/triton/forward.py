"""The forward kernel: one step of attention on a carried state, and the final step."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LN2, LOG2E, attends, source, tanh, tile


@triton.jit(do_not_specialize=["rows", "columns", "state_rows", "lower", "upper"])
def attention_forward(
    q, k, v, carried_out, carried_lse, out, lse, work, q_pos, k_pos, q_doc, k_doc, slopes,
    scale, softcap, lower, upper, rows, columns, state_rows, heads,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, q_doc_b, k_doc_b,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CARRIED: tl.constexpr,
    MASKED: tl.constexpr, HAS_LOWER: tl.constexpr, HAS_UPPER: tl.constexpr, DOCUMENTS: tl.constexpr,
    SOFTCAP: tl.constexpr, SLOPES: tl.constexpr, EVEN: tl.constexpr, READ: tl.constexpr, PRECISION: tl.constexpr,
    SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """The state (out, lse) of BLOCK_M rows of one head after they have also attended some columns.

    Algorithm: FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1) that starts from a carried state instead of
    an empty one: with (out, lse) of earlier columns the running maximum is lse, the running sum 1, the accumulator
    out; hence the state of ring attention (Liu et al. 2023, arXiv 2310.01889) needs no merge afterwards. An attention
    sink is the initial state out 0, lse = sink. Base-2 exponentials, none of a positive number.

    Shapes: q (B, H, rows, D), k (B, H / GROUP, columns, D), v (…, E), with unit last strides; carried_out, out
    (B, H, rows, E) and carried_lse, lse (B, H, rows), which may be the same memory: rows of contiguous tensors with
    state_rows rows. `out` in q's dtype makes this the final step. work (blocks, 3) int32: block of rows, its first and
    last column: columns outside of that range are not read. q_pos, q_doc (rows), k_pos, k_doc (columns): read by the
    MASKED variant only, which exists so that most steps of a ring, FULL, have neither loads nor compares for it.
    slopes (H,): bias slope * (k - q), in nats.

    Per program, for n = last - first columns: 2 M n (D + E) FLOPs; reads 2 M D + 2 n (D + E) bytes for 2-byte inputs,
    of which k and v come from L2 for all row blocks of a head but the first, and 4 M (E + 1) of state, and writes as
    much state: 8 E + 8 bytes for each row, against 12 E + 16 with a merge kernel.
    """
    program = tl.program_id(0)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    start_m = tl.load(work + 3 * program) * BLOCK_M
    first = tl.load(work + 3 * program + 1)
    last = tl.load(work + 3 * program + 2)
    q_source = source(q, b, h, rows, q_b, q_h, q_s, HEAD_DIM, BLOCK_M, BLOCK_D, READ)
    k_source = source(k, b, h // GROUP, columns, k_b, k_h, k_s, HEAD_DIM, BLOCK_N, BLOCK_D, READ)
    v_source = source(v, b, h // GROUP, columns, v_b, v_h, v_s, VALUE_DIM, BLOCK_N, BLOCK_E, READ)
    offset_m = start_m + tl.arange(0, BLOCK_M)
    offset_e = tl.arange(0, BLOCK_E)
    in_rows = offset_m < rows
    row = tl.program_id(1).to(tl.int64) * state_rows + offset_m  # of the state
    in_state = in_rows[:, None] & (offset_e < VALUE_DIM)[None, :]
    if CARRIED:
        m = tl.load(carried_lse + row, mask=in_rows, other=float("-inf")) * LOG2E
        total = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = tl.load(carried_out + row[:, None] * VALUE_DIM + offset_e[None, :], mask=in_state, other=0.0)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    q_tile = tile(q_source, b, h, start_m, rows, q_s, HEAD_DIM, BLOCK_M, BLOCK_D, READ)
    if MASKED:
        q_at = tl.load(q_pos + offset_m, mask=in_rows, other=0)[:, None]
        q_in = q_at
        if DOCUMENTS:
            q_in = tl.load(q_doc + b * q_doc_b + offset_m, mask=in_rows, other=0)[:, None]
        if SLOPES:
            slope = tl.load(slopes + h) * LOG2E
    for start_n in tl.range(first, last, BLOCK_N, warp_specialize=SPECIALIZE):
        k_tile = tile(k_source, b, h // GROUP, start_n, columns, k_s, HEAD_DIM, BLOCK_N, BLOCK_D, READ)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        offset_n = start_n + tl.arange(0, BLOCK_N)
        if MASKED:
            in_columns = offset_n < columns
            k_at = tl.load(k_pos + offset_n, mask=in_columns, other=0)[None, :]
            k_in = k_at
            if DOCUMENTS:
                k_in = tl.load(k_doc + b * k_doc_b + offset_n, mask=in_columns, other=0)[None, :]
            keep = attends(q_at, k_at, q_in, k_in, lower, upper, HAS_LOWER, HAS_UPPER, DOCUMENTS)
            s = tanh(s * (scale / softcap)) * (softcap * LOG2E) if SOFTCAP else s * (scale * LOG2E)
            if SLOPES:
                s += slope * (k_at - q_at).to(tl.float32)
            if not EVEN:
                keep = keep & in_columns[None, :]
            s = tl.where(keep, s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 1))
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
            p = tl.exp2(s - base[:, None])
        else:
            if not EVEN:
                s = tl.where((offset_n < columns)[None, :], s, float("-inf"))
            new_m = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
            base = new_m
            p = tl.exp2(s * (scale * LOG2E) - base[:, None])
        alpha = tl.exp2(m - base)
        total = total * alpha + tl.sum(p, 1)
        v_tile = tile(v_source, b, h // GROUP, start_n, columns, v_s, VALUE_DIM, BLOCK_N, BLOCK_E, READ)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m = new_m
    dead = total == 0.0
    acc = acc / tl.where(dead, 1.0, total)[:, None]
    tl.store(out + row[:, None] * VALUE_DIM + offset_e[None, :], acc.to(out.dtype.element_ty), mask=in_state)
    tl.store(lse + row, tl.where(dead, float("-inf"), (m + tl.log2(tl.where(dead, 1.0, total))) * LN2), mask=in_rows)
