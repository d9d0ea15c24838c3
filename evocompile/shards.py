"""Where the rows of a state are, by its degree: the arithmetic of redundant sharding.

A parameter of n rows is cut on dim 0 in O chunks of c = ceil(n / O) rows, as `DTensor` cuts it over the O ranks of the
optimizer: rank r holds chunk r mod O; the last ones are shorter, or empty. A shard over a smaller degree D, a divisor
of O, is the union of the O / D chunks whose number is r mod D, modulo D. So the shards of all degrees nest, whatever n
is: the D-shard of a rank holds its O-shard, and the D-shards of D consecutive ranks make up the whole. Shards with
D < O are buffers of (O / D) · c rows, the missing rows at the end being padding; with D = O they have no padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shard_rows(rows: int, degree: int, index: int) -> tuple[int, int]:
    """Rows [lo, hi) of dim 0 in chunk `index` of `degree`: ceil-sized chunks, the last ones fewer or none."""
    chunk = chunk_rows(rows, degree)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


def chunk_rows(rows: int, optimizer: int) -> int:
    """Rows of a full chunk: ceil(rows / optimizer)."""
    return -(-rows // optimizer)


def shard_shape(shape: Sequence[int], degree: int, optimizer: int, rank: int) -> tuple[int, ...]:
    """Of a rank's shard of a state of global `shape`, sharded over `degree` where the optimizer's degree is given."""
    if not shape:
        return ()
    if degree == optimizer:
        lo, hi = shard_rows(shape[0], optimizer, rank % optimizer)
        return (hi - lo, *shape[1:])
    return (optimizer // degree * chunk_rows(shape[0], optimizer), *shape[1:])


def shard_of(whole: Tensor, degree: int, optimizer: int, rank: int) -> Tensor:
    """A rank's shard of a state that is here as a whole: `shard_shape` of it, padded with zeros."""
    if not whole.ndim:
        return whole
    if degree == optimizer:
        lo, hi = shard_rows(whole.shape[0], optimizer, rank % optimizer)
        return whole[lo:hi]
    chunk, rest = chunk_rows(whole.shape[0], optimizer), whole.shape[1:]
    padded = whole.new_zeros(chunk * optimizer, *rest)
    padded[: whole.shape[0]] = whole
    return padded.view(optimizer // degree, degree, chunk, *rest)[:, rank % degree].reshape(-1, *rest)


def whole_of(shards: Sequence[Tensor], rows: int, optimizer: int) -> Tensor:
    """The state whose shards, over `len(shards)` consecutive ranks, these are; the inverse of `shard_of`."""
    degree = len(shards)
    if not shards[0].ndim:
        return shards[0]
    if degree == optimizer:
        return torch.cat(list(shards))
    rest = shards[0].shape[1:]
    chunks = torch.stack([each.view(optimizer // degree, -1, *rest) for each in shards], dim=1)
    return chunks.reshape(-1, *rest)[:rows]
