"""transformers' Trainer: `python hf_trainer.py`, or `torchrun --nproc-per-node 2 hf_trainer.py`."""

from __future__ import annotations

import os
import tempfile

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import evocompile

BACKEND = "eager"  # "inductor" for compiled code
DISTRIBUTED = "RANK" in os.environ


def main(folder: str | None = None) -> list[float]:
    folder = folder or tempfile.mkdtemp()
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,  # of the whole batch, as every rank takes all of it
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
    model = model.to(arguments.device)
    if DISTRIBUTED:
        model = evocompile.parallelize(model, backend=BACKEND)
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    if DISTRIBUTED:
        evocompile.adapt(
            trainer
        )  # the one line for Trainer: it neither wraps the model nor splits batches, and can save
    trainer.train()
    trainer.save_model(folder)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


if __name__ == "__main__":
    result = main()
    if os.environ.get("RANK", "0") == "0":
        print(result)
