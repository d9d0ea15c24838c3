"""Which optimizers train shards as one device trains the whole: known from tests (docs/sharding.md has the list)."""

from __future__ import annotations

import torch
from torch import Tensor
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


_STATES: dict[type[Optimizer], int] = {torch.optim.SGD: 0, torch.optim.Adagrad: 1, torch.optim.RMSprop: 1}
_MORE = ("momentum", "amsgrad", "centered")  # options with a further tensor of the parameter's shape
ADAM = 2  # tensors of a parameter's shape in the state of Adam, and of most others


def states_of(optimizer: Optimizer) -> float:
    """Elements of an optimizer's state for each element of a parameter: of the state it has, else as its class makes.

    The numbers of elements are global ones: a `DTensor`'s of the parameter's shape counts as the whole.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each in optimizer.state]
    elements = sum(each.numel() for each in parameters)
    if elements:
        states = [value for each in parameters for value in optimizer.state[each].values()]
        return sum(value.numel() for value in states if isinstance(value, Tensor) and value.ndim) / elements
    options = max(sum(bool(group.get(name)) for name in _MORE) for group in optimizer.param_groups)
    return _STATES.get(type(optimizer), ADAM) + options


def check_optimizer(optimizer: Optimizer, degree: int) -> None:
    """Raise StateError for an optimizer that cannot train shards over `degree` ranks, before it has taken a step."""
    reason = REFUSED.get(type(optimizer))
    if reason is None and degree > 1 and type(optimizer) in NEEDS_WHOLE:
        reason = _WHOLE
    if reason is not None:
        raise StateError(f"torch.optim.{type(optimizer).__name__} {reason}")
