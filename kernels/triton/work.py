"""Which blocks a kernel is launched for, and the range of the other side that each of them reads: host arithmetic."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

Intervals = tuple[int, ...]  # lo0, hi0, lo1, hi1, …


def positions(intervals: Intervals) -> np.ndarray:
    """The global positions of rows or columns, int64."""
    pairs = zip(intervals[::2], intervals[1::2], strict=True)
    return np.concatenate([np.arange(lo, hi) for lo, hi in pairs] or [np.arange(0)])


@lru_cache(maxsize=1024)
def position_tensor(intervals: Intervals, device: torch.device) -> Tensor:
    return torch.from_numpy(positions(intervals)).to(torch.int32).to(device)


@lru_cache(maxsize=1024)
def work_table(
    own: Intervals,
    other: Intervals,
    lower: int | None,
    upper: int | None,
    block: int,
    step: int,
    every: bool,
    device: torch.device,
) -> Tensor:
    """(blocks, 3) int32: a block of `block` own places, and the first and last place of the other side that it reads.

    own, other: positions of the two sides; a place attends at positions p with lower < p - own <= upper.
    step:  the range begins at a multiple of it.
    every: also blocks that read nothing, with an empty range; else those are not launched.

    The longest ranges come first, so that the last blocks to start are short (a causal mask has all lengths).
    """
    first, last = _ranges(own, other, lower, upper)
    starts = np.arange(0, len(first), block)
    if not len(starts):
        return torch.zeros(0, 3, dtype=torch.int32, device=device)
    first, last = np.minimum.reduceat(first, starts), np.maximum.reduceat(last, starts)
    first = np.where(first < last, first // step * step, 0)
    last = np.where(first < last, last, 0)
    table = np.stack([starts // block, first, last], 1)
    table = table[np.argsort(first - last, kind="stable")]
    if not every:
        table = table[table[:, 1] < table[:, 2]]
    return torch.from_numpy(table).to(torch.int32).to(device)


def _ranges(own: Intervals, other: Intervals, lower: int | None, upper: int | None) -> tuple[np.ndarray, np.ndarray]:
    """First and last place of the other side that each own place attends; (large, 0) where there is none."""
    at = positions(own)
    first, last = np.full(len(at), np.iinfo(np.int64).max), np.zeros(len(at), dtype=np.int64)
    offset = 0
    for lo, hi in zip(other[::2], other[1::2], strict=True):
        begin = np.full(len(at), lo) if lower is None else np.clip(at + lower + 1, lo, hi)
        end = np.full(len(at), hi) if upper is None else np.clip(at + upper + 1, lo, hi)
        some = begin < end
        first = np.where(some, np.minimum(first, begin - lo + offset), first)
        last = np.where(some, np.maximum(last, end - lo + offset), last)
        offset += hi - lo
    return first, last
