"""What all ranks must agree about before a model is cut into shards, and again once weights on `meta` have values."""

from __future__ import annotations

import socket
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import EvocompileError, PlanError, StateError
from .state import Record, checksums, first_difference, gather_from_ranks, local_shard, state_record
from .torch_private import tensor_slots


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others. `problem`: why it cannot go on; the rest is then missing.

    heads: checksums of the first two rows of this rank's shards, of those in which these two differ.
    """

    problem: str | None = None
    place: tuple[str, str] | None = None
    record: tuple[Record, ...] = ()
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def meet(module: nn.Module) -> torch.device:
    """The device of the model (`meta` if its weights are there), once all ranks have found that they can go on.

    Nothing has been changed yet. All ranks raise if one cannot go on.
    """
    own: EvocompileError | None = None
    try:
        check_plain(module)
        device = one_device(module)
        check_backend(device.type, dist.get_backend_config())
        report = _Report(place=(socket.gethostname(), str(device)), record=tuple(state_record(module)))
    except EvocompileError as error:
        own, report = error, _Report(problem=str(error))
    reports = _told(report, own, "cannot parallelize the model")
    difference = first_difference([each.record for each in reports])
    if difference is not None:
        raise StateError(difference)
    return device


def meet_again(module: nn.Module, degree: int, ties: Iterable[tuple[str, ...]], buffers: Iterable[str]) -> torch.device:
    """The device of a parallelised model whose weights were on `meta`, once they have values on all ranks.

    degree:  over how many ranks parameters are sharded.
    ties:    names that must be one parameter.
    buffers: those that were on `meta`, unless it is known that they were given values.
    All ranks raise if the weights of one are not there, or if ranks that hold the same rows hold other values.
    """
    own: EvocompileError | None = None
    try:
        _check_values(module, ties)
        device = one_device(module)
        check_backend(device.type, dist.get_backend_config())
        heads = {name: checksums(rows) for name, rows in _heads(module) if not torch.equal(rows[0], rows[1])}
        report = _Report(None, (socket.gethostname(), str(device)), tuple(state_record(module)), heads)
    except EvocompileError as error:
        own, report = error, _Report(problem=str(error))
    reports = _told(report, own, "cannot run the model")
    whole = {name for name, _ in module.named_buffers()} | {n for n, p in module.named_parameters() if not p.ndim}
    difference = first_difference([[row for row in each.record if row[0] in whole] for each in reports])
    for index in range(degree):
        copies = range(index, len(reports), degree)
        difference = difference or first_difference([reports[rank].record for rank in copies], copies)
    doubt = _unwritten(module, buffers)
    if difference is not None:
        raise StateError(" ".join(filter(None, (difference, doubt))))
    if doubt and dist.get_rank() == 0:
        warnings.warn(doubt, stacklevel=2)
    _warn_of_equal_shards(reports[:degree])
    return device


def _told(report: _Report, own: EvocompileError | None, what: str) -> list[_Report]:
    """The reports of all ranks; raises on all if one has a problem or two share an accelerator."""
    reports: list[_Report] = gather_from_ranks(report)
    if own is not None:
        raise own
    for rank, each in enumerate(reports):
        if each.problem is not None:
            raise PlanError(f"rank {rank} {what}: {each.problem}")
    _check_places([each.place for each in reports if each.place is not None])
    return reports


def check_plain(module: nn.Module) -> None:
    """Refuse a model of which a part is parallel already."""
    from .runtime import parallel_forward

    for name, submodule in module.named_modules():
        if parallel_forward(submodule) is not None:
            raise StateError(f"{f'its part {name!r}' if name else 'the model'} is parallelised already")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise StateError(
                f"parameter {name!r} is a DTensor already: pass the model as it is for one device, without fully_shard "
                "or tensor parallelism"
            )


def one_device(module: nn.Module) -> torch.device:
    """The device of all parameters and buffers; buffers may have values where parameters are on `meta`."""
    devices: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        devices.setdefault(parameter.device, name)
    if not devices:
        raise PlanError("the model has no parameters, so there is nothing to train or to shard")
    if torch.device("meta") not in devices:
        for name, buffer in module.named_buffers():
            devices.setdefault(buffer.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise PlanError(f"the model is on several devices ({where}): move all of it to this rank's device, model.to(…)")
    return next(iter(devices))


def group_device() -> torch.device:
    """The device that the process group is for: what a model on `meta` is made for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    served = [part.split(":")[0] for part in dist.get_backend_config().split(",")]
    if accelerator is not None and accelerator.type in served:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def check_backend(device_type: str, config: str) -> None:
    """Refuse a process group that cannot carry the model's tensors. config: "cpu:gloo,cuda:nccl"."""
    if device_type == "meta":
        return
    backends = dict(part.split(":") for part in config.split(","))
    backend = backends.get(device_type)
    if backend is None:
        raise PlanError(
            f"the model is on {device_type}, but the process group serves {', '.join(sorted(backends))}: move the "
            "model there, or call init_process_group() without a backend, which serves all devices"
        )
    if backend == "gloo" and device_type != "cpu":
        raise PlanError(
            f"the model is on {device_type}, but the process group is gloo's, which is for the CPU: call "
            "init_process_group() without a backend, or with the device's own ('nccl' for CUDA)"
        )


