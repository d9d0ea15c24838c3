"""The parallel forward and the parallel loss function: what a call of a parallelised model runs.

A call looks for a *variant* (a captured and compiled program) whose guards hold, or makes one: capture, passes,
agreement of all ranks, compile. `variant.py` runs it.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature as signature_of
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import agree_across_ranks, check_same_inputs, computation
from .attention_backends import check_backends
from .auto import Search
from .buffers import BufferPool
from .capture import Captured, capture
from .check import check_against_one_device
from .collectives import Communicators, step_events
from .compile import CompiledGraph, compile_graph
from .errors import InputError, StateError
from .kernels import dispatch
from .lazy import LazyOutput
from .local_inputs import LocalInputs, Parts, Signature
from .meeting import check_sharded, meet_again, ties_of
from .memory import Memory, check_fits, step_memory
from .mesh import Mesh
from .optimizers import ADAM, check_optimizer, states_of
from .pipeline import run_passes
from .plan import Plan
from .positions import assemblies_of
from .precision import Precision
from .program import Program
from .progress import Progress
from .recompute_auto import fitted
from .same_call import NEW, SameCall
from .state import OptimizerWatch
from .states import NotCopied, States, install
from .torch_private import leaves_with_names, map_leaves
from .variant import Call, Variant

Backend = Literal["inductor", "eager"]

log = logging.getLogger("evocompile")
_MANY = 4  # programs without gradients that look like a cache that grows, or like lengths that are not padded


class ParallelModel:
    """What belongs to one parallelised model, for its forward and its loss functions: process groups included.

    device: where its parameters are; `None` while they are on `meta`.
    search: what finds the plan at the first call; `None` where it is known.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        watch: OptimizerWatch,
        device: torch.device | None,
        precision: Precision | None = None,
        search: Search | None = None,
    ) -> None:
        self.module = module
        self._search = search
        self.plan = plan
        self.precision = precision or Precision()
        self.watch = watch
        self.rank = dist.get_rank()
        self.is_unsharded = False  # inside of `unsharded`
        self.states = States(plan, self.rank, self.precision)
        self.buffers = BufferPool()
        install(module, self.states)
        self._device = device
        self._programs = 0
        self._communicators: Communicators | None = None
        self._ties = ties_of(module)
        self._on_meta = [name for name, buffer in module.named_buffers() if buffer.device.type == "meta"]

    @property
    def device(self) -> torch.device:
        """Where the model computes. Collective at the first question after its weights were on `meta`."""
        if self._device is None:
            self._device = meet_again(self.module, self.plan.shard_degrees.optimizer, self._ties, self._on_meta)
        return self._device

    @property
    def communicators(self) -> Communicators:
        if self._communicators is None or self._communicators.are_left:
            self._communicators = Communicators(self.device)
        return self._communicators

    @functools.cached_property
    def local_inputs(self) -> LocalInputs:
        return LocalInputs(Mesh.of(self.plan), self.rank)

    @functools.cached_property
    def same_call(self) -> SameCall:
        return SameCall(Mesh.of(self.plan), self.rank)

    def settle(self, captured: Program) -> None:
        """With plan="auto": at the first captured call the plan is found, and stays."""
        if self._search is not None:
            self.plan = self._search.of_program(captured)
            self.states.follow(self.plan)
            self._search = None

    def next_number(self) -> int:
        """Numbers the model's programs in the order in which all ranks compile them."""
        self._programs += 1
        return self._programs

    def buffers_are_written(self) -> None:
        """All buffers that were on `meta` have values."""
        self._on_meta.clear()


@dataclass(frozen=True)
class Options:
    """How calls are compiled. The arguments of `parallelize` of the same names."""

    backend: Backend = "inductor"
    inputs: Literal["global", "local"] = "global"
    check: bool = False
    attention_backend: str | None = None
    precision: Precision | None = None
    memory: int | None = None


