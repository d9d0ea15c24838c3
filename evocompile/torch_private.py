"""Every use of a private torch API, as small functions. Checked on torch 2.13.0.

torch gives no promise for these: when a new torch version is admitted in pyproject.toml, this file is read first.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import logging
import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._dynamo.convert_frame import CaptureOutput, fullgraph_capture
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError, Unsupported, UserError, unimplemented
from torch._dynamo.hooks import Hooks
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.types import GuardFilterEntry
from torch._dynamo.utils import (
    clear_torch_function_mode_stack,
    dynamo_timed,
    get_metrics_context,
    get_torch_function_mode_stack,
    set_torch_function_mode_stack,
)
from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from . import strided
from .flash_calls import refuse, replacements

CHECKED_ON = ("2.13.0",)  # versions of torch

# --- Containers and modules ---------------------------------------------------------------------------------------


def leaves_with_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The leaves of a call in the order of `map_leaves`, by path: "args[0]", "input_ids", "batch['labels']"."""
    leaves, _ = pytree.tree_flatten_with_path((list(args), kwargs))
    return [(_path_name(path), leaf) for path, leaf in leaves]


def _path_name(path: tuple[Any, ...]) -> str:
    position, *rest = path
    if position.idx == 0:
        return "args" + pytree.keystr(tuple(rest))
    return str(rest[0].key) + pytree.keystr(tuple(rest[1:]))


