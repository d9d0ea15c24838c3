"""What the Triton kernels are told of a predicate and a score function, and the host's ranges, against brute force."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import evocompile.kernels.triton.operators  # noqa: F401  registers the operators
from evocompile.kernels.mask import parse_mask
from evocompile.kernels.pattern import Pattern, ScorePattern, pattern_of, score_pattern
from evocompile.kernels.triton.work import Intervals, position_tensor, work_table

MASKS = [
    "True",
    "k <= q",
    "k > q",
    "k >= q - 3",
    "k == k",
    "q > k + 2",
    "(k <= q) & (k > q - 9)",
    "(k < q + 5) & (k > q - 5)",
    "(k <= q) & (k <= q - 2) & (k > q - 9) & (k > q - 7)",
    "(k <= q) & (t0(b,q) == t0(b,k))",
    "(t1(b,k) == t0(b,q)) & (k <= q)",
    "(k <= q) & (t0(b,k) != 0) & (t1(b,q) > 0)",
    "((k < 5) | (k > 20)) & (k <= q)",
    "(k <= q) & (q % 3 == 0) & (t0(b,q) == t0(b,k)) & (t1(b,k) == 1)",
]
OTHERS = [
    "(k <= q) | (k < 5)",
    "k <= 2*q",
    "k <= q + h",
    "(t0(b,q) == t0(b,k)) & (t1(b,q) == t1(b,k))",
    "t0(b,q) <= t0(b,k)",
    "(k // 4) == (q // 4)",
    "False",
]
TABLES = [torch.arange(64).view(2, 32) // 7 % 4 - 1, torch.arange(64).view(2, 32) % 3]


@pytest.mark.parametrize("text", MASKS)
def test_patterns_mean_what_the_predicate_means(text: str) -> None:
    pattern = pattern_of(text)
    assert isinstance(pattern, Pattern)
    rows, columns = torch.arange(3, 32), torch.arange(28)
    distance = columns - rows[:, None]
    keep = torch.ones(2, len(rows), len(columns), dtype=torch.bool)
    if pattern.lower is not None:
        keep &= distance > pattern.lower
    if pattern.upper is not None:
        keep &= distance <= pattern.upper
    if pattern.has_documents:
        keep &= pattern.numbers(rows, TABLES, "q")[:, :, None] == pattern.numbers(columns, TABLES, "k")[:, None]
    expected = parse_mask(text).evaluate(rows, columns, TABLES, 2, 1, "cpu")
    assert torch.equal(keep, expected[:, 0].expand_as(keep))


@pytest.mark.parametrize("text", OTHERS)
def test_what_has_no_pattern_says_why(text: str) -> None:
    assert isinstance(pattern_of(text), str)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s", ScorePattern()),
        ("5.0*tanh(s / 5.0)", ScorePattern(5.0)),
        ("s + p1(h)*(k - q)", ScorePattern(0.0, 1, 1.0)),
        ("s - 0.5*p0(h)*(q - k)", ScorePattern(0.0, 0, 0.5)),
        ("3*tanh(s / 3) + p0(h)*k - p0(h)*q", ScorePattern(3.0, 0, 1.0)),
    ],
)
def test_scores(text: str, expected: ScorePattern) -> None:
    assert score_pattern(text) == expected


@pytest.mark.parametrize(
    "text",
    ["2*s", "5.0*tanh(s / 4.0)", "s + p0(h)*k", "s + p0(h)", "s + p0(h, k - q)", "s + p0(h)*(k - 2*q)", "tanh(s)*s",
     "s + k - q", "0 - 5*tanh(s / 5)"],
)  # fmt: skip
def test_other_scores_say_why(text: str) -> None:
    assert isinstance(score_pattern(text), str)


def test_flops_of_the_operators_in_place() -> None:
    """As of `attention_step`: the pairs that attend, two products forward, five backward."""
    ops = torch.ops.evocompile
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        q, k, v, d_out = (torch.empty(2, heads, 32, dim) for heads, dim in ((4, 16), (2, 16), (2, 8), (4, 8)))
        lse, where = torch.empty(2, 4, 32), ([], "k <= q", [32, 64], [16, 48], 1.0)
        ops.triton_attention_step_(q, k, v, d_out, lse, *where)
        forward = counter.get_total_flops()
        ops.triton_attention_backward_step_(d_out, q, k, v, d_out, lse, q, k, v, *where)
    pairs = 32 * 16 + 16 * 17 // 2 + 16 * 16
    assert forward == 2 * 2 * 4 * (16 + 8) * pairs
    assert counter.get_total_flops() - forward == 2 * 2 * 4 * (3 * 16 + 2 * 8) * pairs


@pytest.mark.parametrize(("lower", "upper"), [(None, None), (None, 0), (-9, 0), (-9, None), (3, 6), (-40, 40)])
@pytest.mark.parametrize(
    ("own", "other"),
    [
        ((0, 64), (0, 64)),
        ((0, 10, 54, 64), (10, 54)),
        ((20, 37), (0, 3, 3, 5, 30, 50)),
        ((0, 5), (60, 64)),
        ((), (0, 4)),
    ],
)
@pytest.mark.parametrize(("block", "step"), [(16, 8), (7, 1)])
def test_ranges_hold_what_attends(
    lower: int | None, upper: int | None, own: Intervals, other: Intervals, block: int, step: int
) -> None:
    """Every pair that attends is inside a block's range, ranges begin and end with such pairs, each block is once."""
    rows, columns = (position_tensor(each, torch.device("cpu")) for each in (own, other))
    distance = columns - rows[:, None]
    keep = torch.ones(distance.shape, dtype=torch.bool)
    if lower is not None:
        keep &= distance > lower
    if upper is not None:
        keep &= distance <= upper
    table = work_table(own, other, lower, upper, block, step, True, torch.device("cpu")).tolist()
    assert sorted(each[0] for each in table) == list(range((len(rows) + block - 1) // block))
    for index, first, last in table:
        attends = keep[index * block : (index + 1) * block].any(0).nonzero().flatten().tolist()
        if attends:
            assert first == attends[0] // step * step
            assert last == attends[-1] + 1
        else:
            assert first == last
    lengths = [last - first for _, first, last in table]
    assert all(one + step > other for one, other in pairwise(lengths))  # the longest first
    live = work_table(own, other, lower, upper, block, step, False, torch.device("cpu")).tolist()
    assert live == [each for each in table if each[1] < each[2]]
