"""The parallel forward: what a call of a parallelised module runs.

A call looks for a *variant* (a captured and compiled program) whose guards hold, or makes one: capture, passes,
agreement of all ranks, compile. A variant runs as one node of the autograd graph: its inputs are the parameters, its
outputs the differentiable outputs of the model, and its backward runs the compiled backward. So `loss.backward()`,
hooks on parameters, gradient accumulation and `retain_graph` are autograd's own.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .agreement import agree_across_ranks, check_same_inputs
from .capture import Captured, capture
from .collectives import Communicators, pending_works, program_events
from .compile import CompiledGraph, compile_graph
from .errors import InputError, StateError
from .guards import input_specs
from .lazy import Assembly, LazyOutput, without_gradient
from .mesh import group_name
from .pipeline import run_passes
from .plan import Plan
from .program import InputKind, Output, OutputKind, Program, output_values, placeholders
from .state import OptimizerWatch, as_gradient, local_shard
from .torch_private import leaves_with_names, map_leaves, take_saved_tensors

Backend = Literal["inductor", "eager"]
Call = tuple[tuple[Any, ...], dict[str, Any]]

log = logging.getLogger("evocompile")


class ParallelForward:
    """Takes the place of `module.forward` on one instance; the class, attributes, hooks and signature stay.

    Everything that belongs to the parallel model hangs on this object, process groups included.
    original: the module's own forward.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, device: torch.device, watch: OptimizerWatch, backend: Backend
    ) -> None:
        functools.update_wrapper(self, module.forward)
        self.original = module.forward
        self._module = module
        self.plan = plan
        self._device = device
        self._watch = watch
        self._backend = backend
        self.rank = dist.get_rank()
        self._communicators = Communicators(device)
        self._variants: list[Variant] = []  # the last used one first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._checked(args, kwargs)
        if torch.is_grad_enabled():
            self._warn_of_stale_optimizer()
        return self._variant(*call)(*call)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Compile for these arguments now instead of at the first call."""
        self._variant(*self._checked(args, kwargs))

    @property
    def last_captured(self) -> Captured | None:
        """What the last call has run, or the last `prepare` compiled."""
        return self._variants[0].captured if self._variants else None

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with plain tensors, all on the model's device."""
        leaves = leaves_with_names(args, kwargs)
        for name, leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device != self._device:
                raise InputError(
                    f"input {name!r} is on {leaf.device}, the model's parameters are on {self._device}: "
                    f"move it first, {name}.to({str(self._device)!r})"
                )
        if any(isinstance(leaf, LazyOutput) for _, leaf in leaves):
            return map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, LazyOutput) else leaf, args, kwargs)
        return args, kwargs

    def _variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        for index, variant in enumerate(self._variants):
            if variant.captured.matches(args, kwargs):
                self._variants.insert(0, self._variants.pop(index))
                return variant
        if self._variants and self.rank == 0:
            log.warning("evocompile compiles again: %s", self._difference(args, kwargs))
        self._variants.insert(0, self._build(args, kwargs))
        return self._variants[0]

    def _difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What changed since the last variant with these shapes, or since the last one of all."""
        specs = input_specs(args, kwargs)
        nearest = min(self._variants, key=lambda variant: variant.captured.guards.inputs != specs)
        return nearest.captured.mismatch(args, kwargs)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        inputs = {name: leaf for name, leaf in leaves_with_names(args, kwargs) if isinstance(leaf, Tensor)}
        check_same_inputs(list(inputs.values()), list(inputs), range(self.plan.world))
        with Progress(shown=self.rank == 0) as progress:
            captured, program = self._agreed_program(args, kwargs, progress)
            assemblies = _assemblies(program)
            self._communicators.create(set().union(*(each.all_groups for each in assemblies.values())))
            graphs = [
                compile_graph(self._communicators.resolve(graph), backend=self._backend, progress=progress)
                for graph in (program.forward, program.backward)
                if graph is not None
            ]
        return Variant(captured, program, graphs, assemblies, self._communicators, self._watch, self._device)

    def _agreed_program(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Progress
    ) -> tuple[Captured, Program]:
        """Capture and passes on this rank, and the proof that all ranks' programs run together.

        A rank that fails here still comes to the meeting, so that the others hear of it instead of waiting.
        """
        failure: Exception | None = None
        outcome = "a program"
        try:
            progress("capturing the model")
            captured = capture(self.original, self._module, args, kwargs)
            program = run_passes(captured.program, self.plan, self.rank, progress=progress)
            events = program_events(program)
        except Exception as error:
            failure, events = error, []
            outcome = f"{type(error).__name__}: {error}"
        progress("agreeing with the other ranks")
        fingerprint = {
            "the version of torch": torch.__version__,
            "the plan": self.plan.to_json(),
            "the backend": self._backend,
            "what compiling the call gives": outcome,
        }
        try:
            groups = agree_across_ranks(events, fingerprint)
        except Exception as disagreement:
            raise disagreement from failure
        if failure is not None:
            raise failure
        self._communicators.create(groups)
        return captured, program

    def _warn_of_stale_optimizer(self) -> None:
        finding = self._watch.finding()
        if finding is not None and self.rank == 0:
            warnings.warn(finding, stacklevel=5)  # at the call of the module

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError(
            "a parallelised model cannot be copied, as the copy would run with the original's parameters: copy the "
            "model before parallelize(), or build a new one and load the state_dict"
        )

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a parallelised model cannot be pickled: save model.state_dict() (with torch.distributed.checkpoint), and "
            "load it into a model that is built and parallelised anew"
        )


def parallel_forward(module: nn.Module) -> ParallelForward | None:
    """The parallel forward of a module that has one."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, ParallelForward) else None