def map_leaves(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with every leaf changed."""
    new_args, new_kwargs = pytree.tree_map(change, (list(args), kwargs))
    return tuple(new_args), new_kwargs


@dataclass(frozen=True)
class Slot:
    """The place in a module that holds a parameter, a buffer, or a tensor that is a plain attribute."""

    name: str
    holder: dict[str, Any]
    key: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor | None:
        return self.holder.get(self.key)


def tensor_slots(module: nn.Module) -> list[Slot]:
    """All places that hold a tensor, tied ones once per place: as `named_parameters`, then buffers, then attributes."""
    holders = [
        [(prefix, each._parameters, True) for prefix, each in module.named_modules()],
        [(prefix, each._buffers, False) for prefix, each in module.named_modules()],
        [(prefix, vars(each), False) for prefix, each in module.named_modules()],
    ]
    return [
        Slot(f"{prefix}.{key}" if prefix else key, holder, key, is_parameter)
        for prefix, holder, is_parameter in chain.from_iterable(holders)
        for key, tensor in holder.items()
        if isinstance(tensor, Tensor)
    ]


# --- Dynamo: one graph of a call -------------------------------------------------------------------------------


def new_fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shape, dtype and device, but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True)
class DynamoGraph:
    """What Dynamo makes of one call of `function(*args)`.

    graph_module: flat tensors in, flat tuple of tensors out; `node.meta["example_value"]` is fake.
    sources:      for each placeholder, where Dynamo's bytecode finds it: "L['kwargs']['input_ids']".
    """

    function: types.FunctionType
    graph_module: fx.GraphModule
    sources: list[str]
    output: CaptureOutput

    @property
    def fake_mode(self) -> FakeTensorMode:
        assert self.output.backend_input is not None
        return self.output.backend_input.fake_mode

    @property
    def example_inputs(self) -> list[Tensor]:
        """What the traced call passed for each placeholder."""
        assert self.output.backend_input is not None
        return list(self.output.backend_input.example_inputs)


def isolated(function: Callable[..., Any]) -> types.FunctionType:
    """The same code with globals of its own: Dynamo writes into the globals of what it traces."""
    assert isinstance(function, types.FunctionType) and not function.__closure__
    return types.FunctionType(function.__code__, {"__builtins__": builtins.__dict__}, function.__name__)


def trace(function: types.FunctionType, args: tuple[Any, ...]) -> DynamoGraph | None:
    """Dynamo's graph of `function(*args)` with static shapes; `None` when the call has no tensor operation.

    Raises what Dynamo raises; `explain` reads it.
    """
    static: dict[str, Any] = {
        "install_free_tensors": False,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "specialize_int": True,
        "specialize_float": True,
        "ignore_logging_functions": torch._dynamo.config.ignore_logging_functions | _logging_functions(),
    }
    modes = torch_function_mode_stack_state_mgr  # a default device is one: Dynamo traces what it does
    with torch._dynamo.config.patch(static), _attention_inlined(), get_metrics_context(), modes:
        output = fullgraph_capture(function, args)
    if output.backend_input is None:
        return None
    graph_module = output.backend_input.graph_module
    sources = [str(node._dynamo_source.name) for node in graph_module.graph.find_nodes(op="placeholder")]
    return DynamoGraph(function, graph_module, sources, output)


class _Unchecked(UserFunctionVariable):
    """A check whose message Dynamo cannot trace. It returns nothing."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        return ConstantVariable.create(None)


_REFUSED = "Refused by evocompile"


class _Refused(UserFunctionVariable):
    """`flash_calls.refuse(reason, way_out)`: the capture ends."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        reason, way_out = (each.as_python_constant() for each in args)
        unimplemented(gb_type=_REFUSED, context="", explanation=reason, hints=[way_out])


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """While it lasts, tensors are made where the code says: a default device (`torch.set_default_device`, or a block
    `with torch.device(…)`) is a mode of the caller, as are other torch function modes. Also a decorator."""
    modes = get_torch_function_mode_stack()
    clear_torch_function_mode_stack()
    try:
        yield
    finally:
        set_torch_function_mode_stack(modes)


def _replaced_by(written: Callable[..., Any]) -> type[UserFunctionVariable]:
    """How Dynamo sees a function in whose place `written` is traced, with the same arguments by name."""
    assert isinstance(written, types.FunctionType)
    variable = UserFunctionVariable(written)

    class Replaced(UserFunctionVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            named = dict(zip(inspect.signature(self.fn).parameters, args, strict=False))
            return variable.call_function(tx, [], {**named, **kwargs})

    return Replaced


_FAST_PATH = "_is_fastpath_enabled"


@contextlib.contextmanager
def _attention_inlined() -> Iterator[None]:
    """While it lasts, Dynamo looks into `F.multi_head_attention_forward`, and torch's modules call it in eval() too.

    Dynamo would else leave it in the graph as one call, and AOTAutograd would choose a kernel in it. Calls of the
    flash-attn package, which Dynamo cannot look into, are traced as `flash_calls` writes them out.
    """
    rules = get_torch_obj_rule_map()
    check = F._check_key_padding_mask  # type: ignore[attr-defined]
    changed: dict[Any, Any] = {F.multi_head_attention_forward: UserFunctionVariable, check: _Unchecked}
    changed |= {refuse: _Refused, **{each: _replaced_by(written) for each, written in replacements().items()}}
    before = {function: rules.get(function) for function in changed}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    rules.update(changed)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        rules.update({function: rule for function, rule in before.items() if rule is not None})
        for function in [function for function, rule in before.items() if rule is None]:
            del rules[function]


def _logging_functions() -> set[Callable[..., Any]]:
    """The methods of loggers that only write (transformers adds `warning_once` and others to the class)."""
    writes = re.compile(r"(debug|info|warn|error|critical|exception|log)(_|ing|$)")
    return {method for name, method in vars(logging.Logger).items() if callable(method) and writes.match(name)}


def run_bytecode(dynamo: DynamoGraph, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`dynamo.function` with its tensor operations replaced by `compiled(*flat_inputs) -> flat outputs`."""
    # torch 2.11 looks for every global name of the bytecode, `type` too, and does not count the builtins
    extra = {**builtins.__dict__, **dynamo.output.graph_capture_output.f_globals}
    return dynamo.output.forward_callable(compiled_fn=compiled, extra_globals=extra)


def graph_inputs(dynamo: DynamoGraph, args: tuple[Any, ...]) -> list[Any]:
    """The objects that `dynamo.function(*args)` hands to its graph, one for each placeholder."""

    class Reached(Exception):
        pass

    flat: list[Any] = []

    def stop(*inputs: Any) -> None:
        flat.extend(inputs)
        raise Reached

    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # the bytecode may leave it changed when it is stopped
            run_bytecode(dynamo, stop)(*args)
    except Reached:
        return flat
    raise AssertionError("the bytecode never calls its graph")


# --- Dynamo: guards ----------------------------------------------------------------------------------------------


def build_guards(dynamo: DynamoGraph, replaced: Sequence[Tensor]) -> Any:
    """Dynamo's guards of the traced call, without those on `replaced` tensors and on what is read from them.

    The switch that `trace` turns off is not guarded either: the graph is right whatever it says.
    """
    ids = {id(tensor) for tensor in replaced}

    def keep(entries: Sequence[GuardFilterEntry]) -> list[bool]:
        # Dynamo builds the guards once more for those that are kept. What it noted of an object the first time does not
        # hold of one that a property makes anew at each reading (2.11 and 2.12 guard those), and would be an error.
        for entry in entries:
            entry.orig_guard.obj_weakref = None
        tensors = {_source(entry).name for entry in entries if entry.has_value and id(entry.value) in ids}
        return [
            not _source(entry).name.endswith(_FAST_PATH)
            and not any(source.name in tensors for source in _chain(_source(entry)))
            for entry in entries
        ]

    hooks = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)  # one that is added later must run
    with hooks, get_metrics_context(), dynamo_timed("evocompile_guards", log_pt2_compile_event=True):
        capture = dynamo.output.graph_capture_output
        return capture.build_guards(dynamo.function.__code__, Hooks(guard_filter_fn=keep)).guard_manager


