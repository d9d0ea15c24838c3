"""Ranks that go wrong, for the tests: a pass that breaks one rank's program, a rank that dies or hangs in a step."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.node import has_side_effect

from evocompile import passes
from evocompile.collectives import is_start, is_wait
from evocompile.plan import Plan
from evocompile.program import Pass, Program
from tests.distributed import training
from tests.models.zoo import Case


def add_pass(run: Callable[[Program], Program]) -> None:
    """This process runs one more pass, the last one."""
    passes.PASSES = (*passes.PASSES, Pass(run.__name__, run, frozenset(), frozenset()))


# --- passes that break a program -------------------------------------------------------------------------------------


def starts(program: Program, kind: str) -> list[fx.Node]:
    """The starts of this kind, those of the forward graph first."""
    return [
        node
        for graph_module in program.graphs.values()
        for node in graph_module.graph.nodes
        if is_start(node) and program.collectives[node].kind == kind
    ]


def wait_of(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if is_wait(user))
    return wait


def drop_wait(program: Program, start: fx.Node) -> None:
    """What used the wait reads the buffer that is still being filled."""
    wait = wait_of(start)
    wait.replace_all_uses_with(start)
    wait.graph.erase_node(wait)


def drop_collective(program: Program, start: fx.Node) -> None:
    """This rank keeps its own gradient, as if it were already summed."""
    wait = wait_of(start)
    wait.replace_all_uses_with(start.args[0])
    wait.graph.erase_node(wait)
    start.graph.erase_node(start)
    del program.collectives[start]


def swap(first: fx.Node, second: fx.Node) -> None:
    """Starts the second before the first; both keep their waits. What the second sends is known by then."""
    first.prepend(second)


def neighbouring_gathers(program: Program, alike: bool) -> tuple[fx.Node, fx.Node]:
    """Two gathers of parameters of the forward, one after the other, of equal size or not."""
    gathers = [
        node for node in starts(program, "all_gather") if all(each.op == "placeholder" for each in node.all_input_nodes)
    ]
    return next(
        (first, second)
        for first, second in itertools.pairwise(gathers)
        if (first.meta["val"].shape == second.meta["val"].shape) == alike
    )


def run_with_swapped_gathers(case: Case, plan: Plan, backend: str) -> str:
    """What the first call raises when rank 1's last pass swaps two gathers of equal size."""

    def swap_gathers(program: Program) -> Program:
        if program.rank == 1:
            swap(*neighbouring_gathers(program, alike=True))
        return program

    before = passes.PASSES
    add_pass(swap_gathers)
    try:
        training.backward(training.parallel_model(case, plan, backend), case.inputs())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        passes.PASSES = before
    return "no error"


# --- ranks that end or hang ------------------------------------------------------------------------------------------


PATIENCE = 20.0  # seconds until a collective raises


def die() -> None:
    os._exit(7)


def stall() -> None:
    time.sleep(PATIENCE + 8)


def train_until(event: Callable[[], None]) -> float:
    """Two steps; the last rank meets `event` in the middle of the second backward. Seconds until the error of others.

    The event comes as a node of that rank's graph, between its collectives.
    """
    case, world = Case("gpt"), dist.get_world_size()
    state = {"armed": False}

    def happen() -> None:
        if state["armed"]:
            event()

    def interrupt_backward(program: Program) -> Program:
        assert program.backward is not None
        if program.rank == world - 1:
            begun = [node for node in program.backward.graph.nodes if is_start(node)]
            with program.backward.graph.inserting_before(begun[len(begun) // 2]):
                program.backward.graph.call_function(happen).meta["val"] = None
        return program

    has_side_effect(happen)
    add_pass(interrupt_backward)
    model = training.parallel_model(case, Plan(cp=world), "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training.backward(model, case.inputs())
    optimizer.step()
    state["armed"] = True
    loss = model(**case.inputs(1))[0]
    began = time.monotonic()
    try:
        loss.backward()
    except RuntimeError:  # DeadlockError too
        return time.monotonic() - began
    raise AssertionError("backward ended although a rank did not take part")
