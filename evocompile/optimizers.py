"""Which optimizers train shards as one device trains the whole: known from tests (docs/sharding.md has the list)."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from .errors import StateError

_WHOLE = (
    "takes each parameter as a whole, which this rank has only a shard of: keep the optimizer's state on every rank, "
    "Plan(shard=Shard(optimizer=1)), or use another optimizer, such as AdamW"
)
_INDEXED = "writes to parameters by index, which torch does not do for DTensor: use another optimizer, such as AdamW"

# By class; a subclass may do it another way and is let pass.
NEEDS_WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS)
REFUSED: dict[type[Optimizer], str] = {
    torch.optim.Rprop: _INDEXED,
    torch.optim.SparseAdam: "takes sparse gradients, and those of a parallel model are dense: use Adam",
}


def check_optimizer(optimizer: Optimizer, degree: int) -> None:
    """Raise StateError for an optimizer that cannot train shards over `degree` ranks, before it has taken a step."""
    reason = REFUSED.get(type(optimizer))
    if reason is None and degree > 1 and type(optimizer) in NEEDS_WHOLE:
        reason = _WHOLE
    if reason is not None:
        raise StateError(f"torch.optim.{type(optimizer).__name__} {reason}")
