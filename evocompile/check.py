"""`parallelize(check=True)`: one step of a call against the plain model with its whole weights, on every rank."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import VerificationError
from .lazy import LazyOutput
from .program import InputKind, Program
from .state import gather_from_ranks
from .torch_private import map_leaves, tensor_slots

if TYPE_CHECKING:
    from .runtime import ParallelCall
    from .variant import Variant

# What an error may be, relative to the largest entry, where the program computes in this precision.
TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-9}
_FLOOR = 1e-3  # a gradient is not asked to be better than this share of the model's largest allows


def check_against_one_device(
    call: ParallelCall, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise VerificationError, on all ranks alike, if a step of `variant` differs from one of the eager model.

    Compared are outputs, gradients and updated buffers; parameters, their `.grad` and buffers are left as they were.
    Every rank holds the whole weights, gradients and activations while it runs.
    """
    if variant.program.inputs_of(InputKind.SEED):
        warnings.warn(
            "check=True: this call draws random numbers (dropout), which differ from one device's, so it was not "
            "compared. Call model.eval(), or set the probabilities to 0, for the check",
            stacklevel=4,
        )
        return
    module = call.model.module
    whole_call = (args, kwargs)
    if variant.parts is not None:
        whole_call = call.model.local_inputs.whole_call(args, kwargs, variant.parts)
    computes = call.model.precision.computes
    whole_call = map_leaves(
        lambda leaf: leaf.to(computes(leaf.dtype)) if isinstance(leaf, Tensor) else leaf, *whole_call
    )
    with _whole_state(module, computes), call.as_on_one_device():
        expected = _step(module, call.original(*whole_call[0], **whole_call[1]))
    with _buffers_kept(module), call.model.states.set_aside():
        found = _step(module, variant(args, kwargs))
    problem = _difference(found, expected, TOLERANCES[precision(variant.captured.program)])
    problems = [each for each in gather_from_ranks(problem) if each is not None]
    if problems:
        raise VerificationError(
            f"check=True: {problem or problems[0]}. One device's eager model is the reference, so this is a defect of "
            "evocompile or numerically unstable code: please report it with the model and the plan"
        )


@dataclass(frozen=True)
class _Results:
    """Whole tensors by name: "output 0", a parameter's name, a buffer's name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _step(module: nn.Module, returned: Any) -> _Results:
    """The results of a call that has returned, and of its backward."""
    outputs = list(tensors_in(returned))
    parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
    wanted = [each for each in outputs if each.requires_grad]
    wanted = [each for each in wanted if not each.ndim] or wanted
    gradients: list[Tensor | None] = [None] * len(parameters)
    if wanted:
        tangents = [torch.linspace(0.5, 1, each.numel()).to(each).reshape(each.shape) for each in wanted]
        gradients = list(torch.autograd.grad(wanted, list(parameters.values()), tangents, allow_unused=True))
    return _Results(
        {f"output {index}": _plain(each) for index, each in enumerate(outputs)},
        {name: None if each is None else _plain(each) for name, each in zip(parameters, gradients, strict=True)},
        {name: _plain(each) for name, each in module.named_buffers()},
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def _plain(tensor: Tensor) -> Tensor:
    """A whole copy on the CPU; floating-point numbers as float64."""
    tensor = tensor.detach()
    if isinstance(tensor, LazyOutput):
        tensor = tensor.whole()
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()
    return whole.double() if whole.is_floating_point() else whole


@contextmanager
def _whole_state(module: nn.Module, computes: Callable[[torch.dtype], torch.dtype]) -> Iterator[None]:
    """Copies of the whole parameters, and of buffers and other tensors, in place of the model's own.

    computes: the type in which a parameter of a type takes part in the computation.
    """
    slots = [(slot, slot.tensor) for slot in tensor_slots(module)]
    copies: dict[Tensor, Tensor] = {}
    try:
        for slot, tensor in slots:
            assert tensor is not None
            if tensor not in copies:
                whole = tensor.detach()
                whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()
                if slot.is_parameter:
                    whole = nn.Parameter(whole.to(computes(whole.dtype)), tensor.requires_grad)
                copies[tensor] = whole
            slot.holder[slot.key] = copies[tensor]
        yield
    finally:
        for slot, tensor in slots:
            slot.holder[slot.key] = tensor


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Buffers have their values again afterwards."""
    buffers = [slot.tensor for slot in tensor_slots(module) if not slot.is_parameter]
    before = [buffer.detach().clone() for buffer in buffers if buffer is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                assert buffer is not None
                buffer.copy_(value)


def precision(program: Program) -> torch.dtype:
    """The least precise floating-point type in which a captured program computes."""
    assert program.joint is not None
    values = [node.meta.get("val") for node in program.joint.graph.nodes]
    found = {value.dtype for value in values if isinstance(value, Tensor)}
    return next((dtype for dtype in TOLERANCES if dtype in found), torch.float64)


def _difference(found: _Results, expected: _Results, tolerance: float) -> str | None:
    """A sentence about the worst value of the first kind in which they differ."""
    names = [name for name, gradient in expected.gradients.items() if gradient is not None]
    other = [name for name, gradient in found.gradients.items() if gradient is not None]
    if names != other:
        return f"gradients exist for {sorted({*names} ^ {*other})} in only one of the two runs"
    if len(found.outputs) != len(expected.outputs):
        return f"the call returns {len(found.outputs)} tensors, and {len(expected.outputs)} on one device"
    largest = max((_largest(each) for each in expected.gradients.values() if each is not None), default=0.0)
    return (
        _worst("", found.outputs, expected.outputs, tolerance)
        or _worst("the gradient of ", found.gradients, expected.gradients, tolerance, _FLOOR * largest)
        or _worst("buffer ", found.buffers, expected.buffers, tolerance)
    )


def _worst(
    kind: str, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, floor: float = 0.0
) -> str | None:
    ratios = {}
    for name, reference in expected.items():
        if reference is None:
            continue
        if found[name].shape != reference.shape or found[name].dtype != reference.dtype:
            return f"{kind}{name!r} is {tuple(found[name].shape)}, and {tuple(reference.shape)} on one device"
        error = _error(found[name], reference)
        if error:
            ratios[name] = error / max(_largest(reference), floor, torch.finfo(torch.float64).tiny)
    if not ratios or max(ratios.values()) <= tolerance:
        return None
    name = max(ratios, key=ratios.__getitem__)
    return (
        f"{kind}{name!r} differs from one device by {ratios[name]:.1e} of its largest entry "
        f"({_largest(expected[name]):.3g}), where {tolerance:.0e} is allowed; "
        f"{sum(ratio > tolerance for ratio in ratios.values())} of {len(expected)} differ by more than that"
    )


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where only one is a number."""
    same = (found == expected) | ((found != found) & (expected != expected))
    if same.all():
        return 0.0
    error = (found - expected if found.is_floating_point() else found.double() - expected.double())[~same].abs()
    return float(error.nan_to_num(nan=float("inf")).max())


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor.double()
    return float(finite.abs().max()) if finite.numel() else 0.0