def _check_places(places: list[tuple[str, str]]) -> None:
    """An accelerator belongs to one rank."""
    ranks = defaultdict(list)
    for rank, (host, device) in enumerate(places):
        if not device.startswith(("cpu", "meta")):
            ranks[host, device].append(rank)
    for (host, device), sharing in ranks.items():
        if len(sharing) > 1:
            raise PlanError(
                f"ranks {', '.join(map(str, sharing))} hold the model on the same device, {device} of {host}: give "
                "each a device of its own, model.to(f\"cuda:{os.environ['LOCAL_RANK']}\")"
            )


# --- weights that were on meta ---------------------------------------------------------------------------------------


def _check_values(module: nn.Module, ties: Iterable[tuple[str, ...]]) -> None:
    for slot in tensor_slots(module):
        if slot.tensor is not None and slot.tensor.device.type == "meta":
            raise StateError(
                f"{slot.name!r} is still on the meta device. Give the weights memory and values before the first "
                "call: evocompile.materialize(model, init), or model.to_empty(device=…) and then load a checkpoint "
                "(torch.distributed.checkpoint, or set_model_state_dict with full_state_dict=True and "
                "broadcast_from_rank0=True)"
            )
    check_sharded(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for names in ties:
        if any(parameters.get(name) is not parameters[names[0]] for name in names):
            raise StateError(
                f"{' and '.join(map(repr, names))} were one parameter at parallelize() and are not any more: tie them "
                "again, as the model's own constructor does (model.tie_weights() for transformers)"
            )


def check_sharded(module: nn.Module) -> None:
    """Refuse a parallelised model of which a parameter was replaced or added since."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise StateError(
                f"parameter {name!r} is not sharded: something has put a plain tensor there since parallelize(). Copy "
                "values into parameters instead (load_state_dict without assign=True, or set_model_state_dict), and "
                "make changes to the model's parts before parallelize()"
            )


def _unwritten(module: nn.Module, buffers: Iterable[str]) -> str | None:
    """A sentence about the buffers that nothing was written to, as far as their version counters tell."""
    now = dict(module.named_buffers())
    names = [name for name in buffers if name in now and now[name]._version == 0]
    if not names:
        return None
    return (
        f"Nothing has been written to the buffers {', '.join(map(repr, names))} since the model was on the meta "
        "device. If to_empty() gave them their memory, they hold whatever was there: compute them again, or use "
        "evocompile.materialize(model, init)."
    )


def _heads(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The first two rows of every shard that has as many."""
    for name, parameter in module.named_parameters():
        shard = local_shard(parameter.detach())
        if shard.ndim and shard.shape[0] > 1:
            yield name, shard[:2]


def _warn_of_equal_shards(reports: list[_Report]) -> None:
    """Different rows of one parameter hold the same random numbers: the mark of one seed on every rank."""
    if len(reports) < 2 or dist.get_rank() != 0:
        return
    first, second = reports[0].heads, reports[1].heads
    equal = [name for name in first if first[name] == second.get(name)]
    if equal:
        warnings.warn(
            f"the rows of {', '.join(map(repr, equal))} on rank 1 repeat those on rank 0. On a CPU mesh every rank "
            "draws a random DTensor from its own generator, so equal seeds give equal shards. Draw as one device "
            "does: evocompile.materialize(model, init)",
            stacklevel=2,
        )


def ties_of(module: nn.Module) -> list[tuple[str, ...]]:
    """The groups of names that share one parameter."""
    names = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]
