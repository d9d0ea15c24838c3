"""Images: no input has the positions that attention has; they are split all the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.program import Program
from tests.virtual_model import VirtualModel

PLANS = [Plan(cp=2), Plan(dp=2, cp=2, shard=Shard(2, 2, 4)), Plan(ulysses=2)]


class Vision(nn.Module):
    """Patches by a convolution, positions that are learned, and with `with_class` one more position in front."""

    def __init__(self, with_class: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 12)) if with_class else None
        self.positions = nn.Parameter(torch.randn(1, 9 + with_class, 12))
        self.layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 1)
        self.double()

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        if self.first is not None:
            x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        x = self.layer(x + self.positions)
        pooled = x[:, 0] if self.first is not None else x.mean(1)
        return F.smooth_l1_loss(self.head(pooled).squeeze(-1), target)


class Captioner(nn.Module):
    """The image is the first input, but the text's positions are those that attention has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.words = nn.Conv2d(3, 12, 12, 12), nn.Embedding(7, 12)
        self.layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.double()

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.patches(image).flatten(2).transpose(1, 2)
        return self.layer(x).square().mean()


def compare(model: nn.Module, batch: dict[str, Tensor]) -> list[Program]:
    """Asserts one device's loss and gradients under every plan; returns rank 0's programs."""
    expected = model(**batch)
    expected.backward()
    captured = capture(model.forward, model, (), batch).program
    first = []
    for plan in PLANS:
        programs = [run_passes(captured, plan, rank) for rank in range(plan.world)]
        whole = {name: each.detach() for name, each in model.named_parameters()}
        losses, gradients, _ = VirtualModel(programs, whole, {}, plan.shard_degrees).step(batch)
        for loss in losses:
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
        for name, each in model.named_parameters():
            torch.testing.assert_close(gradients[name], each.grad, rtol=1e-9, atol=1e-11, msg=name)
        first.append(programs[0])
    return first


def test_patches_are_split() -> None:
    torch.manual_seed(0)
    batch = {"image": torch.randn(3, 3, 12, 12).double(), "target": torch.randn(3).double()}
    for with_class in (False, True):
        programs = compare(Vision(with_class), batch)
        assert all(program.sharding.splits["seq"].size == 9 + with_class for program in programs)
        assert all(each.ranks == 2 for program in programs for each in program.attentions)


def test_text_with_an_image_in_front_of_it() -> None:
    torch.manual_seed(0)
    batch = {"image": torch.randn(2, 3, 12, 12).double(), "ids": torch.randint(7, (2, 11))}
    programs = compare(Captioner(), batch)
    assert all(program.sharding.splits["seq"].size == 11 for program in programs)
