"""A model and helpers that the tests of capture share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evocompile.capture import Captured
from evocompile.program import InputKind, OutputKind, Program


class Mlp(nn.Module):
    """A little of everything: a buffer that is updated, a flag, a scalar argument, a plain tensor attribute, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.table = torch.linspace(0, 1, 8, dtype=torch.float64)
        self.residual = True

    def forward(self, ids, labels=None, scale=1.0):
        self.calls.add_(1)
        x = self.embed(ids)
        y = self.dropout(self.down(torch.relu(self.up(x)))) * self.table * scale
        x = x + y if self.residual else y
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits, "hidden": [x, x[:, 1:]], "name": "mlp"}


def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp().double()


def ids_of(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(seed))


def run(captured: Captured, module: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[OutputKind, dict]:
    """The joint graph on real tensors, its results by kind and name. The tangents are ones."""
    program = captured.program
    state = {**dict(module.named_buffers()), **dict(module.named_parameters()), **vars(module), **inputs}
    flat = [
        torch.ones(each.shape, dtype=each.dtype) if each.kind is InputKind.TANGENT else state[each.name]
        for each in program.inputs
    ]
    assert program.joint is not None
    with torch.no_grad():
        results = program.joint(*flat)
    named: dict[OutputKind, dict] = {kind: {} for kind in OutputKind}
    for output, result in zip(program.outputs, results, strict=True):
        assert result is None or (tuple(result.shape), result.dtype) == (output.shape, output.dtype)
        named[output.kind][output.name] = result
    return named


def compiled_by(program: Program, results: list):
    """A `compiled` for `Captured.callable` that runs the joint graph and keeps all its results."""
    users = len(program.outputs_of(OutputKind.USER))
    tangents = [torch.ones(each.shape, dtype=each.dtype) for each in program.inputs_of(InputKind.TANGENT)]

    def compiled(*flat):
        with torch.no_grad():
            results[:] = program.joint(*flat, *tangents)
        return results[:users]

    return compiled


def assert_same_state(before: dict[str, torch.Tensor], module: nn.Module) -> None:
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def llama(tied: bool, layers: int = 2, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, vocab_size=64, tie_word_embeddings=tied, **sizes, **options
    )
    return transformers.LlamaForCausalLM(config).double()


class Asserting(nn.Linear):
    """Not in a test file, where pytest rewrites what is asserted."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > 2
        return super().forward(x)
