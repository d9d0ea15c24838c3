"""A model on the virtual cluster: all ranks of a plan in one process, with whole gradients out of the shards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from evocompile.capture import Captured, capture
from evocompile.layout import Sharding, whole_from_parts
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import InputKind, OutputKind, Program
from evocompile.shards import shard_of, whole_of
from evocompile.virtual import virtual_step
from tests.models.zoo import Case


@cache
def captured(case: Case) -> tuple[nn.Module, Captured]:
    """The case's model and its training step, captured once for all plans."""
    model = case.build()
    return model, capture(model.forward, model, (), case.inputs())


@dataclass
class VirtualModel:
    """programs: every rank's program. parameters: whole, by every name; trained in place by the tests."""

    programs: list[Program]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    degrees: Shard
    seed: int = 0

    def step(self, batch: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor], list[list[Tensor]]]:
        """(every rank's loss, whole gradients by name, every rank's user outputs).

        Asserts that the copies of a shard agree.
        """
        inputs = [self._inputs(program, batch) for program in self.programs]
        result = virtual_step(self.programs, inputs, self._tangents())
        users = self.programs[0].outputs_of(OutputKind.USER)
        loss = next(index for index, output in enumerate(users) if output.differentiable)
        losses = [outputs[loss] for outputs in result.outputs]
        gradients = {}
        for name in result.gradients[0]:
            copies = []
            rows = self.parameters[name].shape[:1]
            for first in range(0, len(self.programs), self.degrees.optimizer):
                parts = [result.gradients[first + i][name] for i in range(self.degrees.optimizer)]
                assert all(isinstance(part, Tensor) for part in parts)
                copies.append(whole_of(parts, rows[0] if rows else 1, self.degrees.optimizer))
            for copy in copies:
                torch.testing.assert_close(copy, copies[0], rtol=0, atol=0)
            gradients[name] = copies[0]
        return losses, gradients, result.outputs

    def _tangents(self) -> list[Tensor]:
        """What `loss.backward()` starts from: one for the loss (the first such output), zero for the others."""
        tangents = self.programs[0].inputs_of(InputKind.TANGENT)
        return [torch.full(each.shape, float(i == 0), dtype=each.dtype) for i, each in enumerate(tangents)]

    def whole_output(self, outputs: list[list[Tensor]], index: int) -> Tensor:
        """User output `index`, put together from all ranks' parts."""
        layout = self.programs[0].outputs_of(OutputKind.USER)[index].layout
        if layout is None:
            return outputs[0][index]
        shardings = [program.sharding for program in self.programs if isinstance(program.sharding, Sharding)]
        return whole_from_parts([each[index] for each in outputs], shardings, layout)

    def _inputs(self, program: Program, batch: dict[str, Tensor]) -> list[Tensor]:
        values: list[Tensor] = []
        for each in program.inputs:
            if each.kind is InputKind.PARAMETER:
                whole = self.parameters[each.name]
                values.append(shard_of(whole, self.degrees.params, self.degrees.optimizer, program.rank))
            elif each.kind is InputKind.BUFFER:
                values.append(self.buffers[each.name])
            elif each.kind is InputKind.USER:
                values.append(batch[each.name])
            elif each.kind is InputKind.SEED:
                values.append(torch.tensor(self.seed))
        return values


def virtual_model(case: Case, plan: Plan) -> VirtualModel:
    """The case's model under a plan, with parameters of its own."""
    model, capture_ = captured(case)
    names: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    return VirtualModel(
        [run_passes(capture_.program, plan, rank) for rank in range(plan.world)],
        {name: parameter.detach().clone() for name, parameter in names.items()},
        dict(model.named_buffers(remove_duplicate=False)),
        plan.shard_degrees,
    )
