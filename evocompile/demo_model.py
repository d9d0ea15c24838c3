"""What the demo trains: a small Llama of transformers, on the bytes of real text, with the loop for one device.

Imports nothing of evocompile. Run as a script it is the demo's reference, in a process of its own:

    python -P demo_model.py RESULT.pt --steps 20 --seed 0 --threads 1
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

BATCH = 2
LENGTH = 190  # no multiple of 4 or 8: the shards of longer rings are uneven
VOCABULARY = 256  # bytes
LEARNING_RATE = 3e-3
JUDGED_STEPS = 20  # from about step 40 on, one rounding of the weights changes the loss visibly, on one device too
TEXT = Path(__file__).with_name("data") / "prose.txt"

Result = dict[str, Any]


def build(seed: int) -> nn.Module:
    """A Llama with grouped-query attention: 3 layers, 4 query heads on 2 key/value heads, about 0.4 million weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).train()


def batch(step: int, seed: int, rows: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    """Pieces of the text, drawn by seed and step, as the model's keyword arguments: int64, (rows, length)."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1_000_000 * seed + step)
    starts = torch.randint(len(text) - length, (rows,), generator=generator).tolist()
    ids = torch.stack([text[start : start + length] for start in starts]).long()
    return {"input_ids": ids, "labels": ids.clone()}


def train(model: nn.Module, steps: int, seed: int, who: str | None) -> Result:
    """Train `model`: its losses, the gradients of the first step, the parameters after the judged ones, all whole.

    who: the name under which progress goes to stderr; `None` for silence.
    Seconds are those of all steps but the first, in which compilers and allocators warm up.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, gradients, parameters = [], {}, {}
    begin = warm = time.perf_counter()
    for step in range(steps):
        loss = model(**batch(step, seed)).loss
        loss.backward()
        if step == 0:
            gradients = {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == min(steps, JUDGED_STEPS):
            parameters = {name: whole(each) for name, each in model.named_parameters()}
        if step == 0:
            warm = time.perf_counter()
        if who is not None:
            print(f"{who}: step {step + 1} of {steps}, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    end = time.perf_counter()
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": parameters,
        "first_step_seconds": warm - begin,
        "other_steps_seconds": end - warm,
    }


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor; of a sharded one, all of it (a collective)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    for name in ("--steps", "--seed", "--threads"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.save(train(build(options.seed), options.steps, options.seed, "one device"), options.result)
    assert not any(name.split(".")[0] == "evocompile" for name in sys.modules)


if __name__ == "__main__":
    _main()
