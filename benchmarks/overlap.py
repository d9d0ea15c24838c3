"""How much communication the schedule hides: training steps with virtual compute over a shaped network.

    python benchmarks/overlap.py --virtual | --simulated [--rate 500mbit] [--repeats 5] [--cases zero3-2-0.8 …]

Needs root and iproute2: each rank runs in a network namespace of its own, on a bridge, behind `tc … tbf`. Products and
attentions do not compute but sleep for their FLOPs over a speed that gives the case its ratio of communication to
computation (as predicted for the shaped link); everything else is real: the same graphs, driver, gloo, bytes. Within
one loop, in turns, with a barrier before each: overlap "selective", "all" and "none", computation alone, communication
alone. Medians of the slowest rank.

With --simulated instead: what the simulator predicts of the same steps, "selective" and "none", from the rates of this
link as `link_rates.py` measures them right before; {"cases": [{"name", "measured_s", "simulated_s", "relative_error"}],
"worst_relative_error", "rate", "machine"}.

A table, and last one JSON object: {"cases": [{"name", "ratio_to_bound": time over max(computation, communication),
"ratio_without_overlap": the same for "none", "all_to_bound", "step_s", "compute_s", "communication_s",
"simulated_over_measured"}, …], "rate", "machine"}.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from link_rates import measured
from shaped_network import BITS, network
from torch import Tensor, fx
from transformers import LlamaConfig, LlamaForCausalLM

from evocompile import Plan
from evocompile.capture import Captured, capture
from evocompile.collectives import Communicators, group_names, is_start, is_wait, program_events
from evocompile.compile import CompiledGraph, compile_graph
from evocompile.pipeline import run_passes
from evocompile.plan import Shard
from evocompile.program import Program, placeholders
from evocompile.rates import Link, Rates, has_flops
from evocompile.simulate import simulate, step_work

Result = tuple[tuple[int, ...], torch.dtype]  # shape and type
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}  # weights are much, tokens few
LONG = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


@dataclass(frozen=True)
class Case:
    """ratio: of communication to computation. length: of the sequences."""

    name: str
    plan: Plan
    ratio: float
    sizes: dict[str, int]
    length: int
    batch: int = 1


CASES = [
    *(Case(f"zero3-2-{ratio}", Plan(dp=2), ratio, WIDE, 64, 2) for ratio in (0.5, 0.8, 1.3)),
    Case("ring-2-0.5", Plan(cp=2, shard=Shard(1, 1, 1)), 0.5, LONG, 8192),
    Case("ulysses-2-0.2", Plan(ulysses=2, shard=Shard(1, 1, 1)), 0.2, LONG, 8192),
    *(Case(f"zero3-4-{ratio}", Plan(dp=4), ratio, WIDE, 64, 4) for ratio in (0.5, 1.3)),
    Case("ring-4-0.5", Plan(cp=4, shard=Shard(1, 1, 1)), 0.5, LONG, 8192),
]


@functools.cache
def captured(hidden: int, middle: int, layers: int, length: int, batch: int) -> Captured:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=length,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").train()
    ids = torch.zeros(batch, length, dtype=torch.long)
    return capture(model.forward, model, (), {"input_ids": ids, "labels": ids.clone()})


# --- a step --------------------------------------------------------------------------------------------------------


@functools.cache
def virtual(
    seconds: float, results: tuple[tuple[tuple[int, ...], torch.dtype], ...], is_one: bool
) -> Callable[..., Any]:
    """An operator that sleeps, and gives zeros."""
    values = [torch.zeros(shape, dtype=dtype) for shape, dtype in results]

    def sleeps(*_args: Any, **_kwargs: Any) -> Any:
        if seconds:
            time.sleep(seconds)
        return values[0] if is_one else list(values)

    return sleeps


def stand_in(node: fx.Node, seconds: float) -> Callable[..., Any]:
    value = node.meta["val"]
    leaves = [value] if isinstance(value, Tensor) else list(value)
    return virtual(seconds, tuple((tuple(each.shape), each.dtype) for each in leaves), isinstance(value, Tensor))


class Step:
    """A forward and a backward of one program. computes, communicates: whether products take time, and data moves."""

    def __init__(
        self, program: Program, rates: Rates, groups: Communicators, *, computes: bool = True, communicates: bool = True
    ) -> None:
        self._program = program
        self._graphs = [
            self._compiled(graph, rates, groups, computes, communicates)
            for graph in (program.forward, program.backward)
            if graph is not None
        ]

    def _compiled(
        self, graph_module: fx.GraphModule, rates: Rates, groups: Communicators, computes: bool, communicates: bool
    ) -> CompiledGraph:
        resolved = groups.resolve(graph_module)
        for node in resolved.graph.nodes:
            if has_flops(node) or (not communicates and (is_start(node) or is_wait(node))):
                seconds = rates.compute(node) if computes and has_flops(node) else 0.0
                node.target = stand_in(node, seconds)
        return compile_graph(resolved, backend="eager")

    @torch.no_grad()
    def __call__(self) -> None:
        forward, backward = self._graphs
        results = forward([zeros(node) for node in placeholders(self._program.forward.graph)])  # type: ignore[union-attr]
        count = len(results) - len(placeholders(self._program.backward.graph)) + 1  # type: ignore[union-attr]
        backward([*results[count:], torch.ones(())])


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def zeros(node: fx.Node) -> Tensor:
    return _zeros(tuple(node.meta["val"].shape), node.meta["val"].dtype)


def rates_for(case: Case, program: Program, bandwidth: float) -> Rates:
    """Rates of the shaped link, and the speed of computation that gives the case its ratio."""
    link = Link(bandwidth, 2e-4)
    unit = Rates({torch.float32: 1.0}, float("inf"), 0.0, link, link)
    work = step_work(program, unit)
    flops = sum(each.seconds for each in work if each.event is None)
    seconds = sum(each.seconds for each in work if each.event is not None)
    return replace(unit, flops={torch.float32: flops * case.ratio / seconds}, _seconds={})


# --- ranks -----------------------------------------------------------------------------------------------------------


def compiled(
    case: Case, overlaps: Sequence[str], bandwidth: float, groups: Communicators
) -> tuple[dict[str, Program], Rates]:
    """This rank's programs, and the rates of the case."""
    step = captured(*case.sizes.values(), case.length, case.batch)
    programs = {
        overlap: run_passes(step.program, replace(case.plan, overlap=overlap), dist.get_rank())  # type: ignore[arg-type]
        for overlap in overlaps
    }
    groups.create(agreed_groups(programs["none"]))
    return programs, rates_for(case, programs["none"], bandwidth)


