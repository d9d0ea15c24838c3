"""attention_forms: what the model wrote as SDPA gives the same numbers and gradients as one canonical operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from evocompile.errors import CaptureError
from evocompile.passes.attention_forms import make_attention_canonical

DENSE = torch.ops.evocompile.dense_attention.default
B, H, HK, S, D, E = 2, 6, 2, 5, 4, 3
N = H // HK


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def rewrite(function: Any, inputs: list[Any]) -> tuple[fx.Graph, Any]:
    """Dynamo's graph of function(*inputs) after the pass, and what it computes."""
    graphs = []

    def backend(graph_module: fx.GraphModule, _: list[Tensor]) -> Any:
        make_attention_canonical(graph_module)
        graphs.append(graph_module.graph)
        return graph_module.forward

    torch.compiler.reset()
    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    (graph,) = graphs
    return graph, result


def check(function: Any, *inputs: Any, k: tuple[int, ...] | None = None) -> fx.Graph:
    """Compares values and gradients with eager; `k`: the shape of the keys that the operator gets."""
    graph, result = rewrite(function, list(inputs))
    expected = function(*inputs)
    torch.testing.assert_close(result, expected)
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    weight = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad((result * weight).sum(), leaves), wanted)
    (node,) = graph.find_nodes(op="call_function", target=DENSE)
    assert not graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert node.meta["stack_trace"] and node.meta["example_value"][0].shape == (
        *node.args[0].meta["example_value"].shape[:3],
        inputs[2].shape[-1],
    )
    if k is not None:
        assert _shape(node.args[1]) == k and _shape(node.args[2])[:3] == k[:3]
    return graph


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["example_value"].shape)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.ones(S, S, dtype=torch.bool).tril()},
        {"attn_mask": torch.linspace(-1, 1, S * S, dtype=torch.float64).view(S, S)},
        {"attn_mask": torch.ones(B, 1, S, S, dtype=torch.bool).tril(), "scale": 2.0},
    ],
)
def test_plain(arguments: dict[str, Any]) -> None:
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **arguments),
        *tensors((B, H, S, D), (B, H, S, D), (B, H, S, E)),
    )


def test_positional_arguments_and_other_length() -> None:
    inputs = tensors((B, H, S, D), (B, H, S + 2, D), (B, H, S + 2, E))
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True), *inputs)


def test_three_dimensions() -> None:
    mask = torch.ones(B, S, S, dtype=torch.bool).tril()
    inputs = tensors((B, S, D), (B, S, D), (B, S, E))
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *inputs, k=(B, 1, S, D))


def repeat_kv(x: Tensor) -> Tensor:
    """As transformers does."""
    batch, heads, length, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, N, length, size).reshape(batch, heads * N, length, size)


def unsqueezed(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, N, -1, -1).contiguous().view(x.shape[0], -1, *x.shape[2:])


FEW = (B, H, S, D), (B, HK, S, D), (B, HK, S, E)


@pytest.mark.parametrize(
    "repeat",
    [
        repeat_kv,
        unsqueezed,
        lambda x: repeat_kv(x).contiguous(),
        lambda x: x.repeat_interleave(N, dim=1),
        lambda x: x.repeat_interleave(N, 1),
        lambda x: torch.repeat_interleave(x, N, dim=-3),
        lambda x: torch.repeat_interleave(x, repeats=N, dim=1),
        lambda x: x.transpose(1, 2).repeat_interleave(N, dim=2).transpose(1, 2),  # keys (B, T, Hk, D)
        lambda x: x.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, N, -1).flatten(2, 3).permute(0, 2, 1, 3),
        lambda x: x.mT.mT.transpose(1, 2).unsqueeze(-2).repeat(1, 1, 1, N, 1).flatten(2, 3).transpose(-3, -2),
    ],
)
def test_repeated_heads_are_taken_before_the_repetition(repeat: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)

    graph = check(attend, *tensors(*FEW), k=(B, HK, S, D))
    assert not [node for node in graph.nodes if node.target in ("expand", "reshape", "repeat", "repeat_interleave")]


def test_grouped_heads() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    check(attend, *tensors(*FEW), k=(B, HK, S, D))


@pytest.mark.parametrize(
    ("repeat_k", "repeat_v"),
    [
        (lambda x: x.repeat(1, N, 1, 1), lambda x: x.repeat(1, N, 1, 1)),  # head h is head h % Hk: another order
        (repeat_kv, lambda x: repeat_kv(x) + 1),
        (repeat_kv, lambda x: x[:, :1].repeat_interleave(H, 1)),
        (lambda x: x[None].expand(N, *x.shape).reshape(x.shape[0], -1, *x.shape[2:]), repeat_kv),
    ],
)
def test_other_repetitions_stay(repeat_k: Any, repeat_v: Any) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeat_k(k), repeat_v(v))

    check(attend, *tensors(*FEW), k=(B, H, S, D))


def test_two_attentions_share_repeated_heads() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        many_k, many_v = repeat_kv(k), repeat_kv(v)
        first = F.scaled_dot_product_attention(q, many_k, many_v)
        return F.scaled_dot_product_attention(first + q, many_k, many_v, is_causal=True) + many_v

    inputs = tensors((B, H, S, D), (B, HK, S, D), (B, HK, S, D))
    graph, result = rewrite(attend, inputs)
    torch.testing.assert_close(result, attend(*inputs))
    nodes = graph.find_nodes(op="call_function", target=DENSE)
    assert [_shape(node.args[1])[1] for node in nodes] == [HK, HK]


@pytest.mark.parametrize("shape", [(S, S), (H, 1, S), (B, 1, S, S), (1, H, S, 1)])
def test_a_learned_mask_gets_its_gradient(shape: tuple[int, ...]) -> None:
    *inputs, bias = tensors((B, H, S, D), (B, HK, S, D), (B, HK, S, E), shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=False, enable_gqa=True)

    check(attend, *inputs, bias, k=(B, HK, S, D))


@pytest.mark.parametrize(
    ("arguments", "shapes", "reason"),
    [
        ({}, [(1, B, H, S, D)] * 3, "attention on shapes"),
        ({}, [(S, D)] * 3, "attention on shapes"),
        ({}, [(B, H, S, D), (1, H, S, D), (1, H, S, D)], "batch sizes differ"),
    ],
)
def test_refused_with_the_source_line(arguments: dict[str, Any], shapes: Any, reason: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **arguments)

    refusals = []

    def backend(graph_module: fx.GraphModule, _: list[Tensor]) -> Any:
        with pytest.raises(CaptureError, match=reason) as refusal:
            make_attention_canonical(graph_module)
        refusals.append(str(refusal.value))
        return graph_module.forward

    torch.compiler.reset()
    torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)(*tensors(*shapes))
    assert len(refusals) == 1 and "test_attention_forms.py:" in refusals[0]
