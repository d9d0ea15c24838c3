"""Convolutions of any number of dims: each sample by itself, all channels and places at once."""

from __future__ import annotations

import torch
from torch import fx

from .base import Dims, Rule, TensorLabels, operands_of, result_shapes, shape_of

aten = torch.ops.aten


def _sample(rank: int, kind: str) -> TensorLabels:
    """(N, channels, places…): samples run together, the rest is whole."""
    return (("n",), *((f"{kind}{dim}",) for dim in range(1, rank)))


def _whole(*tensors: TensorLabels) -> frozenset[str]:
    return frozenset(label for tensor in tensors for dim in tensor for label in dim) - {"n"}


def convolution(node: fx.Node) -> Dims:
    """x (N, C, …), weight (O, C / groups, …), and often a bias (O,) -> (N, O, …)."""
    x, weight, *bias = (len(shape_of(operand)) for operand in operands_of(node))
    operands = (_sample(x, "x"), _parameter(weight, "weight"), *(_parameter(rank, "bias") for rank in bias))
    result = _sample(x, "result")
    linear = (frozenset({0}), frozenset({1})) if not bias else ()
    return Dims(operands, (result,), whole=_whole(*operands, result), linear=linear, seeds=True)


def convolution_backward(node: fx.Node) -> Dims:
    """d_out, x, weight -> d_x, d_weight, d_bias, those that are asked for: the last two are sums over samples."""
    d_out, x, weight = (len(shape_of(operand)) for operand in operands_of(node))
    operands = (_sample(d_out, "result"), _sample(x, "x"), _parameter(weight, "weight"))
    asked = result_shapes(node)
    wanted = (_sample(x, "x"), _parameter(weight, "weight"), (("bias",),))
    results = tuple(() if shape is None else labels for shape, labels in zip(asked, wanted, strict=True))
    return Dims(
        operands,
        results,
        summed=frozenset({"n"}),
        whole=_whole(*operands, *results),
        seeds=True,
    )


def _parameter(rank: int, kind: str) -> TensorLabels:
    return tuple((f"{kind}{dim}" if rank > 1 else kind,) for dim in range(rank))


RULES: dict[object, Rule] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