def medians_of(steps: Mapping[str, Step], repeats: int) -> dict[str, float]:
    """Seconds of the slowest rank; the steps take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 1):
        for name, run in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            slowest = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:
                times[name].append(float(slowest))
    return {name: statistics.median(each) for name, each in times.items()}


def predict(case: Case, bandwidth: float, repeats: int, groups: Communicators) -> list[dict[str, Any]]:
    """Steps as simulated by rates that are measured on this link, and as they are."""
    programs, rates = compiled(case, ("selective", "none"), bandwidth, groups)
    medians = medians_of({name: Step(program, rates, groups) for name, program in programs.items()}, repeats)
    seen, found = measured(rates), []
    for name, program in programs.items():
        works: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(works, step_work(program, seen))
        seconds = simulate(works).seconds
        times = {"measured_s": round(medians[name], 4), "simulated_s": round(seconds, 4)}
        found.append({"name": f"{case.name} {name}", **times, "relative_error": round(seconds / medians[name] - 1, 3)})
    return found


def measure(case: Case, bandwidth: float, repeats: int, groups: Communicators) -> list[dict[str, Any]]:
    rank = dist.get_rank()
    programs, rates = compiled(case, ("selective", "all", "none"), bandwidth, groups)
    steps = {name: Step(program, rates, groups) for name, program in programs.items()}
    steps["compute"] = Step(programs["none"], rates, groups, communicates=False)
    steps["communication"] = Step(programs["none"], rates, groups, computes=False)
    medians = medians_of(steps, repeats)
    bound = max(medians["compute"], medians["communication"])
    simulated = simulate([step_work(programs["selective"], rates)], alone=rank).seconds
    found = {
        "name": case.name,
        "ratio_to_bound": round(medians["selective"] / bound, 3),
        "ratio_without_overlap": round(medians["none"] / bound, 3),
        "all_to_bound": round(medians["all"] / bound, 3),
        "step_s": round(medians["selective"], 4),
        "compute_s": round(medians["compute"], 4),
        "communication_s": round(medians["communication"], 4),
        "simulated_over_measured": round(simulated / medians["selective"], 3),
    }
    return [found]


def agreed_groups(program: Program) -> set[str]:
    """The groups of all ranks' programs."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(group_names(program_events(program))))
    return {name for names in found for name in names}


def worker(names: list[str], bandwidth: float, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = Communicators(torch.device("cpu"))
    found: list[dict[str, Any]] = []
    for case in CASES:
        if case.name in names:
            found += (predict if options.simulated else measure)(case, bandwidth, options.repeats, groups)
            if dist.get_rank() == 0:
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                options.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# --- the network -----------------------------------------------------------------------------------------------------


def launch(world: int, names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    with network(world) as links, tempfile.TemporaryDirectory() as folder:
        links.shape(options.rate)
        result = Path(folder) / "result.json"
        processes = []
        for rank in range(world):
            command = [
                sys.executable,
                __file__,
                "--simulated" if options.simulated else "--virtual",
                "--rate",
                options.rate,
            ]
            command += ["--repeats", str(options.repeats), "--result", str(result), "--cases", *names]
            environment = os.environ | links.environment(rank, 29511)
            processes.append(subprocess.Popen(links.command(rank, command), env=environment))
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group(required=True)
    modes.add_argument("--virtual", action="store_true", help="products sleep instead of computing")
    modes.add_argument("--simulated", action="store_true", help="the simulator's prediction beside each measured step")
    parser.add_argument("--rate", default="500mbit", help="of each link, as tc writes it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the network is taken down
    unit = options.rate[-4:]
    if options.result is not None:
        worker(options.cases, 0.95 * float(options.rate[:-4]) * BITS[unit] / 8, options)
        return
    found = []
    for world in sorted({case.plan.world for case in CASES}):
        names = [case.name for case in CASES if case.plan.world == world and case.name in options.cases]
        if names:
            found += launch(world, names, options)
    about = {"rate": options.rate, "machine": platform.processor() or platform.machine()}
    if options.simulated:
        print("| case | measured s | simulated s | relative error |\n|---|---|---|---|")
        for each in found:
            print("|", " | ".join(map(str, each.values())), "|")
        worst = max(abs(each["relative_error"]) for each in found)
        print(json.dumps({"cases": found, "worst_relative_error": worst, **about}))
        return
    print("| case | selective | all | none | step s | compute s | communication s | simulated / measured |")
    print("|---|---|---|---|---|---|---|---|")
    for each in found:
        columns = ("name", "ratio_to_bound", "all_to_bound", "ratio_without_overlap", "step_s", "compute_s")
        print("|", " | ".join(str(each[key]) for key in (*columns, "communication_s", "simulated_over_measured")), "|")
    print(json.dumps({"cases": found, **about}))


if __name__ == "__main__":
    main()
