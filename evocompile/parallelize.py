"""`parallelize`: one line that makes a model train on all ranks of the process group. It reads as the story it is."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .auto import Search, check_cluster
from .classes import parallel_class
from .cluster import Cluster
from .errors import PlanError, StateError
from .kernels.dispatch import check_name
from .meeting import group_device, meet
from .plan import Plan
from .precision import Precision
from .runtime import Backend, Options, ParallelForward, ParallelFunction, ParallelModel, parallel_forward
from .state import shard_parameters, state_mesh
from .unsharded import guard_methods
from .whole_values import take_whole_values

log = logging.getLogger("evocompile")


def parallelize(
    model_or_class_or_fn: Any = None,
    *,
    plan: Plan | str = "auto",
    example_inputs: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    cluster: Cluster | None = None,
    inputs: Literal["global", "local"] = "global",
    precision: Precision | torch.dtype | str | None = None,
    backend: Backend = "inductor",
    check: bool = False,
    attention_backend: str | None = None,
    memory: int | None = None,
) -> Any:
    """Make a model train on all ranks of the default process group; the numbers stay those of one device.

    Three forms, told apart by the first argument:

    - `model = parallelize(model)` works in place and returns the same object: its class, attributes, hooks and
      parameter names stay, its parameters become `DTensor` shards, its `forward` runs the parallel program, which is
      compiled at the first call of each signature.
    - `loss_fn = parallelize(loss_fn, model=model)` returns a function that is called as `loss_fn` is, with the model
      first: `loss_fn(model, batch)`. All that it computes is part of the program. The model is made parallel as in
      the first form, and may also be called by itself; a model that is parallel already takes further functions.
    - `@parallelize(plan=…)` on a class, or `parallelize(Class, plan=…)`, makes every instance parallel once its
      constructor has returned, those of subclasses too. The class is changed in place and returned.

    Every rank calls it with the same model, and then calls the model. Weights on `meta` get their memory and values
    between the two: see `materialize`.

    plan:      how to spread the work. "auto": the fastest plan that `search` finds, for `example_inputs`; without them
               the optimizer's shards are over all ranks, and the rest is found at the first call.
    optimizer: an optimizer of the model's parameters that exists already: its groups and state move to the shards.
               Otherwise build it afterwards.
    inputs:    "global": every rank passes the same whole batch. "local": each replica of the plan's dp passes its own
               rows, of dim 0 of every input with a batch axis; the result is that of one device with all rows, in the
               order of dp. Replicas may pass different numbers of rows.
    backend:   "inductor", or "eager" for segments that are not compiled.
    check:     at the first call of each signature, compare a step with the eager model on every rank, with the whole
               weights in its memory.
    attention_backend: the kernel of every attention block, by its name in `evocompile doctor`, instead of the first one
               that serves it.
    precision: "bf16" or "fp16": parameters and floating-point inputs take part in the computation in that type, and are
               gathered in it; the optimizer keeps the parameters as they are. A `Precision` also chooses the types in
               which gradients are summed over ranks and micro-batches (float32 at least when left out).
    memory:    bytes that a step may take on a rank; a plan that takes more is refused before it runs. Left out: what
               the device has on CUDA, no limit on CPU.
    example_inputs: of one call of the model, for plan="auto": a mapping or a sequence; their shapes matter.
    cluster:   for plan="auto": an `evocompile.Cluster` of as many devices as ranks. Left out, what is known of
               the ranks: their number, and the type of their devices.

    Raises PlanError (no process group, a plan for another number of ranks, a model on the wrong device, what is not
    built yet), KernelError (no such attention backend) and StateError (already parallelised, other values than on rank
    0), on all ranks alike.
    """
    if not isinstance(cluster, Cluster | None):
        raise PlanError(f"cluster={cluster!r}: pass an evocompile.Cluster, such as Cluster('h100', nodes=2)")
    auto = _Auto(example_inputs, cluster)
    options = _options(backend, inputs, check, attention_backend, precision, memory)
    target = model_or_class_or_fn
    if target is None:
        return functools.partial(
            parallelize,
            plan=plan,
            example_inputs=example_inputs,
            model=model,
            optimizer=optimizer,
            cluster=cluster,
            inputs=inputs,
            precision=precision,
            backend=backend,
            check=check,
            attention_backend=attention_backend,
            memory=memory,
        )
    if isinstance(target, nn.Module):
        if model is not None:
            raise PlanError(
                "model= goes with a loss function: pass parallelize(model), or parallelize(loss_fn, model=…)"
            )
        _parallel(target, plan, optimizer, options, auto)
        return target
    if isinstance(target, type):
        return _class_form(target, plan, model, optimizer, options, auto)
    if not callable(target) or model is None:
        raise PlanError(
            f"parallelize() got {_described(target)}: pass a model, a class of models, or a loss function and its "
            "model, parallelize(loss_fn, model=model)"
        )
    return _function_form(target, plan, model, optimizer, options, auto)


def compile(model: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compile a parallelised model or loss function for a call `model(*args, **kwargs)` ahead of it, on every rank.

    The call's values do not matter; its shapes, dtypes and flags do, and so do the present grad mode and autocast.
    """
    call = parallel_forward(model) if isinstance(model, nn.Module) else model
    if not isinstance(call, (ParallelForward, ParallelFunction)):
        raise StateError("evocompile.compile() takes a model or a loss function that parallelize() has returned")
    call.prepare(*args, **kwargs)


