"""Accelerate: `python hf_accelerate.py`, or `torchrun --nproc-per-node 2 hf_accelerate.py`."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import evocompile

BACKEND = "eager"  # "inductor" for compiled code
DISTRIBUTED = "RANK" in os.environ


def main() -> list[float]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model = model.to(accelerator.device)
    if DISTRIBUTED:
        evocompile.adapt(accelerator)  # the one line for Accelerate: neither wraps the model nor splits batches
        model = evocompile.parallelize(model, backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    data = TensorDataset(torch.randint(0, 97, (8, 23), generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    result = main()
    if os.environ.get("RANK", "0") == "0":
        print(result)
