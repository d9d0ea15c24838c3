"""The model's state: every parameter becomes a `DTensor` that holds this rank's rows of it.

Over D ranks (`plan.shard_degrees.optimizer`) a parameter is cut along dim 0 as DTensor itself does: ceil(n / D) rows on
each rank, fewer or none on the last ones. Parameters without dimensions are replicated. D smaller than the world gives
a mesh of (world / D, D): replicas of groups of D consecutive ranks. So optimizers, `clip_grad_norm_`, `state_dict` and
`torch.distributed.checkpoint` work as they do with FSDP2. Buffers stay whole.

Shards are cut from the full parameter that every rank already holds, without communication. Ranks must therefore have
built the same values; `state_record` lets them check that.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from . import torch_private
from .errors import StateError
from .optimizers import check_optimizer
from .shards import shard_rows


def state_mesh(world: int, degree: int, device_type: str) -> DeviceMesh:
    """The mesh that the parameters live on; collective, as groups may be made for it."""
    if degree == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("replica",))
    shape, names = ((world,), ("shard",)) if degree == world else ((world // degree, degree), ("replica", "shard"))
    if device_type != "cpu" or "cpu:gloo" not in dist.get_backend_config().split(","):
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override={"shard": "gloo"})
    torch_private.use_one_worker(mesh.get_group("shard"))
    return mesh


def placements(mesh: DeviceMesh, degree: int, dims: int) -> tuple[Placement, ...]:
    """Placements of a parameter of `dims` dimensions whose state is sharded over `degree` ranks."""
    last = Shard(0) if dims and degree > 1 else Replicate()
    return (*[Replicate()] * (mesh.ndim - 1), last)


def shard_tensor(full: torch.Tensor, mesh: DeviceMesh, degree: int) -> DTensor:
    """This rank's shard of a tensor that every rank holds, as a `DTensor` with storage of its own."""
    places = placements(mesh, degree, full.ndim)
    local = full.detach()
    if isinstance(places[-1], Shard):
        lo, hi = shard_rows(full.shape[0], degree, mesh.get_local_rank(mesh.ndim - 1))
        local = local[lo:hi]
    local = local.clone(memory_format=torch.contiguous_format)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, places, run_check=False, shape=full.shape, stride=stride)


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """The rows that this rank holds; writing to it writes to the parameter."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def as_gradient(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The gradient of `parameter` from the gradient of this rank's rows."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shard_parameters(
    module: nn.Module, mesh: DeviceMesh, degree: int, optimizer: Optimizer | None = None
) -> OptimizerWatch:
    """Replace every parameter of `module`, in place, by its shard.

    Names, order, ties, `requires_grad`, gradients and attributes set on parameters are kept. The groups and the state
    of `optimizer` move to the new parameters: state of a parameter's shape becomes shards, scalars stay.

    One parameter at a time, so that at most one is held twice.
    """
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((owner, name))
    if optimizer is not None:
        check_optimizer(optimizer, degree)
        _check_optimizer_state(module, optimizer)
    watch = OptimizerWatch()
    while owners:
        old, places = owners.popitem()
        new = _sharded(old, mesh, degree)
        for owner, name in places:
            owner.register_parameter(name, new)  # an existing name keeps its position
        if optimizer is not None:
            _repoint(optimizer, old, new, mesh, degree)
        watch.add(old, new)
    return watch


def _sharded(old: nn.Parameter, mesh: DeviceMesh, degree: int) -> nn.Parameter:
    new = nn.Parameter(shard_tensor(old, mesh, degree), requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    if old.grad is not None:
        new.grad = shard_tensor(old.grad, mesh, degree)
    return new


def _is_shardable(key: str, value: object, parameter: torch.Tensor) -> bool:
    """Whether an entry of an optimizer's state has an element for each of the parameter's ("step" is a counter)."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step"


def _check_optimizer_state(module: nn.Module, optimizer: Optimizer) -> None:
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim and not _is_shardable(key, value, parameter):
                raise StateError(
                    f"the optimizer's state {key!r} of parameter {name!r} has shape {tuple(value.shape)}, the "
                    f"parameter {tuple(parameter.shape)}: it cannot be sharded along. Call parallelize() before the "
                    "optimizer's first step, or build the optimizer afterwards."
                )


