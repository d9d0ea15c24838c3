"""Makes attention canonical on Dynamo's graph, before AOT decomposes it.

Every call of `scaled_dot_product_attention` becomes `evocompile::dense_attention` on q (B, H, S, D), k (B, Hk, T, D),
v (B, Hk, T, E). Key/value heads that the model repeats to H (transformers' `repeat_kv`, `repeat_interleave`) are taken
before the repetition, so that they are exchanged once. What the operator cannot say exactly is refused.
"""

from __future__ import annotations

import math
import operator
from contextlib import nullcontext
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx

from evocompile.errors import CaptureError
from evocompile.kernels.score import S
from evocompile.program import source_line

from . import written_attention
from .build import fake_mode_of
from .einsum_products import operands_of, write_as_matmul
from .flex_forms import is_flex, read_flex
from .written_attention import Leaves, Written

_SDPA = torch.nn.functional.scaled_dot_product_attention
_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def make_attention_canonical(gm: fx.GraphModule) -> None:
    """Rewrites the graph in place. Raises CaptureError, with the model's line, for an attention that is not built.

    Bodies of regions (activation checkpoints) are graphs of their own inside the graph, and are rewritten too.
    """
    for body in [each for each in gm.modules() if isinstance(each, fx.GraphModule)]:
        for node in body.graph.find_nodes(op="call_function", target=_SDPA):
            _replace_sdpa(node)
        for node in [each for each in body.graph.nodes if is_flex(each)]:
            _replace_flex(node)
        softmaxes = written_attention.softmaxes(body.graph)
        if softmaxes:
            _erase_unread(body.graph)
            for node in [each for each in body.graph.nodes if _is(each, "einsum")]:
                _replace_einsum(node)
        for softmax in softmaxes:
            _replace_written(softmax)
        body.graph.lint()
        body.recompile()


