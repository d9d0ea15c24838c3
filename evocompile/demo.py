"""The demo: a Llama of transformers trains on N local processes; its numbers stand beside those of one device.

The single-device run happens in another process, which never imports evocompile (`demo_model`).
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from . import demo_model
from .demo_model import JUDGED_STEPS
from .errors import EvocompileError
from .plan import Plan
from .program import Program

GROUP_TIMEOUT = timedelta(minutes=5)

# How much may differ: float32 sums in another order, with roundings of 6e-8. AdamW divides gradients by their size, so
# it turns the noise of those that are almost zero into whole steps, which add up. A single device whose weights are
# changed by one rounding drifts off like the ranks do: 1e-6 of the loss after 40 steps, 1e-4 after 60, 1e-2 after 140.
# So the first JUDGED_STEPS are judged. Seen on 2 and 4 ranks, four seeds: 9e-8, 3e-7, 1.1e-6, 7e-4.
FIRST_LOSS = 1e-6  # relative
LATER_LOSSES = 1e-5  # relative
GRADIENTS = 1e-5  # of max(the gradient's own largest entry, 1e-3 of the model's largest)
PARAMETERS = 1e-2  # of the parameter's own largest entry


class DemoError(Exception):
    """The demo could not be carried through: one of its processes failed."""


@dataclass(frozen=True)
class Job:
    """What the ranks run."""

    plan: Plan
    steps: int
    seed: int
    backend: Any  # "inductor" or "eager"


@dataclass(frozen=True)
class Difference:
    """One measured difference. value: relative; infinite where a number is not finite."""

    what: str
    value: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.value <= self.allowed


@dataclass(frozen=True)
class Report:
    """What the demo found.

    losses: per step, on one device and on the ranks (of these the one furthest off).
    sent:   bytes that the busiest rank puts on the wire in one step, and the number of calls, by kind.
    """

    job: Job
    losses: list[tuple[float, float]]
    differences: list[Difference]
    sent: dict[str, tuple[int, int]]
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.differences)

    def to_json(self) -> str:
        """All of it in one line."""
        return json.dumps({"passed": self.passed, **asdict(self)})

    def __str__(self) -> str:
        return "\n\n".join([self._loss_table(), self._verdicts(), self._facts()])

    def _loss_table(self) -> str:
        lines = [f"{'step':>4}  {'one device':>12}  {f'{self.job.plan.world} ranks':>12}  {'difference':>10}"]
        for step, (one, many) in enumerate(self.losses, start=1):
            lines.append(f"{step:>4}  {one:12.7f}  {many:12.7f}  {relative(one, many):10.1e}")
        if len(self.losses) > JUDGED_STEPS:
            lines.append(f"steps after {JUDGED_STEPS} are not judged: training magnifies rounding until losses part")
        return "\n".join(lines)

    def _verdicts(self) -> str:
        lines = [
            f"  {each.what:<28} {each.value:8.1e}   allowed {each.allowed:.0e}   {'ok' if each.passed else 'TOO LARGE'}"
            for each in self.differences
        ]
        return "\n".join(["largest relative difference", *lines])

    def _facts(self) -> str:
        ranks = self.job.plan.world
        lines = [
            f"plan     {self.job.plan}",
            f"run as   {ranks} gloo processes on this machine's CPU, backend {self.job.backend}, float32",
            "sent     by the busiest rank in one step, bytes and calls:",
        ]
        lines += [f"         {kind:<16} {size:>12,}  {calls:>5,}" for kind, (size, calls) in self.sent.items()]
        seconds = ", ".join(f"{what} {value:.1f} s" for what, value in self.seconds.items())
        return "\n".join([*lines, f"time     {seconds}"])


def run_demo(job: Job) -> Report:
    """Run the job and its reference, one after the other, and compare them.

    Raises EvocompileError when transformers is missing, DemoError when a process fails.
    """
    require_transformers()
    threads = max(1, (os.cpu_count() or 1) // job.plan.world)
    with tempfile.TemporaryDirectory(prefix="evocompile-demo-") as name:
        folder = Path(name)
        reference = _run_one_device(job, folder, threads)
        ranks = _run_ranks(job, folder, threads)
    return Report(
        job,
        *compare(reference, ranks),
        sent=_busiest([rank["sent"] for rank in ranks]),
        seconds={
            "compiling and first step": ranks[0]["first_step_seconds"],
            f"{job.steps - 1} further steps": ranks[0]["other_steps_seconds"],
            "the same on one device": reference["other_steps_seconds"],
        },
    )


def require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise EvocompileError(
            "the demo's model is a Llama of transformers, which is not installed: pip install 'transformers>=5'"
        )


def compare(
    reference: demo_model.Result, ranks: Sequence[demo_model.Result]
) -> tuple[list[tuple[float, float]], list[Difference]]:
    """Pairs of losses per step, and the largest differences. `ranks`: only the first one's tensors are looked at."""
    losses = [
        (one, max(many, key=lambda loss: relative(one, loss)))
        for one, *many in zip(reference["losses"], *(rank["losses"] for rank in ranks), strict=True)
    ]
    differences = [relative(one, many) for one, many in losses[:JUDGED_STEPS]]
    last = len(differences)
    gradients, parameters = reference["gradients"], reference["parameters"]
    floor = 1e-3 * max(largest(each) for each in gradients.values())
    found = [
        Difference("loss of step 1", differences[0], FIRST_LOSS),
        Difference("gradients of step 1", furthest(gradients, ranks[0]["gradients"], floor), GRADIENTS),
        Difference(f"parameters after step {last}", furthest(parameters, ranks[0]["parameters"], 0.0), PARAMETERS),
    ]
    if last > 1:
        found.insert(1, Difference(f"loss of steps 2 to {last}", max(differences[1:]), LATER_LOSSES))
    return losses, found


