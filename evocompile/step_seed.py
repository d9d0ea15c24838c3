"""The seed of a step's random draws."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Communicators
from .mesh import group_name


class StepSeed:
    """The seed of a step's random draws: rank 0 takes it from torch's generator, so it follows torch.manual_seed.

    The other ranks take one too, so that generators which were equal stay equal, but use rank 0's.
    """

    def __init__(self, communicators: Communicators, device: torch.device, world: int) -> None:
        name = group_name("seed", tuple(range(world)))
        communicators.create([name])
        self._group, self._device = communicators.group(name), device

    def __call__(self) -> Tensor:
        seed = torch.randint(2**62, ()).to(self._device)
        dist.broadcast(seed, 0, group=self._group)
        return seed.cpu()
