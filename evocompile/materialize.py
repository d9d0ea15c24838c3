"""Weights of a model that was parallelised on `meta`: made one module at a time, and cut at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import StateError
from .meeting import group_device
from .runtime import parallel_forward
from .state import shard_tensor


def materialize(
    model: nn.Module, init: Callable[[nn.Module], object], *, device: torch.device | str | None = None
) -> nn.Module:
    """Give a model that was parallelised on `meta` its memory and values; the values are those of one device.

    As `model.to_empty(device=device); model.apply(init)` on one device: `init` is called with every submodule, children
    first, and finds the module's own parameters and buffers whole, on every rank; this rank's rows of the parameters
    are kept. So at most one module's parameters are held whole, and with equal seeds all ranks draw what one device
    draws. Typical: `lambda module: getattr(module, "reset_parameters", lambda: None)()`, or the `_init_weights` of a
    transformers model.

    device: where to; default: this rank's accelerator if the process group serves it, else the CPU.
    Returns the model. Raises StateError for what is not parallelised, for parameters of other modules that `init`
    writes to, and for parameters and buffers that it leaves without values.
    """
    forward = parallel_forward(model)
    if forward is None:
        raise StateError("materialize() takes a model that parallelize() has returned")
    maker = _Maker(forward.plan.shard_degrees.params, torch.device(device) if device else group_device(), init)
    model.apply(maker.visit)
    if maker.unwritten:
        raise StateError(
            f"init has given no values to {', '.join(map(repr, _names(model, maker.unwritten)))}: extend it for the "
            "modules that hold them"
        )
    forward.model.buffers_are_written()
    return model


class _Maker:
    """Makes the tensors of the modules that it visits. unwritten: those that `init` has left as they came."""

    def __init__(self, degree: int, device: torch.device, init: Callable[[nn.Module], object]) -> None:
        self._degree = degree
        self._device = device
        self._init = init
        self._made: dict[int, Tensor] = {}  # buffers by the id of what was on meta
        self._replaced: list[Tensor] = []  # keeps those ids taken
        self.unwritten: list[Tensor] = []

    def visit(self, module: nn.Module) -> None:
        parameters = {name: each for name, each in module._parameters.items() if each is not None}
        new = [each for each in parameters.values() if each.device.type == "meta"]
        for name, each in parameters.items():
            module._parameters[name] = nn.Parameter(self._whole(each), requires_grad=each.requires_grad)
        buffers = [self._buffer(module, name) for name, each in module._buffers.items() if each is not None]
        others = [each for each in module.parameters() if isinstance(each, DTensor)]
        before = [each._version for each in others]
        self._init(module)
        for each, version in zip(others, before, strict=True):
            if each._version != version:
                raise StateError(
                    f"init has written to a parameter of a submodule of {type(module).__name__}, which is a shard by "
                    "now: let it write to the parameters of the module that it is called with, and only to them"
                )
        for name, each in parameters.items():
            whole = module._parameters[name]
            assert whole is not None and isinstance(each, DTensor)
            if any(each is other for other in new) and _is_unwritten(whole):
                self.unwritten.append(each)
            shard = shard_tensor(whole, each.device_mesh, self._degree)
            attributes = dict(vars(each))
            torch.utils.swap_tensors(each, nn.Parameter(shard, requires_grad=each.requires_grad))
            vars(each).update(attributes)
            module._parameters[name] = each
        self.unwritten += [
            buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and any(buffer is each for each in buffers) and _is_unwritten(buffer)
        ]

    def _whole(self, parameter: Tensor) -> Tensor:
        if parameter.device.type == "meta":
            return _marked(parameter, self._device)
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            return parameter.full_tensor().clone()  # tied, and made with another module

    def _buffer(self, module: nn.Module, name: str) -> Tensor | None:
        """The buffer, if it is a new one."""
        buffer = module._buffers[name]
        assert buffer is not None
        if buffer.device.type != "meta":
            return None
        known = self._made.get(id(buffer))
        if known is None:
            self._made[id(buffer)] = _marked(buffer, self._device)
            self._replaced.append(buffer)
        module._buffers[name] = self._made[id(buffer)]
        return self._made[id(buffer)] if known is None else None


def _marked(like: Tensor, device: torch.device) -> Tensor:
    """A tensor that shows whether it was written to: not a number, or the least one."""
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.full(like.shape, float("nan"), dtype=like.dtype, device=device)
    least = False if like.dtype is torch.bool else torch.iinfo(like.dtype).min
    return torch.full(like.shape, least, dtype=like.dtype, device=device)


def _is_unwritten(tensor: Tensor) -> bool:
    if not tensor.numel() or tensor.dtype is torch.bool:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.detach().isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())


def _names(model: nn.Module, tensors: Iterable[Any]) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, each in named if any(each is tensor for tensor in tensors)]
