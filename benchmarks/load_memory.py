"""Peak host memory of a rank while it gets the weights of a large model. Prints one JSON line.

    python benchmarks/load_memory.py --megabytes 512 --ranks 2 4

"rows": built on meta, each rank reads its rows of the safetensors files (`evocompile.materialize(…, weights=…)`).
"whole": each rank reads the whole model, then `parallelize` cuts it, as without this. Bytes are growth of resident
memory (VmHWM, set back before), beside those of a rank's shards.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import evocompile

WIDTH = 1024


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def resident(field: str) -> int:
    """Bytes of VmHWM or VmRSS of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


def load(way: str, layers: int, folder: Path) -> nn.Module:
    plan = evocompile.Plan(cp=dist.get_world_size())
    if way == "rows":
        with torch.device("meta"):
            model = build(layers)
        evocompile.parallelize(model, plan=plan)
        return evocompile.materialize(model, weights=folder)
    model = build(layers)
    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)
    return evocompile.parallelize(model, plan=plan)


def rank_main(rank: int, world: int, way: str, layers: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{way}-{world}", rank=rank, world_size=world)
    evocompile.parallelize(build(1), plan=evocompile.Plan(cp=world))  # what is loaded once
    dist.barrier()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    model = load(way, layers, Path(folder))
    peak = resident("VmHWM") - before
    shards = [each.to_local() for each in model.parameters() if isinstance(each, DTensor)]
    results.put((peak, sum(each.numel() * each.element_size() for each in shards)))
    dist.barrier()
    dist.destroy_process_group()


def measure(way: str, world: int, layers: int, folder: str) -> dict[str, Any]:
    results = multiprocessing.get_context("spawn").Queue()
    context = multiprocessing.spawn(
        rank_main, (world, way, layers, folder, results), nprocs=world, join=False, start_method="spawn"
    )
    found = []
    while len(found) < world:
        try:
            found.append(results.get(timeout=5))
        except queue.Empty:
            context.join(timeout=0.1)  # raises what a rank has raised
    while not context.join():
        pass
    peak, shards = max(found)
    return {"way": way, "ranks": world, "peak_bytes": peak, "shard_bytes": shards, "ratio": round(peak / shards, 3)}


def write(layers: int, folder: Path, per_file: int = 16) -> None:
    """A model of `layers` layers in several files with an index."""
    state = build(layers).state_dict()
    names, places = list(state), {}
    for number in range(0, len(names), per_file):
        file = f"model-{number:05d}.safetensors"
        save_file({name: state[name] for name in names[number : number + per_file]}, folder / file)
        places |= dict.fromkeys(names[number : number + per_file], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    options = parser.parse_args()
    layers = max(1, options.megabytes * 2**20 // (4 * WIDTH * WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        write(layers, Path(folder))
        cases = [measure(way, world, layers, folder) for world in options.ranks for way in ("rows", "whole")]
    print(json.dumps({"model_bytes": 4 * WIDTH * WIDTH * layers, "cases": cases, "machine": platform.machine()}))


if __name__ == "__main__":
    main()
