"""A call of a plan of several micro-batches: forward and backward of each, one after another, in the call's forward.

So that a rank holds the activations of one micro-batch only, the backward of each follows its forward at once, from a
tangent of one; the loss being a scalar, the gradients need only be scaled when its tangent comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collectives import Communicators
from .mesh import group_ranks
from .torch_private import take_saved_tensors

if TYPE_CHECKING:
    from .variant import Variant


def run_micro_batches(variants: Sequence[Variant], flat: Sequence[Tensor], communicators: Communicators) -> list[Any]:
    """The loss of the batch. variants: one for each micro-batch. flat: the call's inputs, for all of them."""
    call = _Call(variants, flat, communicators, variants[0].states.synchronise)
    if variants[0].program.backward is None:
        with torch.no_grad():
            return [call.run()]
    return [_MicroStep.apply(call, *(flat[index] for index in variants[0].trained))]  # type: ignore[no-untyped-call]


@dataclass
class _Call:
    """One call. left: what its micro-batches leave of each gradient, over G, for a tangent of one."""

    variants: Sequence[Variant]
    flat: Sequence[Tensor]
    communicators: Communicators
    synchronise: bool
    left: list[Tensor | None] = field(default_factory=list)

    def run(self) -> Tensor:
        losses = []
        for variant in self.variants:
            (loss,), saved = variant.run_forward(self.flat)
            losses.append(loss)
            if variant.program.backward is not None:
                left = variant.run_inner(saved, [torch.ones_like(loss)], loss.device.type)
                if self.left:
                    _add(self.left, left)
                else:
                    self.left = left
        total = torch.stack(losses).sum(0)
        micro = self.variants[0].program.micro
        assert micro is not None
        if len(group_ranks(micro.loss_group)) > 1:
            dist.all_reduce(total, group=self.communicators.group(micro.loss_group))
        return total


def _add(totals: list[Tensor | None], values: list[Tensor | None]) -> None:
    """Adds to the totals, one after the other, so that at most one is held twice; `values` is emptied."""
    values.reverse()
    for i in range(len(totals)):
        value = values.pop()
        if value is not None:
            earlier, totals[i] = totals[i], None
            totals[i] = value if earlier is None else earlier + value


def _scaled(gradients: list[Tensor], received: Sequence[bool], tangent: Tensor) -> Iterator[Tensor | None]:
    """The gradients for a tangent, one after the other, None where there is none; `gradients` is emptied."""
    gradients.reverse()
    for is_there in received:
        if is_there:
            gradient = gradients.pop()
            yield gradient * tangent.to(gradient.dtype)
        else:
            yield None


class _MicroStep(torch.autograd.Function):
    """The loss as a function of the trained parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.parameters = call, parameters
        total = call.run()
        ctx.received = [each is not None for each in call.left]
        ctx.save_for_backward(*(each for each in call.left if each is not None))
        call.left.clear()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        call, states = ctx.call, ctx.call.variants[0].states
        scaled = _scaled(take_saved_tensors(ctx), ctx.received, tangent)
        if call.synchronise:
            gradients = states.deliver(ctx.parameters, scaled, call.communicators)
            call.variants[0].watch.backward_ran()
            return (None, *gradients)
        for parameter, value in zip(ctx.parameters, scaled, strict=True):
            if value is not None:
                states.accumulate(parameter, value)
        return (None, *[None] * len(ctx.parameters))
