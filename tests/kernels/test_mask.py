"""kernels/mask.py: text, normal form, classification and evaluation agree with plain arithmetic."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evocompile.errors import MaskError
from evocompile.kernels.mask import Mask, Tile, parse_mask

BATCH, HEADS, LENGTH = 2, 2, 12
TABLES = [
    torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]]),
    torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool),
]


def evaluate(mask: Mask, q: range = range(LENGTH), k: range = range(LENGTH)) -> torch.Tensor:
    """The mask over all rows and heads, (BATCH, HEADS, q, k)."""
    value = mask.evaluate(torch.tensor(q), torch.tensor(k), TABLES, BATCH, HEADS, "cpu")
    assert value.dtype == torch.bool and value.dim() == 4
    return value.expand(BATCH, HEADS, len(q), len(k))


def by_python(text: str, q: range = range(LENGTH), k: range = range(LENGTH)) -> torch.Tensor:
    """The same by Python's own operators on int64 tensors."""
    names = {
        "q": torch.tensor(q).view(1, 1, -1, 1),
        "k": torch.tensor(k).view(1, 1, 1, -1),
        "b": torch.arange(BATCH).view(-1, 1, 1, 1),
        "h": torch.arange(HEADS).view(1, -1, 1, 1),
        "t0": lambda b, position: TABLES[0].long()[b, position],
        "t1": lambda b, position: TABLES[1].long().expand(BATCH, -1)[b, position],
    }
    value = eval(text, {"__builtins__": {}}, names)
    return torch.as_tensor(value).expand(BATCH, HEADS, len(q), len(k))


# ---- text


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("True", "True"),
        ("q >= k", "k <= q"),
        ("k < q + 1", "k <= q"),
        ("~(k > q)", "k <= q"),
        ("64*k <= 64*q + 63", "k <= q"),
        ("And(k <= q, k >= q - 63)", "(k <= q) & (k > q - 64)"),
        ("(k <= q) & (k <= q + 5) & (k > q - 9) & (k > q - 4)", "(k <= q) & (k > q - 4)"),
        ("(k <= q) | (k <= q + 5)", "k <= q + 5"),
        ("(k <= q) & ((k > q) | (k < 5))", "(k <= 4) & (k <= q)"),
        ("(k <= q) | (k > q)", "True"),
        ("~((k <= q) & (k % 3 == 0))", "((k % 3) != 0) | (k > q)"),
        ("q // 64 == k // 64", "(k // 64) == (q // 64)"),
        ("2*k == 2*q + 1", "False"),
        ("(t0(b, q) == t0(b, k)) & (k <= q)", "(k <= q) & (t0(b, k) == t0(b, q))"),
        ("0 != t1(b, k)", "t1(b, k) != 0"),
    ],
)
def test_normal_form(written: str, normal: str) -> None:
    assert str(parse_mask(written)) == normal
    assert parse_mask(normal) == parse_mask(written)


def test_named_masks() -> None:
    assert parse_mask("True") == Mask.full()
    assert parse_mask("k <= q") == Mask.causal()
    assert parse_mask("t3(b, k) == 1").table_count == 4
    assert Mask.causal().table_count == 0


@pytest.mark.parametrize(
    "text",
    [
        *("", "q", "k + 1", "k <= x", "k <= q <= b", "k // q < 1", "k / 2 <= q", "k // 0 == 1", "k <= 1.5"),
        *("t0(q, b) == 1", "(k <= q) + 1 > 0", "k <= q and q <= k"),
        *("__import__('os').getpid() == k", "k.__class__ == q"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(MaskError, match="not a mask"):
        parse_mask(text)


# ---- arbitrary predicates

_leaf = st.sampled_from(["q", "k", "b", "h", "t0(b, q)", "t0(b, k)", "t1(b, k)", "3", "7"])
_number = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(st.integers(-3, 3), inner).map(lambda parts: f"({parts[0]}*{parts[1]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.integers(1, 5)).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
    ),
    max_leaves=4,
)
_relation = st.tuples(_number, st.sampled_from(["<=", "<", ">=", ">", "==", "!="]), _number).map(
    lambda parts: f"({' '.join(parts)})"
)
_everywhere = "((q + k + b + h) * 0 == 0)"  # makes Python's value a tensor even where the relation is a plain bool
_predicate = st.recursive(
    _relation.map(lambda text: f"({text} & {_everywhere})"),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("&|"), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda text: f"(~{text})"),
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(text=_predicate)
def test_text_round_trip_and_evaluation(text: str) -> None:
    mask = parse_mask(text)
    assert parse_mask(str(mask)) == mask
    assert torch.equal(evaluate(mask), by_python(text))


@settings(max_examples=200, deadline=None)
@given(text=_predicate, data=st.data())
def test_classification_is_never_wrong(text: str, data: st.DataObject) -> None:
    mask = parse_mask(text)
    q_lo, q_hi = sorted(data.draw(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH))))
    k_lo, k_hi = sorted(data.draw(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH))))
    values = evaluate(mask, range(q_lo, q_hi), range(k_lo, k_hi))
    causal = by_python("k <= q", range(q_lo, q_hi), range(k_lo, k_hi))
    match mask.classify(q_lo, q_hi, k_lo, k_hi):
        case Tile.EMPTY:
            assert not values.any()
        case Tile.FULL:
            assert values.all()
        case Tile.CAUSAL:
            assert torch.equal(values, causal)


# ---- classification


def exact(mask: Mask, q: range, k: range) -> Tile:
    values, causal = evaluate(mask, q, k), by_python("k <= q", q, k)
    if not values.any():
        return Tile.EMPTY
    if values.all():
        return Tile.FULL
    return Tile.CAUSAL if torch.equal(values, causal) else Tile.MASKED


@pytest.mark.parametrize(
    "text",
    ["True", "k <= q", "(k <= q) & (k > q - 4)", "k > q - 3", "k // 4 == q // 4", "(k // 4 == q // 4) & (k <= q)"],
)
def test_causal_window_and_chunk_are_classified_exactly(text: str) -> None:
    mask = parse_mask(text)
    edges = [(lo, hi) for lo in range(0, LENGTH, 2) for hi in (lo + 1, lo + 3, lo + 4, LENGTH) if hi <= LENGTH]
    for q_lo, q_hi in edges:
        for k_lo, k_hi in edges:
            tile = mask.classify(q_lo, q_hi, k_lo, k_hi)
            assert tile == exact(mask, range(q_lo, q_hi), range(k_lo, k_hi)), (q_lo, q_hi, k_lo, k_hi)


def test_data_makes_a_tile_masked_but_not_what_lies_outside_of_the_positions() -> None:
    mask = parse_mask("(k <= q) & (t0(b, q) == t0(b, k)) & (t1(b, k) != 0)")
    assert mask.classify(0, 4, 4, 8) is Tile.EMPTY
    assert mask.classify(4, 8, 0, 4) is Tile.MASKED
    assert mask.classify(4, 4, 0, 4) is Tile.EMPTY


def test_classification_is_fast_and_exact_at_long_context() -> None:
    mask = parse_mask("(k <= q) & (k > q - 4096) & (t0(b, q) == t0(b, k))")
    length, tile = 1 << 20, 1 << 12
    assert mask.classify(length - tile, length, 0, tile) is Tile.EMPTY
    started = time.perf_counter()
    for start in range(0, length, tile):
        mask.classify(start, start + tile, start, start + tile)
    assert (time.perf_counter() - started) / (length // tile) < 1e-3  # seconds; 1e-5 when nothing else runs
