"""The longest sequence that trains within a limit of memory: evocompile against FSDP2 and DeepSpeed's Ulysses (ALST).

    python benchmarks/max_context.py [--limit-mb 384] [--predict-only] [--only evocompile fsdp2 alst] [--known FILE]

Llama of hidden 256, MLP 704, 4 layers, 8 heads / 4 key/value heads, vocabulary 2048, float32, AdamW, batch 1, two ranks
(gloo), eager. What counts is the sum of live tensors on a rank (live_bytes.py) in a forward and a backward, with
parameters, gradients, AdamW's states and inputs; MB are 2^20 bytes, lengths multiples of 128 tokens.

evocompile splits one sequence over both ranks. Its static memory model finds the length, and one step of that length
on real ranks confirms it (`--predict-only` leaves that out: attention of 40K tokens takes minutes on a CPU). FSDP2
shards the states, checkpoints each layer (the model's own `gradient_checkpointing_enable`), and each rank has a
sequence of its own. Peaks are linear in the length: two short steps give the line, further ones correct it. ALST splits
one sequence, shards the states (ZeRO-3) and checkpoints each layer; it takes DeepSpeed (`pip install -e '.[peers]'`),
without which it is null.

`--known` keeps the measured peaks in a file, so that a run that was cut off goes on where it ended; a last run without
`--only` then tells all systems.

A table, and last one JSON object: {"evocompile": tokens, "fsdp2": tokens, "alst": tokens, "peaks_mb", "machine"}.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from peer_training import alst
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import evocompile
from evocompile import Plan
from evocompile.capture import capture
from evocompile.memory import step_memory
from evocompile.pipeline import run_passes
from evocompile.runtime import ParallelFunction

MB, STEP, RANKS = 2**20, 128, 2
PLAN = Plan(cp=RANKS, recompute="full", loss_chunk=2 * MB, mlp_chunk=MB)


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 2048}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False)
    return LlamaForCausalLM(config).train()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def predicted(length: int) -> int:
    """The peak of a step of evocompile, at the rank with more."""
    with torch.device("meta"):
        model, ids = build(), torch.zeros(1, length, dtype=torch.long)
    program = capture(loss_of, model, (model, ids), {}).program
    return max(step_memory([run_passes(program, PLAN, rank)]).peak for rank in range(RANKS))


# --- measuring on real ranks -----------------------------------------------------------------------------------------


Loss = Callable[[nn.Module, Tensor], Tensor]


def _with_evocompile(model: nn.Module, ids: Tensor) -> Loss:
    step = evocompile.parallelize(loss_of, model=model, plan=PLAN, backend="eager")
    evocompile.compile(step, model, ids)
    return step


def _with_fsdp2(model: nn.Module, ids: Tensor) -> Loss:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # another name from transformers 6 on
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return loss_of


SYSTEMS = {"evocompile": _with_evocompile, "fsdp2": _with_fsdp2}
PEERS = ("fsdp2", "alst")


def _peak_of_alst(length: int) -> int:
    """As `_peak`, of all that is alive from the making of the model on, since DeepSpeed holds more than its states."""
    with LiveBytes() as live:
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        engine, loss = alst.engine_and_loss(model, 1)
        for tokens in (2 * STEP, length):
            ids = torch.randint(0, 2048, (1, tokens), generator=torch.Generator().manual_seed(0))
            part = alst.part_of({"input_ids": ids, "labels": ids})
            live.peak = live.now
            engine.backward(loss(part))
            peak = live.peak
            engine.step()
    return peak


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _peak(system: str, length: int) -> int:
    """Bytes at the peak of a step on this rank, after a short one that makes the optimizer's states."""
    model = build()
    ids = torch.randint(0, 2048, (1, length), generator=torch.Generator().manual_seed(0))
    loss = SYSTEMS[system](model, ids)
    optimizer = torch.optim.AdamW(model.parameters())
    loss(model, ids[:, : 2 * STEP].clone()).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    there = sum(map(_bytes, [*model.parameters(), ids, *states]))
    if isinstance(loss, ParallelFunction):
        there += loss.model.buffers.report().bytes
    with LiveBytes() as live:
        loss(model, ids).backward()
    optimizer.step()
    return there + live.peak


