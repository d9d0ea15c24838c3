"""Weights of a model that was parallelised on `meta`: made one module at a time and cut at once, or read by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import StateError
from .load_rows import load_rows, names_on_meta, put_shard
from .meeting import group_device
from .runtime import parallel_forward
from .state import shard_tensor


def materialize(
    model: nn.Module,
    init: Callable[[nn.Module], object] | None = None,
    *,
    weights: str | Path | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Give a model that was parallelised on `meta` its memory and values; the values are those of one device.

    As `model.to_empty(device=device); model.apply(init)` on one device: `init` is called with every submodule, children
    first, and finds the module's own parameters and buffers whole, on every rank; this rank's rows of the parameters
    are kept. So at most one module's parameters are held whole, and with equal seeds all ranks draw what one device
    draws. Typical: `lambda module: getattr(module, "reset_parameters", lambda: None)()`, or the `_init_weights` of a
    transformers model.

    weights: a safetensors file, or a folder as transformers' `save_pretrained` writes it, with the names of the model's
             `state_dict`. Of every parameter that is there a rank reads its own rows, and nothing else; `init` is then
             called only for modules of which a parameter or a buffer is not there, and changes none that is.
    device: where to; default: this rank's accelerator if the process group serves it, else the CPU.
    Returns the model. Raises StateError for what is not parallelised, for parameters of other modules that `init`
    writes to, for parameters and buffers that get no values, and for weights of another shape. Weights that the model
    has no place for are named in a warning.
    """
    forward = parallel_forward(model)
    if forward is None:
        raise StateError("materialize() takes a model that parallelize() has returned")
    if init is None and weights is None:
        raise StateError("materialize() takes an init function, a file of weights, or both")
    place = torch.device(device) if device else group_device()
    loaded = load_rows(model, weights, place) if weights is not None else set()
    if init is None:
        if missing := names_on_meta(model):
            raise StateError(
                f"{weights} has no {', '.join(map(repr, missing))}: pass an init function for the modules that hold "
                "them, materialize(model, init, weights=…); for a transformers model its _init_weights"
            )
        forward.model.buffers_are_written()
        return model
    maker = _Maker(forward.plan.shard_degrees.optimizer, place, init, loaded)
    model.apply(maker.visit)
    if maker.unwritten:
        raise StateError(
            f"init has given no values to {', '.join(map(repr, _names(model, maker.unwritten)))}: extend it for the "
            "modules that hold them"
        )
    forward.model.buffers_are_written()
    return model


class _Maker:
    """Makes the tensors of the modules that it visits. unwritten: those that `init` has left as they came.

    loaded: ids of parameters and buffers that have their values already. Modules without others are passed over.
    """

    def __init__(
        self,
        degree: int,
        device: torch.device,
        init: Callable[[nn.Module], object],
        loaded: AbstractSet[int] = frozenset(),
    ) -> None:
        self._degree = degree
        self._device = device
        self._init = init
        self._loaded = loaded
        self._made: dict[int, Tensor] = {}  # buffers by the id of what was on meta
        self._replaced: list[Tensor] = []  # keeps those ids taken
        self.unwritten: list[Tensor] = []

    def visit(self, module: nn.Module) -> None:
        own = [*module._parameters.values(), *module._buffers.values()]
        if self._loaded and all(each is None or id(each) in self._loaded for each in own):
            return
        parameters = {name: each for name, each in module._parameters.items() if each is not None}
        new = [each for each in parameters.values() if each.device.type == "meta"]
        for name, each in parameters.items():
            module._parameters[name] = nn.Parameter(self._whole(each), requires_grad=each.requires_grad)
        buffers = [self._buffer(module, name) for name, each in module._buffers.items() if each is not None]
        others = [each for each in module.parameters() if isinstance(each, DTensor)]
        before = [each._version for each in others]
        with _unchanged([each for each in module._buffers.values() if id(each) in self._loaded]):
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
            if id(each) in self._loaded:
                module._parameters[name] = each
                continue
            if any(each is other for other in new) and _is_unwritten(whole):
                self.unwritten.append(each)
            put_shard(each, shard_tensor(whole, each.device_mesh, self._degree))
            module._parameters[name] = each
        self.unwritten += [
            buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and any(buffer is each for each in buffers) and _is_unwritten(buffer)
        ]

    def _whole(self, parameter: Tensor) -> Tensor:
        if parameter.device.type == "meta" or id(parameter) in self._loaded:  # what init writes to that is dropped
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


@contextmanager
def _unchanged(buffers: list[Tensor | None]) -> Iterator[None]:
    """Buffers have their values again afterwards."""
    before = [(each, each.clone()) for each in buffers if each is not None]
    yield
    for buffer, value in before:
        buffer.copy_(value)


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
