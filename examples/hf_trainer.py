"""transformers' Trainer: `python hf_trainer.py`, or `torchrun --nproc-per-node 2 hf_trainer.py`."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

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
        save_strategy="no",  # Trainer's own checkpoints would have one rank's state
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
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[Saving(f"{folder}/checkpoints")])
    if DISTRIBUTED:
        evocompile.adapt(trainer.accelerator)  # the one line for Trainer: neither wraps the model nor splits batches
    trainer.train()
    if DISTRIBUTED:
        with evocompile.unsharded(model):  # all ranks enter; Trainer writes on rank 0
            trainer.save_model(folder)
    else:
        trainer.save_model(folder)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


class Saving(TrainerCallback):
    """A checkpoint of the run after every second step, beside the training."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        self.checkpoints = evocompile.Checkpoints(
            self.folder, run["model"], run["optimizer"], schedule=run["lr_scheduler"]
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        if state.global_step % 2 == 0:
            self.checkpoints.save(state.global_step, asynchronous=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **run: Any) -> None:
        self.checkpoints.finish()


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
