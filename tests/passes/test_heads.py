"""Ulysses and its combination with rings, heads that do and do not divide, against one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from evocompile.passes.heads import head_intervals
from evocompile.plan import Plan
from tests.conftest import References
from tests.equality import assert_attends_as_one_device
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import virtual_model

LENGTH = 11


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degree", "queries", "keys"),
    [
        (4, 2, 2, [(0, 2), (2, 4)], [(0, 1), (1, 2)]),
        (8, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),  # more ranks than key heads
        (8, 2, 3, [(0, 2), (2, 5), (5, 8)], [(0, 1), (0, 2), (1, 2)]),  # two heads read the first, one the second
        (2, 1, 3, [(0, 0), (0, 1), (1, 2)], [(0, 0), (0, 1), (0, 1)]),  # a rank without heads
    ],
)
def test_each_rank_gets_the_key_heads_that_its_query_heads_read(
    heads: int, kv_heads: int, degree: int, queries: list[tuple[int, int]], keys: list[tuple[int, int]]
) -> None:
    split = head_intervals(heads, kv_heads, degree)
    assert list(split["queries"]) == queries
    assert list(split["keys"]) == keys


LLAMA = [
    (Case("llama", length=13, seed=5), Plan(ulysses=2)),
    (Case("llama", length=13, seed=5), Plan(ulysses=3)),
    (Case("llama", length=13, seed=5), Plan(cp=2, ulysses=2)),
    (Case("llama", length=13, seed=5), Plan(cp=2, ulysses=2, placement="context-first", attention="balanced")),
    (Case("llama-bias", length=11, seed=5), Plan(dp=2, ulysses=4)),
    (Case("deepseek-v3", length=13, seed=5), Plan(ulysses=2)),  # q and k have another head dim than v
]


@pytest.mark.parametrize(("case", "plan"), LLAMA, ids=str)
def test_a_model_equals_one_device(case: Case, plan: Plan, references: References) -> None:
    references.compute([case for case, _ in LLAMA])
    losses, gradients, _ = virtual_model(case, plan).step(case.inputs())
    for loss in losses:
        assert_loss(loss, references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])


def test_an_all_to_all_carries_queries_keys_and_values() -> None:
    """Forward: one there, one back. Backward: the gradient of the output goes, three gradients come."""
    program = virtual_model(Case("llama", length=12), Plan(ulysses=2)).programs[0]
    batch, length, heads, kv_heads, dim, size = 2, 6, 4, 2, 8, 4
    there = batch * length * (heads // 2 * dim + kv_heads // 2 * 2 * dim) * size
    back = batch * length * heads // 2 * dim * size
    sent = [each.sent for each in program.collectives.values() if each.kind == "all_to_all"]
    assert sent == [there, back] * 2 + [back, there] * 2
    assert torch.float32.itemsize == size


class Biased(nn.Module):
    """Attention whose scores are changed by learned numbers of each query head, in an own way for even heads."""

    SCORE = "where(h % 2 == 0, s + p0(h)*(k - q), s + p1(h, q))"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 3 * 4 * 4, dtype=torch.float64)
        self.slopes = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(4, LENGTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        params = [self.slopes, self.bias]
        return torch.ops.evocompile.dense_attention(q, k, v, None, True, 0.5, params, None, self.SCORE)[0]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(ulysses=2),
        Plan(ulysses=3),
        Plan(ulysses=5),
        Plan(cp=2, ulysses=2),
        Plan(cp=3, attention="balanced"),
        Plan(cp=4, inner_ring=2),
    ],
    ids=str,
)
def test_numbers_of_heads_go_with_their_heads(plan: Plan) -> None:
    model, x = Biased(), torch.randn(2, LENGTH, 8, dtype=torch.float64)
    assert_attends_as_one_device(model, {"x": x}, plan)