# --- one compiled program --------------------------------------------------------------------------------------------


class Variant:
    """A compiled program, and how a call of the module runs it."""

    def __init__(
        self,
        captured: Captured,
        program: Program,
        graphs: Sequence[CompiledGraph],
        assemblies: dict[int, Assembly],
        communicators: Communicators,
        watch: OptimizerWatch,
        device: torch.device,
    ) -> None:
        self.captured = captured
        self.program = program
        self.forward = graphs[0]
        self.backward = graphs[1] if len(graphs) > 1 else None
        self.watch = watch
        self.users = program.outputs_of(OutputKind.USER)
        self._assemblies = assemblies
        self._communicators = communicators
        self._updates = _updated_buffers(program)
        self._requires_grad = [
            node.meta["example_value"].requires_grad for node in output_values(captured.dynamo.graph_module.graph)
        ]
        inputs = captured.program.inputs_of(InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER)
        self._parameters = {index for index, each in enumerate(inputs) if each.kind is InputKind.PARAMETER}
        self._trained = [index for index in sorted(self._parameters) if inputs[index].requires_grad]
        self._saved_parameters = _saved_parameters(program)
        draws = bool(program.inputs_of(InputKind.SEED))
        self._seed = StepSeed(communicators, device, program.mesh.world) if draws else None
        self._call = captured.callable(self._run)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(args, kwargs)

    def _run(self, *flat: Tensor) -> list[Any]:
        """The tensor operations of the forward: flat inputs of the program to flat user outputs."""
        call = _ForwardCall(self, flat)
        if self.backward is None:
            with torch.no_grad():
                call.run()
            return [self._returned(index, value) for index, value in enumerate(call.outputs)]
        differentiable = iter(_Step.apply(call, *(flat[index] for index in self._trained)))  # type: ignore[no-untyped-call]
        return [
            next(differentiable) if output.differentiable else self._returned(index, value)
            for index, (output, value) in enumerate(zip(self.users, call.outputs, strict=True))
        ]

    def _returned(self, index: int, value: Any) -> Any:
        """An output that takes no gradient, as the caller gets it."""
        refuses = self.backward is not None and self._requires_grad[index]
        assembly = self._assemblies.get(index)
        if assembly is not None:
            group = self._communicators.group(assembly.group)
            return LazyOutput.of(value, assembly, group, f"output {index}", refuses)
        return without_gradient(value, f"output {index}") if refuses else value

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Run the forward graph on this rank's shards: the user outputs and the values saved for backward."""
        inputs = [local_shard(each) if index in self._parameters else each for index, each in enumerate(flat)]
        if self._seed is not None:
            inputs.append(self._seed())
        results = _execute(self.forward, inputs, flat[0].device.type)
        outputs, results = results[: len(self.users)], results[len(self.users) :]
        updates, saved = results[: len(self._updates)], results[len(self._updates) :]
        if updates:
            buffers = [flat[index] for index in self._updates]
            outputs, saved = _apart_from(buffers, outputs), _apart_from(buffers, saved)
            for buffer, update in zip(buffers, updates, strict=True):
                buffer.copy_(update)
        for position, index in self._saved_parameters.items():
            saved[position] = flat[index]  # not the shard: what DTensor does in place is counted on the DTensor alone
        # An output that is an input itself must be a tensor of its own, or autograd would take it for the input.
        given = set(map(id, flat))
        return [each.detach() if id(each) in given else each for each in outputs], saved

    def run_backward(self, saved: list[Tensor], tangents: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Any]:
        """The gradients of `parameters`, the trained ones in order; `saved` is emptied."""
        assert self.backward is not None
        inputs = [*map(local_shard, saved), *(tangent.contiguous() for tangent in tangents)]
        saved.clear()
        gradients = _execute(self.backward, inputs, parameters[0].device.type)
        return [
            None if gradient is None else as_gradient(parameter, gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]


def _execute(graph: CompiledGraph, inputs: list[Tensor], device_type: str) -> list[Any]:
    """Run a graph. Its casts were captured with it, so a surrounding autocast must not add more."""
    pending = pending_works()
    with torch.autocast(device_type, enabled=False):
        results = graph(inputs)
    assert pending_works() == pending, "the graph has started a communication that it did not wait for"
    return results


def _apart_from(buffers: Sequence[Tensor], values: list[Any]) -> list[Any]:
    """The values, with copies of those that share memory with a buffer which is about to be written."""
    written = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    return [
        each.clone() if isinstance(each, Tensor) and each.untyped_storage().data_ptr() in written else each
        for each in values
    ]


def _updated_buffers(program: Program) -> list[int]:
    """For each buffer update the position of that buffer among the inputs."""
    positions = {each.name: index for index, each in enumerate(program.inputs) if each.kind is InputKind.BUFFER}
    return [positions[output.name] for output in program.outputs_of(OutputKind.BUFFER)]


def _saved_parameters(program: Program) -> dict[int, int]:
    """The saved values that are parameters: position among the saved values -> position among the inputs."""
    assert program.forward is not None
    inputs = {node: index for index, node in enumerate(placeholders(program.forward.graph))}
    first = len(program.outputs_of(OutputKind.USER)) + len(program.outputs_of(OutputKind.BUFFER))
    saved = output_values(program.forward.graph)[first:]
    return {
        position: inputs[node]
        for position, node in enumerate(saved)
        if node in inputs and program.inputs[inputs[node]].kind is InputKind.PARAMETER
    }


def _assemblies(program: Program) -> dict[int, Assembly]:
    """How the user outputs that stay split become whole, by their position."""
    return {
        index: _assembly(program, output)
        for index, output in enumerate(program.outputs_of(OutputKind.USER))
        if output.layout is not None and output.layout.is_split
    }


def _assembly(program: Program, output: Output) -> Assembly:
    assert program.sharding is not None and output.layout is not None
    assert not output.differentiable, "an output that takes a gradient is returned whole"
    return Assembly(output.layout, program.sharding, program.mesh, program.rank)


class StepSeed:
    """The seed of a step's random draws: rank 0 takes it from torch's generator, so it follows torch.manual_seed.

    The other ranks take one too, so that generators which were equal stay equal, but use rank 0's.
    """

    def __init__(self, communicators: Communicators, device: torch.device, world: int) -> None:
        name = group_name("seed", tuple(range(world)))
        communicators.create([name])
        self._group, self._device = communicators.group(name), device

    def __call__(self) -> Tensor:
        seed = torch.randint(2**62, ()).to(self._device)
        dist.broadcast(seed, 0, group=self._group)
        return seed.cpu()


# --- autograd --------------------------------------------------------------------------------------------------------


@dataclass
class _ForwardCall:
    """One run of a variant's forward. `outputs`: all user outputs, set by `run`."""

    variant: Variant
    flat: Sequence[Tensor]
    outputs: list[Any] = field(default_factory=list)

    def run(self) -> list[Tensor]:
        self.outputs, saved = self.variant.run_forward(self.flat)
        return saved


class _Step(torch.autograd.Function):
    """A variant as a function from its trained parameters to its differentiable outputs."""

    @staticmethod
    def forward(ctx: Any, call: _ForwardCall, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.variant = call.variant
        ctx.parameters = parameters
        ctx.save_for_backward(*call.run())
        return tuple(
            value for output, value in zip(call.variant.users, call.outputs, strict=True) if output.differentiable
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        gradients = ctx.variant.run_backward(take_saved_tensors(ctx), tangents, ctx.parameters)
        ctx.variant.watch.backward_ran()
        return (None, *gradients)


# --- progress --------------------------------------------------------------------------------------------------------


class Progress:
    """Tells on stderr what is being done, when that takes long: `progress("capturing")` begins a stage."""

    PATIENCE = 3.0  # seconds

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._timer: threading.Timer | None = None

    def __call__(self, stage: str) -> None:
        self._stop()
        if self._shown:
            self._timer = threading.Timer(self.PATIENCE, lambda: print(f"evocompile: {stage} …", file=sys.stderr))
            self._timer.daemon = True
            self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stop()
