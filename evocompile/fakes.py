"""Fakes in place of a call's tensors: shape, dtype and device, but no memory, so that any model can be captured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .precision import Precision
from .program import InputKind
from .torch_private import leaves_with_names, map_leaves, new_fake_mode, tensor_slots


@dataclass(frozen=True)
class FakeCall:
    """A call with fakes in place of its tensors.

    replaced: every fake, with what it stands for and its name.
    held: the dtype of what a fake stands for, where the call computes in another one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    replaced: dict[Tensor, tuple[InputKind, str]]
    held: dict[Tensor, torch.dtype]


@contextmanager
def fake_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None,
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
) -> Iterator[FakeCall]:
    """Puts fakes of the global shape into the module and into copies of args and kwargs, and takes them out again.

    shapes: the global shapes of inputs that are not whole, by name.
    precision: says in which type parameters and inputs take part.
    A tied parameter is one fake; an input tensor that is passed twice is two, or Dynamo would merge the two inputs.
    Nothing is traced on `meta`: operators without a kernel for it (`nll_loss`) silently lose their gradient there.
    """
    mode = new_fake_mode()
    slots = [(slot, slot.tensor) for slot in tensor_slots(module)]
    replaced: dict[Tensor, tuple[InputKind, str]] = {}
    held: dict[Tensor, torch.dtype] = {}
    placed = [leaf for _, leaf in leaves_with_names(args, kwargs)] + [tensor for _, tensor in slots]
    place = _real_device(placed)

    def fake(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        where = device or (place if tensor.device.type == "meta" else tensor.device)
        with mode:
            return torch.empty(shape, dtype=dtype, device=where)

    names = iter(leaves_with_names(args, kwargs))

    def fake_input(leaf: Any) -> Any:
        name, _ = next(names)
        if not isinstance(leaf, Tensor):
            return leaf
        stand_in = fake(leaf, shapes.get(name, tuple(leaf.shape)), precision.computes(leaf.dtype))
        replaced[stand_in] = (InputKind.USER, name)
        return stand_in

    fake_args, fake_kwargs = map_leaves(fake_input, args, kwargs)
    stand_ins: dict[Tensor, Tensor] = {}
    try:
        for slot, tensor in slots:
            assert tensor is not None
            if tensor not in stand_ins:
                dtype = precision.computes(tensor.dtype) if slot.is_parameter else tensor.dtype
                stand_in = fake(tensor, tuple(tensor.shape), dtype).requires_grad_(tensor.requires_grad)
                if slot.is_parameter:
                    stand_in = nn.Parameter(stand_in.detach(), requires_grad=tensor.requires_grad)
                    if dtype != tensor.dtype:
                        held[stand_in] = tensor.dtype
                stand_ins[tensor] = stand_in
                replaced[stand_in] = (InputKind.PARAMETER if slot.is_parameter else InputKind.BUFFER, slot.name)
            slot.holder[slot.key] = stand_ins[tensor]
        yield FakeCall(fake_args, fake_kwargs, replaced, held)
    finally:
        for slot, tensor in slots:
            slot.holder[slot.key] = tensor


def _real_device(values: Sequence[Any]) -> torch.device:
    """The device of the first tensor that has memory, else the accelerator, else the CPU."""
    for value in values:
        if isinstance(value, Tensor) and value.device.type != "meta":
            return value.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
