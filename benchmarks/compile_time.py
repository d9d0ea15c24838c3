"""How long compiling takes, by layers and ranks: capture, each pass, cutting and Inductor, for one rank's program.

    python benchmarks/compile_time.py [--layers 4 32] [--ranks 4] [--backend inductor|eager] [--cold] [--step]

Needs no process group: the program of rank 0 of `--ranks` is compiled, not run. With `--step` all ranks run (gloo, CPU,
one thread each), and what is measured is the whole first step as a user waits for it, from `parallelize` to the end
of `optimizer.step()`, on the slowest rank; then a second step, in which nothing is compiled. `--cold` gives each
configuration empty Inductor caches; otherwise what earlier runs compiled is found again. Each configuration has
processes of its own. One line of text for each, and last one JSON object {"cases": [{layers, ranks, capture_s,
passes_s, compile_s, nodes, segments, distinct_segments}, …], "machine": …}, with `--step` {layers, ranks, first_step_s,
second_step_s}.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return LlamaForCausalLM(config)


def measure(layers: int, ranks: int, backend: str) -> dict[str, Any]:
    """Seconds of every stage for a Llama of `layers` layers, and the sizes of its program."""
    import torch

    from evocompile.capture import capture
    from evocompile.compile import compile_graph
    from evocompile.pipeline import run_passes
    from evocompile.plan import Plan
    from evocompile.segments import Segment, cut, structure

    with torch.device("meta"):
        model = llama(layers)
    ids = torch.zeros(2, 64 * ranks, dtype=torch.long)
    start = time.perf_counter()
    captured = capture(model.forward, model, (), {"input_ids": ids, "labels": ids})
    after_capture = time.perf_counter()
    program = run_passes(captured.program, Plan(cp=ranks), 0)
    after_passes = time.perf_counter()
    for graph in program.graphs.values():
        compile_graph(graph, backend=backend)
    after_compile = time.perf_counter()
    segments = [each for graph in program.graphs.values() for each in cut(graph.graph) if isinstance(each, Segment)]
    return {
        "layers": layers,
        "ranks": ranks,
        "backend": backend,
        "capture_s": round(after_capture - start, 2),
        "passes_s": round(after_passes - after_capture, 2),
        "compile_s": round(after_compile - after_passes, 2),
        "passes": {snapshot.name: round(snapshot.seconds, 2) for snapshot in program.snapshots},
        "nodes": sum(len(graph.graph.nodes) for graph in program.graphs.values()),
        "segments": len(segments),
        "distinct_segments": len({structure(each) for each in segments}),
    }


def measure_step(layers: int, ranks: int, backend: str, rank: int, folder: str) -> dict[str, Any]:
    """Seconds of the first and the second step on this rank, one of the `ranks` that call this together."""
    import torch
    import torch.distributed as dist

    import evocompile

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = llama(layers)
    ids = torch.randint(0, 256, (2, 64 * ranks))
    dist.barrier()
    times = [time.perf_counter()]
    evocompile.parallelize(model, plan=evocompile.Plan(cp=ranks), backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    dist.destroy_process_group()
    first, second = (round(end - start, 2) for start, end in itertools.pairwise(times))
    return {"layers": layers, "ranks": ranks, "backend": backend, "first_step_s": first, "second_step_s": second}


def work(rank: int, layers: int, ranks: int, backend: str, step: bool, folder: str) -> None:
    """What a process of a configuration does: rank 0's program, or rank `rank` of a step."""
    case = measure_step(layers, ranks, backend, rank, folder) if step else measure(layers, ranks, backend)
    Path(folder, f"{rank}.json").write_text(json.dumps(case))


def run(layers: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One configuration in processes of its own; of a step, the slowest rank."""
    import torch

    count = ranks if options.step else 1
    with tempfile.TemporaryDirectory() as folder:
        if options.cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"  # the processes inherit it
        torch.multiprocessing.spawn(work, (layers, ranks, options.backend, options.step, folder), count)
        cases = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    return max(cases, key=lambda case: case.get("first_step_s", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--cold", action="store_true", help="empty compile caches for each configuration")
    parser.add_argument("--step", action="store_true", help="the whole first step of all ranks")
    options = parser.parse_args()
    cases = []
    for ranks in options.ranks:
        for layers in options.layers:
            case = run(layers, ranks, options)
            print({name: value for name, value in case.items() if name != "passes"}, flush=True)
            cases.append(case)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"cases": cases, "machine": machine}))


if __name__ == "__main__":
    main()
