"""Runs of Trainer and Accelerate that save with the libraries' own means and go on from there, for test_examples.py."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import evocompile

STEPS, SAVED = 4, 2


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 53}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, **heads, use_cache=False, attention_dropout=0.0, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    if dist.is_initialized():
        degrees = evocompile.Shard(params=1, grads=1, optimizer=2)
        evocompile.parallelize(model, plan=evocompile.Plan(cp=2, shard=degrees), backend="eager")
    return model


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 53, (11,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def train(folder: Path, resume: Path | None) -> list[float]:
    """Losses of a Trainer that saves every second step. resume: a checkpoint of another run, or `None`."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        max_steps=STEPS,  # of three in an epoch, so the fourth needs the position in the data
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SAVED,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=build(), args=arguments, train_dataset=Texts())
    if dist.is_initialized():
        evocompile.adapt(trainer)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def accelerate(folder: Path, resume: Path | None) -> list[float]:
    """Losses of an Accelerate loop that saves after the second step, or goes on from there."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if dist.is_initialized():
        evocompile.adapt(accelerator)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    data = TensorDataset(torch.stack([Texts()[index]["input_ids"] for index in range(8)]))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, 2), schedule)
    if resume:
        accelerator.load_state(str(resume))
        loader = accelerator.skip_first_batches(loader, SAVED)
    losses = []
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == SAVED and not resume:
            accelerator.save_state(str(folder))
    return losses


def straight_and_again(folder: Path, resume: Path) -> dict[str, list[float]]:
    """Losses of both libraries straight through, with checkpoints in `folder`, and from the checkpoints in `resume`."""
    return {
        "trainer": train(folder / "trainer", None),
        "accelerate": accelerate(folder / "accelerate", None),
        "trainer again": train(folder / "again", resume / "trainer" / f"checkpoint-{SAVED}"),
        "accelerate again": accelerate(folder, resume / "accelerate"),
    }
