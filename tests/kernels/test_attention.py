"""Every attention operator against softmax written out in float64, and steps in many splits against the whole."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from evocompile.kernels import reference
from evocompile.kernels.blocks import blocks
from evocompile.kernels.mask import Tile, parse_mask

ops = torch.ops.evocompile
HEADS = [(4, 4), (4, 2), (4, 1)]  # MHA, GQA, MQA
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SCALE = 0.3

FULL, CAUSAL, WINDOW = "True", "k <= q", "(k <= q) & (k > q - 9)"
DOCUMENTS = "(k <= q) & (t0(b,q) == t0(b,k))"
PADDED = "(k <= q) & (t0(b,k) == 1)"  # the documents other than 1 are padding: rows before document 1 are dead
HEADWISE = "(k <= q) & (k > q - 4*h - 3)"
BIDIRECTIONAL = "(k < q + 9) & (k > q - 9)"
MASKS = [FULL, CAUSAL, WINDOW, DOCUMENTS, PADDED, HEADWISE, BIDIRECTIONAL]


def exact(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, d_out: Tensor | None = None, scale: float = SCALE
) -> list[Tensor]:
    """out, lse and, given d_out, dq, dk, dv: float64, with key/value heads repeated and autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf) if keep.dtype == torch.bool else scores + keep
    dead = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.where(dead, 0.0, scores.masked_fill(dead, 0.0).softmax(-1))
    out, lse = weights @ v.repeat_interleave(group, 1), scores.logsumexp(-1)
    if d_out is None:
        return [out.detach(), lse.detach()]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())]