def _source(entry: GuardFilterEntry) -> Any:
    return entry.orig_guard.originating_source


def _chain(source: Any) -> Iterator[Any]:
    """A source, and the sources that it is read from."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def guards_hold(guards: Any, local_names: dict[str, Any]) -> bool:
    return bool(guards.check(local_names))


def failing_guard(guards: Any, local_names: dict[str, Any]) -> str | None:
    """The text of the first guard that does not hold, as Dynamo writes it."""
    result = guards.check_verbose(local_names)
    return None if result.result else "; ".join(map(str, result.verbose_code_parts))


# --- Dynamo: what went wrong ----------------------------------------------------------------------------------------

TraceError = TorchDynamoException


@dataclass(frozen=True)
class Explanation:
    """Why Dynamo gave up. kind: Dynamo's name of the situation; frames: the model's stack, outermost first.

    way_out: of a call that `flash_calls` refuses.
    """

    kind: str
    reason: str
    frames: list[traceback.FrameSummary]
    way_out: str = ""


def explain(error: TorchDynamoException) -> Explanation:
    """The reason of a failed `trace`, in one sentence."""
    frames = list(getattr(error, "real_stack", None) or [])
    text = str(getattr(error, "msg", None) or error)
    if isinstance(error, TorchRuntimeError):
        failure = re.search(r"got (\w+\(.*\))$", text, re.MULTILINE)
        reason = f"this operation fails with {failure[1]}" if failure else _first_line(error)
        return Explanation("runtime", reason, frames)
    if isinstance(error, UserError):
        return Explanation("data-dependent" if "data-dependent" in text else "user", _first_line(error), frames)
    raised = re.search(r"raised exception (.*)", text)
    if raised and isinstance(error, Unsupported) and error.gb_type == "Observed exception":
        return Explanation("raise", f"the model raises {_python_text(raised[1])}", frames)
    if getattr(error, "gb_type", "").startswith("Data-dependent assertion failed"):  # met for constants alone
        return Explanation("raise", "this assertion fails", frames)
    explanation = re.search(r"Explanation: (.*)", text)
    reason = explanation[1].strip() if explanation else _first_line(error)
    if not reason and error.__cause__ is not None:
        return Explanation("runtime", f"this operation fails with {error.__cause__!r}", frames)
    if isinstance(error, Unsupported) and error.gb_type == _REFUSED:
        hint = re.search(r"Hint: (.*)", text)
        return Explanation(_REFUSED, reason, frames, hint[1].strip() if hint else "")
    return Explanation(getattr(error, "gb_type", None) or type(error).__name__, reason, frames)


def unenterable_context(error: TorchDynamoException) -> traceback.FrameSummary | None:
    """Where Dynamo met a `with` statement that it cannot enter, such as that of a lock; `None` for other errors."""
    if not isinstance(error, Unsupported) or error.gb_type != "Unsupported context manager":
        return None
    return error.real_stack[-1] if error.real_stack else None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _python_text(dynamo_text: str) -> str:
    """ "ValueError([ConstantVariable(str: 'no')])" as Python writes it: "ValueError('no')"."""
    text = re.sub(r"\w+Variable\((?:\w+: )?('[^']*'|\"[^\"]*\"|[^()]*)\)", r"\1", dynamo_text)
    return re.sub(r"\(\[(.*)\]\)", r"(\1)", text)


# --- AOTAutograd: the joint graph ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JointGraph:
    """A functional graph of aten operators.

    Its placeholders are the inputs, then one tangent for each entry of `tangents`; it returns one flat list.

    tangents:  for each tangent the index of its output, or `None` for that of an input that is written to.
    mutations: input index -> position of its new value in the returned list.
    outputs:   position of each output in the returned list.
    gradients: input index -> position of its gradient in the returned list.
    """

    graph_module: fx.GraphModule
    tangents: list[int | None]
    mutations: dict[int, int]
    outputs: list[int]
    gradients: dict[int, int]


def export_joint(dynamo: DynamoGraph) -> JointGraph:
    """Forward and backward of Dynamo's graph as one graph of aten operators; the forward alone under `no_grad`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(dynamo.fake_mode)))
        # a tensor that the model reads from its globals is still a real one, and would get symbolic sizes
        inputs = [
            each if is_fake(each) else dynamo.fake_mode.from_tensor(each, static_shapes=True)
            for each in dynamo.example_inputs
        ]
        exported = aot_export_joint_with_descriptors(
            stack, dynamo.graph_module, tuple(inputs), decompositions=decompositions()
        )
    graph = exported.graph_module.graph
    tangents: list[int | None] = []
    for node in graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case TangentAOTInput(output=PlainAOTOutput(idx=index)):
                tangents.append(index)
            case TangentAOTInput():
                tangents.append(None)
            case PlainAOTInput():
                assert not tangents, "inputs come before tangents"
            case other:
                raise AssertionError(f"unexpected input of the joint graph: {other}")
    mutations, outputs, gradients = _output_positions(graph.output_node().meta["desc"])
    return JointGraph(exported.graph_module, tangents, mutations, outputs, gradients)


