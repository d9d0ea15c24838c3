"""Random numbers of a step as a function of its seed: the same on every replica, different on every shard.

A step has one seed, drawn on rank 0 for all. Each random operator of the graph is a *stream* of it, and each part of a
split value a stream of its own, so the draws repeat with the seed, whatever else a rank has drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def stream_seed(seed: int, *streams: int) -> int:
    """A seed for a stream of a seed: SplitMix64's mixing (Steele, Lea and Flood, 2014), 63 bits."""
    for stream in streams:
        seed = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed >> 1


@torch.library.custom_op("evocompile::random", mutates_args=())
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
