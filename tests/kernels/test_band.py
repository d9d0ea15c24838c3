"""Masks of bands that are kept from block to block equal the predicate, wherever the block lies."""

from __future__ import annotations

import pytest
import torch

from evocompile.kernels.band import _band, band_mask
from evocompile.kernels.blocks import Block
from evocompile.kernels.mask import Tile, parse_mask

CPU = torch.device("cpu")
ROWS, COLUMNS = (10, 30, 70, 90), (0, 40, 60, 100)


@pytest.mark.parametrize(
    "text", ["k <= q", "(k <= q) & (k > q - 7)", "(k < q + 3) & (k > q - 3)", "k > q - 30", "True"]
)
@pytest.mark.parametrize("rows", [(0, 20), (20, 40), (3, 9)])
@pytest.mark.parametrize("columns", [(0, 40), (40, 80), (50, 51)])
def test_bands(text: str, rows: tuple[int, int], columns: tuple[int, int]) -> None:
    found = band_mask(text, Block(Tile.MASKED, rows, columns), ROWS, COLUMNS, CPU)
    q, k = (torch.cat([torch.arange(*each[:2]), torch.arange(*each[2:])]) for each in (ROWS, COLUMNS))
    expected = parse_mask(text).evaluate(q[slice(*rows)], k[slice(*columns)], [], 1, 1, CPU)
    assert found is not None and torch.equal(found, expected.expand_as(found))


def test_other_blocks_are_evaluated() -> None:
    across = Block(Tile.MASKED, (10, 30), (0, 40))  # rows of two intervals
    assert band_mask("k <= q", across, ROWS, COLUMNS, CPU) is None
    inside = Block(Tile.MASKED, (0, 20), (0, 40))
    assert band_mask("(k <= q) & (t0(b,q) == t0(b,k))", inside, ROWS, COLUMNS, CPU) is None
    assert band_mask("(k <= q) | (k < 5)", inside, ROWS, COLUMNS, CPU) is None
    large = Block(Tile.MASKED, (0, 2000), (0, 2000))
    assert band_mask("k <= q", large, (0, 2000), (0, 2000), CPU) is None


def test_equal_blocks_share_one_mask() -> None:
    where = (0, 1 << 12), (0, 1 << 12), CPU
    one, other = (
        band_mask("(k <= q) & (k > q - 99)", Block(Tile.MASKED, (lo, lo + 64), (lo, lo + 64)), *where)
        for lo in (0, 640)
    )
    assert one is other and _band.cache_info().currsize <= 64
