"""What a rank holds of a model beside the optimizer's shards, between calls: copies to compute with, and accumulated
gradients.

A parameter's *copy* is its shard over P, in the type of the computation. It is made anew by the first forward after a
synchronised backward or a `model.refresh()`, and after the parameter was written to in a way that torch counts, as
`load_state_dict` does. A gradient that a backward under `model.no_sync()` leaves is kept at G until the next one
outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from .collectives import Communicators
from .errors import StateError
from .mesh import Mesh, group_name
from .plan import Plan
from .precision import Precision
from .shards import shard_shape
from .state import as_gradient, local_shard


def _versions(parameter: Tensor) -> tuple[int, int]:
    """How often torch has seen a parameter written to, as a whole and through this rank's shard."""
    return parameter._version, local_shard(parameter)._version


@dataclass
class _Copy:
    value: Tensor
    versions: tuple[int, int]


@dataclass
class _Accumulated:
    """value: over G. versions: of the parameter when it was last added to. mark: what was put in `.grad` for it."""

    value: Tensor
    versions: tuple[int, int]
    mark: Tensor | None


class NotCopied:
    """What belongs to one model and its process groups."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(
            "a parallelised model cannot be copied, as the copy would run with the original's parameters: copy the "
            "model before parallelize(), or inside of `with evocompile.unsharded(model):`, where it is plain"
        )

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a parallelised model cannot be pickled: save model.state_dict() (with torch.distributed.checkpoint), and "
            "load it into a model that is built and parallelised anew"
        )


class States(NotCopied):
    """The copies and the accumulated gradients of one model on one rank. What it decides is the same on all ranks.

    synchronise: whether a forward now is one whose backward gives gradients to the optimizer.
    """

    def __init__(self, plan: Plan, rank: int, precision: Precision) -> None:
        self._plan = plan
        self._mesh = Mesh.of(plan)
        self._rank = rank
        self._precision = precision
        self._copies: dict[Tensor, _Copy] = {}
        self._accumulated: dict[Tensor, _Accumulated] = {}
        self.synchronise = True

    def follow(self, plan: Plan) -> None:
        """Before anything is held: another plan with the same layout of the optimizer's shards."""
        assert not self._copies and not self._accumulated
        self._plan, self._mesh = plan, Mesh.of(plan)

    # --- copies ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """The next forward makes all copies anew."""
        self._copies.clear()

    def is_fresh(self) -> bool:
        """Whether there are copies, and no parameter was written to since they were made."""
        if any(_versions(parameter) != copy.versions for parameter, copy in self._copies.items()):
            self.refresh()
        return bool(self._copies)

    def copies(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """The copies of these parameters; `None` if one has to be made."""
        found = [self._copies.get(parameter) for parameter in parameters]
        return None if None in found else [each.value for each in found if each is not None]

    def keep_copies(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, values, strict=True):
            self._copies[parameter] = _Copy(value, _versions(parameter))

    # --- accumulated gradients ---------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside of it have backwards that only accumulate."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A step of its own: nothing is accumulated while it runs, and everything is again afterwards."""
        kept, self._accumulated = self._accumulated, {}
        before, self.synchronise = self.synchronise, True
        try:
            yield
        finally:
            self._accumulated, self.synchronise = kept, before

    def check_no_step(self) -> None:
        """Raises StateError if an optimizer has stepped on gradients that were only accumulated."""
        for parameter, each in self._accumulated.items():
            if parameter.grad is not None and _versions(parameter) != each.versions:
                raise StateError(
                    "a parameter was changed while its gradient was only accumulated: an optimizer has stepped after "
                    "backward under model.no_sync(), where no gradient reaches it. Run the last micro-batch of a step "
                    "outside of no_sync()"
                )

    def accumulate(self, parameter: Tensor, value: Tensor) -> None:
        """Adds a gradient over G. `parameter.grad` becomes zeros that take no memory, as a mark."""
        self._forget_zeroed()
        earlier = self._accumulated.get(parameter)
        if earlier is not None:
            earlier.value = earlier.value + value  # two parameters may have been given one tensor
            earlier.versions = _versions(parameter)
            return
        mark = None
        if parameter.grad is None:
            local = local_shard(parameter.detach())
            parameter.grad = mark = as_gradient(parameter, local.new_zeros(()).expand(local.shape))
        self._accumulated[parameter] = _Accumulated(value, _versions(parameter), mark)

    def take(self, parameters: Iterable[Tensor]) -> list[Tensor | None]:
        """What was accumulated of these parameters, which is then no more."""
        self._forget_zeroed()
        taken = []
        for parameter in parameters:
            each = self._accumulated.pop(parameter, None)
            if each is not None and parameter.grad is each.mark:
                parameter.grad = None
            taken.append(None if each is None else each.value)
        return taken

    def accumulated(self) -> dict[Tensor, Tensor]:
        """What is accumulated now, by parameter."""
        return {parameter: each.value for parameter, each in self._accumulated.items()}

    def _forget_zeroed(self) -> None:
        """`zero_grad` has set `.grad` to None: what was accumulated is gone with it, as on one device."""
        for parameter in [each for each in self._accumulated if each.grad is None]:
            del self._accumulated[parameter]

    def deliver(
        self, parameters: Sequence[Tensor], values: Iterable[Tensor | None], communicators: Communicators
    ) -> list[Tensor | None]:
        """Gradients on the optimizer's shards from values over G, with what was accumulated; the copies are stale."""
        gradients: list[Tensor | None] = []
        for parameter, value in zip(parameters, values, strict=True):
            if value is None:
                gradients.append(None)
                continue
            (earlier,) = self.take([parameter])
            total = value if earlier is None else value + earlier
            gradients.append(as_gradient(parameter, self._reduced(parameter, total, communicators)))
        self.deliver_the_rest(communicators)
        self.refresh()
        return gradients

    def deliver_the_rest(self, communicators: Communicators) -> None:
        """Adds to `.grad` what was accumulated of parameters that the synchronised backward has no gradient for."""
        self._forget_zeroed()
        for parameter in list(self._accumulated):
            (value,) = self.take([parameter])
            assert value is not None
            gradient = as_gradient(parameter, self._reduced(parameter, value, communicators))
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _reduced(self, parameter: Tensor, value: Tensor, communicators: Communicators) -> Tensor:
        """As the graph `last` reduces it (passes/micro_batches.py)."""
        degrees, shape = self._plan.shard_degrees, tuple(parameter.shape)
        value = value.to(self._precision.reduces(value.dtype))
        optimizer = degrees.optimizer if shape else 1
        if shape and optimizer > degrees.grads:
            ranks = self._mesh.nested_group(self._rank, degrees.grads, optimizer)
            part = value.new_empty(value.shape[0] // len(ranks), *value.shape[1:])
            dist.reduce_scatter_tensor(part, value, group=communicators.group(group_name("grads.on", ranks)))
            value = part[: shard_shape(shape, optimizer, optimizer, self._rank)[0]].contiguous()
        if optimizer < self._plan.replicas:
            ranks = self._mesh.replica_group(self._rank, optimizer)
            dist.all_reduce(value, group=communicators.group(group_name("grads.copies", ranks)))
        return value.to(parameter.dtype)


METHODS = ("no_sync", "refresh")


def install(module: nn.Module, states: States) -> None:
    """`module.no_sync()` and `module.refresh()`, as far as the module has nothing of these names."""
    for name in METHODS:
        if not hasattr(module, name):
            setattr(module, name, getattr(states, name))


def take_methods(module: nn.Module, states: States) -> dict[str, object]:
    """What `install` has put on the module, taken off it."""
    own = [name for name in METHODS if getattr(vars(module).get(name), "__self__", None) is states]
    return {name: vars(module).pop(name) for name in own}