def relative(one: float, many: float) -> float:
    """|many - one| / |one|; infinite where a number is not finite."""
    difference = abs(many - one) / abs(one)
    return difference if math.isfinite(difference) else math.inf


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def furthest(one: dict[str, Tensor], many: dict[str, Tensor], floor: float) -> float:
    """The largest error of a tensor's entry, relative to the tensor's own largest entry or to `floor`."""
    assert one.keys() == many.keys(), sorted(one.keys() ^ many.keys())
    errors = [largest(many[name] - each) / max(largest(each), floor) for name, each in one.items()]
    return max(error if math.isfinite(error) else math.inf for error in errors)


# --- one device ------------------------------------------------------------------------------------------------------


def _run_one_device(job: Job, folder: Path, threads: int) -> demo_model.Result:
    result = folder / "one.pt"
    # -P keeps this folder off the path, where our inspect.py would hide the standard library's
    command = [sys.executable, "-P", str(Path(demo_model.__file__)), str(result)]
    for name, value in (("steps", job.steps), ("seed", job.seed), ("threads", threads)):
        command += [f"--{name}", str(value)]
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if code:
        raise DemoError(f"the single-device run ended with exit code {code}")
    return torch.load(result)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _run_ranks(job: Job, folder: Path, threads: int) -> list[demo_model.Result]:
    """What each rank found. When one fails or this process is interrupted, all are killed."""
    world = job.plan.world
    context = start_processes(_rank_main, (job, str(folder), threads), nprocs=world, join=False, start_method="spawn")
    assert context is not None
    try:
        while not context.join(grace_period=5):
            pass
        return [torch.load(folder / f"{rank}.pt") for rank in range(world)]
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise DemoError(f"rank {error.error_index} failed, so the demo was stopped: {error}") from None
    except FileNotFoundError as error:  # an interrupted rank ends without an error
        raise DemoError(f"a rank ended without a result: {error.filename} is missing") from None
    finally:
        _kill(context.processes)


def _kill(processes: Sequence[multiprocessing.Process]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _rank_main(rank: int, job: Job, folder: str, threads: int) -> None:
    from .inspect import inspect
    from .parallelize import parallelize

    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job.plan.world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=job.plan.world,
        timeout=GROUP_TIMEOUT,
    )
    model = parallelize(demo_model.build(job.seed), plan=job.plan, backend=job.backend)
    who = f"{job.plan.world} ranks" if rank == 0 else None
    result = demo_model.train(model, job.steps, job.seed, who)
    result["sent"] = sent_by_kind(inspect(model).program)
    if rank:
        del result["gradients"], result["parameters"]
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def sent_by_kind(program: Program) -> dict[str, tuple[int, int]]:
    """Bytes that this rank sends in one step, and the number of calls, by kind of communication."""
    sent: dict[str, tuple[int, int]] = {}
    for each in program.collectives.values():
        size, count = sent.get(each.kind, (0, 0))
        sent[each.kind] = size + each.sent, count + 1
    return sent


def _busiest(ranks: list[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    return max(ranks, key=lambda sent: sum(size for size, _ in sent.values()))
