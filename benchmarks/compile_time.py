"""How long compiling takes, by layers and ranks: capture, each pass, cutting and Inductor, for one rank's program.

    python benchmarks/compile_time.py [--layers 4 32] [--ranks 4] [--backend inductor|eager] [--cold]

Needs no process group: the program of rank 0 of `--ranks` is compiled, not run. `--cold` empties Inductor's caches
first (a cache folder of its own); otherwise what earlier runs compiled is found again. One line of text for each
configuration, and last one JSON object {"cases": [{layers, ranks, capture_s, passes_s, compile_s, nodes, segments,
distinct_segments}, …], "machine": …}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from typing import Any


def measure(layers: int, ranks: int, backend: str) -> dict[str, Any]:
    """Seconds of every stage for a Llama of `layers` layers, and the sizes of its program."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from evocompile.capture import capture
    from evocompile.compile import compile_graph
    from evocompile.pipeline import run_passes
    from evocompile.plan import Plan
    from evocompile.segments import Segment, cut, structure

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--cold", action="store_true", help="empty compile caches first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # before torch is imported
        cases = []
        for ranks in options.ranks:
            for layers in options.layers:
                case = measure(layers, ranks, options.backend)
                print({name: value for name, value in case.items() if name != "passes"}, flush=True)
                cases.append(case)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(json.dumps({"cases": cases, "machine": machine}))


if __name__ == "__main__":
    main()
