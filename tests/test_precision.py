"""bf16 with parameters in fp32 on the virtual cluster: numbers, what travels in which type, and what a rank holds."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from evocompile.accounting import held, moved, states_table
from evocompile.capture import Captured, capture
from evocompile.collectives import program_events
from evocompile.errors import PlanError
from evocompile.pipeline import run_passes
from evocompile.plan import Plan, Shard
from evocompile.precision import Precision
from evocompile.program import Program
from tests.redundant_model import Model, batch
from tests.test_redundant import WORLDS, nested
from tests.virtual_training import VirtualTraining

BF16 = Precision("bf16")
STEPS = 5


@functools.cache
def captured(precision: Precision) -> Captured:
    model = Model()
    return capture(model.forward, model, (), batch(0), precision=precision)


def programs(plan: Plan, precision: Precision = BF16) -> list[Program]:
    return [run_passes(captured(precision).program, plan, rank) for rank in range(plan.world)]


def training(plan: Plan, precision: Precision = BF16, adam: bool = False) -> VirtualTraining:
    whole = {name: parameter.detach() for name, parameter in Model().named_parameters()}
    make = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if adam else (lambda p: torch.optim.SGD(p, lr=0.1))
    return VirtualTraining(programs(plan, precision), whole, make)


@functools.cache
def one_device(dtype: torch.dtype | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters of five steps of SGD, of two micro-batches each. dtype: to compute in; `None`: float64."""
    model = Model() if dtype else Model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            computed = {name: p.to(dtype) if dtype else p for name, p in model.named_parameters()}
            loss = torch.func.functional_call(model, computed, (), batch(2 * step + micro))
            loss.backward()
            losses.append(loss.detach().double())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach().double() for name, p in model.named_parameters()}


def changes(parameters: dict[str, Tensor]) -> Tensor:
    """What training has added to the parameters."""
    first = dict(Model().named_parameters())
    return torch.cat([(parameters[name].double() - first[name]).flatten() for name in first]).detach()


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", [Shard(1, 1, 1), Shard(1, 2, 4), Shard(2, 2, 4), Shard(4, 4, 4)], ids=str)
def test_bf16_is_as_near_to_float64_as_one_device_in_bf16(shard: Shard, reduce: str) -> None:
    own = training(replace(WORLDS[4], shard=shard), Precision("bf16", reduce=reduce))
    losses = []
    for step in range(STEPS):
        losses += [own.micro_batch(batch(2 * step + micro), synchronise=micro == 1).double() for micro in range(2)]
        own.step()
    exact_losses, exact = one_device(None)
    _, rounded = one_device(torch.bfloat16)
    torch.testing.assert_close(losses, exact_losses, rtol=2e-2, atol=0)
    parameters = own.parameters()
    assert all(each.dtype is torch.float32 for each in parameters.values())
    error = (changes(parameters) - changes(exact)).norm()
    assert error <= 2 * (changes(rounded) - changes(exact)).norm()
    assert error <= 0.02 * changes(exact).norm()


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_what_travels_in_which_type(reduce: torch.dtype) -> None:
    program = programs(replace(WORLDS[4], shard=Shard(2, 2, 4)), Precision("bf16", reduce=reduce))[0]
    found: dict[str, set[str]] = {}
    for event in program_events(program):
        if event.kind != "wait":
            found.setdefault(event.group.split(":")[0], set()).add(event.dtype)
    assert found["params"] == found["refresh"] == {"torch.bfloat16"}
    assert found["grads"] == found["grads.on"] == {str(reduce)}
    assert found["grads.copies"] == {str(reduce)}  # of the parameter without dimensions


def test_other_names_and_what_is_no_type() -> None:
    assert Precision("bf16") == Precision(torch.bfloat16) == Precision.of("bfloat16")
    with pytest.raises(PlanError, match=r"reduce='int8' is no floating-point type"):
        Precision("bf16", reduce="int8")


# --- the account -----------------------------------------------------------------------------------------------------


def live_bytes(own: VirtualTraining, rank: int) -> dict[str, int]:
    """What a rank of the virtual cluster holds, counted from its tensors."""

    def size(tensors: list[Tensor]) -> int:
        return sum(each.nbytes for each in tensors)

    states = [value for each in own.optimizers[rank].state.values() for k, value in each.items() if k != "step"]
    shards = list(own.shards[rank].values())
    return {
        "parameters to compute with": size(list(own.copies[rank].values())),
        "gradients of micro-batches": size(own.accumulated[rank]),
        "optimizer: parameters": size([each.detach() for each in shards]),
        "optimizer: 2 states": size(states),
        "optimizer: .grad, while it steps": size([each.grad for each in shards if each.grad is not None]),
    }


@pytest.mark.parametrize("shard", nested(4), ids=str)
def test_bytes_held_are_those_of_the_formula(shard: Shard) -> None:
    """2Φ/P + 4Φ/G + 12Φ/O, and 4Φ/O while the optimizer steps, for bf16 with Adam; what does not divide is named."""
    own = training(replace(WORLDS[4], shard=shard), adam=True)
    own.micro_batch(batch(0), synchronise=True)
    found = [live_bytes(own, rank) for rank in range(4)]
    own.step()
    own.micro_batch(batch(1), synchronise=False)
    elements = sum(each.numel() for each in Model().parameters())
    trained = sum(each.numel() for each in Model().parameters() if each.requires_grad)
    exact = [2 * elements / shard.params, 4 * trained / shard.grads, 4 * elements / shard.optimizer]
    exact += [8 * trained / shard.optimizer, 4 * trained / shard.optimizer]
    for rank, program in enumerate(own.programs):
        now = live_bytes(own, rank)
        now["optimizer: .grad, while it steps"] = found[rank]["optimizer: .grad, while it steps"]
        shares = held(program)
        assert {each.what: each.bytes for each in shares} == now
        assert [each.exact for each in shares] == exact
        formulas = [each.formula for each in shares]
        assert formulas == ["2Φ/P", "4Φ/G", "4Φ/O", "8Φ/O", "4Φ/O"]
        table = states_table(program)
        for each in shares:
            assert f"{each.formula} = {each.bytes:,} bytes" in table


class Even(nn.Module):
    """Every dimension divides by 8, so that nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


@pytest.mark.parametrize("shard", nested(8), ids=str)
def test_bytes_moved_are_those_of_the_formula(shard: Shard) -> None:
    model, plan = Even(), replace(WORLDS[8], shard=shard)
    program = run_passes(capture(model.forward, model, (), {"x": torch.ones(8, 4, 8)}, precision=BF16).program, plan, 3)
    p, g, o, r, elements = shard.params, shard.grads, shard.optimizer, 8, 256
    gathers = 3  # both in the forward, and the second again for the gradient of the hidden layer
    expected = {
        "2Φ(O-P)/(P·O), once a step": 2 * elements * (o - p) / (p * o),
        "2Φ(P-1)/P, in forward and backward of each micro-batch": gathers * elements * (p - 1) / p,
        "4Φ(G-1)/G, each micro-batch": 4 * elements * (g - 1) / g,
        "4Φ(O-G)/(G·O), once a step": 4 * elements * (o - g) / (g * o),
        "2·4Φ/O·(R/O-1)/(R/O), once a step": 2 * 4 * elements / o * (r / o - 1) / (r / o),
    }
    assert {each.formula: each.bytes for each in moved(program)} == {k: v for k, v in expected.items() if v}
