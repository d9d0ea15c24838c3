"""A loop as for one device: `python plain_loop.py`, or `torchrun --nproc-per-node 2 plain_loop.py`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import evocompile

BACKEND = "eager"  # "inductor" for compiled code
DISTRIBUTED = "RANK" in os.environ


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)  # every rank builds the same model
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def main(steps: int = 4) -> list[float]:
    if DISTRIBUTED and not dist.is_initialized():
        dist.init_process_group()
    model = build()
    if DISTRIBUTED:
        model = evocompile.parallelize(model, backend=BACKEND)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        # the whole batch on every rank
        ids = torch.randint(0, 97, (2, 23), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    result = main()
    if os.environ.get("RANK", "0") == "0":
        print(result)
