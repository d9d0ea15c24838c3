"""Small models and batches for the end-to-end tests. Imports nothing of evocompile: the reference uses it too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """One model on one batch. model: a name of `MODELS`; ids and labels are drawn from the seed."""

    model: str
    batch: int = 2
    length: int = 16
    seed: int = 0
    dtype: str = "float32"

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return MODELS[self.model]().to(getattr(torch, self.dtype)).train()

    def inputs(self, step: int = 0) -> dict[str, torch.Tensor]:
        """Batch number `step`: keyword arguments of the model, with spans of labels that are ignored."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        ids = torch.randint(0, VOCABULARY, (self.batch, self.length), generator=generator)
        labels = ids.clone()
        labels[0, : self.length // 3] = -100
        labels[-1, self.length // 2 : self.length // 2 + 2] = -100
        return {"input_ids": ids, "labels": labels}


VOCABULARY = 67


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


class PlainGPT(nn.Module):
    """A GPT as people write it by hand: learned positions, fused qkv, biases, GELU, tied head, shifted labels."""

    def __init__(self, width: int = 24, heads: int = 3, layers: int = 2, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return (logits,)
        # the older habit: cut the last logits off instead of padding the labels
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), ignore_index=-100)
        return loss, logits


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(b, s, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).contiguous().view(b, s, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-bias": lambda: _llama(
        attention_bias=True, mlp_bias=True, hidden_size=36, num_attention_heads=3, num_key_value_heads=1
    ),
    "gpt": PlainGPT,
}
