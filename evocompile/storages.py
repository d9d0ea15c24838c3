"""Which values of a graph share memory: views, waits and unpacked buffers have that of what they look at."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .collectives import STARTS, exchange_start, is_start, is_wait, sends_parts, start_arguments, unpack
from .offload import fetch_wait, to_host
from .program import nbytes, placeholders

COMMUNICATION = "communication"
TEMPORARIES = "temporaries"


@dataclass(eq=False)
class Storage:
    """Memory of one tensor and its views. holders: values and others that keep it alive, `wires` of them
    communications under way. node: that made it.
    """

    bytes: int
    term: str
    what: str
    node: fx.Node | None = None
    holders: int = 0
    wires: int = 0
    counted: bool = False
    on_host: bool = False  # and so none of the device's


Value = Any  # of a node: a storage, a list of values, or None


def storages(value: Value) -> Iterator[Storage]:
    if isinstance(value, Storage):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from storages(each)


def values_of(graph: fx.Graph, given: Sequence[Value]) -> dict[fx.Node, Value]:
    """For each node its memory: new, or that of what it is a view of."""
    values: dict[fx.Node, Value] = dict(zip(placeholders(graph), given, strict=True))
    for node in graph.nodes:
        if node.op == "get_attr":
            values[node] = None  # a constant of the program
        elif node.op == "call_function":
            values[node] = _value(node, values)
    return values


def _value(node: fx.Node, values: dict[fx.Node, Value]) -> Value:
    if node.target is operator.getitem:
        return values[node.args[0]][node.args[1]]  # type: ignore[index]
    source = node.args[0] if node.args else None
    result = node.meta.get("val")
    if node.target is to_host:
        return Storage(nbytes(node.meta["val"]), TEMPORARIES, node.name, node, on_host=True)
    if isinstance(result, Tensor) and is_start(node) and sends_parts(node):  # there arrive the parts of all others
        others = start_arguments(node, node.args, node.kwargs)["group_size"] - 1
        return Storage(nbytes(result) * others, COMMUNICATION, node.name, node)
    if isinstance(result, Tensor) and is_wait(node) and isinstance(source, fx.Node) and sends_parts(source):
        (received,) = storages(values[source])
        return received if received.bytes == nbytes(result) else _new(result, COMMUNICATION, node)
    if isinstance(source, fx.Node) and (
        is_wait(node) or node.target is fetch_wait or node.target is unpack or is_view(node, source)
    ):
        return [values[source]] * len(result) if isinstance(result, (list, tuple)) else values[source]
    return _new(result, COMMUNICATION if is_start(node) else TEMPORARIES, node)


def _new(result: Any, term: str, node: fx.Node) -> Value:
    if isinstance(result, Tensor):
        return Storage(nbytes(result), term, node.name, node)
    return [_new(each, term, node) for each in result] if isinstance(result, (list, tuple)) else None


def is_view(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node's value has the memory of its source's. A reshape has, if strides allow."""
    if node.target in (torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default):
        given, result = source.meta["val"], node.meta["val"]
        meta = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")
        return meta.reshape(result.shape).untyped_storage()._cdata == meta.untyped_storage()._cdata
    return bool(getattr(node.target, "is_view", False))


def wire_of(start: fx.Node, values: dict[fx.Node, Value]) -> list[Storage]:
    """What a communication reads until its wait: its input, or the buffer into which an exchange packs several.

    Not the input of an all_reduce, which works on its result.
    """
    arguments = start_arguments(start, start.args, start.kwargs)
    if start.target is not exchange_start:
        kind = STARTS[start.target][0]  # type: ignore[index]
        return [] if kind == "all_reduce" else list(storages(values[arguments["input"]]))
    tensors = arguments["tensors"]
    if arguments["destination"] < 0 or not tensors:
        return []
    if len(tensors) == 1 and tensors[0].meta["val"].is_contiguous():
        return list(storages(values[tensors[0]]))
    return [Storage(sum(nbytes(each.meta["val"]) for each in tensors), COMMUNICATION, start.name, start)]


def is_dense(value: Tensor) -> bool:
    """Whether its elements lie side by side, in any order of dims."""
    dims = sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1)
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return False
        expected *= size
    return value.numel() > 0