def _output_positions(descriptors: Sequence[Any]) -> tuple[dict[int, int], list[int], dict[int, int]]:
    mutations, outputs, gradients = {}, {}, {}
    for position, descriptor in enumerate(descriptors):
        match descriptor:
            case InputMutationAOTOutput(mutated_input=PlainAOTInput(idx=index)):
                mutations[index] = position
            case PlainAOTOutput(idx=index):
                outputs[index] = position
            case GradAOTOutput(grad_of=PlainAOTInput(idx=index)):
                gradients[index] = position
            case None:
                pass
            case other:
                raise AssertionError(f"unexpected output of the joint graph: {other}")
    assert sorted(outputs) == list(range(len(outputs)))
    return mutations, [outputs[index] for index in range(len(outputs))], gradients


def has_custom_backward(node: fx.Node) -> bool:
    """A custom autograd.Function or operator: its backward may give no gradient to an input on purpose."""
    if isinstance(node.target, HigherOrderOperator):
        return node.target.name() == "autograd_function_apply"
    overloads = isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return overloads and str(node.target).split(".")[0] not in ("aten", "prims", "evocompile")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's table, without what our passes want whole, and with what only its lowerings would take apart."""
    aten = torch.ops.aten
    table = dict(select_decomp_table())
    table.pop(aten.embedding_dense_backward.default, None)
    lowered = (aten.glu.default, aten.repeat.default, aten.unbind.int, aten.baddbmm.default)
    return {**table, **get_decompositions(lowered), **strided.DECOMPOSITIONS}


# --- communication ------------------------------------------------------------------------------------------------


