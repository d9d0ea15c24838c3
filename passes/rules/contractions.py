"""Matrix products."""

from __future__ import annotations

import torch
from torch import fx

from .base import Dims, Rule, operands_of, shape_of
from .pointwise import broadcast_labels

aten = torch.ops.aten

_EITHER = (frozenset({0}), frozenset({1}))


def mm(_: fx.Node) -> Dims:
    return Dims(
        operands=((("m",), ("k",)), (("k",), ("n",))),
        results=((("m",), ("n",)),),
        summed=frozenset({"k"}),
        linear=_EITHER,
        seeds=True,
    )


def bmm(_: fx.Node) -> Dims:
    return Dims(
        operands=((("b",), ("m",), ("k",)), (("b",), ("k",), ("n",))),
        results=((("b",), ("m",), ("n",)),),
        summed=frozenset({"k"}),
        linear=_EITHER,
        seeds=True,
    )


def mv(_: fx.Node) -> Dims:
    return Dims(((("m",), ("k",)), (("k",),)), ((("m",),),), summed=frozenset({"k"}), linear=_EITHER, seeds=True)


def dot(_: fx.Node) -> Dims:
    return Dims(((("k",),), (("k",),)), ((),), summed=frozenset({"k"}), linear=_EITHER, seeds=True)


def addmm(node: fx.Node) -> Dims:
    """bias + a @ b. Where the contraction is split, the bias is added by one rank (`emit.py`)."""
    bias, a, b = operands_of(node)
    result = (shape_of(a)[0], shape_of(b)[1])
    names = {"d0": "m", "d1": "n"}
    bias_labels = tuple(tuple(names[label] for label in dim) for dim in broadcast_labels(shape_of(bias), result))
    return Dims(
        operands=(bias_labels, (("m",), ("k",)), (("k",), ("n",))),
        results=((("m",), ("n",)),),
        summed=frozenset({"k"}),
        seeds=True,
    )


RULES: dict[object, Rule] = {
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.mv.default: mv,
    aten.dot.default: dot,
    aten.addmm.default: addmm,
}
