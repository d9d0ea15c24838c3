"""The Triton kernels in Triton's interpreter against float64. Run by test_triton.py in a process of its own.

The interpreter is chosen when triton is imported, cannot share a process with the compiler, and computes nothing right
in bfloat16, which is compiled instead (test_triton.py).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import evocompile.kernels.triton.operators  # noqa: F401  registers the operators
from evocompile import KernelError, Plan, Shard
from evocompile.capture import capture
from evocompile.kernels import dispatch
from evocompile.kernels.mask import parse_mask
from evocompile.kernels.triton import launch, tiles
from evocompile.kernels.triton.launch import Step
from evocompile.pipeline import run_passes
from evocompile.program import InputKind
from evocompile.virtual import virtual_step
from tests.kernels.test_attention import (
    BIDIRECTIONAL,
    CAUSAL,
    DOCUMENTS,
    FULL,
    PADDED,
    SCALE,
    WINDOW,
    close,
    documents,
    exact,
    keep_of,
    make,
    ops,
    take,
)

OF_ROWS = "(k <= q) & (t0(b,q) != 1)"  # the rows of document 1 are dead
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3}
MASKS = [FULL, CAUSAL, WINDOW, DOCUMENTS, PADDED, OF_ROWS, BIDIRECTIONAL, "k > q", "(k <= q + 3) & (k > q - 5)"]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.interpreting()
    monkeypatch.setenv(dispatch.VARIABLE, "triton")


def check(actual: Any, expected: list[Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(actual, expected, strict=True):
        close(one, other, TOLERANCE[dtype])


def whole(mask: str, heads: tuple[int, int], shape: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """The operators of whole sequences, forward and backward."""
    q, k, v, d_out = make(heads, *shape, dims, dtype)
    tables = documents(max(shape))
    out, lse = ops.attention(q, k, v, tables, mask, SCALE)
    gradients = ops.attention_backward(d_out, q, k, v, out, lse, tables, mask, SCALE)
    expected = exact(q, k, v, keep_of(mask, tables, q, k), d_out)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert all(x.isfinite().all() for x in (out, *gradients))
    check((out, lse, *gradients), expected, dtype)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str) -> None:
    whole(mask, (2, 1), (45, 45), (16, 16), torch.float32)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "shape"),
    [
        ((2, 2), (32, 32), torch.float16, (33, 50)),
        ((4, 1), (40, 24), torch.float32, (50, 33)),
        ((3, 1), (8, 64), torch.float16, (1, 17)),
        ((2, 1), (128, 96), torch.float32, (17, 1)),
    ],
)
@pytest.mark.parametrize("mask", [FULL, WINDOW])
def test_every_form(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, shape: tuple[int, int], mask: str
) -> None:
    whole(mask, heads, shape, dims, dtype)


@pytest.mark.parametrize("mask", [CAUSAL, DOCUMENTS])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_state_carried_over_eight_steps(mask: str, dtype: torch.dtype) -> None:
    """Zigzag rows, and the keys of eight ranks one after the other: FULL, MASKED and dead steps."""
    q, k, v, d_out = make((2, 1), 80, 80, (16, 16), dtype, batch=1)
    tables = documents(80, batch=1)
    expected = exact(q, k, v, keep_of(mask, tables, q, k), d_out)
    rows = [20, 25, 55, 60]
    state: tuple[Tensor | None, Tensor | None] = (None, None)
    splits = [[5 * rank, 5 * rank + 5, 75 - 5 * rank, 80 - 5 * rank] for rank in (4, 3, 2, 1, 0, 7, 6, 5)]
    for columns in splits:
        given = take(q, rows), take(k, columns), take(v, columns)
        state = ops.attention_step(*given, tables, *state, mask, rows, columns, SCALE)
    check(state, [take(expected[0], rows), expected[1][:, :, [*range(20, 25), *range(55, 60)]]], dtype)
    dq = torch.zeros_like(state[0])  # type: ignore[arg-type]
    for columns in splits:
        given = take(d_out, rows), take(q, rows), take(k, columns), take(v, columns)
        step = ops.attention_backward_step(*given, *state, tables, mask, rows, columns, SCALE)
        dq += step[0]
        if columns == [20, 25, 55, 60]:
            own = step
    check([dq], [take(expected[2], rows)], dtype)
    alone = ops.attention_backward_step(
        *(take(x, rows) for x in (d_out, q, k, v)), *state, tables, mask, rows, rows, SCALE
    )
    assert all(torch.equal(one, other) for one, other in zip(alone, own, strict=True))  # deterministic


def test_backward_steps_add_up_to_the_whole() -> None:
    q, k, v, d_out = make((4, 2), 40, 40, (16, 16), torch.float32, batch=1)
    out, lse, *expected = exact(q, k, v, keep_of(CAUSAL, [], q, k), d_out)
    out, lse = out.float(), lse.float()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in ([0, 10, 30, 40], [10, 30]):
        given = (
            take(d_out, rows),
            take(q, rows),
            k,
            v,
            take(out, rows),
            torch.cat([lse[:, :, lo:hi] for lo, hi in zip(rows[::2], rows[1::2], strict=True)], 2),
        )
        _, step_dk, step_dv = ops.attention_backward_step(*given, [], CAUSAL, rows, [0, 40], SCALE)
        dk += step_dk
        dv += step_dv
    check((dk, dv), expected[1:], torch.float32)


@pytest.mark.parametrize("read", [tiles.DESCRIPTORS.value, tiles.DEVICE_DESCRIPTORS.value])
@pytest.mark.parametrize("mask", [FULL, WINDOW])
def test_descriptors_read_what_pointers_read(read: int, mask: str) -> None:
    q, k, v, d_out = make((2, 1), 41, 37, (24, 16), torch.float16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    results = []
    for each in (tiles.POINTERS.value, read):
        results.append(direct(q, k, v, d_out, Step(mask, [], (0, 41), (0, 37), SCALE, read=each)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def direct(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, step: Step, sinks: Tensor | None = None) -> list[Tensor]:
    """out, lse, dq, dk, dv of one step from nothing, or from sinks."""
    out, lse = torch.zeros(d_out.shape), torch.full(q.shape[:3], -math.inf)
    if sinks is not None:
        lse = lse.new_zeros(lse.shape) + sinks[:, None]
    launch.forward(q, k, v, (out, lse), out, lse, step)
    gradients = tuple(torch.full(x.shape, 7.0) for x in (q, k, v))  # what was there must not count
    launch.backward(d_out, q, k, v, out, lse, gradients, False, step)
    return [out, lse, *gradients]


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_slopes", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_scores_and_sinks(softcap: float, with_slopes: bool, with_sinks: bool) -> None:
    """softcap, ALiBi, and sinks as the state before the first step, on a zigzag block whose middle rows are far."""
    q, k, v, d_out = make((2, 1), 20, 30, (16, 16), torch.float32)
    rows, columns = (4, 14, 60, 70), (0, 10, 50, 70)
    slopes = torch.tensor([0.1, 0.02]) if with_slopes else None
    sinks = torch.tensor([0.5, -2.0]) if with_sinks else None
    step = Step(CAUSAL, [], rows, columns, SCALE, softcap, slopes)
    q_at, k_at = (torch.cat([torch.arange(*each) for each in (pair[:2], pair[2:])]) for pair in (rows, columns))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * SCALE
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * (k_at - q_at[:, None])
    scores = scores.masked_fill(~(k_at <= q_at[:, None]), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(2, 2, 20, 1)], -1)
    out = scores.softmax(-1)[..., :30] @ leaves[2].repeat_interleave(2, 1)
    expected = [out.detach(), scores.detach().logsumexp(-1), *torch.autograd.grad(out, leaves, d_out.double())]
    found = direct(q, k, v, d_out, step, sinks)
    check(found, expected, torch.float32)
    if sinks is None:  # the same as the graph has it
        parts = [f"{softcap}*tanh(s / {softcap})" if softcap else "s", *(["p0(h)*(k - q)"] if with_slopes else [])]
        form = [slopes] if slopes is not None else [], None, " + ".join(parts)
        where = [], CAUSAL, list(rows), list(columns), SCALE, *form
        state = ops.attention_step(q, k, v, [], None, None, *where[1:])
        gradients = ops.attention_backward_step(d_out, q, k, v, *state, *where)
        assert all(torch.equal(one, other) for one, other in zip((*state, *gradients), found, strict=True))


@pytest.mark.parametrize(("mask", "columns"), [(CAUSAL, (0, 40)), (CAUSAL, (0, 3, 30, 35)), ("k <= 5", (0, 10))])
def test_the_final_step_is_in_the_inputs_dtype(mask: str, columns: tuple[int, ...]) -> None:
    """From a carried float32 state, on one head, whose stride means nothing."""
    q, k, v, d_out = make((1, 1), 20, sum(columns[1::2]) - sum(columns[::2]), (16, 16), torch.float16)
    step = Step(mask, [], (20, 40), columns, SCALE)
    before = torch.randn(d_out.shape), torch.randn(q.shape[:3])
    out, lse = torch.empty(d_out.shape), torch.empty(2, 20, 1).transpose(1, 2)
    final, final_lse = torch.empty_like(d_out), torch.empty(q.shape[:3])
    launch.forward(q, k, v, before, out, lse, step)
    launch.forward(q, k, v, before, final, final_lse, step)
    assert final.dtype == torch.float16
    torch.testing.assert_close(final.float(), out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(final_lse, lse)


def test_dead_blocks_are_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    original = launch._work_of_rows

    def record(*args: Any, **kwargs: Any) -> Tensor:
        table = original(*args, **kwargs)
        launched.append(table.shape[0])
        return table

    monkeypatch.setattr(launch, "_work_of_rows", record)
    q, k, v, _ = make((2, 1), 128, 16, (16, 16), torch.float32, batch=1)
    out, lse = torch.zeros(1, 2, 128, 16), torch.full((1, 2, 128), -math.inf)
    for mask, first in (("(k <= q) & (k > q - 20)", 64), ("k <= q", 0), ("k <= q", 400)):
        ops.triton_attention_step_(q, k, v, out, lse, [], mask, [0, 128], [first, first + 16], SCALE)
    # blocks of 32 rows: positions 64 to 98 see the window; four see the first keys; none sees what comes later
    assert launched == [2, 4]


def test_operators_write_in_place() -> None:
    q, k, v, d_out = make((2, 1), 24, 24, (16, 16), torch.float32, batch=1)
    out, lse = torch.zeros(1, 2, 24, 16), torch.full((1, 2, 24), -math.inf)
    state = [], CAUSAL, [0, 24], [0, 24], SCALE
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.triton_attention_step_.default, (q, k, v, out, lse, *state), test_utils=tests)
    ops.triton_attention_step_(q, k, v, out, lse, *state)
    expected = exact(q, k, v, keep_of(CAUSAL, [], q, k), d_out)
    check((out, lse), expected[:2], torch.float32)
    sums = [torch.ones(x.shape) for x in (q, k, v)]
    arguments = (d_out, q, k, v, out, lse, *sums, *state)
    torch.library.opcheck(ops.triton_attention_backward_step_.default, arguments, test_utils=tests)
    ops.triton_attention_backward_step_(*arguments)
    check(sums, [x + 1 for x in expected[2:]], torch.float32)


def test_a_mask_of_another_form_is_refused_or_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d_out = make((2, 1), 20, 20, (16, 16), torch.float32)
    mask = "(k <= q) | (k <= 3)"
    with pytest.raises(KernelError, match=r"'triton'.*no bound on k - q, no equality of documents"):
        ops.attention(q, k, v, [], mask, SCALE)
    with pytest.raises(KernelError, match="it computes no gradients of params"):
        saved = d_out, q, k, v, d_out, d_out[..., 0]
        ops.attention_backward(*saved, [], CAUSAL, SCALE, [torch.ones(2)], None, "s + p0(h)*(k - q)", 0.0, 1)
    monkeypatch.delenv(dispatch.VARIABLE)
    out, lse = ops.attention(q, k, v, [], mask, SCALE)
    check((out, lse), exact(q, k, v, keep_of(mask, [], q, k), d_out)[:2], torch.float32)


class Attend(nn.Module):
    """Two query heads for each key head, a window, value heads of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(2, (heads, -1)).transpose(1, 2) for each, heads in self._heads())
        at = torch.arange(x.shape[1])
        keep = (at <= at[:, None]) & (at > at[:, None] - 9)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep).square().sum()

    def _heads(self) -> list[tuple[nn.Module, int]]:
        return [(self.q, 2), (self.k, 1), (self.v, 1)]


