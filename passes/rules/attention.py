"""The attention operators: queries and keys may both be split over the sequence, `split_attention` exchanges blocks.

They do not fit the labels of `base.py` (queries and keys are two dims over one mesh axis, which nothing else may
have), so they come with a solution of their own. Letters: B batch, H query heads, K key/value heads, S queries,
T keys, D and E head dims of q/k and v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from evocompile.layout import Dim, Factor, Layout, Split

from .base import operands_of, shape_of
from .solve import Solution

ATTENTION = torch.ops.evocompile.attention.default
ATTENTION_BACKWARD = torch.ops.evocompile.attention_backward.default

# dims of the leading operands, before the tables
_OPERANDS = {ATTENTION: ("BHSD", "BKTD", "BKTE"), ATTENTION_BACKWARD: ("BHSE", "BHSD", "BKTD", "BKTE", "BHSE", "BHS")}
_RESULTS = {ATTENTION: ("BHSE", "BHS"), ATTENTION_BACKWARD: ("BHSD", "BKTD", "BKTE")}


def attention_solution(node: fx.Node, layouts: list[Layout], splits: Mapping[str, Split]) -> Solution:
    """Batch may be split; queries may be split; keys may be split if the queries are split over the same mesh axis.

    With whole keys and split queries every rank has a partial gradient of the keys.
    """
    operands = operands_of(node)
    leading, results = _OPERANDS[node.target], _RESULTS[node.target]
    dims: dict[str, Dim] = {}
    for letters, operand, layout in zip(leading, operands, layouts, strict=False):
        for letter, size, dim in zip(letters, shape_of(operand), layout.dims, strict=True):
            seeded = _seeded(dim, splits) if letter in "BST" else None
            dims[letter] = seeded or dims.get(letter) or (Factor(size),)
    if not _same_mesh_axis(dims["S"], dims["T"], splits):
        dims["T"] = tuple(replace(factor, split=False) for factor in dims["T"])

    def layout_of(letters: str, partial: frozenset[str] = frozenset()) -> Layout:
        return Layout(tuple(dims[letter] for letter in letters), partial)

    keys_partial: frozenset[str] = frozenset()
    if not any(factor.split for factor in dims["T"]):
        keys_partial = frozenset(splits[f.axis.name].mesh_axis for f in dims["S"] if f.split and f.axis)
    tables = tuple(
        Layout((dims["B"] if shape_of(table)[0] > 1 else (Factor(1),), (Factor(shape_of(table)[1]),)))
        for table in operands[len(leading) :]
    )
    return Solution(
        (*(layout_of(letters) for letters in leading), *tables),
        tuple(layout_of(letters, keys_partial if "K" in letters else frozenset()) for letters in results),
    )


def _seeded(dim: Dim, splits: Mapping[str, Split]) -> Dim | None:
    """The dim split on its named axis, if it is one."""
    if len(dim) == 1 and dim[0].axis is not None and dim[0].axis.name in splits:
        return (replace(dim[0], split=True),)
    return None


def _same_mesh_axis(queries: Dim, keys: Dim, splits: Mapping[str, Split]) -> bool:
    axes = [[splits[f.axis.name].mesh_axis for f in dim if f.split and f.axis] for dim in (queries, keys)]
    return axes[0] == axes[1]