class ParallelCall(NotCopied):
    """A function of a parallelised model that runs on all ranks: a call finds or makes its variant, and runs it.

    original: the function as it was.
    """

    frames = 4  # from a warning in `__call__` up to the line that called

    def __init__(self, original: Callable[..., Any], model: ParallelModel, options: Options) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.model = model
        self.options = options
        self._variants: list[Variant] = []  # the last used one first

    @torch.compiler.disable(reason="a parallelised model is compiled already")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._checked(args, kwargs)
        self.model.states.check_no_step()
        if torch.is_grad_enabled():
            self._warn_of_stale_optimizer()
        return self._variant(*call)(*call)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments now instead of at the first call."""
        self._variant(*self._checked(args, kwargs))

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @property
    def rank(self) -> int:
        return self.model.rank

    @property
    def last_captured(self) -> Captured | None:
        """What the last call has run, or the last `prepare` compiled."""
        return self._variants[0].captured if self._variants else None

    @property
    def last_plan(self) -> Plan:
        """The plan of that, in which a choice stands for each layer where it was left open."""
        return self._variants[0].program.plan if self._variants else self.plan

    @property
    def memory(self) -> Memory | None:
        """What a step of the call that was last run, or compiled, holds on this rank."""
        return self._variants[0].memory if self._variants else None

    def as_on_one_device(self) -> AbstractContextManager[None]:
        """While `original` is traced, and its guards are read."""
        return nullcontext()

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with plain tensors, all on the model's device."""
        if self.model.is_unsharded:
            raise StateError("a loss function of a model cannot run inside of unsharded(model), where it is plain")
        device = self.model.device
        leaves = leaves_with_names(args, kwargs)
        for name, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device != device:
                raise InputError(
                    f"input {name!r} is on {leaf.device}, the model's parameters are on {device}: "
                    f"move it first, {name}.to({str(device)!r})"
                )
        if any(isinstance(leaf, LazyOutput) for _, leaf in leaves):
            return map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, LazyOutput) else leaf, args, kwargs)
        return args, kwargs

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        signature_of(self.original).bind(*args, **kwargs)  # Python's own TypeError for arguments that do not fit
        in_parts = self.options.inputs == "local" and self.plan.dp > 1
        passed = self.model.local_inputs.signature(args, kwargs) if in_parts else ()
        self._variants = [each for each in self._variants if not each.has_failed]
        with self.as_on_one_device():
            found = next(
                (each for each in self._variants if each.signature == passed and each.captured.matches(args, kwargs)),
                None,
            )
            states = self.model.states
            number = NEW if found is None else found.number
            fresh = self.model.same_call.check(
                number, args, kwargs, in_parts=in_parts, synchronise=states.synchronise, fresh=states.is_fresh()
            )
            if not fresh:
                states.refresh()
            if found is not None:
                self._variants.remove(found)
                self._variants.insert(0, found)
                return found
            parts = self.model.local_inputs.parts(args, kwargs) if in_parts else None
            if self._variants and self.rank == 0:
                log.warning("evocompile compiles again: %s", self._difference(args, kwargs, parts))
            variant = self._build(args, kwargs, passed, parts)
        self._warn_of_outputs(variant)
        if self.options.check:
            check_against_one_device(self, variant, args, kwargs)
        self._variants.insert(0, variant)
        self._warn_of_many_programs()
        return variant

    def _difference(self, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Parts | None) -> str:
        """What changed since the last variant with these shapes, or since the last one of all."""
        nearest = min(self._variants, key=lambda variant: variant.captured.guards.differ(args, kwargs))
        own = nearest.captured.mismatch(args, kwargs)
        return own or f"the batch changed: {nearest.parts} at capture, {parts} now"

    def _build(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature, parts: Parts | None
    ) -> Variant:
        if parts is None:
            inputs = {name: leaf for name, leaf in leaves_with_names(args, kwargs) if isinstance(leaf, Tensor)}
            check_same_inputs(list(inputs.values()), list(inputs), range(self.plan.world))
        communicators = self.model.communicators
        with Progress(shown=self.rank == 0) as progress:
            captured, programs, memory = self._agreed_programs(args, kwargs, parts, progress)
            assemblies = assemblies_of(programs[0])
            communicators.create(set().union(*(each.all_groups for each in assemblies.values())))

        model, number = self.model, self.model.next_number()

        def compiled(program: Program, name: str) -> CompiledGraph:
            with Progress(shown=self.rank == 0) as progress:
                scheduled = program.graphs[name]
                graph = communicators.resolve(scheduled)
                both = zip(scheduled.graph.nodes, graph.graph.nodes, strict=True)
                taken = {copy: program.pool[node] for node, copy in both if node in program.pool}
                resolve = model.buffers.resolve(taken)
                return compile_graph(graph, backend=self.options.backend, resolve=resolve, progress=progress)

        def variant(program: Program, others: Sequence[Variant] = ()) -> Variant:
            return Variant(
                number,
                captured,
                program,
                functools.partial(compiled, program),
                assemblies,
                communicators,
                model.watch,
                model.states,
                model.device,
                signature,
                parts,
                self.options.attention_backend,
                memory,
                others,
            )

        return variant(programs[0], [variant(program) for program in programs[1:]])

    def _agreed_programs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Parts | None, progress: Progress
    ) -> tuple[Captured, list[Program], Callable[[], Memory]]:
        """Capture and passes on this rank, for each micro-batch, and the proof that all ranks' programs run together.

        And what tells the memory of a step, which fits.

        A rank that fails here still comes to the meeting, so that the others hear of it instead of waiting.
        """
        failure: Exception | None = None
        computed, plan = "a program", self.plan
        try:
            progress("capturing the model")
            check_sharded(self.model.module)
            for optimizer in self.model.watch.optimizers():
                check_optimizer(optimizer, self.plan.shard_degrees.optimizer)
            captured = capture(
                self.original, self.model.module, args, kwargs, parts=parts, precision=self.model.precision
            )
            self.model.settle(captured.program)
            assert captured.program.joint is not None
            computed = computation(captured.program.joint.graph)
            limit = self._limit()
            plan = fitted(captured.program, self.plan, limit, self._memory)
            programs = [
                run_passes(captured.program, plan, self.rank, number=number, progress=progress)
                for number in range(plan.microbatches)
            ]
            with dispatch.use(self.options.attention_backend):
                for program in programs:
                    check_backends(program)
            memory = functools.cache(functools.partial(self._memory, programs))
            if limit is not None:
                check_fits(memory(), limit, self.rank)
            events = step_events(programs)
        except Exception as error:
            failure, events = error, []
        progress("agreeing with the other ranks")
        fingerprint = {
            "the version of torch": torch.__version__,
            "the plan": plan.to_json(),
            "the precision": str(self.model.precision),
            "the backend": self.options.backend,
            "the attention backend": self.options.attention_backend or "any",
            "the gradient mode": "enabled" if torch.is_grad_enabled() else "disabled",
            "the mode of the model": _mode(self.model.module),
            "what the model computes": computed,
        }
        try:
            why = f"{type(failure).__name__}: {failure}" if failure is not None else None
            groups = agree_across_ranks(events, fingerprint, failure=why)
        except Exception as disagreement:
            raise disagreement from failure
        if failure is not None:
            raise failure
        self.model.communicators.create(groups)
        return captured, programs, memory

    def _memory(self, programs: Sequence[Program]) -> Memory:
        """What a step takes on this rank."""
        optimizers = self.model.watch.optimizers() if programs[0].backward is not None else []
        states = max(map(states_of, optimizers), default=ADAM)
        with dispatch.use(self.options.attention_backend):
            return step_memory(programs, states=states, fused=self.options.backend == "inductor")

    def _limit(self) -> int | None:
        """The bytes that a step may take."""
        limit = self.options.memory
        if limit is None and self.model.device.type == "cuda":
            limit = torch.cuda.get_device_properties(self.model.device).total_memory
        return limit

    def _warn_of_stale_optimizer(self) -> None:
        finding = self.model.watch.finding()
        if finding is not None and self.rank == 0:
            warnings.warn(finding, stacklevel=self.frames)

    def _warn_of_many_programs(self) -> None:
        """A cache that grows is another signature with every token."""
        if self.rank == 0 and sum(each.program.backward is None for each in self._variants) == _MANY:
            warnings.warn(
                f"{_MANY} programs were compiled for calls without gradients, one for each signature. To generate or "
                "to evaluate with a cache, take the plain model meanwhile: with evocompile.unsharded(model): …; for "
                "batches of many lengths, evocompile.pad_batch",
                stacklevel=self.frames + 1,
            )

    def _warn_of_outputs(self, variant: Variant) -> None:
        finding = variant.outputs_without_a_loss()
        if finding is not None and self.rank == 0:
            warnings.warn(finding, stacklevel=self.frames + 1)