def test_a_parallel_program_trains_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model to the gradients of three ranks, all attention by these kernels, chosen for whole steps."""
    monkeypatch.delenv(dispatch.VARIABLE)
    launched: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(launch, name)

        def record(*args: Any, original: Any = original, name: str = name) -> None:
            launched.append(name)
            original(*args)

        monkeypatch.setattr(launch, name, record)
    torch.manual_seed(0)
    model, x = Attend(), torch.randn(2, 19, 8)
    loss = model(x)
    loss.backward()
    captured = capture(model.forward, model, (), {"x": x}).program
    programs = [run_passes(captured, Plan(cp=3, shard=Shard()), rank) for rank in range(3)]
    values = {"x": x, **{name: each.detach() for name, each in model.named_parameters()}}
    inputs = [values[each.name] for each in programs[0].inputs if each.kind is not InputKind.TANGENT]
    result = virtual_step(programs, [inputs] * 3, [torch.ones(())])
    steps = {
        name: sum(name in str(node.target) for each in programs for node in each.graphs[graph].graph.nodes)
        for name, graph in (("attention_step", "forward"), ("attention_backward_step", "backward"))
    }
    assert [launched.count(name) for name in ("forward", "backward")] == list(steps.values())
    for outputs, gradients in zip(result.outputs, result.gradients, strict=True):
        torch.testing.assert_close(outputs[0], loss, rtol=1e-5, atol=0)
        for name, each in model.named_parameters():
            found = gradients[name]
            assert isinstance(found, Tensor) and each.grad is not None
            close(found, each.grad.double(), 1e-5)


def test_inductor_keeps_the_state_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in a compiled graph write one buffer: nothing copies the state between them."""
    q, k, v, d_out = make((2, 1), 16, 32, (16, 16), torch.float32, batch=1)
    written: list[int] = []
    original = launch.forward

    def record(*args: Any) -> None:
        written.append(args[4].data_ptr())
        original(*args)

    monkeypatch.setattr(launch, "forward", record)

    def chain(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new_zeros(1, 2, 16, 16), q.new_full((1, 2, 16), -math.inf)
        for lo in (0, 16):
            part = k[:, :, lo : lo + 16] * 1.0, v[:, :, lo : lo + 16] * 1.0
            ops.triton_attention_step_(q, *part, out, lse, [], FULL, [0, 16], [lo, lo + 16], SCALE)
        return out * 2, lse

    out, lse = torch.compile(chain, fullgraph=True)(q, k, v)
    check((out / 2, lse), exact(q, k, v, None, d_out)[:2], torch.float32)
    assert len(written) == 2 and written[0] == written[1]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_steps(data: st.DataObject) -> None:
    """A step from a random state: any offsets, lengths, heads, dims; the state and the gradients."""
    cuts = st.lists(st.integers(0, 70), min_size=2, max_size=4, unique=True).map(sorted)
    rows, columns = ([*each[: len(each) // 2 * 2]] for each in (data.draw(cuts), data.draw(cuts)))
    group, dtype = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from(list(TOLERANCE)))
    dims = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    mask = data.draw(st.sampled_from(MASKS))
    sizes = [sum(hi - lo for lo, hi in zip(each[::2], each[1::2], strict=True)) for each in (rows, columns)]
    q, k, v, d_out = make((group, 1), *sizes, dims, dtype, batch=2)
    tables = documents(80)
    q_at, k_at = (
        torch.cat([torch.arange(lo, hi) for lo, hi in zip(each[::2], each[1::2], strict=True)])
        for each in (rows, columns)
    )
    keep = parse_mask(mask).evaluate(q_at, k_at, tables, 2, group, "cpu")
    expected = exact(q, k, v, keep, d_out)
    before = torch.randn(expected[0].shape), torch.randn(expected[1].shape)
    state = ops.attention_step(q, k, v, tables, *before, mask, rows, columns, SCALE)
    total = torch.logaddexp(before[1].double(), expected[1])
    merged = sum(
        torch.where(lse == -math.inf, 0.0, (lse - total).exp())[..., None] * out.double()
        for out, lse in ((before[0], before[1].double()), (expected[0], expected[1]))
    )
    check(state, [merged, total], dtype)
    fresh = ops.attention_step(q, k, v, tables, None, None, mask, rows, columns, SCALE)
    step = ops.attention_backward_step(d_out, q, k, v, *fresh, tables, mask, rows, columns, SCALE)
    check((*fresh, *step), expected, dtype)
