"""What recomputation costs and saves: one training step of a Llama with each choice, by sequence length.

    python benchmarks/recompute.py [--lengths 2048 4096 8192 16384 32768] [--layers 2] [--repeats 2] [--backend eager]

One process, one rank, batch 1, float32. "none", "attention" and "full" are plans; "own" is the plain model with its own
`gradient_checkpointing_enable()`, without evocompile. Each length is measured in turns within one run, so that ratios
hold on a machine with noise; a step whose bytes are counted comes first. A table, and last one JSON object:
{"speedup_over_layer_checkpoint": {length: time of "full" over time of "attention"}, "speedup_over_own_checkpoint": {…},
"attention_forwards_per_layer": {choice: number}, "cases": [{length, choice, step_s, peak_mb}, …], "machine": …}. Peaks
are bytes of live tensors in a step beside those of the parameters.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import evocompile
from evocompile import Plan

CHOICES = ("none", "attention", "full", "own")


def build(layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=256,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def models(layers: int, backend: str) -> dict[str, nn.Module]:
    """The same model under every choice."""
    made: dict[str, nn.Module] = {}
    for choice in CHOICES:
        model = build(layers)
        if choice == "own":
            model.gradient_checkpointing_enable({"use_reentrant": False})  # another name from transformers 6 on
        else:
            model = evocompile.parallelize(model, plan=Plan(recompute=choice), backend=backend)
        made[choice] = model
    return made


def step(model: nn.Module, ids: torch.Tensor) -> float:
    """Seconds of a forward and a backward."""
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def peak(model: nn.Module, ids: torch.Tensor) -> int:
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    return live.peak


def attention_forwards(model: nn.Module, ids: torch.Tensor, layers: int) -> float:
    """How often a step runs an attention's forward, for each layer: calls of the kernel."""
    with torch.profiler.profile() as profile:
        step(model, ids)
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return sum(each.count for each in profile.key_averages() if each.key == kernel) / layers


def measure(length: int, layers: int, repeats: int, backend: str) -> dict[str, dict[str, float]]:
    ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
    compared = models(layers, backend)
    for choice, model in compared.items():
        if choice != "own":
            evocompile.compile(model, input_ids=ids, labels=ids)
    peaks = {choice: peak(model, ids) for choice, model in compared.items()}
    times: dict[str, list[float]] = {choice: [] for choice in compared}
    for _ in range(repeats):
        for choice, model in compared.items():
            times[choice].append(step(model, ids))
    return {
        choice: {"step_s": round(statistics.median(times[choice]), 3), "peak_mb": round(peaks[choice] / 2**20, 1)}
        for choice in compared
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--backend", choices=("inductor", "eager"), default="eager")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        ids = torch.randint(0, 256, (1, 128))
        compared = models(options.layers, options.backend)
        for model in compared.values():
            step(model, ids)
        forwards = {choice: attention_forwards(model, ids, options.layers) for choice, model in compared.items()}
        cases: list[dict[str, Any]] = []
        for length in options.lengths:
            for choice, found in measure(length, options.layers, options.repeats, options.backend).items():
                cases.append({"length": length, "choice": choice, **found})
                print(f"{length:>7} {choice:10} {found['step_s']:8.3f} s {found['peak_mb']:8.1f} MB", flush=True)
        dist.destroy_process_group()
    seconds = {(each["length"], each["choice"]): each["step_s"] for each in cases}
    ratios = {
        name: {
            str(length): round(seconds[length, slow] / seconds[length, "attention"], 3) for length in options.lengths
        }
        for name, slow in (("speedup_over_layer_checkpoint", "full"), ("speedup_over_own_checkpoint", "own"))
    }
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(json.dumps({**ratios, "attention_forwards_per_layer": forwards, "cases": cases, "machine": machine}))


if __name__ == "__main__":
    main()