def _repoint(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, mesh: DeviceMesh, degree: int) -> None:
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
    if old in optimizer.state:
        optimizer.state[new] = {
            key: shard_tensor(value, mesh, degree) if _is_shardable(key, value, old) else value
            for key, value in optimizer.state.pop(old).items()
        }


class OptimizerWatch:
    """Finds an optimizer that was built before `parallelize` and would silently train nothing.

    Sure signs, all needed, so that gradient accumulation or a learning rate of zero raises no alarm: a backward has
    run, no parameter has changed since, some living optimizer holds parameters from before, none holds the new ones.
    """

    def __init__(self) -> None:
        self._old: list[weakref.ref[torch.Tensor]] = []
        self._new: list[torch.Tensor] = []  # no weak references: torch cannot move a parameter that has one
        self._versions: list[int] | None = None
        self._done = False

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        self._old.append(weakref.ref(old))
        self._new.append(new)

    def backward_ran(self) -> None:
        """To be called after each backward."""
        if not self._done and self._versions is None:
            self._versions = self._current_versions()

    def finding(self) -> str | None:
        """To be called before each forward that will be differentiated: the warning, at most once."""
        if self._done or self._versions is None:
            return None
        old = _alive(self._old)
        if not old or self._current_versions() != self._versions:
            self._done = True
            return None
        stale = _optimizers_of(old)
        if not stale or _optimizers_of(set(map(id, self._new))):
            return None
        self._done = True
        kinds = ", ".join(sorted({type(optimizer).__name__ for optimizer in stale}))
        return (
            f"backward has run but no parameter has changed: the optimizer ({kinds}) still holds the parameters from "
            "before parallelize(), so its step() trains nothing. Build the optimizer after parallelize(), or pass it: "
            "parallelize(model, optimizer=optimizer)."
        )

    def optimizers(self) -> list[Optimizer]:
        """Living optimizers that hold the new parameters. Slow."""
        return _optimizers_of(set(map(id, self._new)))

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._new]


def _alive(refs: Iterable[weakref.ref[torch.Tensor]]) -> set[int]:
    return {id(parameter) for ref in refs if (parameter := ref()) is not None}


def _optimizers_of(parameters: set[int]) -> list[Optimizer]:
    """Living optimizers that hold one of these parameters (by id). Slow: looks at every object of the process."""
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    return [
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
    ]


Record = tuple[str, tuple[int, ...], str, int, int]


def state_record(module: nn.Module) -> list[Record]:
    """What ranks compare: name, shape, dtype and two checksums of what this rank holds of each parameter and buffer."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [
        (name, tuple(tensor.shape), str(tensor.dtype), *checksums(local_shard(tensor.detach())))
        for name, tensor in tensors
    ]


_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def checksums(tensor: torch.Tensor) -> tuple[int, int]:
    """Sum and exclusive-or of the elements' bits; zeros on `meta`."""
    if tensor.device.type == "meta":
        return 0, 0
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_INTEGER[flat.element_size()])
    if not bits.numel():
        return 0, 0
    return int(bits.sum(dtype=torch.int64)), int(torch.hash_tensor(bits).view(torch.int64))


def first_difference(records: Sequence[Sequence[Record]], ranks: Sequence[int] | None = None) -> str | None:
    """A sentence about the first parameter in which the records differ, or `None`. ranks: whose they are, in order."""
    ranks = range(len(records)) if ranks is None else ranks
    for rank, record in zip(ranks, records, strict=True):
        if [each[:3] for each in record] != [each[:3] for each in records[0]]:
            return (
                f"rank {rank} has built another model than rank {ranks[0]}: names, shapes or dtypes of its state differ"
            )
        for own, first in zip(record, records[0], strict=True):
            if own != first:
                return (
                    f"{own[0]!r} has other values on rank {rank} than on rank {ranks[0]}. Every rank has to start "
                    "from the same values: call torch.manual_seed with the same seed before the model is built, or "
                    "load the same checkpoint on every rank."
                )
    return None


def gather_from_ranks(value: Any) -> list[Any]:
    """What every rank passed, by rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
