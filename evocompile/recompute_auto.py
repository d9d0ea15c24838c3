"""recompute="auto": as little is computed again as it takes for the peak of a step to fit in a rank's memory.

The peak is that of the static memory model (`memory.py`), on the graphs that the passes make of a choice: with what is
saved, what is alive while a layer is computed again, gradients, buffers and all else. The layers' choices come from the
knapsack of `recompute_budget.py`, in which the excess of the peak is what has to be gained. A peak need not fall by as
much as less is saved, so what is still in excess is asked for on top, a few times.

Decided by the ranks with the largest parts, the first and the last one, and by all micro-batches. So all ranks find the
same; each checks its own peak behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .errors import PlanError
from .memory import Memory, largest_terms, way_out
from .pipeline import run_passes
from .plan import AUTO, Plan
from .program import OutputKind, Program
from .recompute_budget import MODES, account_of, cheapest, largest_ranks

MemoryOf = Callable[[Sequence[Program]], Memory]


def fitted(captured: Program, plan: Plan, limit: int | None, memory_of: MemoryOf) -> Plan:
    """The plan with a choice for each layer in the place of "auto"; another plan as it is.

    limit:     bytes that a step may take. memory_of: the memory of a step from its micro-batches' programs.
    Raises PlanError where not even the choice with the lowest peak fits, or there is no limit.
    """
    if plan.recompute != AUTO:
        return plan
    if not captured.outputs_of(OutputKind.GRADIENT):
        return replace(plan, recompute=MODES[0])
    if limit is None:
        raise PlanError(
            f"Plan.recompute={AUTO!r} chooses so much that a step fits in memory, and nothing says how much there is: "
            "pass memory= to parallelize(), or to inspect()"
        )
    account = account_of(captured, plan)
    count = len(account.choices)
    ranks = dict.fromkeys((*largest_ranks(captured, replace(plan, recompute=MODES[0]), 0), 0, plan.world - 1))

    def highest(chosen: tuple[str, ...]) -> Memory:
        """Of the rank with the highest peak."""
        chosen_plan = replace(plan, recompute=chosen)
        parts = range(plan.microbatches)
        found = [memory_of([run_passes(captured, chosen_plan, rank, number=i) for i in parts]) for rank in ranks]
        return max(found, key=lambda each: each.peak)

    none = highest((MODES[0],) * count).peak
    if none <= limit:
        return replace(plan, recompute=MODES[0])
    chosen = cheapest(account.choices, none - limit, lambda each: highest(each).peak - limit)
    if chosen is None:
        all_alike = [(mode,) * count for mode in MODES[1:]]
        memory, chosen = min(((highest(each), each) for each in all_alike), key=lambda each: each[0].peak)
        if memory.peak > limit:
            raise PlanError(
                f"Plan.recompute={AUTO!r}: a step takes {memory.peak:,} bytes at the least ({none:,} when nothing is "
                f"computed again) and may use {limit:,}: {largest_terms(memory)}. {way_out(memory)}, or pass a larger "
                "memory= to parallelize()"
            )
    return replace(plan, recompute=chosen)