def _work(rank: int, system: str, length: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}  # DeepSpeed reads them
    peak = _peak_of_alst(length) if system == "alst" else _peak(system, length)
    with open(os.path.join(folder, f"{rank}"), "w") as file:
        file.write(str(peak))
    dist.destroy_process_group()


class Known:
    """Measured peaks by system and length, in a file if there is one."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._peaks: dict[str, dict[str, int]] = {}
        if path is not None and os.path.exists(path):
            with open(path) as file:
                self._peaks = json.load(file)

    def peak(self, system: str, length: int) -> int:
        """The peak of a step, at the rank with more."""
        peaks = self._peaks.setdefault(system, {})
        if str(length) not in peaks:
            peaks[str(length)] = _measured(system, length)
            if self._path is not None:
                with open(self._path, "w") as file:
                    json.dump(self._peaks, file)
        print(f"{system:12} {length:>8,} tokens: {peaks[str(length)] / MB:8.1f} MB", flush=True)
        return peaks[str(length)]


def _measured(system: str, length: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (system, length, folder), RANKS)
        peaks = []
        for rank in range(RANKS):
            with open(os.path.join(folder, f"{rank}")) as file:
                peaks.append(int(file.read()))
    return max(peaks)


# --- searching -------------------------------------------------------------------------------------------------------


def longest(peak: Callable[[int], int], limit: int) -> tuple[int, int]:
    """The longest length of which the peak is within the limit, and that peak: along the line through two lengths."""
    known = {length: peak(length) for length in (8 * STEP, 16 * STEP)}
    while True:
        (low, first), (high, second) = sorted(known.items())[-2:]
        slope = (second - first) / (high - low)
        guess = int((high + (limit - second) / slope) // STEP * STEP)
        if guess in known:
            fitting = max(length for length, size in known.items() if size <= limit)
            if guess + STEP in known or fitting != guess:
                return fitting, known[fitting]
            guess += STEP
        known[guess] = peak(guess)
        if known[guess] > limit and (below := guess - STEP) not in known:
            known[below] = peak(below)


def confirmed(length: int, limit: int, known: Known) -> tuple[int, int]:
    """The length or the next shorter one that a real step fits."""
    while (size := known.peak("evocompile", length)) > limit:
        length -= max(round((size - limit) / size * length / STEP), 1) * STEP
    return length, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=int, default=384)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("evocompile", *PEERS), default=("evocompile", *PEERS))
    parser.add_argument("--known", metavar="FILE", help="measured peaks, read and added to")
    options = parser.parse_args()
    known = Known(options.known)
    limit, found = options.limit_mb * MB, dict.fromkeys(("evocompile", *PEERS))
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    peaks: dict[str, float] = {}
    if "evocompile" in options.only:
        length, size = longest(predicted, limit)
        print(f"evocompile   {length:>8,} tokens: {size / MB:8.1f} MB by the memory model", flush=True)
        if not options.predict_only:
            length, size = confirmed(length, limit, known)
        found["evocompile"], peaks["evocompile"] = length, round(size / MB, 1)
    for peer in PEERS:
        if peer in options.only and (peer != "alst" or has_deepspeed):
            found[peer], size = longest(functools.partial(known.peak, peer), limit)
            peaks[peer] = round(size / MB, 1)
    print(f"\nlongest sequence in {options.limit_mb} MB a rank, {RANKS} ranks")
    for system, length in found.items():
        why = "DeepSpeed is not installed" if system == "alst" and not has_deepspeed else "left out"
        print(f"  {system:12} " + (f"{length:>8,} tokens" if length else f"not run: {why}"))
    machine = f"{platform.machine()}, torch {torch.__version__}"
    print(json.dumps({**found, "peaks_mb": peaks, "machine": machine}))


if __name__ == "__main__":
    main()
