"""One compiled program, and how a call of the model runs it.

A variant runs as one node of the autograd graph: its inputs are the parameters, its outputs the differentiable outputs
of the model, and its backward runs the compiled backward. So `loss.backward()`, hooks on parameters, gradient
accumulation and `retain_graph` are autograd's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .capture import Captured
from .collectives import Communicators, pending_works
from .compile import CompiledGraph
from .kernels import dispatch
from .lazy import Assembly, LazyOutput, without_gradient
from .local_inputs import Parts, Signature
from .mesh import group_name
from .program import InputKind, Output, OutputKind, Program, output_values, placeholders
from .state import OptimizerWatch, as_gradient, local_shard
from .torch_private import take_saved_tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]
_LARGE = 2**30  # bytes of outputs that are worth a warning


class Variant:
    """A compiled program, and how a call of the module runs it.

    number: counts the model's programs; equal on all ranks.
    signature, parts: what all ranks passed, and how it makes a batch, where the batch arrives in parts.
    """

    def __init__(
        self,
        number: int,
        captured: Captured,
        program: Program,
        graphs: Sequence[CompiledGraph],
        assemblies: dict[int, Assembly],
        communicators: Communicators,
        watch: OptimizerWatch,
        device: torch.device,
        signature: Signature,
        parts: Parts | None,
        attention_backend: str | None,
    ) -> None:
        self.number = number
        self.captured = captured
        self.program = program
        self.forward = graphs[0]
        self.backward = graphs[1] if len(graphs) > 1 else None
        self.watch = watch
        self.signature = signature
        self.parts = parts
        self.attention_backend = attention_backend
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

    def outputs_without_a_loss(self) -> str | None:
        """What to say of a differentiated call that returns no scalar: its outputs come back whole."""
        outputs = [output for output in self.users if output.differentiable]
        if not outputs or not all(output.shape for output in outputs):
            return None
        if self.parts is not None:
            return (
                "the call returns no scalar, so its outputs are those of the whole batch, "
                f"{sum(self.parts.rows)} rows of all replicas, while inputs='local' gives this rank {self.parts}: a "
                "loss that is computed from them with this rank's labels is not the loss of the batch. Compute it "
                "inside of the model's forward, or in the loss_fn of parallelize(loss_fn, model=model)"
            )
        size = sum(math.prod(output.shape) * output.dtype.itemsize for output in outputs)
        if size > _LARGE:
            return (
                f"the call returns no scalar, so {size / 2**30:.1f} GiB of outputs are gathered whole on every rank. "
                "Compute the loss inside of the model's forward, or in the loss_fn of "
                "parallelize(loss_fn, model=model)"
            )
        return None

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Run the forward graph on this rank's shards: the user outputs and the values saved for backward."""
        inputs = [local_shard(each) if index in self._parameters else each for index, each in enumerate(flat)]
        if self._seed is not None:
            inputs.append(self._seed())
        results = self._execute(self.forward, inputs, flat[0].device.type)
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
        gradients = self._execute(self.backward, inputs, parameters[0].device.type)
        return [
            None if gradient is None else as_gradient(parameter, gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    def _execute(self, graph: CompiledGraph, inputs: list[Tensor], device_type: str) -> list[Any]:
        """Run a graph. Its casts were captured with it, so a surrounding autocast must not add more."""
        pending = pending_works()
        with torch.autocast(device_type, enabled=False), dispatch.use(self.attention_backend):
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


def assemblies_of(program: Program) -> dict[int, Assembly]:
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
