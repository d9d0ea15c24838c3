"""Written-out attention, every form against plain eager torch in float64 on the virtual cluster, with all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from evocompile.passes import einsum_products
from evocompile.passes.rules.attention import ATTENTION, call_of
from evocompile.plan import Plan
from evocompile.program import Program
from tests.equality import assert_attends_as_one_device, run

BATCH, LENGTH, WIDTH, HEADS, DIM = 2, 13, 8, 4, 3
LOWEST = torch.finfo(torch.float32).min  # as torch.where has it, whatever the scores' dtype
CP3 = Plan(cp=3)
Attend = Callable[..., Tensor]


class Written(nn.Module):
    """Projections around `attend(self, q, k, v, **inputs)`; q, k, v (B, H, S, D), H/2 heads of k and v."""

    def __init__(self, attend: Attend, kv_heads: int = HEADS, **learned: Tensor) -> None:
        super().__init__()
        self.attend, self.kv_heads = attend, kv_heads
        self.project = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * DIM, dtype=torch.float64)
        self.back = nn.Linear(HEADS * DIM, WIDTH, bias=False, dtype=torch.float64)
        for name, value in learned.items():
            if value.requires_grad:
                self.register_parameter(name, nn.Parameter(value.detach().clone()))
            else:
                self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor, **inputs: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = [HEADS * DIM, self.kv_heads * DIM, self.kv_heads * DIM]
        q, k, v = (each.view(batch, length, -1, DIM).transpose(1, 2) for each in self.project(x).split(sizes, -1))
        out = self.attend(self, q, k, v, **inputs)
        return self.back(out.transpose(1, 2).reshape(batch, length, -1)).tanh()


def attentions(program: Program) -> list[Any]:
    """The attention calls of a captured program, made canonical."""
    from evocompile.passes.canonicalize import canonicalize

    bound = canonicalize(program.bind(Plan(cp=2), rank=0))
    assert bound.joint is not None
    return [call_of(node) for node in bound.joint.graph.find_nodes(op="call_function", target=ATTENTION)]


def check(
    model: Written,
    mask: str | None,
    score: str | None = "s",
    plan: Plan = CP3,
    by_hand: Attend | None = None,
    **inputs: Tensor,
) -> Program:
    """One step equals one device's, and its attention has this mask and this score function."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), **inputs}
    ran = run(model, inputs, plan)
    model.attend = by_hand or model.attend
    with sdpa_kernel(SDPBackend.MATH):  # the others' gradients are wrong where a finite mask leaves a row nothing
        expected = model(**inputs)
    expected.sum().backward()
    torch.testing.assert_close(ran.out, expected.detach(), rtol=1e-10, atol=1e-10)
    assert all(parameter.grad is not None for parameter in model.parameters())
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(ran.gradients, wanted, rtol=1e-10, atol=1e-10)
    (call,) = attentions(ran.captured)
    if mask is not None:
        assert call.mask == mask
    if score is not None:
        assert call.form.score == score
    return ran.programs[0]


