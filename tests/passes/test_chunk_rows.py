"""Losses in chunks of rows: the numbers of one device, and no value as large as the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.chunks import RowLoop
from evocompile.compile import compile_graph
from evocompile.errors import PlanError
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import Program
from tests.equality import assert_equals_one_device
from tests.models.compare import assert_gradients, assert_loss
from tests.models.zoo import Case
from tests.virtual_model import captured, virtual_model

VOCABULARY, WIDTH = 61, 12


class PlainGPT(nn.Module):
    """Logits cut by one against the labels, or labels cut; a tied head with a bias; a softcap; a loss of any kind."""

    def __init__(self, cut: str = "logits", cap: float = 0.0, **loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.cap, self.loss = cut, cap, loss
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(5 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(x)
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        if self.cut == "logits":
            logits, labels = logits[:, :-1], labels[:, 1:]
        elif self.cut == "labels":
            labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        else:
            return F.cross_entropy(logits.transpose(1, 2), labels, **self.loss)
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), **self.loss)


def batch(length: int = 11) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, 2:5] = -100
    return {"ids": ids, "labels": labels}


def loops(program: Program) -> dict[str, list[RowLoop]]:
    return {
        name: [node.target for node in graph.graph.nodes if isinstance(node.target, RowLoop)]
        for name, graph in program.graphs.items()
    }


def largest(program: Program, columns: int) -> int:
    """Elements of the largest value with so many columns, the weight apart."""
    values = [node.meta.get("val") for graph in program.graphs.values() for node in graph.graph.nodes]
    shapes = [each.shape for each in values if isinstance(each, Tensor) and each.shape[-1:] == (columns,)]
    return max((shape.numel() for shape in shapes if shape != (WIDTH, columns)), default=0)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (PlainGPT(), Plan()),
        (PlainGPT(cap=3.0), Plan(cp=2, shard=Shard())),
        (PlainGPT(reduction="sum"), Plan(cp=3, attention="ring")),
        (PlainGPT("labels", label_smoothing=0.1), Plan(cp=2)),
        (PlainGPT("labels", ignore_index=-100), Plan(dp=2, cp=2, shard=Shard(2, 2, 4))),
        (PlainGPT("none"), Plan(cp=2, ulysses=1, recompute="attention")),
    ],
    ids=["whole", "softcap", "sum", "smoothed", "shards", "transposed"],
)
def test_numbers_of_one_device(model: PlainGPT, plan: Plan) -> None:
    """Chunks of a few rows, the last one smaller, windows that end within a chunk, ranks with other numbers of rows."""
    model = model.double()
    model.zero_grad()
    whole = run_passes(capture(model.forward, model, (), batch()).program, plan, 0)
    plan = Plan(**{**vars(plan), "loss_chunk": 2 * 2 * VOCABULARY * 8, "mlp_chunk": 0})
    for program in assert_equals_one_device(model, batch(), plan):
        assert not program.notes
        found = loops(program)
        assert [len(found["forward"]), len(found["backward"])] == [1, 1]
        assert all(len(loop.numbers) > 1 for each in found.values() for loop in each)
        assert largest(program, VOCABULARY) == VOCABULARY  # the bias and its gradient
        assert largest(whole, VOCABULARY) > 2 * VOCABULARY


@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_the_inside_of_an_mlp(recompute: str) -> None:
    model = PlainGPT().double()
    plan = Plan(cp=2, shard=Shard(), recompute=recompute, loss_chunk=0, mlp_chunk=2 * 2 * 5 * WIDTH * 8)
    for program in assert_equals_one_device(model, batch(), plan):
        found = loops(program)
        assert [len(found["forward"]), len(found["backward"])] == [1, 1]
        assert largest(program, 5 * WIDTH) == 5 * WIDTH  # the bias


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", Plan(cp=2)),
        ("gpt2", Plan(cp=3, shard=Shard())),
        ("llama", Plan(tp=2)),
        ("gemma2", Plan(dp=2, cp=2, recompute="full")),
    ],
    ids=str,
)
def test_families(family: str, plan: Plan, references: Any) -> None:
    case = Case(family, length=13, seed=3)
    plan = Plan(**{**vars(plan), "loss_chunk": 1000, "mlp_chunk": 1000})
    model = virtual_model(case, plan)
    losses, gradients, _ = model.step(case.inputs())
    assert_loss(losses[0], references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])
    for program in model.programs:
        assert not program.notes
        assert all(len(each) >= 3 for each in loops(program).values())  # two layers and the loss


def test_what_tp_has_come_into_stays_whole_and_is_noted(references: Any) -> None:
    """With tp, some of the regions that were found on the whole graph cannot be loops of a rank's."""
    case = Case("gpt2", length=13, seed=3)
    model = virtual_model(case, Plan(cp=2, tp=2, shard=Shard(), loss_chunk=1000, mlp_chunk=1000))
    losses, gradients, _ = model.step(case.inputs())
    assert_loss(losses[0], references[case]["loss"])
    assert_gradients(gradients, references[case]["gradients"])
    for program in model.programs:
        assert any("are computed whole" in note.what for note in program.notes)


