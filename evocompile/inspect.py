"""inspect: everything that the compiler knows about a program, as text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .accounting import states_table
from .capture import capture
from .errors import PlanError
from .memory import Memory, step_memory
from .pipeline import run_passes
from .plan import Plan
from .precision import Precision
from .printing import attention_table, collectives_table, notes_table, summary
from .program import Program
from .recompute_auto import fitted
from .runtime import parallel_forward


@dataclass(frozen=True)
class Inspection:
    """What `inspect` returns: print it for a summary, look at `stages` for the graphs.

    stages: the graph after every pass, as text, by the pass' name.
    memory: the bytes of a step before it runs: the peak by term, its largest tensors, and a curve over all nodes.
    """

    program: Program
    stages: dict[str, str]

    @functools.cached_property
    def memory(self) -> Memory:
        """What a step holds on this rank, with the optimizer's state of Adam."""
        count = self.program.micro.plan.microbatches if self.program.micro is not None else 1
        return step_memory([self.program] * count)

    def __str__(self) -> str:
        parts = [
            summary(self.program),
            states_table(self.program),
            str(self.memory),
            attention_table(self.program),
            collectives_table(self.program),
            notes_table(self.program),
        ]
        parts.append(f"graphs, as text in .stages: {', '.join(self.stages)}")
        return "\n\n".join(part for part in parts if part)


def inspect(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    plan: Plan | None = None,
    world: int | None = None,
    rank: int = 0,
    precision: Precision | torch.dtype | str | None = None,
    memory: int | None = None,
) -> Inspection:
    """The program of one rank, after every pass. Needs no process group and no memory for the weights.

    model:  any module, or one that was parallelized.
    inputs: keyword arguments (a mapping) or positional arguments (a sequence) of one call, at global shapes; left out,
            the last program that a parallelized model compiled is shown.
    plan:   left out: the model's own, or context parallelism over `world` ranks.
    precision: as for `parallelize`; left out: the model's own.
    memory: bytes that a step may take on a rank, for a plan with recompute="auto".
    """
    parallel = parallel_forward(model)
    if inputs is None:
        if parallel is None or parallel.last_captured is None:
            raise PlanError(
                "inspect() without inputs shows what a parallelized model compiled, and there is nothing: pass inputs"
            )
        captured, plan, rank = parallel.last_captured, parallel.last_plan, parallel.rank
    else:
        args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        types = parallel.model.precision if parallel and precision is None else Precision.of(precision)
        captured = capture(parallel.original if parallel else model.forward, model, args, kwargs, precision=types)
    if plan is None:
        if parallel is None and world is None:
            raise PlanError("inspect() of a plain model needs a plan, or the number of ranks as world=")
        plan = Plan(cp=world) if world is not None else parallel.plan  # type: ignore[union-attr]
    if world is not None and world != plan.world:
        raise PlanError(f"world={world}, but the degrees of {plan} multiply to {plan.world}")
    plan = fitted(captured.program, plan, memory, step_memory)
    program = run_passes(captured.program, plan, rank, snapshots=True)
    return Inspection(program, {snapshot.name: snapshot.text for snapshot in program.snapshots})