def is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def graph_module(owner: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module that writes its Python when it is called or read, and not at each of a dozen changes before."""
    return _LazyGraphModule(owner, graph)


@contextlib.contextmanager
def unwritten_graph_modules() -> Iterator[None]:
    """Within, torch's own tracers make modules as `graph_module` does."""
    with _use_lazy_graph_module(True):
        yield


def arguments_by_name(operator: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator, with the defaults of those that are left out."""
    schema = operator._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return {**defaults, **dict(zip((each.name for each in schema), args, strict=False)), **kwargs}


def outside_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """A context in which operators on real tensors compute, even while a fake mode is active."""
    return unset_fake_temporarily()


def functional_works_pending() -> int:
    """Number of functional collectives of this process that are started and not waited for."""
    return torch._C._distributed_c10d._get_work_registry_size()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of a name as torch's functional collectives know it."""
    return c10d._resolve_process_group(c10d.GroupName(name))


def default_store() -> dist.Store:
    """The key-value store under which the default process group met."""
    return c10d._get_default_store()


def default_group_timeout() -> timedelta:
    """The time-out with which the default process group was made (`new_group` would take the library's own)."""
    group = c10d._get_default_group()
    return group._get_backend(group._device_types[0]).options._timeout


def backend_for(device: torch.device) -> str | None:
    """`None` (the default group's backend) if that serves the device, else torch's default for such devices."""
    group = c10d._get_default_group()
    serves = any(each.type == device.type for each in group._device_types)
    return None if serves else dist.get_default_backend_for_device(device)


def use_one_worker(group: dist.ProcessGroup) -> None:
    """Carry out a gloo group's collectives on CPU by one worker thread instead of two; collective over the group.

    After a collective the worker writes the operator's name into a string of the group, without a lock (in torch 2.13).
    Names over 15 letters lie on the heap. So where both workers end gathers by torch's functional operator, as
    `DTensor` makes them ("ALLGATHER_COALESCED"), one name may be freed twice, which aborts the process. To wait for
    each gather is no help: the wait ends before the name is written.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads = 1
    options._timeout = default_group_timeout()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    store = dist.PrefixStore(f"{group.group_name}/one worker/", default_store())
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)


# --- tensors -------------------------------------------------------------------------------------------------------


def wrapper_tensor(
    cls: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Any:
    """A tensor of subclass `cls` without storage, contiguous; autograd sees it as a leaf."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)


# --- Inductor --------------------------------------------------------------------------------------------------------


CompiledSegment = tuple[Callable[[list[Tensor]], Sequence[Tensor]], list[tuple[int, ...]]]


def inductor_cache_folder() -> str:
    """Where Inductor keeps what it compiled, on this machine."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


@without_function_modes()
def compile_with_inductor(graph: fx.Graph) -> CompiledSegment:
    """Compile a functional graph that returns a tuple, without autograd, and the strides that its outputs will have.

    graph: placeholders carry fake values in "val"; inputs must come with their shapes and strides. What our passes
           wanted whole is decomposed now.
    The function empties the list that it is given. Results are kept in Inductor's cache on disk (on by default).
    """
    from torch._inductor.compile_fx import compile_fx_inner  # takes seconds to import
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    planned = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad(), torch._C._DisableAutocast(), mode:
        inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in planned]
        whole = fx.GraphModule(nn.Module(), graph)
        module = make_fx(lambda *args: whole(*args), decomposition_table=select_decomp_table())(*inputs)
    with torch.no_grad(), torch._C._DisableAutocast(), tracing(TracingContext(mode)), V.set_fake_mode(mode):
        devices = [node.meta["val"].device for node in module.graph.nodes if is_fake(node.meta.get("val"))]
        module = joint_graph_passes(module, devices[0])
        output = module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # keep the outputs' strides
        traced = [tuple(node.meta["val"].stride()) for node in output.args[0]]
        compiled = compile_fx_inner(module, inputs, is_inference=True, cudagraphs=BoxedBool(False))
    if not isinstance(compiled, CompiledFxGraph):  # nothing was left to compute
        return compiled, traced
    assert compiled.output_strides is not None
    pairs = zip(compiled.output_strides, traced, strict=True)
    return compiled, [own if found is None else tuple(map(int, found)) for found, own in pairs]


def take_saved_tensors(ctx: Any) -> list[Tensor]:
    """The tensors that an `autograd.Function` saved, freed from it unless the graph is retained.

    Autograd itself would hold all of them until the function's backward returns. (The public
    `clear_saved_tensors_on_access` does not heed `retain_graph`.)
    """
    saved = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


def implementation(operator: Any) -> Callable[..., Any]:
    """The Python function of a custom operator, which runs further operators."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[operator._schema.name]._init_fn
