"""Random numbers of a step as a function of its seed: the same on every replica, different on every shard.

A step has one seed, drawn on rank 0 for all. Each random operator of the graph is a *stream* of it, and each part of a
split value a stream of its own, so the draws repeat with the seed, whatever else a rank has drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

_MASK = (1 << 64) - 1


def stream_seed(seed: int, *streams: int) -> int:
    """A seed for a stream of a seed: SplitMix64's mixing (Steele, Lea and Flood, 2014), 63 bits."""
    for stream in streams:
        seed = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed >> 1


@library.custom_op("evocompile::random", mutates_args=())
def random(
    seed: Tensor,
    stream: int,
    part: int,
    distribution: str,
    size: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Draws of shape `size`: "uniform" on [0, 1) or "normal" (mean 0, variance 1).

    seed:   int64 scalar on the CPU, the step's seed.
    stream: number of the random operator in the graph. part: number of this part among the parts of a split value.
    """
    generator = torch.Generator(device).manual_seed(stream_seed(int(seed), stream, part))
    draw = {"uniform": torch.rand, "normal": torch.randn}[distribution]
    return draw(size, generator=generator, dtype=dtype, device=device)


@random.register_fake
def _(
    seed: Tensor, stream: int, part: int, distribution: str, size: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@library.custom_op("evocompile::attention_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def attention_seed(stream: int) -> Tensor:
    """A seed for the dropout of one attention, from the process' generator; int64 scalar on the CPU.

    Stands in a captured graph until `seed_random` puts `stream_seed` in its place. stream: number of the attention.
    """
    return torch.randint(1 << 62, (), dtype=torch.int64)


@attention_seed.register_fake
def _(stream: int) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@library.custom_op("evocompile::stream_seed", mutates_args=())
def seed_of_stream(seed: Tensor, stream: int) -> Tensor:
    """The seed of a stream of the step's seed; int64 scalars on the CPU."""
    return torch.tensor(stream_seed(int(seed), stream), dtype=torch.int64, device="cpu")


@seed_of_stream.register_fake
def _(seed: Tensor, stream: int) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def kept(seed: int, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor, dropout: float) -> Tensor:
    """Which weights of an attention dropout keeps: a hash of the seed and the global numbers, so all blocks agree.

    rows (B, 1, 1, 1), heads (1, H, 1, 1), queries (S,), keys (T,): integers below 2^32. Result: bool (B, H, S, T).
    Every number is mixed into 32 bits by `_mix`; a weight is kept if the last result is at least dropout · 2^32.
    """
    state = _mix(torch.full_like(rows, seed & _WORD) ^ (seed >> 32))
    for number in (rows, heads, queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1)):
        state = _mix(state ^ (number * 0x9E3779B9 & _WORD))
    return state >= round(dropout * (1 << 32))


_WORD = (1 << 32) - 1


def _mix(word: Tensor) -> Tensor:
    """A permutation of the 32-bit numbers in which every bit of the result depends on all (Wellons' lowbias32)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D & _WORD
    word = (word ^ (word >> 15)) * 0x846CA68B & _WORD
    return word ^ (word >> 16)
