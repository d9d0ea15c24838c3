"""The model and the batch that everybody trains, and what a system of training has to offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, VOCABULARY = 2048, 2048
Batch = Mapping[str, Tensor]


def build() -> nn.Module:
    """Float32, the same weights in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": VOCABULARY}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False)
    return LlamaForCausalLM(config).train()


def batch_of(rows: int, length: int = LENGTH) -> Batch:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass
class Training:
    """One step is `update(backward())`.

    backward:  forward and backward; this rank's loss. The mean over the ranks is that of the batch.
    update:    the optimizer's step, and gradients set to none.
    gradients: between the two: by the model's own names of its parameters, whole. Every rank calls it.
    """

    backward: Callable[[], Tensor]
    update: Callable[[], None]
    gradients: Callable[[], dict[str, Tensor]]


def plain(
    model: nn.Module, loss: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter] | None = None
) -> Training:
    """Training by autograd and AdamW of the parameters as they are, which have the model's own names or those given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def backward() -> Tensor:
        value = loss()
        value.backward()
        return value.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    named = dict(model.named_parameters()) if parameters is None else parameters
    return Training(backward, update, lambda: {name: whole(each.grad) for name, each in named.items()})


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "a parameter without a gradient"
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def own_rows(batch: Batch) -> dict[str, Tensor]:
    """This rank's rows."""
    return {name: each.chunk(dist.get_world_size())[dist.get_rank()] for name, each in batch.items()}
