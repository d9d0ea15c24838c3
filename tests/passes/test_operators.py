"""Every kind of operator on a split value: the ranks together give the values and gradients of one device.

Each case is a small function of an activation x (B, S, D) and ids (B, S); the model multiplies x by a weight first,
so the weight's gradient goes through the operator's backward too. float64, uneven sizes, zigzag and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evocompile.capture import capture
from evocompile.pipeline import run_passes
from evocompile.plan import Plan
from evocompile.program import InputKind
from evocompile.shards import shard_rows
from evocompile.virtual import virtual_step

BATCH, LENGTH, WIDTH = 3, 13, 4


def square() -> Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)


def turns() -> Tensor:
    return torch.arange(2 * LENGTH, dtype=torch.float64).view(LENGTH, 2)


def kernel() -> Tensor:
    return torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 1, 3)


Function = Callable[[Tensor, Tensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "pointwise": lambda x, ids: torch.tanh(x) * x + 1.5,
    "broadcast": lambda x, ids: x - x.amax(-1, keepdim=True),
    "ids meet the activation": lambda x, ids: x * ids[..., None],
    "where": lambda x, ids: torch.where(ids[..., None] > 3, x, 0.0),
    "positions": lambda x, ids: x * torch.arange(LENGTH)[None, :, None],
    "positions of a window": lambda x, ids: x[:, 2:] * torch.arange(2, LENGTH)[:, None],
    "sum over the sequence": lambda x, ids: x.sum(1),
    "sum over everything": lambda x, ids: x.square().sum(),
    "mean over the batch": lambda x, ids: x.mean(0),
    "mean over everything": lambda x, ids: (x * x).mean(),
    "sum, then not linear": lambda x, ids: torch.exp(x.sum(1) / 50),
    "sums added": lambda x, ids: x.sum(1) + (2 * x).sum(1),
    "a sum and a constant": lambda x, ids: x.sum((0, 1)) + 1.0,
    "maximum over the sequence": lambda x, ids: x.amax(1),
    "softmax over the width": lambda x, ids: x.softmax(-1),
    "softmax over the sequence": lambda x, ids: x.softmax(1),
    "cumulative sum over the sequence": lambda x, ids: x.cumsum(1),
    "variance": lambda x, ids: F.layer_norm(x, (WIDTH,)),
    "merge batch and sequence": lambda x, ids: x.reshape(-1, WIDTH).tanh(),
    "merge and part again": lambda x, ids: x.reshape(-1, WIDTH).tanh().view(BATCH, LENGTH, 2, 2),
    "merge sequence and width": lambda x, ids: x.reshape(BATCH, -1).tanh(),
    "a view that breaks the axes": lambda x, ids: x.reshape(LENGTH, BATCH * WIDTH).tanh(),
    "permute": lambda x, ids: x.permute(2, 1, 0).contiguous().flatten(1).sin(),
    "transposed matmul": lambda x, ids: x @ x.transpose(1, 2),
    "scores and values": lambda x, ids: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "outer product over the batch": lambda x, ids: torch.einsum("bsd,bse->de", x, x),
    "expand": lambda x, ids: x[:, :, None].expand(BATCH, LENGTH, 2, WIDTH).sin(),
    "cut the width": lambda x, ids: torch.cat((-x[..., 2:], x[..., :2]), -1),
    "chunk the width": lambda x, ids: x.chunk(2, -1)[0] * x.chunk(2, -1)[1],
    "split unevenly": lambda x, ids: x.split([1, 3], -1)[1].sin(),
    "drop the last position": lambda x, ids: x[:, :-1].sin(),
    "drop the first positions": lambda x, ids: x[:, 3:].sin(),
    "next minus present": lambda x, ids: x[:, 1:] - x[:, :-1],
    "shift by padding": lambda x, ids: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "pad the sequence": lambda x, ids: F.pad(x, (0, 0, 2, 1), value=1.0).sin(),
    "every other position": lambda x, ids: x[:, ::2].sin(),
    "first position": lambda x, ids: x[:, 0].tanh(),
    "last position": lambda x, ids: x[:, -1],
    "a row of the batch": lambda x, ids: x[1] * 2,
    "flip": lambda x, ids: x.flip(1),
    "roll": lambda x, ids: x.roll(1, 1),
    "cat along the sequence": lambda x, ids: torch.cat((x, 2 * x), 1),
    "stack": lambda x, ids: torch.stack((x, 2 * x), 1),
    "gather in the width": lambda x, ids: x.gather(2, (ids % WIDTH)[..., None]),
    "sort over the width": lambda x, ids: x.sort(-1).values,
    "topk over the width": lambda x, ids: x.topk(2, -1).values,
    "indexed by ids": lambda x, ids: x[:, ids[0] % LENGTH],
    "masked mean": lambda x, ids: (x.sum(-1) * (ids > 3)).sum() / (ids > 3).sum(),
    "cross entropy": lambda x, ids: F.cross_entropy(x.flatten(0, 1), (ids % WIDTH).flatten(), ignore_index=1),
    "shifted cross entropy": lambda x, ids: F.cross_entropy(
        x[:, :-1].reshape(-1, WIDTH), (ids % WIDTH)[:, 1:].reshape(-1), ignore_index=1
    ),
    "one hot": lambda x, ids: F.one_hot(ids % WIDTH, WIDTH).to(x.dtype) @ x.transpose(1, 2),
    "features of pairs": lambda x, ids: ((x[:, :, None] + x[:, None]) @ square()).tanh().sum(2),
    "a product over the heads of scores": lambda x, ids: (x @ x.mT)[..., None].expand(-1, -1, -1, WIDTH) @ square(),
    "repeat": lambda x, ids: x.repeat(1, 1, 2),
    "gate by the other half": lambda x, ids: F.glu(x, -1),
    "unbind the width": lambda x, ids: x.unbind(-1)[1].sin() * x.unbind(-1)[3],
    "unbind the heads": lambda x, ids: x.unflatten(2, (2, 2)).unbind(2)[0].sin(),
    "windows of the width": lambda x, ids: x.unfold(-1, 2, 1).sin(),
    "the diagonal of each product": lambda x, ids: (x[..., None] * x[..., None, :]).diagonal(0, -2, -1).sin(),
    "memory of a turned tensor": lambda x, ids: x.mT.as_strided((BATCH, LENGTH, 2, 3), (52, 4, 1, 1)).sin(),
    "a diagonal that is written to": lambda x, ids: (x @ x.mT).diagonal_scatter(x[..., 0].sin(), 0, -2, -1).tanh(),
    "overlapping chunks of the sequence": lambda x, ids: x.unfold(1, 3, 2).sin(),
    "rotate complex pairs": lambda x, ids: (
        torch.view_as_real(torch.view_as_complex(x.unflatten(2, (2, 2))) * torch.exp(1j * turns())).flatten(2).sin()
    ),
    "convolution in the width": lambda x, ids: F.conv1d(x.flatten(0, 1)[:, None], kernel(), padding=1).sin(),
    "convolution over the sequence": lambda x, ids: F.conv1d(x.mT, square()[..., None].repeat(1, 1, 3)).sin(),
    "logsumexp over the sequence": lambda x, ids: x.logsumexp(1),
}

PLANS = [Plan(cp=3), Plan(dp=2, cp=2, attention="ring"), Plan(dp=2, cp=2)]


class Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.function(x * self.weight, ids)


class Gated(nn.Module):
    """A parameter for each position, which the backward needs again: gathered alike on every rank."""

    def __init__(self, square: bool) -> None:
        super().__init__()
        self.square = square
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, LENGTH, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = x * self.weight[:, None]
        return y.square().sum() if self.square else y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operator_equals_one_device(name: str) -> None:
    torch.manual_seed(0)
    x, ids = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.randint(0, 9, (BATCH, LENGTH))
    assert_equal_to_one_device(Model(FUNCTIONS[name]), x, ids)


@pytest.mark.parametrize("square", [False, True])
def test_a_parameter_of_positions(square: bool) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_device(
        Gated(square), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.zeros(BATCH, LENGTH).long()
    )


def assert_equal_to_one_device(model: Model | Gated, x: Tensor, ids: Tensor) -> None:
    expected = model(x, ids)
    expected.sum().backward()
    program = capture(model.forward, model, (), {"x": x, "ids": ids}).program
    for plan in PLANS:
        programs = [run_passes(program, plan, rank) for rank in range(plan.world)]
        inputs = []
        for rank in range(plan.world):
            lo, hi = shard_rows(len(model.weight), plan.world, rank)
            values = {"weight": model.weight.detach()[lo:hi], "x": x, "ids": ids}
            inputs.append([values[each.name] for each in program.inputs if each.kind is not InputKind.TANGENT])
        step = virtual_step(programs, inputs)
        for (output,) in step.outputs:
            torch.testing.assert_close(output, expected.detach(), rtol=1e-10, atol=1e-10)
        gradient = torch.cat([gradients["weight"] for gradients in step.gradients])
        torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-10, atol=1e-10)
