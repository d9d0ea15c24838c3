"""The driver of the passes: checks what each requires, verifies what it leaves, keeps snapshots for `inspect`."""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import VerificationError
from .garbage import uncollected
from .plan import Plan
from .printing import program_text
from .program import Program, Snapshot

Progress = Callable[[str], None]


@uncollected()
def run_passes(
    captured: Program,
    plan: Plan,
    rank: int,
    *,
    number: int = 0,
    snapshots: bool = False,
    progress: Progress | None = None,
) -> Program:
    """This rank's forward and backward graphs from a captured program. `captured` itself is left as it is.

    number:    of the micro-batch, where the plan splits the batch into several.
    snapshots: keep every stage as text (`program.snapshots`), for `inspect`.
    progress:  called with the name of each pass as it starts.
    """
    from .passes import PASSES
    from .passes.verify import verify

    program = captured.bind(plan, rank, number)
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
    return program
