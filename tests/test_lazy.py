"""Lazy outputs: without communication where the whole is handed in, and over gloo ranks."""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evocompile.errors import EvocompileError
from evocompile.layout import Axis, Factor, Layout, Sharding, Split, local_part
from evocompile.lazy import Assembly, LazyOutput, _Value, without_gradient
from evocompile.mesh import Mesh, group_ranks
from tests.distributed.launch import run_ranks

WHOLE = torch.arange(24.0).reshape(2, 3, 4)


def make(grad: bool = True) -> tuple[LazyOutput, list[int]]:
    """A lazy output and the list to which each gather adds an entry."""
    gathers: list[int] = []

    def gather(part: torch.Tensor) -> torch.Tensor:
        gathers.append(1)
        return WHOLE.clone()

    value = _Value(WHOLE[:1], gather)
    return LazyOutput(value, "output 1", WHOLE.shape, WHOLE.dtype, WHOLE.device, grad), gathers


def test_metadata_printing_and_detaching_gather_nothing() -> None:
    lazy, gathers = make()
    assert isinstance(lazy, torch.Tensor)
    assert (lazy.shape, lazy.dtype, lazy.device) == (WHOLE.shape, WHOLE.dtype, WHOLE.device)
    assert (lazy.ndim, lazy.dim(), lazy.numel(), lazy.size(1), len(lazy)) == (3, 3, 24, 3, 2)
    assert lazy.is_floating_point() and torch.is_floating_point(lazy)
    assert lazy.requires_grad and not lazy.detach().requires_grad and not lazy.data.requires_grad
    assert isinstance(lazy.detach(), LazyOutput)
    assert repr(lazy) == str(lazy) == f"{lazy}"
    assert repr(lazy) == "LazyOutput(output 1, shape=(2, 3, 4), dtype=torch.float32, device=cpu)"
    assert not gathers


def test_the_first_use_gathers_and_later_ones_do_not() -> None:
    lazy, gathers = make()
    detached = lazy.detach()
    assert torch.equal(detached.argmax(-1), WHOLE.argmax(-1))
    assert torch.equal(lazy[0, 1:], WHOLE[0, 1:])
    assert torch.equal(torch.cat([lazy, WHOLE]), torch.cat([WHOLE, WHOLE]))
    assert torch.equal(torch.stack(list(detached)), WHOLE)
    assert detached.tolist() == WHOLE.tolist()
    assert (detached.numpy() == WHOLE.numpy()).all()
    assert type(lazy * 2) is torch.Tensor and (lazy * 2).requires_grad
    assert repr(detached) == repr(WHOLE)
    assert gathers == [1] and lazy.is_gathered


def test_it_pickles_as_the_whole_tensor() -> None:
    lazy, _ = make(grad=False)
    restored = pickle.loads(pickle.dumps(lazy))
    assert type(restored) is torch.Tensor and torch.equal(restored, WHOLE)
    file = io.BytesIO()
    torch.save({"logits": lazy}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["logits"], WHOLE)


@pytest.mark.parametrize(
    "make_term", [lambda lazy: lazy.sum(), lambda lazy: torch.nn.functional.softmax(lazy, -1)[0, 0, 0]]
)
def test_a_gradient_through_it_raises(make_term: Any) -> None:
    lazy, _ = make()
    weight = torch.ones((), requires_grad=True)
    loss = weight * 2 + make_term(lazy)
    with pytest.raises(EvocompileError, match=r"a gradient reached output 1 .*inside of the model's forward"):
        loss.backward()


def test_without_a_gradient_nothing_raises() -> None:
    lazy, _ = make()
    weight = torch.ones((), requires_grad=True)
    (weight * lazy.detach().sum()).backward()
    assert weight.grad == WHOLE.sum()
    with torch.no_grad():
        assert not (lazy * 2).requires_grad


def test_a_plain_value_can_refuse_gradients_too() -> None:
    value = without_gradient(torch.ones(2), "output 2")
    assert value.requires_grad and torch.equal(value.detach(), torch.ones(2))
    with pytest.raises(EvocompileError, match="output 2"):
        value.sum().backward()


def on_ranks(dp: int, cp: int, order: str, size: int, dtype: torch.dtype) -> list[bool]:
    rank = dist.get_rank()
    mesh = Mesh((("dp", dp), ("cp", cp)))
    splits = {"batch": Split("dp", dp, "contiguous", 3), "seq": Split("cp", cp, order, size)}
    sharding = Sharding(splits, mesh.coordinate(rank))
    batch, sequence = Axis("batch", 3), Axis("seq", size - 1, start=1)
    whole = torch.randn(3 * (size - 1), 5, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    same = []
    for split_batch in (False, True):
        rows = (Factor(3, batch, split_batch), Factor(size - 1, sequence, True))
        assembly = Assembly(Layout((rows, (Factor(5),))), sharding, mesh, rank)
        groups = {name: dist.new_group(list(group_ranks(name))) for name in sorted(assembly.all_groups)}
        part = local_part(whole, assembly.layout, sharding)
        gather = functools.partial(assembly.gather, group=groups[assembly.group])
        lazy = LazyOutput.of(part, gather, "output 1", whole.shape, dtype, False)
        same += [lazy.shape == whole.shape, lazy.dtype == dtype, torch.equal(lazy + 0, whole)]
    return same


@pytest.mark.parametrize(
    ("dp", "cp", "order", "size", "dtype"),
    [(1, 2, "zigzag", 7, torch.bfloat16), (2, 2, "contiguous", 2, torch.int64)],  # the last: one rank holds nothing
)
def test_ranks_assemble_the_whole_in_the_models_order(
    dp: int, cp: int, order: str, size: int, dtype: torch.dtype
) -> None:
    for same in run_ranks(on_ranks, dp * cp, dp, cp, order, size, dtype):
        assert all(same), same