class ParallelForward(ParallelCall):
    """Takes the place of `module.forward` on one instance; the class, attributes, hooks and signature stay."""

    frames = 6  # the module's own __call__ comes between

    def __init__(self, model: ParallelModel, options: Options) -> None:
        super().__init__(model.module.forward, model, options)


class ParallelFunction(ParallelCall):
    """A loss function with its model: called as the function itself, `step(model, …)`."""

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if not args or args[0] is not self.model.module:
            given = type(args[0]).__name__ if args else "nothing"
            name = getattr(self.original, "__name__", "the function")
            raise InputError(
                f"{name}() takes the model that it was parallelised with as its first argument, as the function itself "
                f"does, and got {given}"
            )
        return super()._checked(args, kwargs)

    @contextmanager
    def as_on_one_device(self) -> Iterator[None]:
        """The function calls the model, which then has its own forward."""
        attributes = vars(self.model.module)
        forward = attributes.pop("forward")
        try:
            yield
        finally:
            attributes["forward"] = forward


def parallel_forward(module: nn.Module) -> ParallelForward | None:
    """The parallel forward of a module that has one."""
    forward = vars(module).get("forward")
    while forward is not None and not isinstance(forward, ParallelForward):
        forward = getattr(forward, "__wrapped__", None)  # as Accelerate puts autocast around it
    return forward


def _mode(module: nn.Module) -> str:
    """Of all parts of a model, as far as it is one."""
    parts = [each.training for each in module.modules()]
    if all(parts) or not any(parts):
        return "training" if parts[0] else "evaluation"
    return f"training in {sum(parts)} of its {len(parts)} modules"
