"""State on gloo ranks against the same model, unsharded, in this process."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evocompile.errors import StateError
from evocompile.shards import shard_rows
from evocompile.state import (
    OptimizerWatch,
    _check_optimizer_state,
    as_gradient,
    first_difference,
    gather_from_ranks,
    local_shard,
    shard_parameters,
    state_mesh,
    state_record,
)
from tests.distributed.launch import run_ranks


class Uneven(nn.Module):
    """Rows that do not divide (5, 3), a parameter without dimensions, a tie, a frozen parameter, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.second = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.first.weight.tag = "kept"
        self.register_buffer("table", torch.arange(3.0))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The same gradients on every rank, whatever the sharding."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def set_gradients(model: nn.Module, degree: int, rank: int) -> None:
    for name, whole in gradients(model).items():
        parameter = model.get_parameter(name)
        if whole.ndim and degree > 1:
            lo, hi = shard_rows(whole.shape[0], degree, rank % degree)
            whole = whole[lo:hi].clone()
        parameter.grad = as_gradient(parameter, whole)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.1, foreach=name == "adamw-foreach", fused=name == "adamw-fused")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, set_grads: Any) -> list[float]:
    norms = []
    for _ in range(3):
        set_grads()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


OPTIMIZERS = ("sgd", "adamw", "adamw-foreach", "adamw-fused")


