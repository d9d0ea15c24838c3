"""All ranks make the same call: checked at every call, before a program starts to communicate.

A rank that passes another length would run another program, and the collectives of two programs can match by accident:
garbage, or a wait until the group's time-out. So the ranks exchange two numbers over gloo, on the host: which program
this call found, and a checksum of the inputs that are in host memory. Inputs on a device are compared when a program
is compiled (`agreement.check_same_inputs`); reading them at every call would hold the device up.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import DeadlockError, InputError
from .guards import input_specs
from .mesh import Mesh
from .torch_private import default_group_timeout, leaves_with_names

NEW = -1  # no program fits: one will be compiled


class SameCall:
    """The ranks' agreement about one call. Collective."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._world = mesh.world
        self._replicas = [mesh.coordinate(each)["dp"] for each in range(mesh.world)]
        self._rank = rank
        self._group = dist.new_group(backend="gloo", timeout=default_group_timeout(), group_desc="same call")

    def check(
        self,
        program: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_parts: bool,
        synchronise: bool,
        fresh: bool,
    ) -> bool:
        """Raises InputError, on all ranks alike, if they found different programs or pass different inputs.

        program:     number of the program that this rank will run, or NEW.
        in_parts:    only the ranks of one replica pass the same inputs.
        synchronise: whether the call is outside of `no_sync`.
        fresh:       whether this rank may compute with the copies that it has; returned is whether all may.
        """
        own = torch.tensor([program, _checksum(args, kwargs), synchronise, fresh], device="cpu")
        numbers = [torch.empty_like(own) for _ in range(self._world)]
        try:
            dist.all_gather(numbers, own, group=self._group)
        except RuntimeError as error:
            raise DeadlockError(f"a rank did not come to this call of the model: {error}") from error
        programs, sums, synchronised, freshness = zip(*(each.tolist() for each in numbers), strict=True)
        if len(set(synchronised)) > 1:
            inside = [str(rank) for rank, outside in enumerate(synchronised) if not outside]
            raise InputError(
                f"the model is called under no_sync() on rank{'s' if len(inside) > 1 else ''} {', '.join(inside)}, but "
                "not on the others: enter it on every rank for the same micro-batches"
            )
        firsts = [self._replicas.index(replica) if in_parts else 0 for replica in self._replicas]
        other_inputs = [rank for rank, first in enumerate(firsts) if sums[rank] != sums[first]]
        if set(programs) == {NEW}:
            return all(freshness)  # compiling compares what the ranks pass, input by input
        if len(set(programs)) > 1 or other_inputs:
            self._raise(programs, other_inputs, args, kwargs, in_parts)
        return all(freshness)

    def _raise(
        self,
        programs: tuple[int, ...],
        other_inputs: list[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        in_parts: bool,
    ) -> None:
        """Every rank comes here, so they can tell each other what they pass."""
        shapes = {name: tuple(spec.shape) for name, spec in input_specs(args, kwargs).items()}
        everyone: list[Any] = [None] * self._world
        dist.all_gather_object(everyone, shapes, group=self._group)
        if len(set(programs)) > 1:
            told = "; ".join(
                f"rank {rank} {'would compile a new program' if program == NEW else f'runs program {program}'} "
                f"for {' '.join(f'{name}{list(shape)}' for name, shape in shapes.items())}"
                for rank, (program, shapes) in enumerate(zip(programs, everyone, strict=True))
            )
            raise InputError(f"the ranks make different calls of the model: {told}. Call it alike on every rank")
        same = "the ranks of one replica pass" if in_parts else "every rank passes"
        way_out = "" if in_parts else ", or pass inputs='local' to parallelize if each replica has its own part"
        raise InputError(
            f"rank{'s' if len(other_inputs) > 1 else ''} {', '.join(map(str, other_inputs))} passed another batch than "
            f"the first rank: {same} the same batch. Draw it with the same seed on all of them{way_out}"
        )


def _checksum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the contents of the tensors in host memory."""
    checksum = 0
    for _, leaf in leaves_with_names(args, kwargs):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel():
            data = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            checksum = zlib.crc32(data.numpy().data, checksum)
    return checksum
