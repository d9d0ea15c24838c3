"""Capture: one call of a model becomes a `Program`, the joint forward and backward graph at global shapes.

The story, in order:
1. parameters, buffers and input tensors are replaced by fakes of the global shape (`fake_call`): no memory is needed;
2. Dynamo traces the call into one graph, and keeps the guards under which it holds;
3. attention is made canonical on Dynamo's graph, where it still looks as the model wrote it;
4. outputs that are not differentiated are detached, and AOTAutograd derives the joint graph of aten operators;
5. that graph becomes a `Program` with named inputs and outputs.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .capture_errors import find_write, refuse_data_dependence, underivable, untraceable, written_to
from .errors import CaptureError, InputError, VerificationError
from .fakes import FakeCall, fake_call
from .first_call import set_up_lazily
from .garbage import uncollected
from .guards import Guards, readable_source
from .local_inputs import Parts
from .mesh import Mesh
from .plan import Plan
from .precision import Precision
from .program import Input, InputKind, Output, OutputKind, Program, output_values, val
from .torch_private import (
    DynamoGraph,
    JointGraph,
    TraceError,
    export_joint,
    graph_inputs,
    graph_module,
    has_custom_backward,
    isolated,
    run_bytecode,
    trace,
    unenterable_context,
    unwritten_graph_modules,
    without_function_modes,
)


@dataclass(frozen=True)
class Captured:
    """A captured call.

    program:         the joint graph at global shapes, for the plan of one rank (`Program.bind` gives others).
    parameter_names: the parameters among the program's inputs, in their order; tied ones once, by their first name.
    """

    program: Program
    parameter_names: tuple[str, ...]
    forward: Callable[..., Any]
    guards: Guards
    dynamo: DynamoGraph

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this capture holds for a call: inputs, attributes, flags and global state are as they were."""
        return self.guards.hold(self.forward, args, kwargs)

    def mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """A sentence that says what changed since the capture; empty if it still holds."""
        return self.guards.mismatch(self.forward, args, kwargs)

    def callable(self, compiled: Callable[..., Sequence[Any]]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The model's call, with its tensor operations done by `compiled`.

        compiled: takes the parameters and buffers that the module holds now and the call's tensors, in the order of
                  `program.inputs` without tangents; returns the flat USER outputs. What it only reads is contiguous.
        Returns a function of (args, kwargs) that gives what the model gives: the same containers and side effects.
        """
        written = {output.name for output in self.program.outputs_of(OutputKind.BUFFER)}
        inputs = self.program.inputs_of(InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER)
        as_is = [
            each.kind is InputKind.PARAMETER or (each.kind is InputKind.BUFFER and each.name in written)
            for each in inputs
        ]

        casts = [each.dtype if each.kind is InputKind.USER else None for each in inputs]

        def run_graph(*flat: Any) -> Sequence[Any]:
            given = (t if same else t.contiguous() for same, t in zip(as_is, flat, strict=True))
            return compiled(*(t if d is None else t.to(d) for d, t in zip(casts, given, strict=True)))

        bytecode = run_bytecode(self.dynamo, run_graph)
        return lambda args, kwargs: bytecode(self.forward, args, kwargs)


@uncollected()
@unwritten_graph_modules()
def capture(
    forward: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device | None = None,
    parts: Parts | None = None,
    precision: Precision | None = None,
) -> Captured:
    """Captures `forward(*args, **kwargs)`, under the present grad mode and autocast, as one joint graph.

    forward: the module's bound forward, or any callable that reads `module`.
    device:  where the program will run; default: where the tensors are (those on `meta` join the others).
    parts:   how the batch arrives, where args and kwargs hold only one replica's part of it.
    precision: the types of computation, reductions and accumulation; default: as the model is.

    Raises CaptureError (with the model's source line) for what is not one graph, and for parameters that are written
    to; InputError for inputs that require grad or are written to, and for a device that torch cannot use here.
    """
    _check_device(device)
    guards = Guards.of_call(module, args, kwargs)
    if torch.is_grad_enabled():
        for name, spec in guards.inputs.items():
            if spec.requires_grad:
                raise InputError(f"input {name!r} requires grad; gradients of inputs are not built yet: detach it")
    shapes = parts.whole_shapes(args, kwargs) if parts else {}
    precision = precision or Precision()
    with fake_call(module, args, kwargs, device, shapes, precision) as fakes:
        dynamo = _trace(forward, fakes)
        inputs = _name_inputs(dynamo, forward, fakes)
        guards.add_dynamo(dynamo, list(fakes.replaced))
    if parts:
        inputs = [_in_parts(each, parts, shapes) for each in inputs]

    from .passes.masks.constants import mask_buffers

    with without_function_modes():  # what the caller's do to the model is in Dynamo's graph
        program = _joint_program(dynamo, inputs)
        program.constants = guards.add_constants(module, mask_buffers(program))
    program.batch_parts = parts.rows if parts else ()
    program.precision = precision
    names = tuple(each.name for each in inputs if each.kind is InputKind.PARAMETER)
    return Captured(program, names, forward, guards, dynamo)


def _joint_program(dynamo: DynamoGraph, inputs: list[Input]) -> Program:
    """Forward and backward as one graph of ATen operators, from Dynamo's."""
    from .passes.attention_forms import make_attention_canonical

    refuse_data_dependence(dynamo.graph_module.graph)
    make_attention_canonical(dynamo.graph_module)
    differentiable = _differentiable_outputs(dynamo.graph_module.graph)
    expected = _parameters_to_differentiate(dynamo.graph_module.graph, inputs, differentiable)
    _separate_outputs(dynamo.graph_module, differentiable)
    joint = _export(dynamo, any(differentiable))
    _refuse_writes(dynamo, joint, inputs)
    program = _program(joint, inputs, differentiable)
    _check_gradients(program, expected)
    return program


def _check_device(device: torch.device | None) -> None:
    """Fakes on a device that this torch does not know would end the process in autograd, without an error."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"cannot capture for device {device}: {error}. Use a device of this machine") from error


# --- Dynamo ----------------------------------------------------------------------------------------------------


def _call(forward, args, kwargs):  # type: ignore[no-untyped-def]
    return forward(*args, **kwargs)


def _trace(forward: Callable[..., Any], fakes: FakeCall) -> DynamoGraph:
    """Dynamo's graph of the call. Where it stops at what only a first call does, that is done, and it starts again."""
    done: list[traceback.FrameSummary] = []
    while True:
        try:
            dynamo = trace(isolated(_call), (forward, fakes.args, fakes.kwargs))
            break
        except TraceError as error:
            place = unenterable_context(error)
            if place is None or place in done:
                raise untraceable(error) from error
            done.append(place)
            set_up_lazily(lambda: forward(*fakes.args, **fakes.kwargs), place)
    if dynamo is None:
        raise CaptureError("the call does no tensor operation, so there is nothing to compile")
    return dynamo


def _name_inputs(dynamo: DynamoGraph, forward: Callable[..., Any], fakes: FakeCall) -> list[Input]:
    """What each placeholder of Dynamo's graph is, in order."""
    objects = graph_inputs(dynamo, (forward, fakes.args, fakes.kwargs))
    inputs = []
    for tensor, source in zip(objects, dynamo.sources, strict=True):
        kind, name = fakes.replaced.get(tensor) or _name_foreign(source, fakes)
        if kind is not InputKind.PARAMETER and tensor.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"{name} requires grad and is read by the call, but is no parameter of the module, so it would get no "
                "gradient: register it as a parameter, or detach it"
            )
        held = fakes.held.get(tensor)
        inputs.append(Input(kind, name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, held=held))
    return inputs


def _in_parts(each: Input, parts: Parts, known: Mapping[str, tuple[int, ...]]) -> Input:
    """The input, marked if each replica passes its own rows of it. known: the inputs that the ranks agreed about."""
    if each.kind is not InputKind.USER:
        return each
    if each.name not in known:
        raise InputError(
            f"input {each.name!r} is in a container that torch.utils._pytree does not know, so its part of the batch "
            "cannot be found: pass tensors, or lists and dicts of them (**batch)"
        )
    return replace(each, is_part=each.name in parts.names)


def _name_foreign(source: str, fakes: FakeCall) -> tuple[InputKind, str]:
    """A tensor in a container that pytree does not know: of the call, or else of the module, as good as a buffer."""
    name = readable_source(source)
    root = re.match(r"L\['(args|kwargs)'\]\[(?:(\d+)|'(\w+)')\]", source)
    if root is None:
        return InputKind.BUFFER, name
    holder = fakes.args[int(root[2])] if root[1] == "args" else fakes.kwargs[root[3]]
    return (InputKind.BUFFER if isinstance(holder, nn.Module) else InputKind.USER), name


# --- Outputs -----------------------------------------------------------------------------------------------------


def _differentiable_outputs(graph: fx.Graph) -> list[bool]:
    """Which outputs get a gradient: the scalars that require grad, or all that require grad where no scalar does."""
    values = [node.meta["example_value"] for node in output_values(graph)]
    wants = [torch.is_grad_enabled() and value.requires_grad for value in values]
    scalar = [want and value.dim() == 0 for want, value in zip(wants, values, strict=True)]
    return scalar if any(scalar) else wants


def _separate_outputs(captured: fx.GraphModule, differentiable: list[bool]) -> None:
    """Detaches the outputs that get no gradient, and makes none a view of another or of an input.

    Without the first, logits would bring a (B, S, V) tangent of zeros; without the second, AOTAutograd would add
    outputs of its own. The copies are taken out of the joint graph again.
    """
    graph = captured.graph
    output = graph.output_node()
    separate = []
    with graph.inserting_before(output):
        for node, keeps_gradient in zip(output_values(graph), differentiable, strict=True):
            value = node if keeps_gradient else _like(graph.call_method("detach", (node,)), node)
            separate.append(_like(graph.call_function(torch.clone, (value,)), node))
    output.args = (tuple(separate),)
    captured.recompile()


def _like(node: fx.Node, original: fx.Node) -> fx.Node:
    node.meta = dict(original.meta)
    return node


# --- The joint graph ------------------------------------------------------------------------------------------------


def _export(dynamo: DynamoGraph, with_backward: bool) -> JointGraph:
    try:
        with torch.set_grad_enabled(with_backward):
            return export_joint(dynamo)
    except RuntimeError as error:
        raise underivable(error) from error


def _refuse_writes(dynamo: DynamoGraph, joint: JointGraph, inputs: list[Input]) -> None:
    """Writing to a buffer is the model's own business; writing to what the caller or the optimizer owns is not."""
    for index in joint.mutations:
        kind, name = inputs[index].kind, inputs[index].name
        if kind is InputKind.BUFFER and None not in joint.tangents:
            continue
        node = find_write(dynamo.graph_module, index)
        if kind is InputKind.USER:
            raise InputError(written_to(f"input {name!r}", node, "Write to a clone of it."))
        if kind is InputKind.PARAMETER:
            raise CaptureError(written_to(f"parameter {name!r}", node, "Do it outside of the call, under no_grad."))
        raise CaptureError(written_to(f"buffer {name!r}, with a value that requires grad,", node, "Detach the value."))


_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _program(joint: JointGraph, inputs: list[Input], differentiable: list[bool]) -> Program:
    """The joint graph with flat, named placeholders and the contract's order of outputs."""
    old = joint.graph_module.graph
    tangents = [index for index in joint.tangents if index is not None]
    assert tangents == [index for index, wanted in enumerate(differentiable) if wanted]
    returned = output_values(old)
    user = [_without_copy(returned[position]) for position in joint.outputs]
    for index in tangents:
        value = val(user[index])
        inputs = [*inputs, Input(InputKind.TANGENT, str(index), tuple(value.shape), value.dtype)]

    graph, new = _copy_named(old, inputs)
    outputs = [
        _output(OutputKind.USER, str(index), val(node), wanted)
        for index, (node, wanted) in enumerate(zip(user, differentiable, strict=True))
    ]
    results: list[fx.Node | None] = [new[node] for node in user]
    for index, position in joint.mutations.items():
        outputs.append(_output(OutputKind.BUFFER, inputs[index].name, val(returned[position])))
        results.append(new[returned[position]])
    for index, each in enumerate(inputs):
        if tangents and each.kind is InputKind.PARAMETER and each.requires_grad:
            gradient = returned[joint.gradients[index]] if index in joint.gradients else None
            outputs.append(Output(OutputKind.GRADIENT, each.name, each.shape, each.dtype))
            results.append(None if gradient is None else new[gradient])
    graph.output(results)
    graph.eliminate_dead_code()
    graph.lint()
    plan = Plan()
    return Program(graph_module(joint.graph_module, graph), inputs, outputs, plan, Mesh.of(plan), 0, facts={"captured"})


def _output(kind: OutputKind, name: str, value: Tensor, differentiable: bool = False) -> Output:
    return Output(kind, name, tuple(value.shape), value.dtype, differentiable)


def _without_copy(node: fx.Node) -> fx.Node:
    """The value itself behind the copy that `_separate_outputs` made."""
    return node.args[0] if node.target is torch.ops.aten.clone.default else node  # type: ignore[return-value]


def _copy_named(old: fx.Graph, inputs: list[Input]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy without its output: placeholders named by `inputs`, operators that only pass a tensor on left out."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node, each in zip(old.find_nodes(op="placeholder"), inputs, strict=True):
        prefix = "tangent_" if each.kind is InputKind.TANGENT else ""
        new[node] = graph.placeholder(re.sub(r"\W+", "_", prefix + each.name).strip("_"))
        new[node].target = new[node].name  # fx makes names unique and valid, but not the targets
        new[node].meta = dict(node.meta)
    for node in old.nodes:
        if node.op in ("placeholder", "output"):
            continue
        new[node] = new[node.args[0]] if node.target in _IDENTITIES else graph.node_copy(node, new.__getitem__)
        new[node].meta.setdefault("val", None)  # an assertion has no result
    return graph, new


# --- Gradients ---------------------------------------------------------------------------------------------------


def _parameters_to_differentiate(graph: fx.Graph, inputs: list[Input], differentiable: list[bool]) -> set[str]:
    """The parameters from which a path of values that require grad leads to a differentiable output."""
    reached = {node for node, wanted in zip(output_values(graph), differentiable, strict=True) if wanted}
    for node in reversed(graph.nodes):
        if node in reached and not has_custom_backward(node):
            reached.update(each for each in node.all_input_nodes if _requires_grad(each))
    nodes = zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    return {each.name for node, each in nodes if node in reached and each.kind is InputKind.PARAMETER}


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) and each.requires_grad for each in values)


def _check_gradients(program: Program, expected: set[str]) -> None:
    """A gradient that is silently missing would leave a parameter untrained."""
    assert program.joint is not None
    results = zip(program.outputs, output_values(program.joint.graph), strict=True)
    found = {output.name for output, node in results if output.kind is OutputKind.GRADIENT and node is not None}
    missing = sorted(expected - found)
    if missing:
        raise VerificationError(f"no gradient was derived for {', '.join(missing)}, which a differentiable output uses")
