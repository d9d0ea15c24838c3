"""When a captured program may be used again: everything that the capture depended on is unchanged.

Tensors are checked here, by shape, dtype, device and requires_grad: at capture they are fakes of the global shape,
later real inputs and sharded parameters. All else that the forward read (attributes, training flags, Python
arguments, grad mode, autocast) is checked by Dynamo's own guards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .torch_private import DynamoGraph, Slot, build_guards, failing_guard, guards_hold, leaves_with_names, tensor_slots


@dataclass(frozen=True)
class TensorSpec:
    """What of a tensor a capture depends on. `device` is `None` for parameters and buffers: they may move."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device | None = None

    @staticmethod
    def of_input(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device)

    @staticmethod
    def of_state(tensor: Tensor | None) -> TensorSpec | None:
        return None if tensor is None else TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        device = f" on {self.device}" if self.device else ""
        return f"{self.dtype} {self.shape}{device}, requires_grad={self.requires_grad}"


def input_specs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, TensorSpec]:
    """The tensors of a call by path."""
    return {
        name: TensorSpec.of_input(leaf) for name, leaf in leaves_with_names(args, kwargs) if isinstance(leaf, Tensor)
    }


@dataclass
class Guards:
    """The conditions under which one capture holds. Made before the module's tensors are replaced by fakes."""

    inputs: dict[str, TensorSpec]
    state: list[tuple[Slot, TensorSpec | None]]
    dynamo: Any = field(default=None, init=False)

    @staticmethod
    def of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guards:
        state = [(slot, TensorSpec.of_state(slot.tensor)) for slot in tensor_slots(module)]
        return Guards(input_specs(args, kwargs), state)

    def add_dynamo(self, dynamo: DynamoGraph, replaced: Sequence[Tensor]) -> None:
        """Dynamo's guards; to be called while the fakes are still in place."""
        self.dynamo = build_guards(dynamo, replaced)

    def hold(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            input_specs(args, kwargs) == self.inputs
            and all(TensorSpec.of_state(slot.tensor) == spec for slot, spec in self.state)
            and guards_hold(self.dynamo, {"forward": forward, "args": args, "kwargs": kwargs})
        )

    def mismatch(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """One sentence that names the first thing that changed; empty if nothing did."""
        now = input_specs(args, kwargs)
        for name in [*self.inputs, *now]:
            if now.get(name) != self.inputs.get(name):
                was = self.inputs.get(name, "no tensor")
                return f"input {name!r} changed: {was} at capture, {now.get(name, 'no tensor')} now"
        for slot, spec in self.state:
            if TensorSpec.of_state(slot.tensor) != spec:
                return f"{slot.name!r} changed: {spec} at capture, {TensorSpec.of_state(slot.tensor)} now"
        failing = failing_guard(self.dynamo, {"forward": forward, "args": args, "kwargs": kwargs})
        return "" if failing is None else _sentence(failing)


def _sentence(guard: str) -> str:
    """Dynamo's text of a guard in the user's terms."""
    state = re.match(r"GLOBAL_STATE changed: (.*)", guard)
    if state:
        return f"the global state of torch changed: {state[1].strip()}"
    condition, _, comment = guard.partition("  # ")
    where = re.search(r"# (\S+:\d+ in \w+)", comment)
    read = f" (read at {where[1]})" if where else ""
    return f"`{readable_source(condition.strip())}` held at capture and does not now{read}"


def readable_source(source: str) -> str:
    """ "L['forward'].__self__._modules['d'].training" as the user would write it: "model.d.training"."""
    source = source.replace("L['forward'].__self__", "model").replace("L['args']", "args")
    source = re.sub(r"L\['kwargs'\]\['(\w+)'\]", r"\1", source).replace("L['kwargs']", "kwargs")
    source = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    return re.sub(r"G\['__import_(\w+)'\]", lambda match: match[1].replace("_dot_", "."), source)
