"""One step of a small float64 model on the virtual cluster against one device, to the last digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.layout import whole_from_parts
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import InputKind, OutputKind, Program
from evocompile.shards import shard_of, whole_of
from evocompile.virtual import VirtualStep, virtual_step


class Ran(NamedTuple):
    """outs: each rank's first output. gradients: whole, by name. programs: the ranks'. captured: at global shapes."""

    outs: list[Tensor]
    gradients: dict[str, Tensor]
    programs: list[Program]
    captured: Program

    @property
    def out(self) -> Tensor:
        return self.outs[0]


def run(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    plan: Plan,
    captured: Program | None = None,
    tangents: Sequence[Tensor] | None = None,
) -> Ran:
    """One step on all ranks; without tangents, the backward of the output's sum."""
    captured = captured or capture(model.forward, model, (), dict(batch)).program
    return step(model, batch, [run_passes(captured, plan, rank) for rank in range(plan.world)], tangents, captured)


def step(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    ranks: list[Program],
    tangents: Sequence[Tensor] | None,
    captured: Program | None = None,
) -> Ran:
    """As `run`, of programs that are there."""
    results = virtual_step(ranks, [_inputs(each, model, batch) for each in ranks], tangents)
    gradients = {}
    for name, parameter in model.named_parameters():
        if (part := _whole_gradient(results, name, parameter, ranks[0].plan)) is not None:
            gradients[name] = part
    return Ran([outputs[0] for outputs in results.outputs], gradients, ranks, captured or ranks[0])


def assert_attends_as_one_device(
    model: nn.Module, batch: Mapping[str, Tensor], plan: Plan, captured: Program | None = None
) -> Ran:
    """For a model that returns one tensor: it, and every gradient of its sum."""
    expected = model(**batch)
    expected.sum().backward()
    ran = run(model, batch, plan, captured)
    for out in ran.outs:
        _check_close(out, expected.detach(), "output")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        _check_close(ran.gradients[name], parameter.grad, f"gradient of {name}")
    return ran


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
    for name, parameter in model.named_parameters():
        gradient = _whole_gradient(step, name, parameter, plan)
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            _check_close(gradient, parameter.grad, f"gradient of {name}")
    return ranks


def _whole_gradient(step: VirtualStep, name: str, parameter: Tensor, plan: Plan) -> Tensor | None:
    """All copies of it, which agree. None: no rank has one."""
    degree, whole = plan.shard_degrees.optimizer, None
    for first in range(0, plan.world, degree):
        parts = [step.gradients[first + i].get(name) for i in range(degree)]
        if all(part is None for part in parts):
            continue
        copy = whole_of(parts, len(parameter) if parameter.ndim else 1, degree)  # type: ignore[arg-type]
        torch.testing.assert_close(copy, copy if whole is None else whole, rtol=0, atol=0)
        assert whole is not None or first == 0, f"only some replicas have a gradient of {name}"
        whole = copy
    return whole


def _inputs(program: Program, model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What a rank passes: its shards of the parameters, buffers, and the whole batch."""
    degrees, values = (
        program.plan.shard_degrees,
        {**dict(model.named_buffers()), **batch, "random_seed": torch.tensor(5)},
    )
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
