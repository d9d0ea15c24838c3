"""When a captured program may be used again: everything that the capture depended on is unchanged.

Tensors are checked here, by shape, dtype, device and requires_grad: at capture they are fakes of the global shape,
later real inputs and sharded parameters. All else that the forward read (attributes, training flags, Python
arguments, grad mode, autocast) is checked by Dynamo's own guards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
class Constant:
    """A buffer whose values a program is for, as a mask that the model keeps."""

    slot: Slot
    values: Tensor

    def __post_init__(self) -> None:
        self._seen = self._present()

    def _present(self) -> tuple[int, int] | None:
        tensor = self.slot.tensor
        return None if tensor is None else (id(tensor), tensor._version)

    def holds(self) -> bool:
        """Compared again only if the tensor was replaced or written to."""
        tensor = self.slot.tensor
        if tensor is None or self._present() != self._seen:
            if tensor is None or tensor.shape != self.values.shape or not torch.equal(tensor.cpu(), self.values):
                return False
            self._seen = self._present()
        return True


@dataclass
class Guards:
    """The conditions under which one capture holds. Made before the module's tensors are replaced by fakes.

    modules: every submodule: its path, where it is held, and what it was.
    """

    inputs: dict[str, TensorSpec]
    arguments: list[str]
    state: list[tuple[Slot, TensorSpec | None]]
    modules: list[tuple[str, Mapping[str, nn.Module | None], str, nn.Module | None]]
    dynamo: Any = field(default=None, init=False)
    constants: list[Constant] = field(default_factory=list, init=False)

    @staticmethod
    def of_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guards:
        state = [(slot, TensorSpec.of_state(slot.tensor)) for slot in tensor_slots(module)]
        modules = [
            (f"{prefix}.{key}" if prefix else key, parent._modules, key, child)
            for prefix, parent in module.named_modules()
            for key, child in parent._modules.items()
        ]
        return Guards(input_specs(args, kwargs), _argument_names(args, kwargs), state, modules)

    def add_dynamo(self, dynamo: DynamoGraph, replaced: Sequence[Tensor]) -> None:
        """Dynamo's guards; to be called while the fakes are still in place."""
        self.dynamo = build_guards(dynamo, replaced)

    def add_constants(self, module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
        """Takes note of the values of these buffers, of those that have some; returns them, on the CPU."""
        slots = [slot for slot in tensor_slots(module) if slot.name in names]
        self.constants = [
            Constant(slot, slot.tensor.detach().cpu().clone())
            for slot in slots
            if slot.tensor is not None and slot.tensor.device.type != "meta"
        ]
        return {each.slot.name: each.values for each in self.constants}

    def hold(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            input_specs(args, kwargs) == self.inputs
            and all(holder.get(key) is child for _, holder, key, child in self.modules)
            and all(TensorSpec.of_state(slot.tensor) == spec for slot, spec in self.state)
            and all(each.holds() for each in self.constants)
            and guards_hold(self.dynamo, {"forward": forward, "args": args, "kwargs": kwargs})
        )

    def differ(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, bool]:
        """Whether a call passes other tensors, and whether other arguments beside them: how far it is from this one."""
        return input_specs(args, kwargs) != self.inputs, _argument_names(args, kwargs) != self.arguments

    def mismatch(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """One sentence that names the first thing that changed; empty if nothing did."""
        now = input_specs(args, kwargs)
        for name in [*self.inputs, *now]:
            if now.get(name) != self.inputs.get(name):
                was = self.inputs.get(name, "no tensor")
                return f"input {name!r} changed: {was} at capture, {now.get(name, 'no tensor')} now"
        for name, holder, key, child in self.modules:
            if holder.get(key) is not child:
                return f"the module {name!r} was replaced by another"
        for slot, spec in self.state:
            if TensorSpec.of_state(slot.tensor) != spec:
                return f"{slot.name!r} changed: {spec} at capture, {TensorSpec.of_state(slot.tensor)} now"
        for constant in self.constants:
            if not constant.holds():
                return f"the buffer {constant.slot.name!r}, which an attention mask reads, has other values"
        failing = failing_guard(self.dynamo, {"forward": forward, "args": args, "kwargs": kwargs})
        if failing is None:
            return ""
        arguments = _argument_names(args, kwargs)
        for name in [*self.arguments, *arguments]:
            if (name in self.arguments) != (name in arguments):
                was = "not passed at capture, but is now" if name in arguments else "passed at capture, and is not now"
                return f"argument {name!r} was {was}"
        return _sentence(failing, bool(args) and isinstance(args[0], nn.Module))


def _argument_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The values of a call that are no tensors, by path."""
    return [name for name, leaf in leaves_with_names(args, kwargs) if not isinstance(leaf, Tensor)]


def _sentence(guard: str, model_comes_first: bool) -> str:
    """Dynamo's text of a guard in the user's terms. model_comes_first: as argument of a loss function."""
    state = re.match(r"GLOBAL_STATE changed: (.*)", guard)
    if state:
        return f"the global state of torch changed: {state[1].strip()}"
    condition, _, comment = guard.partition("  # ")
    where = re.search(r"# (\S+:\d+ in \w+)", comment)
    read = f" (read at {where[1]})" if where else ""
    text = readable_source(condition.strip())
    text = re.sub(r"___check_type_id\((.+), \d+\), type=<class '(.+)'>", r"type(\1) is \2", text)
    text = re.sub(r"___check_obj_id\((.+), \d+\).*", r"\1 is the object that it was", text)
    if model_comes_first:
        text = text.replace("args[0]", "model")
    return f"`{text}` held at capture and does not now{read}"


def readable_source(source: str) -> str:
    """ "L['forward'].__self__._modules['d'].training" as the user would write it: "model.d.training"."""
    source = source.replace("L['forward'].__self__", "model").replace("L['args']", "args")
    source = re.sub(r"L\['kwargs'\]\['(\w+)'\]", r"\1", source).replace("L['kwargs']", "kwargs")
    source = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    return re.sub(r"G\['__import_(\w+)'\]", lambda match: match[1].replace("_dot_", "."), source)
