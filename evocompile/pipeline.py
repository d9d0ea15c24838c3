"""The driver of the passes: checks what each requires, verifies what it leaves, keeps snapshots for `inspect`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .errors import PlanError, VerificationError
from .garbage import uncollected
from .plan import AUTO, Plan
from .printing import program_text
from .program import Program, Snapshot
from .torch_private import without_function_modes

Progress = Callable[[str], None]


@uncollected()
@without_function_modes()
def run_passes(
    captured: Program,
    plan: Plan,
    rank: int,
    *,
    number: int = 0,
    again: Sequence[str] | None = None,
    snapshots: bool = False,
    progress: Progress | None = None,
) -> Program:
    """This rank's forward and backward graphs from a captured program. `captured` itself is left as it is.

    number:    of the micro-batch, where the plan splits the batch into several.
    again:     what each layer computes again under a plan that gives a number of bytes; found when left out.
    snapshots: keep every stage as text (`program.snapshots`), for `inspect`.
    progress:  called with the name of each pass as it starts.
    """
    from .passes import PASSES
    from .passes.verify import verify
    from .recompute_budget import check_saved, layers_within  # which runs the passes itself

    program = captured.bind(plan, rank, number)
    is_budget = isinstance(plan.recompute, int)
    if plan.recompute == AUTO:
        raise PlanError(
            f"Plan.recompute={AUTO!r} is for parallelize(memory=…) and inspect(memory=…), which say what has to fit"
        )
    if isinstance(plan.recompute, tuple):
        program.again = plan.recompute
    if is_budget:
        program.again = tuple(layers_within(captured, plan, number) if again is None else again)
    program.facts.add("captured")
    for each in PASSES:
        missing = each.requires - program.facts
        if missing:
            raise VerificationError(f"pass {each.name} requires {', '.join(sorted(missing))}; no earlier pass gives it")
        if progress is not None:
            progress(f"pass {each.name}")
        start = time.perf_counter()
        program = each.run(program)
        program.facts |= each.provides
        verify(program, each.name)
        seconds = time.perf_counter() - start
        nodes = sum(len(graph.graph.nodes) for graph in program.graphs.values())
        text = program_text(program) if snapshots else ""
        program.snapshots.append(Snapshot(each.name, text, nodes, seconds))
    if is_budget and again is None:
        check_saved(program)
    return program
