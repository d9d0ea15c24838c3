"""One compiled program, and how a call of the model runs it.

A variant runs as one node of the autograd graph: its inputs are the parameters, its outputs the differentiable outputs
of the model, and its backward runs the compiled backward. So `loss.backward()`, hooks on parameters, gradient
accumulation and `retain_graph` are autograd's own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .capture import Captured
from .collectives import Communicators, pending_works
from .compile import CompiledGraph
from .failures import heard_by_all
from .kernels import dispatch
from .lazy import Assembly, LazyOutput, computed, without_gradient
from .local_inputs import Parts, Signature
from .memory import Memory
from .micro_step import run_micro_batches
from .passes.micro_batches import is_copied
from .positions import saved_parameters, updated_buffers
from .program import InputKind, OutputKind, Program, output_values
from .state import OptimizerWatch, as_gradient, local_shard
from .states import States
from .step_seed import StepSeed
from .torch_private import take_saved_tensors

Call = tuple[tuple[Any, ...], dict[str, Any]]
_LARGE = 2**30  # bytes of outputs that are worth a warning


class Variant:
    """A compiled program, and how a call of the module runs it.

    compiled: gives a graph of the program compiled, by its name; each is asked for once.
    others: the same for the step's further micro-batches, where the plan has several.
    states: what the model's programs share: copies of parameters, accumulated gradients.
    number: counts the model's programs; equal on all ranks.
    memory: tells that of a step on this rank.
    signature, parts: what all ranks passed, and how it makes a batch, where the batch arrives in parts.
    """

    def __init__(
        self,
        number: int,
        captured: Captured,
        program: Program,
        compiled: Callable[[str], CompiledGraph],
        assemblies: dict[int, Assembly],
        communicators: Communicators,
        watch: OptimizerWatch,
        states: States,
        device: torch.device,
        signature: Signature,
        parts: Parts | None,
        attention_backend: str | None,
        memory: Callable[[], Memory],
        others: Sequence[Variant] = (),
    ) -> None:
        self.number = number
        self.captured = captured
        self.program = program
        self._compiled = functools.cache(compiled)
        self.watch = watch
        self.states = states
        self.signature = signature
        self.parts = parts
        self.attention_backend = attention_backend
        self._memory = memory
        self.users = program.outputs_of(OutputKind.USER)
        self._assemblies = assemblies
        self._communicators = communicators
        self._updates = updated_buffers(program)
        self._requires_grad = [
            node.meta["example_value"].requires_grad for node in output_values(captured.dynamo.graph_module.graph)
        ]
        inputs = captured.program.inputs_of(InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER)
        self._parameters = {index for index, each in enumerate(inputs) if each.kind is InputKind.PARAMETER}
        self._places = {each.name: index for index, each in enumerate(inputs)}
        self.trained = [index for index in sorted(self._parameters) if inputs[index].requires_grad]
        self._copied = [index for index, each in enumerate(inputs) if is_copied(program, each)]
        self._saved_parameters = saved_parameters(program)
        self._others = others
        backward = "inner" if program.micro is not None and program.inner is not None else "backward"
        for name in ("first" if self._copied else "forward", backward):
            if name in program.graphs:
                self._compiled(name)
        draws = bool(program.inputs_of(InputKind.SEED))
        self._seed = StepSeed(communicators, device, program.mesh.world) if draws else None
        self._call = captured.callable(self._run)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(args, kwargs)

    @property
    def has_failed(self) -> bool:
        """Its ranks have lost one another."""
        return self._communicators.are_left

    @property
    def memory(self) -> Memory:
        """Of a step on this rank."""
        return self._memory()

    def _run(self, *flat: Tensor) -> list[Any]:
        """The tensor operations of the forward: flat inputs of the program to flat user outputs."""
        if self.program.micro is not None:
            return run_micro_batches([self, *self._others], flat, self._communicators)
        call = _ForwardCall(self, flat, self.states.synchronise)
        if self.program.backward is None:
            with torch.no_grad():
                call.run()
            return [self._returned(index, value, flat) for index, value in enumerate(call.outputs)]
        differentiable = iter(_Step.apply(call, *(flat[index] for index in self.trained)))  # type: ignore[no-untyped-call]
        return [
            next(differentiable) if output.differentiable else self._returned(index, value, flat)
            for index, (output, value) in enumerate(zip(self.users, call.outputs, strict=True))
        ]

    def _returned(self, index: int, value: Any, flat: Sequence[Tensor]) -> Any:
        """An output that takes no gradient, as the caller gets it."""
        refuses = self.program.backward is not None and self._requires_grad[index]
        assembly, output = self._assemblies.get(index), self.users[index]
        name = f"output {index}"
        gather = None
        if assembly is not None:
            gather = functools.partial(assembly.gather, group=self._communicators.group(assembly.group))
        if output.recipe is not None:
            recipe = output.recipe
            parameters = [flat[self._places[each]] for each in recipe.parameters]
            versions = [each._version for each in parameters]

            def compute(part: Tensor) -> Tensor:
                return computed(recipe, part if gather is None else gather(part), parameters, versions, name)

            return LazyOutput.of(value, compute, name, recipe.shape, recipe.dtype, refuses)
        if gather is not None:
            return LazyOutput.of(value, gather, name, output.shape, output.dtype, refuses)
        return without_gradient(value, name) if refuses else value

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
        copied = [flat[index] for index in self._copied]
        copies = self.states.copies(copied)
        inputs = [local_shard(each) if index in self._parameters else each for index, each in enumerate(flat)]
        for index, value in zip(self._copied, copies or (), strict=False):
            inputs[index] = value
        if self._seed is not None:
            inputs.append(self._seed())
        results = self._execute("forward" if copies is not None else "first", inputs, flat[0].device.type)
        if copies is None:
            self.states.keep_copies(copied, results[len(results) - len(copied) :])
            del results[len(results) - len(copied) :]
        outputs, results = results[: len(self.users)], results[len(self.users) :]
        updates, saved = results[: len(self._updates)], results[len(self._updates) :]
        if updates:
            buffers = [flat[index] for index in self._updates]
            outputs, saved = _apart_from(buffers, outputs), _apart_from(buffers, saved)
            for buffer, update in zip(buffers, updates, strict=True):
                buffer.copy_(update)
        saved += [flat[index] for index in self._saved_parameters.values()]  # so that autograd notices a write to them
        for position, index in self._saved_parameters.items():
            if index not in self._copied:  # not the shard: what DTensor does in place is counted on the DTensor alone
                saved[position] = flat[index]
        # An output that is an input itself must be a tensor of its own, or autograd would take it for the input.
        given = set(map(id, flat))
        return [each.detach() if id(each) in given else each for each in outputs], saved

    def run_backward(
        self, saved: list[Tensor], tangents: Sequence[Tensor], parameters: Sequence[Tensor], synchronise: bool
    ) -> list[Any]:
        """The gradients of `parameters`, the trained ones in order; `saved` is emptied.

        synchronise: else they are accumulated, and None.
        """
        device = parameters[0].device.type
        if not synchronise:
            for parameter, gradient in zip(parameters, self.run_inner(saved, tangents, device), strict=True):
                if gradient is not None:
                    self.states.accumulate(parameter, gradient)
            return [None] * len(parameters)
        gradients = self._synchronised(self._backward_inputs(saved, tangents), parameters, device)
        self.states.deliver_the_rest(self._communicators)
        self.states.refresh()
        return [
            None if gradient is None else as_gradient(parameter, gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    def run_inner(self, saved: list[Tensor], tangents: Sequence[Tensor], device: str) -> list[Any]:
        """What this micro-batch leaves of the gradients, over G; `saved` is emptied."""
        graph = "backward" if self.program.inner is None else "inner"
        return self._execute(graph, self._backward_inputs(saved, tangents), device)

    def _backward_inputs(self, saved: list[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        del saved[len(saved) - len(self._saved_parameters) :]
        inputs = [*map(local_shard, saved), *(tangent.contiguous() for tangent in tangents)]
        saved.clear()
        return inputs

    def _synchronised(self, inputs: list[Tensor], parameters: Sequence[Tensor], device: str) -> list[Any]:
        """The gradients on the optimizer's shards, with what was accumulated of them."""
        inner = self.program.inner
        if inner is None:
            gradients = self._execute("backward", inputs, device)
            received = [gradient is not None for gradient in gradients]
            earlier = iter(self.states.take(p for p, got in zip(parameters, received, strict=True) if got))
            added = [next(earlier) if got else None for got in received]
            return [g if a is None else g + a for g, a in zip(gradients, added, strict=True)]
        left = [(p, node) for p, node in zip(parameters, output_values(inner.graph), strict=True) if node is not None]
        earlier_values = self.states.take(parameter for parameter, _ in left)
        if all(each is None for each in earlier_values):
            return self._execute("backward", inputs, device)
        for (parameter, node), value in zip(left, earlier_values, strict=True):
            if value is None:
                like = node.meta["val"]
                value = torch.zeros(like.shape, dtype=like.dtype, device=parameter.device)
            inputs.append(value)
        return self._execute("last", inputs, device)

    def _execute(self, name: str, inputs: list[Tensor], device_type: str) -> list[Any]:
        """Run a graph. Its casts were captured with it, so a surrounding autocast must not add more."""
        graph, pending = self._compiled(name), pending_works()
        with (
            torch.autocast(device_type, enabled=False),
            dispatch.use(self.attention_backend),
            heard_by_all(self._communicators),
        ):
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


# --- autograd --------------------------------------------------------------------------------------------------------


@dataclass
class _ForwardCall:
    """One run of a variant's forward. `outputs`: all user outputs, set by `run`."""

    variant: Variant
    flat: Sequence[Tensor]
    synchronise: bool
    outputs: list[Any] = field(default_factory=list)

    def run(self) -> list[Tensor]:
        self.outputs, saved = self.variant.run_forward(self.flat)
        return saved


class _Step(torch.autograd.Function):
    """A variant as a function from its trained parameters to its differentiable outputs."""

    @staticmethod
    def forward(ctx: Any, call: _ForwardCall, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.variant, ctx.synchronise = call.variant, call.synchronise
        ctx.parameters = parameters
        ctx.save_for_backward(*call.run())
        return tuple(
            value for output, value in zip(call.variant.users, call.outputs, strict=True) if output.differentiable
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        gradients = ctx.variant.run_backward(take_saved_tensors(ctx), tangents, ctx.parameters, ctx.synchronise)
        if ctx.synchronise:
            ctx.variant.watch.backward_ran()
        return (None, *gradients)
