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
    """One model on one batch. model: a name of `MODELS`; ids and labels are drawn from the seed.

    form: "plain"; "left" or "right" for padding of uneven lengths, with an attention mask; "packed" for documents that
          share a row, told apart by their position ids.
    """

    model: str
    batch: int = 2
    length: int = 16
    seed: int = 0
    dtype: str = "float32"
    form: str = "plain"

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = MODELS[self.model]().to(getattr(torch, self.dtype)).train()
        if self.form == "packed":
            model.config.use_cache = False  # with a cache to fill, transformers does not look for documents
        return model

    def inputs(self, step: int = 0) -> dict[str, torch.Tensor]:
        """Batch number `step`: keyword arguments of the model, with spans of labels that are ignored."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        if self.model.startswith("vit"):
            pixels = torch.randn(self.batch, 3, IMAGE, IMAGE, generator=generator)
            return {
                "pixel_values": pixels.to(getattr(torch, self.dtype)),
                "labels": torch.randint(0, CLASSES, (self.batch,), generator=generator),
            }
        ids = torch.randint(0, VOCABULARY, (self.batch, self.length), generator=generator)
        labels = ids.clone()
        labels[0, : self.length // 3] = -100
        labels[-1, self.length // 2 : self.length // 2 + 2] = -100
        inputs = {"input_ids": ids, "labels": labels}
        if self.model == "whisper":
            inputs = {
                "input_features": torch.randn(self.batch, BANDS, 2 * FRAMES, generator=generator),
                "labels": labels,
            }
        if self.form in ("left", "right"):
            mask = _padding(self.batch, self.length, self.form)
            inputs |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}
        elif self.form == "packed":
            inputs["position_ids"] = _packed_positions(self.batch, self.length)
        return inputs


VOCABULARY = 67
IMAGE, CLASSES = 12, 5  # pixels along each side, and what an image may show
BANDS, FRAMES = 6, 17  # of sound: frequencies, and positions of the encoder


def _padding(batch: int, length: int, side: str) -> torch.Tensor:
    """(batch, length): 1 for tokens, 0 for padding, row b with b + 2 positions of it, the last row with none."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row in range(batch - 1):
        mask[row, : row + 2] = 0
    return mask if side == "left" else mask.flip(1)


def _packed_positions(batch: int, length: int) -> torch.Tensor:
    """(batch, length): positions that start anew with each document; every row is cut at other places."""
    rows = []
    for row in range(batch):
        first, second = length // 3 + row, length // 2 + 1 + row
        rows.append(torch.cat([torch.arange(n) for n in (first, second - first, length - second)]))
    return torch.stack(rows)


def _hf(name: str, head: str = "ForCausalLM", **changes: Any) -> nn.Module:
    """A tiny model of transformers, of a family that names its sizes as Llama does. None leaves a setting out."""
    import transformers

    settings = {
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings = {key: value for key, value in {**settings, **changes}.items() if value is not None}
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config"))
    return getattr(transformers, name + head)(config(**settings))


def _llama(**changes: Any) -> nn.Module:
    return _hf("Llama", pad_token_id=None, bos_token_id=None, eos_token_id=None, **changes)


def _gpt2() -> nn.Module:
    import transformers

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=512, vocab_size=VOCABULARY, **dropout)
    return transformers.GPT2LMHeadModel(config)


def _deepseek() -> nn.Module:
    attention = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    return _hf("DeepseekV3", num_key_value_heads=4, **attention, **experts)


def _eager(name: str, head: str = "ForCausalLM", **changes: Any) -> nn.Module:
    """A model of transformers that writes its attention out. These do not name their sizes as Llama does."""
    import transformers

    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(attn_implementation="eager", use_cache=False, **tokens, **changes)
    return getattr(transformers, name + head)(config)


class Prepared(nn.Module):
    """An encoder and decoder of transformers on ids of two lengths."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        shorter = labels[:, :-3].contiguous()
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=shorter, use_cache=False)
        return out.loss, out.logits


_BART = {
    "d_model": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "dropout": 0.0,
    **{f"{part}_layers": 1 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
}
_GPT_NEO = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 5,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


_WHISPER = {
    "d_model": 32,
    "num_mel_bins": BANDS,
    "max_source_positions": FRAMES,
    "max_target_positions": 64,
    "decoder_start_token_id": 1,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def _vit(attention: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    image = {"image_size": IMAGE, "patch_size": 3, "num_labels": CLASSES}
    config = transformers.ViTConfig(attn_implementation=attention, **sizes, **image)
    return transformers.ViTForImageClassification(config)


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


class Encoder(nn.Module):
    """torch's own encoder under a head that names each token. norm_first: norms before or after each part."""

    def __init__(self, norm_first: bool, batch_first: bool = True, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.tokens = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        padding = None if attention_mask is None else attention_mask == 0
        x = self.tokens(input_ids)
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        if not self.batch_first:
            x = x.transpose(0, 1)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-bias": lambda: _llama(
        attention_bias=True, mlp_bias=True, hidden_size=36, num_attention_heads=3, num_key_value_heads=1
    ),
    "gpt": PlainGPT,
    "gpt2": _gpt2,
    "mistral": lambda: _hf("Mistral", sliding_window=5),
    "qwen2": lambda: _hf("Qwen2"),
    "qwen3": lambda: _hf("Qwen3", head_dim=8),
    "gemma3": lambda: _hf("Gemma3", head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "gpt-neox": lambda: _hf("GPTNeoX", num_key_value_heads=None),
    "phi3": lambda: _hf("Phi3"),
    "olmo2": lambda: _hf("Olmo2"),
    "smollm3": lambda: _hf("SmolLM3"),
    "mixtral": lambda: _hf("Mixtral", **_EXPERTS),
    "mixtral-auxiliary": lambda: _hf("Mixtral", output_router_logits=True, router_aux_loss_coef=0.1, **_EXPERTS),
    "qwen3-moe": lambda: _hf(
        "Qwen3Moe", head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
    "deepseek-v3": _deepseek,
    "bert": lambda: _hf(
        "Bert", "ForMaskedLM", num_key_value_heads=None, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "llama-eager": lambda: _hf("Llama", attn_implementation="eager"),
    "gemma2": lambda: _hf(
        "Gemma2", head_dim=8, sliding_window=5, attn_implementation="eager", attn_logit_softcapping=2.0
    ),
    "gpt-oss": lambda: _hf(
        "GptOss", head_dim=8, sliding_window=5, attn_implementation="eager", use_cache=False, **_EXPERTS
    ),
    "mpt": lambda: _eager("Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "bloom": lambda: _eager("Bloom", hidden_size=32, n_layer=2, n_head=4),
    "falcon": lambda: _eager("Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
    "gpt-neo": lambda: _eager("GPTNeo", **_GPT_NEO),
    "bart": lambda: Prepared(_eager("Bart", "ForConditionalGeneration", **_BART)),
    "t5": lambda: Prepared(_eager("T5", "ForConditionalGeneration", dropout_rate=0.0, **_T5)),
    "whisper": lambda: _eager("Whisper", "ForConditionalGeneration", **_WHISPER),
    "vit": lambda: _vit("eager"),
    "vit-sdpa": lambda: _vit("sdpa"),
    "encoder": lambda: Encoder(norm_first=False),
    "encoder-norm-first": lambda: Encoder(norm_first=True),
    "encoder-seq-first": lambda: Encoder(norm_first=True, batch_first=False),
}
