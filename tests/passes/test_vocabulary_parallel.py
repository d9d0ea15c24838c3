"""Embedding, head and loss split over tp by the vocabulary: one device's numbers, and no rank with whole logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from evocompile.chunks import RowLoop
from evocompile.plan import Plan, Shard
from evocompile.program import Program
from tests.equality import assert_equals_one_device

WIDTH, VOCABULARY, LENGTH = 6, 19, 8
Loss = Callable[[Tensor, Tensor], Tensor]


def mean_of_valid(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(logits / 30).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def looked_up(logits: Tensor, labels: Tensor) -> Tensor:
    """Written out, with a mask of its own and a term for the size of the sums of exponentials."""
    sums = logits.logsumexp(-1)
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    valid = labels >= 0
    return -(chosen * valid).sum() / valid.sum() + 1e-2 * (sums**2 * valid).mean()


def of_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = logits.softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return -chosen.log().mean() + logits.amax(-1).mean()


class Model(nn.Module):
    def __init__(
        self, loss: Loss = mean_of_valid, tied: bool = False, bias: bool = False, logits: bool = False
    ) -> None:
        super().__init__()
        self.loss, self.logits = loss, logits
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=11)
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = 3 * self.tokens(ids)
        logits = self.head(self.norm(x + self.down(self.up(x).relu())))
        loss = self.loss(logits, labels)
        return (loss, logits.detach()) if self.logits else loss


def ranks_of(plan: Plan, model: nn.Module, length: int = LENGTH) -> list[Program]:
    torch.manual_seed(0)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, length))
    ids[0, 0], labels[0, :2] = 11, -100
    return assert_equals_one_device(model.double(), {"ids": ids, "labels": labels}, plan)


def widest(program: Program) -> int:
    """The most elements of a value that has rows for the vocabulary's logits, in both graphs and their loops."""
    found = []
    for node in _nodes(program):
        value = node.meta.get("val")
        rows = isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] != WIDTH  # the head has WIDTH
        if rows and value.shape[-1] in (9, 10, VOCABULARY):
            found.append(value.numel())
    return max(found)


def _nodes(program: Program) -> Iterator[fx.Node]:
    for graph in (program.forward, program.backward):
        assert graph is not None
        for node in graph.graph.nodes:
            yield node
            if isinstance(node.target, RowLoop):
                for body in node.target.bodies:
                    yield from body.graph.nodes


@pytest.mark.parametrize(
    ("loss", "plan"),
    [
        (mean_of_valid, Plan(tp=3)),
        (shifted, Plan(tp=2, cp=2)),
        (looked_up, Plan(tp=2, dp=2, shard=Shard(2, 2, 4))),
        (smoothed, Plan(tp=2)),
        (of_probabilities, Plan(tp=2)),
    ],
)
def test_losses_equal_one_device(loss: Loss, plan: Plan) -> None:
    ranks_of(plan, Model(loss))


@pytest.mark.parametrize("loss", [mean_of_valid, shifted, looked_up])
def test_no_rank_has_whole_logits(loss: Loss) -> None:
    """All tokens, but not more of the vocabulary than the rank's own part: 9 or 10 of 19."""
    for program, own in zip(ranks_of(Plan(tp=2), Model(loss, bias=True)), (9, 10), strict=True):
        assert widest(program) == 2 * LENGTH * own
        assert not any(note.what.startswith(("gathered", "replicated")) for note in program.notes)


@pytest.mark.parametrize(("tied", "bias", "logits"), [(True, True, True), (False, False, True)])
def test_tied_weights_and_returned_logits(tied: bool, bias: bool, logits: bool) -> None:
    ranks_of(Plan(tp=2), Model(tied=tied, bias=bias, logits=logits))


@pytest.mark.parametrize("plan", [Plan(tp=2, loss_chunk=300), Plan(tp=2, cp=2, loss_chunk=200)], ids=str)
def test_chunked_losses(plan: Plan) -> None:
    """Both apply: a rank's own part of the vocabulary, some rows at a time, in one loop forward and one backward."""
    for program in ranks_of(plan, Model(tied=True), length=21):
        assert widest(program) <= 4 * 10
        for graph in (program.forward, program.backward):
            assert graph is not None
            loops = [node.target for node in graph.graph.nodes if isinstance(node.target, RowLoop)]
            assert len(loops) == 1 and loops[0].split.degree > 3
        assert not any("whole" in note.what for note in program.notes)


def test_a_vocabulary_smaller_than_tp_is_replicated() -> None:
    class Few(Model):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCABULARY, 2), nn.Linear(2, 3)
            self.norm, self.up, self.down = nn.RMSNorm(2), nn.Linear(2, 5), nn.Linear(5, 2)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            return super().forward(ids, labels.clamp(min=0) % 3)

    notes = ranks_of(Plan(tp=4), Few())[0].notes
    assert [note.why for note in notes] == ["its axis has 3 positions, for 4 ranks"]
