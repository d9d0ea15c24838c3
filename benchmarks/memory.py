"""How well the static memory model (evocompile/memory.py) predicts what a step holds: predicted against measured peaks.

    python benchmarks/memory.py [--cases N] [--device cpu|cuda]

Each case trains a small model of transformers with AdamW on real processes (gloo), one a rank, on the eager backend.
After a first step, which makes the optimizer's state, one forward and backward is measured: the bytes of states and
inputs that are there, and the peak of the tensors that operators allocate, those inside of evocompile's own operators
included (live_bytes.py; on a card, run for one rank, the allocator's statistics). Each rank compares its own peak with
its own prediction. A table, and last one JSON object: {"worst_relative_error": …, "cases": [{case, rank, predicted,
measured, relative_error, at}, …], "machine": …}.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from live_bytes import LiveBytes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import evocompile
from evocompile import Plan, Shard
from evocompile.memory import Memory
from evocompile.runtime import ParallelFunction


class Case(NamedTuple):
    model: str
    plan: Plan
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.model} {self.batch} x {self.length}, {self.plan}"


CASES = (
    Case("llama", Plan(), 1, 2048),
    Case("gpt-neox", Plan(recompute="attention"), 2, 512),
    Case("llama", Plan(cp=2), 1, 2048),
    Case("llama", Plan(cp=2, recompute="attention", recompute_layers=0.5), 2, 1024),
    Case("gpt-neox", Plan(dp=2, shard=Shard(1, 2, 2), recompute="full"), 4, 512),
    Case("qwen3", Plan(ulysses=2, shard=Shard(1, 1, 2)), 2, 1024),
    Case("mistral", Plan(cp=2, attention="ring"), 1, 1501),
    Case("mixtral", Plan(dp=2), 2, 512),
    Case("llama", Plan(cp=4, attention="balanced", recompute="attention"), 1, 2048),
    Case("qwen3", Plan(dp=2, cp=2, shard=Shard(2, 2, 4), microbatches=2), 4, 512),
)
"""Models × plans: attention schedules, shard degrees, recomputation, micro-batches, parts that are uneven."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "vocab_size": 1000}
    heads = {"num_attention_heads": 8} | ({} if name == "gpt-neox" else {"num_key_value_heads": 4})
    other = {"mistral": {"sliding_window": 256}, "qwen3": {"head_dim": 16}}.get(name, {})
    if name == "mixtral":
        other = {"num_local_experts": 4, "num_experts_per_tok": 2}
    kind = {"gpt-neox": "GPTNeoX"}.get(name, name.capitalize())
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **other, use_cache=False)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def loss_of(model: nn.Module, **batch: Tensor) -> Tensor:
    return model(**batch).loss


def measured_peak(loss: ParallelFunction, model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes at the peak of a forward and a backward, with what was there before."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss(model, **batch).backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    there = sum(map(_bytes, [*model.parameters(), *model.buffers(), *batch.values(), *state]))
    there += loss.model.buffers.report().bytes
    if batch["input_ids"].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return there + torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        step()
    return there + live.peak


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def run_case(case: Case, device: str) -> tuple[int, Memory]:
    """The measured peak of this rank, and the prediction."""
    model = build(case.model).to(device)
    ids = torch.randint(0, 1000, (case.batch, case.length), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": ids, "labels": ids.clone()}
    loss = evocompile.parallelize(loss_of, model=model, plan=case.plan, backend="eager")
    return measured_peak(loss, model, batch), loss.memory


def work(rank: int, world: int, cases: list[Case], device: str, folder: str) -> None:
    """What one process does: all cases of one world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    found = []
    for case in cases:
        measured, memory = run_case(case, device)
        at = f"{memory.at.graph}: {memory.source}"
        error = abs(memory.peak - measured) / measured
        row = {
            "rank": rank,
            "predicted": memory.peak,
            "measured": measured,
            "relative_error": round(error, 5),
            "at": at,
        }
        found.append({"case": str(case), **row})
    with open(os.path.join(folder, f"{world}.{rank}.json"), "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def run(cases: list[Case], device: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in sorted({case.plan.world for case in cases}):
            own = [case for case in cases if case.plan.world == world]
            torch.multiprocessing.spawn(work, (world, own, device, folder), world)
            for rank in range(world):
                with open(os.path.join(folder, f"{world}.{rank}.json")) as file:
                    rows += json.load(file)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="only these, by number")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    cases = [each for each in (CASES[i] for i in options.cases) if options.device == "cpu" or each.plan.world == 1]
    rows = run(cases, options.device)
    for case in cases:
        own = [row for row in rows if row["case"] == str(case)]
        worst = max(own, key=lambda row: row["relative_error"])
        predicted, measured = (worst[name] / 2**20 for name in ("predicted", "measured"))
        print(
            f"{case!s:96} predicted {predicted:8.2f} MB, measured {measured:8.2f} MB, "
            f"error {worst['relative_error']:.2%} at the worst of {len(own)} ranks"
        )
    worst_error = max(row["relative_error"] for row in rows)
    machine = f"{platform.machine()}, torch {torch.__version__}, {options.device}"
    print(json.dumps({"worst_relative_error": worst_error, "cases": rows, "machine": machine}))


if __name__ == "__main__":
    sys.exit(main())
