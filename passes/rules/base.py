"""What a sharding rule is: which dims of an operator's operands and results run together.

A rule gives every dim of every tensor operand and result a tuple of *labels*, as einsum does; a dim that is viewed
from several others has several. From the labels alone one solver (`solve.py`) carries layouts forward (operands to
results) and pulls them back (a wanted part of the result to the parts of the operands), so an operator needs no
more than its labels, and the backward graph needs no rules of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

Labels = tuple[str, ...]
TensorLabels = tuple[Labels, ...]


@dataclass(frozen=True)
class Dims:
    """The labels of one node.

    operands: for each tensor operand (in the order of `operands_of`), the labels of each of its dims; () for a dim
              that is broadcast.
    results:  the same for each result.
    summed:   labels that are summed over: split, they leave a partial result.
    whole:    labels along which the operator needs all positions at once.
    found:    of `whole`, those of an operand that indices look up: split over tp, each rank finds what is among its own
              positions, and the result is partial (`emit.py`).
    folded:   of `whole`, those that are reduced by what the ranks' results can be reduced with again (a maximum): split
              over tp, the operator communicates (`emit.py`).
    linear:   sets of operands in which the operator is jointly linear while the others are constant: partial values
              in exactly one such set pass through.
    sizes:    sizes of the labels, where a dim has more than one.
    seeds:    the operator starts sharding: an index with named axes gives an activation that is split on them.
    starts:   as `seeds`, and what comes out is the stream of tokens itself, which tp splits further.
    """

    operands: tuple[TensorLabels, ...]
    results: tuple[TensorLabels, ...]
    summed: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    found: frozenset[str] = frozenset()
    folded: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    seeds: bool = False
    starts: bool = False


Rule = Callable[[fx.Node], "Dims | None"]


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a node in argument order, repeated where they are repeated."""
    found: list[fx.Node] = []

    def visit(operand: fx.Node) -> fx.Node:
        found.append(operand)
        return operand

    fx.node.map_arg((node.args, node.kwargs), visit)
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def result_shapes(node: fx.Node) -> list[tuple[int, ...] | None]:
    """Shapes of the results; None for a result that is no tensor. An assertion has none."""
    value = node.meta["val"]
    if value is None:
        return []
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in values]


def numbered(prefix: str, count: int) -> TensorLabels:
    return tuple((f"{prefix}{i}",) for i in range(count))


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an ATen call, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def normal_dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def label_sizes(dims: Dims, node: fx.Node) -> dict[str, int]:
    """Size of every label: given where a dim has several, read off the shapes where it has one."""
    sizes = dict(dims.sizes)
    for labels, size in _labelled_dims(dims, node):
        if len(labels) == 1:
            sizes.setdefault(labels[0], size)
    return sizes


def _labelled_dims(dims: Dims, node: fx.Node) -> Iterator[tuple[Labels, int]]:
    for tensor, operand in zip(dims.operands, operands_of(node), strict=True):
        yield from zip(tensor, shape_of(operand), strict=True)
    for tensor, shape in zip(dims.results, result_shapes(node), strict=True):
        if shape is not None:
            yield from zip(tensor, shape, strict=True)
