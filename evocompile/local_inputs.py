"""`inputs="local"`: each data-parallel replica passes its own part of the batch.

The ranks of one replica pass the same part; parts may have different numbers of rows. The whole batch is the parts in
the order of dp, and the result of a call is that of one device with the whole batch.

A rank sees the shape of its own part only, so on every call the ranks exchange one number each, over gloo on the host:
a program is chosen, or made, by what all ranks pass.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import digest
from .errors import InputError
from .guards import TensorSpec, input_specs
from .mesh import Mesh
from .torch_private import default_group_timeout, leaves_with_names, map_leaves

Call = tuple[tuple[Any, ...], dict[str, Any]]
Signature = tuple[int, ...]  # what every rank passes, as one number each


@dataclass(frozen=True)
class Parts:
    """How a whole batch arrives.

    rows:  of each replica's part, in the order of dp.
    names: the inputs that arrive in parts; the others have no batch axis, and every rank passes the same.
    """

    rows: tuple[int, ...]
    names: frozenset[str]

    def whole_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs as one device would be given them, by name."""
        return {
            name: (sum(self.rows), *spec.shape[1:]) if name in self.names else spec.shape
            for name, spec in input_specs(args, kwargs).items()
        }

    def __str__(self) -> str:
        return f"parts of {', '.join(map(str, self.rows))} rows"


@dataclass(frozen=True)
class _Passed:
    """What one rank passes, for the others to compare: specifications and contents of its inputs by name."""

    specs: dict[str, TensorSpec]
    digests: dict[str, str]


class LocalInputs:
    """The ranks' agreement about their parts. Collective, as its two questions are."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh = mesh
        self._replica = mesh.coordinate(rank)["dp"]
        self._group = dist.new_group(backend="gloo", timeout=default_group_timeout(), group_desc="local inputs")

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Names, shapes and dtypes that every rank passes in this call: one number for each rank."""
        text = repr([(name, spec.shape, spec.dtype) for name, spec in input_specs(args, kwargs).items()])
        own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)
        numbers = [torch.empty((), dtype=torch.long, device="cpu") for _ in range(self._mesh.world)]
        dist.all_gather(numbers, torch.tensor(own, device="cpu"), group=self._group)
        return tuple(map(int, numbers))

    def parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parts:
        """The parts of this call's batch. Raises InputError, on all ranks alike, where they do not make one batch."""
        tensors = {name: leaf for name, leaf in leaves_with_names(args, kwargs) if isinstance(leaf, Tensor)}
        own = _Passed(input_specs(args, kwargs), {name: digest(tensor) for name, tensor in tensors.items()})
        everyone: list[Any] = [None] * self._mesh.world
        dist.all_gather_object(everyone, own, group=self._group)
        return parts_of(everyone, self._mesh)

    def whole_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Parts) -> Call:
        """The call as one device would get it, with the replicas' parts put together."""
        names = iter([name for name, _ in leaves_with_names(args, kwargs)])

        def whole(leaf: Any) -> Any:
            if next(names) not in parts.names:
                return leaf
            everyone: list[Any] = [None] * self._mesh.world
            dist.all_gather_object(everyone, leaf.cpu(), group=self._group)
            return torch.cat([everyone[self._mesh.rank(first)] for first in _first_ranks(self._mesh)]).to(leaf.device)

        return map_leaves(whole, args, kwargs)


def _first_ranks(mesh: Mesh) -> list[dict[str, int]]:
    """The coordinate of one rank of each replica."""
    return [{axis: replica if axis == "dp" else 0 for axis, _ in mesh.axes} for replica in range(mesh.degree("dp"))]


def parts_of(passed: list[_Passed], mesh: Mesh) -> Parts:
    """The parts from what every rank passes.

    The batch axis is dim 0 of the first input that has dims. Every other input with as many rows, on every rank, has
    it too.
    """
    _check_same(passed, mesh)
    firsts = [mesh.rank(coordinate) for coordinate in _first_ranks(mesh)]
    leading = next((name for name, spec in passed[0].specs.items() if spec.shape), None)
    if leading is None:
        raise InputError(
            "inputs='local' splits the batch, but no input of the call has dims: pass a tensor, or use inputs='global'"
        )
    rows = tuple(passed[rank].specs[leading].shape[0] for rank in firsts)
    names = frozenset(
        name
        for name, spec in passed[0].specs.items()
        if spec.shape and all(passed[rank].specs[name].shape[0] == n for rank, n in zip(firsts, rows, strict=True))
    )
    for name in passed[0].specs.keys() - names:
        for rank, each in enumerate(passed):
            if each.digests[name] != passed[0].digests[name]:
                raise InputError(
                    f"input {name!r} has not the {' and '.join(map(str, rows))} rows of the replicas' parts of "
                    f"{leading!r}, so it is no part of the batch and has to be the same on every rank; rank {rank} "
                    "passes another one than rank 0"
                )
    return Parts(rows, names)


def _check_same(passed: list[_Passed], mesh: Mesh) -> None:
    """All ranks pass the same inputs but for their rows; the ranks of a replica pass equal ones."""
    for rank, each in enumerate(passed):
        if list(each.specs) != list(passed[0].specs):
            raise InputError(
                f"rank {rank} passes the inputs {list(each.specs)}, rank 0 passes {list(passed[0].specs)}: call the "
                "model with the same arguments on every rank"
            )
        first = mesh.rank({**{axis: 0 for axis, _ in mesh.axes}, "dp": mesh.coordinate(rank)["dp"]})
        for name, spec in each.specs.items():
            other = passed[0].specs[name]
            if (spec.shape[1:], len(spec.shape), spec.dtype) != (other.shape[1:], len(other.shape), other.dtype):
                raise InputError(
                    f"input {name!r} is {spec.dtype} {spec.shape} on rank {rank} and {other.dtype} {other.shape} on "
                    "rank 0: parts of one batch differ in dim 0 only. Pad them to one length "
                    "(evocompile.pad_batch), or bring them to one dtype"
                )
            if each.digests[name] != passed[first].digests[name]:
                raise InputError(
                    f"input {name!r} differs between ranks {first} and {rank}, which belong to one replica: with "
                    f"inputs='local' all {mesh.world // mesh.degree('dp')} ranks of a replica pass the same part. Let "
                    "the sampler take its rank and world size from the replica, not from the process"
                )
