"""Masks that are a band, lower < k - q <= upper, kept from block to block: a window has few different ones."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .blocks import Block, Interval, pairs_of
from .pattern import Pattern, pattern_of

_LARGEST = 1 << 20  # elements that are kept


def band_mask(
    mask: str, block: Block, q_intervals: tuple[int, ...], k_intervals: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """The bool mask (1, 1, rows, columns) of a block of consecutive positions under a band; else None. Read only."""
    pattern = pattern_of(mask)
    first_row, first_column = _first(block.rows, q_intervals), _first(block.columns, k_intervals)
    rows, columns = (hi - lo for lo, hi in (block.rows, block.columns))
    if (
        not isinstance(pattern, Pattern)
        or pattern.has_documents
        or first_row is None
        or first_column is None
        or rows * columns > _LARGEST
    ):
        return None
    return _band(pattern.lower, pattern.upper, first_column - first_row, rows, columns, device)


def _first(part: Interval, intervals: tuple[int, ...]) -> int | None:
    """The position of the first row (or column) of a part that lies in one interval."""
    start = 0
    for lo, hi in pairs_of(intervals):
        if start <= part[0] and part[1] <= start + hi - lo:
            return lo + part[0] - start
        start += hi - lo
    return None


@lru_cache(maxsize=64)
def _band(lower: int | None, upper: int | None, offset: int, rows: int, columns: int, device: torch.device) -> Tensor:
    keep = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device)
    if upper is not None:
        keep = keep.tril(upper - offset)
    if lower is not None:
        keep = keep.triu(lower + 1 - offset)
    return keep


def forget_bands() -> None:
    """The masks that are kept are made anew when they are needed again."""
    _band.cache_clear()