def repeated(x: Tensor) -> Tensor:
    """transformers' repeat_kv."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, HEADS // heads, length, dim).reshape(batch, HEADS, length, dim)


def causal(length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def hugging_face(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.where(causal(), 0.0, LOWEST)[None, None]
    weights = torch.matmul(q, repeated(k).transpose(2, 3)) * 0.3 + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=m.training)
    return torch.matmul(weights, repeated(v))


def nano_gpt(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(m.bias[:, :, :LENGTH, :LENGTH] == 0, float("-inf"))
    return F.softmax(att, dim=-1) @ v


def mpt(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.5 + m.alibi[:, :, -LENGTH:]
    scores = scores.masked_fill(~causal(), LOWEST)
    return torch.matmul(F.softmax(scores.double(), dim=-1).to(v.dtype), v)


def bloom(m: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    batch = q.shape[0]
    ones = torch.ones(batch, LENGTH) if attention_mask is None else attention_mask
    steps = ((ones.cumsum(-1) - 1) * ones)[:, None, :]
    alibi = (m.slopes[..., None] * steps).reshape(batch * HEADS, 1, LENGTH).double()
    q, k, v = (each.reshape(batch * HEADS, -1, DIM) for each in (q, k, v))
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=1.0, alpha=0.5)
    scores = scores.view(batch, HEADS, LENGTH, -1) + torch.where(causal(), 0.0, LOWEST)
    weights = F.softmax(scores, dim=-1).view(batch * HEADS, LENGTH, -1)
    return torch.bmm(weights, v).view(batch, HEADS, LENGTH, DIM)


def falcon(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).double()
    scores = q @ k.transpose(-1, -2) + m.slopes[:, None, None] * distance
    scores = scores * (1 / math.sqrt(DIM)) + torch.where(causal(), 0.0, -math.inf)
    return F.softmax(scores, dim=-1) @ v


def gemma2(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * 0.5
    scores = torch.tanh(scores / 2.0) * 2.0
    positions = torch.arange(LENGTH)
    window = causal() & (positions[:, None] - positions < 5)
    return F.softmax(scores + torch.where(window, 0.0, LOWEST), dim=-1) @ repeated(v)


def gpt_oss(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * 0.5 + torch.where(causal(), 0.0, LOWEST)
    sinks = m.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, p=0.0, training=m.training), repeated(v))


def t5(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
    back = -torch.min(distance, torch.zeros_like(distance))
    large = 4 + (torch.log(back.float() / 4) / math.log(20 / 4) * 4).to(torch.long)
    buckets = torch.where(back < 4, back, torch.min(large, torch.full_like(large, 7)))
    bias = F.embedding(buckets, m.table).permute([2, 0, 1]).unsqueeze(0)
    bias = bias + torch.where(causal(), 0.0, LOWEST)[None, None]
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    return torch.matmul(F.softmax(scores, dim=-1).type_as(scores), v)


def vit(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * DIM**-0.5 @ k.mT).softmax(-1) @ v


def swin(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) / 3.0 + m.bias.unsqueeze(0)).softmax(-1) @ v


def alibi_and_mask_in_one(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    infinite = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    mask = m.slopes[:, None, None] * distance + infinite
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def per_key(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * m.temperature + m.of_keys + m.of_heads[:, None, None]
    return torch.where(causal(), scores, -torch.inf).softmax(-1) @ v


def leaf(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def flex(m: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    def attends(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    def changed(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return 3.0 * torch.tanh(score / 3.0) + m.learned_slopes[h] * (key - query)

    blocks = create_block_mask(attends, BATCH, None, LENGTH, LENGTH, device="cpu")
    return flex_attention(q, k, v, score_mod=changed, block_mask=blocks, enable_gqa=True)


def flex_score_alone(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def changed(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.where((query - key).abs() < 4, score, -float("inf"))

    return flex_attention(q, k, v, score_mod=changed, scale=0.7)


def flex_by_hand(m: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    scores = q @ repeated(k).mT / math.sqrt(DIM)
    scores = 3.0 * torch.tanh(scores / 3.0) + m.learned_slopes[:, None, None] * distance
    allowed = causal() & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ repeated(v)


def flex_score_by_hand(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    return (q @ k.mT * 0.7).masked_fill(distance.abs() >= 4, -torch.inf).softmax(-1) @ v


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])


def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses gradients of its own kernel on the CPU, which is not asked to compute any here."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model = Written(flex, 2, learned_slopes=leaf(HEADS))
    check(model, "(k <= q) & (t0(b, k) == t0(b, q))", None, by_hand=flex_by_hand, documents=DOCUMENTS)
    check(Written(flex_score_alone), "(k <= q + 3) & (k > q - 4)", by_hand=flex_score_by_hand)


def dropped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT + torch.where(causal(), 0.0, LOWEST)
    return F.dropout(scores.softmax(-1), 0.5) @ v


def dropped_sdpa(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5, scale=1.0)


@pytest.mark.parametrize("attend", [dropped, dropped_sdpa])
def test_dropout_is_the_same_on_every_plan(attend: Attend) -> None:
    torch.manual_seed(1)
    model, inputs = Written(attend), {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    plans = [Plan(cp=2), Plan(cp=3, attention="balanced"), Plan(dp=2, cp=2, attention="ring")]
    first, *others = ((ran.out, ran.gradients) for ran in (run(model, inputs, plan) for plan in plans))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(first[0], model.eval()(**inputs))


SLOPES = 2.0 ** -torch.arange(1, HEADS + 1).double()
TRIL = torch.ones(32, 32).tril().view(1, 1, 32, 32)
ALIBI = SLOPES[:, None, None] * torch.arange(-31, 1)
CASES: dict[str, tuple[Callable[[], Written], str | None, str | None]] = {
    "hugging face": (lambda: Written(hugging_face, 2), "k <= q", "s"),
    "nanoGPT": (lambda: Written(nano_gpt, bias=TRIL), "k <= q", "s"),
    "MPT": (lambda: Written(mpt, alibi=ALIBI), "k <= q", "s + p0(h, k)"),
    "Bloom": (lambda: Written(bloom, slopes=SLOPES), "k <= q", "s + p0(h, b, k)"),
    "Falcon": (lambda: Written(falcon, slopes=SLOPES), "k <= q", None),
    "Gemma2": (lambda: Written(gemma2, 2), "(k <= q) & (k > q - 5)", "2*tanh(s)"),
    "gpt-oss": (lambda: Written(gpt_oss, 2, sinks=leaf(HEADS)), "k <= q", "s"),
    "T5": (lambda: Written(t5, table=leaf(8, HEADS)), "k <= q", "s + p0(h, t0(b, k - q + 12))"),
    "ViT": (lambda: Written(vit), "True", "s"),
    "Swin": (lambda: Written(swin, bias=leaf(HEADS, LENGTH, LENGTH)), "True", "s + p0(h, k + 13*q)"),
    "ALiBi and mask": (lambda: Written(alibi_and_mask_in_one, slopes=SLOPES), "k <= q", "s + ((k - q)*p0(h))"),
    "learned": (
        lambda: Written(per_key, temperature=leaf(1), of_keys=leaf(LENGTH), of_heads=leaf(HEADS)), "k <= q", None,
    ),
}  # fmt: skip


def padded_sdpa(m: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """BERT's mask: a finite number, so a row of padding alone averages over all keys."""
    mask = (1.0 - real[:, None, None, :].double()) * LOWEST
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def padded_eager(m: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    allowed = causal() & real[:, None, None, :].bool()
    scores = q @ k.mT + torch.where(allowed, 0.0, LOWEST)
    return scores.softmax(-1) @ v


def padded_window(m: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    positions = torch.arange(LENGTH)
    allowed = causal() & (positions[:, None] - positions < 3) & real[:, None, None, :].bool()
    return (q @ k.mT).masked_fill(~allowed, LOWEST).softmax(-1) @ v


def padded_infinite(m: Any, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    allowed = causal() & real[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


REAL = torch.ones(BATCH, LENGTH, dtype=torch.int64)
REAL[0, :4] = 0
REAL[1, -3:] = 0
REAL[1, 0] = 0


@pytest.mark.parametrize("attend", [padded_sdpa, padded_eager, padded_window, padded_infinite])
@pytest.mark.parametrize("real", [REAL, REAL * torch.tensor([[0], [1]]), REAL * 0])
def test_rows_that_attend_nowhere(attend: Attend, real: Tensor) -> None:
    """A finite mask averages over all keys there, with gradients; an infinite one gives 0. Padding on both sides."""
    torch.manual_seed(2)
    check(Written(attend), None, None, real=real)


@pytest.mark.parametrize("name", CASES)
def test_a_form_equals_one_device(name: str) -> None:
    build, mask, score = CASES[name]
    torch.manual_seed(1)
    program = check(build(), mask, score, Plan(cp=3) if len(name) % 2 else Plan(dp=2, cp=2))
    assert not program.notes


@pytest.mark.parametrize("name", ["T5", "Bloom", "learned", "gpt-oss"])
@pytest.mark.parametrize("plan", [Plan(cp=2, ulysses=2), Plan(ulysses=3)], ids=str)
def test_split_by_heads(name: str, plan: Plan) -> None:
    build, mask, score = CASES[name]
    torch.manual_seed(1)
    check(build(), mask, score, plan)


def by_einsum(scores: str, out: str, turned: bool = True, first: int = 0, packed: bool = False) -> Attend:
    """Attention whose two products are these equations, on (B, S, H, D) if turned; `first`: which operand q is."""

    def einsum(equation: str, one: Tensor, other: Tensor) -> Tensor:
        return torch.einsum(equation, [one, other]) if packed else torch.einsum(equation, one, other)

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if turned:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        weights = einsum(scores, *((k, q) if first else (q, k))) * 0.5
        made = einsum(out, weights.masked_fill(~causal(), -math.inf).softmax(-1), v)
        return made.transpose(1, 2) if turned else made

    return attend


@pytest.mark.parametrize(
    "attend",
    [
        by_einsum("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd", turned=False),
        by_einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
        by_einsum("...qhd, ...khd -> ...hqk", "...hqk,...khd->...qhd"),
        by_einsum("nkhd,nqhd->nhqk", "nhql,nlhd->nqhd", first=1, packed=True),
    ],
)
def test_products_by_einsum(attend: Attend) -> None:
    check(Written(attend), "k <= q")


def test_one_key_head_by_einsum() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]) * 0.5).masked_fill(~causal(), -math.inf).softmax(-1)
        return torch.einsum("bhqk,bkd->bhqd", weights, v[:, 0])

    check(Written(attend, kv_heads=1), "k <= q")


@pytest.mark.parametrize(
    "equation",
    ["bhqk,bhkd", "bqd,bqd->bq", "bqd,bkd->bqkd", "bqd,bkd->bk", "bqde,bkde->bqk", "bqq,bqd->bqd", "bqd,kd->qk"],
)
def test_other_equations_are_no_products(equation: str) -> None:
    assert einsum_products.read(equation, [len(each) for each in equation.partition("->")[0].split(",")]) is None


class Weighed(nn.Module):
    """`nn.MultiheadAttention`, which returns its weights unless it is told not to. used: the model reads them."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
        self.used = used

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x, key_padding_mask=padding)
        return out + weights.square().sum(-1, keepdim=True) if self.used else out


@pytest.mark.parametrize("used", [False, True])
def test_weights_of_multihead_attention(used: bool) -> None:
    """Those that nobody reads cost nothing; others are exact, with all keys at every rank, as a note says."""
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, :4] = True
    inputs = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), "padding": padding}
    ran = assert_attends_as_one_device(Weighed(used), inputs, CP3)
    notes = [note.what for note in ran.programs[0].notes]
    assert notes == (["gathered for aten.bmm.default"] * 2 if used else [])
    assert [call.mask for call in attentions(ran.captured)] == ([] if used else ["t0(b, k) == 0"])
