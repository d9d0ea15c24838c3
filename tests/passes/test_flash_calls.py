"""Calls of the flash-attn package, of which a stand-in computes what the package documents, against one device."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.trace_rules import get_torch_obj_rule_map

from evocompile.capture import capture
from evocompile.errors import CaptureError
from evocompile.plan import Plan
from evocompile.program import source_line
from tests.equality import run
from tests.passes.test_written_attention import attentions

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, DIM = 2, 13, 8, 4, 2, 3


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """What the package's function gives, without repeated heads or infinities. No tracer can look into it."""
    sys._getframe()
    (batch, queries, heads, dim), keys = q.shape, k.shape[1]
    grouped = q.view(batch, queries, k.shape[2], heads // k.shape[2], dim)
    scores = torch.einsum("bsgnd,btgd->bgnst", grouped, k).flatten(1, 2) * (softmax_scale or 1 / math.sqrt(dim))
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(queries):
        at = row + keys - queries
        first = at - window_size[0] if window_size[0] >= 0 else 0
        last = at if causal else at + window_size[1] if window_size[1] >= 0 else keys
        seen[row, max(first, 0) : max(last + 1, 0)] = True
    if alibi_slopes is not None:
        distance = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
        scores = scores - alibi_slopes.view(-1, heads, 1, 1) * distance
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp() * seen
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    out = torch.einsum("bgnst,btge->bsgne", weights.unflatten(1, (k.shape[2], -1)), v)
    return out.reshape(batch, queries, heads, v.shape[3]).contiguous()


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, **rest: Any
) -> Tensor:
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, **rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **rest: Any,
) -> Tensor:
    """One call of the other function for each document."""
    edges = (bounds.tolist() for bounds in (cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:]))
    parts = [(q[None, a:b], k[None, c:d], v[None, c:d]) for a, b, c, d in zip(*edges, strict=True)]
    return torch.cat([flash_attn_func(*part, **rest)[0] for part in parts])


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


class Model(nn.Module):
    """Projections around one call of the package; keys of `other`, where that is given."""

    def __init__(self, call: Callable[..., Tensor], kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]), persistent=False)
        self.to_q = nn.Linear(WIDTH, HEADS * DIM, dtype=torch.float64)
        self.to_k, self.to_v = (nn.Linear(WIDTH, kv_heads * DIM, dtype=torch.float64) for _ in range(2))
        self.back = nn.Linear(HEADS * DIM, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        source = x if other is None else other
        q, k, v = (each.unflatten(2, (-1, DIM)) for each in (self.to_q(x), self.to_k(source), self.to_v(source)))
        return self.back(self.call(self, q, k, v).view(*x.shape[:2], -1)).tanh()


def packed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2), 0.0, causal=True)


def by_rows(v: Tensor) -> Tensor:
    """Slopes (B, H) that are computed where they are needed."""
    return 2.0 ** -torch.arange(1, BATCH * HEADS + 1, device=v.device).view(BATCH, HEADS)


CALLS: dict[str, tuple[Callable[..., Tensor], int, int]] = {  # call, key/value heads, keys if they are others'
    "full": (lambda m, q, k, v: flash_attn_func(q, k, v), KV_HEADS, 0),
    "causal": (lambda m, q, k, v: flash_attn_func(q, k, v, 0.0, 0.7, True, deterministic=True), 1, 0),
    "causal, more keys": (lambda m, q, k, v: flash_attn_func(q, k, v, causal=True), KV_HEADS, 17),
    "causal, fewer keys": (lambda m, q, k, v: flash_attn_func(q, k, v, causal=True), KV_HEADS, 9),
    "window, more keys": (lambda m, q, k, v: flash_attn_func(q, k, v, window_size=(3, 2)), HEADS, 17),
    "window, causal": (lambda m, q, k, v: flash_attn_func(q, k, v, causal=True, window_size=(4, -1)), KV_HEADS, 0),
    "softcap and alibi": (
        lambda m, q, k, v: flash_attn_func(q, k, v, causal=True, softcap=0.8, alibi_slopes=m.slopes),
        KV_HEADS,
        0,
    ),
    "alibi by rows": (
        lambda m, q, k, v: flash_attn_func(q, k, v, window_size=(-1, 3), alibi_slopes=by_rows(v)),
        KV_HEADS,
        17,
    ),
    "packed": (packed, HEADS, 0),
}


