"""`with unsharded(model):` the plain model with its whole parameters, for what the parallel one is not made for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import StateError
from .runtime import parallel_forward
from .state import checksums, gather_from_ranks, local_shard
from .states import take_methods
from .torch_private import Slot, tensor_slots
from .whole_values import rows_of


@contextmanager
def unsharded(model: nn.Module) -> Iterator[nn.Module]:
    """Give a parallelised model its own forward and whole, plain parameters for the time of a `with` block.

    For `generate`, `save_pretrained`, export, a deep copy, or evaluation with a cache. All ranks enter and leave it
    together; in between each may do what it likes, as nothing communicates. Every rank holds the whole model.

    What is written to the parameters inside stays: on leaving, each rank takes its rows of them. All ranks must have
    written the same. The optimizer keeps the shards, so there is nothing to train inside; a gradient that was computed
    there is refused on leaving. If the block raises, the shards are as they were before.

    Raises StateError for a model that is not parallelised, or whose weights are on `meta`; and on leaving, after the
    shards are back, for parameters that were replaced, or written differently on different ranks.
    """
    forward = parallel_forward(model)
    if forward is None:
        raise StateError("unsharded() takes a model that parallelize() has returned, outside of another unsharded()")
    slots = [slot for slot in tensor_slots(model) if isinstance(slot.tensor, DTensor)]
    if any(slot.tensor is not None and slot.tensor.device.type == "meta" for slot in slots):
        raise StateError("unsharded(): the weights are on meta; give them values first, with materialize()")
    swaps = _swaps(slots)
    installed = vars(model).pop("forward")
    guards = {name: vars(model).pop(name) for name in GUARDED if isinstance(vars(model).get(name), _Guard)}
    methods = take_methods(model, forward.model.states)
    forward.model.is_unsharded = True
    problem = None
    try:
        for each in swaps:
            each.put(each.whole)
        yield model
        problem = _problem(swaps)
        if problem is None:
            problem = _keep(swaps)
    finally:
        for each in swaps:
            each.put(each.shard)
        vars(model).update(guards, **methods, forward=installed)
        forward.model.is_unsharded = False
        forward.model.states.refresh()
    if problem is not None:
        raise StateError(problem)


@dataclass(frozen=True)
class _Swap:
    """A parameter as shard and as a whole, and all places that hold it."""

    slots: list[Slot]
    shard: DTensor
    whole: Tensor

    def put(self, tensor: Tensor) -> None:
        for slot in self.slots:
            slot.holder[slot.key] = tensor

    def own_rows(self) -> Tensor:
        """What this rank holds of the whole as it is now."""
        return local_shard(rows_of(self.shard, self.whole.detach()))


def _swaps(slots: list[Slot]) -> list[_Swap]:
    """One for each parameter; collective."""
    places: dict[int, list[Slot]] = {}
    for slot in slots:
        places.setdefault(id(slot.tensor), []).append(slot)
    swaps = []
    for group in places.values():
        shard = group[0].tensor
        assert isinstance(shard, DTensor)
        whole: Tensor = shard.full_tensor().detach().clone()  # on one rank full_tensor() is the shard itself
        if group[0].is_parameter:
            whole = nn.Parameter(whole, shard.requires_grad)
            vars(whole).update(vars(shard))
        swaps.append(_Swap(group, shard, whole))
    return swaps


def _problem(swaps: list[_Swap]) -> str | None:
    """What was done inside that would be lost; the same sentence on all ranks."""
    own = None
    for each in swaps:
        name = each.slots[0].name
        if any(slot.tensor is not each.whole for slot in each.slots):
            own = f"parameter {name!r} was replaced inside unsharded(): write into it, or change the model before"
        elif each.whole.grad is not None:
            own = f"a gradient of {name!r} was computed inside unsharded() and would be lost: train outside of it"
    return next((each for each in gather_from_ranks(own) if each is not None), None)


def _keep(swaps: list[_Swap]) -> str | None:
    """Take over what was written; a sentence if it is not the same on all ranks."""
    changed = [not _same_bits(each.own_rows(), local_shard(each.shard.detach())) for each in swaps]
    anywhere = [any(flags) for flags in zip(*gather_from_ranks(changed), strict=True)]
    written = [each for each, flag in zip(swaps, anywhere, strict=True) if flag]
    sums = gather_from_ranks([checksums(each.whole.detach()) for each in written])
    for index, each in enumerate(written):
        if any(found[index] != sums[0][index] for found in sums):
            return (
                f"ranks have written different values to {each.slots[0].name!r} inside unsharded(): nothing was kept. "
                "Do the same on every rank"
            )
    with torch.no_grad():
        for each in written:
            each.shard.copy_(rows_of(each.shard, each.whole.detach()))
    return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.contiguous().reshape(1).view(torch.uint8)


# --- methods that need the whole model -------------------------------------------------------------------------------

GUARDED = ("save_pretrained",)  # of transformers and peft: they write what each rank holds


class _Guard:
    """Stands before a method of a parallelised model that would see this rank's rows alone."""

    def __init__(self, method: Callable[..., Any], name: str) -> None:
        functools.update_wrapper(self, method)
        self._method = method
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state_dict")
        if state and not any(isinstance(each, DTensor) for each in state.values()):
            return self._method(*args, **kwargs)
        raise StateError(
            f"{self._name}() of a parallelised model would write this rank's rows alone. Write the whole model: "
            f"with evocompile.unsharded(model): model.{self._name}(folder) on rank 0, where all ranks enter the block; "
            "or pass whole tensors as state_dict="
        )


def guard_methods(module: nn.Module) -> None:
    """Refuse, on this instance, the methods that take its parameters for whole ones."""
    for name in GUARDED:
        method = getattr(module, name, None)
        if callable(method):
            setattr(module, name, _Guard(method, name))
