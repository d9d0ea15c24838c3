"""Training on the virtual cluster: each rank holds its shards of parameters, gradients and optimizer state, and a plain
torch optimizer trains what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evocompile.passes.micro_batches import is_copied
from evocompile.program import Input, InputKind, OutputKind, Program
from evocompile.shards import shard_of, whole_of
from evocompile.virtual import run_virtual

Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class VirtualTraining:
    """The loop that the runtime runs, on all ranks together: refresh, accumulate at G, reduce on to O.

    shards:      by rank and name: the optimizer's shard, over O.
    copies:      by rank and name: what the rank computes with, over P; empty when it has to be refreshed.
    accumulated: by rank, what micro-batches have left of each gradient, over G.
    """

    def __init__(self, programs: Sequence[Program], whole: dict[str, Tensor], make: MakeOptimizer) -> None:
        self.programs = programs
        self.rows = {name: len(value) if value.ndim else 1 for name, value in whole.items()}
        self.degrees = programs[0].plan.shard_degrees
        optimizer = self.degrees.optimizer
        self.shards = [
            {
                name: nn.Parameter(shard_of(value, optimizer, optimizer, each.rank).clone())
                for name, value in whole.items()
            }
            for each in programs
        ]
        self.optimizers = [make(shards.values()) for shards in self.shards]
        self.copies: list[dict[str, Tensor]] = [{} for _ in programs]
        self.accumulated: list[list[Tensor]] = [[] for _ in programs]

    def micro_batch(self, batch: Batch, *, synchronise: bool) -> Tensor:
        """The loss of one micro-batch, after its backward."""
        copied = [[each.name for each in program.inputs if is_copied(program, each)] for program in self.programs]
        first = any(copied) and not any(self.copies)
        graphs = [program.first if first else program.forward for program in self.programs]
        given = [self._inputs(program, batch, first) for program in self.programs]
        results = run_virtual([graph for graph in graphs if graph is not None], given, where="forward.")
        if first:
            for names, copies, result in zip(copied, self.copies, results, strict=True):
                copies.update(zip(names, result[len(result) - len(names) :], strict=True))
                del result[len(result) - len(names) :]
        program = self.programs[0]
        users, updates = program.outputs_of(OutputKind.USER), program.outputs_of(OutputKind.BUFFER)
        loss = next(index for index, output in enumerate(users) if output.differentiable)
        losses = [result[loss] for result in results]
        assert all(torch.equal(each, losses[0]) for each in losses)
        self._backward([result[len(users) + len(updates) :] for result in results], synchronise)
        return losses[0]

    def _inputs(self, program: Program, batch: Batch, first: bool) -> list[Tensor]:
        def value(each: Input) -> Tensor:
            if each.kind is not InputKind.PARAMETER:
                return batch[each.name]
            held = self.copies[program.rank] if is_copied(program, each) and not first else self.shards[program.rank]
            return held[each.name].detach()

        return [value(each) for each in program.inputs if each.kind is not InputKind.TANGENT]

    def _backward(self, saved: list[list[Any]], synchronise: bool) -> None:
        tangents = [torch.ones(each.shape, dtype=each.dtype) for each in self.programs[0].inputs_of(InputKind.TANGENT)]
        given = [[*own, *tangents] for own in saved]
        if not synchronise:
            results = run_virtual([each.inner or each.backward for each in self.programs], given, where="inner.")
            for rank, result in enumerate(results):
                left = [each for each in result if each is not None]
                earlier = self.accumulated[rank]
                self.accumulated[rank] = [a + b for a, b in zip(earlier, left, strict=True)] if earlier else left
            return
        accumulated = self.accumulated if any(self.accumulated) else None
        graphs = [each.last if accumulated and each.last is not None else each.backward for each in self.programs]
        if accumulated and self.programs[0].last is not None:
            given = [[*own, *earlier] for own, earlier in zip(given, accumulated, strict=True)]
        results = run_virtual(graphs, given, where="backward.")
        for program, result, shards in zip(self.programs, results, self.shards, strict=True):
            left = iter(self.accumulated[program.rank] if accumulated and program.last is None else [])
            for output, gradient in zip(program.outputs_of(OutputKind.GRADIENT), result, strict=True):
                if gradient is None:
                    continue
                total = gradient + next(left) if program.last is None and accumulated else gradient
                held = shards[output.name].grad
                shards[output.name].grad = total if held is None else held + total
        self.accumulated = [[] for _ in self.programs]
        self.copies = [{} for _ in self.programs]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters; asserts that the copies of every shard are equal."""
        return {name: self._whole([each[name].detach() for each in self.shards], name) for name in self.shards[0]}

    def gradients(self) -> dict[str, Tensor]:
        held = {name: [each[name].grad for each in self.shards] for name in self.shards[0]}
        return {name: self._whole(each, name) for name, each in held.items() if each[0] is not None}

    def _whole(self, parts: list[Any], name: str) -> Tensor:
        degree = self.degrees.optimizer
        copies = [whole_of(parts[i : i + degree], self.rows[name], degree) for i in range(0, len(parts), degree)]
        for copy in copies:
            assert torch.equal(copy, copies[0]), name
        return copies[0]
