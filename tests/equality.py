"""One step of a small float64 model on the virtual cluster against one device, to the last digits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.layout import whole_from_parts
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import InputKind, OutputKind, Program
from evocompile.shards import shard_of, whole_of
from evocompile.virtual import VirtualStep, virtual_step


def assert_equals_one_device(model: nn.Module, batch: Mapping[str, Tensor], plan: Plan) -> list[Program]:
    """Compares the outputs and every gradient, on every rank. Returns the ranks' programs.

    The model returns a scalar loss, or the loss and other values that need no gradient.
    """
    returned = model(**batch)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    outputs[0].backward()
    captured = capture(model.forward, model, (), dict(batch)).program
    ranks = [run_passes(captured, plan, rank) for rank in range(plan.world)]
    step = virtual_step(ranks, [_inputs(each, model, batch) for each in ranks])
    _check_outputs(ranks, step, [output.detach() for output in outputs])
    degree = plan.shard_degrees.optimizer
    for name, parameter in model.named_parameters():
        for first in range(0, plan.world, degree):
            parts = [step.gradients[first + i].get(name) for i in range(degree)]
            assert all((part is None) == (parameter.grad is None) for part in parts), name
            if parameter.grad is not None:
                gradient = whole_of(parts, len(parameter) if parameter.ndim else 1, degree)  # type: ignore[arg-type]
                _check_close(gradient, parameter.grad, f"gradient of {name}")
    return ranks


def _inputs(program: Program, model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What a rank passes: its shards of the parameters, and the whole batch."""
    degrees, values = program.plan.shard_degrees, dict(batch)
    for name, parameter in model.named_parameters():
        values[name] = shard_of(parameter.detach(), degrees.params, degrees.optimizer, program.rank)
    return [values[each.name] for each in program.inputs if each.kind is not InputKind.TANGENT]


def _check_outputs(ranks: list[Program], step: VirtualStep, expected: list[Tensor]) -> None:
    """Dynamo has an order of its own: an output is told by its shape and dtype, the loss by its gradient."""
    for index, output in enumerate(ranks[0].outputs_of(OutputKind.USER)):
        parts = [outputs[index] for outputs in step.outputs]
        if output.layout is not None:
            parts = [whole_from_parts(parts, [each.sharding for each in ranks if each.sharding], output.layout)]
        candidates = expected[:1] if output.differentiable else expected[1:]
        alike = [each for each in candidates if each.shape == output.shape and each.dtype == output.dtype]
        assert len(alike) == 1, "outputs of one shape cannot be told apart"
        for part in parts:
            _check_close(part, alike[0], f"output of shape {output.shape}")


def _check_close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda message: f"{what}: {message}")