# --- the three forms -------------------------------------------------------------------------------------------------


def _parallel(
    module: nn.Module, plan: Plan | str, optimizer: Optimizer | None, options: Options, auto: _Auto
) -> ParallelModel:
    """Find the plan, cut the parameters into shards, and install the parallel forward."""
    world = _world("parallelize()")
    check_cluster(auto.cluster, world)
    if plan != "auto":
        plan = _checked_plan(plan, world)
    with torch.device("cpu"):  # not on meta, where the model may be being built
        device = meet(module)
    plan, search = _plan_for(plan, module, world, device, options, auto)
    with torch.device("cpu"):
        return _install(module, plan, search, device, optimizer, options)


def _install(
    module: nn.Module,
    plan: Plan,
    search: Search | None,
    device: torch.device,
    optimizer: Optimizer | None,
    options: Options,
) -> ParallelModel:
    on_meta = device.type == "meta"
    if on_meta and optimizer is not None:
        raise PlanError(
            "the model is on the meta device, where an optimizer has nothing to train: give the weights values after "
            "parallelize(), then build the optimizer"
        )
    _check_micro_batches(plan, options)
    degree = plan.shard_degrees.optimizer
    mesh = state_mesh(plan.world, degree, (group_device() if on_meta else device).type)
    watch = shard_parameters(module, mesh, degree, optimizer)
    model = ParallelModel(module, plan, watch, None if on_meta else device, options.precision, search)
    module.forward = ParallelForward(model, options)
    guard_methods(module)
    take_whole_values(module)
    return model


def _function_form(
    function: Callable[..., Any],
    plan: Plan | str,
    module: nn.Module,
    optimizer: Optimizer | None,
    options: Options,
    auto: _Auto,
) -> ParallelFunction:
    if auto.example_inputs is not None:
        raise PlanError(
            "example_inputs= goes with a model, whose call they are: leave them out for a loss function, and the plan "
            "is searched at its first call"
        )
    forward = parallel_forward(module)
    if forward is None:
        return ParallelFunction(function, _parallel(module, plan, optimizer, options, auto), options)
    if optimizer is not None or plan not in ("auto", forward.plan):
        raise StateError(
            f"the model is parallelised already, with {forward.plan}: leave out plan= and optimizer= for another "
            "function of it"
        )
    if options.precision not in (None, forward.model.precision):
        raise StateError(
            f"the model is parallelised already, with {forward.model.precision}: leave out precision= for another "
            "function of it"
        )
    return ParallelFunction(function, forward.model, options)


