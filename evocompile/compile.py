"""From a scheduled graph to a function: compiled segments, called by a generated driver in the graph's order.

The driver is plain Python with one line for each boundary and each segment (read it: `compiled.source`). So the
schedule is exact by construction, Inductor never sees a collective, and its time does not grow with the depth of the
model: segments that are equal are compiled once. Every value is deleted after its last use.

Strides: segments are compiled for the strides of the graph's fake tensors. Where a value that did not come out of a
segment (an input, a collective, an attention step) turns out to have others, the driver copies it into the right ones.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, fx

from . import collectives
from .chunks import RowLoop
from .errors import InputError
from .failures import PLACES, Place
from .program import output_values, placeholders
from .segments import Segment, Step, as_graph, cut, structure
from .shared_compile import compile_segments

Resolve = Callable[[fx.Node], Callable[..., Any]]


class CompiledGraph(Protocol):
    """Takes the graph's inputs in a list, which it empties, and returns the graph's outputs in a list.

    Call it with gradients and autocast off: every cast and every gradient is already in the graph.
    source: the generated Python, for people: the driver and, with the eager backend, the segments.
    """

    source: str

    def __call__(self, inputs: list[Tensor]) -> list[Any]: ...


def compile_graph(
    graph_module: fx.GraphModule,
    *,
    backend: Literal["inductor", "eager"] = "inductor",
    resolve: Resolve | None = None,
    progress: Callable[[str], None] | None = None,
) -> CompiledGraph:
    """Compile one rank's scheduled graph of aten and prims operators and boundaries.

    backend:  what runs the segments; the driver is the same.
    resolve:  gives the callable that executes a boundary node; the node's own target when left out.
    progress: is told one sentence before each segment that Inductor compiles.
    """
    steps = cut(graph_module.graph)
    kinds: dict[Hashable, list[Segment]] = {}
    for step in steps:
        if isinstance(step, Segment):
            kinds.setdefault(structure(step), []).append(step)
    graphs = [as_graph(equal[0]) for equal in kinds.values()]
    by_inductor = compile_segments(list(zip(kinds, graphs, strict=True)), progress) if backend == "inductor" else []

    locals_ = (node.name for graph in (graph_module.graph, *graphs) for node in graph.nodes)
    scope = _Scope(locals_)
    texts: list[str] = []
    calls: dict[Segment, _Call] = {}
    for number, (graph, equal) in enumerate(zip(graphs, kinds.values(), strict=True), 1):
        name = scope.new_name(f"segment_{number}")
        size = f"{len(equal[0].nodes)} operators"
        if backend == "inductor":
            scope.values[name], strides = by_inductor[number - 1]
            texts.append(f"# {name}: {size}, compiled by Inductor, called {len(equal)} times")
        else:
            strides = [node.meta["val"].stride() for node in equal[0].outputs]
            body = [node for node in graph.nodes if node.op == "call_function"]
            texts.append(_function_text(name, placeholders(graph), body, output_values(graph), scope, {}, None))
        calls |= dict.fromkeys(equal, _Call(name, strides))

    for node in graph_module.graph.find_nodes(op="get_attr"):
        scope.values[node.name] = operator.attrgetter(node.target)(graph_module)
    inputs, outputs = placeholders(graph_module.graph), output_values(graph_module.graph)
    run = scope.new_name("run")
    known: dict[Hashable, CompiledGraph] = {}

    def compile_body(body: fx.GraphModule) -> CompiledGraph:
        key = _body_structure(body.graph)
        if key not in known:
            known[key] = compile_graph(body, backend=backend, progress=progress)
        return known[key]

    def called(node: fx.Node) -> Callable[..., Any]:
        if isinstance(node.target, RowLoop):
            return node.target.compiled(compile_body)
        return (resolve or _own_target)(node)

    texts.append(_function_text(run, inputs, steps, outputs, scope, calls, called))
    return scope.build("\n\n".join(texts) + "\n", run)


def _body_structure(graph: fx.Graph) -> Hashable:
    """Equal for the bodies of loops that one compiled function can serve, such as those of a model's layers."""
    nodes = tuple(node for node in graph.nodes if node.op == "call_function")
    returned = tuple(node for node in output_values(graph) if isinstance(node, fx.Node))
    return structure(Segment(nodes, tuple(placeholders(graph)), returned))


# --- generated code --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A compiled segment as the driver sees it. strides: those that its outputs really have."""

    name: str
    strides: Sequence[tuple[int, ...]]


