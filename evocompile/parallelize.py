"""`parallelize`: one line that makes a model train on all ranks of the process group. It reads as the story it is."""

from __future__ import annotations

import logging
import socket
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .errors import EvocompileError, PlanError, StateError
from .plan import Plan
from .runtime import Backend, ParallelForward, parallel_forward
from .state import Record, first_difference, gather_from_ranks, shard_parameters, state_mesh, state_record

log = logging.getLogger("evocompile")


def parallelize(
    model_or_class_or_fn: Any = None,
    *,
    plan: Plan | str = "auto",
    example_inputs: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    cluster: Any = None,
    inputs: str = "global",
    precision: Any = None,
    backend: Backend = "inductor",
    check: bool = False,
) -> Any:
    """Make `model` train on all ranks of the default process group; the numbers stay those of one device.

    Works in place and returns the same object: its class, attributes, hooks and parameter names stay, its parameters
    become `DTensor` shards, its `forward` runs the parallel program, which is compiled at the first call of each
    signature. Every rank calls it with the same model, and then calls the model with the same whole batch.

    plan:      how to spread the work. "auto", until the planner is built: context parallel over all ranks, with
               parameters, gradients and optimizer state sharded over all of them.
    optimizer: an optimizer of the model's parameters that exists already: its groups and state move to the shards.
               Otherwise build it afterwards.
    backend:   "inductor", or "eager" for segments that are not compiled.
    model, example_inputs, cluster, inputs, precision, check: only their defaults are built yet.

    Raises PlanError (no process group, a plan for another number of ranks, a model on the wrong device, what is not
    built yet) and StateError (already parallelised, other values than on rank 0), on all ranks alike.
    """
    _refuse_unbuilt(model_or_class_or_fn, model, example_inputs, cluster, inputs, precision, backend, check)
    module: nn.Module = model_or_class_or_fn
    world = _world()
    plan = _plan_for(plan, world)
    device = _meet(module)
    degree = plan.shard_degrees.params
    watch = shard_parameters(module, state_mesh(world, degree, device.type), degree, optimizer)
    module.forward = ParallelForward(module, plan, device, watch, backend)
    return module


def compile(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile a parallelised model for a call `model(*args, **kwargs)` ahead of it; every rank calls it.

    The call's values do not matter; its shapes, dtypes and flags do, and so do the present grad mode and autocast.
    """
    forward = parallel_forward(model)
    if forward is None:
        raise StateError("evocompile.compile() takes a model that parallelize() has returned")
    forward.prepare(*args, **kwargs)


def _refuse_unbuilt(
    target: Any,
    model: nn.Module | None,
    example_inputs: Any,
    cluster: Any,
    inputs: str,
    precision: Any,
    backend: str,
    check: bool,
) -> None:
    if target is None or isinstance(target, type):
        raise PlanError("the decorator form of parallelize() is not built yet: pass it an instance of the model")
    if model is not None or not isinstance(target, nn.Module):
        raise PlanError(
            "parallelize(loss_fn, model=model) is not built yet: compute the loss inside of the model's forward, and "
            "pass the model"
        )
    for name, value, default in (
        ("example_inputs", example_inputs, None),
        ("cluster", cluster, None),
        ("inputs", inputs, "global"),
        ("precision", precision, None),
        ("check", check, False),
    ):
        if value is not default and value != default:
            raise PlanError(f"parallelize({name}=…) is not built yet: leave it at {default!r}")
    if backend not in ("inductor", "eager"):
        raise PlanError(f"backend={backend!r}: choose 'inductor' or 'eager'")


def _world() -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            "parallelize() needs a process group: start the script with `torchrun --nproc-per-node N script.py`, and "
            "call torch.distributed.init_process_group() before parallelize()"
        )
    return dist.get_world_size()


def _plan_for(plan: Plan | str, world: int) -> Plan:
    if plan == "auto":
        chosen = Plan(cp=world)
        if dist.get_rank() == 0:
            log.warning(
                "plan='auto': the planner is not built yet, so this is %s: context parallel over all %d ranks, with "
                "parameters, gradients and optimizer state sharded over all of them",
                chosen,
                world,
            )
        return chosen
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={plan!r}: pass 'auto' or an evocompile.Plan")
    if plan.world != world:
        raise PlanError(
            f"{plan} is for {plan.world} ranks (the product of its degrees), but {world} run: change the plan, or "
            f"start `torchrun --nproc-per-node {plan.world}`"
        )
    return plan


# --- before anything is changed: all ranks have the same model, each on a device of its own ---------------------------


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others. `problem`: why it cannot go on; the rest is then missing."""

    problem: str | None = None
    place: tuple[str, str] | None = None
    record: tuple[Record, ...] = ()


def _meet(module: nn.Module) -> torch.device:
    """The device of the model, once all ranks have found that they can go on; all raise if one cannot."""
    own: EvocompileError | None = None
    try:
        _check_not_parallel(module)
        device = _one_device(module)
        check_backend(device.type, dist.get_backend_config())
        report = _Report(place=(socket.gethostname(), str(device)), record=tuple(state_record(module)))
    except EvocompileError as error:
        own, report = error, _Report(problem=str(error))
    reports: list[_Report] = gather_from_ranks(report)
    if own is not None:
        raise own
    for rank, each in enumerate(reports):
        if each.problem is not None:
            raise PlanError(f"rank {rank} cannot parallelize the model: {each.problem}")
    _check_places([each.place for each in reports if each.place is not None])
    difference = first_difference([each.record for each in reports])
    if difference is not None:
        raise StateError(difference)
    return device


def _check_not_parallel(module: nn.Module) -> None:
    for name, submodule in module.named_modules():
        if parallel_forward(submodule) is not None:
            raise StateError(f"{f'its part {name!r}' if name else 'the model'} is parallelised already")
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise StateError(
                f"parameter {name!r} is a DTensor already: pass the model as it is for one device, without fully_shard "
                "or tensor parallelism"
            )


def _one_device(module: nn.Module) -> torch.device:
    devices: dict[torch.device, str] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        devices.setdefault(tensor.device, name)
    if not any(True for _ in module.parameters()):
        raise PlanError("the model has no parameters, so there is nothing to train or to shard")
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise PlanError(f"the model is on several devices ({where}): move all of it to this rank's device, model.to(…)")
    (device,) = devices
    if device.type == "meta":
        raise PlanError(
            "the model is on the meta device, so it has no values to shard yet: materialise it with "
            "model.to_empty(device=…) and initialise it, or build it on the rank's device"
        )
    return device


def check_backend(device_type: str, config: str) -> None:
    """Refuse a process group that cannot carry the model's tensors. config: "cpu:gloo,cuda:nccl"."""
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
        if not device.startswith("cpu"):
            ranks[host, device].append(rank)
    for (host, device), sharing in ranks.items():
        if len(sharing) > 1:
            raise PlanError(
                f"ranks {', '.join(map(str, sharing))} hold the model on the same device, {device} of {host}: give "
                "each a device of its own, model.to(f\"cuda:{os.environ['LOCAL_RANK']}\")"
            )