def _class_form(
    cls: type, plan: Plan | str, model: nn.Module | None, optimizer: Optimizer | None, options: Options, auto: _Auto
) -> type:
    if not issubclass(cls, nn.Module):
        raise PlanError(f"parallelize() got the class {cls.__name__}, which is no torch.nn.Module")
    if model is not None or optimizer is not None:
        raise PlanError(
            "a class has no model= and no optimizer=: they belong to an instance; build the optimizer of each"
        )
    return parallel_class(
        cls,
        before=lambda: _world(f"{cls.__name__}, a class that is parallelised,"),
        after=lambda instance: _parallel(instance, plan, None, options, auto),
    )


# --- arguments -------------------------------------------------------------------------------------------------------


class _Auto(NamedTuple):
    """What plan="auto" is given to go by."""

    example_inputs: Any
    cluster: Cluster | None


def _options(
    backend: Backend,
    inputs: Literal["global", "local"],
    check: bool,
    attention_backend: str | None,
    precision: Precision | torch.dtype | str | None,
    memory: int | None,
) -> Options:
    if backend not in ("inductor", "eager"):
        raise PlanError(f"backend={backend!r}: choose 'inductor' or 'eager'")
    if inputs not in ("global", "local"):
        raise PlanError(f"inputs={inputs!r}: choose 'global' (every rank passes the whole batch) or 'local'")
    if attention_backend is not None:
        check_name(attention_backend)
    if memory is not None and (type(memory) is not int or memory < 1):
        raise PlanError(f"memory={memory!r}: pass a number of bytes, which each rank may use")
    types = Precision.of(precision) if precision else None
    return Options(backend, inputs, bool(check), attention_backend, types, memory)


def _check_micro_batches(plan: Plan, options: Options) -> None:
    if plan.microbatches == 1:
        return
    instead = "split the batch in the loop, with model.no_sync()"
    if options.inputs == "local":
        raise PlanError(f"Plan(microbatches={plan.microbatches}) with inputs='local' is not built yet: {instead}")
    if options.precision is not None and options.precision.compute is torch.float16:
        raise PlanError(
            f"Plan(microbatches={plan.microbatches}) computes gradients before GradScaler's scale is known, which in "
            f"fp16 loses the small ones: {instead}, or use bf16"
        )


def _described(target: Any) -> str:
    return f"the function {target.__qualname__}" if hasattr(target, "__qualname__") else f"a {type(target).__name__}"


def _world(what: str) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            f"{what} needs a process group: start the script with `torchrun --nproc-per-node N script.py`, and "
            "call torch.distributed.init_process_group() before"
        )
    return dist.get_world_size()


def _checked_plan(plan: Plan | str, world: int) -> Plan:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={plan!r}: pass 'auto' or an evocompile.Plan")
    if plan.world != world:
        raise PlanError(
            f"{plan} is for {plan.world} ranks (the product of its degrees), but {world} run: change the plan, or "
            f"start `torchrun --nproc-per-node {plan.world}`"
        )
    return plan


def _plan_for(
    plan: Plan | str, module: nn.Module, world: int, device: torch.device, options: Options, auto: _Auto
) -> tuple[Plan, Search | None]:
    """The plan, and what finds it at the first call if it is not known yet."""
    if isinstance(plan, Plan):
        return plan, None
    if options.inputs == "local":
        log.warning("plan='auto' with inputs='local': every rank is a replica, with its own part of the batch")
        return Plan(dp=world), None
    half = options.precision is not None and options.precision.compute is torch.float16  # see _check_micro_batches
    search = Search(auto.cluster, world, group_device() if device.type == "meta" else device, parts=not half)
    if auto.example_inputs is None:
        return search.first, search
    return search.of_example(module, auto.example_inputs, options.precision or Precision()), None
