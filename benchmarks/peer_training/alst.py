"""DeepSpeed's Ulysses (ALST) with ZeRO-3: the sequence is split, heads are exchanged for positions around attention.

`ulysses_sp.py` of DeepSpeed wants by hand what is done here: positions, labels that are shifted before the split, and a
loss weighted by tokens, gathered with its gradient. It puts itself in the place of transformers' sdpa for the whole
process. DeepSpeed books buckets of 2 GB by default; here they have the size of the model. (With ZeRO-1 it applied
gradients that were twice as large: AdamW hides that.)
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from torch import Tensor, nn

from .workload import Batch, Training

os.environ.setdefault("DS_ACCELERATOR", "cpu")
BUCKET = 2**22  # elements


def prepare(model: nn.Module, batch: Batch) -> Training:
    engine, loss = engine_and_loss(model, batch["input_ids"].shape[0])
    part = part_of(batch)

    def backward() -> Tensor:
        value = loss(part)
        engine.backward(value)
        return value.detach()

    def gradients() -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return {name: safe_get_full_grad(each) for name, each in engine.module.named_parameters()}

    return Training(backward, engine.step, gradients)


def engine_and_loss(model: nn.Module, rows: int) -> tuple[Any, Any]:
    """DeepSpeed's engine, with AdamW, and the loss of the whole batch from what `part_of` gives."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=rows,
        seq_length_is_variable=True,
    )
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "sequence_parallel_size": dist.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": BUCKET,
            "stage3_max_reuse_distance": BUCKET,
            "stage3_param_persistence_threshold": 10_000,
        },
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)

    def loss(part: dict[str, Tensor]) -> Tensor:
        labels = part["shift_labels"]
        logits = engine(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
        own = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        tokens = (labels != -100).sum()
        losses = torch.distributed.nn.functional.all_gather(own)
        counts = [torch.zeros_like(tokens) for _ in losses]
        dist.all_gather(counts, tokens)
        return sum(each * count for each, count in zip(losses, counts, strict=True)) / sum(counts)

    return engine, loss


def part_of(batch: Batch) -> dict[str, Tensor]:
    """This rank's positions of the batch."""
    ids = batch["input_ids"]
    values = {
        "input_ids": ids,
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:],
    }
    return {name: each.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for name, each in values.items()}
