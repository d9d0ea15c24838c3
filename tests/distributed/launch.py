"""Runs a function on N ranks, each a process of its own, for tests.

    results = run_ranks(step, 2, "zigzag")      # step is a module-level function, called as step("zigzag")

The function and its arguments travel by pickle (so the function has to be at the top level of a module), results and
errors come back by file. The ranks meet through a file, so no port can be taken by somebody else.

Ranks are forks of one process that has imported the large libraries, which would cost each of them four seconds; but
not evocompile, as some tests look at a process into which it is imported later.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch._functorch.aot_autograd",
        "torch._inductor.decomposition",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "transformers.models.llama.modeling_llama",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `result`, or the traceback in `error` (for a rank that died or hung, a sentence)."""

    result: Any = None
    error: str | None = None


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` on `world` ranks and return what each returned, by rank; raise if a rank failed."""
    outcomes = launch(function, world, *args, timeout=timeout)
    failed = [f"rank {rank}:\n{outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    if failed:
        raise AssertionError("\n".join(failed))
    return [outcome.result for outcome in outcomes]


def launch(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    backend: str = "gloo",
) -> list[Outcome]:
    """As `run_ranks`, for tests in which ranks fail: nothing is raised.

    timeout:       seconds until ranks that still run are killed.
    group_timeout: seconds until a collective of the default group raises.
    backend:       of the default group.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = [
            _PROCESSES.Process(
                target=_rank_main,
                args=(dict(os.environ), folder, rank, world, group_timeout, backend, function, args),
            )
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return [_outcome(Path(folder), rank, process, timeout) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _outcome(folder: Path, rank: int, process: BaseProcess, timeout: float) -> Outcome:
    path = folder / f"{rank}.pt"
    if process.exitcode is None:
        return Outcome(error=f"still running after {timeout:.0f} s")
    if not path.exists():
        return Outcome(error=f"died with exit code {process.exitcode}")
    return torch.load(path, weights_only=False)


def _rank_main(
    environment: dict[str, str],
    folder: str,
    rank: int,
    world: int,
    group_timeout: float,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()  # the forks' is of when the first of them was started
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = Outcome(result=function(*args))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    partial = Path(folder) / f"{rank}.partial"
    torch.save(outcome, partial)
    partial.rename(Path(folder) / f"{rank}.pt")
    # Without the usual teardown: a rank whose peer failed must not wait for it in a destructor.
    os._exit(1 if outcome.error else 0)
