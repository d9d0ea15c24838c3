"""Tensor parallelism: weights split along axes that the graph shows, with one device's numbers in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile.errors import PlanError
from evocompile.plan import Plan, Shard
from evocompile.program import Program
from tests.equality import assert_equals_one_device
from tests.models import zoo

WIDTH, VOCABULARY = 12, 19


class Block(nn.Module):
    """Grouped heads, a gated MLP with an odd number of hidden units, and biases where asked for."""

    def __init__(self, heads: int, kv_heads: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, 4
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, heads * self.dim, bias=bias)
        self.k = nn.Linear(WIDTH, kv_heads * self.dim, bias=bias)
        self.v = nn.Linear(WIDTH, kv_heads * self.dim, bias=bias)
        self.out = nn.Linear(heads * self.dim, WIDTH, bias=bias)
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=bias), nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, s, self.heads, self.dim).transpose(1, 2)
        k, v = (each(y).view(b, s, self.kv_heads, self.dim).transpose(1, 2) for each in (self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads > self.kv_heads)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, heads: int = 4, kv_heads: int = 2, hidden: int = 15, bias: bool = False, tied: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block(heads, kv_heads, hidden, bias)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.block(self.tokens(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch(length: int = 7) -> dict[str, Tensor]:
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, length))
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


def ranks_of(plan: Plan, length: int = 7, **sizes: int | bool) -> list[Program]:
    """The ranks' programs of a model that equals one device."""
    torch.manual_seed(0)
    return assert_equals_one_device(Model(**sizes).double(), batch(length), plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (Plan(tp=2), {}),
        (Plan(tp=2, shard=Shard(1, 1, 1)), {"bias": True, "tied": True}),
        (Plan(tp=3), {"heads": 5, "kv_heads": 5, "bias": True}),  # no degree divides
        (Plan(tp=4), {"heads": 4, "kv_heads": 1}),  # keys and values at every rank
        (Plan(tp=2, cp=2, shard=Shard(1, 2, 4)), {}),
        (Plan(tp=2, dp=2, cp=2, shard=Shard(2, 4, 8)), {"bias": True}),
        (Plan(tp=2, ulysses=2, attention="ring"), {"heads": 6, "kv_heads": 2}),
        (Plan(tp=2, cp=2, recompute="full"), {}),
    ],
    ids=str,
)
def test_a_step_equals_one_device(plan: Plan, sizes: dict[str, int]) -> None:
    ranks_of(plan, **sizes)


def test_hidden_units_and_heads_are_split() -> None:
    """What a rank computes: the products' shapes, in the forward."""
    program = ranks_of(Plan(tp=2))[0]
    assert program.forward is not None
    products = [n for n in program.forward.graph.nodes if n.target == torch.ops.aten.mm.default]
    inner = [tuple(each.args[1].meta["val"].shape) for each in products]
    # q, k, v, out, gate, up, down: 2 of 4 heads, 1 of 2, 7 of 15 hidden units
    assert inner[:7] == [(12, 8), (12, 4), (12, 4), (8, 12), (12, 7), (12, 7), (7, 12)]


def test_tokens_are_gathered_before_and_scattered_after_the_split_weights() -> None:
    """One block has two pairs of split weights, embedding and head are one more: each gathers and scatters once forward
    and once backward."""
    for plan in (Plan(tp=2), Plan(tp=2, cp=2)):
        program = ranks_of(plan, bias=True)[-1]
        for graph in (program.forward, program.backward):
            assert graph is not None
            found = [program.collectives[node] for node in graph.graph.nodes if node in program.collectives]
            kinds = [each.kind for each in found if "seq.tp" in each.why]
            assert sorted(kinds) == ["all_gather"] * 3 + ["reduce_scatter"] * 3
            # one number for each of at most 2·7 tokens: maximum, sum of exponentials, the label's logit; and the loss
            small = [each.sent for each in found if each.kind == "all_reduce" and each.group.startswith("reduce")]
            assert all(sent <= 2 * 7 * 8 for sent in small) and len(small) <= 4
            assert len(small) >= 3 or graph is program.backward


def test_a_fused_product_of_queries_keys_and_values_is_split_by_heads() -> None:
    """Its weight holds three times all heads: a rank has its own heads of each, one or two of three."""
    torch.manual_seed(0)
    ids, labels = torch.randint(0, zoo.VOCABULARY, (2, 2, 9))
    model = First(zoo.PlainGPT(layers=1).double())
    programs = assert_equals_one_device(model, {"input_ids": ids, "labels": labels}, Plan(tp=2))
    for program, heads in zip(programs, (1, 2), strict=True):
        assert program.forward is not None
        products = program.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
        shapes = [tuple(each.args[2].meta["val"].shape) for each in products]
        assert shapes == [(24, 3 * heads * 8), (heads * 8, 24), (24, 48), (48, 24)]
        # what is left: the embedding of positions, which are no input of the model
        whole = [note.bytes for note in program.notes if note.what == "replicated over tp: a weight"]
        assert whole == [128 * 24 * 8]


class First(nn.Module):
    """The loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids, labels)[0]


def test_a_weight_that_is_not_split_is_told() -> None:
    program = ranks_of(Plan(tp=4), heads=6, kv_heads=3)[0]
    notes = [note for note in program.notes if note.what == "replicated over tp: a weight"]
    assert any("its axis has 3 positions, for 4 ranks" in note.why for note in notes)


def test_the_world_counts_tensor_parallel_ranks() -> None:
    assert Plan(tp=2, cp=3, dp=2).world == 12
    with pytest.raises(PlanError, match="optimizer does not divide the 4 replicas"):
        Plan(tp=2, cp=2, shard=Shard(1, 1, 8))
