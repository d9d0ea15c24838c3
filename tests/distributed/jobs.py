"""Many jobs in one launch: ranks import torch, transformers and evocompile once, each job's outcome is kept apart."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from evocompile.plan import Plan
from tests.distributed.launch import Outcome, launch
from tests.models.zoo import Case


@dataclass(frozen=True)
class Job:
    """`function(case, plan, backend)`, called on every rank of the plan; the function is at the top of a module."""

    function: Callable[[Case, Plan, str], Any]
    case: Case
    plan: Plan
    backend: str = "eager"

    def __str__(self) -> str:
        case, plan = self.case, self.plan
        degrees = f"dp{plan.dp}-cp{plan.cp}" if plan.dp > 1 else f"cp{plan.cp}"
        if plan.ulysses > 1:
            degrees += f"-ulysses{plan.ulysses}-{plan.placement}"
        if plan.tp > 1:
            degrees += f"-tp{plan.tp}"
        shard = f"shard{plan.shard_degrees.params}"
        return f"{self.function.__name__}-{case.model}-{case.batch}x{case.length}-{degrees}-{shard}-{self.backend}"


class Jobs:
    """The outcomes of jobs. All jobs of the same number of ranks and backend run in one launch, at the first question.

    timeout: seconds for one launch.
    """

    def __init__(self, jobs: Iterable[Job], timeout: float) -> None:
        self._timeout = timeout
        self._launches: dict[tuple[int, str], list[Job]] = {}
        self._outcomes: dict[Job, list[Outcome]] = {}
        for job in dict.fromkeys(jobs):
            self._launches.setdefault((job.plan.world, job.backend), []).append(job)

    def results(self, job: Job) -> list[Any]:
        """What the job returned, by rank; raises if it failed on one."""
        if job not in self._outcomes:
            self._run(self._launches[job.plan.world, job.backend], job.plan.world)
        failed = [f"rank {rank}:\n{each.error}" for rank, each in enumerate(self._outcomes[job]) if each.error]
        assert not failed, "\n".join(failed)
        return [each.result for each in self._outcomes[job]]

    def _run(self, jobs: list[Job], world: int) -> None:
        # A cold Inductor takes ranks that wait for one another longer than a collective usually may.
        ranks = launch(run_jobs, world, jobs, timeout=self._timeout, group_timeout=self._timeout / 2)
        for index, job in enumerate(jobs):
            self._outcomes[job] = [rank if rank.error else rank.result[index] for rank in ranks]


def run_jobs(jobs: list[Job]) -> list[Outcome]:
    """The outcome of each job on this rank. Ranks that lose one another in a job give up those that follow."""
    outcomes: list[Outcome] = []
    lost = None
    for job in jobs:
        if lost is not None:
            outcomes.append(Outcome(error=f"not run: the ranks lost one another in {lost}"))
            continue
        try:
            outcomes.append(Outcome(result=job.function(job.case, job.plan, job.backend)))
        except Exception:
            outcomes.append(Outcome(error=traceback.format_exc()))
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=60))
        except RuntimeError:
            lost = job
    return outcomes


def selected_jobs(request: pytest.FixtureRequest) -> list[Job]:
    """The jobs of the tests of this module that were selected: values of their parameter `job`."""
    specs = [
        item.callspec
        for item in request.session.items
        if getattr(item, "module", None) is request.module and hasattr(item, "callspec")
    ]
    return [spec.params["job"] for spec in specs if "job" in spec.params]
