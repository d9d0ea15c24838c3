"""Operators on the memory of a tensor, as operators on its values: a rank's part lies otherwise in memory.

`as_strided` reads the memory of its operand by offsets. In a graph whose values are split, gathered and put in other
orders, there is no such memory; the offsets are turned into positions of the values that lie there at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    return _in_memory_order(x)[_positions(x, size, stride, storage_offset)]


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    written = _in_memory_order(x).index_put([_positions(x, size, stride, storage_offset)], source)
    order = _memory_order(x)
    return written.view([x.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.ndim)])


def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Windows of `size` positions of a dim, every `step`; the window becomes the last dim."""
    dim = dim % x.ndim if x.ndim else 0
    if not x.ndim:
        return x.expand(1) if size else x.new_empty(0)
    first = torch.arange(0, x.shape[dim] - size + 1, step, device=x.device)
    windows = aten.index(x, [None] * dim + [first[:, None] + torch.arange(size, device=x.device)])
    return windows.movedim(dim + 1, -1)


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    one, other = dim1 % x.ndim, dim2 % x.ndim
    turned = x.movedim((one, other), (-2, -1))
    rows, columns = turned.shape[-2:]
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    along = torch.arange(count, device=x.device)
    return aten.index(turned, [None] * (x.ndim - 2) + [along + max(-offset, 0), along + max(offset, 0)])


DECOMPOSITIONS: dict[Any, Callable[..., Tensor]] = {
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.unfold.default: unfold,
    aten.diagonal.default: diagonal,
}


def _memory_order(x: Tensor) -> list[int]:
    """The dims from the one with the largest stride to the one with the smallest."""
    return sorted(range(x.ndim), key=lambda dim: (x.stride()[dim], -dim), reverse=True)


def _in_memory_order(x: Tensor) -> Tensor:
    """The values of a tensor as they lie in memory. Raises RuntimeError for one that is a part of a larger memory."""
    order = _memory_order(x)
    turned = x.permute(order)
    if x.storage_offset() or not turned.is_contiguous():
        raise RuntimeError(
            "as_strided reads the memory of a tensor that is a part of another one, and so values that are not its "
            "own; call it on the whole tensor, or on x.contiguous()"
        )
    return turned.reshape(-1)


def _positions(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    """The offset in memory of each element of the strided tensor."""
    found = torch.full(tuple(size), offset or 0, dtype=torch.long, device=x.device)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        found = found + (torch.arange(count, device=x.device) * step).view(-1, *(1,) * (len(size) - 1 - dim))
    return found
