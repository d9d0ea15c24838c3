"""LoRA with peft: `python peft_lora.py`, or `torchrun --nproc-per-node 2 peft_lora.py`."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import evocompile

BACKEND = "eager"  # "inductor" for compiled code
DISTRIBUTED = "RANK" in os.environ


def main(folder: str | None = None, steps: int = 4) -> list[float]:
    folder = folder or tempfile.mkdtemp()
    if DISTRIBUTED and not dist.is_initialized():
        dist.init_process_group()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    if DISTRIBUTED:
        model = evocompile.parallelize(model, backend=BACKEND)  # the one line: after the adapters are in
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = torch.randint(0, 97, (2, 23), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if DISTRIBUTED:
        with evocompile.unsharded(model):  # all ranks enter, rank 0 writes the adapters
            if dist.get_rank() == 0:
                model.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
    return losses


if __name__ == "__main__":
    result = main()
    if os.environ.get("RANK", "0") == "0":
        print(result)