def on_ranks(degree: int) -> dict[str, Any]:
    """Everything about one degree, on one rank."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = state_mesh(world, degree, "cpu")
    result: dict[str, Any] = {}
    for name in OPTIMIZERS:
        for passed in (False, True):  # the optimizer made afterwards, or before, with a step behind it
            model = Uneven()
            optimizer = make_optimizer(name, model)
            if passed:
                for key, whole in gradients(model).items():
                    model.get_parameter(key).grad = whole
                optimizer.step()
                optimizer.zero_grad()
            shard_parameters(model, mesh, degree, optimizer if passed else None)
            if not passed:
                optimizer = make_optimizer(name, model)
            norms = train(model, optimizer, lambda model=model: set_gradients(model, degree, rank))
            full = {key: value.full_tensor() for key, value in model.state_dict().items() if isinstance(value, DTensor)}
            result[f"{name}-{passed}"] = norms, full
    model = Uneven()
    old = model.first.weight
    gradient = torch.ones(5, 4)
    model.first.weight.grad = gradient
    shard_parameters(model, mesh, degree)
    result["names"] = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    result["tied"] = model.tied.weight is model.second.weight
    result["frozen"] = model.frozen.requires_grad
    result["tag"] = model.first.weight.tag
    result["parameter"] = all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    result["buffer"] = type(model.table) is torch.Tensor
    result["gradient"] = model.first.weight.grad.full_tensor()
    result["rows"] = {name: tuple(local_shard(p).shape) for name, p in model.named_parameters()}
    own = local_shard(model.first.weight)
    result["own storage"] = own.untyped_storage().nbytes() == own.numel() * 4 and old.data_ptr() != own.data_ptr()
    with torch.no_grad():
        own.zero_()
    result["writes through"] = not model.first.weight.full_tensor().any()
    records = gather_from_ranks(state_record(Uneven(seed=0)))
    result["same"] = first_difference(records)
    result["seeds"] = first_difference(gather_from_ranks(state_record(Uneven(seed=rank))))
    return result


def reference(name: str, passed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Uneven()
    optimizer = make_optimizer(name, model)

    def set_grads() -> None:
        for key, whole in gradients(model).items():
            model.get_parameter(key).grad = whole

    if passed:
        set_grads()
        optimizer.step()
        optimizer.zero_grad()
    norms = train(model, optimizer, set_grads)
    return norms, {key: value for key, value in model.state_dict().items() if key != "table"}


@pytest.mark.parametrize(
    ("world", "degree", "rows"),
    [
        (2, 2, [{"first.weight": (3, 4), "scale": (), "second.weight": (2, 5)}, {"first.weight": (2, 4)}]),
        (2, 1, [{"first.weight": (5, 4)}] * 2),
        (4, 4, [{"second.weight": (1, 5)}] * 3 + [{"second.weight": (0, 5), "first.weight": (0, 4)}]),
        (4, 2, [{"first.weight": (3, 4)}, {"first.weight": (2, 4)}] * 2),
    ],
)
def test_sharded_state_trains_as_one_device_does(world: int, degree: int, rows: list[dict[str, Any]]) -> None:
    results = run_ranks(on_ranks, world, degree)
    model = Uneven()
    for rank, result in enumerate(results):
        for name in OPTIMIZERS:
            for passed in (False, True):
                norms, full = result[f"{name}-{passed}"]
                expected_norms, expected = reference(name, passed)
                assert norms == pytest.approx(expected_norms, rel=1e-6)
                assert list(full) == list(expected)
                for key in expected:
                    torch.testing.assert_close(full[key], expected[key], rtol=1e-6, atol=1e-7)
        assert result["names"] == [name for name, _ in model.named_parameters(remove_duplicate=False)]
        for fact in ("tied", "parameter", "buffer", "own storage", "writes through"):
            assert result[fact] is True, fact
        assert result["frozen"] is False
        assert result["tag"] == "kept"
        assert torch.equal(result["gradient"], torch.ones(5, 4))
        assert result["rows"].items() >= rows[rank].items()
        assert result["same"] is None
        assert "'scale'" not in result["seeds"]
        assert "'frozen' has other values on rank 1" in result["seeds"]
        assert "torch.manual_seed" in result["seeds"]


def test_rows_are_those_of_torch_chunk() -> None:
    for size in range(12):
        for degree in (1, 2, 3, 4, 7):
            chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(degree)] if size else []
            chunks += [[]] * (degree - len(chunks))
            assert [list(range(*shard_rows(size, degree, index))) for index in range(degree)] == chunks


def test_state_that_cannot_be_sharded_is_refused() -> None:
    model = Uneven()
    optimizer = torch.optim.Adafactor(model.parameters())
    for key, whole in gradients(model).items():
        model.get_parameter(key).grad = whole
    optimizer.step()
    with pytest.raises(StateError, match=r"'row_var' of parameter 'first.weight'.*before the optimizer's first step"):
        _check_optimizer_state(model, optimizer)


def test_other_models_are_told_apart() -> None:
    record, other = state_record(nn.Linear(2, 2)), state_record(nn.Linear(2, 2, bias=False))
    assert "another model" in str(first_difference([record, other]))


@pytest.fixture
def watched() -> Iterator[tuple[nn.Linear, nn.Linear, OptimizerWatch]]:
    """A model before and after, and the watch over both."""
    gc.collect()
    old = nn.Linear(2, 2)
    new, watch = copy.deepcopy(old), OptimizerWatch()
    for before, after in zip(old.parameters(), new.parameters(), strict=True):
        watch.add(before, after)
    yield old, new, watch


Watched = tuple[nn.Linear, nn.Linear, OptimizerWatch]


def test_a_stale_optimizer_is_found_once(watched: Watched) -> None:
    old, _, watch = watched
    optimizer = torch.optim.AdamW(old.parameters())
    assert watch.finding() is None  # no backward yet
    watch.backward_ran()
    optimizer.step()
    assert "AdamW" in str(watch.finding())
    assert watch.finding() is None


def test_no_alarm_without_an_optimizer_of_the_old_parameters(watched: Watched) -> None:
    old, _, watch = watched
    copies = list(old.parameters())  # kept for some other reason
    watch.backward_ran()
    assert watch.finding() is None
    del old, copies


def test_no_alarm_while_gradients_accumulate(watched: Watched) -> None:
    old, new, watch = watched
    left_over = torch.optim.SGD(old.parameters())
    optimizer = torch.optim.SGD(new.parameters(), lr=0.0)
    watch.backward_ran()
    assert watch.finding() is None
    watch.backward_ran()
    assert watch.finding() is None
    del left_over, optimizer


def test_no_alarm_once_a_parameter_has_changed(watched: Watched) -> None:
    old, new, watch = watched
    left_over = torch.optim.SGD(old.parameters())
    watch.backward_ran()
    with torch.no_grad():
        new.weight.add_(1.0)  # by hand, no optimizer involved
    assert watch.finding() is None
    del left_over


def workers_of_the_mesh() -> list[int]:
    """Threads that carry out the gathers of parameters, for a mesh of all ranks and one of pairs."""
    groups = [state_mesh(4, degree, "cpu").get_group("shard") for degree in (4, 2)]
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]  # type: ignore[attr-defined]


def test_one_worker_gathers_parameters() -> None:
    """With two, torch frees a string twice once in some thousand gathers, and a rank dies."""
    assert run_ranks(workers_of_the_mesh, 4) == [[1, 1]] * 4
