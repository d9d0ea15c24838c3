"""Which blocks of an attention step are computed, and how: decided on the host, from the mask and the positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from .mask import Mask, Tile, parse_mask

Interval = tuple[int, int]  # half-open


class Block(NamedTuple):
    """A rectangle of a step that one kernel call computes, in the step's own rows and columns (not positions)."""

    tile: Tile
    rows: Interval
    columns: Interval

    @property
    def pairs(self) -> int:
        """Number of (row, column) pairs that are computed; a causal block's dead half is not."""
        height, width = (hi - lo for lo, hi in self[1:])
        if self.tile is not Tile.CAUSAL:
            return height * width
        triangle = min(height, width)
        return triangle * (triangle + 1) // 2 + (height - triangle) * width


Rectangle = tuple[int, int, int, int]  # positions: q_lo, q_hi, k_lo, k_hi


@lru_cache(maxsize=4096)
def blocks(mask: str, q_intervals: tuple[int, ...], k_intervals: tuple[int, ...]) -> tuple[Block, ...]:
    """What a step computes: the live rectangles of (row intervals x column intervals), in as few calls as is simple.

    mask:        text of a predicate (`kernels.mask`).
    q_intervals: lo0, hi0, lo1, hi1, …: the global positions of the step's rows, concatenated; k_intervals likewise.
    """
    predicate = parse_mask(mask)
    found: list[Block] = []
    row = 0
    for q_lo, q_hi in pairs_of(q_intervals):
        column = 0
        for k_lo, k_hi in pairs_of(k_intervals):
            down, right = row - q_lo, column - k_lo
            for tile, (a, b, c, d) in _live(predicate, (q_lo, q_hi, k_lo, k_hi)):
                found.append(Block(tile, (a + down, b + down), (c + right, d + right)))
            column += k_hi - k_lo
        row += q_hi - q_lo
    return tuple(_joined(_joined(found, "rows", "columns"), "columns", "rows"))


def pairs_of(intervals: tuple[int, ...]) -> list[Interval]:
    return list(zip(intervals[::2], intervals[1::2], strict=True))


def _live(mask: Mask, rectangle: Rectangle) -> Iterator[tuple[Tile, Rectangle]]:
    """The parts of a rectangle that are not empty."""
    q_lo, q_hi, k_lo, k_hi = rectangle
    if q_lo >= q_hi or k_lo >= k_hi:
        return
    tile = mask.classify(*rectangle)
    if tile is Tile.FULL:
        yield tile, rectangle
    elif tile is Tile.CAUSAL:
        yield from _aligned(rectangle)
    elif tile is Tile.MASKED:
        parts = _cut(rectangle)
        # Where a finer grid shows nothing but masked parts (a mask that depends on data), stop.
        if all(mask.classify(*part) is Tile.MASKED for part in parts):
            yield tile, rectangle
        else:
            for part in parts:
                yield from _live(mask, part)


def _aligned(rectangle: Rectangle) -> Iterator[tuple[Tile, Rectangle]]:
    """`k <= q` on a rectangle as a full part and a part whose corner is on the diagonal, as kernels want it."""
    q_lo, q_hi, k_lo, k_hi = rectangle
    corner = max(q_lo, k_lo)
    if k_lo < corner:
        yield Tile.FULL, (q_lo, q_hi, k_lo, min(corner, k_hi))
    if corner < min(q_hi, k_hi):
        yield Tile.CAUSAL, (corner, q_hi, corner, min(q_hi, k_hi))


LEAF = 256  # a masked rectangle of this many rows and columns is one call: smaller calls gain nothing


def _cut(rectangle: Rectangle) -> list[Rectangle]:
    """A grid of up to 4 x 4 parts of at least half a LEAF; the rectangle itself when it is small."""
    q_lo, q_hi, k_lo, k_hi = rectangle
    return [(a, b, c, d) for a, b in pairwise(_bounds(q_lo, q_hi)) for c, d in pairwise(_bounds(k_lo, k_hi))]


def _bounds(lo: int, hi: int) -> list[int]:
    count = min(4, math.ceil((hi - lo) / LEAF))
    return [lo + (hi - lo) * i // count for i in range(count + 1)]


def _joined(found: list[Block], same: str, along: str) -> list[Block]:
    """Blocks of one kind that have `same` in common and touch `along` ("rows", "columns") joined, save causal ones."""
    joined: list[Block] = []
    for block in sorted(found, key=lambda each: (getattr(each, same), getattr(each, along))):
        last = joined[-1] if joined else None
        if (
            last
            and last.tile is block.tile
            and block.tile is not Tile.CAUSAL
            and getattr(last, same) == getattr(block, same)
            and getattr(last, along)[1] == getattr(block, along)[0]
        ):
            rows, columns = (last.rows[0], block.rows[1]), (last.columns[0], block.columns[1])
            joined[-1] = Block(block.tile, rows, columns)
        else:
            joined.append(block)
    return joined