class _Scope:
    """The global names of generated code: operators, constants, segments. None equals the name of a local value."""

    def __init__(self, local_names: Iterable[str]) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[tuple[str, int], Place] = {}  # what each line of each function runs, for its errors
        self.values[PLACES] = self.places
        self._taken = set(local_names)
        self._bound: dict[Hashable, str] = {}
        self.packed = self.new_name("inputs")  # the list argument of every function

    def new_name(self, hint: str) -> str:
        stem = re.sub(r"\W+", "_", hint).strip("_")
        names = itertools.chain([stem], (f"{stem}__{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in self._taken)
        self._taken.add(name)
        return name

    def bind(self, value: Any, hint: str) -> str:
        """The name under which generated code finds an object."""
        key = (type(value), value)
        if key not in self._bound:
            self._bound[key] = self.new_name(hint)
            self.values[self._bound[key]] = value
        return self._bound[key]

    def build(self, text: str, name: str) -> CompiledGraph:
        """Execute the text; its function `name`."""
        filename = f"<evocompile {next(_builds)}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)  # for tracebacks
        exec(compile(text, filename, "exec"), self.values)
        compiled = cast(CompiledGraph, self.values[name])
        compiled.source = text
        return compiled


_builds = itertools.count()


def _function_text(
    name: str,
    inputs: Sequence[fx.Node],
    steps: Sequence[Step],
    outputs: Sequence[Any],
    scope: _Scope,
    calls: Mapping[Segment, _Call],
    resolve: Resolve | None,
) -> str:
    """A function from a list of `inputs`, which it empties, to a list of `outputs`.

    calls:   for the segments among `steps`.
    resolve: see `compile_graph`. `None` inside a segment: then there are no boundaries, and the strides are right.
    """
    last_use = {node: index for index, step in enumerate(steps) for node in _reads(step)}
    kept = {value for value in outputs if isinstance(value, fx.Node)}

    def over(index: int, nodes: Iterable[fx.Node]) -> list[str]:
        """The names among these nodes that nothing needs after step `index`."""
        return [
            node.name
            for node in dict.fromkeys(nodes)
            if last_use.get(node, index) == index and node not in kept and node.op != "get_attr"
        ]

    packed = scope.packed
    lines = [f"def {name}({packed}):"]
    if inputs:
        lines.append(f"{_names(inputs)}, = {packed}")
        lines.append(f"{packed}.clear()")
        if resolve:
            lines += [_restride_text(node, scope) for node in inputs if _is_computed_with(node)]
    lines += _deletion(over(-1, inputs))
    for index, step in enumerate(steps):
        if isinstance(step, Segment):
            dying = over(index, step.inputs)
            lines.append("; ".join([f"{packed} = [{_names(step.inputs)}]", *_deletion(dying)]))
            scope.places[name, len(lines)] = step
            lines.append(f"{_names(step.outputs)}, = {calls[step].name}({packed})")
            for node, strides in zip(step.outputs, calls[step].strides, strict=True):
                if not same_strides(node.meta["val"], strides):
                    lines.append(_restride_text(node, scope))
        else:
            dying = over(index, [*step.all_input_nodes, step])
            scope.places[name, len(lines)] = step if resolve else index  # a segment's function serves many layers
            lines.append("; ".join([_call_text(step, scope, resolve), *_deletion(dying)]) + _comment(step))
            if resolve and step.name not in dying and _is_computed_with(step):
                lines.append(_restride_text(step, scope))
    lines.append(f"return {_text(list(outputs), scope)}")
    return "\n    ".join(lines)


def _reads(step: Step) -> Sequence[fx.Node]:
    return step.inputs if isinstance(step, Segment) else step.all_input_nodes


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(node.name for node in nodes)


def _deletion(names: list[str]) -> list[str]:
    return [f"del {', '.join(names)}"] if names else []


def _comment(node: fx.Node) -> str:
    """The dtype and shape of what a line computes."""
    value = node.meta.get("val")
    return f"  # {str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, Tensor) else ""


def _call_text(node: fx.Node, scope: _Scope, resolve: Resolve | None) -> str:
    args = [_text(arg, scope) for arg in node.args]
    if node.target is operator.getitem:
        return f"{node.name} = {args[0]}[{args[1]}]"
    function = resolve(node) if resolve and collectives.is_boundary(node) else _own_target(node)
    args += [f"{key}={_text(arg, scope)}" for key, arg in node.kwargs.items()]
    target: Any = node.target
    hint = f"{target.__module__.rpartition('.')[2]}_{target.__name__}"  # "aten_mm.default"
    return f"{node.name} = {scope.bind(function, hint)}({', '.join(args)})"


def _own_target(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return _EAGER_EQUIVALENTS.get(node.target, node.target)


def _text(value: Any, scope: _Scope) -> str:
    """An argument as Python writes it; a global name for what has no literal."""
    match value:
        case fx.Node():
            return value.name
        case None | bool() | int() | str():
            return repr(value)
        case float() if math.isfinite(value):
            return repr(value)
        case tuple():
            return f"({''.join(_text(each, scope) + ', ' for each in value)})"
        case list():
            return f"[{', '.join(_text(each, scope) for each in value)}]"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_text(each, scope)}' for key, each in value.items())}}}"
        case slice():
            return f"slice({_text(value.start, scope)}, {_text(value.stop, scope)}, {_text(value.step, scope)})"
    return scope.bind(value, repr(value))


# --- strides ---------------------------------------------------------------------------------------------------------


def _is_computed_with(node: fx.Node) -> bool:
    """A tensor that compute reads, so that its strides matter; communication takes any."""
    readers = (user for user in node.users if user.op == "call_function")
    return isinstance(node.meta.get("val"), Tensor) and not all(map(collectives.is_boundary, readers))


def _restride_text(node: fx.Node, scope: _Scope) -> str:
    return f"{node.name} = {scope.bind(restride, 'restride')}({node.name}, {node.meta['val'].stride()}, {node.name!r})"


def restride(value: Tensor, strides: tuple[int, ...], name: str) -> Tensor:
    """The value with the strides for which its readers were compiled: a copy, where the difference matters.

    Raises InputError when only an expanded value could have them, which only an input of the graph can cause.
    """
    if value.stride() == strides or same_strides(value, strides):
        return value
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, strides, strict=True)):
        raise InputError(
            f"{name} arrived with strides {value.stride()}, but the model was compiled for an expanded tensor with "
            f"strides {strides}: pass it in the layout that it had at the first call, or always pass it `.contiguous()`"
        )
    copy = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def same_strides(value: Tensor, strides: Sequence[int]) -> bool:
    """Do these strides address the value's elements as its own do? The stride of a dim of size 1 says nothing."""
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return value.numel() == 0 or all(size == 1 or own == other for size, own, other in pairs)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype)


# In eager mode prims go through several Python layers: a cast takes 60 µs instead of 9.
_EAGER_EQUIVALENTS: dict[Any, Callable[..., Any]] = {torch.ops.prims.convert_element_type.default: _cast}