def _replace_sdpa(node: fx.Node) -> None:
    given: dict[str, Any] = {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    q, k, v, mask = (given.get(name) for name in _PARAMETERS[:4])
    assert q is not None and k is not None and v is not None
    _check(node, q, k, v, mask, given)
    scale = given.get("scale")
    scale = 1 / math.sqrt(_shape(q)[-1]) if scale is None else float(scale)
    without_heads = len(_shape(q)) == 3
    unused = k, v
    if without_heads:
        q, k, v = (_before(node, torch.unsqueeze, each, 1) for each in (q, k, v))
        mask = _before(node, torch.unsqueeze, mask, 1) if mask is not None and len(_shape(mask)) == 3 else mask
    is_causal, dropout = bool(given.get("is_causal", False)), float(given.get("dropout_p", 0.0))
    leaves = Leaves()
    score: sympy.Expr = S
    if mask is not None and _fake(mask).is_floating_point():
        score, mask = S + leaves.symbol(mask, 4), None
    found = Written(
        node, q, k, v, _shape(q)[1], scale, score, leaves, dropout, mask=mask, is_causal=is_causal
    )  # fmt: skip
    _write(found)
    _erase_unused(node)
    for each in unused:
        _erase_unused(each)


def _replace_flex(node: fx.Node) -> None:
    def make(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return _before(node, target, *args, **kwargs)

    try:
        found = read_flex(node, make)
        _write(found)
    except written_attention.NotAttention as reason:
        _refuse(node, f"flex_attention: {reason}. Write it with the positions, tables and the score alone")
    _erase_unused(found.result)


def _write(found: Written) -> None:
    """Puts the operator into the place of what was found."""

    def call(target: Any, *args: Any) -> fx.Node:
        return _before(found.result, target, *args)

    written_attention.replace(found, call, call, _unrepeated)


def _replace_einsum(node: fx.Node) -> None:
    """Writes a product of two tensors as `matmul`."""
    operands = operands_of(node)

    def call(target: Any, *args: Any) -> fx.Node:
        return _before(node, target, *args)

    made = write_as_matmul(node, call, operands, [len(_shape(each)) for each in operands])
    if made is not None:
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)


def _replace_written(softmax: fx.Node) -> None:
    """Makes the attention around a softmax canonical, if it is one."""
    try:
        found = written_attention.match(softmax)
        _write(found)
    except written_attention.NotAttention:
        return
    _erase_unused(found.result)


def _erase_unread(graph: fx.Graph) -> None:
    """Erases what nothing reads: weights of `nn.MultiheadAttention` that the model averages and drops, say.

    An operator that writes to its operand stays.
    """
    for node in reversed(graph.nodes):
        if not node.users and _is(node, "mean", "sum", "view", "reshape", "squeeze", "detach", "div", "select"):
            graph.erase_node(node)


def _erase_unused(node: fx.Node) -> None:
    """Erases what was computed for the weights alone; what else the graph does stays."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.users or each.op not in ("call_function", "call_method") or each._erased:
            continue
        waiting += each.all_input_nodes
        each.graph.erase_node(each)


def _check(node: fx.Node, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, given: dict[str, Any]) -> None:
    """Refuses what `dense_attention` does not do. torch itself has checked what it checks, at capture."""
    if isinstance(given.get("dropout_p"), fx.Node):
        _refuse(node, "the probability of dropout is computed in the model; make it a number")
    shapes = [_shape(each) for each in (q, k, v)]
    if {len(shape) for shape in shapes} not in ({3}, {4}):
        _refuse(node, f"attention on shapes {shapes} is not built; make them (batch, heads, sequence, head size)")
    if len({shape[0] for shape in shapes}) > 1:
        _refuse(node, f"batch sizes differ between query, key and value ({shapes}); expand them to one size")
    if len(shapes[0]) == 4 and (shapes[1][1] != shapes[2][1] or shapes[0][1] % shapes[1][1]):
        _refuse(node, f"numbers of heads {shapes} do not fit; repeat key and value heads to a divisor of the query's")
    if isinstance(given.get("scale"), fx.Node):
        _refuse(node, "the scale is computed in the model; multiply the queries with it and pass scale=1.0")


def _refuse(node: fx.Node, reason: str) -> NoReturn:
    raise CaptureError(f"{source_line(node)}\n  {reason}")


def _fake(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(_fake(node).shape)


def _before(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Inserts a call of a function, or of a method by its name, before the node and as from its source line."""
    fakes, named = fx.map_arg(args, _fake), fx.map_arg(kwargs, _fake)
    mode = fake_mode_of(node.graph, "example_value") or nullcontext()
    with node.graph.inserting_before(node), mode:
        if isinstance(target, str):
            made, value = node.graph.call_method(target, args, kwargs), getattr(fakes[0], target)(*fakes[1:], **named)
        else:
            made, value = node.graph.call_function(target, args, kwargs), target(*fakes, **named)
    made.meta = {**node.meta, "example_value": value}
    return made


# ---- repeated key/value heads


def _unrepeated(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Key and value before their heads are repeated, if both are repeated alike; else as they are."""
    few_k, few_v = _before_repetition(k), _before_repetition(v)
    if few_k is None or few_v is None or _shape(few_k)[1] != _shape(few_v)[1]:
        return k, v
    return few_k, few_v


def _before_repetition(node: fx.Node) -> fx.Node | None:
    """(B, Hk, T, D) of a (B, n·Hk, T, D) whose head h is head h // n; `None` where that is not seen."""
    node = _without_copies(node)
    if not _swaps_heads(node):
        return _repeated(node, 1)
    few = _repeated(_without_copies(node.all_input_nodes[0]), 2)
    return None if few is None else _before(node, "transpose", few, 1, 2)


def _swaps_heads(node: fx.Node) -> bool:
    """(B, T, H, D) to (B, H, T, D)."""
    if not _is(node, "transpose", "permute", "swapaxes") or len(_shape(node)) != 4 or node.kwargs:
        return False
    dims = node.args[1:]
    if isinstance(dims[0], (list, tuple)):
        dims = tuple(dims[0])
    numbers = [int(dim) % 4 for dim in dims]  # type: ignore[call-overload]
    return numbers == [0, 2, 1, 3] or sorted(numbers) == [1, 2]


def _repeated(node: fx.Node, dim: int) -> fx.Node | None:
    """The 4-D tensor whose every index of this dim stands n times in the node, one after the other."""
    if _is(node, "repeat_interleave"):
        given = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | node.kwargs
        repeats, own = given["repeats"], given.get("dim")
        source = node.all_input_nodes[0]
        return source if isinstance(repeats, int) and own in (dim, dim - 4) and len(_shape(source)) == 4 else None
    if not _is(node, "reshape", "view", "flatten"):
        return None
    expanded = _without_copies(node.all_input_nodes[0])
    if not _is(expanded, "expand", "repeat"):
        return None
    inserted = expanded.all_input_nodes[0]
    if not _inserts(inserted, dim + 1):
        return None
    source = inserted.all_input_nodes[0]
    sizes = list(_shape(source))
    repeats = _shape(expanded)[dim + 1] if len(_shape(expanded)) == 5 else 0
    alike = list(_shape(expanded)) == [*sizes[: dim + 1], repeats, *sizes[dim + 1 :]]
    return source if alike and list(_shape(node)) == [*sizes[:dim], sizes[dim] * repeats, *sizes[dim + 1 :]] else None


def _without_copies(node: fx.Node) -> fx.Node:
    while _is(node, "contiguous", "clone"):
        node = node.all_input_nodes[0]
    return node


def _is(node: fx.Node, *names: str) -> bool:
    """Whether a node calls a tensor method or torch function of one of these names."""
    if node.op == "call_method":
        return node.target in names
    return node.op == "call_function" and any(node.target is getattr(torch, name, None) for name in names)


def _inserts(node: fx.Node, dim: int) -> bool:
    """x.unsqueeze(dim), or x[:, :, None, …], of a 4-D x."""
    if not node.all_input_nodes or len(_shape(node)) != 5:
        return False
    if _is(node, "unsqueeze"):
        return (*node.args[1:], *node.kwargs.values()) in ((dim,), (dim - 5,))
    if node.op != "call_function" or node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    whole = slice(None)
    first, others = node.args[1][: dim + 1], node.args[1][dim + 1 :]
    return first == ((whole,) * dim + (None,)) and all(each is Ellipsis or each == whole for each in others)