def assert_equal(model: nn.Module, inputs: dict[str, Tensor], out: Tensor, gradients: dict[str, Tensor]) -> None:
    expected = model(**inputs)
    expected.sum().backward()
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_equals_one_device(name: str) -> None:
    call, kv_heads, others = CALLS[name]
    torch.manual_seed(1)
    model = Model(call, kv_heads)
    inputs = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    if others:
        inputs["other"] = torch.randn(BATCH, others, WIDTH, dtype=torch.float64)
    rules = dict(get_torch_obj_rule_map())
    (out, _), gradients, (program, _), captured = run(model, inputs, Plan(cp=2))
    assert dict(get_torch_obj_rule_map()) == rules
    assert len(attentions(captured)) == 1 and not program.notes
    assert captured.joint is not None
    (node,) = captured.joint.graph.find_nodes(op="call_function", target=torch.ops.evocompile.dense_attention.default)
    assert "test_flash_calls.py" in source_line(node)
    assert_equal(model, inputs, out, gradients)


def test_dropout_is_taken_over() -> None:
    model = Model(lambda m, q, k, v: flash_attn_func(q, k, v, dropout_p=0.25))
    (call,) = attentions(
        capture(model.forward, model, (), {"x": torch.randn(2, 5, WIDTH, dtype=torch.float64)}).program
    )
    assert call.form.dropout == 0.25


def with_weights(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, return_attn_probs=True)[0]


def with_pages(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bounds = torch.tensor([0, 3, 5])
    return flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 3, 3, block_table=bounds)[None]


@pytest.mark.parametrize(("call", "reason"), [(with_weights, "weights of flash"), (with_pages, "in pages")])
def test_what_is_not_built_is_refused_with_the_line(call: Callable[..., Tensor], reason: str) -> None:
    model = Model(call)
    with pytest.raises(
        CaptureError, match=rf"test_flash_calls.py:\d+ in {call.__name__}: (.|\n)*{reason}(.|\n)*\n  (Call|Pass) "
    ):
        capture(model.forward, model, (), {"x": torch.randn(2, 5, WIDTH, dtype=torch.float64)})


class Documents(nn.Module):
    """A call of the package on one row of documents."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]), persistent=False)
        self.project = nn.Linear(WIDTH, 3 * HEADS * DIM, dtype=torch.float64)
        self.back = nn.Linear(HEADS * DIM, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, bounds: Tensor, k_bounds: Tensor | None = None) -> Tensor:
        q, k, v = (each[0].unflatten(1, (HEADS, DIM)) for each in self.project(x).chunk(3, dim=2))
        slopes = self.slopes if "softcap" in self.arguments and k_bounds is None else None
        others = bounds if k_bounds is None else k_bounds
        out = flash_attn_varlen_func(q, k, v, bounds, others, LENGTH, LENGTH, alibi_slopes=slopes, **self.arguments)
        return self.back(out.flatten(1)[None]).tanh()


@pytest.mark.parametrize("arguments", [{}, {"causal": True, "window_size": (3, -1)}, {"causal": True, "softcap": 0.8}])
@pytest.mark.parametrize("others", [None, [0, 2, 9, 13]], ids=["same", "others"])
def test_documents_equal_one_device(arguments: dict[str, Any], others: list[int] | None) -> None:
    torch.manual_seed(2)
    model = Documents(**arguments)
    inputs = {"x": torch.randn(1, LENGTH, WIDTH, dtype=torch.float64), "bounds": torch.tensor([0, 4, 10, 13]).int()}
    if others:
        inputs["k_bounds"] = torch.tensor(others).int()
    (out, _), gradients, (program, _), captured = run(model, inputs, Plan(cp=2))
    (call,) = attentions(captured)
    assert others or "t0(b, k) == t0(b, q)" in str(call.mask)
    assert not program.notes
    assert_equal(model, inputs, out, gradients)