def make(
    heads: tuple[int, int] = (4, 2),
    rows: int = 33,
    columns: int = 33,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, d_out."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    (h, hk), (d, e) = heads, dims
    shapes = (h, rows, d), (hk, columns, d), (hk, columns, e), (h, rows, e)
    q, k, v, d_out = (torch.randn(batch, *shape, generator=generator, dtype=dtype) for shape in shapes)
    return q, k, v, d_out


def documents(length: int, batch: int = 2) -> list[Tensor]:
    """Table 0: document numbers, with other boundaries in each batch row; the first row begins with document 0."""
    positions = torch.arange(length)
    return [torch.stack([(positions + 5 * row) // 11 for row in range(batch)])]


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert torch.equal(actual == -math.inf, expected == -math.inf)
    finite = expected != -math.inf
    scale = max(1.0, expected[finite].abs().max().item()) if finite.any() else 1.0
    torch.testing.assert_close(actual.double()[finite], expected[finite], rtol=0, atol=tolerance * scale)


def all_close(actual: tuple[Tensor, ...] | list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.is_contiguous()
        close(one, other, tolerance)


def keep_of(mask: str, tables: list[Tensor], q: Tensor, k: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    return parse_mask(mask).evaluate(rows, columns, tables, q.shape[0], q.shape[1], "cpu")


# ---- dense


def dense_mask(kind: str, rows: int, columns: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(7)
    if kind == "none":
        return None
    shape = {"bool": (2, 1, rows, columns), "keys": (columns,), "float": (1, 4, rows, columns)}[kind]
    random = torch.randn(shape, generator=generator, dtype=torch.float64)
    keep = random > -0.5
    if kind == "bool":
        keep[0, :, 3] = False  # a dead row
    return random.masked_fill(~keep, -math.inf) if kind == "float" else keep


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dims", [(16, 16), (17, 17), (24, 8), (8, 24)])
@pytest.mark.parametrize(("kind", "is_causal"), [("none", False), ("none", True), ("bool", False), ("bool", True)])
def test_dense(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], kind: str, is_causal: bool) -> None:
    check_dense(make(heads, 33, 47, dims, dtype), dense_mask(kind, 33, 47), is_causal, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["keys", "float"])
@pytest.mark.parametrize("dims", [(16, 16), (16, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_masks_of_other_shapes_and_dtypes(kind: str, dims: tuple[int, int], is_causal: bool) -> None:
    check_dense(make((4, 2), 40, 31, dims), dense_mask(kind, 40, 31), is_causal, 1e-10)


def check_dense(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], mask: Tensor | None, is_causal: bool, tolerance: float
) -> None:
    q, k, v, d_out = inputs
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ops.dense_attention(q, k, v, mask, is_causal, SCALE)
    assert out.dtype == q.dtype
    assert not lse.requires_grad
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    keep = reference.with_causal(mask, is_causal, q.shape[2], k.shape[2], q.device)
    all_close([out.detach(), lse, *gradients], exact(q, k, v, keep, d_out), tolerance)


def test_strides() -> None:
    """Views with any strides, a gradient expanded from one number: ATen would misread some of them silently."""
    q, k, v, _ = make()
    d_out = torch.tensor(0.5, dtype=torch.float64).expand(q.shape)
    expected = exact(q, k, v, None, d_out)
    q, k, v = q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2), v.mT.contiguous().mT
    out, lse = ops.dense_attention(q, k, v, None, False, SCALE)
    all_close((out, lse, *ops.dense_attention_backward(d_out, q, k, v, out, lse, None, False, SCALE)), expected)
    all_close(ops.attention_step(q, k, v, [], None, None, FULL, [0, 33], [0, 33], SCALE), expected[:2])


def test_joint_graph_has_the_two_operators_alone() -> None:
    q, k, v, d_out = make(dtype=torch.float32)

    def joint(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, _ = ops.dense_attention(q, k, v, None, True, SCALE)
        return (out, *torch.autograd.grad(out, (q, k, v), d_out))

    graph = make_fx(joint, tracing_mode="fake")(q, k, v, d_out).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function" and "detach" not in str(node.target)]
    names = [str(target) for target in targets if "getitem" not in str(target)]
    assert names == ["evocompile.dense_attention.default", "evocompile.dense_attention_backward.default"]


# ---- predicates, whole


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dims", [(16, 16), (12, 20)])
@pytest.mark.parametrize("mask", MASKS)
def test_attention(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], mask: str) -> None:
    q, k, v, d_out = make(heads, 37, 37, dims, dtype)
    tables = documents(37)
    out, lse = ops.attention(q, k, v, tables, mask, SCALE)
    gradients = ops.attention_backward(d_out, q, k, v, out, lse, tables, mask, SCALE)
    assert {x.dtype for x in (out, *gradients)} == {dtype}
    all_close((out, lse, *gradients), exact(q, k, v, keep_of(mask, tables, q, k), d_out), TOLERANCE[dtype])


@pytest.mark.parametrize("mask", ["(k <= q) & (k > q - 100)", "(k <= q) & (k > q - 700)", "k <= q + 3", DOCUMENTS])
@pytest.mark.parametrize("shape", [(1100, 1100), (700, 1300), (1300, 700)])
def test_attention_long_enough_to_be_cut(mask: str, shape: tuple[int, int]) -> None:
    """Several of ATen's own blocks, and several of ours: rows whose first key blocks are all masked."""
    q, k, v, d_out = make((2, 1), *shape, (8, 8), batch=1)
    tables = [torch.arange(1300)[None] // 150]
    out, lse = ops.attention(q, k, v, tables, mask, SCALE)
    gradients = ops.attention_backward(d_out, q, k, v, out, lse, tables, mask, SCALE)
    keep = keep_of(mask, tables, q, k)
    expected = exact(q, k, v, keep, d_out)
    all_close((out, lse, *gradients), expected)
    dense = ops.dense_attention(q, k, v, keep, False, SCALE)
    all_close((*dense, *ops.dense_attention_backward(d_out, q, k, v, *dense, keep, False, SCALE)), expected)


# ---- steps

WHOLE = [[0, 48]]
SPLITS = {
    "whole": WHOLE,
    "contiguous": [[0, 12], [12, 24], [24, 36], [36, 48]],
    "uneven": [[0, 9], [9, 10], [10, 31], [31, 48]],
    "zigzag": [[0, 6, 42, 48], [6, 12, 36, 42], [12, 18, 30, 36], [18, 30]],
    "with nothing": [[0, 0], [0, 20, 30, 48], [20, 30]],
}


def take(x: Tensor, intervals: list[int]) -> Tensor:
    """The step's rows of a global tensor; not contiguous when they are one interval."""
    parts = [x[:, :, lo:hi] for lo, hi in zip(intervals[::2], intervals[1::2], strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def put(x: Tensor, intervals: list[int], part: Tensor) -> None:
    """Add a step's rows to a global tensor."""
    start = 0
    for lo, hi in zip(intervals[::2], intervals[1::2], strict=True):
        x[:, :, lo:hi] += part[:, :, start : start + hi - lo]
        start += hi - lo


def run_steps(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    tables: list[Tensor],
    mask: str,
    q_split: list[list[int]],
    k_split: list[list[int]],
) -> list[Tensor]:
    """out, lse, dq, dk, dv of chained forward steps and summed backward steps, in the accumulation dtype."""
    q, k, v, d_out = inputs
    dtype = reference.accumulation_dtype(q.dtype)
    out, lse = torch.zeros(d_out.shape, dtype=dtype), torch.zeros(q.shape[:3], dtype=dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for index, rows in enumerate(q_split):
        state: tuple[Tensor | None, Tensor | None] = (None, None)
        order = k_split[index:] + k_split[:index]  # a ring begins at another block on each rank
        for columns in order:
            state = ops.attention_step(
                take(q, rows), take(k, columns), take(v, columns), tables, *state, mask, rows, columns, SCALE
            )
            assert all(x is not None and x.dtype == dtype and x.is_contiguous() for x in state)
        put(out, rows, state[0])
        put(lse, rows, state[1])
    for rows, columns in product(q_split, k_split):
        parts = (
            (take(x, rows) for x in (d_out, q)),
            (take(x, columns) for x in (k, v)),
            (take(x, rows) for x in (out, lse)),
        )
        arguments = [x for part in parts for x in part]
        step = ops.attention_backward_step(*arguments, tables, mask, rows, columns, SCALE)
        assert all(x.dtype == dtype and x.is_contiguous() for x in step)
        put(dq, rows, step[0])
        put(dk, columns, step[1])
        put(dv, columns, step[2])
    return [out, lse, dq, dk, dv]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("q_split", SPLITS)
@pytest.mark.parametrize("k_split", SPLITS)
def test_steps_make_the_whole(mask: str, q_split: str, k_split: str) -> None:
    inputs = make((4, 2), 48, 48)
    tables = documents(48)
    result = run_steps(inputs, tables, mask, SPLITS[q_split], SPLITS[k_split])
    q, k, v, d_out = inputs
    all_close(result, exact(q, k, v, keep_of(mask, tables, q, k), d_out))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dims", [(16, 16), (12, 20)])
@pytest.mark.parametrize("mask", [CAUSAL, PADDED])
def test_steps_in_all_forms(dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], mask: str) -> None:
    inputs = make(heads, 48, 48, dims, dtype)
    tables = documents(48)
    result = run_steps(inputs, tables, mask, SPLITS["zigzag"], SPLITS["zigzag"])
    q, k, v, d_out = inputs
    all_close(result, exact(q, k, v, keep_of(mask, tables, q, k), d_out), TOLERANCE[dtype])


def test_steps_of_bfloat16_accumulate_in_float32() -> None:
    inputs = make((4, 2), 48, 48, dtype=torch.bfloat16)
    result = run_steps(inputs, [], CAUSAL, SPLITS["zigzag"], SPLITS["contiguous"])
    assert {x.dtype for x in result} == {torch.float32}
    q, k, v, d_out = inputs
    all_close(result, exact(q, k, v, keep_of(CAUSAL, [], q, k), d_out), 2e-2)


def test_a_step_leaves_the_carried_state_alone() -> None:
    q, k, v, _ = make((4, 2), 20, 20)
    for mask, columns in ((FULL, [0, 20]), (CAUSAL, [10, 30]), (CAUSAL, [40, 60])):
        out, lse = ops.attention_step(q, k, v, [], None, None, FULL, [0, 20], [60, 80], SCALE)
        before = out.clone(), lse.clone()
        after = ops.attention_step(q, k, v, [], out, lse, mask, [0, 20], columns, SCALE)
        assert torch.equal(out, before[0])
        assert torch.equal(lse, before[1])
        assert after[0].data_ptr() != out.data_ptr()
        assert after[1].data_ptr() != lse.data_ptr()


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("columns", [0, 7])
def test_no_rows_or_no_columns(rows: int, columns: int) -> None:
    q, k, v, d_out = make((4, 2), rows, columns)
    expected = exact(q, k, v, None, d_out) if rows and columns else None
    out, lse = ops.attention_step(q, k, v, [], None, None, FULL, [3, 3 + rows], [0, columns], SCALE)
    step = ops.attention_backward_step(d_out, q, k, v, out, lse, [], FULL, [3, 3 + rows], [0, columns], SCALE)
    for result in (
        [out, lse, *step],
        [out, lse, *ops.attention_backward(d_out, q, k, v, *ops.attention(q, k, v, [], FULL, SCALE), [], FULL, SCALE)],
        [*ops.dense_attention(q, k, v, None, False, SCALE), *step],
        [out, lse, *ops.dense_attention_backward(d_out, q, k, v, out, lse, None, False, SCALE)],
    ):
        assert [x.shape for x in result] == [d_out.shape, q.shape[:3], q.shape, k.shape, v.shape]
        if expected:
            all_close(result, expected)
        else:
            assert (result[1] == -math.inf).all()
            assert all((x == 0).all() for x in (result[0], *result[2:]))


# ---- dead rows and large numbers


@pytest.mark.parametrize("dims", [(16, 16), (16, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_row_6_dead_rows(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Row 6 of PAINS: a query that sees no key has out 0 and lse -inf, and gives no NaN to any gradient."""
    q, k, v, d_out = make((4, 2), 48, 48, dims, dtype)
    tables = documents(48)
    dead = ~keep_of(PADDED, tables, q, k).any(-1).expand(2, 4, 48)
    assert 0 < dead.sum() < dead.numel()
    out, lse = ops.attention(q, k, v, tables, PADDED, SCALE)
    dq, dk, dv = ops.attention_backward(d_out, q, k, v, out, lse, tables, PADDED, SCALE)
    for each_out, each_lse, each_dq in (
        (out, lse, dq),
        run_steps((q, k, v, d_out), tables, PADDED, SPLITS["zigzag"], SPLITS["uneven"])[:3],
        (*ops.dense_attention(q, k, v, keep_of(PADDED, tables, q, k), False, SCALE), dq),
    ):
        assert torch.equal(each_lse == -math.inf, dead)
        assert (each_out[dead] == 0).all()
        assert (each_dq[dead] == 0).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_nothing_attends() -> None:
    q, k, v, d_out = make((4, 2), 10, 10)
    for mask in ("False", "k > q + 99", "t0(b,k) == 77"):
        out, lse = ops.attention(q, k, v, documents(10), mask, SCALE)
        gradients = ops.attention_backward(d_out, q, k, v, out, lse, documents(10), mask, SCALE)
        assert (lse == -math.inf).all()
        assert all((x == 0).all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dims", [(16, 16), (16, 8)])
def test_large_logits_stay_finite(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    q, k, v, d_out = make((4, 2), 48, 48, dims, dtype)
    logits = (q @ k.repeat_interleave(2, 1).mT * SCALE).abs().max()
    q = q * (1e4 / logits)
    result = run_steps((q, k, v, d_out), documents(48), DOCUMENTS, SPLITS["zigzag"], SPLITS["uneven"])
    assert all(x.isfinite().all() for x in result)
    if dtype == torch.float64:
        all_close(result, exact(q, k, v, keep_of(DOCUMENTS, documents(48), q, k), d_out), 1e-9)


def test_merge() -> None:
    """Any two of: dead, very small, ordinary, very large. The outs are 1 and 3."""
    levels = torch.tensor([-math.inf, -1e4, 0.0, 0.5, 1e4])
    lse, other = (x.flatten() for x in torch.meshgrid(levels, levels, indexing="ij"))
    out = torch.where(lse == -math.inf, 0.0, 1.0)[:, None]
    other_out = torch.where(other == -math.inf, 0.0, 3.0)[:, None]
    merged, merged_lse = reference.merge(out, lse, other_out, other)
    expected = torch.logaddexp(lse.double(), other.double())
    close(merged_lse, expected, 1e-7)
    base = expected.masked_fill(expected == -math.inf, 0.0)
    expected_out = (lse.double() - base).exp() + 3 * (other.double() - base).exp()
    close(merged[:, 0], expected_out, 1e-6)


# ---- blocks


@pytest.mark.parametrize("mask", [*MASKS, "(k <= q) & (k > q - 300)", "(k < q + 300) & (k > q - 300)", "k <= q - 90"])
@pytest.mark.parametrize(
    ("q_intervals", "k_intervals"),
    [
        ((0, 900), (0, 900)),
        ((0, 150, 1200, 1350), (150, 300, 1050, 1200)),
        ((100, 800), (300, 1000)),
        ((300, 1000), (100, 800)),
        ((0, 30, 30, 60), (0, 0, 20, 25)),
    ],
)
def test_blocks_cover_what_attends_once(mask: str, q_intervals: tuple[int, ...], k_intervals: tuple[int, ...]) -> None:
    rows, columns = (
        torch.cat([torch.arange(lo, hi) for lo, hi in zip(each[::2], each[1::2], strict=True)])
        for each in (q_intervals, k_intervals)
    )
    keep = parse_mask(mask).evaluate(rows, columns, documents(1350), 2, 4, "cpu").expand(2, 4, len(rows), len(columns))
    covered = torch.zeros(len(rows), len(columns), dtype=torch.int)
    for block in blocks(mask, q_intervals, k_intervals):
        region = keep[:, :, slice(*block.rows), slice(*block.columns)]
        covered[slice(*block.rows), slice(*block.columns)] += 1
        assert region.numel()
        if block.tile is Tile.FULL:
            assert region.all()
        if block.tile is Tile.CAUSAL:
            assert torch.equal(region, torch.ones_like(region).tril())
            assert region.sum() == block.pairs * 8
    assert covered.max() <= 1
    assert not keep[:, :, covered == 0].any()


def test_blocks_are_few() -> None:
    """A zigzag ring step is one call; the first is the two diagonal chunks and the rectangle between them."""
    assert blocks(CAUSAL, (0, 8, 56, 64), (8, 16, 48, 56)) == ((Tile.FULL, (8, 16), (0, 16)),)
    assert blocks(CAUSAL, (8, 16, 48, 56), (0, 8, 56, 64)) == ((Tile.FULL, (0, 16), (0, 8)),)
    tiles = [block.tile for block in blocks(CAUSAL, (0, 8, 56, 64), (0, 8, 56, 64))]
    assert sorted(tile.name for tile in tiles) == ["CAUSAL", "CAUSAL", "FULL"]
    assert len(blocks(CAUSAL, (0, 4096), (0, 4096))) == 1
    assert blocks(CAUSAL, (0, 64), (64, 128)) == ()
    assert len(blocks("t0(b,q) == t0(b,k)", (0, 1 << 20), (0, 1 << 20))) == 1


def test_a_window_costs_its_width() -> None:
    length = 1 << 16
    found = blocks("(k <= q) & (k > q - 1024)", (0, length), (0, length))
    assert sum(block.pairs for block in found) < 1.3 * length * 1024


# ---- registration


def test_flops() -> None:
    q, k, v, d_out = make((4, 2), 32, 32, (16, 8))
    forward, backward = 2 * 2 * 4 * (16 + 8), 2 * 2 * 4 * (3 * 16 + 2 * 8)  # per pair
    triangle = 32 * 33 // 2
    out, lse = ops.attention(q, k, v, [], CAUSAL, SCALE)
    state = [out, lse, [], CAUSAL]
    cases = [
        (lambda: ops.dense_attention(q, k, v, None, False, SCALE), forward * 32 * 32),
        (lambda: ops.dense_attention(q, k, v, None, True, SCALE), forward * triangle),
        (lambda: ops.dense_attention_backward(d_out, q, k, v, out, lse, None, True, SCALE), backward * triangle),
        (lambda: ops.attention(q, k, v, [], CAUSAL, SCALE), forward * triangle),
        (lambda: ops.attention_backward(d_out, q, k, v, *state, SCALE), backward * triangle),
        (lambda: ops.attention_step(q, k, v, [], out, lse, CAUSAL, [32, 64], [0, 32], SCALE), forward * 32 * 32),
        (lambda: ops.attention_step(q, k, v, [], out, lse, CAUSAL, [0, 32], [32, 64], SCALE), 0),
        (
            lambda: ops.attention_backward_step(d_out, q, k, v, *state, [0, 16, 96, 112], [0, 16, 96, 112], SCALE),
            backward * (2 * 16 * 17 // 2 + 16 * 16),
        ),
    ]
    for call, flops in cases:
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == flops


def opcheck_cases() -> list[tuple[str, tuple[object, ...]]]:
    q, k, v, d_out = make((4, 2), 12, 12, (8, 8), torch.float32)
    wide, wide_d_out = torch.cat([v, v], -1), torch.cat([d_out, d_out], -1)
    tables = documents(12)
    keep = keep_of(PADDED, tables, q, k)
    halves = [0, 6, 18, 24]
    cases: list[tuple[str, tuple[object, ...]]] = []
    for value, gradient in ((v, d_out), (wide, wide_d_out)):
        out, lse = ops.attention(q, k, value, tables, PADDED, SCALE)
        saved = (gradient, q, k, value, out, lse)
        grad = tuple(x.clone().requires_grad_() for x in (q, k, value))
        cases += [
            ("dense_attention", (*grad, None, True, SCALE)),
            ("dense_attention", (*grad, keep, False, SCALE)),
            ("dense_attention_backward", (*saved, keep, False, SCALE)),
            ("attention", (q, k, value, tables, PADDED, SCALE)),
            ("attention_backward", (*saved, tables, PADDED, SCALE)),
            ("attention_step", (q, k, value, tables, None, None, FULL, [0, 12], [0, 12], SCALE)),
            ("attention_step", (q, k, value, tables, out, lse, CAUSAL, halves, halves, SCALE)),
            ("attention_step", (q, k, value, tables, out, lse, CAUSAL, [0, 12], [12, 24], SCALE)),
            ("attention_backward_step", (*saved, tables, FULL, [0, 12], [0, 12], SCALE)),
            ("attention_backward_step", (*saved, tables, CAUSAL, halves, halves, SCALE)),
        ]
    return cases


@pytest.mark.parametrize(("name", "arguments"), opcheck_cases())
def test_opcheck(name: str, arguments: tuple[object, ...]) -> None:
    torch.library.opcheck(getattr(ops, name).default, arguments)


def test_bfloat16_fakes_match() -> None:
    q, k, v, d_out = make((4, 2), 12, 12, (8, 8), torch.bfloat16)
    out, lse = ops.attention_step(q, k, v, [], None, None, CAUSAL, [0, 12], [0, 12], SCALE)
    for name, arguments in (
        ("attention_step", (q, k, v, [], out, lse, CAUSAL, [12, 24], [0, 12], SCALE)),
        ("attention_backward_step", (d_out, q, k, v, out, lse, [], CAUSAL, [0, 12], [0, 12], SCALE)),
        ("attention_backward", (d_out, q, k, v, out.to(q.dtype), lse, [], CAUSAL, SCALE)),
        ("dense_attention", (q, k, v, None, True, SCALE)),
    ):
        torch.library.opcheck(getattr(ops, name).default, arguments, test_utils=("test_schema", "test_faketensor"))