def test_inductor_compiles_the_bodies_of_loops() -> None:
    """A forward's and a backward's, with the numbers of their operators."""
    model = PlainGPT("none").double()
    plan = Plan(loss_chunk=2 * 5 * VOCABULARY * 8)
    program = run_passes(capture(model.forward, model, (), batch(10)).program, plan, 0)
    for graph in program.graphs.values():
        (node,) = [node for node in graph.graph.nodes if isinstance(node.target, RowLoop)]
        assert [len(node.target.bodies), len(node.target.numbers)] == [1, 2]
        given = [_some_of(each.meta["val"]) for each in node.args]
        compiled = node.target.compiled(lambda body: compile_graph(body, backend="inductor"))
        for found, expected in zip(compiled(*given), node.target(*given), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sums_over_chunks_are_rounded_once() -> None:
    """In bfloat16 many chunks give a weight's and a bias' gradient as two do, but for ties: no part is rounded."""
    found: list[list[Tensor]] = []
    model = PlainGPT("labels").bfloat16()
    whole = capture(model.forward, model, (), batch(151)).program
    for rows, chunks in ((1, 151), (150, 2)):
        program = run_passes(whole, Plan(loss_chunk=rows * 2 * 4 * VOCABULARY), 0)
        assert program.backward is not None
        (node,) = [node for node in program.backward.graph.nodes if isinstance(node.target, RowLoop)]
        assert len(node.target.numbers) == chunks
        sums = [i for i, each in enumerate(node.target.returned) if each.is_cast]
        results = node.target(*[_some_of(each.meta["val"]) for each in node.args])
        found.append([results[i] for i in sums])
    assert len(found[0]) == 2
    for many, few in zip(*found, strict=True):
        assert many.dtype == torch.bfloat16
        assert (many != few).double().mean() < 0.02
        torch.testing.assert_close(many, few, rtol=2**-7, atol=0)


def _some_of(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.ndim)
    if like.dtype == torch.bool:
        return torch.randint(0, 2, like.shape, generator=generator).bool()
    if not like.dtype.is_floating_point:
        return torch.randint(0, VOCABULARY, like.shape, generator=generator)
    value = torch.randn(like.shape, dtype=like.dtype, generator=generator)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)


def test_ranks_without_rows() -> None:
    """More ranks than positions: some have no rows, and loops all the same."""
    plan = Plan(cp=4, attention="ring", loss_chunk=VOCABULARY * 8 - 1)
    for program in assert_equals_one_device(PlainGPT().double(), batch(3), plan):
        assert [len(each) for each in loops(program).values()] == [1, 1]


def test_what_is_used_whole_stays_and_is_noted() -> None:
    class Centred(PlainGPT):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.tokens(ids))
            logits = logits - logits.cumsum(0).cumsum(1)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = Centred().double()
    program = run_passes(capture(model.forward, model, (), batch()).program, Plan(loss_chunk=2000), 0)
    assert not any(loops(program).values())
    (note,) = program.notes
    assert note.what == "the logits are computed whole" and "cumsum" in note.source


def test_small_logits_stay_whole_and_large_ones_do_not() -> None:
    _, small = captured(Case("llama", length=24))
    assert not any(loops(run_passes(small.program, Plan(cp=2), 0)).values())
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(50_000, 8), nn.Linear(8, 50_000, bias=False))
    ids = torch.zeros(1, 4096, dtype=torch.long, device="meta")

    def loss(module: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(module(ids)[0], ids[0])

    program = run_passes(capture(loss, model, (model, ids), {}).program, Plan(cp=2), 0)
    assert [len(loop.numbers) for each in loops(program).values() for loop in each] == [7, 7]


@pytest.mark.parametrize("size", [-1, 1.5, True, "64 MiB"])
def test_sizes_are_bytes(size: Any) -> None:
    with pytest.raises(PlanError, match="loss_chunk must be a number of bytes"):
        Plan(loss_chunk=size)
    with pytest.raises(PlanError, match="mlp_chunk must be a number of bytes"):
        Plan(mlp_chunk=size)
